"""Workers start for many tests, merge what they report, and end tests that hang."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from flashattn import registry
from flashattn.testing import drawn, law, left_out, parallel
from flashattn.testing.examples import Count
from flashattn.testing.law import share

FILES = {
    "test_times.py": """
import time

import pytest


@pytest.mark.parametrize("i", range(6))
def test_beside(i, record_property):
    record_property("begin", time.time())
    time.sleep(0.2)
    record_property("end", time.time())


@pytest.mark.alone
@pytest.mark.parametrize("i", range(2))
def test_alone(i, record_property):
    record_property("begin", time.time())
    time.sleep(0.2)
    record_property("end", time.time())
""",
    "test_hangs.py": """
import time


def test_that_hangs():
    time.sleep(1000)
""",
    "test_fails.py": """
import hypothesis
import pytest
from flashattn.testing.law import law
from hypothesis import strategies as st


@pytest.mark.parametrize("again", [False, True])
@hypothesis.settings(max_examples=4, database=None)
@hypothesis.given(number=st.integers())
def test_property(again, number):
    pass


@law()
def test_law(impl, sample):
    pass


def test_of_one(impl):
    assert impl.name != "tiled", "as planned"
""",
}


def test_workers(pytester, request, monkeypatch, capfd):
    """Workers run a folder and report sums, small failures and hangs; alone means alone."""
    answer = [name for name in registry.names() if left_out.never(name) is None]
    asked = [impl for impl in map(registry.get, answer) if not impl.compiles]
    pytester.makeconftest((request.config.rootpath / "conftest.py").read_text() + SPANS)
    pytester.makeini("[pytest]\ntimeout = 4\ntimeout_method = thread\nfaulthandler_timeout = 3\n")
    folder = pytester.mkdir("tests")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    monkeypatch.setattr(Count, "all", 0)
    options = ["-n2", "-q", "--hypothesis-profile=quick", *["--every-tile"] * drawn.ON_GPU]
    result = pytester.runpytest_inprocess("tests", *options)
    output = result.stdout.str()
    skipped = result.parseoutcomes().get("skipped", 0)  # peers whose only example does not suit
    assert skipped <= sum(impl.excused for impl in asked)
    passed = 10 + len(asked) + len(answer) - 1 - skipped
    result.assert_outcomes(passed=passed, failed=2, skipped=skipped)
    assert "worker 'gw" in output
    assert "crashed while running 'tests/test_hangs.py::test_that_hangs'" in output
    assert "in test_that_hangs" in capfd.readouterr().err  # a worker's, not this process's own
    shares = sum(share(impl, law.DEVICE, "quick") for impl in asked)
    assert f"hypothesis: {2 * 4 + shares - skipped} examples passed" in output
    result.stdout.fnmatch_lines(
        ["*tiled: what fails, made small*", "tests/test_fails.py::test_of_one[[]tiled[]]"]
    )
    spans = [line.split()[1:] for line in output.splitlines() if line.startswith("SPAN")]
    times = sorted((float(begin), float(end), name) for name, begin, end in spans)
    assert len(times) == 8
    for (_, end, name), (begin, _, after) in pairwise(times):
        if "alone" in name + after:
            assert end <= begin
    seeds = (pytester.path / "seeds").read_text().split()
    assert len(seeds) > 1 == len(set(seeds))  # a law draws the same in each worker


SPANS = """

def pytest_runtest_logreport(report):
    spans = dict(report.user_properties)
    if report.when == "call" and "begin" in spans and hasattr(report, "node"):  # of a worker
        print("\\nSPAN", report.nodeid.split("::")[1], spans["begin"], spans["end"])


def pytest_sessionstart(session):
    if hasattr(session.config, "workerinput"):
        with session.config.rootpath.joinpath("seeds").open("a") as file:
            file.write(f"{seed.Seed.value}\\n")
"""


@pytest.mark.parametrize(("on_gpu", "worker"), [(False, False), (False, True), (True, True)])
def test_workers_for_a_gpu_mix_tests(monkeypatch, on_gpu, worker):
    """On a GPU workers mix neighbouring tests; properties are first, ``alone`` tests last.

    On a CPU workers reverse the order, and without workers it stays as collected.
    """
    monkeypatch.setattr(parallel, "ON_GPU", on_gpu)

    def item(name, *, drawn=False, alone=False):
        function = SimpleNamespace(hypothesis=None) if drawn else None
        return SimpleNamespace(
            nodeid=name, obj=function, get_closest_marker=lambda _: alone or None
        )

    plain = [f"test_a[{i}]" for i in range(9)]
    items = [item("alone", alone=True), *map(item, plain), item("drawn", drawn=True)]
    config = SimpleNamespace(**{"workerinput": {}} if worker else {})
    parallel.pytest_collection_modifyitems(config, items)
    names = [x.nodeid for x in items]
    assert (names[0], names[-1]) == ("drawn", "alone")
    assert sorted(names[1:-1]) == plain
    assert (names[1:-1] == plain) == (not worker)
    assert (names[1:-1] == plain[::-1]) == (worker and not on_gpu)


@pytest.mark.parametrize(
    ("arguments", "options", "wanted"),
    [
        (["tests"], {}, "auto"),
        (["tests/mutants"], {}, "auto"),
        (["tests", "tests/mutants"], {}, "auto"),
        (["tests/test_a.py", "tests/mutants"], {}, "auto"),
        (["tests/test_a.py", "tests/test_a.py"], {}, "auto"),
        (["tests/test_a.py"], {}, None),
        (["tests/test_a.py::test_b", "tests/test_a.py::test_c"], {}, None),
        (["benchmarks"], {}, None),
        (["tests", "benchmarks"], {}, None),
        (["tests"], {"usepdb": True}, None),
        (["tests"], {"lf": True}, None),
        (["tests"], {"collectonly": True}, None),
        (["tests"], {"numprocesses": 0}, 0),
        (["tests/test_a.py"], {"numprocesses": 3}, 3),
    ],
)
def test_where_workers_start(tmp_path, arguments, options, wanted):
    """Workers start for folders and several files, unless one process is asked for."""
    for folder in ("tests/mutants", "benchmarks"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "tests/test_a.py").touch()
    option = SimpleNamespace(
        **{"numprocesses": None, "dist": "no", "maxschedchunk": None} | options
    )
    config = SimpleNamespace(
        option=option,
        args=arguments,
        rootpath=tmp_path,
        invocation_params=SimpleNamespace(dir=tmp_path),
        pluginmanager=SimpleNamespace(has_plugin=lambda name: name == "xdist"),
        getoption=lambda name, default: getattr(option, name, default),
    )
    parallel.pytest_cmdline_main(config)
    assert option.numprocesses == wanted
    assert (option.dist == "load") == bool(wanted)


@pytest.mark.parametrize(
    ("cores", "gigabytes", "workers"),
    [(2, (), 2), (64, (), 16), (16, (140,), 16), (16, (24,), 3), (16, (24, 24), 6), (4, (4,), 1)],
)
def test_how_many_workers(monkeypatch, cores, gigabytes, workers):
    """There is one worker per core, up to 16, with 8 GiB of the GPUs' memory for each."""
    monkeypatch.setattr(parallel.os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gigabytes))
    gpus = [SimpleNamespace(total_memory=size << 30) for size in gigabytes]
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    assert parallel.pytest_xdist_auto_num_workers() == workers


def test_a_broken_gpu_context_ends_its_worker(monkeypatch, capsys):
    """A test that breaks the GPU's context is named, and its worker ends before the next test."""

    def synchronize():
        raise RuntimeError("an illegal memory access was encountered")

    ended = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(parallel.os, "_exit", ended.append)
    parallel._release_memory(SimpleNamespace(nodeid="tests/test_x.py::test_x"))
    assert ended == [1]
    assert "test_x: an illegal memory access" in capsys.readouterr().err


@pytest.mark.parametrize(("visible", "wanted"), [(None, "0101"), ("5,3,7", "5375")])
def test_workers_share_the_gpus(monkeypatch, visible, wanted):
    """Each worker sees one of the GPUs that this process sees, in turn."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    specs = [SimpleNamespace(env={}) for _ in range(4)]
    config = SimpleNamespace(stash=pytest.Stash())
    parallel.pytest_xdist_setupnodes(config, specs)
    parallel.pytest_unconfigure(config)
    assert "".join(spec.env["CUDA_VISIBLE_DEVICES"] for spec in specs) == wanted
