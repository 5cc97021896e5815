"""Hypothesis strategies: problems, values, layouts, scales and samples as a vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from typing import Any

import torch
from hypothesis import strategies as st

from flashattn.mask import UNBOUNDED, Causal, Window
from flashattn.problem import Lengths, Problem
from flashattn.testing.layouts import GRAD_LAYOUTS, LAYOUTS
from flashattn.testing.sample import Sample
from flashattn.testing.values import VALUES

WHOLE_HEAD_DIMS = st.sampled_from((16, 32, 64, 128))
HEAD_DIMS = WHOLE_HEAD_DIMS | st.integers(1, 72)
EDGES = (31, 32, 33, 63, 64, 65)  # of tiles: one row short, whole, one row into the next
# None is the usual one; scores of normal values are about 1, so that 0.7 caps, and 50 hardly.
SOFTCAPS = (None, None, None, 0.7, 50.0)
# None most often; of each score, of all batches, of rows or columns, of all, of distances.
BIASES = ("",) * 8 + ("bhts", "1hts", "b11s", "bh1s", "1ht1", "11ts", "1111", "1hr", "bhr")
MASKS: tuple[Causal, ...] = (False, "top_left", "bottom_right")


@lru_cache(None, typed=True)  # 1 is not True
def one_of(*options: Any) -> st.SearchStrategy[Any]:
    """Draw one of some options; made once, as Hypothesis examines each new strategy."""
    return st.sampled_from(options)


@cache
def lengths(shortest: int, longest: int) -> st.SearchStrategy[int]:
    """Draw how many queries or keys: any number, and every other time one at the edge of a tile."""
    edges = [n for n in (*EDGES, longest) if shortest <= n <= longest]
    return st.integers(shortest, longest) | st.sampled_from(edges)


@cache
def windows(longest: int) -> st.SearchStrategy[Window]:
    """Draw how far a query sees on either side: any number, an edge of a tile, all or no bound."""
    bound = st.none() | st.integers(0, longest) | st.sampled_from((0, *EDGES, 2 * longest))
    return st.tuples(bound, bound)


@st.composite
def documents(draw: st.DrawFn, seq_q: int, seq_kv: int, longest: int) -> Lengths:
    """Draw packed documents: empty ones, of one row, of whole tiles, and rows behind the last.

    Half of them have as many keys as queries, as far as there are rows.
    """
    square = draw(st.booleans(), label="square documents")
    rows = lengths(0, longest)
    drawn = [
        (n, n if square else draw(rows, label="keys"))
        for n in draw(st.lists(rows, min_size=1, max_size=4), label="documents")
    ]
    return fitted(drawn, seq_q, seq_kv)


def fitted(drawn: Iterable[tuple[int, int]], seq_q: int, seq_kv: int) -> Lengths:
    """Return documents, the later ones cut where there are no rows left."""
    found = []
    for t, s in drawn:
        found.append((min(t, seq_q), min(s, seq_kv)))
        seq_q, seq_kv = seq_q - found[-1][0], seq_kv - found[-1][1]
    return tuple(found)


@st.composite
def problems(
    draw: st.DrawFn,
    *,
    shortest: int = 0,
    longest: int = 100,
    batches: tuple[int, ...] = (1, 2, 0),
    groups: tuple[int, ...] = (1, 2, 3),
    masks: tuple[Causal, ...] = MASKS,
    windowed: tuple[bool, ...] = (False, False, True),
    packed: tuple[bool, ...] = (False,),
    softcaps: tuple[float | None, ...] = SOFTCAPS,
    sloped: tuple[bool, ...] = (False,),
    biases: tuple[str, ...] = ("",),
    sunk: tuple[bool, ...] = (False,),
    square: bool = False,
    aligned: bool = False,
    head_dims: tuple[int, ...] = (),
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16"),
) -> Problem:
    """Draw problems with empty, single, ragged and whole tiles, grouped heads and every mask.

    Args:
        draw: Hypothesis passes it.
        shortest: the fewest queries and keys.
        longest: the most queries and keys.
        batches: to choose from.
        groups: to choose from: query heads that share a key head.
        masks: to choose from.
        windowed: to choose from: whether there is a window.
        packed: to choose from: whether there are documents.
        softcaps: to choose from.
        sloped: to choose from: whether there is ALiBi, which documents exclude.
        biases: to choose from: dimensions of a bias.
        sunk: to choose from: whether there are sinks.
        square: as many keys as queries.
        aligned: sizes are multiples of 16, so that no matrix begins off a cache line.
        head_dims: to choose from; none means any, up to 128.
        dtypes: to choose from.
    """
    kv_heads = draw(st.integers(1, 2), label="kv_heads")
    rows = lengths(shortest, longest)
    if aligned:
        rows = st.integers(-(-shortest // 16), longest // 16).map(lambda n: 16 * n)
    dims = WHOLE_HEAD_DIMS if aligned else HEAD_DIMS
    dims = one_of(*head_dims) if head_dims else dims
    seq_q = draw(rows, label="seq_q")
    seq_kv = seq_q if square else draw(st.just(seq_q) | rows, label="seq_kv")
    alibi = draw(one_of(*sloped), label="alibi")
    return Problem(
        batch=draw(one_of(*batches), label="batch"),
        heads=kv_heads * draw(one_of(*groups), label="group"),
        kv_heads=kv_heads,
        seq_q=seq_q,
        seq_kv=seq_kv,
        head_dim=draw(dims, label="head_dim"),
        causal=draw(one_of(*masks), label="causal"),
        window=draw(windows(longest), label="window")
        if draw(one_of(*windowed), label="windowed")
        else UNBOUNDED,
        documents=draw(documents(seq_q, seq_kv, longest), label="documents")
        if draw(one_of(*packed), label="packed") and not alibi
        else None,
        softcap=draw(one_of(*softcaps), label="softcap"),
        alibi=alibi,
        bias=draw(one_of(*biases), label="bias"),
        sink=draw(one_of(*sunk), label="sink"),
        dtype=draw(one_of(*dtypes), label="dtype"),
    )


def values() -> st.SearchStrategy[str]:
    """Draw the name of a distribution of inputs, ordinary ones first."""
    return st.sampled_from(tuple(VALUES))


def layouts() -> st.SearchStrategy[str]:
    """Draw the name of a memory layout, contiguous first."""
    return st.sampled_from(tuple(LAYOUTS))


def grad_layouts() -> st.SearchStrategy[str]:
    """Draw the name of a memory layout of gradients, contiguous first."""
    return st.sampled_from(tuple(GRAD_LAYOUTS))


def scales() -> st.SearchStrategy[float | None]:
    """Draw a factor on the scores: the default, an ordinary one, zero, or a negative one."""
    return st.sampled_from((None, 0.3, 0.0, -0.2))


def samples(
    device: torch.device | str,
    solves: Callable[[Problem], bool],
    *,
    asked: st.SearchStrategy[Problem],
    strict: bool = True,
    **fixed: object,
) -> st.SearchStrategy[Sample]:
    """Draw samples: a problem, and how its inputs are made.

    Args:
        device: where.
        solves: whether a problem can be asked at all.
        asked: to choose from.
        strict: any values, layout and scale, or only the ordinary.
        fixed: attributes of ``Sample`` that are not drawn.
    """
    drawn: dict[str, st.SearchStrategy[object]] = {"seed": st.integers(0, 2**31)}
    if strict:
        drawn |= {"values": values(), "scale": scales()}
        drawn |= {"layout": layouts(), "grad_layout": grad_layouts()}
    drawn |= {name: st.just(value) for name, value in fixed.items()}
    return st.builds(Sample, problem=asked.filter(solves), device=st.just(device), **drawn)
