"""Hypothesis strategies for problems, lengths, masks and samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import torch
from hypothesis import strategies as st

from flashattn.mask import UNBOUNDED, Causal, Window
from flashattn.problem import Lengths, Problem
from flashattn.testing.layouts import GRAD_LAYOUTS, LAYOUTS
from flashattn.testing.sample import Sample
from flashattn.testing.seed import chance
from flashattn.testing.values import VALUES

WHOLE_HEAD_DIMS = st.sampled_from((16, 32, 64, 128))
HEAD_DIMS = WHOLE_HEAD_DIMS | st.integers(1, 72)
EDGES = (31, 32, 33, 63, 64, 65)  # of tiles: one row short, a whole tile, one row into the next
# None is the usual one. Scores of normal values are about 1, so 0.7 caps them, and 50 hardly does.
SOFTCAPS = (None, None, None, 0.7, 50.0)
# Mostly none; else per score, shared by batches, per column or row, one number, or relative.
BIASES = ("",) * 8 + ("bhts", "1hts", "b11s", "bh1s", "1ht1", "11ts", "1111", "1hr", "bhr")
MASKS: tuple[Causal, ...] = (False, "top_left", "bottom_right")
SIDES = ((True, True), (True, False), (False, True))  # whether a window bounds left and right
SCALES = (None, 0.3, 0.0, -0.2)  # the default, an ordinary one, zero, a negative one
KINDS = 3  # kinds of problems in a run on a GPU, where each one takes seconds to compile
UNITS = (1, 8, 16)  # units of lengths, see ``lengths_of``


@lru_cache(None, typed=True)  # 1 is not True
def one_of(*options: Any) -> st.SearchStrategy[Any]:
    """Draw one of some options; cached, as Hypothesis examines each new strategy."""
    return st.sampled_from(options)


@cache
def lengths(shortest: int, longest: int) -> st.SearchStrategy[int]:
    """Draw a number of queries or keys: any number or, half the time, one at the edge of a tile."""
    edges = [n for n in (*EDGES, longest) if shortest <= n <= longest]
    return st.integers(shortest, longest) | st.sampled_from(edges)


@cache
def lengths_of(unit: int, shortest: int, longest: int) -> st.SearchStrategy[int]:
    """Draw a length as ``lengths`` does, of one unit, for which Triton compiles one kernel.

    The unit is the largest divisor of 16 that divides the length. A length of 1 is not drawn, as it
    has kernels of its own.
    """
    own = [n for n in range(max(shortest, 2), longest + 1) if math.gcd(n, 16) == unit]
    edges = [n for n in (*EDGES, longest) if n in own]
    return one_of(*own) | one_of(*edges) if edges else one_of(*own)


@cache
def windows(longest: int, bounded: tuple[bool, ...] = ()) -> st.SearchStrategy[Window]:
    """Draw a window's bound on each side: any number, a tile's edge, past all keys, or none."""
    bound = st.integers(0, longest) | st.sampled_from((0, *EDGES, 2 * longest))
    if bounded:
        left, right = (bound if x else st.none() for x in bounded)
        return st.tuples(left, right)
    return st.tuples(st.none() | bound, st.none() | bound)


def chooser(draw: st.DrawFn, kind: int | None) -> Callable[[str, tuple[Any, ...]], Any]:
    """Return a function that chooses among options that have their own compiled kernels.

    Without a kind each example draws its own. With one of ``KINDS`` the run's seed decides, so that
    tests with the same options share compiled kernels.
    """

    def choose(name: str, options: tuple[Any, ...]) -> Any:
        if kind is None:
            return draw(one_of(*options), label=name)
        dealt = [*options] * -(-KINDS // len(options))
        chance("kind", name).shuffle(dealt)
        return dealt[kind]

    return choose


@st.composite
def documents(draw: st.DrawFn, seq_q: int, seq_kv: int, longest: int) -> Lengths:
    """Draw packed documents: empty, of one row, of whole tiles, with rows after the last one.

    Half the time all have as many keys as queries, as far as there are rows.
    """
    square = draw(st.booleans(), label="square documents")
    rows = lengths(0, longest)
    drawn = [
        (n, n if square else draw(rows, label="keys"))
        for n in draw(st.lists(rows, min_size=1, max_size=4), label="documents")
    ]
    return fitted(drawn, seq_q, seq_kv)


def fitted(drawn: Iterable[tuple[int, int]], seq_q: int, seq_kv: int) -> Lengths:
    """Return documents, shortened where no rows are left."""
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
    groups: tuple[int, ...] = (1, 2, 3),  # query heads that share a key head
    masks: tuple[Causal, ...] = MASKS,
    windowed: tuple[bool, ...] = (False, False, True),
    packed: tuple[bool, ...] = (False,),  # whether there are documents
    prefixed: tuple[bool, ...] = (False,),  # whether a prefix replaces all masks but a left bound
    softcaps: tuple[float | None, ...] = SOFTCAPS,
    sloped: tuple[bool, ...] = (False,),  # whether there is ALiBi, which excludes documents
    biases: tuple[str, ...] = ("",),  # dimensions of a bias
    sunk: tuple[bool, ...] = (False,),  # whether there are sinks
    square: bool = False,  # as many keys as queries
    aligned: bool = False,  # multiples of 16: every matrix starts on a cache line
    head_dims: tuple[int, ...] = (),  # none means any, up to 128
    narrowed: tuple[bool, ...] = (False,),  # whether values have fewer columns than keys
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16"),
    kind: int | None = None,
) -> Problem:
    """Draw problems with empty, single, ragged and whole tiles, grouped heads and every mask.

    A tuple has the options to choose from. A kind below ``KINDS`` determines masks, scores and
    dtypes; without one each is drawn.
    """
    choose = chooser(draw, kind)
    kv_heads = choose("kv_heads", (1, 2))
    rows = lengths(shortest, longest)
    if kind is not None and longest >= max(UNITS):
        rows = lengths_of(choose("unit", UNITS), shortest, longest)
    if aligned:
        rows = st.integers(-(-shortest // 16), longest // 16).map(lambda n: 16 * n)
    dims = WHOLE_HEAD_DIMS if aligned else HEAD_DIMS
    dims = one_of(*head_dims) if head_dims else dims
    seq_q = draw(rows, label="seq_q")
    seq_kv = seq_q if square else draw(st.just(seq_q) | rows, label="seq_kv")
    head_dim = draw(dims, label="head_dim")
    narrow = choose("narrow", narrowed)
    alibi = choose("alibi", sloped)
    sides = () if kind is None else choose("sides", SIDES)
    problem = Problem(
        batch=choose("batch", batches),
        heads=kv_heads * choose("group", groups),
        kv_heads=kv_heads,
        seq_q=seq_q,
        seq_kv=seq_kv,
        head_dim=head_dim,
        value_dim=draw(st.integers(1, head_dim), label="value_dim") if narrow else None,
        causal=choose("causal", masks),
        window=draw(windows(longest, sides), label="window")
        if choose("windowed", windowed)
        else UNBOUNDED,
        documents=draw(documents(seq_q, seq_kv, longest), label="documents")
        if choose("packed", packed) and not alibi
        else None,
        softcap=choose("softcap", softcaps),
        alibi=alibi,
        bias=choose("bias", biases),
        sink=choose("sink", sunk),
        dtype=choose("dtype", dtypes),
    )
    if not choose("prefixed", prefixed):
        return problem
    window, prefix = (problem.window[0], None), draw(lengths(0, longest), label="prefix")
    return replace(problem, causal=False, window=window, documents=None, prefix=prefix)


@st.composite
def samples(
    draw: st.DrawFn,
    device: torch.device | str,
    solves: Callable[[Problem], bool],
    *,
    asked: dict[str, Any],
    strict: bool = True,
    scales: Sequence[float | None] = SCALES,
    kinds: Sequence[int] = (),
    **fixed: Any,
) -> Sample:
    """Draw samples: a problem that can be solved, and how its inputs are made.

    ``asked`` are arguments of ``problems``, ``fixed`` attributes of ``Sample`` that are not drawn.
    Unless ``strict``, values, layouts and scale are the ordinary ones. A kind is chosen from
    ``kinds``; without any, each sample draws its own options.
    """
    kind = draw(one_of(*kinds), label="kind") if kinds else None
    choose = chooser(draw, kind)
    seed = draw(st.integers(0, 2**31), label="seed")
    if kind is not None:  # its last bits select forms of biases and slopes (see ``make_scored``)
        seed = seed - seed % 4 + choose("seed", (0, 1, 2, 3))
    drawn: dict[str, Any] = {"seed": seed}
    if strict:
        drawn |= {
            "values": draw(one_of(*VALUES), label="values"),
            "scale": choose("scale", tuple(scales)),
            "layout": choose("layout", tuple(LAYOUTS)),
            "grad_layout": choose("grad_layout", tuple(GRAD_LAYOUTS)),
        }
    problem = draw(problems(**asked, kind=kind).filter(solves), label="problem")
    of_half = problem.dtype == "float16" and fixed.get("grad", True)
    if drawn.get("values") == "huge_v" and of_half and _sums_rows(problem):
        drawn["values"] = "normal"  # else a gradient of a bias or sink would overflow fp16
    return Sample(problem=problem, device=device, **drawn | fixed)


def _sums_rows(problem: Problem) -> bool:
    """Return whether a gradient of scores is summed over rows: that of a sink or a shared bias."""
    return problem.sink or problem.bias not in ("", "bhts")
