"""A law: a check that holds for every question, as a test of every implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from flashattn.problem import Problem
from flashattn.registry import Impl
from flashattn.testing.examples import Check, Count
from flashattn.testing.strategies import problems, questions

ORDINARY = Problem(seq_q=64, head_dim=64, dtype="bfloat16", causal="top_left")
INTERPRETED_SHARE = 8  # the interpreter takes a quarter of a second for what others do in 5 ms
PEER_SHARE = 4
# Two tiles of keys and three of queries for the interpreter; on a GPU as many of its larger ones.
LONGEST = {"cpu": 72, "cuda": 300}


def _is_interpreted(impl: Impl, device: torch.device) -> bool:
    return impl.name == "triton" and device.type == "cpu"


def share(impl: Impl, device: torch.device) -> int:
    """Return how many of the profile's examples an implementation is asked."""
    most = hypothesis.settings().max_examples  # the profile's
    if _is_interpreted(impl, device):
        return max(1, most // INTERPRETED_SHARE)
    return most if impl.strict else max(1, most // PEER_SHARE)


def law(
    *,
    asked: dict[str, Any] | None = None,
    needs: str = "",
    drawn: dict[str, st.SearchStrategy[Any]] | None = None,
    **fixed: object,
) -> Callable[[Check], Callable[[Impl, torch.device], None]]:
    """Make a test of ``check(impl, question)``: run it on questions that the implementation takes.

    One that does not claim the contract (``strict``) is asked ordinary values only; and if it
    breaks the law that is an expected failure, reported with the smallest example: its maker's to
    mend.

    Args:
        asked: arguments of ``strategies.problems``.
        needs: of the facts "grad", "lse" and "strict", those without which the law says nothing.
        drawn: further arguments of ``check``.
        fixed: attributes of ``Question`` that are not drawn.
    """

    def decorate(check: Check) -> Callable[[Impl, torch.device], None]:
        def test(impl: Impl, device: torch.device) -> None:
            _skip(impl, device, needs.split())
            grad = impl.grad and bool(fixed.get("grad", True))

            def solves(problem: Problem) -> bool:
                return impl.why_not(problem, device, grad=grad) is None

            limits: dict[str, Any] = {"shortest": 1, "longest": LONGEST[device.type]}
            limits |= {"groups": (1, 2)}
            limits |= {"batches": (1,) if _is_interpreted(impl, device) else (1, 2)}
            question = questions(
                device,
                solves,
                asked=problems(**limits | (asked or {})),
                strict=impl.strict,
                **fixed | {"grad": grad, "lse": impl.lse and bool(fixed.get("lse", True))},
            )
            held = hypothesis.given(question=question, **drawn or {})(Count.of(check))
            # One failure, so that it is an AssertionError and not a group of them.
            settings = hypothesis.settings(
                max_examples=share(impl, device), report_multiple_bugs=False
            )
            try:
                settings(held)(impl)
            except AssertionError as error:
                if impl.strict:
                    raise
                pytest.xfail(f"{impl.name}: {error}")

        test.__name__, test.__qualname__ = check.__name__, check.__qualname__
        test.__doc__, test.__module__ = check.__doc__, check.__module__
        return test

    return decorate


def _skip(impl: Impl, device: torch.device, needs: list[str]) -> None:
    missing = {
        "grad": f"{impl.name} is not differentiable",
        "lse": f"{impl.name} does not return the logsumexp",
        "strict": f"{impl.name} does not claim the contract beyond ordinary inputs",
    }
    for fact in needs:
        if not getattr(impl, fact):
            pytest.skip(missing[fact])
    reason = impl.why_not(ORDINARY, device)
    if reason is not None:
        pytest.skip(reason)
    if impl.compiles:
        pytest.skip(f"{impl.name} compiles for seconds at every new shape")
