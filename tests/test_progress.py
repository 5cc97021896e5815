"""The progress line, and what it says about the time that is left."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flashattn.testing import progress


class Terminal:
    """A reporter that remembers what it was told to write."""

    isatty = False

    def __init__(self):
        """Nothing is written yet."""
        self.lines = []

    def write_line(self, line):
        """Remember a line."""
        self.lines.append(line)


SLOWLY = ["", " (0:10, about 0:30 left)", " (0:20, about 0:20 left)"]


@pytest.mark.parametrize(
    ("known", "left"), [((), SLOWLY), (("a", "d"), ["", "", " (0:20, about 0:20 left)"])]
)
def test_time_left_is_that_of_what_is_still_to_run(monkeypatch, known, left):
    """The rest takes as long for each case as those that ran; what was known does not count."""
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now.seconds)
    terminal = Terminal()
    line = progress.Progress(terminal, known)
    items = [SimpleNamespace(nodeid=name) for name in "abcd"]
    line.pytest_collection_finish(SimpleNamespace(items=items))
    for nodeid in "abc":
        line.pytest_runtest_logstart(nodeid)
        now.seconds += 10
        line.pytest_runtest_logfinish(nodeid)
    said = [f"[1/4] a{left[0]}", f"[2/4] b{left[1]}", f"[3/4] c{left[2]}"]
    assert terminal.lines == said
