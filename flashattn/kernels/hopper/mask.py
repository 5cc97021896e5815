"""The mask: which tiles of keys a tile of queries visits, and which scores are hidden."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashattn.kernels.hopper.mma import ROWS


@gluon.jit
def visited(
    start_q, seq_q, seq_kv, diagonal, BLOCK_Q: gl.constexpr, BLOCK_KV: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    """Return (full, end): tiles of keys 0 ... full are seen whole, up to end in part; end >= 1."""
    full, end = seq_kv // BLOCK_KV, gl.cdiv(seq_kv, BLOCK_KV)
    if CAUSAL:
        first = gl.maximum(start_q + diagonal + 1, 0)
        last = gl.maximum(gl.minimum(start_q + BLOCK_Q, seq_q) + diagonal, 0)
        full = gl.minimum(full, first // BLOCK_KV)
        end = gl.minimum(end, gl.cdiv(last, BLOCK_KV))
    return full, gl.maximum(end, 1)


@gluon.jit
def hide(s, start_q, start_kv, seq_kv, diagonal, BLOCK_KV: gl.constexpr, CAUSAL: gl.constexpr):
    """Put -inf where a query does not see a key, or there is none."""
    layout: gl.constexpr = s.type.layout
    keys = gl.arange(0, BLOCK_KV, layout=gl.SliceLayout(0, layout))
    last = gl.full([ROWS], seq_kv - 1 - start_kv, gl.int32, layout=gl.SliceLayout(1, layout))
    if CAUSAL:
        rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        last = gl.minimum(last, rows + (start_q + diagonal - start_kv))
    return gl.where(keys[None, :] <= last[:, None], s, float("-inf"))
