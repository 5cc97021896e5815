"""Offline compilation: registers, spills and matrix instructions for any GPU, without one."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from flashattn.kernels.offline import matrix_instructions

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
CODE = """
from flashattn.kernels.offline import Variant, compile_variant
from flashattn.kernels.tiles import Tile
tiles = Tile(64, 64, 4, 2), Tile(64, 64, 4, 2, registers=64)
for arch, tile in itertools.product(ARCHITECTURES, tiles):
    variant = Variant(arch, "fwd", 2, 64, tile, True)
    resources = compile_variant(variant)
    assert resources.registers > 16 and resources.shared > 0, resources
    assert resources.code > 1024 and resources.code % 128 == 0, resources
    assert sum(resources.matrix.values()) > 0, resources
    print(resources.complaint(variant.arch))
"""
CODE = f"import itertools; ARCHITECTURES = {ARCHITECTURES}\n{CODE}"


ODD = """
from flashattn.kernels import offline
from flashattn.kernels.tiles import Tile
for head_dim in (64, 40, 20):
    variant = offline.Variant("sm_90", "fwd", 2, head_dim, Tile(64, 64, 4, 2), True)
    ptx = offline.compiled_kernel(variant).asm["ptx"]
    print(head_dim, "ld.global.b16" in ptx, "cp.async.cg" in ptx, "cp.async.ca" in ptx)
"""


@pytest.fixture(scope="module")
def side_by_side():
    """Start Python where Triton compiles, and where it interprets; return how both ended."""
    interprets = "import os; os.environ['TRITON_INTERPRET'] = '1'\n"
    with ThreadPoolExecutor() as pool:
        return list(pool.map(run, (CODE, interprets + CODE)))


def run(code):
    """Run Python where Triton compiles, as it does not in a process that interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment,
        capture_output=True,
        check=False,
        text=True,
    )


def test_spills_are_seen(side_by_side):
    """A tile that fits is without complaint; with half of the registers it spills, which shows."""
    done, _ = side_by_side
    complaints = done.stdout.splitlines()
    assert len(complaints) == 2 * len(ARCHITECTURES), done.stderr
    assert set(complaints[::2]) == {"None"}
    assert all(bad.startswith("spills: ") for bad in complaints[1::2])


def test_columns_are_loaded_together():
    """Of 64 and 40 columns 16 bytes at a time, of 20 eight; none is loaded alone."""
    assert run(ODD).stdout.splitlines() == [
        "64 False True False",
        "40 False True False",
        "20 False False True",
    ]


def test_an_interpreting_process_is_refused(side_by_side):
    """Where Triton interprets, the reason is said instead of a crash in the compiler."""
    _, done = side_by_side
    assert "wanted a process without TRITON_INTERPRET=1" in done.stderr


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
    """Every generation's products are counted by shape and type, and nothing else is."""
    assert matrix_instructions(PTX) == {
        "mma m16n8k16 bf16": 1,
        "mma m16n8k8 tf32": 1,
        "tcgen05 f16": 1,
        "tcgen05 tf32": 1,
        "wgmma m64n128k16 f16": 1,
        "wgmma m64n32k8 tf32": 2,
    }
