"""``pytest benchmarks --gate-against`` from end to end, in a repository of its own."""

import itertools
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flashattn.gate import cases, pair, plugin, worker
from flashattn.gate.pair import Pair, WorkerError
from flashattn.measure import timing
from flashattn.report import gate

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
# On a GPU, enough heads that the device limits the time, not the host, which may be shared.
HEADS = (512, 8, 8) if torch.cuda.is_available() else (1, 1, 1)
QUICK = replace(cases.CPU[0], name="quick", shape=(*HEADS, 64, 64))
SELFTEST = 15 if torch.cuda.is_available() else 30  # rounds
# Slow on a CPU and on a GPU: it takes milliseconds of the host and kernels of the device.
SPIN = "\n    for _ in range(300):\n        q = q + 0\n"
BEGIN = "    o = torch.empty_like(q)\n"  # of tiled_forward
GROUP = "    group, terms = q"  # of the reference


@pytest.fixture
def repository(pytester, monkeypatch, laid_out):
    """Return a repository with the package, the gate, and a commit; the margin is wide."""
    laid_out("benchmarks/bench_flash.py", "benchmarks/bench_gate.py")
    pair.working_tree(ROOT, pytester.path)
    monkeypatch.setattr(plugin, "CASES", {})
    set_cases(QUICK)
    monkeypatch.setattr(plugin, "SELFTEST", {device: {"quick": 1.0} for device in ("cpu", "cuda")})
    monkeypatch.setattr(gate, "MARGIN", 0.3)
    monkeypatch.setattr(pair, "SAMPLE", 2e-3)
    git(pytester.path, "init", "--quiet")
    commit(pytester.path)
    return pytester


def git(folder, *arguments):
    """Run git as somebody."""
    who = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True)  # noqa: S607


def commit(folder):
    """Commit all files."""
    git(folder, "add", "--all", "--force")
    git(folder, "commit", "--quiet", "--message", "change")


def edit(folder, name, old, new):
    """Replace a text in a file of the package."""
    path = folder / "flashattn" / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def set_cases(*chosen):
    """Set the cases of the gate."""
    plugin.CASES.update(dict.fromkeys(("cpu", "cuda"), chosen))


def run(repository, *arguments):
    """Run the gate with few rounds."""
    return repository.runpytest_inprocess("benchmarks", "--gate-rounds=15", *arguments)


def intervals(result):
    """Return (low, high) of the quick case's change and of its null arm, in percent."""
    (quick,) = (line for line in result.outlines if line.startswith("| quick "))
    found = re.findall(r"\(([+-][\d.]+)% to ([+-][\d.]+)%\)", quick)
    return [(float(low), float(high)) for low, high in found]


def unknown(result):
    """Return whether the gate could not tell because of noise in its null arm."""
    _, (low, high) = intervals(result)
    wide = low < -100 * gate.MARGIN or high > 100 * gate.MARGIN
    said = any(re.search(r" (AMBIGUOUS|UNPROVEN)\b.* \|", line) for line in result.outlines)
    return said and wide


def undecided(result):
    """Return whether noise kept the gate from telling that unchanged code is the same.

    Noise makes an interval wider than the margin: that of the null arm, or that of the change if
    the host is calm in the first rounds, which both have, and busy in those that are added.
    """
    wide = any(high - low > 100 * gate.MARGIN for low, high in intervals(result))
    return wide and any(re.search(r" AMBIGUOUS\b.* \|", line) for line in result.outlines)


def junit(path):
    """Return the number of tests and of failures in a JUnit file, and the failure messages."""
    suite = ET.parse(path).getroot()[0]  # noqa: S314 - written a moment ago
    said = [failure.get("message") for failure in suite.iter("failure")]
    return int(suite.get("tests")), int(suite.get("failures")), said


@pytest.mark.alone
def test_unchanged_code_is_the_same(repository, monkeypatch):
    """Unchanged code passes, with a table here and on GitHub's page, and leaves no files behind."""
    summary, scratch = repository.path / "summary.md", repository.path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    for _ in range(3):
        result = run(repository, "--gate-against=HEAD")
        if not undecided(result):  # a host that is busy leaves it undecided
            break
    if undecided(result):  # then the gate may say only that it does not know
        result.stdout.fnmatch_lines(["| quick *AMBIGUOUS |", "*AMBIGUOUS *: quick, *"])
    else:
        result.assert_outcomes(passed=1)
        assert result.ret == 0
        result.stdout.fnmatch_lines(["| case *| HEAD, ms |*", "| quick *SAME |"])
    assert "| quick " in summary.read_text()
    assert not list(scratch.iterdir())


@pytest.mark.alone
def test_a_slow_down_is_a_failed_test(repository, monkeypatch):
    """A slower case fails, with a message that JUnit counts; a faster or new case does not.

    The old revision has neither the gate nor its clock, and its prints are not taken for answers.
    """
    folder = repository.path
    for gone in ("gate", "measure"):
        shutil.rmtree(folder / "flashattn" / gone)
    (folder / "flashattn" / "training.py").unlink()
    edit(folder, "tiled.py", BEGIN, SPIN + BEGIN)
    edit(folder, "__init__.py", "\nfrom", "\nprint('noise')\nfrom")
    commit(folder)
    shutil.rmtree(folder / "flashattn")
    pair.working_tree(ROOT, folder)
    edit(folder, "reference.py", GROUP, SPIN + GROUP)
    slow = replace(QUICK, name="slow", impl="reference")
    set_cases(QUICK, slow, replace(cases.CPU[-1], batch=1))
    starts, start = [], Pair._start
    monkeypatch.setattr(Pair, "_start", lambda both: starts.append(start(both)))
    result = run(repository, "--gate-against=HEAD", "--junitxml=junit.xml")
    # Each further collection uses new processes; a loaded host may disturb the null arm.
    assert len(starts) == 1 + sum(line.count(" + 30") for line in result.outlines)
    assert result.parseoutcomes()["failed"] == 1
    assert result.ret == 1
    low, high = (1 + bound / 100 for bound in intervals(result)[1])
    null = gate.Interval(low=low, median=1.0, high=high).verdict
    said = "UNPROVEN" if null in ("SLOWER", "FASTER") else "FASTER"
    result.stdout.fnmatch_lines([f"| quick * {said} |"])
    result.stdout.fnmatch_lines(
        [
            "| slow * 15 + 30* | *SLOWER |",
            "| model-train *NEW |",
            "*NEW: the old revision cannot run model-train (ModuleNotFoundError: *training*)",
        ]
    )
    tests, failures, said = junit(folder / "junit.xml")
    assert (tests, failures) == (3, 1)
    assert said[0].startswith("SLOWER +")
    result.stdout.fnmatch_lines(["FAILED benchmarks/bench_gate.py::bench_gate[[]slow] - SLOWER +*"])
    result.stdout.no_fnmatch_line("*Traceback*")
    result.stdout.no_fnmatch_line("*pytest.fail(*")


def test_a_dead_worker_tells_why(repository):
    """A process that dies fails its case with its last words; the next case gets new processes."""
    die = "    import os; os.write(2, b'farewell'); os._exit(3)\n"
    edit(repository.path, "tiled.py", BEGIN, die)
    edit(repository.path, "reference.py", GROUP, "    q.no_such_thing\n" + GROUP)
    set_cases(QUICK, replace(QUICK, name="other", impl="reference"))
    result = run(repository, "--gate-against=HEAD")
    result.assert_outcomes(failed=2)
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        ["*new: died at 'prepare'*farewell*", "*new: cannot run other: AttributeError:*"]
    )


def test_an_old_revision_that_does_not_start_proves_nothing(repository, monkeypatch):
    """A broken old revision is started once, not for each case; status and table say UNPROVEN."""
    starts, start = [], Pair._start
    monkeypatch.setattr(Pair, "_start", lambda both: (starts.append(both), start(both)))
    init = repository.path / "flashattn" / "__init__.py"
    sound = init.read_text()
    init.write_text(sound + "\nraise RuntimeError('broken')\n")
    commit(repository.path)
    init.write_text(sound)
    set_cases(QUICK, replace(QUICK, name="other"))
    result = run(repository, "--gate-against=HEAD")
    result.assert_outcomes(skipped=2)
    assert result.ret == gate.EXIT_UNPROVEN
    assert len(starts) == 1
    said = "UNPROVEN: the old revision cannot run quick (ref: died at 'hello'; RuntimeError: *)"
    result.stdout.fnmatch_lines(["| other *UNPROVEN |", f"*{said}"])


@pytest.mark.alone
def test_the_selftest_sees_what_is_there(repository):
    """Work that is added to a case is seen, in the processes of each collection."""
    result = run(repository, "--gate-selftest")
    if unknown(result):  # after three tries, each in new processes
        (slower, _), (_, null) = intervals(result)
        assert null > slower  # the null arm alone reached the change
        result.assert_outcomes(skipped=1)
        assert result.ret == gate.EXIT_UNPROVEN
        return
    result.assert_outcomes(passed=1)
    assert result.ret == 0
    result.stdout.fnmatch_lines([f"| quick +100% *| *{SELFTEST} + {2 * SELFTEST}*| *SEEN*|"])


SAME = gate.Interval(low=0.99, median=1.0, high=1.01)
DOUBLE = gate.Interval(low=1.9, median=2.0, high=2.1)
# Intervals of the change and of the null arm.
SHARP, SLOW, DIRTY = (SAME, SAME), (DOUBLE, SAME), (SAME, DOUBLE)
BLURRED = (gate.Interval(low=0.5, median=1.0, high=2.0), SAME)


@pytest.mark.parametrize(
    ("readings", "verdict", "status", "outcome"),
    [
        ([SHARP] * 3, "+100% *| *MISSED, attempt 3", gate.EXIT_BROKEN, "failed"),
        ([BLURRED] * 3, "+100% *| *UNPROVEN, attempt 3", gate.EXIT_UNPROVEN, "skipped"),
        ([SHARP, BLURRED, SLOW], "+100% *| *SEEN, attempt 3", 0, "passed"),
        ([SLOW], "+100% *| *SEEN", 0, "passed"),
        ([BLURRED], "*| *AMBIGUOUS", gate.EXIT_AMBIGUOUS, "skipped"),
        ([DIRTY], "*| *UNPROVEN", gate.EXIT_UNPROVEN, "skipped"),
    ],
    ids=["blind", "noisy", "at-last", "at-once", "open", "dirty"],
)
def test_a_blind_gate_is_a_failure(repository, monkeypatch, readings, verdict, status, outcome):
    """A selftest that misses the added work is repeated in new processes, three times in all.

    Then a blind gate has failed, and a gate on a machine that is too noisy has proven nothing. A
    revision that may be slower does not fail and is not tried again; the exit status says so.
    """
    log, left, selftest = [], iter(readings), verdict.startswith("+")

    def judge(_, case, *, rounds, injected):
        log.append(rounds)
        change, null = next(left)
        reading = gate.Reading(change=change, null=null, seconds=1e-3, rounds=rounds)
        return gate.Outcome(case=str(case), readings=[reading], injected=injected)

    monkeypatch.setattr(Pair, "judge", judge)
    monkeypatch.setattr(Pair, "renew", lambda _: log.append("renew"))
    asked = "--gate-selftest" if selftest else "--gate-against=HEAD"
    result = run(repository, asked, "--junitxml=junit.xml")
    assert (result.ret, result.parseoutcomes()) == (status, {outcome: 1})
    assert junit(repository.path / "junit.xml")[1] == (outcome == "failed")
    result.stdout.fnmatch_lines([f"| quick {verdict} |"])
    once = [SELFTEST, "renew"] if selftest else [15, "renew"]
    assert log == once * len(readings) + ["renew"] * (selftest and "SEEN" not in verdict)


@pytest.mark.parametrize(
    ("revision", "rounds", "said"),
    [
        ("nowhere", 40, "--gate-against: wanted a revision of this repository, got 'nowhere'"),
        ("--all", 40, "--gate-against: wanted a revision of this repository, got '--all'"),
        ("HEAD", 3, "--gate-rounds: wanted at least 10, got 3"),
        ("HEAD", 40, "wanted a revision that has flashattn, got 'HEAD'"),
    ],
)
def test_a_wrong_option_is_refused(tmp_path, revision, rounds, said):
    """A bad revision, one without the package, and too few rounds are refused by name."""
    git(tmp_path, "init", "--quiet")
    (tmp_path / "other").touch()
    commit(tmp_path)
    pair.working_tree(ROOT, tmp_path)
    with pytest.raises(pytest.UsageError, match=said):
        plugin.Gate(tmp_path, revision, CPU, rounds=rounds, selftest=False)


def test_the_gates_cases_are_its_own(repository):
    """The gate's cases are collected only with its options, and then nothing else is."""
    plain = repository.runpytest_inprocess("benchmarks", "--collect-only", "-q")
    plain.stdout.no_fnmatch_line("*bench_gate*")
    plain.stdout.fnmatch_lines(["*bench_forward*"])
    gated = run(repository, "--gate-against=HEAD", "--collect-only", "-q")
    names = [line for line in gated.outlines if "::" in line]
    assert [name.rpartition("::")[2] for name in names] == ["bench_gate[quick]"]


def processes(word):
    """Return the ids of processes with a word in their command."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes()
        except OSError:
            continue
        found += [int(path.parent.name)] if word.encode() in text else []
    return found


def wait_until(holds, seconds=60):
    """Wait for a condition; return whether it holds in time."""
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)
    return holds()


def test_an_interrupted_run_leaves_nothing(repository):
    """A terminated run ends its processes and removes its working trees."""
    scratch = repository.path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-m", "pytest", "benchmarks", "--gate-against=HEAD", "-q"]
    environment = os.environ | {"TMPDIR": str(scratch)}
    running = subprocess.Popen(
        command, cwd=repository.path, env=environment, stdout=subprocess.DEVNULL
    )
    started = wait_until(lambda: len(processes(str(scratch))) == 1 + len(gate.ARMS))
    time.sleep(0.5)
    running.terminate()
    running.wait(30)
    assert started
    assert wait_until(lambda: not processes(str(scratch)), 20)
    assert not list(scratch.iterdir())


@pytest.mark.parametrize("own", [True, False])
def test_a_worker_runs_its_own_revision(tmp_path, monkeypatch, own):
    """A worker that finds another revision's package is refused; a closed worker ends."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    if own:
        pair.working_tree(ROOT, tmp_path / "tree")
    with closing(pair.Arms({"ref": tmp_path / "tree"}, CPU, 0)) as arms:
        arm = arms.workers["ref"]
        if own:
            arm.greet()
            arm.close()
            assert arms._process.wait(20) == 0
        else:
            with pytest.raises(WorkerError, match="ref: wanted flashattn of its own revision"):
                arm.greet()


def test_a_worker_that_hangs_tells_where(tmp_path, monkeypatch):
    """A process that does not answer in time is ended, and its last words say where it was."""
    (tmp_path / "flashattn").mkdir()
    hangs = tmp_path / "flashattn" / "__init__.py"
    hangs.write_text("import time\ntime.sleep(600)\n")
    for patience in (2, 10):  # on a busy host, importing PyTorch takes longer than two
        monkeypatch.setitem(pair.PATIENCE, "hello", patience)
        said = f"no answer to 'hello' in {patience} s; "
        with closing(pair.Arms({"ref": tmp_path}, CPU, 0)) as arms:
            with pytest.raises(WorkerError, match=said) as told:
                arms.workers["ref"].greet()
            ended = arms._process.wait(20)
        if str(hangs) in str(told.value):
            break
    assert str(hangs) in str(told.value)
    assert ended == 0


@pytest.mark.skipif(not pair._fixed(), reason="addresses cannot be fixed here")
def test_arms_lie_alike_in_memory():
    """Two processes with one seed put an object at one address: neither is faster by luck."""

    def where(seed):
        python, settings = pair.laid_out(CPU, seed)
        command = [*python, "-c", "print(id(object()), hash('a'))"]
        environment = os.environ | settings
        return subprocess.run(command, env=environment, capture_output=True, check=True).stdout

    assert where(1) == where(1)
    assert where(1) != where(2)


@pytest.mark.parametrize("share", [0.05, 1.0])
def test_work_is_added_in_proportion(share):
    """Added work lengthens a call by exactly its share, whatever the call and the clock cost."""
    spent = itertools.count()
    now = lambda: next(spent) * 1e-6  # noqa: E731 - each look costs a microsecond

    def took(call):
        start = now()
        assert call() == "result"
        return now() - start

    def work(lasts):
        return lambda: [now() for _ in range(lasts)] and "result"

    cost = took(worker.spun(lambda: "result", 0.0, now)) - took(lambda: "result")
    for lasts in (1000, 5000):
        ratio = took(worker.spun(work(lasts), share, now, cost)) / took(work(lasts))
        assert ratio == pytest.approx(1 + share, abs=0.002)


def test_short_calls_are_timed_many_at_once(monkeypatch):
    """Short calls are timed in groups, so that the clock costs little; seconds are per call."""
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    timed = worker.Worker(CPU, timing)
    monkeypatch.setitem(worker.MAKERS, "AttentionCase", lambda *_: lambda: sum(range(1000)))
    timed.prepare(QUICK.message())
    assert timed.pace()["seconds"] > worker.SHORTEST / 4
    assert max(timed.sample(5, None)["seconds"]) < worker.SHORTEST / 4


@pytest.mark.parametrize(("seq_kv", "keys"), [(None, 8), (20, 20)])
def test_keys_may_be_more_than_queries(seq_kv, keys):
    """A case has as many keys as queries unless it says how many."""
    case = cases.AttentionCase("x", "tiled", "backward", (1, 4, 2, 8, 16), seq_kv=seq_kv)
    dq, dk, dv = worker.attend(case.message(), CPU)()
    assert dq.shape == (1, 4, 8, 16)
    assert dk.shape == dv.shape == (1, 2, keys, 16)


def test_arms_take_turns_by_lot():
    """Every round runs each arm once, on one core; order and core change from round to round.

    A sample is the time of its fastest call.
    """
    log = []

    def ask(arm, do, **request):
        if do == "sample":
            log.append((arm, request["core"]))
        return {"seconds": [2.0, 1.0, 5.0] if do == "sample" else 1.0}

    both = Pair(ROOT, None, CPU)
    both._cores = [0, 1]
    workers = {arm: SimpleNamespace(ask=partial(ask, arm)) for arm in gate.ARMS}
    both._arms = SimpleNamespace(workers=workers, close=lambda: None)
    collected = both._collect(40)
    both.close()
    assert collected.new == collected.ref == collected.again == [1.0] * 40
    rounds = [log[i : i + 3] for i in range(0, len(log), 3)]
    assert all({arm for arm, _ in turn} == set(gate.ARMS) for turn in rounds)
    assert [turn[0][1] for turn in rounds] == [0, 1] * 20
    assert all(len({core for _, core in turn}) == 1 for turn in rounds)
    assert len({tuple(arm for arm, _ in turn) for turn in rounds}) == 6


def test_cases_have_names():
    """Every device has 8 to 16 cases with unique names."""
    for device, chosen in cases.CASES.items():
        assert 8 <= len(chosen) <= 16
        assert len({str(case) for case in chosen}) == len(chosen)
        assert cases.SELFTEST[device].keys() <= {str(case) for case in chosen}
