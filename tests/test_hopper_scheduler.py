"""Hopper's schedules: which tiles a CTA visits, and the order in which CTAs add to dQ."""

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from flashattn.bounds import Bounds, of_documents, of_rows
from flashattn.emulate.language import Number
from flashattn.emulate.memory import Pointer
from flashattn.emulate.source import Source
from flashattn.kernels.hopper import (
    backward_d256,
    backward_d256_dq,
    backward_tile,
    forward,
    scheduler,
    semaphore,
)
from flashattn.kernels.hopper import mask as device_mask
from flashattn.mask import Band, Mask
from flashattn.resolve import cumulative
from flashattn.testing.strategies import documents

NAMES = Source()._names  # aggregates as plain classes
TileScheduler, ShiftSchedule = (
    NAMES(scheduler.__name__)[name] for name in ("TileScheduler", "ShiftSchedule")
)
shift_schedule = NAMES(scheduler.__name__)["shift_schedule"]
DEVICE_MASK = NAMES(device_mask.__name__)["Mask"]
DqSemaphore = NAMES(semaphore.__name__)["DqSemaphore"]
ALL = 10**6  # more CTAs than any head has
FEW, SOME = st.integers(1, 5), st.integers(1, 12)
LAUNCHES = st.fixed_dictionaries(
    {"blocks": SOME, "heads": FEW, "section_heads": FEW, "wave_size": st.integers(1, 20)}
)


def schedules(*, blocks, heads, section_heads, wave_size, stagger=1):
    """Return for each (wave, head) the schedules of its key tiles, by block."""
    order, found = scheduler.ASCENDING.value, {}
    tiles = TileScheduler(blocks * heads, blocks, heads, section_heads, order)
    for tile in range(blocks * heads):
        block, _, head = tiles.tile_coord(tile)
        told = shift_schedule(tiles, tile, (wave_size, stagger), False)
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
    """A CTA knows which key tiles of its head run in its wave, and its own rank among them."""
    for blocks in schedules(**launch).values():
        begin, count = min(blocks), len(blocks)
        told = {block: (x.begin, x.count, x.rank) for block, x in blocks.items()}
        assert told == {begin + i: (begin, count, i) for i in range(count)}


@given(launch=LAUNCHES, stagger=FEW, end=SOME)
def test_everybody_has_a_turn(launch, stagger, end):
    """Every key tile adds to every query tile once, each at a turn of its own."""
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
    """Turns follow the order of visits, so no CTA waits for a later one, and none deadlocks."""
    wave = [ShiftSchedule(0, count, rank, stagger, False) for rank in range(count)]
    for i in range(end):
        order = sorted(wave, key=lambda x: (visits(x, end).index(i), x.rank))
        assert [turn(x, i, end) for x in order] == list(range(count))


@given(count=SOME, stagger=FEW, end=SOME)
def test_programs_keep_their_distance(count, stagger, end):
    """CTAs start ``stagger`` query tiles apart if there is room, the first at the last tile."""
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
    """With one CTA at a time each key tile is a wave, and visits query tiles from the last on."""
    alone = TileScheduler(12, 4, 3, 2, scheduler.ASCENDING.value)
    schedule = shift_schedule(alone, 5, (1, 4), False)
    assert (schedule.begin, schedule.count, schedule.rank) == (2, 1, 0)
    assert visits(schedule, 3) == [2, 1, 0]
    assert [turn(schedule, i, 3) for i in range(3)] == [2, 2, 2]


@given(block=SOME, accums=FEW, ordered=SOME)
def test_under_a_mask_turns_are_in_the_order_of_keys(block, accums, ordered):
    """Under a mask, the key tiles of an accumulator go in order; after ``ordered``, all at once."""
    schedule = ShiftSchedule(0, 5, 3, 4, True)
    assert visits(schedule, 7) == list(range(6, -1, -1))
    assert turn(schedule, 2, 7, block, accums, ordered) == min(block // accums, ordered)


@st.composite
def bands(draw):
    """Return a band with a left bound, shifted as in ``Options`` for either alignment."""
    seq_q, seq_kv = draw(st.integers(1, 700)), draw(st.integers(1, 700))
    left = draw(st.integers(0, 400) | st.sampled_from([0, 1, 63, 64, 65, 127, 129, 191, 193]))
    right = draw(st.none() | st.integers(0, 300))
    shift = draw(st.sampled_from([0, seq_kv - seq_q]))
    return Band(seq_q, seq_kv, left - shift, None if right is None else right + shift)


@st.composite
def rows(draw):
    """Return bounds of rows: of documents, or any that never decrease."""
    seq_q, seq_kv = draw(st.integers(1, 700)), draw(st.integers(1, 700))
    if draw(st.booleans()):
        packed, right = draw(documents(seq_q, seq_kv, 400)), draw(st.none() | st.integers(0, 200))
        left = draw(st.none() | st.integers(0, 200))
        mask = Mask(left, right, draw(st.sampled_from(["top_left", "bottom_right"])))
        return of_documents(*cumulative(packed, "cpu"), seq_q, seq_kv, mask)
    chance = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    low, high = torch.randint(0, seq_kv + 1, (2, 1, seq_q), generator=chance).sort().values
    return of_rows(low, high, seq_kv)


def mask_of(given):
    """Return the kernels' mask for a band or for bounds of rows."""
    if isinstance(given, Bounds):
        sizes = (given.keys.shape[1], given.queries.shape[1])
        return DEVICE_MASK(*map(Number, sizes), None, None, *(Pointer(x.flatten()) for x in given))
    numbers = given.seq_q, given.seq_kv, given.left, given.right
    return DEVICE_MASK(*(x if x is None else Number(x) for x in numbers))


def pairs(given, block_q, block_kv):
    """Return for each two tiles whether some score is visible, and whether all are."""
    band = given
    if isinstance(given, Bounds):
        (_, seq_q, _), seq_kv = given.keys.shape, given.queries.shape[1]
        padded = torch.zeros(seq_q + 128, seq_kv + 128, dtype=torch.bool)
        padded[:seq_q, :seq_kv] = given.seen[0]
        band = SimpleNamespace(sees=lambda t, s: padded[t, s], seq_q=seq_q, seq_kv=seq_kv)
    q, kv = -(-band.seq_q // block_q), -(-band.seq_kv // block_kv)
    t, s = torch.arange(q * block_q), torch.arange(kv * block_kv)
    seen = (band.sees(t[:, None], s) & (t < band.seq_q)[:, None]).unflatten(1, (kv, block_kv))
    tiles = seen.unflatten(0, (q, block_q)).transpose(1, 2).flatten(2)
    every = (band.sees(t[:, None], s) | (t >= band.seq_q)[:, None]).unflatten(1, (kv, block_kv))
    every = every.unflatten(0, (q, block_q)).transpose(1, 2).flatten(2)
    return tiles.any(2), every.all(2)


def runs_of(first, full_begin, full_end, end):
    """Return {tile: whether it is masked}, of tiles that are visited once each."""
    assert first <= full_begin <= full_end <= end
    return {i: not full_begin <= i < full_end for i in range(first, end)}


def agrees(visited, some, every):
    """Check that a tile visits all that it sees, and masks what it does not see in full."""
    assert {i for i, sees in enumerate(some.tolist()) if sees} <= set(visited)
    assert all(every[i] for i, masked in visited.items() if not masked)


@given(band=bands() | rows(), block_kv=st.sampled_from([64, 128]), wide=st.booleans())
def test_keys_that_a_mask_visits(band, block_kv, wide):
    """A query tile visits each key tile that it sees once, from the last to the first."""
    block_q = 128
    if wide:
        block_kv, module, tile = 64, backward_d256_dq, ()
    else:
        module, tile = forward, (SimpleNamespace(block_q=Number(block_q), block_kv=block_kv),)
    name = "visited_key_tiles" if wide else "visited_tiles"
    some, every = pairs(band, block_q, block_kv)
    for block in range(len(some)):
        mask = mask_of(band)
        first, *full, end = NAMES(module.__name__)[name](Number(block), mask, *tile)
        last = end - 1
        full[1] = min(full[1], last)
        order, descending_run = [(last, True)], NAMES(device_mask.__name__)["descending_run"]
        for run in range(2):
            start, stop, low = descending_run(run, first, *full, last, mask.two_sided)
            order += [(i, True) for i in range(start - 1, stop - 1, -1)]
            order += [(i, False) for i in range(stop - 1, low - 1, -1)]
        assert [i for i, _ in order] == list(range(last, first - 1, -1))
        agrees(dict(order), some[block], every[block])


@given(band=bands() | rows(), block_q=st.sampled_from([64, 128]))
def test_queries_that_a_mask_visits(band, block_q):
    """A key tile visits all query tiles that see it; turns at a query tile follow the keys."""
    mask, t = mask_of(band), SimpleNamespace(block_q=Number(block_q))
    names, turns = NAMES(backward_tile.__name__), {}
    some, every = (x.mT for x in pairs(band, block_q, 128))
    for block in range(len(some)):
        first, full_begin, full_end, end = names["visited_tiles"](Number(block), mask, t)
        visited = runs_of(first, min(full_begin, full_end), full_end, end)
        agrees(visited, some[block], every[block])
        assert not visited or max(visited) < some.shape[1]
        for i in visited:
            first = names["first_key_tile"](Number(i), mask, t)
            turns.setdefault(i, []).append(block - first)
    assert all(x == list(range(len(x))) for x in turns.values())
    assert {i for i, sees in enumerate(some.any(0).tolist()) if sees} <= set(turns)


@given(band=bands() | rows())
def test_queries_that_a_mask_visits_in_wide_heads(band):
    """For D > 128, a key tile visits all query tiles that see it, and at least one."""
    some, every = (x.mT for x in pairs(band, 64, 64))
    names, mask = NAMES(backward_d256.__name__), mask_of(band)
    for block in range(len(some)):
        visited = runs_of(*names["visited_query_tiles"](Number(block), mask))
        assert visited
        inside = {i: masked for i, masked in visited.items() if i < some.shape[1]}
        padded = every[block] | torch.tensor(block * 64 + 64 > mask.seq_kv)  # not stored
        agrees(inside, some[block], padded)
        assert all(masked for i, masked in visited.items() if i >= some.shape[1])
