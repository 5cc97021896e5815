"""Who can answer: implementations by name, each with its limits in sentences.

A plugin is one callable and one decorator::

    from flashattn import register

    @register("mine", why_not=lambda problem, device: None if problem.causal else "only causal")
    def mine(q, k, v, *, causal, scale):
        ...
        return o  # or (o, lse)

An installed package announces the module that does so under the entry-point group
``flashattn.impls``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any

import torch

from flashattn.problem import Problem

WhyNot = Callable[[Problem, torch.device], str | None]
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

ENTRY_POINTS = "flashattn.impls"


@dataclass(frozen=True, kw_only=True)
class Impl:
    """One implementation of attention.

    Args:
        name: what ``get`` and ``attention(impl=...)`` know it by.
        call: ``call(q, k, v, *, causal, scale)`` with q [B, H, T, D], k and v [B, G, S, D], causal
            False, "top_left" or "bottom_right", and scale a float; returns o, or (o, lse).
        limits: the sentence that says why it cannot solve a problem on a device, or None.
        lse: whether it returns the logsumexp.
        grad: whether it is differentiable.
        strict: whether it claims the contract on unusual values, strides and scales, too; tests
            hold it to that.
        compiles: whether every new shape costs it seconds (torch.compile).
    """

    name: str
    call: Callable[..., Result]
    limits: WhyNot
    lse: bool = False
    grad: bool = True
    strict: bool = True
    compiles: bool = False

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
        return self.limits(problem, torch.device(device))

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute (o, lse); lse is None where it returns none."""
        result = self.call(q, k, v, **options)
        return result if isinstance(result, tuple) else (result, None)


_impls: dict[str, Impl] = {}


def register(
    name: str, *, why_not: WhyNot | None = None, **facts: bool
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Make the decorated callable known as ``name``.

    Args:
        name: not "auto", and not taken.
        why_not: ``Impl.limits``; None for an implementation that can solve everything.
        facts: ``Impl``'s ``lse``, ``grad``, ``strict`` and ``compiles``.

    Raises:
        ValueError: another callable has that name.
    """

    def decorate(call: Callable[..., Result]) -> Callable[..., Result]:
        if name == "auto" or name in _impls:
            msg = f"name: wanted one that is not taken, got {name!r}"
            raise ValueError(msg)
        limits = why_not or (lambda problem, device: None)  # noqa: ARG005
        _impls[name] = Impl(name=name, call=call, limits=limits, **facts)
        return call

    return decorate


def names() -> tuple[str, ...]:
    """Return every registered name, ours first, in the order of registration."""
    _load_plugins()
    return tuple(_impls)


def get(name: str) -> Impl:
    """Return the implementation called ``name``.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    if name not in _impls:
        _load_plugins()
    try:
        return _impls[name]
    except KeyError:
        msg = f"impl: wanted one of {', '.join(_impls)}, got {name!r}"
        raise ValueError(msg) from None


@cache
def _load_plugins() -> None:
    for entry in entry_points(group=ENTRY_POINTS):
        entry.load()
