"""Names in Gluon that differ between Triton 3.6 and 3.9."""

from __future__ import annotations

import triton
from triton._C.libtriton import ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language import core

# Triton 3.9 still has the old names, but they raise when they are called.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
thread_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
aggregate = getattr(triton, "aggregate", None) or core._aggregate  # noqa: SLF001

if hasattr(tma, "async_atomic_add"):
    add_tile = tma.async_atomic_add
else:  # 3.6 and 3.7 have the operation, but no function for it

    @core.builtin
    def add_tile(tensor_desc, coord, src, _semantic=None):  # noqa: ANN001, ANN201
        """Add a tile in shared memory to a tensor asynchronously (TMA reduce-add)."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)  # noqa: SLF001
        kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
        _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)
