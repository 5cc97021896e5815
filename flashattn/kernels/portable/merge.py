"""flashattn_merge: merge attention to some keys with attention to others, by logsumexp."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flashattn.kernels.cache_key import with_stable_key
from flashattn.kernels.constants import SIZES
from flashattn.kernels.launch import on_device
from flashattn.kernels.portable.memory import tile_pointers
from flashattn.kernels.portable.softmax import finite_max
from flashattn.plan.tile import block_d

BLOCK, WARPS = 32, 4  # rows of a program


@triton.jit(do_not_specialize=SIZES)
def flashattn_merge(
    o,
    lse,
    o_more,
    lse_more,
    lse_merged,
    o_strides,
    lse_strides,
    o_more_strides,
    lse_more_strides,
    heads,
    rows,
    head_dim,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Merge BLOCK rows of a head; o of rows that see none of the new keys is not accessed.

    Each warp reads lse, so the new lse is written to lse_merged, which is dense. WHOLE says that
    there are exactly BLOCK_D columns.
    """
    blocks = tl.cdiv(rows, BLOCK)
    head, start = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK
    at = head // heads, head % heads, start
    row = start + tl.arange(0, BLOCK)
    there = row < rows
    lse += tl.reshape(tile_pointers(0, lse_strides, at, 1, BLOCK, 1), [BLOCK])
    lse_more += tl.reshape(tile_pointers(0, lse_more_strides, at, 1, BLOCK, 1), [BLOCK])
    before = tl.load(lse, mask=there, other=float("-inf"))
    added = tl.load(lse_more, mask=there, other=float("-inf"))
    seen = added != float("-inf")  # NaN counts as seen
    most = finite_max(tl.maximum(before, added))
    weight, weight_more = tl.exp(before - most), tl.exp(added - most)
    total = weight + weight_more
    merged = tl.where(seen, most + tl.log(total), before)
    tl.store(lse_merged + head.to(tl.int64) * rows + row, merged, mask=there)
    mask = seen[:, None]
    if not WHOLE:
        mask &= (tl.arange(0, BLOCK_D) < head_dim)[None, :]
    o += tile_pointers(0, o_strides, at, 1, BLOCK, BLOCK_D)
    o_more += tile_pointers(0, o_more_strides, at, 1, BLOCK, BLOCK_D)
    acc = tl.load(o, mask=mask, other=0.0).to(tl.float32) * (weight / total)[:, None]
    more = tl.load(o_more, mask=mask, other=0.0).to(tl.float32)
    acc += more * (weight_more / total)[:, None]
    tl.store(o, acc.to(o.dtype.element_ty), mask=mask)


def launch(
    o: torch.Tensor, lse: torch.Tensor, o_more: torch.Tensor, lse_more: torch.Tensor
) -> None:
    """Merge o_more and lse_more into o and lse, in place.

    Args:
        o: [B, H, T, D], rows dense.
        lse: fp32 [B, H, T].
        o_more: attention of the same queries to other keys, like o.
        lse_more: like lse.
    """
    batch, heads, rows, head_dim = o.shape
    programs, columns = triton.cdiv(rows, BLOCK) * batch * heads, block_d(head_dim)
    if programs == 0:
        return
    with on_device(o):
        merged = lse.new_empty(lse.shape)
        with_stable_key(flashattn_merge)[(programs,)](
            *(o, lse, o_more, lse_more, merged, o.stride()[:3], lse.stride()),
            *(o_more.stride()[:3], lse_more.stride(), heads, rows, head_dim),
            *(BLOCK, columns, columns == head_dim),
            num_warps=WARPS,
        )
        lse.copy_(merged)
