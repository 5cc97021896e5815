"""Every script in examples/ runs as a user would run it, and prints something."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted(Path(__file__).parents[1].joinpath("examples").glob("*.py"))


def test_there_are_examples():
    """There are scripts in examples/."""
    assert EXAMPLES


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path):
    """A script exits with 0 and prints its results; one for torchrun gets two processes."""
    if "transformers" in path.stem:
        pytest.importorskip("transformers", reason="the extra integrations is not installed")
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *(ranks if "torchrun" in path.read_text() else []), str(path)]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip()
