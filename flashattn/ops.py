"""The Triton kernels as PyTorch operators, with fake kernels, autograd and vmap.

``torch.ops.flashattn.forward`` and ``.backward`` are opaque to ``torch.compile``, which keeps them
whole. Triton is imported, and a kernel compiled, at its first call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from flashattn.batching import rule_of
from flashattn.bounds import Bounds
from flashattn.dispatch import dispatch_is_trivial, has_tangents, no_forward_mode
from flashattn.plan.precision import input_precision
from flashattn.plan.spec import Extras, Family, Options, Signature, first_columns, given_extras
from flashattn.problem import ALIGNMENT

MOST_BACKWARDS = 16  # cached for each forward, by layout of gradients and saved tensors
EXTRAS = len(Extras._fields)
FORWARD, BACKWARD = 3 + EXTRAS, 7 + EXTRAS  # number of tensors that an operator takes
BIAS = 4 + Extras._fields.index("bias")  # its index among the arguments of an autograd function

Outputs = tuple[torch.Tensor, torch.Tensor]
AttentionCall = Callable[..., Outputs]  # takes q, k and v, and other tensors by name
Gradients = tuple[torch.Tensor, ...]  # of q, k and v; then of a bias and of a sink, if asked for
Differentiate = Callable[..., Gradients]


@cache
def execute() -> ModuleType:
    """Return the module that launches kernels; it imports Triton."""
    from flashattn.kernels import execute  # noqa: PLC0415

    return execute


# Not ``torch.library.custom_op``: its Python wrapper costs the host more per call than the launch.
# Fake kernels, autograd and vmap, which it would add, are registered below.
_LIBRARY = torch.library.Library("flashattn", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag,)
_EXTRAS = ", ".join(f"Tensor? {name}" for name in Extras._fields)
_HOW = (
    "SymInt? left, SymInt? right, SymInt query_offset, float scale, float? softcap, str precision,"
    " str family, bool deterministic"
)
_LIBRARY.define(
    f"forward(Tensor q, Tensor k, Tensor v, {_EXTRAS}, {_HOW}) -> (Tensor o, Tensor lse)",
    tags=_TAGS,
)
_LIBRARY.define(
    "backward(Tensor grad_o, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse,"
    f" {_EXTRAS}, {_HOW}, bool bias_grad)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)",
    tags=_TAGS,
)
_forward = torch.ops.flashattn.forward.default
_backward = torch.ops.flashattn.backward.default


def _launch_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *inputs: Any) -> Outputs:
    extras, how = given_extras(inputs[:EXTRAS]), inputs[EXTRAS:]
    attend: AttentionCall = execute().prepare_forward(q, k, v, _options(q.dtype, extras, *how))
    return attend(q, k, v, *extras)


def _launch_backward(
    grad_o: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    *inputs: Any,
) -> Gradients:
    extras, (*how, bias_grad) = given_extras(inputs[:EXTRAS]), inputs[EXTRAS:]
    options = _options(q.dtype, extras, *how, bias_grad=bias_grad)
    prepared: Differentiate = execute().prepare_backward(
        (grad_o, grad_lse), (q, k, v, o, lse), options
    )
    dq, dk, dv, *others = prepared(q, k, v, grad_o, o, lse, grad_lse, *extras)
    return dq, dk, dv, *_all_others(others, q, *inputs[:EXTRAS][-2:], bias_grad=bias_grad)


def _all_others(
    given: Sequence[torch.Tensor],
    q: torch.Tensor,
    bias: torch.Tensor | None,
    sink: torch.Tensor | None,
    *,
    bias_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dbias and dsink as an operator does: empty if not asked for."""
    rest, wanted = list(given), (bias is not None and bias_grad, sink is not None)
    dbias, dsink = (
        rest.pop(0) if there else q.new_empty(0, dtype=torch.float32) for there in wanted
    )
    return dbias, dsink


def _asked(gradients: Gradients, extras: Extras, *, bias_grad: bool) -> Gradients:
    """Drop the gradients that are not asked for from those that an operator returns."""
    dq, dk, dv, dbias, dsink = gradients
    others = (dbias,) if bias_grad else ()
    return dq, dk, dv, *others, *(() if extras.sink is None else (dsink,))


def _options(
    dtype: torch.dtype,
    extras: Sequence[torch.Tensor | None],
    left: int | None,
    right: int | None,
    query_offset: int,
    scale: float,
    softcap: float | None,
    precision: str,
    family: Family,
    deterministic: bool,  # noqa: FBT001 - torch's operators are called by position
    *,
    bias_grad: bool = False,
) -> Options:
    """Return the ``Options`` of a plan from the arguments of an operator."""
    how = right, scale, input_precision(precision, dtype), family, deterministic, left, softcap
    return Options(*how, query_offset=query_offset, bias_grad=bias_grad).given(extras)


def _like_dense(x: torch.Tensor) -> torch.Tensor:
    """Return a result like x as the kernels allocate it: like a copy if its rows are not dense."""
    return torch.empty_like(first_columns(x, x.shape[3]))


@torch.library.register_fake("flashattn::forward", lib=_LIBRARY)
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    del k
    o = torch.empty_like(first_columns(q, v.shape[3]))
    return o, q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.register_fake("flashattn::backward", lib=_LIBRARY)
def _(
    grad_o: torch.Tensor,
    grad_lse: object,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: object,
    lse: object,
    *inputs: Any,
) -> Gradients:
    del grad_o, grad_lse, o, lse
    *_, bias, sink = inputs[:EXTRAS]
    bias_grad = inputs[-1]
    made = [bias.new_empty(bias.shape)] if bias is not None and bias_grad else []
    made += [] if sink is None else [sink.new_empty(sink.shape)]
    others = _all_others(made, q, bias, sink, bias_grad=bias_grad)
    return _like_dense(q), _like_dense(k), _like_dense(v), *others


def _run_forward(*inputs: Any) -> Outputs:
    """Launch the forward, where no gradient is wanted or the caller takes care of it."""
    if dispatch_is_trivial(*inputs[:FORWARD]):
        return _launch_forward(*inputs)
    with torch._C._AutoDispatchBelowAutograd():  # noqa: SLF001 - torch.library has no other word
        return _forward(*inputs)


def _run_backward(*inputs: Any) -> Gradients:
    """Launch the backward likewise."""
    if dispatch_is_trivial(*inputs[:BACKWARD]):
        return _launch_backward(*inputs)
    with torch._C._AutoDispatchBelowAutograd():  # noqa: SLF001
        return _backward(*inputs)


def _layouts(grads: Any, saved: Any) -> tuple[object, ...] | None:
    """Return the strides, alignments and precision that a backward plan depends on.

    None for gradients that ``torch.autograd.grad(is_grads_batched=True)`` has batched: they have no
    address, and the operator takes them one by one.
    """
    (grad_o, grad_lse), (q, k, v, o, lse) = grads, saved
    try:
        return (
            q.stride(), q.data_ptr() % ALIGNMENT, k.stride(), k.data_ptr() % ALIGNMENT,
            v.stride(), v.data_ptr() % ALIGNMENT, o.stride(), o.data_ptr() % ALIGNMENT,
            lse.stride(), lse.data_ptr() % ALIGNMENT,
            grad_o.stride(), grad_o.data_ptr() % ALIGNMENT,
            grad_lse if grad_lse is None else (grad_lse.stride(), grad_lse.data_ptr() % ALIGNMENT),
            q.dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision,
        )  # fmt: skip
    except RuntimeError:
        return None


class BoundCall:
    """The kernels chosen for one signature of inputs.

    Args:
        past_autograd: launches the forward for q, k and v, bypassing autograd.
        options: the arguments of the operators besides tensors.
    """

    def __init__(self, past_autograd: AttentionCall, options: tuple[Any, ...]) -> None:
        """Start with no backward prepared."""
        self.past_autograd, self.options = past_autograd, options
        self._backwards: dict[tuple[object, ...], Any] = {}
        self.of_lengths: Callable[..., BoundCall | None] | None = None  # binds other lengths

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        bounds: Bounds | tuple[None, None] = (None, None),
        **scored: torch.Tensor,
    ) -> Outputs:
        """Return o and lse, bypassing the dispatcher.

        Args:
            q: [B, H, T, D].
            k: [B, G, S, D].
            v: [B, G, S, Dv], Dv at most D.
            bounds: the whole mask, if given.
            scored: the other fields of ``Extras``.
        """
        extras = Extras(*bounds, **scored) if scored or bounds[0] is not None else ()
        if torch.is_grad_enabled() and (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or (extras and any(x is not None and x.requires_grad for x in extras))
        ):
            return _apply_directly(self, q, k, v, *extras)
        return self.past_autograd(q, k, v, *extras)

    def backward(
        self,
        grads: Any,
        saved: Any,
        extras: Sequence[torch.Tensor | None] = (),
        *,
        bias_grad: bool = False,
    ) -> Gradients:
        """Return the gradients of q, k and v, then of a bias if it is wanted, then of a sink.

        Autograd keeps sizes, dtypes and devices. Saved-tensor hooks, such as offloading to the CPU,
        may change strides and addresses, and torch's setting for fp32 products may have changed
        since the forward, so plans are cached by all of these.
        """
        (grad_o, grad_lse), (q, k, v, o, lse) = grads, saved
        tensors = grad_o, grad_lse, *saved, *extras
        direct = not torch.is_grad_enabled() and dispatch_is_trivial(*tensors)
        key = _layouts(grads, saved) if direct else None
        if key is None:
            given = Extras(*extras)
            found = _backward(*grads, *saved, *given, *self.options, bias_grad)
            return _asked(found, given, bias_grad=bias_grad)
        lies: tuple[object, ...] = ()
        if extras and (bias := extras[-2]) is not None:
            lies = bias.stride(), bias.data_ptr() % ALIGNMENT, bias_grad
        plan = self._backwards.get((key, lies))
        if plan is None:
            options = _options(q.dtype, extras, *self.options, bias_grad=bias_grad)
            plan = execute().prepare_backward(grads, saved, options)
            if len(self._backwards) >= MOST_BACKWARDS:
                self._backwards.clear()
            self._backwards[key, lies] = plan
        return plan(q, k, v, grad_o, o, lse, grad_lse, *extras)


class _Dispatched(NamedTuple):
    """The operators below autograd, in place of a ``BoundCall`` in an autograd function."""

    options: tuple[Any, ...]

    def past_autograd(self, *inputs: torch.Tensor | None) -> Outputs:
        return _below_autograd(_forward, *inputs, *self.options)

    def backward(self, grads: Any, saved: Any, extras: Any, *, bias_grad: bool) -> Gradients:
        found = _backward(*grads, *saved, *extras, *self.options, bias_grad)
        return _asked(found, Extras(*extras), bias_grad=bias_grad)


class _Differentiable(torch.autograd.Function):
    """Forward, with the backward operator as its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        prepared: BoundCall | _Dispatched,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *extras: torch.Tensor | None,
    ) -> Outputs:
        o, lse = prepared.past_autograd(q, k, v, *extras)
        ctx.prepared, ctx.extras = prepared, [x is not None for x in extras]
        ctx.save_for_backward(q, k, v, o, lse, *(x for x in extras if x is not None))
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(
        ctx: Any, grad_o: torch.Tensor | None, grad_lse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors
        given = iter(saved[5:])
        extras = tuple([next(given) if there else None for there in ctx.extras])
        grad_o = torch.zeros_like(saved[3]) if grad_o is None else grad_o
        bias_grad = bool(extras) and ctx.needs_input_grad[BIAS]
        dq, dk, dv, *others = ctx.prepared.backward(
            (grad_o, grad_lse), saved[:5], extras, bias_grad=bias_grad
        )
        if not extras:
            return None, dq, dk, dv
        dbias = others.pop(0) if bias_grad else None
        dsink = others.pop(0) if others else None
        return None, dq, dk, dv, *[None] * (EXTRAS - 2), dbias, dsink


# Skips what ``Function.apply`` does for function transforms, which takes as long as the rest.
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
    """Call an operator from an autograd function, with gradients enabled again.

    The autograd function has disabled them all, but outer function transforms still need theirs.
    """
    with (
        torch._C._AutoDispatchBelowAutograd(),  # noqa: SLF001
        torch.enable_grad(),
        forward_ad._set_fwd_grad_enabled(True),  # noqa: FBT003, SLF001
    ):
        return op(*inputs)


def _autograd(run: Any, function: Any, tensors: int) -> Any:
    """Return the autograd kernel of ``run``, differentiable in its first ``tensors`` arguments.

    The dispatcher calls it once for each level of ``torch.func.grad``, so its autograd function
    handles a single level.
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
_LIBRARY.impl("forward", _autograd(_run_forward, _Differentiable, FORWARD), "Autograd")
_LIBRARY.impl("backward", _autograd(_run_backward, _Once, BACKWARD), "Autograd")


for _name, _rule in (
    ("forward", rule_of(_forward, q=0, tensors=FORWARD)),
    ("backward", rule_of(_backward, q=2, tensors=BACKWARD)),
):
    torch.library.register_vmap(f"flashattn::{_name}", _rule, lib=_LIBRARY)


def bind(
    given: tuple[Signature, ...], *how: Any, extras: Sequence[torch.Tensor | None] = ()
) -> BoundCall:
    """Choose the kernels that the operators launch for q, k and v with these signatures.

    Args:
        given: signatures of q, k and v.
        how: the arguments of the operators besides tensors.
        extras: the extra tensors of the operators.
    """
    return BoundCall(execute().bind_forward(given, _options(given[0][2], extras, *how)), how)
