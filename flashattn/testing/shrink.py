"""Makes a question smaller for as long as an implementation still fails on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from flashattn.problem import Causal
from flashattn.testing.accuracy import Question

SECONDS = 20.0  # interpreted kernels are slow; what is found by then is small enough
Questions = Iterator[Question]


def shrink(
    question: Question, fails: Callable[[Question], bool], *, seconds: float = SECONDS
) -> Question:
    """Return the smallest question found on which it fails, ``question`` itself at worst.

    Args:
        question: one on which it fails.
        fails: whether it fails on another.
        seconds: after which no other is tried.
    """
    end = time.perf_counter() + seconds
    before = None
    while question != before:  # what is one step's limit may fall once others were taken
        before = question
        for step in STEPS:
            found: Question | None = question
            while found is not None:
                question = found
                candidates = (
                    candidate for candidate in step(question) if time.perf_counter() < end
                )
                found = next((candidate for candidate in candidates if fails(candidate)), None)
    return question


def _plainer(question: Question) -> Questions:
    plain: dict[str, Any] = {"values": "normal", "layout": "contiguous", "scale": None, "seed": 0}
    for name, value in plain.items():
        if getattr(question, name) != value:
            yield replace(question, **{name: value})


def _shorter(question: Question) -> Questions:
    p = question.problem
    if p.seq_q == p.seq_kv:
        yield from _with(question, *({"seq_q": n, "seq_kv": n} for n in _less(p.seq_q)))


def _of_one_group(question: Question) -> Questions:
    p = question.problem
    if p.kv_heads > 1:
        yield from _with(question, {"heads": p.heads // p.kv_heads, "kv_heads": 1})


def _of_fewer_heads(question: Question) -> Questions:
    p = question.problem
    yield from _with(
        question, *({"heads": p.kv_heads * n} for n in _less(p.heads // max(p.kv_heads, 1)))
    )


def _less_masked(question: Question) -> Questions:
    masks: list[Causal] = [False, "top_left", "bottom_right"]
    simple = masks[: masks.index(question.problem.causal)]
    yield from _with(question, *({"causal": mask} for mask in simple))


def _wider(question: Question) -> Questions:
    if question.problem.dtype != "float32":
        yield from _with(question, {"dtype": "float32"})


def _less_of(size: str) -> Callable[[Question], Questions]:
    def step(question: Question) -> Questions:
        return _with(question, *({size: n} for n in _less(getattr(question.problem, size))))

    return step


STEPS = (
    _shorter,
    *map(_less_of, ("batch", "seq_q", "seq_kv", "head_dim")),
    _of_one_group,
    _of_fewer_heads,
    _less_masked,
    _wider,
    _plainer,
)


def _with(question: Question, *changes: dict[str, Any]) -> Questions:
    """Yield the question with each of the changes to its problem."""
    for change in changes:
        yield replace(question, problem=replace(question.problem, **change))


def _less(n: int) -> list[int]:
    """Return numbers from 1 to n - 1: the least, half, the power of two below, one less."""
    return sorted({m for m in (1, n // 2, 1 << max(n - 1, 1).bit_length() - 1, n - 1) if 0 < m < n})
