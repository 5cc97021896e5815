"""The attention grid: what grows with N² and what with N is read off the rows."""

from __future__ import annotations

import pytest

from flashattn.report.runs import Run
from flashattn.report.studies import attention


def row(impl, n, seconds=1.0, status="ok", name="forward", **facts):
    """Return a case of one implementation and length."""
    made = {"study": "attention", "name": f"{name}[{impl}-{n}]", "impl": impl, "status": status}
    made |= {"pass": name, "seq": n, "head_dim": 64, "dtype": "float32", "causal": False}
    return made | {"reason": None, "seconds": seconds if status == "ok" else None} | facts


def grid(power, **facts):
    """Return naive rows whose bytes grow with a power of N, and ours with N."""
    for n in (256, 1024, 4096):
        yield row("naive", n, 8.0, held_bytes=10 * n**power, peak_bytes=20 * n**power, **facts)
        yield row("triton", n, 2.0, held_bytes=100 * n, peak_bytes=200 * n, **facts)


def run(*rows):
    """Return a run of these rows."""
    return Run(machine={}, rows=list(rows))


def test_bytes_are_told_over_what_they_grow_with():
    """Naive attention's bytes are told per N², ours per N, as the fitted exponents say."""
    ours, naive = attention.tables(run(*grid(2)))
    assert (ours.header[-1], naive.header[-1]) == ("held bytes / N", "held bytes / N²")
    assert {line[-1] for line in ours.lines} == {"100"}
    assert {line[-1] for line in naive.lines} == {"10"}
    linear = attention.tables(run(*grid(1)))[1]
    assert linear.header[-1] == "held bytes / N"


def test_passes_of_one_case_share_a_line():
    """Forward and backward stand side by side, with the larger peak of the two."""
    both = [row("naive", 256, 0.001, peak_bytes=2**30, held_bytes=2**29)]
    both += [row("naive", 256, 0.003, name="backward", peak_bytes=2**31)]
    (table,) = attention.tables(run(*both))
    assert table.lines == [["fp32", "64", "full", "256", "1", "3", "512", "2048", "", "2097152"]]


def test_out_of_memory_is_a_line_with_its_prediction():
    """What does not fit is marked, beside the bytes it would have needed."""
    (table,) = attention.tables(run(row("naive", 16384, status="oom", predicted_bytes=2**37)))
    assert table.lines[0][4:9] == ["OOM", "", "", "", "131072"]


@pytest.mark.parametrize("power", [1.5, 2.0])
def test_exponents_follow_the_bytes(power):
    """The sentence about growth has the exponents of the rows' bytes."""
    held, peak = attention.findings(run(*grid(power)))[:2]
    for sentence in (held, peak):
        assert f"N^{power:.2f} in naive" in sentence
        assert "N^1.00 in triton" in sentence


def test_naive_is_met_at_the_longest_that_both_have():
    """Ours is compared with naive at the greatest common length, in time and in bytes."""
    rows = [*grid(2), row("triton", 16384, 3.0, held_bytes=1), row("naive", 16384, status="oom")]
    said = attention.findings(run(*rows))
    wanted = "forward: triton is 4.00x as fast as naive at N = 4096, D = 64"
    assert f"{wanted} with 0.2% of the bytes (held for backward)." in said
    assert "naive runs out of memory from N = 16384." in said


def test_bytes_without_a_time_are_told():
    """Interpreted kernels have bytes and no time: both the table and the exponents have them."""
    rows = [row("triton", n, status="unsupported", held_bytes=100 * n) for n in (32, 64, 128)]
    (table,) = attention.tables(run(*rows))
    assert table.lines[0][4:] == ["-", "", "0.00305", "", "", "100"]
    assert attention.findings(run(*rows)) == [
        "Bytes held for the backward pass grow as N^1.00 in triton (D = 64)."
    ]


def test_no_bytes_no_growth():
    """On a CPU, without an allocator's count, only times are told."""
    rows = [row(impl, n, 1.0) for impl in ("naive", "triton") for n in (256, 1024)]
    said = attention.findings(run(*rows))
    assert said == ["forward: triton is 1.00x as fast as naive at N = 1024, D = 64."]
    assert attention.pictures(run(*rows)) == {}


def test_picture_has_curves_guides_and_what_did_not_fit():
    """Bytes are drawn against N, on logarithms, with N and N², and a cross where memory ends."""
    rows = [*grid(2), row("naive", 16384, status="oom", predicted_bytes=2**31)]
    axis = attention.pictures(run(*rows))["attention-memory"].axes[0]
    lines = {line.get_label(): list(line.get_ydata()) for line in axis.get_lines()}
    assert lines["naive"] == [10 * n**2 / 2**20 for n in (256, 1024, 4096)]
    assert (axis.get_xscale(), axis.get_yscale()) == ("log", "log")
    assert {"N", "N²", "OOM"} <= {text.get_text() for text in axis.texts}
    assert [list(c.get_offsets()[0]) for c in axis.collections] == [[16384, 2048]]
