"""The error that recomputation adds in a fused backward: ``stored`` of the error budgets.

A fused backward has no P. It recomputes P = exp(S - lse) and dS = P * (dP - delta), with
delta = rowsum(dO * O) - dlse, from the O and lse that the forward stored. A rounding is taken to
change a number by eps, which is 3.5 standard deviations (one is eps / sqrt(12)), and independent
roundings add up as the root of the sum of their squares. Four roundings lie between S and lse, and
matter where the two nearly cancel: m + log l, its conversion to base e, the conversion back to
base 2, and S * scale. So a row of P changes by the factor 1 + a, a = 2 * eps32 * |lse|.

Two sums of the same D terms x in different orders differ. In each sum, every product is rounded
once, and the running sum is rounded at each of D steps. The final sum, s, is known. Until then the
square of the running sum is s^2 / 3 + |x|^2 / 6 on average, as that of a Brownian bridge; where all
terms have the same sign, the first part is nearly all of it. So the sums differ by::

    two(s, x) = root(2 * ((1 + D / 6) * |x| ** 2 + D / 3 * s ** 2)) * eps32

Rounding O, and summing dP and delta in fp32, changes dP - delta in a row by
b = eps * |x| + two(sum of dO * O, x), x = (dO * O, dlse). Both a and b are one number per row, so
they propagate exactly within a row, and as independent errors between rows::

    stored(dq) = a * |dq| + scale * b * |P @ K|
    stored(dk) = scale * root of ((P * (a * |dP - delta| + b)) ** 2).T @ (Q ** 2)
    stored(dv) = root of ((P * a) ** 2).T @ (dO ** 2)

These terms matter where naive is exact: with one key, its P is 1 and its dS is 0.

The backward sums S in a different order from the forward, whose S went into lse. The scores differ
as two such sums do: P changes by the factor 1 + c, c = two(S, scale * q * k), one c per score.

The errors of scores propagate as independent: dk and dv have a^2 + c^2 in place of a^2, and dq has
one more term::

    scale * root of (P * c * (dP - delta)) ** 2 @ (K ** 2)

Tensor cores do not round a sum, they truncate it (Fasi et al., 2021, "Numerical behavior of NVIDIA
tensor cores"), so the errors have the same sign and add up. An fp32 product of length D consists of
three TF32 products of D / 8 steps each, or of six bf16 products of D / 16 steps each. A step loses
half an eps32 of the running sum on average. The running sum grows as the root of the number of
steps, so it averages 2 / 3 of the final sum. So on a GPU b grows by 3 * D / 8 * 1 / 2 * 2 / 3 =
D / 8 times eps32. In a score only the last of the three products has full size, so
t = D / 24 * eps32 * |S| is lost (measured in docs/tuning-log.md), and c^2 grows by t^2.

With a softcap, dS has the slope of the capped score as a further factor in all of these terms, and
so do c and t. Where tanh is flat, the error of the product vanishes, and naive has almost none.
What remains is one more rounding of the score, in base 2::

    stored(o) = root of (P * eps32 * |S|) ** 2 @ (V ** 2)

The slope there is a small difference, 1 - (S / cap) ** 2, and three roundings lie between S / cap
and tanh: that of tanh, and those of the product and the quotient with the cap. So the slope is off
by 2 * (1 - slope) * root(3) * eps32, and dS by that times P * (dP - delta).

The terms that ALiBi and a bias add are rounded, and so are the scores before and after, in base 2:
P changes by the factor 1 + eps32 * |(S, the terms)|, which is added to o and c. The gradient of a
bias is dS, summed over the scores that share an element. The gradient of a sink is the sum of
-p * delta over the queries of a head, p = exp(sink - lse)::

    stored(dbias) = root of sum (P * (a * |dP - delta| + b)) ** 2 + 4 * sum of P * c * |dP - delta|
    stored(dsink) = root of sum (p * (a * |delta| + b)) ** 2

The scores that share an element may all be equal, so their c are added linearly. A c is four times
as large where the terms of a score are equal, and so are rounded alike. If the keys of a row share
an element, its error is a * |sum dS| + b * sum P, as a and b propagate within the row. If
rows share an element, their lse may be equal, and a propagates from row to row: the largest a times
|dbias| is added, and times |dsink|.

Both gradients are sums over the batches of a sample. In a larger batch naive's error grows as the
root of the ratio of the batch sizes, so it is divided by that root.
"""

from __future__ import annotations

import torch

from flashattn import score
from flashattn.score import Terms
from flashattn.testing.sample import Case, Outputs

TF32_STEP = 8  # terms that a tensor core adds in one step
EQUAL_TERMS = 4  # a sum of equal terms may be off by that factor more


def stored_terms(case: Case, exact: Outputs) -> Outputs:
    """Return the errors that rounding stored numbers causes in o and gradients (see the module)."""
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
    sizes = scores.square()
    slope = torch.ones_like(scores) if softcap is None else score.slope(scores, softcap)
    scores, terms = _with_terms(case, scores)
    scores = scores.masked_fill(~seen, -torch.inf)
    sizes = (sizes + terms.square()).masked_fill(scores == -torch.inf, 0.0)
    sink = case.scored.get("sink")
    p, lse = _softmax(scores, sink)
    accumulated = torch.finfo(torch.promote_types(dtype, torch.float32))
    found = {}
    if rounded_again:
        found["o"] = (p.square() * sizes @ v.square()).sqrt() * accumulated.eps
    if case.grad_o is None:
        return found
    do = case.grad_o.double()
    a = lse.abs().nan_to_num(posinf=0.0)[..., None] * 2 * accumulated.eps
    terms = do * exact["o"]  # their sum is delta + dlse
    added, dlse = terms.sum(-1, keepdim=True), case.grad_lse
    dlse = torch.zeros_like(added) if dlse is None else dlse.double()[..., None]
    delta, size = added - dlse, torch.hypot(terms.norm(dim=-1, keepdim=True), dlse)
    truncated = q.shape[-1] / TF32_STEP if q.is_cuda and dtype == torch.float32 else 0
    summed = of_two_sums(added, size.square(), q.shape[-1]).sqrt() + truncated * size
    b = size * torch.finfo(dtype).eps + summed * accumulated.eps
    c = of_two_sums(uncapped, case.scale**2 * (q.square() @ k.square().mT), q.shape[-1])
    c += (truncated / 3 * uncapped).square()
    off = slope.square() * c + (sizes if case.problem.added else 0)
    off *= accumulated.eps**2  # the square of each score's error
    dp = (do @ v.mT - delta).abs()
    of_slope = 2 * (1 - slope) * 3**0.5 * accumulated.eps
    of_scores = (p * dp).square() * (slope.square() * off + of_slope.square())  # squared, of dS
    dk = ((slope * p * (a * dp + b)).square() + of_scores).mT @ q.square() * case.scale**2
    dv = (p.square() * (a.square() + off)).mT @ do.square()
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) if group else x for x in (dk, dv))
    dq = a * exact["dq"].abs() + abs(case.scale) * (
        b * ((slope * p) @ k).abs() + (of_scores @ k.square()).sqrt()
    )
    found |= {"dq": dq, "dk": dk.sqrt(), "dv": dv.sqrt()}
    if "bias" in case.scored:
        found["dbias"] = _of_bias(case, p, do @ v.mT - delta, a, b, off.sqrt())
    if sink is not None:
        of_sinks = _sink_shares(sink, lse) * (a * delta.abs() + b)[..., 0]
        found["dsink"] = of_sinks.square().sum(-1).sum_to_size(sink.shape).sqrt()
    alike = a.max() if a.numel() else 0.0
    return found | {n: found[n] + alike * exact[n].abs() for n in ("dbias", "dsink") if n in found}


def of_two_sums(sums: torch.Tensor, squares: torch.Tensor, length: int) -> torch.Tensor:
    """Return the squared difference, in eps, of two sums of the same ``length`` terms.

    The sums come to ``sums``, and the squares of the terms to ``squares``.
    """
    return 2 * ((1 + length / 6) * squares + length / 3 * sums.square())


def _softmax(scores: torch.Tensor, sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return P, with 0 in fully masked rows, and lse."""
    lse = scores.logsumexp(-1)
    lse = lse if sink is None else torch.logaddexp(lse, sink.double()[..., None])
    return (scores - lse.masked_fill(lse == -torch.inf, torch.inf)[..., None]).exp(), lse


def _sink_shares(sink: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Return the weights of the sinks in the softmax of each row, [B, H, T]."""
    return (sink.double()[..., None] - lse.masked_fill(lse == -torch.inf, torch.inf)).exp()


def _with_terms(case: Case, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores with all added terms, and the sum of these terms."""
    q, k, _ = case.inputs
    terms = Terms.of(q, k, case.scored.get("alibi_slopes"), case.scored.get("bias"))
    whole = slice(0, q.shape[2]), slice(0, k.shape[2])
    added = terms.added(torch.zeros_like(scores), *whole)
    return scores + added, added


def _of_bias(
    case: Case,
    p: torch.Tensor,
    dp: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    off: torch.Tensor,
) -> torch.Tensor:
    """Return the error that rounding stored numbers causes in dbias.

    P, ``dp`` (dP - delta) and ``off`` (c) are [B, H, T, S], a and b are [B, H, T, 1].
    """
    q, k, _ = case.inputs
    bias = case.scored["bias"]
    carried = p * (a * dp.abs() + b)
    if bias.shape[-1] == 1 and k.shape[2] > 0:  # the keys of a row share an element
        of_row = a * (p * dp).sum(-1, keepdim=True).abs() + b * p.sum(-1, keepdim=True)
        carried = of_row / k.shape[2] ** 0.5  # the squares sum to that of the row
    squares, alike = (torch.zeros(bias.shape, dtype=p.dtype, device=p.device) for _ in range(2))
    whole, terms = (slice(0, q.shape[2]), slice(0, k.shape[2])), Terms.of(q, k, bias=bias)
    terms.add_gradient(squares, carried.square().expand_as(p), *whole)
    terms.add_gradient(alike, p * dp.abs() * off, *whole)
    return squares.sqrt() + EQUAL_TERMS * alike
