"""On a GPU, a run in workers tests half of the largest grids; a few runs test everything."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest

from flashattn.testing import drawn
from flashattn.testing.seed import Seed


def item(name, *, names=(), is_law=False, **params):
    """Return a test with parameters; ``names`` are those that are drawn."""
    values = "-".join(map(str, params.values()))
    return SimpleNamespace(
        nodeid=f"{name}[{values}]" if params else name,
        obj=SimpleNamespace(is_law=True) if is_law else None,
        iter_markers=lambda _: [SimpleNamespace(args=names)] if names else [],
        **{"callspec": SimpleNamespace(params=params)} if params else {},
    )


GRID = [
    item("grid", names=("d", "how"), d=d, how=how, x=x)
    for d in (1, 2)
    for how in "ab"
    for x in (0, 1)
]
LAW = [item("law", is_law=True, impl=impl) for impl in ("triton", "naive", "hopper")]
OTHERS = [item("plain"), *[item("other", impl=impl) for impl in drawn.FAMILIES]]


@pytest.fixture
def taken(monkeypatch):
    """Return a function that returns the names of the tests that a run takes."""
    monkeypatch.setattr(drawn, "ON_GPU", True)

    def take(*, seed=0, every=False, impl=(), worker=True):
        monkeypatch.setattr(Seed, "value", seed)
        options = {"getoption": lambda *_: every, "option": SimpleNamespace(impl=impl)}
        config = SimpleNamespace(**options, **{"workerinput": {}} if worker else {})
        items = [*GRID, *LAW, *OTHERS]
        drawn.pytest_collection_modifyitems(config, items)
        return [x.nodeid for x in items]

    return take


ALL = [x.nodeid for x in [*GRID, *LAW, *OTHERS]]


def test_half_of_the_values_and_one_family_are_taken(taken):
    """A run takes two of four values with all that they are combined with, and one family a law."""
    names = taken()
    assert names == taken()
    pairs = [name[:-2] for name in names if name.startswith("grid")]
    assert len(pairs) == 4 == 2 * len(set(pairs))
    assert [name for name in names if name.startswith("law")] in (
        ["law[triton]", "law[naive]"],
        ["law[naive]", "law[hopper]"],
    )
    assert names[-3:] == ALL[-3:]


def test_a_few_runs_take_everything(taken):
    """Every test is taken by one of a few seeds."""
    assert {name for seed in range(20) for name in taken(seed=seed)} == {*ALL}


@pytest.mark.parametrize(
    "how", [{"every": True}, {"impl": ("hopper",)}, {"worker": False}], ids=str
)
def test_nothing_is_left_out(taken, how):
    """``--every-tile``, ``--impl`` and one process take everything, and so does a CPU."""
    assert taken(**how) == ALL


def test_a_cpu_takes_everything(taken, monkeypatch):
    """Without a GPU nothing is drawn."""
    monkeypatch.setattr(drawn, "ON_GPU", False)
    assert taken() == ALL


def test_the_header_says_what_is_left_out(monkeypatch):
    """The controller of workers on a GPU names the option that takes everything."""

    def header(**options):
        options = {"--every-tile": False, "numprocesses": 2} | options
        config = SimpleNamespace(
            getoption=lambda name, *_: options[name], option=SimpleNamespace(impl=())
        )
        return drawn.pytest_report_header(config)

    monkeypatch.setattr(drawn, "ON_GPU", False)
    assert header() == []
    monkeypatch.setattr(drawn, "ON_GPU", True)
    (said,) = header()
    assert "--every-tile" in said
    assert header(numprocesses=None) == header(**{"--every-tile": True}) == []


def test_every_tile_wants_a_gpu(pytestconfig, pytester, monkeypatch):
    """Without a GPU ``--every-tile`` is a usage error that says what is needed."""
    monkeypatch.setattr(drawn, "ON_GPU", False)
    pytester.makeconftest((pytestconfig.rootpath / "conftest.py").read_text())
    result = pytester.runpytest_inprocess("--every-tile")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --every-tile: wanted a CUDA GPU, got none;*"])


def test_marks_are_on_tests_with_such_parameters():
    """Each ``drawn`` mark is on a test, and names its parameters; a GPU alone would tell."""
    marks = 0
    for path in Path(__file__).parent.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            for mark in getattr(node, "decorator_list", ()):
                if ast.unparse(mark).startswith("pytest.mark.drawn("):
                    marks += 1
                    assert node.name.startswith("test_")
                    parameters = {parameter.arg for parameter in node.args.args}
                    assert {name.value for name in mark.args} <= parameters, node.name
    assert marks
