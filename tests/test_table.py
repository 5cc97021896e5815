"""Markdown: columns that line up, and every table with the circumstances of its numbers."""

from __future__ import annotations

from dataclasses import replace

from flashattn.report.origin import circumstances, origins, reasons, roofs
from flashattn.report.runs import Run, merge
from flashattn.report.studies import STUDIES
from flashattn.report.study import Table
from flashattn.report.table import document, markdown, tables

RUN = Run(
    machine={"gpu": "NVIDIA H200", "power_limit_watts": 700.0, "driver": "580.1", "torch": "2.11"},
    commit={"id": "0123456789abcdef", "dirty": True},
    roofs={"bfloat16": 8e14, "tf32": 4e14, "float32": 5e13, "copy": 4.2e12},
    clocks={"before": 1.98e9, "after": 1.755e9},
    command="pytest benchmarks --sweep full",
    sources="fedcba9876543210",
    made="2026-11-21T04:14:00+00:00",
    name="nvidia-h200/0001_x.json",
)


def test_columns_line_up():
    """The first column is to the left and the others to the right, each as wide as its cells."""
    table = Table(caption="", header=["a", "long"], lines=[["first", "1"], ["b", "12345"]], rows=[])
    assert markdown(table).splitlines() == [
        "| a     |  long |",
        "| ----- | ----: |",
        "| first |     1 |",
        "| b     | 12345 |",
    ]


def test_no_cell_breaks_its_table():
    """What Markdown would read as its own is escaped, so that a kernel's name stays one cell."""
    table = Table(caption="", header=["name"], lines=[["f<a|b>*"]], rows=[])
    assert markdown(table).splitlines()[-1] == r"| f\<a\|b>\* |"


def test_circumstances_are_named():
    """A line says on which GPU, at what power and clocks, with what code, and when."""
    assert circumstances(RUN) == (
        "NVIDIA H200, 700 W, 1980 → 1755 MHz, driver 580.1, torch 2.11, "
        "commit 0123456789 with changes, code fedcba9876, 2026-11-21"
    )
    bare = Run(machine={}, commit={"id": "unknown"})
    assert circumstances(bare) == "unknown machine"


def test_roofs_are_named():
    """The roofs stand in one sentence; without any there is none."""
    wanted = "bf16 800, tf32 400, fp32 50 TFLOP/s, copy 4.2 TB/s (read + write)"
    assert roofs(RUN) == f"Roofs, measured in this run: {wanted}."
    assert roofs(replace(RUN, roofs={})) == ""


def row(name, **facts):
    """Return a timed row."""
    return {"study": "launch", "name": name, "status": "ok", "seconds": 1e-5, **facts}


def test_origin_names_command_clock_and_brakes():
    """A table says which command made it, which seconds they are, and what held the clock back."""
    cold = {"clock": "device time, cold L2", "sm_hertz": 1.7e9}
    rows = [row("a", throttled=["power cap"], **cold), row("b", throttled=[], **cold)]
    (line,) = origins(RUN, rows)
    assert line.startswith(circumstances(RUN))
    assert "pytest benchmarks --sweep full, nvidia-h200/0001_x.json" in line
    assert line.endswith("device time, cold L2; at 1700 MHz; 1 of 2 rows held back by power cap")
    rows[1]["late"] = 3
    (line,) = origins(RUN, rows)
    assert line.endswith("; 1 of 2 rows with samples that began before all was queued")


def test_every_run_of_a_merged_table_is_named():
    """Rows of two runs are followed by a line for each."""
    parts = [replace(RUN, command=f"part {i}", rows=[row(str(i))]) for i in range(2)]
    run = merge(parts)
    assert [f"part {i}" in line for i, line in enumerate(origins(run, run.rows))] == [True, True]


def test_reasons_are_listed_once():
    """A reason stands once, with its mark and the number of cases that it holds for."""
    gone = {"status": "unsupported", "reason": "flex is not here"}
    full = {"status": "oom", "reason": "naive ran out of memory"}
    assert reasons([gone, gone, full, {"status": "ok"}, {"status": "failed"}]) == [
        "flex is not here (- in 2 cases)",
        "naive ran out of memory (OOM in 1 case)",
        "no reason was given (FAILED in 1 case)",
    ]


def test_a_failed_check_is_told_without_its_details():
    """What a check wanted and got is told; how it was raised and what naive got is not."""
    said = "bench_forward[x]: _pytest.outcomes.XFailed: sdpa: o: max error 2e-07, budget 1e-07 "
    row = {"status": "failed", "reason": f"{said}(naive=Error(max=5e-08, mean=1e-08, bias=0.0))"}
    assert reasons([row]) == [
        "bench_forward[x]: sdpa: o: max error 2e-07, budget 1e-07 (FAILED in 1 case)"
    ]


def test_terminal_shows_every_study(made_run):
    """Printed at the end of a run: a table and a finding of each study, the circumstances once."""
    text = tables(made_run)
    assert text.count(circumstances(made_run)) == 1
    for study in STUDIES:
        assert f"### {study.title}: " in text
        assert study.findings(made_run)[0][:40].replace("*", r"\*") in text
    assert "* naive ran out of memory (OOM in" in text


def test_page_names_the_origin_under_every_table(made_run):
    """In the Markdown page every table is followed by machine, versions, command and date."""
    text = document(made_run, {"lm": ["a.png"]})
    assert "![The model, end to end](a.png)" in text
    blocks = text.split("\n\n")
    ends = [i for i, block in enumerate(blocks) if block.startswith("| ")]
    assert len(ends) == sum(len(study.tables(made_run)) for study in STUDIES)
    for i in ends:
        for fact in ("NVIDIA H200", "torch 2.11", "--sweep full", "2026-11-21"):
            assert fact in blocks[i + 1]


def test_nothing_measured_is_no_table():
    """A run in which nothing could be timed is its reasons."""
    bare = {"study": "flash", "name": "a", "status": "unsupported", "reason": "flex is not here"}
    text = tables(replace(RUN, rows=[bare]))
    assert "| " not in text
    assert text.endswith("Not timed:\n\n* flex is not here (- in 1 case)")
