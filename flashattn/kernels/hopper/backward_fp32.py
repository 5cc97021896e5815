"""flashattn_hopper_cut_dkdv, flashattn_hopper_cut_dq: gradients of heads of 65 to 128 in fp32.

What the portable passes compute of inputs that come cut, shared by two warpgroups as in
``backward_d256``: one computes P, the other takes it and computes dS; dv is summed by the first, dk
and dq by the second. Each has one sum of 64 x 128 in registers, and one tile that stays, whose
addresses it keeps; a single warpgroup with all of that must keep some in memory. And while one
waits, the tensor cores have the other's products.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from flashattn.kernels import launch
from flashattn.kernels.backward import passes as portable
from flashattn.kernels.hopper.bf16x3 import bf16_terms, mma_terms, transpose_terms
from flashattn.kernels.hopper.mma import store_global
from flashattn.kernels.hopper.pipeline import new_pipeline
from flashattn.kernels.hopper.scheduler import own_place
from flashattn.kernels.hopper.tma import WARPS, Tiles
from flashattn.kernels.launch import Facts, Launch, Like
from flashattn.kernels.passes import Pass, Passes, Walk, numbers, walk
from flashattn.kernels.tiles import block_d

COLUMNS = gl.constexpr(128)
OWNED = gl.constexpr(64)  # rows of a program's own tile
STAGES = gl.constexpr(2)


@gluon.constexpr_function
def walked(parts):
    """Return rows of a tile that comes by: as many as leave room for a second one."""
    return 64 if parts == 2 else 32


@gluon.jit
def keys_of(
    seq_q, seq_kv, diagonal, kv_heads, batches, chunk, CAUSAL: gl.constexpr, SPLIT: gl.constexpr,
    TERMS: gl.constexpr,
):  # fmt: skip
    """Return (first key, batch, its place in dk and dv, head, first, end) of this program.

    The last two are tiles of queries; under a mask those of the first keys, who see most, come
    first.
    """
    WALKED: gl.constexpr = walked(TERMS)
    blocks = gl.cdiv(seq_kv, OWNED)
    block, place, kv_head = own_place(blocks, kv_heads, CAUSAL)
    first, end = 0, gl.cdiv(seq_q, WALKED)
    if CAUSAL:
        block = blocks - 1 - block
        first = gl.maximum(block * OWNED - diagonal, 0) // WALKED
    start_kv, batch = block * OWNED, place
    if SPLIT:  # a chunk is whole tiles
        batch = place % batches
        begin = place // batches * (chunk // WALKED)
        first = gl.maximum(first, begin)
        end = gl.minimum(end, begin + chunk // WALKED)
    return start_kv, batch, place, kv_head, first, end


@gluon.jit
def load_queries(
    x, own, ring, owns, seq_q, seq_kv, diagonal, kv_heads, group, batches, chunk,
    CAUSAL: gl.constexpr, SPLIT: gl.constexpr, TERMS: gl.constexpr,
):  # fmt: skip
    """Be a warp that loads: k and the queries, or v and dO."""
    WALKED: gl.constexpr = walked(TERMS)
    start_kv, batch, _, kv_head, first, end = keys_of(
        seq_q, seq_kv, diagonal, kv_heads, batches, chunk, CAUSAL, SPLIT, TERMS
    )
    owns.load(0, own, batch, kv_head, start_kv)
    n = 0
    for head in range(kv_head * group, kv_head * group + group):
        for i in range(first, end):
            ring.load(n, x, batch, head, i * WALKED)
            n += 1


@gluon.jit
def seen(p, start_q, start_kv, diagonal):
    """Put 0 where a query does not see a key."""
    WALKED: gl.constexpr = p.shape[1]
    layout: gl.constexpr = p.type.layout
    queries = gl.arange(0, WALKED, layout=gl.SliceLayout(0, layout))
    keys = gl.arange(0, OWNED, layout=gl.SliceLayout(1, layout)) + (start_kv - diagonal - start_q)
    return gl.where(queries[None, :] >= keys[:, None], p, 0.0)


@gluon.jit
def sum_dv(
    dv, lse2, keys, queries, grads, handed, there, strides, seq_q, seq_kv, pitch, diagonal,
    kv_heads, group, batches, chunk, scale_log2, head_dim, CAUSAL: gl.constexpr,
    SPLIT: gl.constexpr, TERMS: gl.constexpr,
):  # fmt: skip
    """Be the warpgroup that computes P, and dv."""
    WALKED: gl.constexpr = walked(TERMS)
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WALKED, 16])
    DV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, DV, 2)
    start_kv, batch, place, kv_head, first, end = keys_of(
        seq_q, seq_kv, diagonal, kv_heads, batches, chunk, CAUSAL, SPLIT, TERMS
    )
    rows = gl.arange(0, WALKED, layout=gl.SliceLayout(0, S))
    acc = gl.zeros([OWNED, COLUMNS], gl.float32, DV)
    k = keys.consumer_wait(0)
    n = 0
    for head in range(kv_head * group, kv_head * group + group):
        at = lse2 + (batch * kv_heads * group + head).to(gl.int64) * pitch
        for i in range(first, end):
            lse2_rows = gl.load(at + i * WALKED + rows)
            q = queries.consumer_wait(n)
            s = mma_terms(k, transpose_terms(q, TERMS), S, TERMS)
            p = gl.exp2(s * scale_log2 - lse2_rows[None, :])
            if CAUSAL:
                p = seen(p, i * WALKED, start_kv, diagonal)
            # P of two tiles before has been read: the n-th queries lie where those did, which were
            # in use until dk had them, and that was after.
            handed.index(n % STAGES).store(p)
            mbarrier.arrive(there.index(n % STAGES), count=1)
            do = grads.consumer_wait(n)
            acc += mma_terms(bf16_terms(p, P, TERMS), do, DV, TERMS)
            grads.consumer_release(n)
            n += 1
    store_global(dv, acc, strides, place, kv_head, start_kv, seq_kv, head_dim)


@gluon.jit
def sum_dk(
    dk, delta, values, queries, grads, handed, there, strides, seq_q, seq_kv, pitch, diagonal,
    kv_heads, group, batches, chunk, scale, head_dim, CAUSAL: gl.constexpr, SPLIT: gl.constexpr,
    TERMS: gl.constexpr,
):  # fmt: skip
    """Be the warpgroup that computes dS, and dk."""
    WALKED: gl.constexpr = walked(TERMS)
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WALKED, 16])
    DK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, DK, 2)
    start_kv, batch, place, kv_head, first, end = keys_of(
        seq_q, seq_kv, diagonal, kv_heads, batches, chunk, CAUSAL, SPLIT, TERMS
    )
    rows = gl.arange(0, WALKED, layout=gl.SliceLayout(0, S))
    acc = gl.zeros([OWNED, COLUMNS], gl.float32, DK)
    v = values.consumer_wait(0)
    n = 0
    for head in range(kv_head * group, kv_head * group + group):
        at = delta + (batch * kv_heads * group + head).to(gl.int64) * pitch
        for i in range(first, end):
            delta_rows = gl.load(at + i * WALKED + rows)
            do = grads.consumer_wait(n)
            dp = mma_terms(v, transpose_terms(do, TERMS), S, TERMS)
            grads.consumer_release(n)
            mbarrier.wait(there.index(n % STAGES), (n // STAGES) & 1)
            p = handed.index(n % STAGES).load(S)
            ds = bf16_terms(p * (dp - delta_rows[None, :]), P, TERMS)
            q = queries.consumer_wait(n)
            acc += mma_terms(ds, q, DK, TERMS)
            queries.consumer_release(n)
            n += 1
    store_global(dk, acc * scale, strides, place, kv_head, start_kv, seq_kv, head_dim)


@gluon.jit(do_not_specialize=["heads", "group", "seq_q", "seq_kv", "diagonal", "batches", "chunk"])
def flashattn_hopper_cut_dkdv(
    q, k, v, grad_o, lse2, delta, dk, dv, dk_strides, dv_strides, heads, group, seq_q, seq_kv,
    pitch, diagonal, batches, chunk, scale, scale_log2, head_dim, CAUSAL: gl.constexpr,
    SPLIT: gl.constexpr, TERMS: gl.constexpr,
):  # fmt: skip
    """Compute dk and dv, as ``flashattn_bwd_dkdv``; q, k, v and grad_o are descriptors of parts."""
    WALKED: gl.constexpr = walked(TERMS)
    kv_heads = heads // group
    keys = new_pipeline(k, 1, 1, TERMS)
    values = new_pipeline(v, 1, 1, TERMS)
    queries = new_pipeline(q, STAGES, 1, TERMS)  # who has read q for dk has had P, whose scores
    grads = new_pipeline(grad_o, STAGES, 2, TERMS)  # ... were computed from q before
    handed = gl.allocate_shared_memory(
        gl.float32, [STAGES, OWNED, WALKED], gl.NVMMASharedLayout(128, 32, 2)
    )
    there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(there.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (sum_dv, (dv, lse2, keys, queries, grads, handed, there, dv_strides, seq_q, seq_kv,
                      pitch, diagonal, kv_heads, group, batches, chunk, scale_log2, head_dim,
                      CAUSAL, SPLIT, TERMS)),
            (sum_dk, (dk, delta, values, queries, grads, handed, there, dk_strides, seq_q, seq_kv,
                      pitch, diagonal, kv_heads, group, batches, chunk, scale, head_dim, CAUSAL,
                      SPLIT, TERMS)),
            (load_queries, (q, k, queries, keys, seq_q, seq_kv, diagonal, kv_heads, group, batches,
                            chunk, CAUSAL, SPLIT, TERMS)),
            (load_queries, (grad_o, v, grads, values, seq_q, seq_kv, diagonal, kv_heads, group,
                            batches, chunk, CAUSAL, SPLIT, TERMS)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip


@gluon.jit
def queries_of(
    seq_q, seq_kv, diagonal, heads, batches, chunk, CAUSAL: gl.constexpr, SPLIT: gl.constexpr,
    TERMS: gl.constexpr,
):  # fmt: skip
    """Return (first query, batch, its place in dq, head, first, end) of this program.

    The last two are tiles of keys; under a mask those of the last queries, who see most, come
    first.
    """
    WALKED: gl.constexpr = walked(TERMS)
    block, place, head = own_place(gl.cdiv(seq_q, OWNED), heads, CAUSAL)
    start_q, batch, first, last = block * OWNED, place, 0, seq_kv
    if CAUSAL:
        last = gl.minimum(last, gl.maximum(gl.minimum(start_q + OWNED, seq_q) + diagonal, 0))
    end = gl.cdiv(last, WALKED)
    if SPLIT:  # a chunk is whole tiles
        batch, first = place % batches, place // batches * (chunk // WALKED)
        end = gl.minimum(end, first + chunk // WALKED)
    return start_q, batch, place, head, first, end


@gluon.jit
def load_keys(
    x, own, ring, owns, seq_q, seq_kv, diagonal, heads, group, batches, chunk, CAUSAL: gl.constexpr,
    SPLIT: gl.constexpr, TERMS: gl.constexpr,
):  # fmt: skip
    """Be a warp that loads: q and the keys, or dO and the values."""
    WALKED: gl.constexpr = walked(TERMS)
    start_q, batch, _, head, first, end = queries_of(
        seq_q, seq_kv, diagonal, heads, batches, chunk, CAUSAL, SPLIT, TERMS
    )
    owns.load(0, own, batch, head, start_q)
    n = 0
    for i in range(first, end):
        ring.load(n, x, batch, head // group, i * WALKED)
        n += 1


@gluon.jit
def hide(p, start_q, start_kv, seq_kv, diagonal, CAUSAL: gl.constexpr):
    """Put 0 where a key is not seen, or not there: P could be inf, and inf * 0 is NaN."""
    WALKED: gl.constexpr = p.shape[1]
    layout: gl.constexpr = p.type.layout
    queries = gl.arange(0, OWNED, layout=gl.SliceLayout(1, layout))
    keys = start_kv + gl.arange(0, WALKED, layout=gl.SliceLayout(0, layout))
    last = gl.full([OWNED], 0, gl.int32, layout=gl.SliceLayout(1, layout)) + seq_kv - 1
    if CAUSAL:
        last = gl.minimum(last, queries + (start_q + diagonal))
    return gl.where(keys[None, :] <= last[:, None], p, 0.0)


@gluon.jit
def weigh(
    lse2, queries, keys, handed, there, seq_q, seq_kv, pitch, diagonal, heads, batches, chunk,
    scale_log2, CAUSAL: gl.constexpr, SPLIT: gl.constexpr, TERMS: gl.constexpr,
):  # fmt: skip
    """Be the warpgroup that computes P."""
    WALKED: gl.constexpr = walked(TERMS)
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WALKED, 16])
    start_q, batch, _, head, first, end = queries_of(
        seq_q, seq_kv, diagonal, heads, batches, chunk, CAUSAL, SPLIT, TERMS
    )
    rows = start_q + gl.arange(0, OWNED, layout=gl.SliceLayout(1, S))
    lse2_rows = gl.load(lse2 + (batch * heads + head).to(gl.int64) * pitch + rows)
    q = queries.consumer_wait(0)
    n = 0
    for i in range(first, end):
        k = keys.consumer_wait(n)
        s = mma_terms(q, transpose_terms(k, TERMS), S, TERMS)
        p = gl.exp2(s * scale_log2 - lse2_rows[:, None])
        p = hide(p, start_q, i * WALKED, seq_kv, diagonal, CAUSAL)
        # As in ``sum_dv``, with keys in place of queries.
        handed.index(n % STAGES).store(p)
        mbarrier.arrive(there.index(n % STAGES), count=1)
        n += 1


@gluon.jit
def sum_dq(
    dq, delta, grads, keys, values, handed, there, strides, seq_q, seq_kv, pitch, diagonal, heads,
    batches, chunk, scale, head_dim, CAUSAL: gl.constexpr, SPLIT: gl.constexpr, TERMS: gl.constexpr,
):  # fmt: skip
    """Be the warpgroup that computes dS, and dq."""
    WALKED: gl.constexpr = walked(TERMS)
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WALKED, 16])
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, DQ, 2)
    start_q, batch, place, head, first, end = queries_of(
        seq_q, seq_kv, diagonal, heads, batches, chunk, CAUSAL, SPLIT, TERMS
    )
    rows = start_q + gl.arange(0, OWNED, layout=gl.SliceLayout(1, S))
    delta_rows = gl.load(delta + (batch * heads + head).to(gl.int64) * pitch + rows)
    acc = gl.zeros([OWNED, COLUMNS], gl.float32, DQ)
    do = grads.consumer_wait(0)
    for n in range(end - first):
        v = values.consumer_wait(n)
        dp = mma_terms(do, transpose_terms(v, TERMS), S, TERMS)
        values.consumer_release(n)
        mbarrier.wait(there.index(n % STAGES), (n // STAGES) & 1)
        p = handed.index(n % STAGES).load(S)
        ds = bf16_terms(p * (dp - delta_rows[:, None]), P, TERMS)
        k = keys.consumer_wait(n)
        acc += mma_terms(ds, k, DQ, TERMS)
        keys.consumer_release(n)
    store_global(dq, acc * scale, strides, place, head, start_q, seq_q, head_dim)


@gluon.jit(do_not_specialize=["heads", "group", "seq_q", "seq_kv", "diagonal", "batches", "chunk"])
def flashattn_hopper_cut_dq(
    q, k, v, grad_o, lse2, delta, dq, dq_strides, heads, group, seq_q, seq_kv, pitch, diagonal,
    batches, chunk, scale, scale_log2, head_dim, CAUSAL: gl.constexpr, SPLIT: gl.constexpr,
    TERMS: gl.constexpr,
):  # fmt: skip
    """Compute dq, as ``flashattn_bwd_dq``; q, k, v and grad_o are descriptors of parts."""
    WALKED: gl.constexpr = walked(TERMS)
    queries = new_pipeline(q, 1, 1, TERMS)
    grads = new_pipeline(grad_o, 1, 1, TERMS)
    keys = new_pipeline(k, STAGES, 1, TERMS)  # who has read k for dq has had P
    values = new_pipeline(v, STAGES, 1, TERMS)
    handed = gl.allocate_shared_memory(
        gl.float32, [STAGES, OWNED, WALKED], gl.NVMMASharedLayout(128, 32, 2)
    )
    there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(there.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (weigh, (lse2, queries, keys, handed, there, seq_q, seq_kv, pitch, diagonal, heads,
                     batches, chunk, scale_log2, CAUSAL, SPLIT, TERMS)),
            (sum_dq, (dq, delta, grads, keys, values, handed, there, dq_strides, seq_q, seq_kv,
                      pitch, diagonal, heads, batches, chunk, scale, head_dim, CAUSAL, SPLIT,
                      TERMS)),
            (load_keys, (k, q, keys, queries, seq_q, seq_kv, diagonal, heads, group, batches, chunk,
                         CAUSAL, SPLIT, TERMS)),
            (load_keys, (v, grad_o, values, grads, seq_q, seq_kv, diagonal, heads, group, batches,
                         chunk, CAUSAL, SPLIT, TERMS)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip


def passes(
    given: tuple[Facts, ...],
    strides: tuple[tuple[int, ...], ...],
    diagonal: int | None,
    scale: float,
    precision: str,
) -> Passes | Launch:
    """Prepare the launches of flashattn_hopper_cut_dkdv and flashattn_hopper_cut_dq.

    Or those of the portable kernels, where the inputs are not cut or have other head dims.

    Args:
        given: what is to be known of q, k, v, grad_o and o.
        strides: of dk, dv and dq.
        diagonal: as in ``forward.plan``.
        scale: as in ``forward.plan``.
        precision: as ``launch.input_precision`` returns it.
    """
    q, k = (Like(*x) for x in given[:2])
    tile = launch.pick_tile("bwd_dq", q, k, causal=diagonal is not None, precision=precision)
    parts = launch.cuts(tile, q.dtype, precision)
    if block_d(q.shape[3]) != COLUMNS.value or not parts:
        return portable(given, strides, diagonal, scale, precision)
    own, other = OWNED.value, walked(parts)
    keys = walk("bwd_dkdv", q, k, (other, own), strides[:2])
    queries = walk("bwd_dq", q, k, (own, other), strides[2:])
    options = q, k, diagonal, scale, parts
    return Passes(
        _pass(flashattn_hopper_cut_dkdv, keys, (other, own, own, other), *options),
        _pass(flashattn_hopper_cut_dq, queries, (own, other, other, own), *options),
    )


def _pass(
    function: Any,
    way: Walk,
    rows: tuple[int, ...],
    q: Like,
    k: Like,
    diagonal: int | None,
    scale: float,
    parts: int,
) -> Pass:
    """Prepare a launch of one of them, with so many rows in tiles of q, k, v and grad_o."""
    fold = Launch(
        function,
        way.programs,
        [*map(Tiles, rows), *[None] * (2 + len(way.written))],
        (
            *(x[:3] for x in way.strides),
            *numbers(q, k, [way.chunk], diagonal, scale),
            q.shape[3],
        ),
        constants(causal=diagonal is not None, split=way.split, parts=parts) | {"num_warps": WARPS},
    )
    return Pass(fold, parts, way.written)


def constants(*, causal: bool, split: bool, parts: int) -> dict[str, object]:
    """Return the values of both kernels' constexpr arguments."""
    return {"CAUSAL": causal, "SPLIT": split, "TERMS": parts}
