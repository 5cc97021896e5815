"""Every wrong kernel of the corpus is caught by the test it names; no right one is called wrong."""

from __future__ import annotations

import inspect
import itertools
import runpy
import sys
from functools import lru_cache
from pathlib import Path
from unittest.mock import patch

import hypothesis
import pytest
import torch

from flashattn.testing import accuracy

HERE = Path(__file__).parent
TESTS = HERE.parents[1]
sys.path.append(str(HERE))  # the tables import their parts by name


def rows(name):
    """Return the rows of a table."""
    parts = runpy.run_path(str(HERE / name))["kernel"].__globals__
    found = list(parts["ROWS"])
    parts["ROWS"].clear()
    return found


WRONG, RIGHT = rows("wrong.py"), rows("right_ones.py")
FILES = ("test_impls.py", "test_laws.py", "test_conduct.py", "test_sizes.py")
FILES += ("test_masks.py", "test_scores.py")
FOUND = {
    name: x
    for file in FILES
    for name, x in runpy.run_path(str(TESTS / file)).items()
    if name.startswith("test_") and "impl" in inspect.signature(x).parameters
}
CONCERNED = "tests/mutants/own_kernels", *(f"tests/{file}" for file in FILES)
SIZES = ("test_every_kind_of_length", "test_every_head_dim", "test_every_number_of_heads")
CPU = torch.device("cpu")


def ask(test, impl):
    """Run a test with each of its parameters that apply to the implementation."""
    marks = getattr(test, "pytestmark", [])
    axes = [mark.args for mark in marks if mark.name == "parametrize"]
    names = [[x.strip() for x in (n.split(",") if isinstance(n, str) else n)] for n, _ in axes]
    for values in itertools.product(*(values for _, values in axes)):
        given = {"impl": impl, "device": CPU}
        for keys, value in zip(names, values, strict=True):
            given |= dict(zip(keys, value if len(keys) > 1 else (value,), strict=True))
        asked = [mark.args[0] for mark in marks if mark.name == "why_not"]
        asked = [f(**{n: given[n] for n in inspect.signature(f).parameters}) for f in asked]
        if any(asked) or any(mark.name == "gpu" for mark in marks):
            continue
        try:
            test(**given)
        except pytest.skip.Exception:
            continue


@pytest.fixture(autouse=True)
def _at_once():
    """Stop at the first failure, without shrinking it."""
    before = hypothesis.settings()
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    few = {"database": None, "phases": phases, "max_examples": before.max_examples // 4}
    hypothesis.settings.register_profile("at once", before, **few)
    hypothesis.settings.load_profile("at once")
    yield
    hypothesis.settings.register_profile("before", before)
    hypothesis.settings.load_profile("before")


@pytest.mark.mutants
@pytest.mark.concerns(*CONCERNED)
@pytest.mark.parametrize("row", WRONG, ids=str)
def test_wrong_kernel(row):
    """A wrong kernel fails the test that the table names."""
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        ask(FOUND[row.caught], row.impl)


@pytest.fixture(scope="module")
def _references():
    """Cache the expected results, which are the same for every kernel."""
    with patch.object(accuracy, "_small", lru_cache(maxsize=2048)(accuracy._expected)):
        yield


@pytest.mark.mutants
@pytest.mark.concerns(*CONCERNED)
@pytest.mark.usefixtures("_references")
@pytest.mark.parametrize("row", RIGHT, ids=str)
def test_right_kernel(row):
    """A right kernel passes all tests; slow tests of many sizes run on the first kernel only."""
    for name, test in FOUND.items():
        if name not in SIZES or row is RIGHT[0]:
            ask(test, row.impl)


def test_tables():
    """Each name is unique, and each test exists."""
    names = [row.name for row in WRONG + RIGHT]
    assert len(set(names)) == len(names)
    assert {row.caught for row in WRONG} <= set(FOUND)
    assert len(WRONG) >= 60
    assert len(RIGHT) >= 15
    assert not any(row.caught for row in RIGHT)
