"""Turns of the Hopper backward: all get one, in the order in which they come by."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flashattn.emulate.source import Source
from flashattn.kernels.hopper import scheduler, semaphore

PLAIN = Source()
place, round_of, nth = (
    PLAIN.plain(x) for x in (scheduler.place_kv, scheduler.round_of, scheduler.nth)
)
turn_at = PLAIN.plain(semaphore.turn_at)
ALL = 10**6  # more programs than any head has
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
            visits = [nth(n, number, count, apart, end, False) for n in range(end)]
            assert sorted(visits) == list(range(end))
            for i in visits:
                turn = turn_at(i, None, eldest, number, count, apart, end, 1, ALL, False)
                seen.setdefault((head, i), []).append(turn)
    assert len(seen) == launch["heads"] * end
    assert all(sorted(turn) == list(range(launch["blocks"])) for turn in seen.values())


@given(count=SOME, apart=FEW, end=SOME)
def test_turns_are_in_the_order_of_visits(count, apart, end):
    """So nobody waits for one that comes later, let alone for one that waits for it."""
    how = count, apart, end
    visits = [[nth(n, number, *how, False) for n in range(end)] for number in range(count)]
    for i in range(end):
        order = sorted(range(count), key=lambda number: (visits[number].index(i), number))
        turns_of = [turn_at(i, None, 0, number, *how, 1, ALL, False) for number in order]
        assert turns_of == list(range(count))


@given(count=SOME, apart=FEW, end=SOME)
def test_programs_keep_their_distance(count, apart, end):
    """They begin ``apart``, if there is room; the first one with the last tile."""
    begins = [nth(0, number, count, apart, end, False) for number in range(count)]
    wanted = [(number * apart - 1) % end for number in range(count)]
    assert begins[0] == end - 1
    if apart * count <= end:
        assert begins == wanted
    if count <= end:
        assert len(set(begins)) == count


def test_alone():
    """One at a time: each block is a round, which begins with the last tile and goes on."""
    assert round_of(5, 12, 4, 2, 1) == (2, 1, 0)
    assert [nth(n, 0, 1, 4, 3, False) for n in range(3)] == [2, 1, 0]
    assert [turn_at(i, None, 2, 0, 1, 4, 3, 1, ALL, False) for i in range(3)] == [2, 2, 2]


@given(block=SOME, slabs=FEW, ordered=SOME)
def test_under_a_mask_turns_are_in_the_order_of_keys(block, slabs, ordered):
    """Of those that share a slab; past those that are ordered all have the same."""
    assert [nth(n, 3, 5, 4, 7, True) for n in range(7)] == list(range(6, -1, -1))
    turn = turn_at(2, block, 0, 3, 5, 4, 7, slabs, ordered, True)
    assert turn == min(block // slabs, ordered)
