"""What continuous integration makes of the gate's word, and of many GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / ".ci"
GATE = ("bash", ".ci/gate", "--gate-rounds=40")


@pytest.fixture
def checkout(tmp_path):
    """Return a folder with the script, and a pytest that says how it was called and ends so."""
    folder, programs = tmp_path / "checkout", tmp_path / "programs"
    (folder / ".ci").mkdir(parents=True)
    programs.mkdir()
    for name in ("gate", "gpu"):
        (folder / ".ci" / name).write_text((SCRIPTS / name).read_text())
    (programs / "pytest").write_text('#!/bin/sh\necho "pytest $*"\nexit "$STATUS"\n')
    (programs / "pytest").chmod(0o755)
    return folder


def run(folder, status=0, command=GATE, **settings):
    """Return how a script ends, and what it says."""
    path = f"{folder.parent / 'programs'}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "STATUS": str(status)} | settings
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout


def commit(folder):
    """Commit nothing."""
    who = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
    for words in (["init", "--quiet"], ["commit", "--quiet", "--allow-empty", "--message=nothing"]):
        subprocess.run(["git", "-C", str(folder), *who, *words], check=True)  # noqa: S607


@pytest.mark.parametrize(
    ("status", "ends", "said"),
    [
        (0, 0, None),
        (1, 1, None),  # SLOWER
        (2, 2, None),  # interrupted
        (4, 4, None),  # a wrong option
        (10, 0, "neither surely slower"),
        (11, 0, "too noisy"),
        (12, 12, None),  # blind
    ],
)
def test_what_is_open_is_told_and_fails_nobody(checkout, status, ends, said):
    """AMBIGUOUS and UNPROVEN are green with a sentence; SLOWER, a blind gate and errors are red."""
    ended, output = run(checkout, status)
    assert ended == ends
    assert ("leaves something open" in output) == (said is not None)
    assert said is None or said in output


def test_github_shows_what_is_open(checkout):
    """On GitHub the sentence is an annotation of the run."""
    _, output = run(checkout, 11, GITHUB_ACTIONS="true")
    assert output.splitlines()[-1].startswith("::warning::The gate leaves something open")


def test_the_parent_is_what_a_commit_is_held_against(checkout):
    """Where there is a parent commit the gate compares with it, and tests itself."""
    commit(checkout)
    commit(checkout)
    assert run(checkout)[1] == (
        "pytest benchmarks --gate-against=HEAD^ --gate-selftest --gate-rounds=40\n"
    )


@pytest.mark.parametrize("tree", ["exported", "inside-another", "shallow"])
def test_without_a_parent_the_gate_tests_itself(checkout, tree):
    """Without a parent, or with none but another repository's, a sentence says what is left out."""
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


TESTED = """#!/bin/sh
echo "$CUDA_VISIBLE_DEVICES: $*" >> called
echo "===== 7 passed in 0.1s ====="
case "$*" in *--part=$BROKEN) echo "FAILED tests/test_x.py::test_y - z"; exit 1;; esac
"""


@pytest.fixture
def gpus(checkout):
    """Return the folder, with two GPUs and a pytest that notes how it was called."""
    programs = checkout.parent / "programs"
    for name, text in {
        "pytest": TESTED,
        "nvidia-smi": "#!/bin/sh\necho GPU 0\necho GPU 1\n",
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return checkout


def test_every_part_runs_on_one_of_the_gpus(gpus):
    """The gate's tests and the largest run first; then the others' parts, dealt to the GPUs."""
    ended, output = run(gpus, command=("bash", ".ci/gpu", "3", "logs"), CUDA_VISIBLE_DEVICES="")
    assert ended == 0
    called = (gpus / "called").read_text().splitlines()
    first = "tests/test_pair.py tests/test_kernels.py -k test_pair or more_than_2_31"
    others = "tests --ignore=tests/test_pair.py -k not more_than_2_31"
    assert sorted(called[:2]) == [f"{i % 2}: {first} --part={i}/2" for i in (2, 1)]
    assert sorted(called[2:]) == sorted(f"{i % 2}: {others} --part={i}/6" for i in range(1, 7))
    assert len(output.splitlines()) == len(list((gpus / "logs").iterdir())) == 8


def test_a_part_that_fails_is_told(gpus):
    """One failure in one part is in the output, beside all summaries, and the end is red."""
    ended, output = run(gpus, command=("bash", ".ci/gpu", "2", "logs"), BROKEN="3/4")
    assert ended == 1
    assert "logs/part-3.log:FAILED tests/test_x.py::test_y - z" in output.splitlines()
    assert output.count("7 passed") == 6


def test_a_part_that_hangs_is_aborted(gpus):
    """A part that does not end is told with the line where it was; the others run to their end."""
    hung = f'case "$*" in *--ignore*--part=2/2) exec {sys.executable} -X faulthandler -c \''
    hung += "import time\ntime.sleep(60)';; esac\n"
    programs = gpus.parent / "programs"
    (programs / "pytest").write_text(TESTED + hung)
    ended, output = run(gpus, command=("bash", ".ci/gpu", "1", "logs", "3"))
    assert ended == 1
    assert "logs/part-2.log:exit status 124" in output.splitlines()
    assert 'File "<string>", line 2 in <module>' in (gpus / "logs" / "part-2.log").read_text()
    assert output.count("7 passed") == 4


def test_parts_that_say_nothing_are_no_success(gpus):
    """Where no part ends with a summary the end is red, whatever it was that ran."""
    (gpus.parent / "programs" / "pytest").write_text("#!/bin/sh\n")
    assert run(gpus, command=("bash", ".ci/gpu", "1", "logs"))[0] == 1
