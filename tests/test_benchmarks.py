"""``pytest benchmarks`` end to end, on implementations that behave and some that do not."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
from pathlib import Path
from weakref import ref

import pytest
import torch

from flashattn import registry
from flashattn.measure import timing
from flashattn.measure.device import accelerator
from flashattn.report import keep
from flashattn.report.compare import EXIT_UNPROVEN_LIMIT
from flashattn.report.runs import load
from flashattn.testing import plugin_file

ROOT = Path(__file__).parents[1]
FOLDER = accelerator(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
ONE = ("-k", "q64 and full")  # one problem in three passes
WARM_UP = timing.WARM_UP  # before ``laid_out`` replaces it
reference, naive = map(registry.get, ("reference", "naive"))


def good(q, k, v, **options):
    """Compute attention by the reference."""
    return reference.call(q, k, v, **options)[0]


def wrong(q, k, v, **options):
    """Compute attention with the last head alone off by a factor of 1.001."""
    o = good(q, k, v, **options)
    return torch.cat([o[:, :-1], o[:, -1:] * 1.001], dim=1)


def hungry(q, k, v, **options):
    """Run out of memory holding an intermediate tensor, which must not outlive the case."""
    assert not any(x() is not None for x in held), "the last case's tensors are still there"
    intermediate = good(q, k, v, **options)
    held.append(ref(intermediate))
    raise torch.OutOfMemoryError


held: list[ref] = []


@pytest.fixture
def bench(pytester, monkeypatch, laid_out):
    """Return a function that runs the real benchmarks on some callables, in their own folder."""
    laid_out("benchmarks/bench_flash.py")
    held.clear()

    def run(impls, *arguments):
        made = {
            name: impl if isinstance(impl, registry.Impl) else made_impl(name, impl)
            for name, impl in impls.items()
        }
        monkeypatch.setattr(registry, "_impls", made)
        return pytester.runpytest_inprocess("benchmarks", "--sweep", "smoke", *arguments)

    return run


def made_impl(name, call=good, *, reason=None, compiles=False):
    """Return an implementation that refuses all problems for ``reason``, or takes all."""
    limits = lambda problem, device: reason  # noqa: E731
    return registry.Impl(name=name, call=call, limits=limits, compiles=compiles)


def kept(pytester):
    """Return the paths of the kept runs."""
    return sorted((pytester.path / ".benchmarks").glob("**/*.json"))


def journal(pytester):
    """Return the path of the unfinished run."""
    (path,) = (pytester.path / ".benchmarks" / FOLDER).glob("unfinished-*.jsonl")
    return path


def test_green_run_is_kept_with_all_it_takes(bench, pytester, monkeypatch):
    """A green run leaves one file: statistics, facts, roofs, reasons; no sample, host or path.

    A case that runs out of memory, would compile or is interpreted is a row with a reason.
    """
    impls = {
        "good": good,
        "hungry": hungry,
        "limited": made_impl("limited", reason="limited by nature"),
        "slow": made_impl("slow", compiles=True),
    }
    if os.environ.get("TRITON_INTERPRET") == "1":
        impls["mine"] = made_impl("mine", registry.get("triton"))
    # Nothing is compiled, and torch's compiler cannot be imported again after pytester drops it.
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    result = bench(impls, *ONE)
    result.assert_outcomes(passed=3, skipped=3 * len(impls) - 3)
    (path,) = kept(pytester)
    assert path.parent == pytester.path / ".benchmarks" / FOLDER
    saved, run = json.loads(path.read_text()), load(path)
    for case in saved["benchmarks"]:
        assert "data" not in case["stats"]
        assert case["stats"]["rounds"] == case["extra_info"]["rounds"] > 1
    reasons = {
        "good": ("ok", None),
        "hungry": ("oom", "hungry ran out of memory"),
        "limited": ("unsupported", "limited by nature"),
        "slow": ("unsupported", "slow compiles every shape for seconds: timed at few"),
        "mine": ("unsupported", "mine is interpreted: not a speed"),
    }
    wanted = {(name, *reasons[name]) for name in impls}
    assert {(r["impl"], r["status"], r["reason"]) for r in run.rows} == wanted
    measured = run.rows[0]
    assert (measured["study"], measured["impl"], measured["pass"]) == ("flash", "good", "forward")
    assert measured["name"] == "forward[fp32-b4h4-q64-d64-full-good]"
    assert measured["flops"] == 2 * 2 * 4 * 4 * 64 * 64 * 64
    assert measured["q1"] <= measured["seconds"] <= measured["q3"]
    assert run.roofs["float32"] == 1e12
    assert run.machine["accelerator"] == FOLDER
    assert set(saved["commit_info"]) == {"id", "dirty", "time"}
    for secret in (platform.node(), str(pytester.path), str(ROOT), str(Path.home()) + "/"):
        assert secret not in path.read_text()
    result.stdout.no_fnmatch_line("*Name (time in *")  # the plugin's own table
    # pytest's percentage of cases says nothing about the time left.
    result.stdout.no_re_match_line(r".*bench_flash\.py.*%\]|.*\r")
    result.stdout.fnmatch_lines(
        [
            "*forward*",
            "*limited by nature*3 cases*",
            f"Kept in .benchmarks/{FOLDER}/0001_*.json",
        ]
    )
    bench({"limited": impls["limited"]}, *ONE).assert_outcomes(skipped=3)
    assert kept(pytester) == [path]  # a run without measurements is not kept


def test_wrong_result_is_neither_timed_nor_kept(bench, pytester):
    """One head off by 0.1% fails untimed, with timing disabled or not, and is not kept."""
    result = bench({"good": good, "wrong": wrong}, *ONE)
    result.assert_outcomes(passed=3, failed=3)  # and no errors
    assert kept(pytester) == []
    rows = load(journal(pytester)).rows
    assert {(r["impl"], r["status"], bool(r["samples"])) for r in rows} == {
        ("good", "ok", True),
        ("wrong", "failed", False),
    }
    result.stdout.fnmatch_lines(["*wrong: * error * budget*", "Not kept;*unfinished-*.jsonl"])
    disabled = bench({"good": good, "wrong": wrong}, *ONE, "--benchmark-disable")
    disabled.assert_outcomes(passed=3, failed=3)
    assert kept(pytester) == []
    assert load(journal(pytester)).rows == rows  # the only journal: untimed cases are no rows


def angry(q, k, v, **options):
    """Raise holding an intermediate tensor, which must be gone when others are timed."""
    intermediate = good(q, k, v, **options)
    held.append(ref(intermediate))
    raise ValueError("no such luck")


def test_fast_implementations_take_turns(bench, pytester, monkeypatch):
    """If the clock allows it, calls take turns: in random orders, with as many samples each.

    An error fails only the implementation that raises it. Slow ones, and ones that run out of
    memory beside others, are timed alone. A resumed run times only those that are left.
    """
    monkeypatch.setattr(timing.HostClock, "takes_turns", True)
    monkeypatch.setattr(timing, "clock_of", lambda _: timing.HostClock())  # on a GPU, too
    monkeypatch.setattr(timing, "MOST_ROUNDS", 12)
    called, alive = [], []

    def named(name):
        def call(q, k, v, **options):
            called.append(name)
            alive.append(any(x() is not None for x in held))
            return good(q, k, v, **options)

        return made_impl(name, call)

    impls = {"one": named("one"), "wrong": wrong, "two": named("two"), "naive": named("naive")}
    impls |= {"hungry": hungry, "angry": angry, "limited": made_impl("limited", reason="not here")}
    forward = ("-k", "q64 and full and bench_forward and not bench_forward_backward")
    bench(impls, *forward).assert_outcomes(passed=3, failed=2, skipped=2)
    rows = {row["impl"]: row for row in load(journal(pytester)).rows}
    in_turns = ("ok", "host time, warm cache, in turns")
    assert {name: (row["status"], row.get("clock")) for name, row in rows.items()} == {
        "one": in_turns,
        "two": in_turns,
        "naive": ("ok", "host time, warm cache"),
        "wrong": ("failed", None),
        "angry": ("failed", None),
        "hungry": ("oom", None),
        "limited": ("unsupported", None),
    }
    assert len(rows["one"]["samples"]) == len(rows["two"]["samples"]) == 12
    assert rows["one"]["samples"] != rows["two"]["samples"]
    turns = [name for name in called if name != "naive"]
    # Interpreter check, verification, warm-up, samples: once each, though another had no memory.
    assert len(turns) == 2 * ((not torch.cuda.is_available()) + 1 + 3 + 12)
    turns = turns[-24:]
    pairs = list(zip(turns[::2], turns[1::2], strict=True))
    assert set(pairs) == {("one", "two"), ("two", "one")}  # each round has both, in either order
    assert len(held) == 4
    assert not any(alive), "what one raised holds its tensors"

    called.clear()
    left = {"one": named("one"), "wrong": good, "two": named("two"), "three": named("three")}
    bench(left, *forward, "--resume").assert_outcomes(passed=4)
    assert set(called) == {"three"}  # and the one that had failed
    (path,) = kept(pytester)
    again = {row["impl"]: (row["status"], row.get("clock")) for row in load(path).rows}
    assert {name: again[name] for name in left} == dict.fromkeys(left, in_turns)


def test_slow_implementations_are_left_to_one_study(bench, laid_out, pytester):
    """Only bench_flash times slow implementations; other studies skip them with a reason."""
    laid_out("benchmarks/bench_masks.py")
    one = "(bench_flash and q64 and full or bench_masks and causal and not window and not docs)"
    bench({"good": good, "naive": good}, "-k", f"{one} and bench_forward and not backward")
    (path,) = kept(pytester)
    assert {(row["study"], row["impl"], row["reason"]) for row in load(path).rows} == {
        ("flash", "good", None),
        ("flash", "naive", None),
        ("masks", "good", None),
        ("masks", "naive", "naive is timed without such masks"),
    }


def saved(pytester, name, accelerator=FOLDER, *, dirty=False):
    """Save a run without cases."""
    folder = pytester.path / ".benchmarks" / FOLDER
    folder.mkdir(parents=True)
    facts = {"machine_info": {"accelerator": accelerator}, "commit_info": {"dirty": dirty}}
    path = folder / f"{name}.json"
    path.write_text(json.dumps(facts | {"benchmarks": []}))
    return path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--benchmark-compare-fail=median:5%"], "wanted --benchmark-compare and a run"),
        (["--benchmark-compare=0009"], "no kept run is called 0009"),
        (
            ["--benchmark-compare=0001"],
            "no kept run has a clean commit, and others are no baseline",
        ),
        (["--benchmark-compare=0002"], f"wanted a run made on {FOLDER}, got nvidia-other"),
        (["--benchmark-compare=a/b/c"], "no kept run is called a/b/c"),
        (["--benchmark-compare=0003"], "0003_x.json: wanted a saved run, got *"),
        (["-n", "2"], "pytest benchmarks runs in one process*wanted no -n"),
        (["-p", "no:benchmark"], "wanted no -p no:benchmark"),
        (["--part", "0/3"], "--part: wanted I/N"),
        (["--part", "4/3"], "--part: wanted I/N"),
        (["--part", "two"], "--part: wanted I/N"),
    ],
)
def test_what_cannot_be_done_is_a_usage_error(bench, pytester, arguments, words):
    """A baseline that is missing, dirty, foreign or damaged is refused; so is a bad option."""
    if "compare=0001" in arguments[0]:
        saved(pytester, "0001_x-dirty", dirty=True)
    if "compare=0002" in arguments[0]:
        saved(pytester, "0002_x", "nvidia-other")
    if "compare=0003" in arguments[0]:
        path = saved(pytester, "0003_x")
        path.write_text(path.read_text()[:-5])
    result = bench({"good": good}, *ONE, *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{words}*"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench_flash.py", "--gate-selftest"], "wanted bench_gate.py, which holds the gate's"),
        (["bench_gate.py"], "bench_gate.py: wanted --gate-against=REVISION or --gate-selftest"),
    ],
)
def test_the_gate_is_for_its_own_cases(laid_out, pytester, arguments, words):
    """The gate refuses other files that are named, and its own file is refused without it."""
    laid_out("benchmarks/bench_flash.py", "benchmarks/bench_gate.py")
    result = pytester.runpytest_inprocess(f"benchmarks/{arguments[0]}", *arguments[1:])
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{words}*"])


def test_parts_of_the_gate(laid_out, pytester):
    """The gate's cases are divided among parts, too."""
    laid_out("benchmarks/bench_gate.py")
    how = ("benchmarks", "--gate-selftest", "--collect-only", "-q")
    parts = [
        {line for line in pytester.runpytest_inprocess(*how, *part).outlines if "::" in line}
        for part in ((), ("--part", "1/2"), ("--part", "2/2"))
    ]
    assert parts[0] == parts[1] | parts[2]
    assert all(parts)
    assert not parts[1] & parts[2]


def test_benchmarks_beside_tests(laid_out, pytester):
    """A whole checkout is its tests; benchmarks that are named beside tests are collected."""
    laid_out("benchmarks/bench_flash.py")
    test = 'import pytest\n@pytest.mark.parametrize("case", [1])\ndef test_one(case):\n    pass\n'
    (pytester.mkdir("tests") / "test_case.py").write_text(test)
    whole = pytester.runpytest_inprocess(".", "--collect-only", "-q", "-n0")
    assert [line for line in whole.outlines if "::" in line] == ["tests/test_case.py::test_one[1]"]
    both = pytester.runpytest_inprocess("tests", "benchmarks", "--collect-only", "-q")
    assert both.ret == 0
    both.stdout.fnmatch_lines(["tests/test_case.py::test_one*", "benchmarks/bench_flash.py::*"])


def test_compare_with_what_was_kept(bench, pytester):
    """Without a clean run there is no baseline; with one, each case has a verdict.

    Unchanged sources are never faster or slower; deselected cases are not gone.
    """
    saved(pytester, "0001_x-dirty", dirty=True)
    first = bench({"good": good, "old": good}, *ONE, "--benchmark-compare")
    first.assert_outcomes(passed=6)
    first.stdout.fnmatch_lines(["Compared with nothing: every kept run has uncommitted changes*"])
    second = bench({"good": good, "fresh": good}, *ONE, "--benchmark-compare")
    second.assert_outcomes(passed=6)
    lines = [line.split("|") for line in second.outlines if line.startswith("| flash: ")]
    assert {(words[1].strip()[-5:], words[-2].strip()) for words in lines} == {
        ("good]", "same"),
        ("resh]", "new"),
        ("-old]", "gone"),
    }
    second.stdout.fnmatch_lines(
        ["3 same, 3 gone, 3 new.*geometric mean of 3. The code is the same*"]
    )
    three = dict.fromkeys(("good", "old", "fresh"), good)
    third = bench(three, "-k", "q64 and full and old", "--benchmark-compare")
    third.stdout.no_fnmatch_line("*| *gone |*")


def test_compare_with_runs_that_were_kept_for_a_commit(bench, pytester):
    """Runs without samples are a baseline; limits are for the statistics that they have.

    What --impl does not choose is not gone.
    """
    bench({"good": good, "old": good}, *ONE).assert_outcomes(passed=6)
    (path,) = kept(pytester)
    path.with_suffix(".jsonl").write_text(keep._lines(load(path)))
    path.unlink()
    same = bench({"good": good, "old": good}, *ONE, "--impl", "good", "--benchmark-compare")
    same.assert_outcomes(passed=3)
    same.stdout.fnmatch_lines(["3 same.*geometric mean of 3. The code is the same*"])
    limit = bench({"good": good}, *ONE, "--benchmark-compare", "--benchmark-compare-fail=min:5%")
    assert limit.ret == pytest.ExitCode.USAGE_ERROR
    limit.stderr.fnmatch_lines(["*wanted a limit on mean or median, got min: runs that*"])


@pytest.mark.alone
def test_a_limit_fails_what_is_beyond_the_noise(bench, pytester, monkeypatch):
    """A regression is a failed test with one line of reason; JUnit counts it; it is not kept.

    A limit inside the noise fails no test and has its own exit status.
    """
    monkeypatch.setattr(timing, "WARM_UP", WARM_UP)
    mine = pytester.makepyfile(mine=MINE.partition('@register("deadly"')[0])
    # Not backward: the kernel sleeps in its forward pass.
    case = ("-k", "q64 and full and (quick or naive) and not bench_backward")
    compare = ("--benchmark-compare", "--junit-xml=junit.xml")

    def run(*arguments):
        plugin_file._load.cache_clear()
        return bench({"naive": naive}, "--impl", "mine.py", *case, *arguments)

    run().assert_outcomes(passed=4)
    inside = run(*compare, "--benchmark-compare-fail=median:1%")
    inside.assert_outcomes(passed=4)
    assert inside.ret == EXIT_UNPROVEN_LIMIT
    inside.stdout.fnmatch_lines(["--benchmark-compare-fail: the limit on the median lies inside*"])
    before = kept(pytester)
    slow = "    __import__('time').sleep(0.1)\n    return answer(q"
    mine.write_text(mine.read_text().replace("    return answer(q", slow))
    for _ in range(3):
        result = run(*compare, "--benchmark-compare-fail=median:900%")
        if result.ret != EXIT_UNPROVEN_LIMIT:  # else the host is busy with something else
            break
        for path in {*kept(pytester)} - {*before}:
            path.unlink()
    result.assert_outcomes(failed=2, passed=2)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    told = ["SLOWER +*% than in the kept runs: median beside *", "FAILED *quick]*"]
    result.stdout.fnmatch_lines(told)
    result.stdout.no_fnmatch_line("*Traceback*")
    assert 'tests="4"' in (pytester.path / "junit.xml").read_text()
    assert 'failures="2"' in (pytester.path / "junit.xml").read_text()
    assert kept(pytester) == before


def test_nothing_can_be_written(bench, pytester, monkeypatch):
    """In a read-only checkout without git, the run is kept in another folder, which is named."""
    (pytester.path / ".benchmarks").touch()  # not even root can make a folder in a file
    (pytester.path / ".pytest_cache").touch()
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("tempfile.tempdir", str(pytester.mkdir("scratch")))
    result = bench({"good": good}, *ONE, "--benchmark-compare")
    result.assert_outcomes(passed=3)
    assert result.ret == 0
    (path,) = (pytester.path / "scratch").glob("*/*")
    assert path.name.startswith("0001_sources-")
    assert "\n".join(result.outlines).count("cannot be written") == 1
    assert len(load(path).rows) == 3
    told = [
        "*fp32-b4h4-q64-d64-full*",
        "Compared with nothing: no run was kept before on *",
        f"*.benchmarks/{FOLDER} cannot be written (*): see */scratch/*",
        "Kept in scratch/*/0001_sources-*.json",
    ]
    result.stdout.fnmatch_lines_random(told)


def test_own_storage_is_respected(bench, pytester):
    """A folder named by --benchmark-storage is used as it is."""
    bench({"good": good}, *ONE, "--benchmark-storage", "file://elsewhere").assert_outcomes(passed=3)
    assert kept(pytester) == []
    assert len(list((pytester.path / "elsewhere").glob("*.json"))) == 1


MINE = """
import os, signal
from pathlib import Path
from flashattn import register
from flashattn.mask import Mask
from flashattn.reference import reference_attention

def answer(q, k, v, *, causal, scale):
    return reference_attention(q, k, v, mask=Mask.of(causal), scale=scale)

@register("quick", lse=True)
def quick(q, k, v, **options):
    return answer(q, k, v, **options)

@register("deadly", lse=True)
def deadly(q, k, v, **options):
    if list(Path(".benchmarks").glob("*/unfinished-*")) and not Path("again").exists():
        Path("again").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return answer(q, k, v, **options)
"""


LESS = """
from flashattn.measure import roofline, timing

roofline.SIZES["cpu"] = roofline.Sizes(side=64, copied=2**20, kinds=("float32",))
timing.MOST_ROUNDS = timing.FEWEST_ROUNDS
timing.WARM_UP = 0.0
"""


def rows_of(path):
    """Return the status and the seconds of each case of a run."""
    return {row["name"]: (row["status"], row.get("seconds")) for row in load(path).rows}


def test_a_killed_run_goes_on(bench, pytester):
    """After SIGKILL all measurements are on disk; --resume keeps them and measures the rest."""
    bench({"good": good}, "--collect-only")  # lays out the folder
    pytester.makepyfile(mine=LESS + MINE)
    two = ("-k", "q64 and full and (quick or deadly)")
    command = ("--impl", "mine.py", *two)
    smoke = ("benchmarks", "--sweep", "smoke")
    killed = pytester.runpytest_subprocess(*smoke, *command, timeout=300)
    assert killed.ret == -signal.SIGKILL
    measured = rows_of(journal(pytester))
    assert measured
    assert kept(pytester) == []
    resumed = bench({"good": good}, *command, "--resume")
    resumed.assert_outcomes(passed=6)
    resumed.stdout.no_fnmatch_line("*conforms*")  # only tests say that
    (path,) = kept(pytester)
    found = rows_of(path)
    assert len(found) == 6
    assert set(measured.items()) <= set(found.items())
    assert not list(path.parent.glob("*.jsonl"))  # all of it is in the kept run


def test_a_smaller_selection_loses_no_row(bench, pytester):
    """A run that is resumed with fewer cases is kept with all that was measured before."""
    bench({"good": good, "wrong": wrong}, *ONE).assert_outcomes(passed=3, failed=3)
    before = rows_of(journal(pytester))
    fewer = "-k", "q64 and full and forward and not backward and good"
    bench({"good": good, "wrong": wrong}, *fewer, "--resume").assert_outcomes(passed=1)
    (path,) = kept(pytester)
    assert rows_of(path) == before
    assert "samples" not in path.read_text()


@pytest.mark.parametrize("text", ["{bad\n{}\n", '{"a": 1}\n{"b": 2}\n', "[1]\n[2]\n", "\xff\n"])
def test_a_damaged_run_is_not_resumed(bench, pytester, text):
    """A damaged file is a usage error that names it, and stays."""
    path = pytester.mkdir(".benchmarks") / FOLDER / "unfinished-20260102T030405-6.jsonl"
    path.parent.mkdir()
    path.write_text(text, encoding="latin-1")
    result = bench({"good": good}, *ONE, "--resume")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*--resume: {path.name} is damaged (*"])
    assert path.read_text(encoding="latin-1") == text


def test_a_name_with_brackets(bench, pytester):
    """A run is found under any name that pytest-benchmark takes."""
    result = bench({"good": good}, *ONE, "--benchmark-save=a[b]")
    result.stdout.fnmatch_lines(["Kept in *a[[]b].json"])
    assert [path.name for path in kept(pytester)] == ["0001_a[b].json"]


def test_own_kernels_stand_beside_the_peers(bench, laid_out, pytester):
    """A file alone is timed beside the default peers and the sweep's, else beside those named."""
    laid_out("benchmarks/bench_attention.py")
    pytester.makepyfile(mine=MINE, other=MINE)

    def timed(*arguments):
        lines = bench({"good": good}, "--collect-only", "-q", *arguments).outlines
        return {
            (line.partition("::")[0][17:], word)
            for line in lines
            for word in ("quick", "deadly", "naive", "sdpa_cudnn", "good", "tiled")
            if word in line
        }

    files = ("attention.py", "flash.py")
    alone = timed("--impl", "mine.py:quick")
    assert alone >= {(file, name) for file in files for name in ("quick", "naive")}
    assert ("flash.py", "sdpa_cudnn") in alone
    assert ("attention.py", "tiled") in alone
    assert not {name for _, name in alone} & {"deadly", "good"}
    both = timed("--impl", "other.py:quick", "--impl", "good")
    assert both == {(file, name) for file in files for name in ("quick", "good")}


@pytest.mark.parametrize("changed", ["benchmarks/bench_flash.py", "helper.py"])
def test_other_code_is_not_resumed(bench, pytester, changed):
    """--resume refuses an unfinished run of other sources, also of files beside an own kernel."""
    pytester.makepyfile(mine="import helper\n" + MINE, helper="")
    own = "--impl", "mine.py:quick"
    impls = {"naive": naive, "wrong": wrong}
    bench(impls, *ONE, *own, "--impl", "wrong").assert_outcomes(passed=3, failed=3)
    with (pytester.path / changed).open("a") as file:
        file.write("# changed\n")
    result = bench(impls, *ONE, *own, "--impl", "wrong", "--resume")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--resume: unfinished-*.jsonl has another sources*"])


def test_parts_make_a_whole(bench, laid_out):
    """Each case is in one part; cases that are compared are neighbours in the same part."""
    laid_out("benchmarks/bench_integrations.py", "benchmarks/bench_attention.py")

    def names(*arguments):
        lines = bench({"a": good, "b": good}, "--collect-only", "-q", *arguments).outlines
        return [line for line in lines if "::bench_" in line]

    parts = [names("--part", f"{i}/3") for i in (1, 2, 3)]
    assert sorted(name for part in parts for name in part) == sorted(names())
    for part in parts:
        impls = [name for name in part if "bench_flash.py" in name]
        assert impls
        assert [name.replace("-a]", "-b]") for name in impls[::2]] == impls[1::2]
        # All attentions of a model's step, or none.
        assert sum("bench_step[tiny Llama-plain" in name for name in part) in (0, 3)
        grid = [name for name in part if "bench_attention.py" in name]
        points = [re.sub("-(naive|sdpa|tiled|triton)-", "-", name) for name in grid]
        assert points[::2] == points[1::2]
