"""Named barriers: warps of a CTA wait for one another by a barrier's number.

A phase of a barrier is over when all threads that belong to it have arrived. Those that only
arrive go on at once; in Gluon, who arrives at an mbarrier first waits for its own warpgroup.
Triton takes the numbers 0, 1 and one for each role from 2 on. A kernel ends with all phases over.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

WARPGROUP_AND_WARP = gl.constexpr(160)  # threads
WARPGROUPS, WARPGROUPS_AND_WARP = gl.constexpr(256), gl.constexpr(288)


@gluon.constexpr_function
def _text(name: str, threads: int) -> str:
    """Return assembler; the second operand is the barrier's number."""
    return f"bar.{name} $1, {threads}; mov.b32 $0, 0;"


@gluon.jit
def barrier_arrive(barrier, THREADS: gl.constexpr):
    """Arrive at a barrier of so many threads, and go on."""
    TEXT: gl.constexpr = _text("arrive", THREADS)
    gl.inline_asm_elementwise(TEXT, "=r,r,~{memory}", [gl.to_tensor(barrier)], gl.int32, False, 1)


@gluon.jit
def barrier_wait(barrier, THREADS: gl.constexpr):
    """Arrive at a barrier of so many threads, and wait for the others."""
    TEXT: gl.constexpr = _text("sync", THREADS)
    gl.inline_asm_elementwise(TEXT, "=r,r,~{memory}", [gl.to_tensor(barrier)], gl.int32, False, 1)
