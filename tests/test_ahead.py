"""Compiling ahead: what is asked here was asked before, and what goes wrong there stays there."""

from __future__ import annotations

import os
from contextlib import closing

from flashattn.problem import Problem
from flashattn.testing import ahead
from flashattn.testing.accuracy import Question
from flashattn.testing.ahead import Ahead, workers_for

GOOD = Question(problem=Problem(seq_q=4, head_dim=8))
BAD = Question(problem=Problem(seq_q=4, head_dim=8), values="unheard of")


def test_questions_are_asked_in_another_process():
    """A question is asked once it was waited for; its error is returned and not raised."""
    with closing(Ahead("reference", [GOOD, BAD], 1)) as others:
        assert others.wait(GOOD) is None
        assert isinstance(others.wait(BAD), KeyError)
        assert others.wait(Question(problem=Problem(seq_q=5))) is None


def test_without_processes_nothing_is_waited_for(monkeypatch):
    """With no workers no process is started, and waiting returns at once."""
    monkeypatch.setattr(ahead, "ProcessPoolExecutor", None)
    with closing(Ahead("nobody", [BAD], 0)) as others:
        assert others.wait(BAD) is None


def test_few_questions_are_not_worth_a_process(monkeypatch):
    """Processes are as many as half the cores and a quarter of the questions, 8 at most."""
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert [workers_for(n) for n in (1, 7, 8, 20, 32, 500)] == [0, 0, 2, 5, 8, 8]
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert workers_for(500) == 0
