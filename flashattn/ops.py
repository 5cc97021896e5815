"""How PyTorch sees the Triton kernels: operators with fakes, autograd and vmap.

``torch.ops.flashattn.forward`` and ``.backward`` are opaque to ``torch.compile``, which keeps them
whole. Triton is imported, and a kernel compiled, when it is first called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from flashattn.bounds import Bounds
from flashattn.dispatch import dispatch_is_trivial, has_tangents, no_forward_mode
from flashattn.gpus import why_not
from flashattn.mask import UNBOUNDED, Causal, Mask, Window
from flashattn.plan.precision import input_precision
from flashattn.plan.spec import Family, Options, Signature, signature
from flashattn.problem import ALIGNMENT, Problem, check_scale

MOST_BACKWARDS = 16  # of a forward, by where gradients and saved tensors lie

Outputs = tuple[torch.Tensor, torch.Tensor]
Attend = Callable[..., Outputs]  # of q, k and v, and of bounds if there are some
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Differentiate = Callable[..., Gradients]


@cache
def _execute() -> ModuleType:
    """Return the module that launches; it imports Triton."""
    from flashattn.kernels import execute  # noqa: PLC0415

    return execute


# Not ``torch.library.custom_op``: the Python that it puts around each call costs the host more than
# the launch. What it would add, these operators have below: fakes, autograd and vmap.
_LIBRARY = torch.library.Library("flashattn", "DEF")
_LIBRARY.define(
    "forward(Tensor q, Tensor k, Tensor v, Tensor? key_bounds, Tensor? query_bounds, SymInt? left,"
    " SymInt? right, float scale, float? softcap, str precision, str family, bool deterministic)"
    " -> (Tensor o, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    "backward(Tensor grad_o, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse,"
    " Tensor? key_bounds, Tensor? query_bounds, SymInt? left, SymInt? right, float scale,"
    " float? softcap, str precision, str family, bool deterministic)"
    " -> (Tensor dq, Tensor dk, Tensor dv)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_forward = torch.ops.flashattn.forward.default
_backward = torch.ops.flashattn.backward.default


def _launch_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_bounds: torch.Tensor | None,
    query_bounds: torch.Tensor | None,
    *how: Any,
) -> Outputs:
    bounds = _bounds(key_bounds, query_bounds)
    attend: Attend = _execute().prepare_forward(q, k, v, _options(q.dtype, bounds, *how))
    return attend(q, k, v, *bounds)


def _launch_backward(
    grad_o: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    key_bounds: torch.Tensor | None,
    query_bounds: torch.Tensor | None,
    *how: Any,
) -> Gradients:
    bounds = _bounds(key_bounds, query_bounds)
    prepared: Differentiate = _execute().prepare_backward(
        (grad_o, grad_lse), (q, k, v, o, lse), _options(q.dtype, bounds, *how)
    )
    return prepared(q, k, v, grad_o, o, lse, grad_lse, *bounds)


def _bounds(
    key_bounds: torch.Tensor | None, query_bounds: torch.Tensor | None
) -> Bounds | tuple[()]:
    """Return the bounds that an operator was given, if it was."""
    if key_bounds is None or query_bounds is None:
        return ()
    return Bounds(key_bounds, query_bounds)


def _options(
    dtype: torch.dtype,
    bounds: Sequence[torch.Tensor],
    left: int | None,
    right: int | None,
    scale: float,
    softcap: float | None,
    precision: str,
    family: Family,
    deterministic: bool,  # noqa: FBT001 - torch's operators are called by position
) -> Options:
    """Return what plans depend on; the arguments are those of an operator."""
    precise, batches = input_precision(precision, dtype), bounds[0].shape[0] if bounds else 0
    return Options(right, scale, precise, family, deterministic, left, softcap, batches)


def _like_dense(x: torch.Tensor) -> torch.Tensor:
    """Return what the kernels allocate for x, which they copy if its last dimension is not dense.

    They ask for strides; a compiler for symbolic sizes must decide this branch, too.
    """
    return torch.empty_like(x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous())


@torch.library.register_fake("flashattn::forward", lib=_LIBRARY)
def _(q: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return _like_dense(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.register_fake("flashattn::backward", lib=_LIBRARY)
def _(
    grad_o: torch.Tensor,
    grad_lse: object,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *_: object,
) -> Gradients:
    del grad_o, grad_lse
    return _like_dense(q), _like_dense(k), _like_dense(v)


def _run_forward(*inputs: Any) -> Outputs:
    """Launch, where gradients are not wanted or somebody else takes care of them."""
    if dispatch_is_trivial(*inputs[:5]):
        return _launch_forward(*inputs)
    with torch._C._AutoDispatchBelowAutograd():  # noqa: SLF001 - torch.library has no other word
        return _forward(*inputs)


def _run_backward(*inputs: Any) -> Gradients:
    """Launch likewise."""
    if dispatch_is_trivial(*inputs[:9]):
        return _launch_backward(*inputs)
    with torch._C._AutoDispatchBelowAutograd():  # noqa: SLF001
        return _backward(*inputs)


class Prepared:
    """Our kernels, for inputs like those they were chosen for.

    Args:
        attend: of q, k and v: launches.
        options: what operators take beside tensors.
    """

    def __init__(self, attend: Attend, options: tuple[Any, ...]) -> None:
        """Know no gradients yet."""
        self.attend, self.options = attend, options
        self._backwards: dict[tuple[object, ...], Any] = {}

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: Bounds | tuple[()] = ()
    ) -> Outputs:
        """Return o and lse, past the dispatcher."""
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return _apply_directly(self, q, k, v, *bounds)
        return self.attend(q, k, v, *bounds)

    def backward(self, grads: Any, saved: Any) -> Gradients:
        """Return the gradients of q, k and v.

        Autograd keeps sizes, dtypes and devices. Hooks of saved tensors, such as one that moves
        them to the CPU and back, may change strides and addresses; torch's setting for fp32
        products may be another by now.
        """
        (grad_o, grad_lse), (q, k, v, o, lse, *bounds) = grads, saved
        if torch.is_grad_enabled() or not dispatch_is_trivial(grad_o, grad_lse, *saved):
            return _backward(*grads, *_with_bounds(saved), *self.options)
        key = (
            q.stride(), q.data_ptr() % ALIGNMENT, k.stride(), k.data_ptr() % ALIGNMENT,
            v.stride(), v.data_ptr() % ALIGNMENT, o.stride(), o.data_ptr() % ALIGNMENT,
            lse.stride(), lse.data_ptr() % ALIGNMENT,
            grad_o.stride(), grad_o.data_ptr() % ALIGNMENT,
            grad_lse if grad_lse is None else (grad_lse.stride(), grad_lse.data_ptr() % ALIGNMENT),
            q.dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision,
        )  # fmt: skip
        plan = self._backwards.get(key)
        if plan is None:
            options = _options(q.dtype, bounds, *self.options)
            plan = _execute().prepare_backward(grads, (q, k, v, o, lse), options)
            if len(self._backwards) >= MOST_BACKWARDS:
                self._backwards.clear()
            self._backwards[key] = plan
        return plan(q, k, v, grad_o, o, lse, grad_lse, *bounds)


def _with_bounds(saved: Any) -> Any:
    """Return q, k, v, o and lse, and bounds, or None in their place, as an operator takes them."""
    return (*saved, None, None) if len(saved) == 5 else saved  # noqa: PLR2004


class _Dispatched(NamedTuple):
    """The operators, below autograd; for an autograd function in place of ``Prepared``."""

    options: tuple[Any, ...]

    def attend(self, *inputs: torch.Tensor | None) -> Outputs:
        return _below_autograd(_forward, *inputs, *self.options)

    def backward(self, grads: Any, saved: Any) -> Gradients:
        return _backward(*grads, *_with_bounds(saved), *self.options)


class _Differentiable(torch.autograd.Function):
    """Forward, with the backward operator as its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        prepared: Prepared | _Dispatched,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *bounds: torch.Tensor | None,
    ) -> Outputs:
        o, lse = prepared.attend(q, k, v, *bounds)
        ctx.prepared, ctx.absent = prepared, (None,) * len(bounds)
        ctx.save_for_backward(q, k, v, o, lse, *(x for x in bounds if x is not None))
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(
        ctx: Any, grad_o: torch.Tensor | None, grad_lse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors
        grad_o = torch.zeros_like(saved[3]) if grad_o is None else grad_o
        return None, *ctx.prepared.backward((grad_o, grad_lse), saved), *ctx.absent


# Past what ``Function.apply`` does for function transforms, which takes it as long as the rest.
_apply_directly = super(torch.autograd.Function, _Differentiable).apply


class _Once(torch.autograd.Function):
    """The backward operator, which has no gradient of its own."""

    @staticmethod
    def forward(ctx: Any, dispatched: _Dispatched, *inputs: Any) -> Gradients:
        del ctx
        gradients: Gradients = _below_autograd(_backward, *inputs, *dispatched.options)
        return gradients

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> None:
        del ctx, grads
        msg = 'the Triton attention has no second derivative; impl="reference" has'
        raise NotImplementedError(msg)


def _below_autograd(op: Any, *inputs: Any) -> Any:
    """Call an operator from an autograd function, which has switched all gradients off.

    Those of outer function transforms are still wanted.
    """
    with (
        torch._C._AutoDispatchBelowAutograd(),  # noqa: SLF001
        torch.enable_grad(),
        forward_ad._set_fwd_grad_enabled(True),  # noqa: FBT003, SLF001
    ):
        return op(*inputs)


def _autograd(run: Any, function: Any, tensors: int) -> Any:
    """Return what ``run`` does where gradients may be wanted of its first ``tensors`` arguments.

    The dispatcher calls it once for each level of ``torch.func.grad``, so that the autograd
    function is of one level.
    """
    apply = super(torch.autograd.Function, function).apply

    def kernel(*inputs: Any) -> Any:
        given = [x for x in inputs[:tensors] if x is not None]
        if has_tangents(*given):
            raise no_forward_mode("the Triton attention")
        if not (torch.is_grad_enabled() and any(x.requires_grad for x in given)):
            return run(*inputs)
        with enable_single_level_autograd_function():
            return apply(_Dispatched(inputs[tensors:]), *inputs[:tensors])

    return kernel


for _name, _kernel in {"forward": _launch_forward, "backward": _launch_backward}.items():
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
_LIBRARY.impl("forward", _autograd(_run_forward, _Differentiable, 5), "Autograd")
_LIBRARY.impl("backward", _autograd(_run_backward, _Once, 9), "Autograd")


def _vmap(op: Any, batched: int) -> Any:
    """Return the vmap rule of ``op``: the mapped dimension of its tensors is folded into B."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, tuple[int, ...]]:
        def fold(x: torch.Tensor | None, dim: int | None) -> torch.Tensor | None:
            if x is None:
                return None
            x = x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            return x.flatten(0, 1)

        tensors = [fold(x, dim) for x, dim in zip(args[:batched], in_dims, strict=False)]
        results = op(*tensors, *args[batched:])
        split = tuple(x.unflatten(0, (info.batch_size, -1)) for x in results)
        return split, (0,) * len(split)

    return rule


torch.library.register_vmap("flashattn::forward", _vmap(_forward, batched=5), lib=_LIBRARY)
torch.library.register_vmap("flashattn::backward", _vmap(_backward, batched=9), lib=_LIBRARY)


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: Causal = False,
    window: Window = UNBOUNDED,
    bounds: Bounds | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    precision: str = "auto",
    family: Family = "triton",
    deterministic: bool = True,
) -> Attend:
    """Return what attends with our kernels to these and all like them (see ``registry.Impl``).

    The caller has checked the arguments and asked ``why_not``. What is returned takes q, k and v,
    returns o [B, H, T, D] and lse [B, H, T], and has no second derivative.

    Args:
        q: [B, H, T, D].
        k: [B, G, S, D].
        v: [B, G, S, D].
        causal: see ``attention``.
        window: see ``attention``.
        bounds: all of the mask, in their place.
        softcap: see ``attention``.
        scale: see ``attention``.
        precision: of fp32 products: "bf16x6", "tf32x3", "tf32", "ieee" (see
            ``plan.precision.input_precision``), or "auto": "tf32" where torch's setting for matrix
            products on CUDA allows it, else "bf16x6".
        family: the kernels: "triton", the portable ones, "hopper", or "auto", for each pass the
            faster ones.
        deterministic: whether the same inputs shall give the same bits of the gradients, as they
            do under ``torch.use_deterministic_algorithms``, too, and with the portable ones always.
    """
    mask, scale = Mask.of(causal, window), check_scale(scale, q.shape[3])
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    how = scale, softcap, precision, family, deterministic
    if bounds is not None:
        return _attend(q, k, v, bounds, None, None, *how)
    seen = mask.over(q.shape[2], k.shape[2]).seen_keys
    every = (seen.start, seen.stop) == (0, k.shape[2])
    if not every:  # what no query sees may be NaN
        k, v = k[:, :, seen], v[:, :, seen]
    band = mask.over(q.shape[2], k.shape[2])
    attend = _attend(q, k, v, (), band.left, band.right, *how)
    return attend if every else lambda q, k, v: attend(q, k[:, :, seen], v[:, :, seen])


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: Bounds | tuple[()], *how: Any
) -> Attend:
    """Return what attends to these and all like them, through the operators if one is due."""
    if dispatch_is_trivial(q, k, v, *bounds):
        return bind(signature(q, k, v), *how, bounds=bounds)
    absent = () if bounds else (None, None)
    return lambda q, k, v, bounds=(): _forward(q, k, v, *bounds, *absent, *how)


def bind(given: tuple[Signature, ...], *how: Any, bounds: Bounds | tuple[()] = ()) -> Prepared:
    """Return what the operators launch for q, k and v with these signatures; args as theirs."""
    attend = _execute().bind_forward(given, _options(given[0][2], bounds, *how))
    return Prepared(attend, how)


class FlashAttentionTriton(torch.autograd.Function):
    """FlashAttention-2 in Triton as an autograd function: ``apply(Q, K, V, is_causal=False)``.

    Q is ``(batch, N_q, d)``, K and V ``(batch, N_k, d)``; returns ``(batch, N_q, d)``. It saves Q,
    K, V, O and one tensor of shape ``(batch, N_q)``: the logsumexp L.

    Raises:
        ValueError: bad arguments (see ``Problem.of``), or a problem that ``why_not`` refuses.
    """

    @staticmethod
    def forward(  # noqa: D102 - autograd's name; its arguments are positional
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        is_causal: Causal = False,  # noqa: FBT002
    ) -> torch.Tensor:
        reason = why_not(Problem.of(q, k, v, causal=is_causal), q.device)
        if reason is not None:
            raise ValueError(reason)
        heads = [x.unsqueeze(-3) for x in (q, k, v)]
        o, lse = (x.squeeze(1) for x in prepare(*heads, causal=is_causal)(*heads))
        ctx.save_for_backward(q, k, v, o, lse)
        last = Mask.of(is_causal).over(q.shape[1], k.shape[1]).right
        ctx.options = None, last, check_scale(None, q.shape[2]), None, "auto", "triton", True
        return o

    @staticmethod
    def backward(ctx: Any, grad_o: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: D102
        grad_o, *saved = (x.unsqueeze(1) for x in (grad_o, *ctx.saved_tensors))
        grads = _backward(grad_o, None, *saved, None, None, *ctx.options)
        return *(x.squeeze(1) for x in grads), None
