"""Shrink a sample with Hypothesis while an implementation still fails on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import hypothesis
from hypothesis import strategies as st

from flashattn.mask import UNBOUNDED
from flashattn.testing.sample import Sample
from flashattn.testing.strategies import MASKS, fitted

T = TypeVar("T")

TRIES = 100  # each may compile a kernel
SECONDS = 20.0  # interpreted kernels are slow; the sample found by then is small enough
OWN = 50  # odds, to 1, that a drawn fact is the sample's own


def shrink(sample: Sample, fails: Callable[[Sample], bool]) -> Sample:
    """Return the smallest sample found for which ``fails`` holds, at worst ``sample`` itself."""
    end = time.perf_counter() + SECONDS
    known = {sample: True}

    def still(other: Sample) -> bool:
        if other not in known:
            known[other] = len(known) <= TRIES and time.perf_counter() < end and fails(other)
        return known[other]

    settings = hypothesis.settings(
        max_examples=100,  # most of which are ``sample``: there shrinking begins
        derandomize=True,
        database=None,
        deadline=None,
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
    )
    return hypothesis.find(_up_to(sample), still, settings=settings)


@st.composite
def _up_to(draw: st.DrawFn, sample: Sample) -> Sample:
    """Draw a sample with no fact larger or less plain than in ``sample``, most often the same."""

    def one(facts: Sequence[T]) -> T:
        """Draw one of some facts, the plainest first and the sample's own last."""
        return facts[min(draw(st.integers(0, OWN * len(facts))), len(facts) - 1)]

    def size(own: int) -> int:
        return one(range(min(own, 1), own + 1))

    p = sample.problem
    seq_q, seq_kv, head_dim = size(p.seq_q), size(p.seq_kv), size(p.head_dim)
    kept = fitted(p.documents, seq_q, seq_kv) if isinstance(p.documents, tuple) else None
    problem = replace(
        p,
        seq_q=seq_q,
        seq_kv=seq_kv,
        documents=one((None, kept)),
        prefix=one((None, p.prefix)),
        batch=size(p.batch),
        head_dim=head_dim,
        value_dim=one((None, min(p.dv, head_dim))),
        kv_heads=(kv_heads := size(p.kv_heads)),
        heads=kv_heads * size(p.heads // max(p.kv_heads, 1)),
        causal=one(MASKS[: MASKS.index(p.causal) + 1]),
        window=one((UNBOUNDED, p.window)),
        softcap=one((None, p.softcap)),
        alibi=one((False, p.alibi)),
        bias=one(("", p.bias)),
        sink=one((False, p.sink)),
        dtype=one(("float32", p.dtype)),
    )
    return replace(
        sample,
        problem=problem,
        values=one(("normal", sample.values)),
        layout=one(("contiguous", sample.layout)),
        grad_layout=one(("contiguous", sample.grad_layout)),
        scale=one((None, sample.scale)),
        seed=one((0, sample.seed)),
    )
