"""Turns of the Hopper backward: all get one, in the order in which they come by."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flashattn.emulate.source import Source
from flashattn.kernels.hopper import turns

PLAIN = Source()
round_of, nth, rank = (PLAIN.plain(x) for x in (turns.round_of, turns.nth, turns.rank))
place = PLAIN.plain(turns.place)
FEW, SOME = st.integers(1, 5), st.integers(1, 12)
LAUNCHES = st.fixed_dictionaries(
    {"blocks": SOME, "heads": FEW, "band": FEW, "at_once": st.integers(1, 20)}
)


def rounds(*, blocks, heads, band, at_once):
    """Return the blocks of (round, head): their tile, and what ``round_of`` says of it."""
    tiles, found = blocks * heads, {}
    for tile in range(tiles):
        block, _, head = place(tile, tiles, blocks, heads, band)
        told = round_of(tile, tiles, blocks, band, at_once)
        found.setdefault((tile // at_once, head), {})[block] = told
    return found


@given(launch=LAUNCHES)
def test_rounds(launch):
    """Those of a head that run at once are told so, and each is another of them."""
    for blocks in rounds(**launch).values():
        eldest, count = min(blocks), len(blocks)
        assert blocks == {eldest + i: (eldest, count, i) for i in range(count)}


@given(launch=LAUNCHES, apart=FEW, end=SOME)
def test_everybody_has_a_turn(launch, apart, end):
    """All blocks add to every tile of queries: one each, those of an earlier round before."""
    seen = {}
    for (_, head), blocks in rounds(**launch).items():
        for eldest, count, number in blocks.values():
            visits = [nth(n, number, count, apart, end) for n in range(end)]
            assert sorted(visits) == list(range(end))
            for i in visits:
                turn = eldest + rank(i, number, count, apart, end)
                seen.setdefault((head, i), []).append(turn)
    assert len(seen) == launch["heads"] * end
    assert all(sorted(turn) == list(range(launch["blocks"])) for turn in seen.values())


@given(count=SOME, apart=FEW, end=SOME)
def test_turns_are_in_the_order_of_visits(count, apart, end):
    """So nobody waits for one that comes later, let alone for one that waits for it."""
    visits = [[nth(n, number, count, apart, end) for n in range(end)] for number in range(count)]
    for i in range(end):
        order = sorted(range(count), key=lambda number: (visits[number].index(i), number))
        assert [rank(i, number, count, apart, end) for number in order] == list(range(count))


@given(count=SOME, apart=FEW, end=SOME)
def test_programs_keep_their_distance(count, apart, end):
    """They begin ``apart``, if there is room; the first one with the last tile."""
    begins = [nth(0, number, count, apart, end) for number in range(count)]
    wanted = [(number * apart - 1) % end for number in range(count)]
    assert begins[0] == end - 1
    if apart * count <= end:
        assert begins == wanted
    if count <= end:
        assert len(set(begins)) == count


def test_alone():
    """One at a time: each block is a round, which begins with the last tile and goes on."""
    assert round_of(5, 12, 4, 2, 1) == (2, 1, 0)
    assert [nth(n, 0, 1, 4, 3) for n in range(3)] == [2, 1, 0]
    assert [rank(i, 0, 1, 4, 3) for i in range(3)] == [0, 0, 0]
