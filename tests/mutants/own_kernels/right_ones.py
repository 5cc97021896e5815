"""Right kernels that work in different ways: no test may call one of them wrong."""

from __future__ import annotations

import torch
from attention_parts import (
    UNBOUNDED,
    fused,
    inputs_in_fp32,
    kernel,
    masked,
    right,
    right_with_scores,
    seen_by,
)

from flashattn import registry

kernel()(fused())
kernel()(right)


@kernel(narrow_values=True)
def of_narrow_values(q, k, v, **how):
    """Take values of any width."""
    return right(q, k, v, **how)


@kernel()
def in_fp64(q, k, v, **how):
    """Compute in fp64 and round once."""
    o, lse = right(*(x.double() for x in (q, k, v)), **how)
    return o.to(q.dtype), lse if q.dtype == torch.float64 else lse.float()


@kernel()
def by_minus_infinity(q, k, v, **how):
    """Mask by filling with -inf."""
    return masked(lambda s, seen: s.masked_fill(~seen, -torch.inf), q, k, v, **how)


@kernel()
def each_head_alone(q, k, v, **how):
    """Loop over heads."""
    if 0 in q.shape[:2]:
        return right(q, k, v, **how)
    group = q.shape[1] // k.shape[1]
    parts = [
        right(q[:, h : h + 1], k[:, h // group, None], v[:, h // group, None], **how)
        for h in range(q.shape[1])
    ]
    return tuple(torch.cat(x, 1) for x in zip(*parts, strict=True))


@kernel()
def each_batch_alone(q, k, v, **how):
    """Loop over batches."""
    if q.shape[0] == 0:
        return right(q, k, v, **how)
    parts = [right(*(x[b, None] for x in (q, k, v)), **how) for b in range(q.shape[0])]
    return tuple(torch.cat(x) for x in zip(*parts, strict=True))


@kernel()
def views_of_one_buffer(q, k, v, **how):
    """Return o as a transposed view of [B, T, H, D] memory."""
    o, lse = right(q, k, v, **how)
    return o.transpose(1, 2).contiguous().transpose(1, 2), lse


@kernel()
def paddedseen_by(q, k, v, **how):
    """Return views of a larger buffer."""
    o, lse = right(q, k, v, **how)
    return torch.nn.functional.pad(o, (0, 8))[..., : o.shape[-1]], lse


@kernel()
def contiguous_first(q, k, v, **how):
    """Copy the inputs."""
    return right(*(x.contiguous() for x in (q, k, v)), **how)


@kernel()
def flash_decoding(q, k, v, *, causal, scale, window=UNBOUNDED):
    """Split the keys, and combine by the logsumexp."""
    seen = seen_by(q, k, causal, window)
    a, b, c = inputs_in_fp32(q, k, v, seen)
    if k.shape[2] < 2 or not seen.any(-1).all():
        return right(q, k, v, causal=causal, scale=scale, window=window)
    scores = (a @ b.mT * scale).masked_fill(~seen, -torch.inf)
    m, n = scores.amax(-1, keepdim=True).detach(), k.shape[2] // 2
    parts = [(scores[..., part] - m).exp() for part in (slice(n), slice(n, None))]
    total = sum(p.sum(-1, keepdim=True) for p in parts)
    o = (parts[0] @ c[:, :, :n] + parts[1] @ c[:, :, n:]) / total
    return o.to(q.dtype), (m + total.log())[..., 0]


@kernel()
def base_2(q, k, v, *, causal, scale, window=UNBOUNDED):
    """Compute the softmax with powers of two."""
    seen = seen_by(q, k, causal, window)
    a, b, c = inputs_in_fp32(q, k, v, seen)
    if not seen.any(-1).all() or k.shape[2] == 0:
        return right(q, k, v, causal=causal, scale=scale, window=window)
    scores = (a @ b.mT * scale).masked_fill(~seen, -torch.inf)
    m = scores.amax(-1, keepdim=True).detach()
    p = ((scores - m) * 1.4426950408889634).exp2()
    total = p.sum(-1, keepdim=True)
    return (p / total @ c).to(q.dtype), (m + total.log())[..., 0]


@kernel()
def checkpointed(q, k, v, **how):
    """Recompute forward in backward."""
    if not torch.is_grad_enabled():
        return right(q, k, v, **how)
    run = torch.utils.checkpoint.checkpoint
    return run(lambda *x: right(*x, **how), q, k, v, use_reentrant=False)


@kernel()
def caches_masks_rightly(q, k, v, **how):
    """Cache a mask by all that it depends on."""
    how = MASKS.setdefault((q.shape[2], k.shape[2], tuple(how.items())), how)
    return right(q, k, v, **how)


MASKS: dict = {}


@kernel(repeats=False)
def other_bits(q, k, v, **how):
    """Promise no repeatable bits, and draw from a generator of its own."""
    drawn = torch.rand((), generator=GENERATOR, device="cpu")
    return right(q, k, v, **how) if drawn < 0.5 else in_fp64(q, k, v, **how)


GENERATOR = torch.Generator().manual_seed(3)


@kernel()
def tiles(q, k, v, **how):
    """Compute attention tile by tile."""
    return registry.get("tiled")(q, k, v, **how)


@kernel(lse=False, fully_masked_rows=False, empty=False, windows=False, strict=False)
def three_lines(q, k, v, **how):
    """Promise ordinary inputs only."""
    return registry.get("naive")(q, k, v, **how)[0]


@kernel(softcap=True, alibi=True, bias=True, sink=True, intervals=True)
def masks_of_rows_and_all_scores(q, k, v, **how):
    """Claim all that can be claimed."""
    return right_with_scores(q, k, v, **{name: x for name, x in how.items() if x is not None})
