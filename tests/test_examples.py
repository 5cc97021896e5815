"""Examples are counted, and a whole run draws as many as it promises."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st

from flashattn import registry
from flashattn.testing.examples import Count
from flashattn.testing.law import share

# Times the profile's examples per property: on a CPU 600 by default, 6000 in the thorough profile;
# on a GPU, whose profiles have five times the examples, 1000 and 10 000.
PROMISED = {"cpu": 30, "cuda": 10}
CHOOSE = (
    "keyword",
    "markexpr",
    "deselect",
    "ignore",
    "ignore_glob",
    "impl",
    "lf",
    "stepwise",
)


def test_count(monkeypatch):
    """Examples that pass are counted, once each; rejected and failing ones are not."""
    monkeypatch.setattr(Count, "passed", 0)

    @hypothesis.settings(max_examples=7, database=None)
    @hypothesis.given(number=st.integers(0, 2**31))
    @Count.of
    @Count.of
    def odd(number):
        hypothesis.assume(number % 2)

    odd()
    assert Count.passed == 7

    @Count.of
    def wrong():
        raise AssertionError

    with pytest.raises(AssertionError):
        wrong()
    assert Count.passed == 7


COUNTED = """
import hypothesis
import pytest
from hypothesis import strategies as st

from flashattn.testing.law import law

LESS = hypothesis.settings(max_examples=8)


@pytest.mark.parametrize("again", [False, True])
@LESS
@hypothesis.given(number=st.integers())
def test_given(impl, again, number):
    pass


@law()
def test_law(impl, question):
    pass
"""


def test_summary(pytester, request, device):
    """The summary says how many examples passed, of properties and of laws, which draw a share."""
    pytester.makepyfile(COUNTED)
    pytester.makeconftest((request.config.rootpath / "conftest.py").read_text())
    result = pytester.runpytest_subprocess(
        "--impl", "reference", "--hypothesis-profile", "quick", "-p", "no:cacheprovider"
    )
    of_the_law = share(registry.get("reference"), device, "quick")
    result.stdout.fnmatch_lines([f"hypothesis: {2 * 8 + of_the_law} examples passed"])


@pytest.mark.last
def test_enough_examples(request, device):
    """A run of all tests holds its properties on as many examples as it promises."""
    config = request.config
    if config.args not in (["tests"], [str(config.rootpath / "tests")]):
        pytest.skip("only some files were asked for")
    if any(config.getoption(name, None) for name in CHOOSE):
        pytest.skip("only some tests were asked for")
    assert Count.passed >= PROMISED[device.type] * hypothesis.settings().max_examples
