"""Error budgets, derived and never typed: how wrong may an implementation be?

Everything is judged against the reference in fp64 on the same quantised inputs, beside naive: the
reference in the implementation's own dtype. Writing e(x) for |x - exact|, for each of o, lse, dq,
dk, dv::

    max e(got)  <=  2.0 * max e(naive)  + eps * max |exact|  + max stored
    mean e(got) <=  1.1 * mean e(naive) + eps * mean |exact| + mean stored

``eps`` belongs to the dtype of ``got`` and stands for one rounding of the result, which below the
smallest normal number takes as much as there (``last_place``). ``stored`` is what recomputation
costs a gradient. A fused backward has no P: it finds P = exp(S - lse) and dS = P * (dP - delta),
delta = rowsum(dO * O) - dlse, from the O and lse that forward stored. A rounding moves a number by
eps, which is 3.5 standard deviations (one is eps / sqrt(12)), and independent ones add up as the
root of their squares' sum. Four separate S from lse, which counts where they nearly cancel: m + log
l, that sum made natural, made base 2 again, and S * scale; so a row of P changes by the factor 1 +
a, a = 2 * eps32 * |lse|. Rounding O, and adding up dP and delta in fp32, changes a row's dP - delta
by b = (eps + root(D + 2) * eps32) * |(dO * O, dlse)|: in each of the two sums every product is
rounded once, and so is the running sum at each of D steps, where its square is D / 2 terms' on
average. Both a and b are one number a row, so they are carried exactly along a row, and as
independent between rows::

    stored(dq) = a * |dq| + scale * b * |P @ K|
    stored(dk) = scale * root of ((P * (a * |dP - delta| + b)) ** 2).T @ (Q ** 2)
    stored(dv) = root of ((P * a) ** 2).T @ (dO ** 2)

These matter where naive is exact: with one key, its P is 1 and its dS 0.

The backward sums S in another order than forward, whose S lse has, and a score is as wrong as the
sums that b is made of: P changes by the factor 1 + c, c = scale * root(D + 2) * eps32 * |q * k|,
another number for each score. So scores are carried as independent: dk and dv have a^2 + c^2 in
place of a^2, and dq has one term more::

    scale * root of (P * c * (dP - delta)) ** 2 @ (K ** 2)

Tensor cores do not round a sum, they truncate it (Fasi et al., 2021, "Numerical behavior of NVIDIA
tensor cores"), so what is lost has one sign and adds up. An fp32 product of length D is made of
three TF32 products of D / 8 steps each, or of six bf16 products of D / 16; a step loses half an
eps32 of the running sum on average, and the running sum grows as the root of the steps, to 2 / 3 of
the whole on average: on a GPU b grows by 3 * D / 8 * 1 / 2 * 2 / 3 = D / 8 times eps32. Of a
score only the last of the three products is of full size: t = D / 24 * eps32 * |S| is lost
(measured in docs/tuning-log.md), and c^2 grows by t^2.

With a softcap dS has the score's slope as a further factor, in all of these; so have c and t. Where
tanh is flat the error of the product is lost, and naive has next to none; what is left is that a
score is rounded once more, in base 2::

    stored(o) = root of (P * eps32 * |S|) ** 2 @ (V ** 2)

The slope there is a small difference, 1 - (S / cap) ** 2, and three roundings separate S / cap from
tanh: its own, and those of the product and the quotient with the cap. So the slope is off by
2 * (1 - slope) * root(3) * eps32, and dS by that times P * (dP - delta).

What ALiBi and a bias add is rounded, and so are the scores before and behind it, in base 2: P
changes by the factor 1 + eps32 * |(S, the terms)|, which o and c have besides. The gradient of a
bias is dS, summed over the scores that share an element; that of a sink is the sum over a head's
queries of -p * delta, p = exp(sink - lse)::

    stored(dbias) = root of sum (P * (a * |dP - delta| + b)) ** 2 + 4 * sum of P * c * |dP - delta|
    stored(dsink) = root of sum (p * (a * |delta| + b)) ** 2

The scores that share an element may all be alike, so their c are added up as they are; they are
four times as large where the terms of a score have one sign, too (see below). Where the keys of a
row share one, it has a * |sum dS| + b * sum P, as a and b are carried along the row. And where rows
do, whose lse may be alike, a is carried from row to row: the largest a * |dbias| is added, and a *
|dsink|.

Both are sums over as many batches as a sample has; of larger batches naive's error is as the root
of the ratio larger, and divided by it.

In half precision eps is larger than all of this.

A GPU may flush what is smaller than the smallest normal fp32, as its exp2 does; so much is allowed
there, and on a CPU to whoever does not claim ``denormals``: fp32 that is cut into parts of bf16,
which are 2^-133 apart at the least, is off by half of that below 2^-110.

In fp32 the order counts in which a score is summed: where its terms have one sign, one by one is
up to four times as wrong as in the eight or sixteen lanes of a CPU's library. Any order is naive's,
so on a CPU the scores are summed one by one as well, and o and lse may be as wrong as the worse of
the two.

A handful of numbers says little about how wrong naive is, as some are right by luck. So naive is
run on further draws of a small problem, until there are ``sample.POOL`` elements; where all scores
of a row are alike, so are the rows of o, and those of a head count as one. And a mean is judged
only from ``MEAN_SAMPLE`` elements on: there four standard errors of the mean of half-normal errors,
4 * 0.76 / sqrt(n), fit into the tenth that the budget allows.

In fp64 naive is the exact result itself; there its error is that of fp32, scaled by the ratio of
eps. So it is in fp16 where naive overflows, as dS times a softcap does.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache

import torch

from flashattn import score
from flashattn.reference import reference_attention
from flashattn.score import Terms
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

KEPT = 1 << 15  # elements of o, at the most, of a sample whose exact outputs are kept
MEAN_SAMPLE = 1024
TF32_STEP = 8  # terms that a tensor core adds at once
ONE_SIGN = 4  # how much more wrong a sum may be whose terms have one sign
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


@dataclass(frozen=True)
class Error:
    """Error of one output: max, mean and signed mean of its elements' errors."""

    max: float = 0.0
    mean: float = 0.0
    bias: float = 0.0

    @classmethod
    def of(cls, got: torch.Tensor, exact: torch.Tensor) -> Error:
        """Compare where ``exact`` is finite."""
        errors, finite = got.double() - exact, exact.isfinite()
        if not finite.all():
            errors = errors[finite]
        if errors.numel() == 0:
            return cls()
        return cls(errors.abs().max().item(), errors.abs().mean().item(), errors.mean().item())

    def joined(self, other: Error) -> Error:
        """Return the larger of each."""
        return Error(
            max(self.max, other.max), max(self.mean, other.mean), max(self.bias, other.bias)
        )

    def scaled(self, factor: float) -> Error:
        """Return each times ``factor``."""
        return Error(self.max * factor, self.mean * factor, self.bias * factor)


def one_by_one(case: Case) -> Outputs:
    """Return the reference's o and lse of scores that are summed one by one, in the inputs' dtype.

    The scores stand in for q and the identity for k: then the product that the reference makes of
    them is exact. Nothing where a score is infinite or NaN, which 0 does not cancel.
    """
    q, k, v = (x.detach() for x in case.inputs)
    group = case.problem.heads // max(case.problem.kv_heads, 1)
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = q.new_zeros((*q.shape[:3], k.shape[2]))
    for a, b in zip(q.unbind(-1), k.unbind(-1), strict=True):
        scores += a[..., :, None] * b[..., None, :]
    if not scores.isfinite().all():
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
    if any(not x.isfinite()[exact[name].isfinite()].all() for name, x in outputs.items()):
        return _errors_of_fp32(case, exact)
    errors = {name: Error.of(x, exact[name]) for name, x in outputs.items()}
    if dtype == torch.float32 and not case.inputs[0].is_cuda:
        others = {name: x for name, x in one_by_one(case).items() if name in errors}
        errors |= {n: errors[n].joined(Error.of(x, exact[n])) for n, x in others.items()}
    return errors


def _errors_of_fp32(case: Case, exact: Outputs) -> dict[str, Error]:
    """Return how wrong the reference is in fp32, scaled by the ratio of eps."""
    eps = (torch.finfo(x).eps for x in (case.problem.torch_dtype, torch.float32))
    ratio, narrow = next(eps) / next(eps), run_reference(case, torch.float32)
    return {name: Error.of(x, exact[name]).scaled(ratio) for name, x in narrow.items()}


def stored_terms(case: Case, exact: Outputs) -> Outputs:
    """Return what rounding stored numbers does to o, dq, dk and dv (see the module)."""
    softcap, dtype = case.problem.softcap, case.problem.torch_dtype
    rounded_again = softcap is not None or case.problem.added
    if case.grad_o is None and not rounded_again:
        return {}
    group = case.problem.heads // max(case.problem.kv_heads, 1)
    q, k, v = (x.double() for x in case.inputs)
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    seen = case.seen
    uncapped = (q @ k.mT * case.scale).masked_fill(~seen, 0.0)  # [B, H, T, S]
    scores = score.scores(uncapped, 1.0, softcap)
    sizes = scores.abs()
    slope = torch.ones_like(scores) if softcap is None else score.slope(scores, softcap)
    scores, terms = _with_terms(case, scores)
    scores = scores.masked_fill(~seen, -torch.inf)
    sizes = torch.hypot(sizes, terms).masked_fill(scores == -torch.inf, 0.0)
    sink = case.scored.get("sink")
    p, lse = _softmax(scores, sink)
    accumulated = torch.finfo(torch.promote_types(dtype, torch.float32))
    found = {}
    if rounded_again:
        found["o"] = ((p * sizes * accumulated.eps).square() @ v.square()).sqrt()
    if case.grad_o is None:
        return found
    do = case.grad_o.double()
    a = lse.abs().nan_to_num(posinf=0.0)[..., None] * 2 * accumulated.eps
    terms = do * exact["o"]  # of delta
    if case.grad_lse is not None:
        terms = torch.cat([terms, -case.grad_lse.double()[..., None]], dim=-1)
    delta, size = terms.sum(-1, keepdim=True), terms.square().sum(-1, keepdim=True).sqrt()
    truncated = q.shape[-1] / TF32_STEP if q.is_cuda and dtype == torch.float32 else 0
    summed = (q.shape[-1] + 2) ** 0.5 + truncated
    b = size * (torch.finfo(dtype).eps + summed * accumulated.eps)
    t = uncapped.abs() * truncated / 3
    c = abs(case.scale) * (q.shape[-1] + 2) ** 0.5 * (q.square() @ k.square().mT).sqrt()
    off = slope * (c.square() + t.square()).sqrt() * accumulated.eps  # of each score
    if case.problem.added:
        off = torch.hypot(off, sizes * accumulated.eps)
    dp = (do @ v.mT - delta).abs()
    of_slope = 2 * (1 - slope) * 3**0.5 * accumulated.eps
    of_scores = (p * dp).square() * ((slope * off).square() + of_slope.square())  # of each dS
    dk = ((slope * p * (a * dp + b)).square() + of_scores).mT @ q.square() * case.scale**2
    dv = (p.square() * (a.square() + off.square())).mT @ do.square()
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) if group else x for x in (dk, dv))
    dq = a * exact["dq"].abs() + abs(case.scale) * (
        b * ((slope * p) @ k).abs() + (of_scores @ k.square()).sqrt()
    )
    found |= {"dq": dq, "dk": dk.sqrt(), "dv": dv.sqrt()}
    if "bias" in case.scored:
        found["dbias"] = _of_bias(case, p, do @ v.mT - delta, a, b, off)
    if sink is not None:
        of_sinks = _sink_shares(sink, lse) * (a * delta.abs() + b)[..., 0]
        found["dsink"] = of_sinks.square().sum(-1).sum_to_size(sink.shape).sqrt()
    alike = a.max() if a.numel() else 0.0
    return found | {n: found[n] + alike * exact[n].abs() for n in ("dbias", "dsink") if n in found}


def _softmax(scores: torch.Tensor, sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return P, with 0 in rows that see no key, and lse."""
    lse = scores.logsumexp(-1)
    lse = lse if sink is None else torch.logaddexp(lse, sink.double()[..., None])
    return (scores - lse.masked_fill(lse == -torch.inf, torch.inf)[..., None]).exp(), lse


def _sink_shares(sink: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Return the shares of sinks in rows of the softmax, [B, H, T]."""
    return (sink.double()[..., None] - lse.masked_fill(lse == -torch.inf, torch.inf)).exp()


def _with_terms(case: Case, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores with what is added to them, and how large that is in all."""
    q, k, _ = case.inputs
    terms = Terms.of(q, k, case.scored.get("alibi_slopes"), case.scored.get("bias"))
    whole = slice(0, q.shape[2]), slice(0, k.shape[2])
    return terms.added(scores, *whole), terms.added(torch.zeros_like(scores), *whole).abs()


def _of_bias(
    case: Case,
    p: torch.Tensor,
    dp: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    off: torch.Tensor,
) -> torch.Tensor:
    """Return what rounding stored numbers does to dbias.

    Args:
        case: what is asked.
        p: P [B, H, T, S].
        dp: dP - delta, likewise.
        a: see the module, [B, H, T, 1].
        b: likewise.
        off: c, [B, H, T, S].
    """
    q, k, _ = case.inputs
    bias = case.scored["bias"]
    carried = p * (a * dp.abs() + b)
    if bias.shape[-1] == 1 and k.shape[2] > 0:  # the keys of a row share an element
        of_row = a * (p * dp).sum(-1, keepdim=True).abs() + b * p.sum(-1, keepdim=True)
        carried = of_row / k.shape[2] ** 0.5  # whose squares add up to the row's
    squares, alike = (torch.zeros(bias.shape, dtype=p.dtype, device=p.device) for _ in range(2))
    whole, terms = (slice(0, q.shape[2]), slice(0, k.shape[2])), Terms.of(q, k, bias=bias)
    terms.add_gradient(squares, carried.square().expand_as(p), *whole)
    terms.add_gradient(alike, p * dp.abs() * off, *whole)
    return squares.sqrt() + ONE_SIGN * alike


def last_place(dtype: torch.dtype, size: float) -> float:
    """Return how far apart numbers of a size are; denormal ones as the smallest that is not."""
    info = torch.finfo(dtype)
    return info.eps * max(size, info.tiny) if size else 0.0


def largest(outputs: Outputs) -> dict[str, float]:
    """Return the largest finite magnitude of each output."""
    finite = {name: x.where(x.isfinite(), 0.0).abs() for name, x in outputs.items()}
    return {name: x.max().item() if x.numel() else 0.0 for name, x in finite.items()}


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

    def failures(self, got: Outputs) -> list[str]:
        """Return a sentence for each budget that ``got`` breaks."""
        return [sentence for name, x in got.items() for sentence in self._failures(name, x)]

    def _failures(self, name: str, x: torch.Tensor) -> list[str]:
        exact = self.exact[name]
        if x.shape != exact.shape:
            return [f"{name}: shape {list(x.shape)}, wanted {list(exact.shape)}"]
        finite = exact.isfinite()
        if not torch.equal(x.double()[~finite], exact[~finite]) or not x[finite].isfinite().all():
            return [f"{name}: infinite or NaN where the exact result is not, or the reverse"]
        if not finite.any():
            return []
        error = asdict(Error.of(x, exact))
        return [
            f"{name}: {which} error {error[which]:.3g}, budget {budget:.3g}"
            f" (naive={self.naive[name]})"
            for which, budget in self.budgets(name, x).items()
            if not error[which] <= budget
        ]

    def budgets(self, name: str, x: torch.Tensor) -> dict[str, float]:
        """Return how large the largest and, of a sample, the mean error of output x may be."""
        exact, naive = self.exact[name], self.naive[name]
        stored = self.stored.get(name, exact.new_zeros(1))
        budgets = {"max": 2.0 * naive.max + last_place(x.dtype, self.sizes[name]) + self.flushed}
        if stored.numel():
            budgets["max"] += stored.max().item()
        if x.numel() >= MEAN_SAMPLE:
            typical = exact[exact.isfinite()].abs().mean().item()
            rounding = last_place(x.dtype, typical)
            budgets["mean"] = 1.1 * naive.mean + rounding + stored.mean().item() + self.flushed
        return budgets


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

    A GPU computes them in no time, and 16 workers that kept them would fill its memory.
    """
    p = sample.problem
    small = p.batch * p.heads * p.seq_q * p.head_dim <= KEPT
    kept = small and torch.device(sample.device).type == "cpu"
    return _expected(sample) if kept else _expected.__wrapped__(sample)


@lru_cache(maxsize=128)  # a test asks all its samples of one implementation, then of the next
def _expected(sample: Sample) -> Expected:
    return Expected.of(sample.draw(), sample.enlarged().draw())


class InaccurateError(AssertionError):
    """Some outputs are off their budgets.

    Args:
        sample: what was asked.
        failures: which outputs, by how much, and what was allowed.
    """

    def __init__(self, sample: Sample, failures: list[str]) -> None:
        """Say it; the sample stays at hand, to be run again."""
        super().__init__(f"{sample.problem}: " + "; ".join(failures))
        self.sample = sample


def assert_accurate(call: Call, sample: Sample, *, guarded: bool = True) -> None:
    """Run ``call`` on the sample and hold every output to its budgets.

    Args:
        call: see ``run``.
        sample: what is drawn.
        guarded: surround inputs and outputs with poison; a compiler cannot trace through that.

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
