"""The model's study: times, roofs, memory, and what each choice gains."""

from __future__ import annotations

import pytest

from flashattn.report.runs import Run
from flashattn.report.studies import lm

ROOFS = {"bfloat16": 8e14, "tf32": 4e14, "float32": 5e13}
GIBI = 2**30


def row(seconds=1.0, size="small", status="ok", **facts):
    """Return a train step of 4e13 flops in fp32."""
    made = {"study": "lm", "size": size, "context": 256, "batch": 4, "step": "train"}
    made |= {"precision": "fp32", "impl": "naive", "compiled": False, "flops": 4e13}
    made |= {"status": status, "reason": None} | facts
    if status == "ok":
        made |= {"seconds": seconds, "mean": 1.1 * seconds, "std": 0.1 * seconds}
    return made | {"name": "-".join(str(value) for value in made.values())}


def run(*rows):
    """Return a run of these rows."""
    return Run(machine={}, roofs=ROOFS, rows=list(rows))


@pytest.mark.parametrize(
    ("precision", "share"), [("fp32", "80%"), ("tf32", "10%"), ("bf16", "5.0%")]
)
def test_step_is_told_with_its_share_of_its_own_roof(precision, share):
    """A step has its times in ms, its speed, the share of its precision's roof and its memory."""
    made = row(precision=precision, peak_bytes=3 * GIBI, predicted_bytes=2 * GIBI)
    (table,) = lm.tables(run(made))
    cells = ["small", "256", "4", "train", "1000", "1100 ± 100", "40", share, "3", "2"]
    assert table.lines == [cells]
    assert table.caption.startswith(f"{precision}, naive, eager:")


def test_out_of_memory_is_a_line_with_its_prediction():
    """A step that does not fit is marked beside its predicted bytes, and counted."""
    made = run(row(), row(size="2.7B", status="oom", predicted_bytes=150 * GIBI))
    (table,) = lm.tables(made)
    assert table.lines[1][4:] == ["OOM", "", "", "", "", "150"]
    assert lm.findings(made)[-1] == (
        "1 of 2 cases do not fit into memory, the smallest of them with 150 GiB predicted."
    )


def test_sizes_are_in_order():
    """Models stand from small to large, whatever ran first."""
    (table,) = lm.tables(run(*(row(size=size) for size in ("2.7B", "medium", "small"))))
    assert [line[0] for line in table.lines] == ["small", "medium", "2.7B"]


CHOICES = [
    ("precision", "bf16", "bf16 / fp32"),
    ("precision", "tf32", "tf32 / fp32"),
    ("compiled", True, "compiled / eager"),
    ("impl", "triton", "triton / naive"),
]


@pytest.mark.parametrize(("axis", "value", "name"), CHOICES)
@pytest.mark.parametrize("fast", [0.25, 2.0])
def test_gain_follows_the_times(axis, value, name, fast):
    """What a choice gains is the ratio of two rows that differ in it alone."""
    made = run(row(1.0), row(fast, **{axis: value}), row(9.0, size="xl", **{axis: value}))
    gains = lm.tables(made)[-1]
    cells = dict(zip(gains.header, gains.lines[0], strict=True))
    assert cells[name] == f"{1 / fast:.2f}x"
    assert len(gains.lines) == 1
    assert lm.findings(made)[0].startswith(f"Speed of a step, {name}: {1 / fast:.2f}x (small")
    (figure,) = lm.pictures(made).values()
    (bars,) = figure.axes[0].containers
    assert [bar.get_height() for bar in bars] == [1 / fast]


def test_best_step_of_the_largest_model_is_named():
    """The fastest train step is that of the largest model at its longest context."""
    slow, fast = (row(s, "xl", context=1024, precision=p) for s, p in ((2, "fp32"), (0.5, "bf16")))
    said = lm.findings(run(row(0.1), slow, fast, row(0.1, "xl", context=1024, step="forward")))
    wanted = "The fastest of 2 train steps of xl at context 1024 takes 500 ms (bf16, naive, eager)"
    assert f"{wanted}, 10% of the bf16 roof." in said


def test_prediction_that_is_off_the_most_is_named():
    """The peak furthest from its prediction is named, whichever way it is off."""
    near = row(peak_bytes=1.04 * GIBI, predicted_bytes=GIBI)
    far = row(size="xl", peak_bytes=0.9 * GIBI, predicted_bytes=GIBI)
    said = " ".join(lm.findings(run(near, far)))
    assert "Of 2 measured peaks the one furthest from its prediction is 0.9 times it (xl" in said


def test_sizes_tell_their_parameters():
    """Each size has its exact parameters once, and the 16 bytes that training holds for each."""
    rows = [row(size="xl", parameters=2 * GIBI), row(size="small", parameters=1234567)]
    sizes, *_ = lm.tables(run(*rows, row(size="xl", context=512, parameters=2 * GIBI)))
    assert sizes.header == ["size", "parameters", "GiB"]
    assert sizes.lines == [["small", "1 234 567", "0.0184"], ["xl", "2 147 483 648", "32"]]
