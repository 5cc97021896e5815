"""Laws: checks that hold for every sample, made into tests of every implementation."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from flashattn.measure.timing import interprets
from flashattn.problem import Problem
from flashattn.registry import Impl
from flashattn.testing.examples import Check, Count
from flashattn.testing.inputs import make_inputs
from flashattn.testing.seed import alike, chance
from flashattn.testing.strategies import KINDS, SCALES, samples

DTYPES = ("bfloat16", "float16", "float32")
Test = Callable[[Impl, torch.device], None]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ORDINARY = [
    *(Problem(seq_q=64, head_dim=64, dtype=dtype, causal=True) for dtype in DTYPES),
    *(Problem(seq_q=64, head_dim=64, dtype=dtype) for dtype in DTYPES),
]
# Divisors of the profile's number of examples: the interpreter takes a quarter of a second where
# others take 5 ms, and our Python code is the same on any device.
SHARES = {"cpu": {"triton": 8, "reference": 2}, "cuda": {"tiled": 10, "reference": 10}}
QUICKER = 100  # most examples of a profile quicker than the thorough one, on a GPU
OURS, PEERS = {"cpu": 1, "cuda": 2}, {"cpu": 4, "cuda": 20}
LIMITS: dict[str, dict[str, Any]] = {
    # Two tiles of keys and three of queries in the interpreter.
    "cpu": {"longest": 80},
    # As many tiles on a GPU. Each further head dimension or dtype has more kernels to compile, and
    # the accuracy tests cover all of them.
    "cuda": {"longest": 160, "head_dims": (64,), "dtypes": ("bfloat16", "float32")},
}


def share(impl: Impl, device: torch.device, profile: str | None = None) -> int:
    """Return the number of examples for an implementation; None is the profile in use."""
    others = (PEERS if impl.excused else OURS)[device.type]
    used = hypothesis.settings() if profile is None else hypothesis.settings.get_profile(profile)
    most = used.max_examples
    return max(1, most // SHARES[device.type].get(impl.name, others))


def kinds_of(name: str, impl: Impl) -> list[list[int]]:
    """Return groups of kinds of problems: on a GPU a law uses the first group that can be solved.

    For our own implementations each group is one kind, in an order that the run's seed and the
    law's name decide. For others, and in the thorough profile, one group has all kinds.
    """
    ours = not impl.excused and not impl.origin
    few = ours and hypothesis.settings().max_examples <= QUICKER
    drawn = chance("kinds", name).sample(range(KINDS), KINDS)
    return [[kind] for kind in drawn] if few else [drawn]


def law(
    *,
    asked: dict[str, Any] | None = None,
    needs: str = "",
    drawn: dict[str, st.SearchStrategy[Any]] | None = None,
    **fixed: Any,
) -> Callable[[Check], Test]:
    """Turn ``check(impl, sample)`` into a test on samples that the implementation takes.

    An implementation that does not claim the contract (``strict``) gets ordinary values only. If a
    peer (``excused``) breaks the law, that is an expected failure, reported with the smallest
    example.

    Args:
        asked: arguments of ``strategies.problems``.
        needs: flags that the law requires, separated by spaces: "grad", "lse", "strict", "repeats",
            "windows", "intervals", "softcap", "alibi" or "bias".
        drawn: strategies for further arguments of ``check``.
        fixed: attributes of ``Sample`` that are not drawn.
    """

    def decorate(check: Check) -> Test:
        def test(impl: Impl, device: torch.device) -> None:
            grad = impl.grad and bool(fixed.get("grad", True))

            def solves(problem: Problem) -> bool:
                return impl.why_not(problem, device, grad=grad) is None

            few = impl.name in SHARES[device.type]
            limits = {"shortest": 1, "groups": (1, 2), "batches": (1,) if few else (1, 2)}
            sampled = partial(
                samples,
                device,
                solves,
                asked=limits | LIMITS[device.type] | (asked or {}),
                strict=impl.strict,
                scales=[scale for scale in SCALES if impl.takes_scale(scale)],
                denormals=impl.denormals,
                **fixed | {"grad": grad, "lse": impl.lse and bool(fixed.get("lse", True))},
            )
            phases = set(hypothesis.settings().phases)
            settings = hypothesis.settings(
                # An expected failure is shrunk, but not explained.
                phases=phases - {hypothesis.Phase.explain} if impl.excused else phases,
                max_examples=share(impl, device),
                report_multiple_bugs=False,  # one AssertionError, not a group of several
                derandomize=impl.excused,  # else peers would fail in one run and not the next
                suppress_health_check=list(hypothesis.HealthCheck),
            )
            with excusing(impl):
                for kinds in kinds_of(check.__name__, impl) if device.type == "cuda" else ((),):
                    given = hypothesis.given(sample=sampled(kinds=kinds), **drawn or {})
                    held = given(Count.of(check))
                    if not impl.excused:
                        held = hypothesis.seed(chance(check.__name__).getrandbits(64))(held)
                    with suppress(hypothesis.errors.Unsatisfiable):
                        settings(held)(impl)
                        return
            pytest.skip(f"{impl.name} takes no problem that this law is about")

        return _named(test, check, needs)

    return decorate


def clause(needs: str = "") -> Callable[[Check], Test]:
    """Turn ``check(impl, device)`` into a test that runs once and may draw by ``chance``.

    ``needs`` are those of ``law``; a peer that fails is excused as in a law.
    """

    def decorate(check: Check) -> Test:
        def test(impl: Impl, device: torch.device) -> None:
            with excusing(impl):
                check(impl, device)

        return _named(test, check, needs)

    return decorate


def _named(test: Test, check: Check, needs: str) -> Test:
    """Name ``test`` after its check, and leave it out where the implementation lacks a need."""
    test.__name__, test.__qualname__ = check.__name__, check.__qualname__
    test.__doc__, test.__module__ = check.__doc__, check.__module__
    test.is_law = True  # type: ignore[attr-defined]
    return pytest.mark.why_not.with_args(lambda impl: unasked(impl, DEVICE, f"{needs} eager"))(test)


@contextmanager
def excusing(impl: Impl) -> Iterator[None]:
    """Report the failures of an excused implementation as expected ones, the same in every run."""
    try:
        with alike() if impl.excused else nullcontext():
            yield
    except (AssertionError, RuntimeError, hypothesis.errors.FlakyFailure) as error:
        if not impl.excused:
            raise
        pytest.xfail(f"{impl.name}: {error}")


def unasked(impl: Impl, device: torch.device, needs: str = "") -> str | None:
    """Return why an implementation is not tested on a device, or None.

    ``needs`` are those of ``law``, and "eager": it does not compile for every new shape.
    """
    missing = {
        "eager": f"{impl.name} compiles for seconds at every new shape",
        "grad": f"{impl.name} is not differentiable",
        "lse": f"{impl.name} does not return the logsumexp",
        "windows": f"{impl.name} takes no sliding windows",
        "intervals": f"{impl.name} takes no documents and no mask but a window",
        "softcap": f"{impl.name} takes no softcap",
        "alibi": f"{impl.name} takes no ALiBi",
        "bias": f"{impl.name} takes no bias",
        "repeats": f"{impl.name} does not promise the same bits every time",
        "strict": f"{impl.name} does not claim the contract beyond ordinary inputs",
    }
    lacking = [fact for fact in needs.split() if not getattr(impl, fact, not impl.compiles)]
    unsolved = [impl.why_not(problem, device, grad=impl.grad) for problem in ORDINARY]
    reasons = [missing[fact] for fact in lacking] + ([] if None in unsolved else unsolved)
    return reasons[0] if reasons else None


@cache
def interpreted(impl: Impl, device: torch.device) -> bool:
    """Return whether an implementation runs in Triton's interpreter, which is slow."""
    problem = next((p for p in ORDINARY if impl.why_not(p, device) is None), None)
    never = device.type != "cpu" or os.environ.get("TRITON_INTERPRET") != "1" or impl.compiles
    if never or problem is None:
        return False
    inputs = make_inputs(problem, device=device)
    return interprets(partial(impl, *inputs, **problem.keywords, scale=0.125))
