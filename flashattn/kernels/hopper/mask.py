"""The mask on the device: two monotone bounds on the keys of a query; all else is derived.

Bounds may lie outside of a sequence. If they cross, no key or query is seen.
"""

# Gluon's aggregates need evaluated annotations: no `from __future__ import annotations` here.
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from flashattn.kernels.hopper.compat import aggregate


@gluon.jit
def has_empty(bounds, rows, start, SIZE: gl.constexpr):
    """Return whether any of SIZE intervals from ``start`` on, of ``rows`` in bounds, is empty.

    If the first and the last overlap, none is: no end decreases from one interval to the next.
    """
    first, last = gl.minimum(start, rows - 1), gl.minimum(start + SIZE, rows) - 1
    found = gl.load(bounds + 2 * last) >= gl.load(bounds + 2 * first + 1)
    if found:
        layout: gl.constexpr = gl.BlockedLayout([SIZE // 32], [32], [gl.num_warps()], [0])
        at = bounds + 2 * gl.minimum(start + gl.arange(0, SIZE, layout=layout), rows - 1)
        found = gl.max((gl.load(at) >= gl.load(at + 1)).to(gl.int32), 0) > 0
    return found


@gluon.jit
def clear_empty(tile, bounds, rows, start):
    """Zero the rows of a tile in shared memory whose intervals are empty; ``start`` is its first.

    They may hold NaN, which a P of 0 does not cancel.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = tile.shape[0]
    for i in gl.static_range(0, ROWS, 16):
        part = tile.slice(i, 16, dim=0)
        x = part.load(layout)
        row = start + i + gl.arange(0, 16, layout=gl.SliceLayout(1, layout))
        at = bounds + 2 * gl.minimum(row, rows - 1)
        kept = gl.load(at) < gl.load(at + 1)
        part.store(gl.where(kept[:, None], x, 0.0).to(tile.dtype))
    fence_async_shared()


@aggregate
class Mask:
    """The mask of a batch: which of seq_kv keys each of seq_q queries sees.

    In a band, query t sees keys t - left ... t + right, where None means no bound. Otherwise keys
    and queries, if not None, point to bounds of rows (see ``flashattn.bounds``). A two-sided mask
    may also hide the first keys.
    """

    seq_q: gl.tensor
    seq_kv: gl.tensor
    left: gl.tensor | gl.constexpr
    right: gl.tensor | gl.constexpr
    keys: gl.tensor | gl.constexpr
    queries: gl.tensor | gl.constexpr
    masked: gl.constexpr
    rows: gl.constexpr
    two_sided: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, seq_q, seq_kv, left, right, keys=None, queries=None):
        """Store the fields."""
        self.seq_q = seq_q
        self.seq_kv = seq_kv
        self.left = gl.constexpr(None) if left is None else left
        self.right = gl.constexpr(None) if right is None else right
        self.keys = gl.constexpr(None) if keys is None else keys
        self.queries = gl.constexpr(None) if queries is None else queries
        self.rows = gl.constexpr(keys is not None)
        self.two_sided = gl.constexpr(left is not None or keys is not None)
        self.masked = gl.constexpr(self.two_sided or right is not None)

    @gluon.jit
    def of_batch(self, batch, keys_stride, queries_stride):
        """Return the mask of a batch; strides are between the bounds of rows of two batches."""
        if not self.rows:
            mask = self
        else:
            keys = self.keys + batch.to(gl.int64) * keys_stride
            queries = self.queries + batch.to(gl.int64) * queries_stride
            mask = Mask(self.seq_q, self.seq_kv, None, None, keys, queries)
        return mask

    @gluon.jit
    def keys_of(self, t):
        """Return (lo, hi): query t sees keys lo ... hi - 1."""
        lo, hi = 0, self.seq_kv
        if self.rows:
            at = self.keys + 2 * gl.minimum(t, self.seq_q - 1)
            lo, hi = gl.load(at), gl.load(at + 1)
        if self.left is not None:
            lo = t - self.left
        if self.right is not None:
            hi = gl.minimum(t + (self.right + 1), self.seq_kv)
        return lo, hi

    @gluon.jit
    def queries_of(self, s):
        """Return (lo, hi): key s is seen by queries lo ... hi - 1."""
        lo, hi = 0, self.seq_q
        if self.rows:
            at = self.queries + 2 * gl.minimum(s, self.seq_kv - 1)
            lo, hi = gl.load(at), gl.load(at + 1)
        if self.right is not None:
            lo = s - self.right
        if self.left is not None:
            hi = s + (self.left + 1)
        return lo, hi

    @gluon.jit
    def key_tiles(self, start_q, BLOCK_Q: gl.constexpr, BLOCK_KV: gl.constexpr):
        """Return (first, full_begin, full_end, end) of the key tiles that a query tile visits.

        All of its queries see all keys of tiles full_begin ... full_end - 1. Bounds may cross.
        """
        lo, full_hi = self.keys_of(start_q)
        full_lo, hi = self.keys_of(gl.minimum(start_q + BLOCK_Q, self.seq_q) - 1)
        if self.left is not None:  # the first queries may see the first key
            lo, full_lo = gl.maximum(lo, 0), gl.maximum(full_lo, 0)
        if self.right is not None:  # the first queries may see no key
            full_hi, hi = gl.maximum(full_hi, 0), gl.maximum(hi, 0)
        full_end, end = full_hi // BLOCK_KV, gl.cdiv(hi, BLOCK_KV)
        return lo // BLOCK_KV, gl.cdiv(full_lo, BLOCK_KV), full_end, end

    @gluon.jit
    def query_tiles(self, start_kv, BLOCK_Q: gl.constexpr, BLOCK_KV: gl.constexpr):
        """Return (first, full_begin, full_end, end) of the query tiles that a key tile visits.

        All of its keys are seen by all queries of tiles full_begin ... full_end - 1. Bounds may
        cross.
        """
        lo, full_hi = self.queries_of(start_kv)
        full_lo, hi = self.queries_of(start_kv + BLOCK_KV - 1)
        if self.left is not None:  # the first keys may be seen by no query
            full_hi = gl.minimum(gl.maximum(full_hi, 0), self.seq_q)
            hi = gl.minimum(gl.maximum(hi, 0), self.seq_q)
        full_end, end = full_hi // BLOCK_Q, gl.cdiv(hi, BLOCK_Q)
        if self.rows:  # a tile behind the last seen key visits nothing
            seen = gl.load(self.keys + (2 * self.seq_q - 1))
            end = gl.where(start_kv < seen, end, 0)
        elif self.left is None:  # padding of the last tile needs no mask
            full_end = end
        if self.right is not None:  # the first keys may be seen by all queries
            lo, full_lo = gl.maximum(lo, 0), gl.maximum(full_lo, 0)
        return lo // BLOCK_Q, gl.cdiv(full_lo, BLOCK_Q), full_end, end

    @gluon.jit
    def key_bounds(self, start_q, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
        """Load ``keys_of`` for the rows of a tile [queries, keys]; (0, 0) without bounds of rows.

        The loads cost no time if they are issued before the wait for the tile.
        """
        bounds = 0, 0
        if self.rows:
            bounds = self.keys_of(start_q + gl.arange(0, SIZE, layout=gl.SliceLayout(1, LAYOUT)))
        return bounds

    @gluon.jit
    def query_bounds(self, start_kv, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
        """Load ``queries_of`` for the rows of a tile [keys, queries] likewise."""
        bounds = 0, 0
        if self.rows:
            bounds = self.queries_of(
                start_kv + gl.arange(0, SIZE, layout=gl.SliceLayout(1, LAYOUT))
            )
        return bounds

    @gluon.jit
    def apply(self, x, start_q, start_kv, bounds, value: gl.constexpr):
        """Return a tile [queries, keys] with ``value`` where a query does not see a key.

        A band depends only on t - s, so its bounds are those of a tile at 0, shifted.
        """
        layout: gl.constexpr = x.type.layout
        keys = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, layout))
        rows = gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, layout))
        if self.rows:
            lo, hi = bounds
            seen = (keys[None, :] < (hi - start_kv)[:, None]) & (
                keys[None, :] >= (lo - start_kv)[:, None]
            )
        else:
            hi = self.seq_kv - start_kv
            if self.right is None:
                seen = keys[None, :] < hi
            else:
                hi = gl.minimum(rows + (start_q + self.right - start_kv + 1), hi)
                seen = keys[None, :] < hi[:, None]
            if self.left is not None:
                lo = rows - (self.left + start_kv - start_q)
                seen = seen & (keys[None, :] >= lo[:, None])
        return gl.where(seen, x, value)

    @gluon.jit
    def apply_transposed(self, x, start_q, start_kv, bounds, ALL_KEYS: gl.constexpr):
        """Return a tile [keys, queries] with 0 where a query does not see a key.

        Unless ALL_KEYS, keys behind the last one are masked, too: their P could be inf.
        """
        layout: gl.constexpr = x.type.layout
        queries = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, layout))
        keys = start_kv + gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, layout))
        lo = gl.full([x.shape[0]], 0, gl.int32, layout=gl.SliceLayout(1, layout))
        if self.rows:
            lo, hi = bounds
            lo, hi = lo - start_q, hi - start_q
        if self.right is not None:
            lo = keys - self.right - start_q
        if not ALL_KEYS:
            lo = gl.where(keys < self.seq_kv, lo, x.shape[1])
        seen = queries[None, :] >= lo[:, None]
        if self.two_sided:
            if not self.rows:
                hi = keys - start_q + (self.left + 1)
            seen = seen & (queries[None, :] < hi[:, None])
        return gl.where(seen, x, 0.0)


@gluon.jit
def ordered_runs(first, full_begin, full_end, end):
    """Return the bounds of the tiles to visit, clamped so that they ascend."""
    end = gl.maximum(end, first)
    full_end = gl.minimum(gl.maximum(full_end, first), end)
    return first, gl.minimum(gl.maximum(full_begin, first), full_end), full_end, end


@gluon.jit
def descending_run(run, first, full_begin, full_end, end, TWO_SIDED: gl.constexpr):
    """Return (start, stop, low): start - 1 ... stop are masked, and stop - 1 ... low need no mask.

    Tiles are visited from last to first, in one run, or in two if the first may be masked.
    """
    start, stop, low = end, full_end, full_begin
    if TWO_SIDED:
        second = run > 0
        low = gl.minimum(full_begin, full_end)
        start, stop = gl.where(second, low, end), gl.where(second, first, full_end)
        low = gl.where(second, first, low)
    return start, stop, low


@triton.jit
def keys_of_tl(t, left, right, keys, seq_q, seq_kv):
    """Return ``Mask.keys_of``, for kernels in plain Triton."""
    lo, hi = 0, seq_kv
    if keys is not None:
        at = keys + 2 * tl.minimum(t, seq_q - 1)
        lo, hi = tl.load(at), tl.load(at + 1)
    if left is not None:
        lo = tl.maximum(t - left, 0)
    if right is not None:
        hi = tl.minimum(t + (right + 1), seq_kv)
    return lo, hi
