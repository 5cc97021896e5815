"""Runs on disk: written row by row, read back whole or to where they were cut off, and merged."""

import json

import pytest

from flashattn.report.runs import Journal, Run, kept, load, merge

HEADER = {
    "machine_info": {"accelerator": "nvidia-h200"},
    "commit_info": {"id": "abc", "dirty": False},
    "roofs": {"bfloat16": 8e14},
    "clocks": {"before": 1.9e9},
    "command": "pytest benchmarks",
    "sources": "d1g3st",
}


def row(name, status="ok", **facts):
    """Return the facts of a case that matter here."""
    return {"study": "flash", "name": name, "status": status, **facts}


def test_journal_replaces_the_last_one(tmp_path):
    """A new run does not continue an older run's journal unless it is told to."""
    path = tmp_path / "nvidia-h200" / "partial.jsonl"
    resumed = Journal.resume(path)  # which is not there
    assert (resumed.header, resumed.rows, path.exists()) == (None, [], False)
    for name in ("old", "new"):
        Journal(path).add(row(name), [], header=HEADER)
    assert load(path).rows == [row("new") | {"samples": []}]


def test_journal_goes_on_wherever_it_was_cut_off(tmp_path):
    """A journal that is cut off at any byte keeps its whole rows, and continues after them."""
    path = tmp_path / "partial.jsonl"
    whole = Journal(path)
    for name in ("a", "b", "c"):
        whole.add(row(name), [0.5], header=HEADER)
    text, seen = path.read_text(), set()
    for end in range(len(text) + 1):
        path.write_text(text[:end])
        journal = Journal.resume(path)
        names = [r["name"] for r in journal.rows]
        # A line counts from its closing brace on, with or without its newline.
        assert len(names) == max(0, (text[:end] + "\n").count("}\n") - 1)
        assert journal.header == (HEADER if end >= text.index("\n") else None)
        journal.add(row("next"), [], header=HEADER)
        assert [r["name"] for r in load(path).rows] == [*names, "next"]
        seen.add(len(names))
    assert seen == {0, 1, 2, 3}


def test_the_newest_row_of_a_case_counts(tmp_path):
    """A case that failed and was measured again is measured, in the journal and when read."""
    path = tmp_path / "partial.jsonl"
    failed, other = row("a") | {"status": "failed"}, row("b")
    Journal(path).add(failed, [], header=HEADER)
    journal = Journal.resume(path)
    journal.add(other, [0.5], header=HEADER)
    journal.add(row("a"), [0.25], header=HEADER)
    assert journal.rows == [row("a"), other]
    assert [(r["name"], r["status"]) for r in load(path).rows] == [("a", "ok"), ("b", "ok")]
    assert Journal.resume(path).rows == [{"samples": [0.25]} | row("a"), {"samples": [0.5]} | other]


def test_journal_broken_in_the_middle_is_refused(tmp_path):
    """Only the last line may be cut off: a hole before it is an error that names the file."""
    path = tmp_path / "partial.jsonl"
    path.write_text(json.dumps(HEADER) + '\n{"study\n' + json.dumps(row("a")) + "\n")
    with pytest.raises(ValueError, match=r"partial\.jsonl: wanted"):
        Journal.resume(path)


def test_journal_and_kept_run_read_alike(tmp_path, keep):
    """A journal and pytest-benchmark's JSON give the same rows, measured rows first."""
    journal = Journal(tmp_path / "partial.jsonl")
    journal.add(row("one"), [1e-3], header=HEADER)
    journal.add(row("two", "unsupported"), [], header=HEADER)
    path = keep(tmp_path / "0001_abc.json", row("one"), row("two", "unsupported"), **HEADER)
    made, saved = load(journal.path), load(path)
    assert saved.rows == [row("one"), row("two", "unsupported")]
    assert [{**r, "samples": 0} for r in saved.rows] == [{**r, "samples": 0} for r in made.rows]
    for run in (made, saved):
        facts = (run.machine, run.commit, run.roofs, run.clocks, run.command, run.sources)
        assert facts == tuple(HEADER.values())
    assert (saved.made, saved.name) == ("2026-01-01", f"{tmp_path.name}/0001_abc.json")


def test_statistics_come_from_stats(tmp_path, keep):
    """A kept row has pytest-benchmark's statistics, without samples; its own facts win."""
    stats = {"median": 2.0, "mean": 2.5, "stddev": 0.5, "rounds": 9, "q1": 1.0, "q3": 3.0}
    stats |= {"iqr": 2.0}
    cases = [{"extra_info": row("a", rounds=7), "stats": stats}, {"extra_info": {}}]
    run = load(keep(tmp_path / "0001_x.json", benchmarks=cases))
    wanted = {"seconds": 2.0, "mean": 2.5, "std": 0.5, "rounds": 7, "q1": 1.0, "q3": 3.0}
    assert run.rows == [row("a") | wanted | {"stats": stats}]


@pytest.mark.parametrize(
    ("samples", "wanted"), [([1.0, 2.0, 3.0, 4.0, 5.0], (2, 4)), ([1.0], (None, None))]
)
def test_quartiles_of_a_journal_come_from_its_samples(tmp_path, samples, wanted):
    """A row of an unfinished run has its quartiles too; one sample has none."""
    journal = Journal(tmp_path / "partial.jsonl")
    journal.add(row("a"), samples, header=HEADER)
    (read,) = load(journal.path).rows
    assert (read.get("q1"), read.get("q3")) == wanted


@pytest.mark.parametrize("text", ["", "{", "[]", '{"benchmarks": []}', '{"machine_info": {}}'])
@pytest.mark.parametrize("name", ["run.json", "run.jsonl"])
def test_anything_else_is_refused_by_name(tmp_path, name, text):
    """A file that is not a run is refused by name."""
    path = tmp_path / name
    path.write_text(text)
    if (name, text) == ("run.jsonl", '{"machine_info": {}}'):
        assert load(path).rows == []  # a journal whose first row was never made
        return
    with pytest.raises(ValueError, match=name):
        load(path)


@pytest.mark.parametrize("fact", ["study", "name", "status"])
def test_row_without_its_name_is_refused(tmp_path, keep, fact):
    """A row without its study, name or status is an error: it would be lost."""
    bare = {name: value for name, value in row("a").items() if name != fact}
    path = keep(tmp_path / "0001_x.json", benchmarks=[{"extra_info": bare}])
    with pytest.raises(ValueError, match=fact):
        load(path)


def test_kept_runs_are_of_the_accelerator_measured_last(tmp_path, keep):
    """All runs of one accelerator are found, oldest first, whatever their numbers."""
    keep(tmp_path / "a" / "0007_x.json", made="2026-01-02", machine="a")
    keep(tmp_path / "a" / "0008_x.json", made="2026-01-01", machine="a")
    keep(tmp_path / "b" / "0001_x.json", made="2026-01-03", machine="b")
    (tmp_path / "a" / "unfinished-2.jsonl").write_text("{}")
    assert [run.name for run in kept(tmp_path)] == ["b/0001_x.json"]
    assert [run.name for run in kept(tmp_path, "a")] == ["a/0008_x.json", "a/0007_x.json"]
    with pytest.raises(ValueError, match="accelerator: wanted one of a, b, got c"):
        kept(tmp_path, "c")
    with pytest.raises(ValueError, match="pytest benchmarks"):
        kept(tmp_path / "nowhere")


def test_a_run_that_broke_off_is_kept_by_its_name(tmp_path, keep):
    """A journal that was renamed to a number is a kept run, dated by its header."""
    keep(tmp_path / "nvidia-h200" / "0001_x.json", made="2026-01-02")
    journal = Journal(tmp_path / "nvidia-h200" / "unfinished-1.jsonl")
    journal.add(row("one"), [1e-3], header=HEADER | {"datetime": "2026-01-03"})
    assert len(kept(tmp_path)) == 1
    journal.path.rename(journal.path.with_name("0002_full.jsonl"))
    assert [(run.name, len(run.rows)) for run in kept(tmp_path)] == [
        ("nvidia-h200/0001_x.json", 0),
        ("nvidia-h200/0002_full.jsonl", 1),
    ]


def run(made, *rows, machine="a", **facts):
    """Return a run of these rows."""
    return Run(machine={"accelerator": machine}, made=made, rows=list(rows), **facts)


def test_newest_measured_row_wins():
    """The newest time of a case wins, even over a newer failure; without a time the newest row.

    One name in two studies means two cases.
    """
    old = run("1", row("a", seconds=1), row("b", seconds=1), row("c", "oom"), row("d", "oom"))
    new = run("2", row("a", seconds=2), row("b", "failed"), row("c", seconds=2), row("d", "failed"))
    assert len(merge([run("1", row("a"), row("a") | {"study": "lm"})]).rows) == 2
    for order in ([old, new], [new, old]):
        merged = {r["name"]: (r["status"], r.get("seconds")) for r in merge(order).rows}
        assert merged == {"a": ("ok", 2), "b": ("ok", 1), "c": ("ok", 2), "d": ("failed", None)}


def test_merged_rows_know_their_run():
    """Each merged row knows its run and that run's roofs; the machine is the newest run's."""
    old = run("1", row("a"), roofs={"bfloat16": 7.0}, command="part 1")
    new = run("2", row("b"), command="part 2")
    merged = merge([merge([old, new]), run("3", row("c"), command="part 3")])
    assert [merged.origin(r).command for r in merged.rows] == ["part 1", "part 2", "part 3"]
    assert (merged.made, merged.roofs) == ("3", {"bfloat16": 7.0})
    newer = merge([old, run("3", row("b"), roofs={"bfloat16": 8.0})])
    assert newer.roofs == {"bfloat16": 8.0}
    assert [newer.roof(r, "bfloat16") for r in newer.rows] == [7.0, 8.0]
    assert newer.roof(newer.rows[0], "tf32") is None
    assert newer.roof(newer.rows[0], None) is None


@pytest.mark.parametrize("machines", [[], ["a", "b"]])
def test_only_one_accelerator_is_merged(machines):
    """Runs of two machines are not merged."""
    with pytest.raises(ValueError, match="wanted runs of one accelerator"):
        merge([run("1", machine=machine) for machine in machines])
