"""What a rank computes and exchanges: a function of mask, lengths, placement and rank alone.

Every rank can plan for every other, so nothing is negotiated. A rank's rows are runs of consecutive
queries. Keys that other ranks send are in a buffer, in the order of the sequence.

If T = S, a rank first attends from its own rows to its own keys. Under a causal mask or none, this
is one problem: both are in the order of the sequence, so the mask over them is also causal or full.
Under a window each run attends to its own keys. Then each run sees the keys before it, and those
after it, which are again one problem each (``seen_by``).

Documents and other masks by rows (``bounds``) are on the device, unknown to the plan: all rows are
one run, over own keys first and then over the buffer. Both keep the order of the sequence, so a
query again sees one interval of them, whose ends ``placed`` counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from flashattn.mask import CAUSAL, FULL, Mask
from flashattn.parallel.placement import Chunk, Placement


class Part(NamedTuple):
    """One call of the kernels: which of a rank's rows, which of some keys, and their mask."""

    rows: slice
    keys: slice
    mask: Mask


class Piece(NamedTuple):
    """Some of a rank's keys: their rows there, and their places in a buffer and the sequence."""

    rank: int
    rows: slice
    keys: slice
    start: int


def size(rows: slice) -> int:
    """Return how many rows a slice has."""
    return int(rows.stop - rows.start)


def seen_by(
    mask: Mask, seq_q: int, seq_kv: int, rows: slice, within: slice | None = None
) -> tuple[slice, Mask]:
    """Return which keys consecutive queries see, and the mask of these queries over these keys.

    Of the keys, only those ``within`` count, if given; then each of the queries sees one of them.
    Bounds count from the first row and the first key, or for "bottom_right" from the last ones, so
    that none is negative.
    """
    band = mask.over(seq_q, seq_kv)
    low, high = band.keys_of(rows.start)[0], band.keys_of(rows.stop - 1)[1]
    if within is not None:
        low, high = max(low, within.start), min(high, within.stop)
    if high <= low:
        return slice(low, low), FULL
    left = None if band.left is None else band.left - rows.start + low
    right = None if band.right is None else band.right + rows.start - low
    if mask.corner == "bottom_right":
        shift = (high - low) - size(rows)
        left = None if left is None else left + shift
        right = None if right is None else right - shift
    return slice(low, high), Mask(left, right, mask.corner)


class Task(NamedTuple):
    """A whole problem and the placement of its rows."""

    mask: Mask  # which keys a query sees; or may see, if bounds say the rest
    seq_q: int  # T
    seq_kv: int  # S
    placement: Placement  # of queries and keys
    by_rows: bool = False  # whether bounds say the rest

    @property
    def own_mask(self) -> Mask | None:
        """The mask of a rank's rows over its own keys, if one mask says it; else None."""
        band = self.mask.over(self.seq_q, self.seq_kv)
        if self.by_rows or (band.left is None and band.right is None):
            return FULL  # apart from the bounds
        causal = self.seq_q == self.seq_kv and band.left is None and band.right == 0
        return CAUSAL if causal else None

    @property
    def gathers(self) -> bool:
        """Return whether all keys go to all ranks; a two-sided window sends only visible keys."""
        band = self.mask.over(self.seq_q, self.seq_kv)
        return band.left is None or band.right is None

    def runs(self, rank: int) -> list[Chunk]:
        """Return a rank's chunks of queries, joined where one begins at the end of another."""
        found: list[Chunk] = []
        for x in self.placement.chunks(self.seq_q):
            if x.rank == rank and x.start < x.stop:
                joins = found and found[-1].stop == x.start
                found.append(found.pop()._replace(stop=x.stop) if joins else x)
        return found

    def own_parts(self, rank: int) -> list[Part]:
        """Return the calls on a rank's own keys."""
        if self.own_mask is not None:
            rows, keys = (self.placement.lengths(n)[rank] for n in (self.seq_q, self.seq_kv))
            return [Part(slice(0, rows), slice(0, keys), self.own_mask)]
        if self.seq_q != self.seq_kv:
            return []
        return [Part(x.rows, x.rows, self.mask) for x in self.runs(rank)]

    def other_parts(self, rank: int) -> list[Part]:
        """Return the other calls of a rank, with their keys by position in the sequence."""
        if self.own_mask == FULL and not self.by_rows:
            every = slice(0, self.placement.lengths(self.seq_q)[rank])
            return [Part(every, slice(0, self.seq_kv), FULL)] if every.stop else []
        found = []
        for run in self.runs(rank):
            for rows, within in self._others(run):
                keys, mask = seen_by(self.mask, self.seq_q, self.seq_kv, rows, within)
                at = run.at + rows.start - run.start
                found.append(Part(slice(at, at + size(rows)), keys, mask))
        return found

    def _others(self, run: Chunk) -> list[tuple[slice, slice]]:
        """Return rows of a run and keys before and after it that they see; all if T != S."""
        if self.seq_q != self.seq_kv:
            return [(slice(run.start, run.stop), slice(0, self.seq_kv))]
        band = self.mask.over(self.seq_q, self.seq_kv)
        stop, start = band.queries_of(run.start - 1)[1], band.queries_of(run.stop)[0]
        before = slice(run.start, min(run.stop, stop)), slice(0, run.start)
        after = slice(max(run.start, start), run.stop), slice(run.stop, self.seq_kv)
        return [x for x in (before, after) if all(size(y) > 0 for y in x)]

    def pieces(self, rank: int) -> list[Piece]:
        """Return the buffer of a rank: the keys of its other parts, ascending."""
        found, taken = [], 0
        wanted = _union([part.keys for part in self.other_parts(rank)])
        for chunk in self.placement.chunks(self.seq_kv):
            if self.own_mask is not None and chunk.rank == rank:
                continue
            for keys in wanted:
                start, stop = max(chunk.start, keys.start), min(chunk.stop, keys.stop)
                if start < stop:
                    at, count = chunk.at + start - chunk.start, stop - start
                    rows, keys_there = slice(at, at + count), slice(taken, taken + count)
                    found.append(Piece(chunk.rank, rows, keys_there, start))
                    taken += count
        return found


def _union(intervals: list[slice]) -> list[slice]:
    """Return disjoint intervals in order."""
    found: list[slice] = []
    for x in sorted(intervals, key=lambda x: x.start):
        if found and x.start <= found[-1].stop:
            found[-1] = slice(found[-1].start, max(found[-1].stop, x.stop))
        else:
            found.append(x)
    return found


@dataclass(frozen=True)
class Plan:
    """What one rank does."""

    own: list[Part]  # calls on own keys, which cover all rows; empty if there are none
    gathers: bool  # see ``Task``
    parts: list[Part]  # calls on the buffer, the one with the most keys first
    pieces: list[Piece]  # what the buffer consists of
    places: list[slice]  # where each piece lies in what arrives, by rank
    most: int  # the most keys of any rank: what each rank sends if it gathers
    sends: list[list[slice]]  # for each rank, which of this rank's keys are in that one's buffer
    arriving: list[int]  # number of keys in the buffer from each rank
    leaving: list[int]  # number of this rank's keys in the buffer of each rank
    own_pieces: list[Piece]  # this rank's own keys, as pieces

    @property
    def keys(self) -> int:
        """The number of keys of the buffer."""
        return self.pieces[-1].keys.stop if self.pieces else 0

    @property
    def rows(self) -> int:
        """The number of keys that this rank has."""
        return self.own_pieces[-1].keys.stop

    @property
    def once(self) -> bool:
        """Return whether each key of this rank is in at most one buffer."""
        rows = sorted((rows.start, rows.stop) for to_one in self.sends for rows in to_one)
        return all(stop <= start for (_, stop), (start, _) in pairwise(rows))


_PLANS: dict[tuple[Task, int], Plan] = {}  # functools.lru_cache would make torch.compile warn
_MOST_PLANS = 1024  # lengths that keep changing must not fill the memory


def plan(task: Task, rank: int) -> Plan:
    """Return the plan of a rank for a task."""
    if torch.compiler.is_compiling():  # a trace cannot replay a change of the cache
        return _plan(task, rank)
    if (task, rank) not in _PLANS:
        if len(_PLANS) >= _MOST_PLANS:
            _PLANS.clear()
        _PLANS[task, rank] = _plan(task, rank)
    return _PLANS[task, rank]


def _plan(task: Task, rank: int) -> Plan:
    pieces, world = task.pieces(rank), range(task.placement.world)
    parts = [
        Part(x.rows, slice(*(placed(at, pieces) for at in (x.keys.start, x.keys.stop))), x.mask)
        for x in task.other_parts(rank)
    ]
    if task.by_rows:
        queries = task.placement.lengths(task.seq_q)[rank]
        parts = [Part(slice(0, queries), slice(0, sum(size(x.rows) for x in pieces)), FULL)]
    own = task.own_parts(rank)
    if own:
        parts = [part for part in parts if size(part.keys)]
    sends = [[x.rows for x in task.pieces(r) if x.rank == rank] for r in world]
    most = max(task.placement.lengths(task.seq_kv))
    arriving = [sum(size(x.rows) for x in pieces if x.rank == r) for r in world]
    leaving = [sum(map(size, rows)) for rows in sends]
    return Plan(
        own=own,
        gathers=task.gathers,
        parts=sorted(parts, key=lambda part: -size(part.keys)),
        pieces=pieces,
        places=_places(pieces, [most for _ in world] if task.gathers else arriving, task.gathers),
        most=most,
        sends=sends,
        arriving=arriving,
        leaving=leaving,
        own_pieces=[
            Piece(rank, x.rows, x.rows, x.start)
            for x in task.placement.chunks(task.seq_kv)
            if x.rank == rank
        ],
    )


def placed(keys: Any, pieces: list[Piece]) -> Any:
    """Return how many keys of the pieces come before given keys, an int or a tensor."""
    spans: list[list[int]] = []  # adjacent pieces are joined
    for piece in pieces:
        if spans and spans[-1][1] == piece.start:
            spans[-1][1] += size(piece.rows)
        else:
            spans.append([piece.start, piece.start + size(piece.rows)])
    count = 0 * keys
    for start, stop in spans:
        beyond = keys - start
        if isinstance(beyond, int):
            count += max(0, min(beyond, stop - start))
        else:
            count = count + beyond.clamp(0, stop - start)
    return count


def _places(pieces: list[Piece], arriving: list[int], gathers: bool) -> list[slice]:  # noqa: FBT001
    """Return where pieces arrive: consecutively, or among all keys of their rank if it gathers."""
    starts, found = list(accumulate([0, *arriving])), []
    for piece in pieces:
        at = starts[piece.rank] + (piece.rows.start if gathers else 0)
        found.append(slice(at, at + size(piece.rows)))
        starts[piece.rank] += 0 if gathers else size(piece.rows)
    return found
