"""The table: speeds from facts, a mark and a reason for what has none."""

from __future__ import annotations

import json

import pytest

from flashattn.report import __main__ as command
from flashattn.report.runs import Run
from flashattn.report.table import tables

MACHINE = {"gpu": "NVIDIA H200", "power_limit_watts": 700.0, "driver": "580.1", "torch": "2.11"}


def row(impl, *, seconds=None, status="ok", reason=None, **facts):
    """Return a case of 4e12 flops."""
    shape = {"seq_q": 4096, "seq_kv": 4096, "head_dim": 128, "causal": False, "dtype": "bfloat16"}
    made = {"impl": impl, "problem": "bf16-q4096", "pass": "forward", "flops": 4e12, **shape}
    made |= {"status": status, "reason": reason, **facts}
    return made if seconds is None else made | {"seconds": seconds, "clock": "device time, cold L2"}


def render(*rows):
    """Return the tables of a run of these rows, as lines."""
    run = Run(
        machine=MACHINE,
        commit={"id": "0123456789abcdef", "dirty": True},
        roofs={"bfloat16": 8e14, "tf32": 4e14, "float32": 5e13, "copy": 4.2e12},
        clocks={"before": 1.98e9, "after": 1.755e9},
        rows=list(rows),
    )
    return tables(run).splitlines()


def cells(lines, problem="bf16-q4096"):
    """Return the row of a problem as its column names and cells."""
    split = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    names = next(line for line in split if line[0] == "problem")
    return dict(zip(names, next(line for line in split if line[0] == problem), strict=True))


def test_speed_share_and_ratio():
    """A cell is flops over seconds with its share of the roof; the ratio is to the fastest peer."""
    lines = render(
        row("sdpa", seconds=0.008), row("triton", seconds=0.01), row("flex", seconds=0.02)
    )
    assert cells(lines) == {
        "problem": "bf16-q4096",
        "triton": "400 (50%)",
        "flex": "200 (25%)",
        "sdpa": "500 (62%)",
        "triton / best peer": "0.80 x sdpa",
    }


def test_a_study_of_ours_is_no_peer():
    """The tiled implementation is ours too, so a faster one does not count as the best peer."""
    lines = render(row("triton", seconds=0.01), row("tiled", seconds=0.001))
    assert cells(lines)["triton / best peer"] == ""


def test_share_is_of_the_roof_of_the_dtype():
    """fp32 is compared with the fp32 roof, and the TF32 roof is named beside it."""
    lines = render(row("triton", seconds=0.1, dtype="float32"))
    assert cells(lines)["triton"] == "40 (80%)"
    assert "bf16 800, tf32 400, fp32 50 TFLOP/s, copy 4.2 TB/s" in lines[0]


def test_no_roof_no_share():
    """A dtype whose roof was not measured has a speed and no share."""
    assert cells(render(row("triton", seconds=0.01, dtype="float64")))["triton"] == "400"


def test_reasons_are_listed_once():
    """A case without a number shows a mark, and its reason stands below, once, with its count."""
    lines = render(
        row("triton", seconds=0.01),
        row("sdpa", seconds=0.01),
        row("sdpa", status="oom", reason="sdpa ran out of memory", problem="other", seq_q=1),
        row("flex", status="unsupported", reason="flex is not here"),
        row("flex", status="unsupported", reason="flex is not here", problem="other", seq_q=1),
    )
    text = "\n".join(lines)
    assert cells(lines, "other")["sdpa"] == "OOM"
    assert "flex" not in cells(lines)  # not one number: no column
    assert text.count("flex is not here (- in 2 cases)") == 1
    assert text.count("sdpa ran out of memory (OOM in 1 case)") == 1


def test_passes_are_tables_and_problems_are_sorted():
    """Forward comes before backward whatever ran first; problems are in order of size."""
    lines = render(
        row("triton", seconds=1, **{"pass": "backward"}),
        row("triton", seconds=1, problem="long", seq_q=8192),
        row("triton", seconds=1, problem="short", seq_q=512),
    )
    found = [line for line in lines if line.startswith(("###", "| long", "| short"))]
    assert [line[:7] for line in found] == ["### for", "| short", "| long ", "### bac"]


def test_circumstances_are_named():
    """The caption says on which GPU, at what power and clocks, with what code and which seconds."""
    text = "\n".join(render(row("triton", seconds=0.01)))
    for fact in (
        "NVIDIA H200, 700 W, 1980 → 1755 MHz, driver 580.1, torch 2.11",
        "commit 0123456789 with changes",
        "device time, cold L2",
    ):
        assert fact in text


def test_nothing_timed_is_no_table():
    """A run in which nothing could be timed is its reasons."""
    lines = render(row("flex", status="unsupported", reason="flex is not here"))
    assert not any("|" in line for line in lines)
    assert lines[-1] == "* flex is not here (- in 1 case)"


def test_command_prints_the_named_run(tmp_path, capsys):
    """``python -m flashattn.report RUN.json`` prints the tables of that run."""
    path = tmp_path / "0001_x.json"
    kept = {"machine_info": MACHINE, "benchmarks": [{"extra_info": row("triton", seconds=0.01)}]}
    path.write_text(json.dumps(kept))
    command.main([str(path)])
    assert "| bf16-q4096 |" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["missing.json"]])
def test_command_without_a_run_says_so(tmp_path, monkeypatch, capsys, arguments):
    """With nothing to print, the command fails with one line that says what is missing."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 2
    assert ("missing.json" if arguments else "pytest benchmarks") in capsys.readouterr().err
