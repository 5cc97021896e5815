"""Execute: bind plans to kernels, once for each signature of tensors.

Triton inspects every argument on every call to look up the compiled kernel, which alone takes
longer than a whole SDPA call. So a bound plan keeps its launches, and a launch keeps what Triton
compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache, partial
from operator import itemgetter
from typing import Any

import torch
from torch.nn.functional import pad

from flashattn.gpus import gpu_of
from flashattn.kernels.counters import counters
from flashattn.kernels.launch import Name, Step, check_device, on_device
from flashattn.kernels.portable import steps as portable
from flashattn.plan.choose import NAMES, choose_backward, choose_forward, copied, padded_specs
from flashattn.plan.plan import BackwardPlan, ForwardPlan, Workspace
from flashattn.plan.precision import input_precision
from flashattn.plan.spec import (
    Extras,
    Options,
    Signature,
    TensorSpec,
    first_columns,
    rewrite,
    signature,
)

BOUND = 1024  # most plans that are kept, so that changing shapes do not fill the memory

Outputs = tuple[torch.Tensor, torch.Tensor]
Grads = tuple[torch.Tensor, torch.Tensor | None]
Saved = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Bound:
    """A plan with its launches: it takes inputs, allocates outputs and workspaces, and launches.

    Args:
        inputs: names of the tensors that a call takes.
        likes: names of outputs, each with the input whose layout it has; these are returned first.
        outputs: other outputs.
        plan: the plan.
        steps: the launches.
        device: of all tensors.
        columns: if not None, an output has only so many columns of that input.
    """

    def __init__(
        self,
        inputs: Sequence[str],
        likes: Mapping[str, str],
        outputs: Sequence[Workspace],
        plan: ForwardPlan | BackwardPlan,
        steps: Sequence[Step],
        device: torch.device,
        columns: int | None = None,
    ) -> None:
        """Number the tensors."""
        self.plan = plan
        self._copies = [inputs.index(name) for name in plan.copies]
        self._likes, self._columns = [inputs.index(name) for name in likes.values()], columns
        self._outputs = slice(len(inputs), len(inputs) + len(likes) + len(outputs))
        self._make: list[tuple[bool, dict[str, Any]]] = []
        names = [*inputs, *likes]
        for name, size, dtype, zeroed in (*outputs, *plan.workspaces):
            names.append(name)
            self._make.append((zeroed, {"size": size, "dtype": dtype, "device": device}))
        count = plan.counters if isinstance(plan, ForwardPlan) else 0
        self._counters = (device, count) if count else None
        given = *names, *["counters"] * (count > 0), None
        self._steps = [(launch, _gather(operands, given)) for launch, operands in steps]

    def __call__(self, *inputs: torch.Tensor | None) -> Any:
        """Return the outputs."""
        tensors: list[Any] = [*inputs]
        for i in self._copies:
            tensors[i] = rewrite(tensors[i])
        with on_device(tensors[0]):
            for i in self._likes:
                like = tensors[i] if self._columns is None else tensors[i][..., : self._columns]
                tensors.append(torch.empty_like(like))
            for zeroed, how in self._make:  # looked up here: tests replace torch.empty
                tensors.append(torch.zeros(**how) if zeroed else torch.empty(**how))
            if self._counters is not None:
                tensors.append(counters(*self._counters))
            tensors.append(None)
            for launch, operands in self._steps:
                launch(*operands(tensors))
        return tuple(tensors[self._outputs])


@cache
def _gather(
    names: tuple[Name, ...], given: tuple[str | None, ...]
) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return a function that picks tensors by name, alone or in tuples, from those given."""
    if len(names) > 1 and not any(isinstance(name, tuple) for name in names):
        return itemgetter(*map(given.index, names))  # of several names it returns a tuple
    picks: list[Callable[[Sequence[Any]], Any]] = [
        _gather(x, given) if isinstance(x, tuple) else itemgetter(given.index(x)) for x in names
    ]
    return lambda tensors: tuple([pick(tensors) for pick in picks])


def _sees_nothing(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *extras: torch.Tensor | None
) -> Outputs:
    """Return o and lse without a launch, where there is no query or none sees a key."""
    del k
    columns = v.shape[3]
    lse = torch.full(q.shape[:3], -torch.inf, device=q.device, dtype=torch.float32)
    sink = Extras(*extras).sink
    return torch.zeros_like(first_columns(q, columns)), lse if sink is None else torch.maximum(
        lse, sink[..., None]
    )


def _padded(bound: Callable[..., Outputs]) -> Callable[..., Outputs]:
    """Return a function that pads values with zeros; o gets v's columns and q's layout."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *extras: Any) -> Outputs:
        o, lse = bound(q, k, _widened(v, q), *extras)
        return _narrowed(o, v, like=q), lse

    return attend


def _padded_backward(bound: Callable[..., Sequence[torch.Tensor]]) -> Callable[..., Any]:
    """Return a function that does the same for gradients."""

    def differentiate(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        grad_o: torch.Tensor,
        o: torch.Tensor,
        *others: Any,
    ) -> tuple[torch.Tensor, ...]:
        widened = [_widened(x, q) for x in (v, grad_o, o)]
        dq, dk, dv, *learned = bound(q, k, *widened, *others)
        return dq, dk, _narrowed(dv, v, like=v), *learned

    return differentiate


def _widened(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return x padded with columns of zeros to q's width."""
    return pad(x, (0, q.shape[-1] - x.shape[-1])).contiguous()


def _narrowed(x: torch.Tensor, v: torch.Tensor, *, like: torch.Tensor) -> torch.Tensor:
    """Return the first columns of x, as many as v has, in the layout of ``like``."""
    columns = v.shape[-1]
    return torch.empty_like(first_columns(like, columns)).copy_(x[..., :columns])


def _no_gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: torch.Tensor | None, bias_grad: bool
) -> tuple[torch.Tensor, ...]:
    """Return gradients without a launch, where there is no query or key, so lse is the sink."""
    _, _, _, grad_lse, *given = others
    bias, sink = Extras(*given)[3:]
    found = [torch.zeros_like(first_columns(x, x.shape[3])) for x in (q, k, v)]
    if bias is not None and bias_grad:
        found.append(torch.zeros_like(bias, memory_format=torch.contiguous_format))
    if sink is not None:
        of_rows = torch.zeros_like(sink) if grad_lse is None else grad_lse.sum(2)
        found.append(of_rows.sum_to_size(sink.shape).masked_fill(sink == -torch.inf, 0.0))
    return tuple(found)


@cache
def _steps(family: str) -> Any:
    """Return the module with the steps of a kernel family."""
    if family == "portable":
        return portable
    from flashattn.kernels.hopper import steps  # noqa: PLC0415 - Gluon is imported when needed

    return steps


@lru_cache(BOUND)
def bind_forward(given: tuple[Signature, ...], options: Options, **instead: Any) -> Any:
    """Return a function (q, k, v, *extras) -> (o, lse) for tensors with these signatures.

    Args:
        given: signatures of q, k and v.
        options: what the call asks for.
        instead: overrides for ``choose_forward``.
    """
    specs = [TensorSpec(*x) for x in given]
    device = specs[0].device
    check_device(device)
    if specs[2].shape[3] > specs[0].shape[3]:
        raise ValueError(f"v: wanted at most q's {specs[0].shape[3]} columns")
    plan = choose_forward(specs, gpu_of(device), options, **instead)
    if plan.kernel == "none":
        return _sees_nothing
    if plan.padded:
        return _padded(bind_forward(tuple(padded_specs(specs)), options, **instead))
    q, k, v = copied(specs, plan.copies)
    steps = _steps(plan.kernel).forward(plan, q, k, v, options)
    lse = Workspace("lse", tuple(q.shape[:3]))
    inputs = (*NAMES[:3], *(Extras._fields if options.extras else ()))
    columns = v.shape[3] if v.shape[3] != q.shape[3] else None
    return Bound(inputs, {"o": "q"}, [lse], plan, steps, device, columns)


@lru_cache(BOUND)
def bind_backward(given: tuple[Signature, ...], options: Options, **instead: Any) -> Any:
    """Return a function (q, k, v, grad_o, o, lse, grad_lse, *extras) -> (dq, dk, dv, ...).

    Its ``grad_lse`` may be None. After dv come dbias, if the options want it, and dsink, if there
    are sinks.

    Args:
        given: signatures of these tensors, without extras; that of grad_lse only if there is one.
        options: what the call asks for.
        instead: overrides for ``choose_backward``.
    """
    specs = [TensorSpec(*x) for x in given]
    device = specs[0].device
    check_device(device)
    plan = choose_backward(specs, gpu_of(device), options, **instead)
    if plan.kernel == "none":
        return partial(_no_gradients, bias_grad=options.bias_grad)
    if plan.padded:
        return _padded_backward(bind_backward(tuple(padded_specs(specs)), options, **instead))
    specs = copied(specs, plan.copies)
    steps = _steps(plan.kernel).backward(plan, specs, options)
    likes = {"dq": "q", "dk": "k", "dv": "v"}
    inputs = (*NAMES, *(Extras._fields if options.extras else ()))
    return Bound(inputs, likes, _other_gradients(plan, specs, options), plan, steps, device)


def _other_gradients(
    plan: BackwardPlan, specs: Sequence[TensorSpec], options: Options
) -> list[Workspace]:
    """Return the outputs for the gradients of a bias and of sinks."""
    found = []
    if options.bias is not None and options.bias_grad:
        hidden = plan.dbias is None and options.causal  # some tiles are not visited
        shape, dtype = tuple(options.bias.shape), options.bias.dtype
        found.append(Workspace("dbias", shape, dtype, zeroed=hidden))
    if options.sink:
        found.append(Workspace("dsink", (options.sink, specs[0].shape[1])))
    return found


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    extras: Sequence[torch.Tensor | None] = (),
    **asked: Any,
) -> Outputs:
    """Return o [B, H, T, Dv] in q's dtype, and lse [B, H, T] in fp32.

    Args:
        q: [B, H, T, D], checked.
        k: [B, G, S, D], checked.
        v: [B, G, S, Dv], checked; Dv is at most D.
        extras: all of ``Extras``, or nothing.
        asked: fields of ``Options``, with any ``precision.PRECISIONS`` as precision, or overrides
            for ``choose_forward``.
    """
    options, instead = _options(q.dtype, extras, **asked)
    return prepare_forward(q, k, v, options, **instead)(q, k, v, *extras)


def backward(
    grads: Grads, saved: Saved, *, extras: Sequence[torch.Tensor | None] = (), **asked: Any
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of q, k and v, in their dtype, and those of a bias and of sinks.

    Args:
        grads: of o [B, H, T, Dv], and of lse [B, H, T] or None.
        saved: q, k, v as ``forward`` took them, o and lse as it returned them.
        extras: as in ``forward``.
        asked: as in ``forward``, or overrides for ``choose_backward``.
    """
    options, instead = _options(saved[0].dtype, extras, **asked)
    (grad_o, grad_lse), (q, k, v, o, lse) = grads, saved
    run = prepare_backward(grads, saved, options, **instead)
    gradients: tuple[torch.Tensor, ...] = run(q, k, v, grad_o, o, lse, grad_lse, *extras)
    return gradients


def _options(
    dtype: torch.dtype,
    extras: Sequence[torch.Tensor | None],
    *,
    precision: str = "auto",
    **asked: Any,
) -> tuple[Options, dict[str, Any]]:
    """Return the options of a call, and what else is asked for: overrides of its plan."""
    own = {name: asked.pop(name) for name in Options._fields if name in asked}
    return Options(precision=input_precision(precision, dtype), **own).given(extras), asked


def prepare_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, **instead: Any
) -> Callable[..., Outputs]:
    """Return a function (q, k, v, *extras) -> (o, lse) for tensors with the same signatures."""
    bound: Callable[..., Outputs] = bind_forward(signature(q, k, v), options, **instead)
    return bound


def prepare_backward(grads: Grads, saved: Saved, options: Options, **instead: Any) -> Any:
    """Return a function that computes gradients for tensors with the same signatures.

    It takes q, k, v, grad_o, o, lse, grad_lse or None, and extras.
    """
    (grad_o, grad_lse), (q, k, v, o, lse) = grads, saved
    given = (q, k, v, grad_o, o, lse) if grad_lse is None else (q, k, v, grad_o, o, lse, grad_lse)
    return bind_backward(signature(*given), options, **instead)
