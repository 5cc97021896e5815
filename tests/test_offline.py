"""Offline compilation: registers, spills and matrix instructions for any GPU, without one."""

import subprocess
import sys

import pytest

from flashattn.counts.offline import Variant, compile_variant
from flashattn.counts.resources import matrix_instructions
from flashattn.plan.tile import Tile

CODE = """
from flashattn.counts import offline
from flashattn.counts.resources import resources_of
from flashattn.plan.tile import Tile
for head_dim in (64, 40, 20):
    variant = offline.Variant("sm_90", "fwd", 2, head_dim, Tile(64, 64, 4, 2), True)
    compiled = offline.compiled_kernel(variant)
    resources, ptx = resources_of(compiled), compiled.asm["ptx"]
    assert resources.registers > 16 and resources.shared > 0, resources
    assert resources.code > 1024 and resources.code % 128 == 0, resources
    assert sum(resources.matrix.values()) > 0, resources
    assert resources.complaint(variant.arch) is None
    print(head_dim, "ld.global.b16" in ptx, "cp.async.cg" in ptx, "cp.async.ca" in ptx)
"""


def test_resources_and_loads_are_seen(monkeypatch):
    """A tile that fits has no complaint; 16 bytes are loaded at a time, or 8 for 20 columns."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # an interpreting process cannot compile
    command = [sys.executable, "-W", "ignore", "-c", CODE]
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    wanted = ["64 False True False", "40 False True False", "20 False False True"]
    assert done.stdout.splitlines() == wanted, done.stderr


@pytest.mark.interpreter
def test_an_interpreting_process_is_refused():
    """An interpreting process gets an error that says why, instead of a crash in the compiler."""
    variant = Variant("sm_90", "fwd", 2, 64, Tile(64, 64, 4, 2), causal=True)
    with pytest.raises(RuntimeError, match="wanted a process without TRITON_INTERPRET=1"):
        compile_variant(variant)


PTX = """
// wgmma.mma_async in a comment, a name like mma.sync.of.mine, and what is no product:
wgmma.fence.sync.aligned;
tcgen05.ld.sync.aligned.32x32b.x32.b32 {%r1}, [%r2];
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1}, {%r1}, {%r2}, {%f1};
mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%f1}, {%r1}, {%r2}, {%f1};
wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {%f1}, %rd1, %rd2, 1, 1, 1, 0, 0;
@%p1 wgmma.mma_async.sync.aligned.m64n32k8.f32.tf32.tf32 {%f1}, %rd1, %rd2, 1, 1, 1;
@%p1 wgmma.mma_async.sync.aligned.m64n32k8.f32.tf32.tf32 {%f1}, %rd1, %rd2, 1, 1, 1;
@%p2 tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r3, %p3;
@%p2 tcgen05.mma.cta_group::1.kind::tf32 [%r1], %rd1, %rd2, %r3, %p3;
"""


def test_matrix_instructions():
    """Matrix instructions of every generation are counted by shape and type, and no others."""
    assert matrix_instructions(PTX) == {
        "mma m16n8k16 bf16": 1,
        "mma m16n8k8 tf32": 1,
        "tcgen05 f16": 1,
        "tcgen05 tf32": 1,
        "wgmma m64n128k16 f16": 1,
        "wgmma m64n32k8 tf32": 2,
    }
