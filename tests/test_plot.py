"""Pictures: what was measured is what is drawn."""

from __future__ import annotations

import pytest
from matplotlib import pyplot as plt

from flashattn.report import plot as plotting
from flashattn.report.runs import Run


def row(impl, seq_q, causal, name, seconds, status="ok"):
    """Return the facts of one case of 1e12 flops."""
    facts = {"impl": impl, "seq_q": seq_q, "causal": causal, "pass": name, "status": status}
    return facts | {"head_dim": 64, "dtype": "bfloat16", "flops": 1e12, "seconds": seconds}


ROWS = [
    row(impl, n, causal, name, seconds)
    for impl, seconds in (("triton", 0.25), ("sdpa", 0.5))
    for n in (1024, 4096)
    for causal in (False, "top_left")
    for name in ("forward", "backward")
]


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_draws_a_file(tmp_path, suffix):
    """A run with two lengths becomes a picture of the kind that the name asks for."""
    path = tmp_path / f"run{suffix}"
    plotting.plot(Run(machine={"gpu": "a GPU"}, roofs={"bfloat16": 8e12}, rows=ROWS), path)
    assert path.read_bytes()[:4] == {".svg": b"<?xm", ".png": b"\x89PNG"}[suffix]


def test_lines_are_speeds():
    """A line's height is flops over seconds in TFLOP/s, the roof's its own; a failure has none."""
    figure, axis = plt.subplots()
    chosen = [r for r in ROWS if (r["causal"], r["pass"]) == (False, "forward")]
    plotting._panel(axis, chosen, {"bfloat16": 8e12}, {"triton": "C0", "sdpa": "C1"})
    heights = {line.get_label(): list(line.get_ydata()) for line in axis.get_lines()}
    plt.close(figure)
    assert heights == {"triton": [4, 4], "sdpa": [2, 2], "bfloat16 product": [8, 8]}


def test_one_length_is_no_line(tmp_path):
    """A run of one length is refused with a sentence."""
    with pytest.raises(ValueError, match="wanted a run with several lengths"):
        plotting.plot(Run(machine={}, rows=ROWS[:1]), tmp_path / "run.svg")
