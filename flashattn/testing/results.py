"""Results: what an implementation gives for a sample and for changes of it, compared.

A law says how a result changes when its sample does. Two results may differ by what both may be
wrong: the sum of their budgets, on the largest and on the mean error (see ``accuracy``). The budget
of a sum of n numbers is n times that of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import hypothesis
import torch

from flashattn.registry import Impl
from flashattn.testing.accuracy import Expected
from flashattn.testing.sample import Case, Outputs, Sample, run_guarded

Change = Callable[[Case], Case]
Back = Callable[[torch.Tensor], torch.Tensor]
Budget = dict[str, float]
Lazy = Callable[[], Budget]
BUDGETS = ("max", "mean")


@dataclass(frozen=True)
class Result:
    """What was asked, what came, and how wrong it may be."""

    sample: Sample  # what was asked ...
    change: Change  # ... before it was changed
    case: Case  # what was asked, drawn and changed
    got: Outputs  # what came, of o, lse, dq, dk and dv

    @cached_property
    def expected(self) -> Expected:
        """What it is held against."""
        return Expected.of(self.case, self.change(self.sample.enlarged().draw()))

    def budget(self, name: str, times: float = 1.0) -> Budget:
        """Return how wrong a sum of ``times`` elements of an output may be."""
        budgets = self.expected.budgets(name, self.got[name])
        return {which: times * budget for which, budget in budgets.items()}


def ask(impl: Impl, sample: Sample, change: Change = lambda case: case) -> Result:
    """Return the result of ``impl``, run among poison, for a sample or for a change of it.

    An example whose change the implementation cannot solve is rejected.
    """
    case = change(sample.draw())
    grad = case.grad_o is not None
    reason = impl.why_not(case.problem, case.inputs[0].device, grad=grad)
    if reason is not None or not impl.takes_scale(case.scale):
        hypothesis.reject()
    call = partial(impl, **case.problem.keywords, scale=case.scale)
    return Result(sample, change, case, run_guarded(call, case))


def assert_within(name: str, errors: torch.Tensor, *budgets: Budget | Lazy) -> None:
    """Hold the errors of an output to the sum of budgets.

    One that is a function is called where those before it are not enough.

    Raises:
        AssertionError: which is larger, the largest or the mean.
    """
    if errors.numel() == 0:
        return
    sizes = errors.abs()
    found = dict(zip(BUDGETS, torch.stack([sizes.max(), sizes.mean()]).tolist(), strict=True))
    allowed = dict.fromkeys(found, 0.0)
    for budget in budgets:
        more = budget() if callable(budget) else budget
        allowed = {which: size + more[which] for which, size in allowed.items() if which in more}
        if all(found[which] <= size for which, size in allowed.items()):
            return
    for which, size in allowed.items():
        message = f"{name}: differs by {found[which]:.3g} ({which}), budget {size:.3g}"
        assert found[which] <= size, message


def assert_same_bits(name: str, one: torch.Tensor, other: torch.Tensor) -> None:
    """Hold two outputs to be equal, element by element (0 and -0 are).

    Raises:
        AssertionError: see ``unlike``.
    """
    said = unlike(name, one, other)
    assert said is None, said


def unlike(name: str, one: torch.Tensor, other: torch.Tensor) -> str | None:
    """Return how many elements of two outputs differ, and the first that does; None if none."""
    if one.shape != other.shape:
        return f"{name}: shape {list(one.shape)}, not {list(other.shape)}"
    different = (one != other).nonzero()
    if not len(different):
        return None
    where = different[0].tolist()
    values = f"{one[tuple(where)].item()!r} and {other[tuple(where)].item()!r}"
    return f"{name}: {len(different)} elements differ, the first at {where}: {values}"


def assert_agree(one: Result, other: Result, *, times: float = 1.0, **back: Back) -> None:
    """Hold the result for a changed sample to that for the plain one, within the budgets of both.

    ``back`` has, by the name of an output, what takes the other result back to the first.
    ``times`` is how many elements it adds up, or what it multiplies by.

    Raises:
        AssertionError: which output differs, and by how much.
    """
    for name in (name for name in one.got if name in other.got):
        changed = back.get(name)
        a, b = one.got[name].double(), other.got[name].double()
        b = b if changed is None else changed(b)
        finite = a.isfinite()
        errors, summed = (a - b).where(finite, 0.0), 1.0 if changed is None else times
        agree = torch.where(finite, b.isfinite(), a == b).all(), errors.any()
        same, differs = torch.stack(agree).tolist()
        assert same, f"{name}: infinite or NaN in one result and not in the other"
        if differs:  # a budget takes as long as both results
            budgets = partial(one.budget, name), partial(other.budget, name, summed)
            assert_within(name, errors[finite], *budgets)
