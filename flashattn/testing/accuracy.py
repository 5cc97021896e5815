"""Error budgets, derived and never typed: how wrong may an implementation be?

Everything is judged against the reference in fp64 on the same quantised inputs, beside naive: the
reference in the implementation's own dtype. Writing e(x) for |x - exact|, for each of o, lse, dq,
dk, dv::

    max e(got)  <=  2.0 * max e(naive)  + eps * max |exact|  + max stored
    mean e(got) <=  1.1 * mean e(naive) + eps * mean |exact| + mean stored

``eps`` belongs to the dtype of ``got`` and stands for one rounding of the result, which below the
smallest normal number takes as much as there (``last_place``). ``stored`` is what recomputation
costs a gradient, see ``testing.stored``. In half precision eps is larger than all of it.

A GPU may flush what is smaller than the smallest normal fp32, as its exp2 does; so much is allowed
there, and on a CPU to whoever does not claim ``denormals``: fp32 that is cut into parts of bf16,
which are 2^-133 apart at the least, is off by half of that below 2^-110.

In fp32 the order counts in which a score is summed: where its terms have one sign, one by one is
up to four times as wrong as in the lanes of a library, which on a GPU has other kernels for other
sizes. Any order is naive's, so the scores are summed one by one as well, and o and lse may be as
wrong as the worse of the two.

A handful of numbers says little about how wrong naive is, as some are right by luck. So naive is
run on further draws of a small problem, until there are ``sample.POOL`` elements; where all scores
of a row are alike, so are the rows of o, and those of a head count as one. And a mean is judged
only from ``MEAN_SAMPLE`` elements on: there four standard errors of the mean of half-normal errors,
4 * 0.76 / sqrt(n), fit into the tenth that the budget allows.

In fp64 naive is the exact result itself; there its error is that of fp32, scaled by the ratio of
eps. So it is in fp16 where naive overflows, as dS times a softcap does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch

from flashattn.reference import reference_attention
from flashattn.testing.sample import (
    LEARNED,
    Call,
    Case,
    Outputs,
    Sample,
    run,
    run_checked,
    run_guarded,
    run_reference,
)
from flashattn.testing.stored import stored_terms

SMALL = 1 << 15  # elements of o, at the most, of a sample whose exact outputs are kept for long
MEAN_SAMPLE = 1024
OF_KEYS = ("dk", "dv")  # outputs with a row for each key
FLUSHED = torch.finfo(torch.float32).tiny


def relative_errors(call: Call, case: Case) -> dict[str, float]:
    """Return how far each output of ``call`` is from fp64's: the norm of its error over its own.

    It says how many bits products keep, where budgets ask for those of the dtype. Rows that see no
    key, whose logsumexp is no number, do not count.
    """
    exact, errors = run_reference(case, torch.float64), {}
    for name, x in run(call, case).items():
        live = exact[name].isfinite()
        wanted = exact[name][live]
        errors[name] = ((x[live].double() - wanted).norm() / wanted.norm()).item()
    return errors


def _finite(x: torch.Tensor) -> torch.Tensor:
    """Return which elements are finite, in half of the time that ``isfinite`` takes on a CPU."""
    return x.abs() < torch.inf


def all_finite(x: torch.Tensor) -> bool:
    """Return whether no element is infinite or NaN: its extremes say so in one pass."""
    return x.numel() == 0 or bool(torch.stack(x.aminmax()).isfinite().all())


class Error(NamedTuple):
    """Error of one output: max, mean and signed mean of its elements' errors."""

    max: float = 0.0
    mean: float = 0.0
    bias: float = 0.0

    @classmethod
    def of(cls, got: torch.Tensor, exact: torch.Tensor) -> Error:
        """Compare where ``exact`` is finite."""
        return errors_of({"": got}, {"": exact})[""]

    def joined(self, other: Error) -> Error:
        """Return the larger of each."""
        return Error(*map(max, self, other))

    def scaled(self, factor: float) -> Error:
        """Return each times ``factor``."""
        return Error(*(x * factor for x in self))


def errors_of(got: Outputs, exact: Outputs) -> dict[str, Error]:
    """Compare each output where ``exact`` is finite.

    All numbers are read at once: on a GPU that others use, too, each read waits for a turn.
    """
    numbers = []
    for name, x in got.items():
        finite = _finite(exact[name])
        errors = (x.double() - exact[name]).where(finite, 0.0)
        sizes, count = errors.abs(), finite.sum().clamp(min=1)
        most = sizes.max() if sizes.numel() else sizes.sum()
        numbers.append(torch.stack([most, sizes.sum() / count, errors.sum() / count]))
    found = torch.stack(numbers).tolist() if numbers else []
    return {name: Error(*row) for name, row in zip(got, found, strict=True)}


def one_by_one(case: Case) -> Outputs:
    """Return the reference's o and lse of scores that are summed one by one, in the inputs' dtype.

    The scores stand in for q and the identity for k: then the product that the reference makes of
    them is exact. Nothing where a score is infinite or NaN, which 0 does not cancel.
    """
    q, k, v = (x.detach() for x in case.inputs)
    group = case.problem.heads // max(case.problem.kv_heads, 1)
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = q.new_zeros((*q.shape[:3], k.shape[2]))
    product = torch.empty_like(scores)
    columns = (x.movedim(-1, 0).contiguous() for x in (q, k))
    for a, b in zip(*columns, strict=True):
        scores += torch.mul(a[..., :, None], b[..., None, :], out=product)
    if not all_finite(scores):
        return {}
    identity = torch.eye(k.shape[2], dtype=q.dtype, device=q.device).expand(*k.shape[:3], -1)
    p = case.problem
    o, lse = reference_attention(
        scores,
        identity,
        v,
        mask=p.mask,
        scale=case.scale,
        softcap=p.softcap,
        bounds=case.bounds,
        **case.scored,
    )
    return {"o": o, "lse": lse}


def naive_errors(case: Case, exact: Outputs) -> dict[str, Error]:
    """Return how wrong the reference is in the case's own dtype."""
    dtype = case.problem.torch_dtype
    if dtype == torch.float64:
        return _errors_of_fp32(case, exact)
    outputs = run_reference(case)
    live = {name: _finite(x) for name, x in exact.items()}
    if torch.stack([(live[n] & ~_finite(x)).any() for n, x in outputs.items()]).any():
        return _errors_of_fp32(case, exact)
    errors = errors_of(outputs, exact)
    if dtype == torch.float32:
        others = {name: x for name, x in one_by_one(case).items() if name in errors}
        errors |= {n: errors[n].joined(error) for n, error in errors_of(others, exact).items()}
    return errors


def _errors_of_fp32(case: Case, exact: Outputs) -> dict[str, Error]:
    """Return how wrong the reference is in fp32, scaled by the ratio of eps."""
    eps = (torch.finfo(x).eps for x in (case.problem.torch_dtype, torch.float32))
    ratio, narrow = next(eps) / next(eps), run_reference(case, torch.float32)
    return {name: error.scaled(ratio) for name, error in errors_of(narrow, exact).items()}


def last_place(dtype: torch.dtype, size: float) -> float:
    """Return how far apart numbers of a size are; denormal ones as the smallest that is not."""
    info = torch.finfo(dtype)
    return info.eps * max(size, info.tiny) if size else 0.0


def largest(outputs: Outputs) -> dict[str, float]:
    """Return the largest finite magnitude of each output."""
    finite = [x.nan_to_num(0.0, 0.0, 0.0).abs() for x in outputs.values()]
    sizes = torch.stack([x.max() if x.numel() else x.sum() for x in finite]).tolist()
    return dict(zip(outputs, sizes, strict=True))


@dataclass(frozen=True)
class Expected:
    """What a result is held against: exact outputs, naive's errors, sizes, further terms."""

    exact: Outputs
    naive: dict[str, Error]
    sizes: dict[str, float]
    stored: Outputs
    flushed: float

    @classmethod
    def of(cls, case: Case, enlarged: Case | None = None) -> Expected:
        """Compute it; ``enlarged`` adds further draws to naive's errors."""
        exact = run_reference(case, torch.float64)
        naive, sizes = naive_errors(case, exact), largest(exact)
        if enlarged is not None:
            more = run_reference(enlarged, torch.float64)
            others, larger = naive_errors(enlarged, more), largest(more)
            others, larger = _of_one_sample(case, enlarged, others, larger)
            naive = {name: error.joined(others[name]) for name, error in naive.items()}
            sizes = {name: max(size, larger[name]) for name, size in sizes.items()}
        flushed = FLUSHED if case.inputs[0].is_cuda or not case.denormals else 0.0
        return cls(exact, naive, sizes, stored_terms(case, exact), flushed)

    def of_keys(self, rows: slice) -> Expected:
        """Return it where of dk and dv some rows alone are held against it."""
        exact, stored = (
            {name: x[..., rows, :] if name in OF_KEYS else x for name, x in outputs.items()}
            for outputs in (self.exact, self.stored)
        )
        return replace(self, exact=exact, stored=stored)

    def failures(self, got: Outputs) -> list[str]:
        """Return a sentence for each budget that ``got`` breaks."""
        exact = {name: self.exact[name] for name in got}
        shapes = [
            f"{name}: shape {list(x.shape)}, wanted {list(exact[name].shape)}"
            for name, x in got.items()
            if x.shape != exact[name].shape
        ]
        if shapes:
            return shapes
        odd = torch.stack([_is_odd(x, exact[name]) for name, x in got.items()]).tolist()
        sound = {n: x for (n, x), is_odd in zip(got.items(), odd, strict=True) if not is_odd}
        failures = [
            f"{name}: infinite or NaN where the exact result is not, or the reverse"
            for name in got
            if name not in sound
        ]
        for name, error in errors_of(sound, exact).items():
            failures += [
                f"{name}: {which} error {size:.3g}, budget {budget:.3g} (naive={self.naive[name]})"
                for which, budget in self.budgets(name, sound[name]).items()
                if not (size := getattr(error, which)) <= budget
            ]
        return failures

    @cached_property
    def _numbers(self) -> dict[str, list[float]]:
        """The mean finite magnitude of each output; what is stored at the most, and on average."""
        numbers = []
        for name, exact in self.exact.items():
            finite, stored = _finite(exact), self.stored.get(name, exact.new_zeros(1))
            typical = exact.abs().where(finite, 0.0).sum() / finite.sum().clamp(min=1)
            most = stored.max() if stored.numel() else stored.sum()
            numbers.append(torch.stack([typical, most, stored.mean()]))
        return dict(zip(self.exact, torch.stack(numbers).tolist(), strict=True))

    def budgets(self, name: str, x: torch.Tensor) -> dict[str, float]:
        """Return how large the largest and, of a sample, the mean error of output x may be."""
        naive, (typical, stored, mean_stored) = self.naive[name], self._numbers[name]
        most = 2.0 * naive.max + last_place(x.dtype, self.sizes[name]) + stored + self.flushed
        if x.numel() < MEAN_SAMPLE:
            return {"max": most}
        mean = 1.1 * naive.mean + last_place(x.dtype, typical) + mean_stored + self.flushed
        return {"max": most, "mean": mean}


def _is_odd(x: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return whether x is infinite or NaN where the exact result is not, or the reverse."""
    return torch.where(_finite(exact), ~_finite(x), x.double() != exact).any()


def _of_one_sample(
    case: Case, enlarged: Case, errors: dict[str, Error], sizes: dict[str, float]
) -> tuple[dict[str, Error], dict[str, float]]:
    """Return the errors and sizes of larger batches, of sums over these those of a sample's."""
    ratio = max(enlarged.problem.batch, 1) / max(case.problem.batch, 1)
    shared = [f"d{name}" for name, x in case.scored.items() if name in LEARNED and x.shape[0] == 1]
    errors = errors | {name: errors[name].scaled(ratio**-0.5) for name in shared if name in errors}
    return errors, sizes | {name: 0.0 for name in shared if name in sizes}


def expected_of(sample: Sample) -> Expected:
    """Compute what results are held against; a CPU keeps small ones for the next implementation.

    Of large ones it keeps a few, as many as a test asks one after another. A GPU computes
    all in no time, and 16 workers that kept them would fill its memory.
    """
    p = sample.problem
    if torch.device(sample.device).type != "cpu":
        return _expected(sample)
    kept = _small if p.batch * p.heads * p.seq_q * p.head_dim <= SMALL else _large
    found = kept(replace(sample, denormals=True))  # they change only ``flushed``
    return found if sample.denormals else replace(found, flushed=FLUSHED)


def _expected(sample: Sample) -> Expected:
    return Expected.of(sample.draw(), sample.enlarged().draw())


_small = lru_cache(maxsize=128)(_expected)  # asked of one implementation, then of the next
_large = lru_cache(maxsize=8)(_expected)


class InaccurateError(AssertionError):
    """Some outputs are off their budgets."""

    def __init__(self, sample: Sample, failures: list[str]) -> None:
        """Say which, by how much, and what was allowed; the sample can be run again."""
        super().__init__(f"{sample.problem}: " + "; ".join(failures))
        self.sample = sample


def assert_accurate(call: Call, sample: Sample, *, guarded: bool = True) -> None:
    """Run ``call``, see ``run``, on the sample and hold every output to its budgets.

    If ``guarded``, inputs and outputs lie among poison; a compiler cannot trace through that.

    Raises:
        InaccurateError: which outputs are off, by how much, and what was allowed; or what was
            written to that is no output.
    """
    case = sample.draw()
    try:
        got = (run_guarded if guarded else run_checked)(call, case)
    except AssertionError as error:  # of its form, or of memory that it wrote to
        raise InaccurateError(sample, [str(error)]) from error
    failures = expected_of(sample).failures(got)
    if failures:
        raise InaccurateError(sample, failures)
