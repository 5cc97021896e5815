"""Error budgets: how wrong an implementation may be, derived from the reference, never typed in.

Every output is compared with the fp64 reference on the same quantised inputs. Its budget follows
from the error of naive, the reference in the implementation's own dtype. With e(x) = |x - exact|,
for each of o, lse, dq, dk, dv::

    max e(got)  <=  2.0 * max e(naive)  + eps * max |exact|  + max stored
    mean e(got) <=  1.1 * mean e(naive) + eps * mean |exact| + mean stored

``eps`` is that of the dtype of ``got`` and stands for one rounding of the result. Below the
smallest normal number a rounding error is as large as at that number (``last_place``). ``stored``
is the error that recomputation adds to a gradient (see ``testing.stored``). In half precision the
eps term is larger than ``stored``.

A GPU may flush denormal fp32 numbers to zero, as its exp2 does. So on a GPU the smallest normal
fp32 number is added to every budget, and on a CPU too for an implementation that does not claim
``denormals``. An example is the bf16 decomposition of fp32: its terms are at least 2^-133 apart, so
below 2^-110 it is off by half of that.

In fp32 the summation order of a score matters. If its terms have the same sign, a sequential sum is
up to four times as wrong as the vectorized sum of a library, and on a GPU a library has different
kernels for different sizes. Naive stands for any order, so the scores are summed sequentially as
well, and o and lse may be as wrong as the worse of the two.

A few numbers say little about naive's error, as some are right by luck. So for a small problem
naive also runs on further draws, ``sample.POOL`` elements in all. If all scores of a row are equal,
the rows of o are alike, too, and those of a head count as one. The mean is checked only from
``MEAN_SAMPLE`` elements on: there four standard errors of the mean of half-normal errors,
4 * 0.76 / sqrt(n), fit into the tenth that the budget allows.

In fp64 naive is the exact result itself, so its error is that of fp32, scaled by the ratio of eps.
The same is done in fp16 where naive overflows, as dS times a softcap does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch

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

SMALL = 1 << 15  # a sample with at most so many elements of o is cached for longer
MEAN_SAMPLE = 1024
OF_KEYS = ("dk", "dv")  # outputs with a row for each key
FLUSHED = torch.finfo(torch.float32).tiny


def relative_errors(call: Call, case: Case) -> dict[str, float]:
    """Return the norm of each output's error, relative to the norm of the fp64 output.

    This shows how many bits the products preserve, whereas budgets require those of the dtype.
    Fully masked rows, whose logsumexp is -inf, do not count.
    """
    exact, errors = run_reference(case, torch.float64), {}
    for name, x in run(call, case).items():
        live = exact[name].isfinite()
        wanted = exact[name][live]
        errors[name] = ((x[live].double() - wanted).norm() / wanted.norm()).item()
    return errors


def _finite(x: torch.Tensor) -> torch.Tensor:
    """Return which elements are finite, in half the time of ``isfinite`` on a CPU."""
    return x.abs() < torch.inf


class Error(NamedTuple):
    """The error of one output: max, mean and signed mean over its elements."""

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

    All numbers are copied to the host at once: on a shared GPU each copy has to wait.
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
    """Return the reference's o and lse for sequentially summed scores, in the inputs' dtype.

    The reference gets the scores as q and the identity as k, so that its own product is exact.
    Return nothing if a score is infinite or NaN, as its product with 0 is NaN.
    """
    q, k, v = (x.detach() for x in case.inputs)
    group = case.problem.heads // max(case.problem.kv_heads, 1)
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = q.new_zeros((*q.shape[:3], k.shape[2]))
    product = torch.empty_like(scores)
    columns = (x.movedim(-1, 0).contiguous() for x in (q, k))
    for a, b in zip(*columns, strict=True):
        scores += torch.mul(a[..., :, None], b[..., None, :], out=product)
    if not _finite(scores).all():
        return {}
    identity = torch.eye(k.shape[2], dtype=q.dtype, device=q.device).expand(*k.shape[:3], -1)
    return run_reference(replace(case, inputs=(scores, identity, v), grad_o=None))


def naive_errors(case: Case, exact: Outputs) -> dict[str, Error]:
    """Return the errors of the reference in the case's own dtype."""
    dtype = case.problem.torch_dtype
    if dtype == torch.float64:
        return _errors_of_fp32(case, exact)
    outputs = run_reference(case)
    live = {name: _finite(x) for name, x in exact.items()}
    if torch.stack([(live[n] & ~_finite(x)).any() for n, x in outputs.items()]).any():
        return _errors_of_fp32(case, exact)
    errors = errors_of(outputs, exact)
    if dtype == torch.float32:
        others = errors_of(one_by_one(case), exact)
        errors |= {name: errors[name].joined(error) for name, error in others.items()}
    return errors


def _errors_of_fp32(case: Case, exact: Outputs) -> dict[str, Error]:
    """Return the errors of the reference in fp32, scaled by the ratio of eps."""
    eps = (torch.finfo(x).eps for x in (case.problem.torch_dtype, torch.float32))
    ratio, narrow = next(eps) / next(eps), run_reference(case, torch.float32)
    return {name: error.scaled(ratio) for name, error in errors_of(narrow, exact).items()}


def last_place(dtype: torch.dtype, size: float) -> float:
    """Return the spacing of numbers of a size, or of the smallest normal one if that is larger."""
    info = torch.finfo(dtype)
    return info.eps * max(size, info.tiny) if size else 0.0


def largest(outputs: Outputs) -> dict[str, float]:
    """Return the largest finite magnitude of each output."""
    finite = [x.nan_to_num(0.0, 0.0, 0.0).abs() for x in outputs.values()]
    sizes = torch.stack([x.max() if x.numel() else x.sum() for x in finite]).tolist()
    return dict(zip(outputs, sizes, strict=True))


@dataclass(frozen=True)
class Expected:
    """What results are compared with: exact outputs, naive's errors, sizes and further terms."""

    exact: Outputs
    naive: dict[str, Error]
    sizes: dict[str, float]
    stored: Outputs
    flushed: float

    @classmethod
    def of(cls, case: Case, enlarged: Case | None = None) -> Expected:
        """Compute them for a case; ``enlarged`` adds further draws to naive's errors."""
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
        """Return what to compare with if only some rows of dk and dv are checked."""
        exact, stored = (
            {name: x[..., rows, :] if name in OF_KEYS else x for name, x in outputs.items()}
            for outputs in (self.exact, self.stored)
        )
        return replace(self, exact=exact, stored=stored)

    def failures(self, got: Outputs) -> list[str]:
        """Return a sentence for each budget that ``got`` exceeds."""
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
        """Return each output's mean finite magnitude, and the maximum and mean of ``stored``."""
        numbers = []
        for name, exact in self.exact.items():
            finite, stored = _finite(exact), self.stored.get(name, exact.new_zeros(1))
            typical = exact.abs().where(finite, 0.0).sum() / finite.sum().clamp(min=1)
            most = stored.max() if stored.numel() else stored.sum()
            numbers.append(torch.stack([typical, most, stored.mean()]))
        return dict(zip(self.exact, torch.stack(numbers).tolist(), strict=True))

    def budgets(self, name: str, x: torch.Tensor) -> dict[str, float]:
        """Return the budget of x's max error and, if x is large enough, of its mean error."""
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
    """Scale errors of gradients summed over a larger batch to one sample; set their sizes to 0."""
    ratio = max(enlarged.problem.batch, 1) / max(case.problem.batch, 1)
    shared = [f"d{name}" for name, x in case.scored.items() if name in LEARNED and x.shape[0] == 1]
    errors = errors | {name: errors[name].scaled(ratio**-0.5) for name in shared if name in errors}
    return errors, sizes | {name: 0.0 for name in shared if name in sizes}


def expected_of(sample: Sample) -> Expected:
    """Compute what results are compared with, cached on a CPU for the next implementation.

    The cache for large samples is small: as many as one test uses in a row. Nothing is cached on a
    GPU, which recomputes quickly, and whose memory 16 workers with such caches would fill.
    """
    p = sample.problem
    if torch.device(sample.device).type != "cpu":
        return _expected(sample)
    kept = _small if p.batch * p.heads * p.seq_q * p.head_dim <= SMALL else _large
    found = kept(replace(sample, denormals=True))  # it changes only ``flushed``
    return found if sample.denormals else replace(found, flushed=FLUSHED)


def _expected(sample: Sample) -> Expected:
    return Expected.of(sample.draw(), sample.enlarged().draw())


_small = lru_cache(maxsize=128)(_expected)  # for one implementation after another
_large = lru_cache(maxsize=8)(_expected)


class InaccurateError(AssertionError):
    """Some outputs exceed their error budgets."""

    def __init__(self, sample: Sample, failures: list[str]) -> None:
        """Name the outputs, errors and budgets; keep the sample so that it can be run again."""
        super().__init__(f"{sample.problem}: " + "; ".join(failures))
        self.sample = sample


def assert_accurate(call: Call, sample: Sample, *, guarded: bool = True) -> None:
    """Run ``call`` (see ``run``) on the sample and check every output against its budgets.

    If ``guarded``, inputs and outputs are surrounded by poison, which a compiler cannot trace.

    Raises:
        InaccurateError: an output exceeds its budget or has a wrong form, or the call wrote to
            memory that is not an output.
    """
    case = sample.draw()
    try:
        got = (run_guarded if guarded else run_checked)(call, case)
    except AssertionError as error:  # a wrong form, or a write outside of outputs
        raise InaccurateError(sample, [str(error)]) from error
    failures = expected_of(sample).failures(got)
    if failures:
        raise InaccurateError(sample, failures)
