"""Predict the time of a pass on several GPUs from the speeds of one GPU and of the links.

Kernels are as fast as on one GPU, a byte from another rank takes as long as in a large all-gather,
and copies run at the memory's speed. An exchange that overlaps with kernels takes no time unless it
takes longer than they do. The slowest rank counts.
"""

from __future__ import annotations

from typing import NamedTuple

from flashattn.parallel.placement import Placement
from flashattn.parallel.plan import Part, Plan, Task, plan, size
from flashattn.problem import DTYPES, Problem


class Machine(NamedTuple):
    """The measured speeds, and the latency of a collective."""

    forward: float  # FLOP/s of the forward on one GPU
    backward: float  # FLOP/s of the backward on one GPU
    link: float  # bytes per second that arrive at a rank from all others
    copy: float  # bytes per second that a GPU reads and writes
    latency: float  # seconds that a collective takes without data


def predict(
    problem: Problem,
    placement: Placement,
    machine: Machine,
    *,
    passes: str = "forward+backward",
    keep: bool = False,
) -> float:
    """Return the seconds that ``flashattn.parallel.attention`` takes for a whole sequence.

    With ``keep``, fetched keys are kept for the backward.
    """
    task, wide = Task(problem.mask, problem.seq_q, problem.seq_kv, placement), problem.head_dim

    def seconds(rank: int, name: str) -> float:
        ours, forward = plan(task, rank), name == "forward"
        flops = machine.forward / 4 if forward else machine.backward / 10
        own, rest = _kernels(problem, ours, flops / wide)
        if placement.world == 1:
            return own + rest
        fetched, given_back = _exchanges(problem, ours, rank, machine)
        if not forward:
            first = 0 if keep else own / 2
            return max(first, 0 if keep else fetched) + rest + max(own - first, given_back)
        size_of_o = DTYPES[problem.dtype] * wide * problem.batch * problem.heads  # bytes per row
        merged = 3 * sum(size(part.rows) for part in ours.parts) * size_of_o if ours.own else 0
        return max(own, fetched) + rest + merged / machine.copy

    return max(
        sum(seconds(rank, name) for name in passes.split("+")) for rank in range(placement.world)
    )


def _kernels(problem: Problem, ours: Plan, flops: float) -> tuple[float, float]:
    """Return the seconds of own parts and of the others; ``flops`` is in pairs per second."""

    def pairs(parts: list[Part]) -> int:
        seen = (part.mask.over(size(part.rows), size(part.keys)).pairs for part in parts)
        return problem.batch * problem.heads * sum(seen)

    return pairs(ours.own) / flops, pairs(ours.parts) / flops


def _exchanges(problem: Problem, ours: Plan, rank: int, machine: Machine) -> tuple[float, float]:
    """Return the seconds to fetch keys and to give gradients back, with packing and reordering."""
    wide = 2 * DTYPES[problem.dtype] * problem.head_dim * problem.batch * problem.kv_heads
    others = len(ours.arriving) - 1
    arriving, leaving = (sum(x) - x[rank] for x in (ours.arriving, ours.leaving))
    copied = 2 * (ours.rows + ours.keys) * wide

    def seconds(rows: int) -> float:
        return machine.latency + rows * wide / machine.link + copied / machine.copy

    return seconds(others * ours.most if ours.gathers else arriving), seconds(leaving)
