"""Tables of README and docs: made from rows, fresh, and the only place for measured numbers."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

import flashattn
from flashattn.report.__main__ import main
from flashattn.report.docs import TABLE, pages, render, update
from flashattn.report.excerpts import EXCERPTS
from flashattn.report.rows import ANY_ORDER
from flashattn.report.runs import kept, merge

ROOT = Path(flashattn.__file__).parents[1]
H200 = "nvidia-h200"
CODE = re.compile(r"```.*?```", re.DOTALL)
MEASURED = re.compile(
    r"\d[\d.]*\s?(?:TFLOP/s|TB/s|GB/s|µs|ms|[KMGT]iB|\u00d7|%|times as fast)(?!\w)"
)
TABLES = "speed gaps ratios accuracy host long train sdpa-device sdpa-host steps masks"
LOG = "tuning-log.md"  # what was tried, with its figures and its date


def test_tables_are_fresh():
    """``python -m flashattn.report docs`` would change nothing."""
    assert update(ROOT, merge(kept(ROOT / ".benchmarks", H200)), check=True) == []


def test_record_is_of_one_clean_commit():
    """All kept runs are of one clean commit, so that numbers side by side are of the same code."""
    runs = kept(ROOT / ".benchmarks", H200)
    assert len({(run.commit["id"], run.sources) for run in runs}) == 1
    assert not any(run.commit["dirty"] for run in runs)


@pytest.mark.parametrize("path", pages(ROOT), ids=lambda path: path.name)
def test_text_holds_no_measured_number(path):
    """Measured numbers stand only in tables made from rows, and in the log."""
    if path.name == LOG:
        return
    text = CODE.sub("", TABLE.sub("", path.read_text(encoding="utf-8")))
    assert MEASURED.findall(text) == []


def test_every_table_is_quoted():
    """Every table is used by a page."""
    text = "".join(path.read_text(encoding="utf-8") for path in pages(ROOT))
    assert {found[1] for found in TABLE.findall(text)} == {*EXCERPTS}


@pytest.fixture(scope="module")
def run(made_run):
    """The made-up run with a problem in which our forward pass is slower than cuDNN's."""
    problem = {"seq_q": 16384, "flops": 4e12, "problem": "p", "dtype": "bfloat16", "status": "ok"}
    problem |= {"study": "flash", "protocol": "tokens", "head_dim": 64, "causal": False}
    times = {"hopper": 0.01, "triton": 0.02, "sdpa_cudnn": 0.008, "flash_attn_4": 0.016}
    rows = [problem | {"impl": x, "pass": "forward", "seconds": s} for x, s in times.items()]
    rows.append(problem | {"impl": ANY_ORDER, "pass": "backward", "seconds": 0.005})
    rows = [row | {"name": row["impl"]} for row in rows]
    return replace(made_run, rows=[row | {"run": made_run} for row in [*made_run.rows, *rows]])


@pytest.mark.parametrize("name", TABLES.split())
def test_numbers(run, expected, name):
    """The numbers of each table are those of the made-up run."""
    table = EXCERPTS[name].table(run)
    assert ["|".join(line) for line in (table.header, *table.lines)] == expected[f"table: {name}"]


def test_a_stale_table_is_seen(tmp_path, capsys, made_run, monkeypatch):
    """``--check`` reports a stale table, and without ``--check`` the table is updated."""
    monkeypatch.setattr("flashattn.report.__main__.kept", lambda *_: [made_run])
    page = tmp_path / "README.md"
    page.write_text("Text 1.\n\n<!-- table: masks -->\n\n| old |\n<!-- end -->\n\nText 2.\n")
    with pytest.raises(SystemExit):
        main(["docs", "--root", str(tmp_path), "--check"])
    assert f"stale: {page}" in capsys.readouterr().err
    assert "| old |" in page.read_text()
    main(["docs", "--root", str(tmp_path)])
    text = page.read_text()
    assert "| p10 " in text
    assert " NVIDIA H200, torch 2.11, 2026-11-21.* <!-- end -->\n\nText 2.\n" in text
    main(["docs", "--root", str(tmp_path), "--check"])
    assert "Changed: nothing" in capsys.readouterr().out


def test_tables_that_cannot_be_made(made_run):
    """A table that was not measured says what measures it; an unknown table is an error."""
    text = "<!-- table: {} -->\n<!-- end -->\n"
    empty = render(text.format("parallel"), replace(made_run, rows=[]))
    assert "`pytest benchmarks/bench_parallel.py` measures it" in empty
    with pytest.raises(ValueError, match=r"table: wanted one of speed, .*, got x"):
        render(text.format("x"), made_run)


def test_a_share_above_100_percent_says_why(run):
    """A share of a roof above 100% is marked, and the page says what the mark means."""
    fast = {"seq_q": 4096, "head_dim": 64, "problem": "fast", "impl": "hopper", "flops": 1e15}
    fast |= {"study": "flash", "protocol": "tokens", "dtype": "bfloat16", "pass": "forward"}
    fast |= {"causal": False, "bytes": 1e9, "seconds": 0.1, "status": "ok", "name": "fast"}
    page = "<!-- table: roofline -->\n<!-- end -->\n"
    for roof, said in ((1.2e16, False), (0.8e16, True)):
        measured = replace(run.rows[0]["run"], roofs={"bfloat16": roof})
        made = render(page, replace(run, rows=[fast | {"run": measured}]))
        assert ("%\\*" in made) == ("more than the roof" in made) == said, made


def test_late_and_unsteady_times_are_marked(run):
    """A table says if all of its samples were late; a time with far quartiles has a mark."""
    row = {"study": "lm", "step": "train", "precision": "bf16", "checkpoint": True, "name": "late"}
    row |= {"size": "large", "context": 8192, "packed": False, "impl": "hopper", "status": "ok"}
    row |= {"seconds": 1.0, "rounds": 5, "late": 5, "q1": 0.9, "q3": 1.1, "flops": 1e12}
    page = "<!-- table: long -->\n<!-- end -->\n"
    for change, late, unsteady in (({}, True, False), ({"late": 4, "q3": 2.0}, False, True)):
        rows = [row | change | {"run": run.rows[0]["run"]}]
        made = render(page, replace(run, rows=rows))
        assert ("before the host had queued the step" in made) == late, made
        assert ("1000 ~" in made) == ("quartiles are further apart" in made) == unsteady, made
