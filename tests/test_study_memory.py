"""The memory study: peaks beside predictions, and the timeline with its phases."""

from __future__ import annotations

import pytest

from flashattn.report.runs import Run
from flashattn.report.studies import memory

GIBI = 2**30


def row(peak=3, step="train", precision="fp32", context=128, **facts):
    """Return a step whose parts are predicted at 4 GiB, 3 of them activations."""
    made = {"study": "memory", "name": f"{context}-{step}-{precision}", "status": "ok"}
    made |= {"size": "2.7B", "context": context, "batch": 4, "step": step, "impl": "naive"}
    made |= {"precision": precision, "peak_bytes": peak * GIBI, "reason": None, "seconds": None}
    return made | {"predicted": {"parameters": GIBI, "activations": 3 * GIBI}} | facts


def run(*rows):
    """Return a run of these rows."""
    return Run(machine={}, rows=list(rows))


def test_peak_stands_beside_its_prediction():
    """Peak, predicted and their ratio; a peak that was told as predicted wins over the sum."""
    first, second = row(3), row(3, context=512, predicted_bytes=6 * GIBI)
    table = memory.tables(run(first, second))[0]
    assert [line[-4:] for line in table.lines] == [["3", "4", "0.75", ""], ["3", "6", "0.5", ""]]


def test_out_of_memory_is_a_line_with_its_prediction():
    """What does not fit is marked beside the bytes it would have needed."""
    table = memory.tables(run(row(status="oom", peak_bytes=None)))[0]
    assert table.lines[0][-4:] == ["OOM", "4", "", ""]


def test_parts_are_predicted_and_measured():
    """Every part has its prediction and, where it is known, its measurement."""
    table = memory.tables(run(row(measured={"parameters": 2 * GIBI})))[1]
    assert table.header[-4:] == [
        *("parameters", "parameters, measured", "activations", "activations, measured")
    ]
    assert table.lines[0][-4:] == ["1", "2", "3", ""]


def test_blocks_have_their_line():
    """The largest blocks are told with their phase and the line that made them."""
    block = {"bytes": 20 * 2**20, "line": "lm.py:12 forward", "phase": "forward"}
    table = memory.tables(run(row(largest=[block, block | {"phase": None}])))[-1]
    case = "2.7B, context 128, batch 4, train, fp32, naive"
    assert table.lines[0] == [case, "20 MiB", "forward", "lm.py:12 forward"]
    assert table.lines[1][2] == ""


@pytest.mark.parametrize(("peak", "off"), [(3, "25%"), (5, "25%"), (8, "100%")])
def test_worst_prediction_is_named(peak, off):
    """How far predictions are off is said by the worst, whichever way."""
    said = memory.findings(run(row(4), row(peak, context=512)))
    assert f"Of 2 peaks the prediction is off by at most {off} (2.7B, context 512" in said[0]


@pytest.mark.parametrize(("kept", "off"), [(3, "0.0%"), (6, "100%")])
def test_activations_are_held_against_their_prediction(kept, off):
    """What forward keeps for backward is told without any peak too, as on a CPU."""
    said = memory.findings(run(row(peak_bytes=None, measured={"activations": kept * GIBI})))
    wanted = "Of 1 cases the activations kept for backward are off their prediction by at most"
    assert said == [f"{wanted} {off} (2.7B, context 128, batch 4, train, fp32, naive)."]


@pytest.mark.parametrize(("top", "off"), [(3, "0.0%"), (6, "100%")])
def test_a_timeline_is_held_against_the_allocators_peak(top, off):
    """A timeline that something else is alive in, or that misses its peak, is told."""
    rows = [row(3, timeline=[[0, GIBI], [1, top * GIBI]]), row(9)]
    said = "Of 1 timelines the highest point is off the allocator's peak by at most"
    wanted = f"{said} {off} (2.7B, context 128, batch 4, train, fp32, naive)."
    assert wanted in memory.findings(run(*rows))


def test_largest_peak_is_named_with_what_fills_it():
    """The largest peak is said with the part that has most of its bytes."""
    said = memory.findings(run(row(9), row(10, step="forward")))
    wanted = "10 GiB (2.7B, context 128, batch 4, forward, fp32, naive)"
    assert f"The largest peak is {wanted}; by prediction 75% of its bytes are activations." in said


def test_autocast_is_held_against_fp32():
    """What bf16 does to the peak is said of the longest context that both have."""
    rows = [row(8), row(9, precision="bf16"), row(8, context=512)]
    said = memory.findings(run(*rows, row(6, context=512, precision="bf16")))
    where = "2.7B, context 512, batch 4, train, naive"
    assert f"{where}: bf16 autocast peaks at 0.75x the bytes of fp32." in said


def test_residual_stream_has_its_size():
    """One tensor of the residual stream is told in MiB."""
    said = memory.findings(run(row(residual_bytes=20 * 2**20)))
    wanted = "takes 20 MiB (2.7B, batch 4, context 128)."
    assert f"One tensor of the residual stream {wanted}" in said


def test_timeline_shows_phases_and_the_peak():
    """Bytes are drawn over ms from the first point on, phases named, the peak marked."""
    timeline = [[5.0, GIBI], [5.1, 3 * GIBI], [5.2, 2 * GIBI]]
    phases = [["forward", 5.0, 5.1], ["backward", 5.1, 5.2]]
    short = row(context=64, timeline=timeline)
    drawn = memory.pictures(run(short, row(timeline=timeline, phases=phases)))
    assert set(drawn) == {"memory-2_7B-fp32-naive"}
    (axis,) = drawn["memory-2_7B-fp32-naive"].axes  # of the longest context only
    curve, peak = axis.get_lines()
    assert list(curve.get_xdata()) == pytest.approx([0, 100, 200])
    assert list(curve.get_ydata()) == [1, 3, 2]
    assert (peak.get_xdata()[0], peak.get_ydata()[0]) == (pytest.approx(100), 3)
    assert [t.get_text() for t in axis.texts] == ["forward", "backward", "peak 3 GiB"]
