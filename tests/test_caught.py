"""A proof that has passed is left out until something changes that it depends on."""

import json

import pytest

from flashattn.testing import caught

TESTS = """
from pathlib import Path

import pytest

SAID = Path("said.txt").read_text()

@pytest.mark.mutants
@pytest.mark.parametrize("bug", [
    pytest.param(name, id=name, marks=pytest.mark.concerns("source", f"{name}.txt", of=SAID))
    for name in BUGS
])
def test_bug(bug):
    assert bug != "unseen"

@pytest.mark.mutants
def test_whole():
    pass
"""
BUGS = [f"bug{i}" for i in range(20)]


@pytest.fixture
def lay_out(pytester, monkeypatch):
    """Return a function that runs proofs of bugs in a turn (-1: none) and returns what passed."""
    for path in (*caught.JUDGES, caught.RECORD, "source/deep/a.py"):
        (pytester.path / path).parent.mkdir(parents=True, exist_ok=True)
    for path in (*caught.JUDGES, "source/deep/a.py", *(f"{bug}.txt" for bug in (*BUGS, "unseen"))):
        (pytester.path / path).write_text("")
    (pytester.path / "said.txt").write_text("one")

    def run(*options, turn=-1, which="mutants and not caught", bugs=BUGS):
        caught._text.cache_clear()
        monkeypatch.setattr(caught, "_turn", lambda _: turn)
        pytester.makepyfile(test_it=f"BUGS = {bugs}\n{TESTS}")
        found = pytester.inline_run("-p", "flashattn.testing.caught", "-m", which, *options)
        return {report.nodeid.split("::")[1] for report in found.listoutcomes()[0]}

    pytester.makeini("[pytest]\nmarkers = mutants")
    return run


def tests_of(bugs):
    """Return the tests that pass if these bugs are run."""
    return {"test_whole", *(f"test_bug[{bug}]" for bug in bugs)}


def test_what_was_caught_is_left_out(lay_out, pytester):
    """A caught bug is left out until its files, its text, its tests or a judge change."""
    assert lay_out() == tests_of(BUGS)
    assert lay_out(turn=-1) == tests_of(BUGS), "nothing is recorded unless asked for"
    assert lay_out("--record-caught") == tests_of(BUGS)
    assert lay_out() == tests_of([])
    assert lay_out(which="mutants") == tests_of(BUGS)
    (pytester.path / "bug3.txt").write_text("changed")
    assert lay_out() == tests_of(["bug3"])
    assert lay_out("--record-caught") == tests_of(["bug3"])
    assert lay_out() == tests_of([])
    for path in ("source/deep/a.py", "source/new.py", *caught.JUDGES):
        (pytester.path / path).write_text("changed = True\n")
        assert lay_out("--record-caught") == tests_of(BUGS), path
    (pytester.path / "said.txt").write_text("another")
    assert lay_out("--record-caught") == tests_of(BUGS), "text that they name has changed"
    assert lay_out() == tests_of([])
    assert lay_out(bugs=BUGS[1:]) == tests_of(BUGS[1:]), "their own file has changed"


def test_each_has_its_turn(lay_out):
    """Each commit proves about one bug in eight again; eight turns prove all."""
    lay_out("--record-caught")
    turns = [lay_out(turn=turn) for turn in range(caught.TURNS)]
    assert set.union(*turns) == tests_of(BUGS)
    assert sum(map(len, turns)) == len(BUGS) + caught.TURNS  # ``test_whole`` always runs


def test_what_fails_is_not_recorded(lay_out, pytester):
    """A failure is not recorded, and does not erase what was recorded before."""
    lay_out("--record-caught")
    assert lay_out("--record-caught", bugs=[*BUGS[:2], "unseen"]) == tests_of(BUGS[:2])
    known = json.loads((pytester.path / caught.RECORD).read_text())
    assert len(known) == len(BUGS)
    assert not any("unseen" in name for name in known)
    lay_out("--record-caught", which="mutants", bugs=BUGS[:2])
    known = json.loads((pytester.path / caught.RECORD).read_text())
    assert len(known) == 2, "what is gone is forgotten when all are run"


def test_turns_without_git(tmp_path):
    """Without git the turn is 0."""
    assert caught._turn(tmp_path) == 0
