"""How continuous integration treats the exit status of the gate."""

import os
import re
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / ".ci"
GATE = ("bash", ".ci/gate", "--gate-rounds=40")


@pytest.fixture
def checkout(tmp_path):
    """Return a folder with the script and a pytest that prints its arguments and exits."""
    folder, programs = tmp_path / "checkout", tmp_path / "programs"
    (folder / ".ci").mkdir(parents=True)
    programs.mkdir()
    (folder / ".ci" / "gate").write_text((SCRIPTS / "gate").read_text())
    (programs / "pytest").write_text('#!/bin/sh\necho "pytest $*"\nexit "$STATUS"\n')
    (programs / "pytest").chmod(0o755)
    return folder


def run(folder, status=0, **settings):
    """Return the exit status and the output of the script."""
    path = f"{folder.parent / 'programs'}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "STATUS": str(status)} | settings
    done = subprocess.run(
        GATE, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout


def test_a_record_is_of_one_commit(tmp_path):
    """A record of another commit is not continued: that would time the older code."""
    (tmp_path / "python").write_text("#!/bin/sh\necho 1\n")  # GPUs
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "commit").write_text("another")
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SCRATCH": str(tmp_path),
        "LIMIT": "0",
    }
    done = subprocess.run(
        ["bash", SCRIPTS / "record"],  # noqa: S607
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "has a record of another; wanted another SCRATCH" in done.stderr


def commit(folder):
    """Make an empty commit."""
    who = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
    for words in (["init", "--quiet"], ["commit", "--quiet", "--allow-empty", "--message=nothing"]):
        subprocess.run(["git", "-C", str(folder), *who, *words], check=True)  # noqa: S607


@pytest.mark.parametrize(
    ("status", "ends", "github", "said"),
    [
        (0, 0, "", None),
        (1, 1, "", None),  # SLOWER
        (2, 2, "", None),  # interrupted
        (4, 4, "", None),  # a wrong option
        (10, 0, "", "\nThe gate leaves something open.* neither surely slower"),
        (11, 0, "true", "\n::warning::The gate leaves something open.* too noisy"),
        (12, 12, "", None),  # blind
    ],
)
def test_what_is_open_is_told_and_fails_nobody(checkout, status, ends, github, said):
    """AMBIGUOUS and UNPROVEN pass with a message; SLOWER, a blind gate and errors fail.

    On GitHub the message is an annotation of the run.
    """
    ended, output = run(checkout, status, GITHUB_ACTIONS=github)
    assert ended == ends
    assert ("leaves something open" in output) == (said is not None)
    assert said is None or re.search(said, output)


def test_the_parent_is_what_a_commit_is_held_against(checkout):
    """If there is a parent commit, the gate compares with it and runs its self-test."""
    commit(checkout)
    commit(checkout)
    assert run(checkout)[1] == (
        "pytest benchmarks --gate-against=HEAD^ --gate-selftest --gate-rounds=40\n"
    )


@pytest.mark.parametrize("tree", ["exported", "inside-another", "shallow"])
def test_without_a_parent_the_gate_tests_itself(checkout, tree):
    """Without a parent in this repository, a message says that only the self-test runs."""
    if tree == "inside-another":
        commit(checkout.parent)
        commit(checkout.parent)
    if tree == "shallow":
        commit(checkout)
    ended, output = run(checkout)
    assert ended == 0
    first, second = output.splitlines()
    assert first.startswith("No parent commit here")
    assert second == "pytest benchmarks --gate-selftest --gate-rounds=40"
