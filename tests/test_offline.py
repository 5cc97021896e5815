"""Offline compilation: registers and spills of any kernel for any GPU, without one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
from flashattn.kernels.offline import Variant, compile_variant
from flashattn.kernels.tiles import Tile
for head_dim, tile in ((64, Tile(64, 64, 4, 2)), (256, Tile(128, 64, 4, 1))):
    variant = Variant("{arch}", "fwd", 2, head_dim, tile, True)
    resources = compile_variant(variant)
    assert resources.registers > 16 and resources.shared > 0, resources
    print(resources.complaint(variant.arch))
"""


def run(*arguments):
    """Run Python where Triton compiles, as it does not in a process that interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        env=environment,
        capture_output=True,
        check=False,
        text=True,
    )


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_spills_are_seen(arch):
    """A tile that fits is without complaint; one that is much too large spills, and that shows."""
    good, bad = run("-c", CODE.format(arch=arch)).stdout.splitlines()
    assert good == "None"
    assert bad.startswith("spills: ")


def test_an_interpreting_process_is_refused():
    """Where Triton interprets, the reason is said instead of a crash in the compiler."""
    code = "import os; os.environ['TRITON_INTERPRET'] = '1'\n" + CODE.format(arch="sm_90")
    assert "wanted a process without TRITON_INTERPRET=1" in run("-c", code).stderr
