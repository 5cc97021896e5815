"""Results of an implementation for a sample and for changes of it, and their comparison.

A law says how a result changes when its sample changes. Two results may differ by the sum of their
budgets, for the max and for the mean error (see ``accuracy``). The budget of a sum of n numbers is
n times that of one number.
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
    """A sample, its change, the outputs of the changed case, and how wrong they may be."""

    sample: Sample  # before the change
    change: Change
    case: Case  # the sample, drawn and changed
    got: Outputs  # any of o, lse, dq, dk and dv

    @cached_property
    def expected(self) -> Expected:
        """Return what the outputs are compared with."""
        return Expected.of(self.case, self.change(self.sample.enlarged().draw()))

    def budget(self, name: str, times: float = 1.0) -> Budget:
        """Return how wrong a sum of ``times`` elements of an output may be."""
        budgets = self.expected.budgets(name, self.got[name])
        return {which: times * budget for which, budget in budgets.items()}


def ask(impl: Impl, sample: Sample, change: Change = lambda case: case) -> Result:
    """Run ``impl``, guarded by poison, on a sample or on a change of it.

    If the implementation cannot solve the changed case, the example is rejected.
    """
    case = change(sample.draw())
    grad = case.grad_o is not None
    reason = impl.why_not(case.problem, case.inputs[0].device, grad=grad)
    if reason is not None or not impl.takes_scale(case.scale):
        hypothesis.reject()
    call = partial(impl, **case.problem.keywords, scale=case.scale)
    return Result(sample, change, case, run_guarded(call, case))


def assert_within(name: str, errors: torch.Tensor, *budgets: Budget | Lazy) -> None:
    """Check the errors of an output against the sum of budgets.

    A budget that is a function is called only if those before it are not enough.

    Raises:
        AssertionError: the max or the mean error exceeds the sum; the message says which.
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
    """Check that two outputs are equal, element by element (0 and -0 are).

    Raises:
        AssertionError: they differ; for the message see ``unlike``.
    """
    said = unlike(name, one, other)
    assert said is None, said


def unlike(name: str, one: torch.Tensor, other: torch.Tensor) -> str | None:
    """Return how many elements of two outputs differ, and the first that does, or None."""
    if one.shape != other.shape:
        return f"{name}: shape {list(one.shape)}, not {list(other.shape)}"
    different = (one != other).nonzero()
    if not len(different):
        return None
    where = different[0].tolist()
    values = f"{one[tuple(where)].item()!r} and {other[tuple(where)].item()!r}"
    return f"{name}: {len(different)} elements differ, the first at {where}: {values}"


def assert_agree(one: Result, other: Result, *, times: float = 1.0, **back: Back) -> None:
    """Check that the results for a sample and for a change of it agree within both budgets.

    ``back`` has, by the name of an output, the function that maps the other result back to the
    first. ``times`` is the number of elements that this function adds up, or its factor.

    Raises:
        AssertionError: an output differs; the message says which, and by how much.
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
        if differs:  # computing a budget takes as long as both results
            budgets = partial(one.budget, name), partial(other.budget, name, summed)
            assert_within(name, errors[finite], *budgets)
