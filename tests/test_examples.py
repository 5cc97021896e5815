"""Hypothesis examples are counted, and a whole run must draw as many as it promises."""

from pathlib import Path
from types import SimpleNamespace

import hypothesis
import pytest
from hypothesis import strategies as st

from flashattn.testing import examples
from flashattn.testing.examples import Count


def test_count(monkeypatch):
    """Examples that pass are counted once each; rejected and failing ones are not."""
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


@pytest.mark.parametrize(
    ("drawn", "asked", "few"), [(0, {}, True), (9, {}, False), (0, {"keyword": "a"}, False)]
)
def test_enough_examples(monkeypatch, drawn, asked, few):
    """A run of all tests that draws fewer examples than it promises fails."""
    monkeypatch.setattr(Count, "all", drawn)
    monkeypatch.setattr(examples, "promised", lambda: 8)
    option = lambda name, _: asked.get(name)  # noqa: E731
    config = SimpleNamespace(args=["tests"], rootpath=Path("/"), getoption=option)
    session, said = SimpleNamespace(config=config, exitstatus=0), []
    examples.pytest_sessionfinish(session, 0)
    assert session.exitstatus == int(few)
    examples.pytest_terminal_summary(SimpleNamespace(config=config, write_line=said.append))
    assert ("too few: wanted 8" in "".join(said)) == few
