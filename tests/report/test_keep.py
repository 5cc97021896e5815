"""``keep``: runs without samples, of one clean commit, in place of those of other commits."""

import pytest

from flashattn.report.__main__ import main
from flashattn.report.runs import Journal, load

COMMIT, OTHER = "c0ffee" * 6 + "c0ff", "5eed" * 10
MACHINE = {"accelerator": "nvidia-h200"}
STATS = {"median": 2.0, "mean": 2.5, "stddev": 0.5, "rounds": 9, "q1": 1.0, "q3": 3.0}
FACTS = {"study": "x", "status": "ok", "reason": None}


def header(commit=COMMIT, *, dirty=False):
    """Return the header of a journal."""
    return {"machine_info": MACHINE, "commit_info": {"id": commit, "dirty": dirty}, "roofs": {}}


@pytest.fixture
def unfinished(tmp_path):
    """Return a function that writes an unfinished run of one row, timed three times."""

    def write(name, case="a", **facts):
        journal = Journal(tmp_path / "nvidia-h200" / f"{name}.jsonl")
        row = FACTS | {"name": case, "seconds": 2.0}
        journal.add(row, [1.0, 2.0, 3.0], header=header(**facts))
        return journal.path

    return write


def test_what_was_timed_is_kept_without_samples(tmp_path, keep, unfinished, capsys):
    """Kept rows lose only their samples; older runs of the commit keep their names."""
    folder = tmp_path / "nvidia-h200"
    commit = {"commit_info": {"id": COMMIT, "dirty": False}}
    cases = [{"extra_info": FACTS | {"name": "b"}, "stats": STATS | {"data": [1.0, 2.0, 3.0]}}]
    saved = keep(folder / "0003_c0ffeec0ff-part1of2.json", benchmarks=cases, **commit)
    paths = [saved, unfinished("unfinished-part2of2-20260102T030405-67"), unfinished("loose")]
    unfinished("0002_c0ffeec-old", case="old")
    gone = unfinished("0001_5eed5ee", commit=OTHER)
    # A finished run of another commit stays: it has samples, and may be committed nowhere.
    other = keep(folder / "0001_5eed5eed5e.json", **commit | {"commit_info": {"id": OTHER}})
    before = {path: load(path) for path in paths}
    main(["keep", *map(str, paths)])
    names = ["0003_c0ffeec-part1of2", "0004_c0ffeec-part2of2", "0005_c0ffeec"]
    kept = [folder / f"{name}.jsonl" for name in names]
    assert capsys.readouterr().out.splitlines() == [
        *(f"Kept: {path}" for path in kept),
        f"Removed, of another commit: {gone}",
    ]
    assert sorted(folder.iterdir()) == [other, folder / "0002_c0ffeec-old.jsonl", *kept]
    for path, run in zip(kept, before.values(), strict=True):
        again = load(path)
        assert (again.machine, again.commit, again.roofs) == (run.machine, run.commit, run.roofs)
        (row,) = again.rows
        assert row == {x: run.rows[0][x] for x in run.rows[0] if x not in ("stats", "samples")}
        assert {"seconds", "q1", "q3"} <= row.keys()
        assert "[1.0, 2.0, 3.0]" not in path.read_text()


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ([{}, {"commit": OTHER}], f"wanted those of one clean commit, got {OTHER}, {COMMIT}"),
        ([{}, {"dirty": True}], f"got {COMMIT} with changes"),
        ([{"commit": "unknown"}], "got unknown"),
    ],
)
def test_others_are_refused(unfinished, capsys, facts, said):
    """Runs of two commits, of changed code or of no commit are refused, and no file changes."""
    paths = [unfinished(f"unfinished-{i}", **of) for i, of in enumerate(facts)]
    before = {path: path.read_text() for path in paths}
    with pytest.raises(SystemExit):
        main(["keep", *map(str, paths)])
    assert said in capsys.readouterr().err
    assert {path: path.read_text() for path in paths[0].parent.iterdir()} == before


def test_a_run_that_is_named_twice_is_kept_once(unfinished, capsys):
    """Naming a file twice, also by another path, loses nothing; other files are ignored."""
    path = unfinished("unfinished-1")
    (path.parent / "2026-notes_x.json").write_text("")
    main(["keep", str(path.parent / ".." / path.parent.name / path.name), str(path), str(path)])
    (kept,) = path.parent.glob("*.jsonl")
    assert capsys.readouterr().out == f"Kept: {kept}\n"
    assert len(load(kept).rows) == 1


def test_one_folder_at_a_time(tmp_path, unfinished, capsys):
    """Runs from two folders, as of two machines, are refused."""
    one = unfinished("unfinished-1")
    other = tmp_path / "other" / "unfinished-1.jsonl"
    other.parent.mkdir()
    other.write_text(one.read_text())
    with pytest.raises(SystemExit):
        main(["keep", str(one), str(other)])
    assert "wanted one folder" in capsys.readouterr().err
