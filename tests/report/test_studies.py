"""What every study says about the made-up run and changed ones, and what holds for all studies."""

import math
import re
from dataclasses import replace

import pytest

from flashattn.report.answer import cards, explorer
from flashattn.report.rows import ANY_ORDER
from flashattn.report.runs import Run
from flashattn.report.studies import STUDIES, accuracy, flash, launch, memory
from flashattn.report.units import GIBI

EACH = pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.NAME)
BARE = {"name": "x", "reason": "no luck"}
NO_BUDGET = {"max": 0.0, "mean": 0.1, "max_budget": 0.0, "mean_budget": 0.0}
FAST = {"seconds": 0.01, "flops": 1.6e13}
OK = {"status": "ok"}
# Rows with these values get other facts; expected.txt has the lines that follow from them.
CHANGES = {
    "unsteady": ("flash", {"problem": "h16-q512", "impl": "hopper"}, {"q1": 0.001, "q3": 0.01}),
    "a peer of another run": ("flash", {"impl": "sdpa"}, {"run": Run(machine={})}),
    "tiled is no peer": ("flash", {"impl": "sdpa"}, {"impl": "tiled"}),
    "nor is ours in any order": ("flash", {"impl": "sdpa"}, {"impl": ANY_ORDER}),
    "naive is faster": ("flash", {"impl": "naive", **OK}, {"seconds": 1e-4}),
    "above the roof": ("flash", OK, FAST),
    "above the roof of fp32": ("flash", OK, FAST | {"dtype": "float32"}),
    "a step above the roof": ("lm", OK, FAST | {"precision": "bf16"}),
    "a step above the roof of fp32": ("lm", OK, FAST | {"precision": "fp32"}),
    "bytes without times": ("attention", {}, {"status": "unsupported", "seconds": None}),
    "a predicted peak": (
        "memory",
        {},
        {"status": "oom", "peak_bytes": None, "predicted_bytes": 6 * GIBI},
    ),
    "one GPU": ("parallel", {"method": "pytorch", "world": 1}, {"method": "heads", "world": 2}),
    "no budget": ("accuracy", {}, {"errors": {"normal": {"o": NO_BUDGET}}}),
}
NAMED = {study.NAME: study for study in STUDIES}
SAID = {name: (name, {}, {}) for name in NAMED} | CHANGES


def told(study, run):
    """Return all that a study says: its sentences, and its tables' captions, lines and notes."""
    said = study.findings(run)
    for table in study.tables(run):
        lines = map("|".join, (table.header, *table.lines))
        said += [table.caption, *lines, *table.notes]
    return said


def changed(made_run, study, where, **facts):
    """Return the rows of one study, with other facts where some have these values."""
    rows = [row | (facts if where.items() <= row.items() else {}) for row in made_run.study(study)]
    return replace(made_run, rows=rows)


def panel(picture, name=None):
    """Return the records of one panel of a picture, or of its only one."""
    records = picture["data"]["values"]
    names = {record["panel"] for record in records}
    assert name in names or len(names) == 1
    return [record for record in records if record["panel"] == (name or record["panel"])]


def drawn(study, run):
    """Return a line for each name in each panel of a study's pictures, with its points or bars."""
    lines = {}
    for picture, made in study.pictures(run).items():
        for record in made["data"]["values"]:
            point = [f"{record[x]:.5g}" for x in ("y", "share", "value") if x in record]
            point += [record[x] for x in ("said", "label", "clause", "impl") if record.get(x)]
            point += [x for x in ("ours", "hollow") if record.get(x)]
            case = (picture, record["panel"], record.get("name", ""))
            lines.setdefault(case, []).append(" ".join(point))
    return ["|".join((*case, *points)) for case, points in lines.items()]


@pytest.mark.parametrize("name", SAID)
def test_sentences_and_tables_follow_the_rows(name, made_run, expected):
    """Each number in a sentence, a cell or a picture is the made-up run's, in its unit."""
    study, where, facts = SAID[name]
    run = changed(made_run, study, where, **facts)
    found = [*told(NAMED[study], run), *drawn(NAMED[study], run)]
    assert len(expected[name]) > (0 if name in CHANGES else 3)
    assert [line for line in expected[name] if line not in found] == []


@EACH
def test_what_a_study_says_is_whole(study, made_run):
    """Every table has a unique caption, a cell for each column, and the rows that it is made of.

    A finding ends in a full stop and contains a number, and a picture has a title. Without roofs no
    share of a roof is given.
    """
    tables = study.tables(made_run)
    assert len({table.caption for table in tables}) == len(tables) > 0
    for table in tables:
        assert table.lines
        assert table.rows
        assert table.notes == []
        assert {len(line) for line in table.lines} == {len(table.header)}
    drawn = study.pictures(made_run)
    assert drawn
    assert all(
        name.startswith(study.NAME) and made["title"]["text"] for name, made in drawn.items()
    )
    for sentence in study.findings(made_run):
        assert re.search(r"\d.*\.$", sentence)
        assert not re.search(r"\b(None|nan)\b", sentence)
    bare = replace(made_run, roofs={})
    assert study.tables(bare)
    assert " roof" not in str(study.findings(bare))
    assert "%)" not in str([table.lines for table in flash.tables(bare)])


@EACH
def test_another_study_s_rows_say_nothing(study, made_run):
    """Without rows of its own a study gives nothing."""
    others = replace(made_run, rows=[r for r in made_run.rows if r["study"] != study.NAME])
    assert told(study, others) == []
    assert study.pictures(others) == {}


@EACH
@pytest.mark.parametrize("status", ["unsupported", "oom", "failed", "ok"])
def test_rows_that_say_only_why_are_no_harm(study, made_run, status):
    """A case that ended before it had any facts breaks neither its own study nor other cases."""
    bare = BARE | {"study": study.NAME, "status": status}
    for run in (Run(machine={}, rows=[bare]), replace(made_run, rows=[*made_run.rows, bare])):
        assert not any("None" in line for line in told(study, run))
    assert study.pictures(Run(machine={}, rows=[bare])) == {}


@EACH
def test_any_fact_may_be_missing(study, made_run):
    """A fact that is None or missing, as bytes are on a CPU, costs only what depends on it."""
    rows = made_run.study(study.NAME)
    for fact in sorted({fact for row in rows for fact in row} - {"study", "name", "status"}):
        without = [{name: row[name] for name in row if name != fact} for row in rows]
        for own in (without, [row | {fact: None} for row in rows]):
            run = replace(made_run, rows=own)
            said = [*told(study, run), *map(str, cards(run))]
            assert not any("None" in line for line in said)
            assert all(made["title"]["text"] for made in study.pictures(run).values())
            explorer(run)


def test_growth_is_fitted_to_the_long_half(made_run):
    """For one head the exponent is fitted to the longer half of the steady lengths."""
    row = next(r for r in made_run.study("flash") if (r["impl"], r["heads"]) == ("triton", 1))
    seconds = {128: 1.0, 256: 1.0, 512: 1.0, 4096: 4.0, 8192: 16.0, 16384: 64.0}
    rows = [row | {"seq_q": n, "problem": f"q{n}", "seconds": s} for n, s in seconds.items()]
    rows.append(rows[0] | {"seq_q": 32768, "problem": "q", "seconds": 9e9, "q1": 1.0, "q3": 9e9})
    found = flash.findings(replace(made_run, rows=rows))
    assert (
        "forward, one head: triton's time grows as N^2.00 (bf16 D = 128, from N = 4096)." in found
    )


def test_dtypes_are_told_apart(made_run):
    """Launch times of two dtypes are shown apart, and only gradients mention the floor."""
    run = changed(made_run, "launch", {}, dtype="float32", seconds=9e-5)
    both = replace(run, rows=[*made_run.study("launch"), *run.rows])
    assert [line[:4] for line in launch.findings(both)] == ["bf16", "bf16", "fp32", "fp32"]
    records = launch.pictures(both)["launch-host"]["data"]["values"]
    assert {record["panel"][:4] for record in records} == {"bf16", "fp32"}
    forward = changed(made_run, "launch", {}, **{"pass": "forward"})
    assert "allocates" not in " ".join(launch.findings(forward))


def test_what_a_logarithm_cannot_show_is_left_out(made_run):
    """An error that is zero or infinite has no dot; the picture is drawn without it."""
    errors = {"normal": {"o": {"max": math.inf, "mean": 0.0}, "dq": {"max": 0.5, "mean": 0.1}}}
    triton = replace(made_run, rows=made_run.study("accuracy")[:1])
    (made,) = accuracy.pictures(changed(triton, "accuracy", {}, errors=errors)).values()
    shown = [(r["output"], r["error"]) for r in panel(made) if "error" in r]
    assert shown == [("dq", 0.5), ("dq", 0.1)]


def test_a_timeline_keeps_its_peak(made_run, made_pictures):
    """A timeline of thousands of points keeps its peak, with its time, and its phases."""
    (phase, *_, peak) = panel(made_pictures["memory"]["memory-2_7B-fp32-naive"])
    assert (phase["label"], phase["x"], phase["end"]) == ("forward", 0, 100)
    assert (peak["x"], peak["y"], peak["label"]) == (pytest.approx(100), 4, "peak 4 GiB")
    moments = [[i / 1e4, 2**30 * (9 if i == 1234 else i % 7)] for i in range(5000)]
    run = changed(made_run, "memory", {}, timeline=moments)
    (_, _, *points, peak) = panel(memory.pictures(run)["memory-2_7B-fp32-naive"])
    assert max(point["y"] for point in points) == 9
    assert (peak["x"], peak["y"]) == (pytest.approx(123.4), 9)
    assert len(points) <= memory.DRAWN + 1


def test_pictures_tell_what_is_unsteady_and_what_is_missing(made_run):
    """An unsteady point is hollow; a panel without measurements says so."""
    run = changed(made_run, "flash", {"impl": "sdpa"}, q1=1e-4, q3=1.0)
    rows = [r | {"head_dim": 64, "pass": "backward"} for r in run.study("flash")]
    made = flash.pictures(replace(run, rows=run.rows + rows))["flash-tokens-bfloat16-full"]
    assert made["facet"]["sort"] == [
        "forward, D = 64: not measured",
        "forward, D = 128",
        "backward, D = 64",
        "backward, D = 128: not measured",
    ]
    assert "Hollow" in made["title"]["subtitle"]
    y = made["spec"]["layer"][0]["encoding"]["y"]
    assert (y["title"], y["scale"]) == ("TFLOP/s", {"zero": True})
    measured = panel(made, "forward, D = 128")
    assert [(r["name"], r["x"]) for r in measured if r.get("hollow")] == [
        ("sdpa", 512),
        ("sdpa", 4096),
    ]
    one = replace(run, rows=[r for r in run.rows if r.get("seq_q") == 512])
    assert flash.pictures(one) == {}


def test_clauses_that_were_not_judged_do_not_count():
    """Clauses are counted among those that were judged; one without memory was not."""
    words = ("keeps", "breaks", "refuses", "crashes", "not judged")
    clauses = {word: {"verdict": word, "said": None} for word in words}
    rows = [{"status": "ok", "impl": "one", "part": "contract", "clauses": clauses}]
    assert accuracy.kept(rows) == {"one": (1, 4)}
    assert accuracy.broken(rows) == {"one": ["breaks", "crashes"]}
