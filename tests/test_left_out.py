"""Tests that cannot run here are left out, or skipped on request; the header says why."""

import pytest

from flashattn.testing import left_out

TESTS = """
import pytest


def why_not(impl, size):
    return f"{impl.name} is too slow" if impl.name == "naive" and size > 1 else None


@pytest.mark.why_not.with_args(why_not)
@pytest.mark.parametrize("size", [1, 2])
def test_of_each(impl, size):
    pass


@pytest.mark.gpu
def test_of_a_gpu():
    pass


@pytest.mark.interpreter
def test_of_the_interpreter():
    pass
"""


@pytest.mark.interpreter
@pytest.mark.parametrize(("shown", "skipped"), [((), 0), (("--left-out",), 3)])
def test_what_cannot_run_is_left_out(pytester, request, shown, skipped):
    """Tests for a GPU, for unavailable implementations, or that refuse one are not collected."""
    pytester.makeconftest((request.config.rootpath / "conftest.py").read_text())
    pytester.makepyfile(TESTS)
    impls = ("--impl=naive", "--impl=reference", "--impl=hopper")
    result = pytester.runpytest_inprocess(*impls, *shown, "-rs")
    result.assert_outcomes(passed=3, skipped=skipped)
    result.stdout.fnmatch_lines(["left out: hopper: needs *"])
    for reason in ("naive is too slow", "hopper needs *") * bool(shown):
        result.stdout.fnmatch_lines(f"SKIPPED * {reason}")


def test_the_header():
    """One line names the implementations that are left out, and one those that are tested less."""
    lines = left_out.header(["reference", "naive", "compiled"])
    assert [line for line in lines if "marked gpu" not in line] == [
        "asked less: naive: ordinary inputs only, no logsumexp",
        "asked less: compiled: ordinary inputs only, no logsumexp, few shapes, as each is compiled",
    ]
