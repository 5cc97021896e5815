"""Who can answer: implementations by name, each with its limits in sentences.

A plugin is one callable and one decorator, which says what is not claimed::

    from flashattn import register

    @register("mine", grad=False, grouped=False, head_dims=(64, 128))
    def mine(q, k, v, *, causal, scale):
        ...
        return o  # or (o, lse) with lse=True

An installed package announces the callable, or the module that decorates some, under the
entry-point group ``flashattn.impls``, by the implementation's name.
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
# Of q, k and v, and of those of TENSORS that were given, by name.
AttentionCall = Callable[..., Pair]

ENTRY_POINTS = "flashattn.impls"
TENSORS = ("bounds", "alibi_slopes", "bias", "sink")  # that a call may have besides q, k and v
ASKED = frozenset({"causal", "window", "softcap", "scale", *TENSORS})  # no one's own options


def _always(problem: Problem, device: torch.device) -> dict[str, Any]:
    del problem, device
    return {}


def _never(problem: Problem, device: torch.device) -> None:
    del problem, device


@dataclass(frozen=True, kw_only=True, eq=False)
class Impl(Claims):
    """One implementation of attention, and what it claims.

    Args:
        name: what ``get`` and ``attention(impl=...)`` know it by.
        call: ``call(q, k, v, *, causal, scale)`` with q [B, H, T, D], k [B, G, S, D],
            v [B, G, S, Dv], where Dv is D unless ``narrow_values`` are claimed, causal False,
            "top_left" or "bottom_right", and scale a float; returns o [B, H, T, Dv], or (o, lse).
            Where
            there is a window, and ``windows`` are claimed, it is given ``window=(left, right)``;
            likewise ``softcap=``, a float, ``bounds=``, which ``intervals`` claims,
            ``alibi_slopes=``, ``bias=`` and ``sink=``. One that names ``documents`` among its
            arguments is given the lengths of packed documents in place of their bounds.
        limits: what no flag says: the sentence that says why it cannot solve a problem on a device,
            or None.
        grad_limits: likewise, why it cannot differentiate what it can solve.
        fastest: the options with which ``attention`` takes it by itself where it can, or None: one
            that is made for some problems leaves others to the next.
        prepares: ``call`` returns no result but a callable of q, k and v, and by their names of
            those of ``TENSORS`` that it was given, which gives the (o, lse) of these and of all
            like them, so that the host need not think again. Like are tensors of the same sizes,
            strides, dtype, device and distance from a multiple of 16 bytes, of which any or none
            needs gradients, under the same settings of torch for deterministic algorithms and fp32
            products. Where the compiler, a mode, or a function transform looks on, it is asked
            anew.
        any_length: whether ``limits`` and ``fastest`` answer alike for all lengths but 0, so that
            ``attention`` asks them once; nor does it ask ``call`` again where what that returned
            has ``of_lengths`` (see ``ops.BoundCall``).
        compiles: whether every new shape costs it seconds (torch.compile).
        origin: the file or the package that it came from; empty for those of this package.
        options: names of what ``call`` takes besides, or None where it takes anything.
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
        """Whether tests report what it gets wrong and pass: that is for its maker to mend."""
        return not self.strict and not self.origin

    def why_not(
        self, problem: Problem, device: torch.device | str, *, grad: bool = False, lse: bool = False
    ) -> str | None:
        """Return why it cannot solve ``problem`` on ``device``, as a sentence, or None when it can.

        Args:
            problem: what is asked.
            device: where.
            grad: gradients are wanted, too.
            lse: the logsumexp is wanted, too.
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
        """Compute (o, lse); lse is None where it returns none."""
        if documents is not None and "documents" in (self.options or ()):  # as they are
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
        """Return what computes (o, lse) of q, k and v, and of all like them (see ``prepares``)."""
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
    """Return what applies a sink behind an implementation that takes none."""

    def sunk(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, sink: torch.Tensor, **tensors: Any
    ) -> Pair:
        o, lse = attend(q, k, v, **tensors)
        if lse is None:
            raise ValueError(f"sink: {name} takes none, and returns no logsumexp")
        return with_sink(o, lse, sink)

    return sunk


_bounds = lru_cache(maxsize=4)(bounds_of_lengths)  # calls of one problem share them, as layers do


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
    """Make the decorated callable known as ``name``.

    Args:
        name: not "auto", and not taken.
        why_not: ``Impl.limits``, where the flags do not say it all.
        why_no_grad: ``Impl.grad_limits``, likewise.
        facts: the flags of ``Claims``, ``fastest``, ``prepares``, ``any_length``, ``compiles``.

    Raises:
        TypeError: the name is no string, as where the decorator has no parentheses; a fact is
            unknown; or what is decorated cannot be called.
        ValueError: another callable has that name.
    """
    if not isinstance(name, str):
        raise TypeError(f'name: wanted a string, as in @register("mine"), got {name!r}')
    for fact in facts.keys() - set(_FACTS):
        raise TypeError(f"{fact}: wanted one of {', '.join(_FACTS)}")

    def decorate(call: Callable[..., Any]) -> Callable[..., Any]:
        if not callable(call):
            raise TypeError(f"{name}: wanted a callable, got {call!r}")
        if name == "auto" or name in _impls:
            msg = f"name: wanted one that is not taken, got {name!r}"
            raise ValueError(msg)
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
        ValueError: there is none, and the message lists those there are; or its package cannot be
            loaded, and the message says why.
    """
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
    """Note ``where`` of everything that is registered meanwhile; forget it all on an error."""
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
