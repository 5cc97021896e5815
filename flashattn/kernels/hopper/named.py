"""Named barriers, by which warps of a CTA synchronize.

A phase completes when all threads of the barrier have arrived. A warp that only arrives goes on at
once; a warp that arrives at an mbarrier in Gluon first waits for its whole warpgroup. Triton uses
ids 0, 1 and one per role from 2 on. All phases must be complete when a kernel ends.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

WARPGROUP_AND_WARP = gl.constexpr(160)  # threads
WARPGROUPS, WARPGROUPS_AND_WARP = gl.constexpr(256), gl.constexpr(288)


@gluon.constexpr_function
def _text(name: str, threads: int) -> str:
    """Return the PTX of a barrier instruction; operand 1 is the barrier's id."""
    return f"bar.{name} $1, {threads}; mov.b32 $0, 0;"


@gluon.jit
def barrier_arrive(barrier, THREADS: gl.constexpr):
    """Arrive at a barrier of THREADS threads, without waiting."""
    TEXT: gl.constexpr = _text("arrive", THREADS)
    gl.inline_asm_elementwise(TEXT, "=r,r,~{memory}", [gl.to_tensor(barrier)], gl.int32, False, 1)


@gluon.jit
def barrier_wait(barrier, THREADS: gl.constexpr):
    """Arrive at a barrier of THREADS threads, and wait for the others."""
    TEXT: gl.constexpr = _text("sync", THREADS)
    gl.inline_asm_elementwise(TEXT, "=r,r,~{memory}", [gl.to_tensor(barrier)], gl.int32, False, 1)
