"""Runs on disk: written row by row, read back whole."""

from __future__ import annotations

import json

import pytest

from flashattn.report.runs import Journal, latest, load

HEADER = {
    "machine_info": {"accelerator": "nvidia-h200"},
    "commit_info": {"id": "abc", "dirty": False},
    "roofs": {"bfloat16": 8e14},
    "clocks": {"before": 1.9e9},
}


def row(impl, status="ok"):
    """Return the facts of a case that matter here."""
    return {"impl": impl, "status": status}


def test_row_is_on_disk_as_soon_as_it_is_made(tmp_path):
    """What was measured before a crash can be read after it, with its raw samples."""
    journal = Journal(tmp_path / "nvidia-h200" / "partial.jsonl")
    for count, impl in enumerate(("triton", "sdpa"), start=1):
        journal.add(row(impl), [1e-3, 2e-3], header=HEADER)
        lines = journal.path.read_text().splitlines()
        assert len(lines) == 1 + count
        assert json.loads(lines[-1]) == row(impl) | {"samples": [1e-3, 2e-3]}


def test_journal_replaces_the_last_one(tmp_path):
    """A new run does not continue an older run's journal."""
    for impl in ("old", "new"):
        Journal(tmp_path / "partial.jsonl").add(row(impl), [], header=HEADER)
    assert [r["impl"] for r in load(tmp_path / "partial.jsonl").rows] == ["new"]


def test_journal_and_kept_run_read_alike(tmp_path):
    """The same rows come out of a journal and of pytest-benchmark's JSON, measured ones first."""
    journal = Journal(tmp_path / "partial.jsonl")
    journal.add(row("triton"), [1e-3], header=HEADER)
    journal.add(row("flex", "unsupported"), [], header=HEADER)
    kept = tmp_path / "0001_abc.json"
    cases = [{"extra_info": row("triton")}, {"extra_info": {}}]  # the second is no row of ours
    kept.write_text(
        json.dumps(HEADER | {"benchmarks": cases, "unmeasured": [row("flex", "unsupported")]})
    )
    made, saved = load(journal.path), load(kept)
    assert saved.rows == [row("triton"), row("flex", "unsupported")]
    assert [{**r, "samples": None} for r in saved.rows] == [
        {**r, "samples": None} for r in made.rows
    ]
    assert (made.machine, made.commit, made.roofs, made.clocks) == tuple(HEADER.values())
    assert (saved.machine, saved.commit, saved.roofs, saved.clocks) == tuple(HEADER.values())


@pytest.mark.parametrize("text", ["", "{", "[]", '{"benchmarks": []}', '{"machine_info": {}}'])
@pytest.mark.parametrize("name", ["run.json", "run.jsonl"])
def test_anything_else_is_refused_by_name(tmp_path, name, text):
    """A file that is no run is an error that names it."""
    path = tmp_path / name
    path.write_text(text)
    if (name, text) == ("run.jsonl", '{"machine_info": {}}'):
        assert load(path).rows == []  # a journal whose first row was never made
        return
    with pytest.raises(ValueError, match=name):
        load(path)


def test_latest_goes_by_the_time_it_was_made(tmp_path):
    """The last run is the one with the last date, whatever its number and its folder."""
    assert latest(tmp_path) is None
    for folder, number, date in (("a", 7, "2026-01-01"), ("b", 1, "2026-02-01")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{number:04}_x.json").write_text(json.dumps({"datetime": date}))
    (tmp_path / "a" / "partial.jsonl").write_text("{}")
    assert latest(tmp_path) == tmp_path / "b" / "0001_x.json"
