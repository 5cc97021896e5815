"""What every study says of the made-up run and of changed ones, and what holds for all of them."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from flashattn.report.runs import Run
from flashattn.report.studies import STUDIES, accuracy, attention, flash, launch, lm, memory
from flashattn.report.units import SHORT

EACH = pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.NAME)
BARE = {"name": "x", "reason": "no luck"}
# Sentences, and lines of tables with bars between their cells, under the name of each study.
EXPECTED = Path(__file__).with_name("expected.txt")
PICTURES = """lm-speedups warmup-steps profile-categories precision-sums memory-2_7B-fp32-naive
memory-2_7B-bf16-naive attention-memory compile-speedups flash-tokens-bfloat16-full
flash-one-head-bfloat16-causal masks-pairs scores-times launch-host integrations-steps
parallel-tokens accuracy-normal heads-speeds accuracy-huge-v accuracy-contract"""


def told(study, run):
    """Return all that a study says: its sentences, and its tables' captions, lines and notes."""
    said = study.findings(run)
    for table in study.tables(run):
        lines = map("|".join, (table.header, *table.lines))
        said += [table.caption, *lines, *table.notes]
    return said


def changed(made_run, study, change, **facts):
    """Return the rows of one study, with other facts where ``change`` holds."""
    rows = [row | (facts if change(row) else {}) for row in made_run.study(study.NAME)]
    return replace(made_run, rows=rows)


def panel(picture, name=None):
    """Return the records of one panel of a picture, or of its only one."""
    records = picture["data"]["values"]
    names = {record["panel"] for record in records}
    assert name in names or len(names) == 1
    return [record for record in records if record["panel"] == (name or record["panel"])]


def heights(records, fact="y"):
    """Return the heights of a panel's lines by their names."""
    return {name: [r[fact] for r in records if r.get("name") == name] for name in names(records)}


def names(records):
    """Return the names of a panel's lines, each once."""
    return list(dict.fromkeys(record["name"] for record in records if "name" in record))


@EACH
def test_sentences_and_tables_follow_the_rows(study, made_run):
    """Each number in a sentence or a cell is the made-up run's, in its unit."""
    _, _, rest = EXPECTED.read_text(encoding="utf-8").partition(f"# {study.NAME}\n")
    lines, found = rest.partition("\n#")[0].splitlines(), told(study, made_run)
    assert len(lines) > 3
    assert [line for line in lines if line not in found] == []


@EACH
def test_what_a_study_says_is_whole(study, made_run):
    """Every table has a caption of its own, a cell for each column, and the rows it tells of.

    A finding ends in a full stop and has a number in it. Without roofs no share of one is told.
    """
    tables = study.tables(made_run)
    assert len({table.caption for table in tables}) == len(tables) > 0
    for table in tables:
        assert table.lines
        assert table.rows
        assert {len(line) for line in table.lines} == {len(table.header)}
    for sentence in study.findings(made_run):
        assert re.search(r"\d.*\.$", sentence)
        assert not re.search(r"\b(None|nan)\b", sentence)
    bare = replace(made_run, roofs={})
    assert study.tables(bare)
    assert " roof" not in str(study.findings(bare))
    assert "%)" not in str([table.lines for table in flash.tables(bare)])


def test_pictures_are_named_after_their_study(made_pictures):
    """Every study draws; its pictures' names begin with its own, and each has a title."""
    found = [(study, *drawn) for study, own in made_pictures.items() for drawn in own.items()]
    assert {name for _, name, _ in found} == set(PICTURES.split())
    assert all(name.startswith(study) and made["title"]["text"] for study, name, made in found)


@EACH
def test_another_study_s_rows_say_nothing(study, made_run):
    """Without rows of its own a study gives nothing."""
    others = replace(made_run, rows=[r for r in made_run.rows if r["study"] != study.NAME])
    assert told(study, others) == []
    assert study.pictures(others) == {}


@EACH
@pytest.mark.parametrize("status", ["unsupported", "oom", "failed", "ok"])
def test_rows_that_say_only_why_are_no_harm(study, made_run, status):
    """A case that ended before it had any facts spoils neither itself nor the other cases."""
    bare = BARE | {"study": study.NAME, "status": status}
    for run in (Run(machine={}, rows=[bare]), replace(made_run, rows=[*made_run.rows, bare])):
        assert not any("None" in line for line in told(study, run))
    assert study.pictures(Run(machine={}, rows=[bare])) == {}


@EACH
def test_any_fact_may_be_missing(study, made_run):
    """A fact that is None or not there, as bytes are on a CPU, costs what it says and no more."""
    rows = made_run.study(study.NAME)
    for fact in sorted({fact for row in rows for fact in row} - {"study", "name", "status"}):
        without = [{name: row[name] for name in row if name != fact} for row in rows]
        for own in (without, [row | {fact: None} for row in rows]):
            assert not any("None" in line for line in told(study, replace(made_run, rows=own)))


@pytest.mark.parametrize(
    ("study", "dtype", "cell", "reason"),
    [
        (flash, "bfloat16", "200%*", "too low"),
        (flash, "float32", "3200%*", "as bf16 products"),
        (lm, "bfloat16", "200%*", "too low"),
        (lm, "float32", "3200%*", "too low"),
    ],
)
def test_more_than_the_roof_is_told_with_its_reason(made_run, study, dtype, cell, reason):
    """A share above 100% has a mark, the table a note, and the sentence the reason."""
    facts = {"dtype": dtype, "precision": SHORT[dtype], "seconds": 0.01, "flops": 1.6e13}
    run = changed(made_run, study, lambda row: row["status"] == "ok", **facts)
    findings, notes = study.findings(run), [n for t in study.tables(run) for n in t.notes]
    assert any(cell in line for line in told(study, run))
    assert any(note.startswith("* more than the roof: ") for note in notes)
    shares = [line for line in findings if " roof" in line]
    assert shares
    assert all(f"{cell[:-1]} of the" in line and reason in line for line in shares)
    assert not any("more than" in line for line in told(study, made_run))


def test_an_unsteady_median_is_marked(made_run):
    """Quartiles far apart put a mark behind a median; wins are counted again without it."""
    ours = lambda row: row["problem"] == "h16-q512" and row["impl"] == "hopper"  # noqa: E731
    run = changed(made_run, flash, ours, q1=0.001, q3=0.01)
    found = told(flash, run)
    assert "h16-q512|410 (51%)|512 (64%) ~|81.9 (10%)|410 (51%)|1.25 x sdpa" in found
    assert "~ the quartiles are further apart than 25% of the median" in found
    assert any("where both medians are steady, ours is the fastest in 1 of 1" in x for x in found)
    assert "steady" not in str(told(flash, changed(made_run, flash, ours, q1=0.001, q3=0.0011)))


def test_the_best_peer_is_of_the_same_run_where_there_is_one(made_run):
    """A peer of our row's run is preferred to a faster one of another; if there is none, marked."""
    old = lambda row: row["impl"] == "sdpa"  # noqa: E731
    found = told(flash, changed(made_run, flash, old, run=made_run))
    assert "h16-q512|410 (51%)|512 (64%)|81.9 (10%)|410 (51%)|6.25 x naive" in found
    assert "h16-q4096|410 (51%)|512 (64%)|OOM|410 (51%)|1.25 x sdpa +" in found
    assert "+ the peer was measured in another run" in found
    assert any(
        line.endswith("in 1 of 2 problems the peer was measured in another run.") for line in found
    )


def test_ours_is_no_peer_and_may_lose(made_run):
    """The tiled implementation counts as ours; where naive attention is faster, that is said."""
    sdpa = lambda row: row["impl"] == "sdpa"  # noqa: E731
    found = told(flash, changed(made_run, flash, sdpa, impl="tiled"))
    assert "h16-q512|410 (51%)|512 (64%)|81.9 (10%)|410 (51%)|6.25 x naive" in found
    naive = lambda row: row["impl"] == "naive" and row["status"] == "ok"  # noqa: E731
    found = flash.findings(changed(made_run, flash, naive, seconds=1e-4))
    assert (
        "forward, one head: ours is slower than naive in 1 of 1 problems, at most h1-q512." in found
    )
    assert any("ours is the fastest in 1 of 2 problems" in line for line in found)


def test_growth_is_fitted_to_the_long_half(made_run):
    """For one head the exponent is that of the longer half of the lengths that are steady."""
    row = next(r for r in made_run.study("flash") if (r["impl"], r["heads"]) == ("triton", 1))
    seconds = {128: 1.0, 256: 1.0, 512: 1.0, 4096: 4.0, 8192: 16.0, 16384: 64.0}
    rows = [row | {"seq_q": n, "problem": f"q{n}", "seconds": s} for n, s in seconds.items()]
    rows.append(rows[0] | {"seq_q": 32768, "problem": "q", "seconds": 9e9, "q1": 1.0, "q3": 9e9})
    found = flash.findings(replace(made_run, rows=rows))
    assert (
        "forward, one head: triton's time grows as N^2.00 (bf16 D = 128, from N = 4096)." in found
    )


def test_bytes_without_a_time_are_told(made_run):
    """Interpreted kernels have bytes and no time: tables and exponents have them."""
    run = changed(made_run, attention, lambda _: True, status="unsupported", seconds=None)
    found = told(attention, run)
    assert "fp32|64|full|1024|-|-|0.25|0.5|0.25|256" in found
    assert "Bytes in use at the peak grow as N^1.00 in triton, N^2.00 in naive (D = 64)." in found


def test_a_peak_that_was_predicted_as_such_wins(made_run):
    """A predicted peak goes before the sum of the parts; what does not fit is a line with it."""
    full = {"status": "oom", "peak_bytes": None, "predicted_bytes": 6 * 2**30}
    found = told(memory, changed(made_run, memory, lambda _: True, **full))
    assert "2.7B|512|4|train|fp32|naive|OOM|6||1" in found


def test_dtypes_are_told_apart(made_run):
    """Launching: no time hides behind another dtype's; nobody but a gradient needs the floor."""
    run = changed(made_run, launch, lambda _: True, dtype="float32", seconds=9e-5)
    both = replace(run, rows=[*made_run.study("launch"), *run.rows])
    assert [line[:4] for line in launch.findings(both)] == ["bf16", "bf16", "fp32", "fp32"]
    records = launch.pictures(both)["launch-host"]["data"]["values"]
    assert {record["panel"][:4] for record in records} == {"bf16", "fp32"}
    forward = changed(made_run, launch, lambda _: True, **{"pass": "forward"})
    assert "allocates" not in " ".join(launch.findings(forward))


def test_a_budget_of_nothing_allows_nothing(made_run):
    """Where the exact result is without error any error is above the budget, and none is not."""
    errors = {"normal": {"o": {"max": 0.0, "mean": 0.1, "max_budget": 0.0, "mean_budget": 0.0}}}
    (said, *_) = accuracy.findings(changed(made_run, accuracy, lambda _: True, errors=errors))
    assert said.startswith("triton exceeds its budget in 1 of 2 errors; its max error reaches 0 of")


def test_what_a_logarithm_cannot_show_is_left_out(made_run):
    """An error of nothing or without end has no dot; the picture is drawn nevertheless."""
    errors = {"normal": {"o": {"max": math.inf, "mean": 0.0}, "dq": {"max": 0.5, "mean": 0.1}}}
    triton = replace(made_run, rows=made_run.study("accuracy")[:1])
    (made,) = accuracy.pictures(changed(triton, accuracy, lambda _: True, errors=errors)).values()
    shown = [(r["output"], r["error"]) for r in panel(made) if "error" in r]
    assert shown == [("dq", 0.5), ("dq", 0.1)]


def test_lines_are_drawn_through_the_rows(made_pictures):
    """Lines have the rows' numbers in the unit of their axis, beside the roof or what is exact."""
    speed = made_pictures["flash"]["flash-tokens-bfloat16-full"]
    assert heights(panel(speed))["sdpa"] == [409.6, 409.6]
    assert heights(panel(speed))["roof"] == [800, 800]
    y = speed["spec"]["layer"][0]["encoding"]["y"]
    assert (y["title"], y["scale"]) == ("TFLOP/s", {"zero": True})
    seconds = made_pictures["flash"]["flash-one-head-bfloat16-causal"]
    assert heights(panel(seconds))["sdpa"] == [1.25, 10]
    held = panel(made_pictures["attention"]["attention-memory"], "held for backward")
    assert heights([r for r in held if "kind" not in r])["naive"] == [16, 256]
    assert {r["label"] for r in held if r.get("label")} == {"N", "N²", "OOM, predicted"}
    sums = panel(made_pictures["precision"]["precision-sums"])
    assert heights(sums)["exact"] == [0, 10]
    assert heights(sums)["bf16 + bf16"][-1] == 4
    steps = panel(made_pictures["warmup"]["warmup-steps"])
    assert heights(steps)["0 warm-up steps"] == [100, *[10] * 9]
    both = panel(made_pictures["parallel"]["parallel-tokens"])
    assert heights(both)["linear"] == pytest.approx([1.1111, 2.2222], rel=1e-4)


def test_a_timeline_keeps_its_peak(made_run, made_pictures):
    """Of thousands of moments the highest stays, with its time; phases lie where they were."""
    (phase, *_, peak) = panel(made_pictures["memory"]["memory-2_7B-fp32-naive"])
    assert (phase["label"], phase["x"], phase["end"]) == ("forward", 0, 100)
    assert (peak["x"], peak["y"], peak["label"]) == (pytest.approx(100), 4, "peak 4 GiB")
    moments = [[i / 1e4, 2**30 * (9 if i == 1234 else i % 7)] for i in range(5000)]
    run = changed(made_run, memory, lambda _: True, timeline=moments)
    (_, _, *points, peak) = panel(memory.pictures(run)["memory-2_7B-fp32-naive"])
    assert max(point["y"] for point in points) == 9
    assert (peak["x"], peak["y"]) == (pytest.approx(123.4), 9)
    assert len(points) <= memory.DRAWN + 1


def test_bars_and_fields_are_the_rows(made_pictures):
    """Bars are as long as gains, microseconds and shares; fields have the verdicts' words."""

    def sizes(study, name, of=None, fact="value"):
        return [record[fact] for record in panel(made_pictures[study][name], of)]

    assert sizes("lm", "lm-speedups", "tf32 / fp32") == [2]
    assert sizes("lm", "lm-speedups", "triton / sdpa") == [0.5, 0.5]
    eager = "bf16, forward+backward, eager"
    assert sizes("launch", "launch-host", eager) == pytest.approx([30, 10, 20])
    assert sizes("launch", "launch-host", eager, "said") == ["30 µs", "10 µs", "20 µs"]
    assert sizes("launch", "launch-host", eager, "ours") == [True, False, False]
    assert sizes("integrations", "integrations-steps") == pytest.approx([100, 125, 200])
    assert sizes("integrations", "integrations-steps", fact="ours") == [True, True, False]
    assert sizes("compile", "compile-speedups") == [2, 0.8, 4]
    shares = panel(made_pictures["profile"]["profile-categories"])
    assert heights(shares, "share") == {
        "softmax": [20],
        "matmul": [80, 50],
        "optimizer": [40],
        "mine": [10],
    }
    assert sizes("accuracy", "accuracy-contract", fact="name") == ["yes", "yes", "yes", "NO"]


def test_pictures_tell_what_is_unsteady_and_what_is_missing(made_run):
    """An unsteady point is hollow; a pass that was not measured at a head dimension says so."""
    run = changed(made_run, flash, lambda row: row["impl"] == "sdpa", q1=1e-4, q3=1.0)
    rows = [r | {"head_dim": 64, "pass": "backward"} for r in run.study("flash")]
    made = flash.pictures(replace(run, rows=run.rows + rows))["flash-tokens-bfloat16-full"]
    assert made["facet"]["sort"] == [
        "forward, D = 64: not measured",
        "forward, D = 128",
        "backward, D = 64",
        "backward, D = 128: not measured",
    ]
    assert "Hollow" in made["title"]["subtitle"]
    measured = panel(made, "forward, D = 128")
    assert [(r["name"], r["x"]) for r in measured if r.get("hollow")] == [
        ("sdpa", 512),
        ("sdpa", 4096),
    ]
    one = replace(run, rows=[r for r in run.rows if r.get("seq_q") == 512])
    assert flash.pictures(one) == {}
