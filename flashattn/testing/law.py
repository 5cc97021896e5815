"""A law: a check that holds for every sample, as a test of every implementation."""

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
# One in so many of the profile's examples: the interpreter takes a quarter of a second for what
# others do in 5 ms, and our Python is the same on any device.
SHARES = {"cpu": {"triton": 8, "reference": 2}, "cuda": {"tiled": 10, "reference": 10}}
QUICKER = 100  # examples at most of the profiles that are quicker than the thorough one, on a GPU
OURS, PEERS = {"cpu": 1, "cuda": 2}, {"cpu": 4, "cuda": 20}
LIMITS: dict[str, dict[str, Any]] = {
    # Two tiles of keys and three of queries for the interpreter.
    "cpu": {"longest": 80},
    # As many of a GPU's; each further head dimension and dtype has its kernels compiled, and the
    # accuracy tests have them all.
    "cuda": {"longest": 160, "head_dims": (64,), "dtypes": ("bfloat16", "float32")},
}


def share(impl: Impl, device: torch.device, profile: str | None = None) -> int:
    """Return how many of a profile's examples an implementation is asked; None: the one in use."""
    others = (PEERS if impl.excused else OURS)[device.type]
    used = hypothesis.settings() if profile is None else hypothesis.settings.get_profile(profile)
    most = used.max_examples
    return max(1, most // SHARES[device.type].get(impl.name, others))


def kinds_of(name: str, impl: Impl) -> list[list[int]]:
    """Return groups of kinds of problems: on a GPU a law asks the first that can be solved.

    Of ours it asks one kind and the next law another; the thorough profile asks all.
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
    """Make a test of ``check(impl, sample)``: run it on samples that the implementation takes.

    One that does not claim the contract (``strict``) is asked ordinary values only; and if it
    breaks the law that is an expected failure, reported with the smallest example: its maker's to
    mend.

    Args:
        asked: arguments of ``strategies.problems``.
        needs: of the facts "grad", "lse", "strict", "repeats", "windows", "intervals", "softcap",
            "alibi" and "bias", those without which the law says nothing.
        drawn: further arguments of ``check``.
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
                # An expected failure is shrunk, but nobody waits for what else could be varied.
                phases=phases - {hypothesis.Phase.explain} if impl.excused else phases,
                max_examples=share(impl, device),
                report_multiple_bugs=False,  # one AssertionError, and not a group of them
                derandomize=impl.excused,  # or peers would fail in one run and not in the next
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
    """Make a test of ``check(impl, device)``, which is asked once and may draw by ``chance``.

    Needs are as for ``law``; one that does not claim the contract is excused as in a law.
    """

    def decorate(check: Check) -> Test:
        def test(impl: Impl, device: torch.device) -> None:
            with excusing(impl):
                check(impl, device)

        return _named(test, check, needs)

    return decorate


def _named(test: Test, check: Check, needs: str) -> Test:
    """Return ``test`` as pytest should see it, left out where the implementation is not asked."""
    test.__name__, test.__qualname__ = check.__name__, check.__qualname__
    test.__doc__, test.__module__ = check.__doc__, check.__module__
    test.is_law = True  # type: ignore[attr-defined]
    return pytest.mark.why_not.with_args(lambda impl: unasked(impl, DEVICE, f"{needs} eager"))(test)


@contextmanager
def excusing(impl: Impl) -> Iterator[None]:
    """Report what an excused implementation gets wrong as an expected failure, in every run."""
    try:
        with alike() if impl.excused else nullcontext():
            yield
    except (AssertionError, RuntimeError, hypothesis.errors.FlakyFailure) as error:
        if not impl.excused:
            raise
        pytest.xfail(f"{impl.name}: {error}")


def unasked(impl: Impl, device: torch.device, needs: str = "") -> str | None:
    """Return why an implementation is not asked on a device, or None.

    Needs are as for ``law``, and "eager": it does not compile every new shape.
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
    """Return whether an implementation runs in Triton's interpreter, which takes its time."""
    problem = next((p for p in ORDINARY if impl.why_not(p, device) is None), None)
    never = device.type != "cpu" or os.environ.get("TRITON_INTERPRET") != "1" or impl.compiles
    if never or problem is None:
        return False
    inputs = make_inputs(problem, device=device)
    return interprets(partial(impl, *inputs, **problem.keywords, scale=0.125))
