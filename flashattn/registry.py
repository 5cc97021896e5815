"""The implementations by name, each with what it claims and reasons for what it cannot do.

A plugin is one callable and one decorator, which says what it does not claim::

    from flashattn import register

    @register("mine", grad=False, grouped=False, head_dims=(64, 128))
    def mine(q, k, v, *, causal, scale):
        ...
        return o  # or (o, lse) with lse=True

An installed package provides the callable, or a module that decorates callables, as an entry point
of the group ``flashattn.impls``, under the name of the implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache, lru_cache, partial
from importlib.metadata import EntryPoint, entry_points
from inspect import signature
from typing import Any

import torch

from flashattn.claims import Claims
from flashattn.dispatch import dispatch_is_trivial
from flashattn.mask import UNBOUNDED, Mask
from flashattn.problem import Lengths, Problem
from flashattn.resolve import bounds_of_lengths
from flashattn.score import with_sink

WhyNot = Callable[[Problem, torch.device], str | None]
Fastest = Callable[[Problem, torch.device], dict[str, Any] | None]
Output = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor | None]
# Takes q, k and v, and by name those of TENSORS that were given.
AttentionCall = Callable[..., Pair]

ENTRY_POINTS = "flashattn.impls"
TENSORS = ("bounds", "alibi_slopes", "bias", "sink")  # that a call may take besides q, k and v
ASKED = frozenset({"causal", "window", "softcap", "scale", *TENSORS})  # no options of any impl


def _always(problem: Problem, device: torch.device) -> dict[str, Any]:
    del problem, device
    return {}


def _never(problem: Problem, device: torch.device) -> None:
    del problem, device


@dataclass(frozen=True, kw_only=True, eq=False)
class Impl(Claims):
    """One implementation of attention, and what it claims.

    Args:
        name: its name for ``get`` and ``attention(impl=...)``.
        call: ``call(q, k, v, *, causal, scale)`` with q [B, H, T, D], k [B, G, S, D] and
            v [B, G, S, Dv], where Dv = D unless ``narrow_values`` is claimed; causal is False,
            "top_left" or "bottom_right", and scale a float. It returns o [B, H, T, Dv], or
            (o, lse). If the problem has a window, and ``windows`` is claimed, it is also given
            ``window=(left, right)``; likewise ``softcap=``, a float, ``bounds=``, which
            ``intervals`` claims, ``alibi_slopes=``, ``bias=`` and ``sink=``. If it has a parameter
            ``documents``, it is given the lengths of packed documents in place of their bounds.
        limits: a function that returns, as a sentence, why it cannot solve a problem on a device,
            or None; for limits that no flag expresses.
        grad_limits: likewise, why it cannot differentiate a problem that it can solve.
        fastest: a function that returns the options with which ``impl="auto"`` calls it, or None to
            leave the problem to the next implementation.
        prepares: ``call`` does not compute. It returns a function of q, k and v, and by name of
            those of ``TENSORS`` that were given, which returns (o, lse) and may be reused for all
            inputs with the same signature: the same sizes, strides, dtype, device and address
            modulo 16 bytes, with or without gradients, under the same torch settings for
            deterministic algorithms and fp32 products. Under torch.compile, a mode or a function
            transform, ``call`` is called each time.
        any_length: whether ``limits`` and ``fastest`` give the same answer for all lengths above 0,
            so that ``attention`` asks them once. If the result of ``call`` has ``of_lengths`` (see
            ``ops.BoundCall``), ``call`` is not called again, either.
        compiles: whether every new shape costs seconds of compilation (torch.compile).
        origin: the file or package that it came from; empty for those of this package.
        options: names of the other arguments of ``call``, or None if it takes any.
    """

    name: str
    call: Callable[..., Any]
    limits: WhyNot
    grad_limits: WhyNot = _never
    fastest: Fastest = _always
    prepares: bool = False
    any_length: bool = False
    compiles: bool = False
    origin: str = ""
    options: frozenset[str] | None = field(init=False)

    def __post_init__(self) -> None:
        """Read the options from the signature, once."""
        object.__setattr__(self, "options", _options(self.call))

    @property
    def excused(self) -> bool:
        """Return whether tests report its errors but pass: only its authors can fix them."""
        return not self.strict and not self.origin

    def why_not(
        self, problem: Problem, device: torch.device | str, *, grad: bool = False, lse: bool = False
    ) -> str | None:
        """Return why it cannot solve ``problem`` on ``device``, as a sentence, or None when it can.

        Args:
            problem: the problem to solve.
            device: the device to solve it on.
            grad: whether gradients are wanted, too.
            lse: whether the logsumexp is wanted, too.
        """
        if grad and not self.grad:
            return f"{self.name} is not differentiable"
        if lse and not self.lse:
            return f"{self.name} does not return the logsumexp"
        device = torch.device(device)
        unclaimed = self.unclaimed(problem, device)
        if unclaimed is not None:
            return f"{self.name} {unclaimed}"
        reason = self.limits(problem, device)
        return self.grad_limits(problem, device) if grad and reason is None else reason

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        documents: Lengths | None = None,
        prefix: int | None = None,
        **options: Any,
    ) -> Pair:
        """Compute (o, lse); lse is None if the implementation does not return it."""
        if documents is not None and "documents" in (self.options or ()):  # passed as lengths
            options["documents"] = documents
        elif documents is not None or prefix is not None:
            mask = Mask.of(options.pop("causal", False), options.pop("window", UNBOUNDED))
            made = _bounds if dispatch_is_trivial(q) else _bounds.__wrapped__
            bounds = made(documents, prefix, mask, q.shape[-2], k.shape[-2], q.device)
            options |= {"bounds": bounds, "causal": False}
        given = {name: options[name] for name in TENSORS if options.get(name) is not None}
        return self.prepared(q, k, v, **options)(q, k, v, **given)

    def prepared(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
    ) -> AttentionCall:
        """Return a function that computes (o, lse) for inputs like q, k, v (see ``prepares``)."""
        if options.get("sink") is not None and not self.sink:
            return _behind(self.prepared(q, k, v, **options | {"sink": None}), self.name)
        if self.prepares:
            there = {n: x for n, x in options.items() if x is not None or n not in TENSORS}
            attend: AttentionCall = self.call(q, k, v, **there)
            return attend
        for name in TENSORS:
            options.pop(name, None)
        call = partial(self.call, **options)
        return lambda q, k, v, **tensors: _pair(call(q, k, v, **tensors))


def _behind(attend: AttentionCall, name: str) -> AttentionCall:
    """Return a call that applies a sink to the results of an implementation without sinks."""

    def sunk(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, sink: torch.Tensor, **tensors: Any
    ) -> Pair:
        o, lse = attend(q, k, v, **tensors)
        if lse is None:
            raise ValueError(f"sink: {name} takes none, and returns no logsumexp")
        return with_sink(o, lse, sink)

    return sunk


@lru_cache(maxsize=4)  # shared by calls of one problem, such as the layers of a model
@torch.inference_mode(mode=False)  # a later call may save them for its backward
def _bounds(*problem: Any) -> Any:
    return bounds_of_lengths(*problem)


def _options(call: Callable[..., Any]) -> frozenset[str] | None:
    try:
        _, _, _, *parameters = signature(call).parameters.values()
    except (TypeError, ValueError):  # no signature, or none that names three tensors
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    chosen = call.keywords if isinstance(call, partial) else {}
    return frozenset(parameter.name for parameter in parameters) - ASKED - chosen.keys()


def _pair(result: Output) -> Pair:
    return result if isinstance(result, tuple) else (result, None)


_FACTS = (*(x.name for x in fields(Claims)), "fastest", "prepares", "any_length", "compiles")
_impls: dict[str, Impl] = {}
_broken: dict[str, str] = {}


def register(
    name: str, *, why_not: WhyNot = _never, why_no_grad: WhyNot = _never, **facts: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated callable as the implementation ``name``.

    Args:
        name: a new name, and not "auto".
        why_not: ``Impl.limits``, for limits that the flags do not express.
        why_no_grad: ``Impl.grad_limits``, likewise.
        facts: the flags of ``Claims``, ``fastest``, ``prepares``, ``any_length``, ``compiles``.

    Raises:
        TypeError: the name is not a string, as when the decorator has no parentheses; a fact is
            unknown; or the decorated object is not callable.
        ValueError: the name is taken, or "auto".
    """
    if not isinstance(name, str):
        raise TypeError(f'name: wanted a string, as in @register("mine"), got {name!r}')
    for fact in facts.keys() - set(_FACTS):
        raise TypeError(f"{fact}: wanted one of {', '.join(_FACTS)}")

    def decorate(call: Callable[..., Any]) -> Callable[..., Any]:
        if not callable(call):
            raise TypeError(f"{name}: wanted a callable, got {call!r}")
        if name == "auto" or name in _impls:
            raise ValueError(f"name: wanted one that is not taken, got {name!r}")
        _impls[name] = Impl(name=name, call=call, limits=why_not, grad_limits=why_no_grad, **facts)
        return call

    return decorate


def names() -> tuple[str, ...]:
    """Return every registered name, ours first, in the order of registration."""
    _load_plugins()
    return tuple(_impls)


def get(name: str) -> Impl:
    """Return the implementation called ``name``.

    Raises:
        ValueError: no implementation has this name, and the message lists those there are; or its
            package cannot be loaded, and the message says why.
    """
    if not isinstance(name, str):
        raise ValueError(f"impl: wanted a name, got {name!r}")  # noqa: TRY004 - as for a wrong name
    if name not in _impls:
        _load_plugins()
    try:
        return _impls[name]
    except KeyError:
        msg = f"impl: wanted one of {', '.join(_impls)}, got {name!r}"
        raise ValueError(f"impl: {_broken[name]}" if name in _broken else msg) from None


def broken() -> tuple[str, ...]:
    """Return a sentence for each installed plugin that cannot be loaded."""
    _load_plugins()
    return tuple(_broken.values())


@contextmanager
def origin(where: str) -> Iterator[None]:
    """Set the origin of all that is registered in the block; undo the registrations on an error."""
    before = dict(_impls)
    try:
        yield
    except BaseException:
        _impls.clear()
        _impls.update(before)
        raise
    added = {name: impl for name, impl in _impls.items() if name not in before}
    _impls.update({name: replace(impl, origin=where) for name, impl in added.items()})


@cache
def _load_plugins() -> None:
    for entry in entry_points(group=ENTRY_POINTS):
        package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
        try:
            with origin(f"package {package}"):
                _load(entry)
        except Exception as error:  # noqa: BLE001 - a stranger's module may raise anything
            kind = type(error).__name__
            _broken[entry.name] = (
                f"{entry.name} of package {package} cannot be loaded: {kind}: {error}"
            )


def _load(entry: EntryPoint) -> None:
    loaded = entry.load()
    if callable(loaded) and not any(impl.call is loaded for impl in _impls.values()):
        register(entry.name)(loaded)
