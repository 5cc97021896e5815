"""Tables as Markdown and for a terminal, each with the circumstances of its numbers."""

from dataclasses import replace
from itertools import pairwise

from flashattn.report.origin import circumstances, footnotes, reasons, roofs
from flashattn.report.runs import Run, merge
from flashattn.report.studies import STUDIES
from flashattn.report.study import Table
from flashattn.report.table import document, markdown, tables


def test_columns_line_up():
    """Columns are as wide as their cells, and no cell breaks the table."""
    lines = [["f<a|b>*", "1"], ["b", "12345"]]
    assert markdown(Table(caption="", header=["a", "long"], lines=lines)).splitlines() == [
        "| a          |  long |",
        "| ---------- | ----: |",
        r"| f\<a\|b>\* |     1 |",
        "| b          | 12345 |",
    ]


def test_a_terminal_s_width_is_kept(made_run, monkeypatch):
    """In a narrow terminal cells are folded; in a wide one no line is broken."""
    launch = replace(made_run, rows=made_run.study("launch"))
    for columns, wide in (("30", False), ("500", True)):
        monkeypatch.setenv("COLUMNS", columns)
        lines = [line for line in tables(launch).splitlines() if line.startswith(" ")]
        assert any("triton   forward+backward" in line for line in lines) == wide
        assert all(len(line) <= 30 for line in lines) != wide


def test_circumstances_and_roofs_are_named(made_run):
    """One line names the GPU, its power and clocks, the code and the date."""
    assert circumstances(made_run) == (
        "NVIDIA H200, 700 W, 1980 → 1755 MHz, driver 580.1, torch 2.11, "
        "commit 0123456789 with changes, code fedcba9876, 2026-11-21"
    )
    assert "changes" not in circumstances(replace(made_run, commit={"id": "01", "dirty": False}))
    assert circumstances(Run(machine={}, commit={"id": "unknown"})) == "unknown machine"
    wanted = "bf16 800, tf32 400, fp32 50 TFLOP/s, copy 4.2 TB/s (read + write)"
    assert roofs(made_run) == f"Roofs, measured in this run: {wanted}."
    assert roofs(replace(made_run, roofs={})) == ""


def test_footnotes_name_command_clock_and_brakes(made_run):
    """Below a table each of its runs has its command, its clock, and what throttled it."""
    cold = {"study": "x", "status": "ok", "clock": "device time, cold L2", "sm_hertz": 1.7e9}
    rows = [cold | {"name": "0", "throttled": ["power cap"]}, cold | {"name": "1", "late": 3}]
    table = Table(caption="", header=[], lines=[], rows=rows)
    (line,) = footnotes(made_run, table)
    assert line == (
        f"{circumstances(made_run)}. pytest benchmarks --sweep full, {made_run.name}. "
        "device time, cold L2; at 1700 MHz; 1 of 2 rows held back by power cap; "
        "1 of 2 rows with samples that began before all was queued"
    )
    run = merge(replace(made_run, command=f"part {i}", rows=[row]) for i, row in enumerate(rows))
    lines = footnotes(run, replace(table, rows=run.rows))
    assert [f"part {i}" in line for i, line in enumerate(lines)] == [True, True]


def test_reasons_are_listed_once():
    """A reason is listed once, with its mark and its number of cases; a check's is shortened.

    It keeps the error and the budget, and drops the exception and naive's error.
    """
    gone = {"status": "unsupported", "reason": "flex is not here"}
    full = {"status": "oom", "reason": "naive ran out of memory"}
    said = "bench_forward[x]: _pytest.outcomes.XFailed: sdpa: o: max error 2e-07, budget 1e-07 "
    wrong = {"status": "failed", "reason": f"{said}(naive=Error(max=5e-08, mean=1e-08, bias=0.0))"}
    assert reasons([gone, gone, full, {"status": "ok"}, {"status": "failed"}, wrong]) == [
        "flex is not here (- in 2 cases)",
        "naive ran out of memory (OOM in 1 case)",
        "no reason was given (FAILED in 1 case)",
        "bench_forward[x]: sdpa: o: max error 2e-07, budget 1e-07 (FAILED in 1 case)",
    ]


def test_terminal_shows_every_study(made_run):
    """A terminal shows tables and findings of each study, and the circumstances once."""
    text = tables(made_run)
    assert text.count(circumstances(made_run)) == 1
    for study in STUDIES:
        assert all(f"{study.TITLE}: {table.caption}" in text for table in study.tables(made_run))
        assert study.findings(made_run)[0] in text.replace("\\", "")
    assert "* naive gave a reason (OOM in" in text


def test_page_names_the_origin_under_every_table(made_run):
    """In Markdown every table is followed by machine, versions, command and date."""
    text = document(made_run, {"lm": ["a.png"]})
    assert "![The model, end to end](a.png)" in text
    blocks = text.split("\n\n")
    ends = [block for before, block in pairwise(blocks) if before.startswith("| ")]
    assert len(ends) == sum(len(study.tables(made_run)) for study in STUDIES)
    wanted = ("NVIDIA H200", "torch 2.11", "--sweep full", "2026-11-21")
    assert all(fact in block for block in ends for fact in wanted)


def test_marks_are_explained_beside_their_table(made_run):
    """The meaning of a mark in a cell is given in the terminal and in Markdown."""
    run = replace(made_run, rows=[r | {"q1": 0.0, "q3": 9.0} for r in made_run.study("flash")])
    for text in (tables(run), document(run, {})):
        assert "~ the quartiles are further apart than 25% of the median" in text


def test_nothing_measured_is_no_table(made_run):
    """A run in which nothing could be timed shows its reasons, and no table."""
    bare = {"study": "flash", "name": "a", "status": "unsupported", "reason": "flex is not here"}
    text = tables(replace(made_run, rows=[bare]))
    assert "FlashAttention:" not in text
    assert text.endswith("Not timed:\n\n* flex is not here (- in 1 case)")
