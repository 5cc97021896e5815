"""Plans of context parallelism: every rank computes its share, from what it has or is sent."""

from itertools import product

import pytest
import torch

from flashattn import masks
from flashattn.bounds import Bounds
from flashattn.mask import Mask
from flashattn.parallel.placement import KINDS, Placement
from flashattn.parallel.plan import Task, plan, size
from flashattn.parallel.rows import local_bounds
from flashattn.resolve import bounds_of

LENGTHS = [(16, 16), (24, 24), (13, 13), (13, 24), (24, 13), (2, 2), (3, 17), (17, 3), (1, 9)]
BOUNDS = [(None, None), (None, 0), (4, 0), (0, 3), (2, 5), (None, 6), (7, None), (0, 0), (40, 1)]
MASKS = [Mask(*x, corner) for x, corner in product(BOUNDS, ("top_left", "bottom_right"))]


def owned(placement, length, rank):
    """Return the positions of a rank's rows in the sequence, in their order on the rank."""
    chunks = [x for x in placement.chunks(length) if x.rank == rank]
    return [i for x in chunks for i in range(x.start, x.stop)]


def tasks(kind, world):
    """Return all tasks of a placement."""
    cut = Placement(kind, world)
    return [Task(mask, *lengths, cut) for mask in MASKS for lengths in LENGTHS]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_each_visible_pair_is_computed_once(kind, world):
    """Local keys and buffered keys together cover each visible pair once, whatever the lengths."""
    for task in tasks(kind, world):
        counted = torch.zeros(task.seq_q, task.seq_kv, dtype=torch.int64)
        for rank in range(world):
            ours = plan(task, rank)
            rows, keys = (owned(task.placement, n, rank) for n in (task.seq_q, task.seq_kv))
            buffer = [x.start + i for x in ours.pieces for i in range(size(x.rows))]
            calls = [(rows[x.rows], buffer[x.keys], x.mask) for x in ours.parts]
            calls += [(rows[x.rows], keys[x.keys], x.mask) for x in ours.own]
            for t, s, mask in calls:
                if t and s:
                    i, j = torch.arange(len(t))[:, None], torch.arange(len(s))
                    counted[torch.tensor(t)[:, None], torch.tensor(s)] += (
                        mask.over(len(t), len(s)).sees(i, j).expand(len(t), len(s)).long()
                    )
        t, s = torch.arange(task.seq_q)[:, None], torch.arange(task.seq_kv)
        wanted = task.mask.over(task.seq_q, task.seq_kv).sees(t, s).expand_as(counted)
        assert torch.equal(counted, wanted.long()), task


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_rows_see_once_what_their_mask_shows(kind, world):
    """For random monotone rows, local and buffered keys show each rank its visible pairs once."""
    random = torch.Generator().manual_seed(0)
    for task in tasks(kind, world)[::5]:
        ends = torch.randint(task.seq_kv + 1, (2, 2, task.seq_q), generator=random)
        low, high = ends.sort(-1).values
        given = masks.rows(low, high)
        q, k = (torch.empty(2, 1, n, 8) for n in (task.seq_q, task.seq_kv))
        wanted = bounds_of(q, k, task.mask, None, given).seen.long()
        counted = torch.zeros_like(wanted)
        for rank in range(world):
            rows, keys = (owned(task.placement, n, rank) for n in (task.seq_q, task.seq_kv))
            by_rows, bounds = local_bounds(q[:, :, rows], task, rank, None, given)
            ours = plan(by_rows, rank)
            buffer = [x.start + i for x in ours.pieces for i in range(size(x.rows))]
            for s, seen in ((keys, Bounds(*bounds[:2])), (buffer, Bounds(*bounds[2:]))):
                if rows and s:
                    counted[:, torch.tensor(rows)[:, None], torch.tensor(s)] += seen.seen.long()
        assert torch.equal(counted, wanted), task


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_buffers_have_what_is_seen_in_its_order(kind, world):
    """A buffer has, ascending, the keys of all visible pairs that no part of own keys covers."""
    for task in tasks(kind, world):
        band = task.mask.over(task.seq_q, task.seq_kv)
        for rank in range(world):
            ours = plan(task, rank)
            buffer = [x.start + i for x in ours.pieces for i in range(size(x.rows))]
            rows, keys = (owned(task.placement, n, rank) for n in (task.seq_q, task.seq_kv))
            local = {x for part in ours.own for x in product(rows[part.rows], keys[part.keys])}
            seen = {(t, s) for t in rows for s in range(*band.keys_of(t))} - local
            assert buffer == sorted({s for _, s in seen})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_what_leaves_arrives(kind, world):
    """Ranks agree without communication on what each sends, and it arrives where it is expected."""
    for task in tasks(kind, world):
        plans = [plan(task, rank) for rank in range(world)]
        for rank, ours in enumerate(plans):
            assert ours.arriving == [theirs.leaving[rank] for theirs in plans]
            assert sum(ours.arriving) == ours.keys
            arrived = []
            for r, theirs in enumerate(plans):
                keys = owned(task.placement, task.seq_kv, r)
                sent = [keys[i] for rows in theirs.sends[rank] for i in range(*rows.indices(99))]
                assert len(sent) == ours.arriving[r]
                arrived += [*keys, *[None] * (ours.most - len(keys))] if ours.gathers else sent
            for piece, place in zip(ours.pieces, ours.places, strict=True):
                assert arrived[place] == list(range(piece.start, piece.start + size(piece.rows)))
            left = [i for to_one in ours.sends for rows in to_one for i in range(*rows.indices(99))]
            assert ours.once == (len(left) == len(set(left)))


@pytest.mark.parametrize("kind", KINDS)
def test_windows_send_their_halo_alone(kind):
    """With a window on both sides, a chunk needs from others at most the keys of the window."""
    for rank in range(4):
        ours = plan(Task(Mask(9, 0), 400, 400, Placement(kind, 4)), rank)
        assert not ours.gathers
        assert 0 <= sum(ours.arriving) <= 9 * KINDS[kind]
        assert (sum(ours.arriving) > 0) == (rank > 0 or kind == "zigzag")


def test_zigzag_shares_causal_work_evenly():
    """Zigzag ranks compute equally many causal pairs, and contiguous ranks do not."""
    for kind, ratio in (("zigzag", 1.0), ("contiguous", 7 / 1)):
        pairs = []
        for rank in range(4):
            ours = plan(Task(Mask(right=0), 800, 800, Placement(kind, 4)), rank)
            calls = [(size(x.rows), size(x.keys), x.mask) for x in ours.own + ours.parts]
            pairs.append(sum(m.over(t, s).pairs for t, s, m in calls))
        assert max(pairs) / min(pairs) == pytest.approx(ratio, rel=0.01)
