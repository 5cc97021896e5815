"""Turns of the Hopper backward: all get one, in the order in which they come by."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flashattn.emulate.source import Source
from flashattn.kernels.hopper import scheduler, semaphore

NAMES = Source()._names  # aggregates as plain classes
TileScheduler, ShiftSchedule = (
    NAMES(scheduler.__name__)[name] for name in ("TileScheduler", "ShiftSchedule")
)
shift_schedule = NAMES(scheduler.__name__)["shift_schedule"]
DqSemaphore = NAMES(semaphore.__name__)["DqSemaphore"]
ALL = 10**6  # more CTAs than any head has
FEW, SOME = st.integers(1, 5), st.integers(1, 12)
LAUNCHES = st.fixed_dictionaries(
    {"blocks": SOME, "heads": FEW, "section_heads": FEW, "wave_size": st.integers(1, 20)}
)


def schedules(*, blocks, heads, section_heads, wave_size, stagger=1):
    """Return the blocks of (wave, head): their tile's schedule."""
    order, found = scheduler.ASCENDING.value, {}
    tiles = TileScheduler(blocks * heads, blocks, heads, section_heads, order)
    for tile in range(blocks * heads):
        block, _, head = tiles.tile_coord(tile)
        told = shift_schedule(tiles, tile, wave_size, stagger, False)
        found.setdefault((tile // wave_size, head), {})[block] = told
    return found


def visits(schedule, end):
    """Return the query tiles in the order of visits."""
    return [schedule.query_tile(n, end) for n in range(end)]


def turn(schedule, i, end, block=None, accums=1, ordered=ALL):
    """Return the semaphore's value that a key tile waits for."""
    return DqSemaphore(None, accums, ordered).value(schedule, i, end, block, 0)


@given(launch=LAUNCHES)
def test_waves(launch):
    """Those of a head that run at once are told so, and each is another of them."""
    for blocks in schedules(**launch).values():
        begin, count = min(blocks), len(blocks)
        told = {block: (x.begin, x.count, x.rank) for block, x in blocks.items()}
        assert told == {begin + i: (begin, count, i) for i in range(count)}


@given(launch=LAUNCHES, stagger=FEW, end=SOME)
def test_everybody_has_a_turn(launch, stagger, end):
    """All blocks add to every tile of queries: one each, those of an earlier wave before."""
    seen = {}
    for (_, head), blocks in schedules(**launch, stagger=stagger).items():
        for schedule in blocks.values():
            assert sorted(visits(schedule, end)) == list(range(end))
            for i in visits(schedule, end):
                seen.setdefault((head, i), []).append(turn(schedule, i, end))
    assert len(seen) == launch["heads"] * end
    assert all(sorted(turns) == list(range(launch["blocks"])) for turns in seen.values())


@given(count=SOME, stagger=FEW, end=SOME)
def test_turns_are_in_the_order_of_visits(count, stagger, end):
    """So nobody waits for one that comes later, let alone for one that waits for it."""
    wave = [ShiftSchedule(0, count, rank, stagger, False) for rank in range(count)]
    for i in range(end):
        order = sorted(wave, key=lambda x: (visits(x, end).index(i), x.rank))
        assert [turn(x, i, end) for x in order] == list(range(count))


@given(count=SOME, stagger=FEW, end=SOME)
def test_programs_keep_their_distance(count, stagger, end):
    """They begin ``stagger`` apart, if there is room; the first one with the last tile."""
    begins = [
        ShiftSchedule(0, count, rank, stagger, False).query_tile(0, end) for rank in range(count)
    ]
    wanted = [(rank * stagger - 1) % end for rank in range(count)]
    assert begins[0] == end - 1
    if stagger * count <= end:
        assert begins == wanted
    if count <= end:
        assert len(set(begins)) == count


def test_alone():
    """One at a time: each block is a wave, which begins with the last tile and goes on."""
    alone = TileScheduler(12, 4, 3, 2, scheduler.ASCENDING.value)
    schedule = shift_schedule(alone, 5, 1, 4, False)
    assert (schedule.begin, schedule.count, schedule.rank) == (2, 1, 0)
    assert visits(schedule, 3) == [2, 1, 0]
    assert [turn(schedule, i, 3) for i in range(3)] == [2, 2, 2]


@given(block=SOME, accums=FEW, ordered=SOME)
def test_under_a_mask_turns_are_in_the_order_of_keys(block, accums, ordered):
    """Of those that share an accumulator; past those that are ordered all have the same."""
    schedule = ShiftSchedule(0, 5, 3, 4, True)
    assert visits(schedule, 7) == list(range(6, -1, -1))
    assert turn(schedule, 2, 7, block, accums, ordered) == min(block // accums, ordered)
