"""The shared memory of flashattn_hopper_bwd."""

# Gluon's aggregates need evaluated annotations: no `from __future__ import annotations` here.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashattn.kernels.hopper.backward_dq import LINE
from flashattn.kernels.hopper.backward_tile import BLOCK_KV
from flashattn.kernels.hopper.compat import aggregate
from flashattn.kernels.hopper.pipeline import Pipeline, new_pipeline

KEYS = gl.constexpr(64)  # of a warpgroup
TERMS = gl.constexpr(16)  # columns of -lse / scale and -delta: three bf16 terms, then zeros


@aggregate
class SharedStorage:
    """The shared memory of a CTA.

    Args:
        keys: the keys that the CTA owns.
        values: the values of these keys.
        ones: see ``new_ones``.
        queries: query tiles, with -lse / scale in terms, or lse_log2 if scores are capped.
        grads: dO tiles, with -delta in terms.
        sdS: dS [queries, keys] of the tile that both warpgroups work on, and of the next.
        sdQ: the dq tile that is added to the accumulator.
    """

    keys: Pipeline
    values: Pipeline
    ones: gl.shared_memory_descriptor
    queries: Pipeline
    grads: Pipeline
    sdS: gl.shared_memory_descriptor  # noqa: N815
    sdQ: gl.shared_memory_descriptor  # noqa: N815

    @gluon.constexpr_function
    def __init__(self, keys, values, ones, queries, grads, sdS, sdQ):
        """Store the fields."""
        self.keys = keys
        self.values = values
        self.ones = ones
        self.queries = queries
        self.grads = grads
        self.sdS = sdS
        self.sdQ = sdQ


@gluon.jit
def new_ones():
    """Return the left operand [KEYS, TERMS] of a product that sums three terms."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [gl.num_warps(), 1], [1, 0])
    columns = gl.arange(0, TERMS, layout=gl.SliceLayout(0, layout))
    x = gl.full([KEYS, TERMS], 1.0, gl.float32, layout)
    x = gl.where(columns[None, :] < 3, x, 0.0).to(gl.bfloat16)
    ones = gl.allocate_shared_memory(
        gl.bfloat16, [KEYS, TERMS], gl.NVMMASharedLayout(2 * TERMS, 16, 2)
    )
    ones.store(x)
    return ones


@gluon.jit
def new_shared_storage(inputs, dq, STAGES: gl.constexpr):
    """Allocate the shared memory; inputs and dq are descriptors."""
    q, k, v, grad_o, lse, minus_delta = inputs
    keys = new_pipeline(k, 1, 2)
    values = new_pipeline(v, 1, 2)
    queries = new_pipeline(q, STAGES, 0, row_stats=lse)
    grads = new_pipeline(grad_o, STAGES, 0, row_stats=minus_delta)
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    sdS = gl.allocate_shared_memory(q.dtype, [2, q.block_shape[2], BLOCK_KV], layout)
    ones = new_ones()
    sdQ = gl.allocate_shared_memory(dq.dtype, [2, 1, 1, LINE, LINE], dq.layout)
    return SharedStorage(keys, values, ones, queries, grads, sdS, sdQ)
