"""Hypothesis strategies: problems, values and layouts as a vocabulary."""

from __future__ import annotations

from hypothesis import strategies as st

from flashattn.problem import Problem
from flashattn.testing.inputs import LAYOUTS, VALUES

HEAD_DIMS = st.sampled_from((16, 32, 64, 128)) | st.integers(1, 72)


@st.composite
def problems(
    draw: st.DrawFn,
    *,
    longest: int = 100,
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16"),
) -> Problem:
    """Draw problems with empty, single, ragged and whole tiles, grouped heads and every mask.

    Args:
        draw: Hypothesis passes it.
        longest: the most queries and keys.
        dtypes: to choose from.
    """
    kv_heads = draw(st.integers(1, 2), label="kv_heads")
    lengths = st.integers(0, longest)
    seq_q = draw(lengths, label="seq_q")
    return Problem(
        batch=draw(st.sampled_from((1, 2, 0)), label="batch"),
        heads=kv_heads * draw(st.integers(1, 3), label="group"),
        kv_heads=kv_heads,
        seq_q=seq_q,
        seq_kv=draw(st.just(seq_q) | lengths, label="seq_kv"),
        head_dim=draw(HEAD_DIMS, label="head_dim"),
        causal=draw(st.sampled_from((False, "top_left", "bottom_right")), label="causal"),
        dtype=draw(st.sampled_from(dtypes), label="dtype"),
    )


def values() -> st.SearchStrategy[str]:
    """Draw the name of a distribution of inputs, ordinary ones first."""
    return st.sampled_from(tuple(VALUES))


def layouts() -> st.SearchStrategy[str]:
    """Draw the name of a memory layout, contiguous first."""
    return st.sampled_from(tuple(LAYOUTS))


def scales() -> st.SearchStrategy[float | None]:
    """Draw a factor on the scores: the default, an ordinary one, zero, or a negative one."""
    return st.sampled_from((None, 0.3, 0.0, -0.2))
