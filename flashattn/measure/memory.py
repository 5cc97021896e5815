"""Memory: bytes saved for the backward pass, the peak, and a timeline of live blocks.

``held_bytes`` works on any device. The peak and the timeline come from the CUDA allocator; on other
devices the peak is None and the timeline is empty. The timeline counts requested bytes. The peak is
slightly larger, because it counts the bytes as rounded up by the allocator.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from flashattn.measure.profile import Edge, listening

T = TypeVar("T")

MOST_POINTS = 2000
LARGEST = 10
HISTORY = 1_000_000  # most allocator events recorded
MARK_BYTES = 333  # size of the block that marks an end of a phase; any rare size will do
BEFORE = "before"  # phase of blocks older than the recording
TORCH = str(Path(torch.__file__).parent)


class _Saved:
    """A tensor saved by autograd; it lives as long as the graph node that saved it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def held_bytes(call: Callable[[], T], *, without: Iterable[torch.Tensor] = ()) -> tuple[int, T]:
    """Return the bytes that autograd holds for the backward pass after ``call``, and its result.

    Each storage counts once and in full, except those of the tensors ``without``. Tensors that an
    autograd function keeps outside ``save_for_backward`` are not counted.
    """
    held: WeakSet[_Saved] = WeakSet()

    def pack(tensor: torch.Tensor) -> _Saved:
        kept = _Saved(tensor.detach())  # with its graph node it would form a reference cycle
        held.add(kept)
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        result = call()
    kept = [each.tensor for each in held]
    sizes = {StorageWeakRef(x.untyped_storage()): x.untyped_storage().nbytes() for x in kept}
    for tensor in without:
        sizes.pop(StorageWeakRef(tensor.untyped_storage()), None)
    return sum(sizes.values()), result


def peak_bytes(
    call: Callable[[], object], device: torch.device, ground: int = 0
) -> tuple[int | None, int | None]:
    """Run ``call``; return the bytes in use before it and at its peak, both above ``ground``.

    Both are None on a CPU, which does not count them.
    """
    if device.type != "cuda":
        call()
        return None, None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return before - ground, torch.cuda.max_memory_allocated(device) - ground


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes in use on ``device`` now, 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


@dataclass(frozen=True)
class Block:
    """Blocks live at the peak that share size, allocating line and phase."""

    bytes: int  # of one block
    line: str | None  # from ``line_of``; None if older than the recording
    phase: str | None  # innermost phase; None outside all phases, ``BEFORE`` if older
    count: int = 1


@dataclass(frozen=True)
class Timeline:
    """Live bytes over time."""

    # Seconds since the recording began, and the bytes live from then on, reduced by ``thinned``.
    points: list[tuple[float, int]] = field(default_factory=list)
    phases: list[tuple[str, float, float]] = field(default_factory=list)  # name, start, end
    largest: list[Block] = field(default_factory=list)  # live at the peak, largest first


class Mark(NamedTuple):
    """The start or end of a phase, and the address of the block allocated to mark it."""

    name: str | None
    edge: Edge
    address: int


def record(
    call: Callable[[], object], device: torch.device, path: Path | str | None = None
) -> Timeline:
    """Run ``call`` while the allocator records its history; on a CPU the timeline is empty.

    If given, ``path`` receives a pickle for https://pytorch.org/memory_viz, which contains the full
    path of every source file in a traceback.

    Raises:
        RuntimeError: there were more than ``HISTORY`` events.
    """
    if device.type != "cuda":
        call()
        return Timeline()
    index = torch.cuda.current_device() if device.index is None else device.index
    marks: list[Mark] = []

    def mark(name: str | None, edge: Edge) -> None:
        block = torch.empty(MARK_BYTES, dtype=torch.uint8, device=device)
        marks.append(Mark(name, edge, block.data_ptr()))

    torch.cuda.synchronize(device)
    torch.cuda.memory._record_memory_history(  # noqa: SLF001 - the documented name
        "all", context="all", stacks="python", max_entries=HISTORY
    )
    try:
        mark(None, "start")
        with listening(mark):
            call()
        torch.cuda.synchronize(device)
        snapshot = torch.cuda.memory._snapshot()  # noqa: SLF001
    finally:
        torch.cuda.memory._record_memory_history(None)  # noqa: SLF001
    if path is not None:
        Path(path).write_bytes(pickle.dumps(snapshot))
    return timeline(snapshot, marks, index)


def timeline(snapshot: Mapping[str, Any], marks: Sequence[Mark], index: int) -> Timeline:
    """Build the timeline of device ``index`` from a snapshot of the CUDA allocator.

    Phases are delimited by their mark blocks, not by the clock, so every block is assigned to the
    right phase. The first mark is the start of the recording.

    Raises:
        RuntimeError: a mark is missing from the history.
    """
    trace = snapshot["device_traces"][index]
    before = _live_before(snapshot, trace, index)
    beginning = next((e["time_us"] for e in trace if marks and _is_mark(e, marks[0])), 0)
    live = {address: (0, Block(size, None, BEFORE)) for address, size in before.items()}
    points = [(0.0, sum(before.values()))]
    lives: list[tuple[int, int, Block]] = []  # points of start and end, and the block
    phases: list[tuple[str, float, float]] = []
    opened: list[tuple[str, float]] = []
    coming = list(reversed(marks))
    for event in trace:
        seconds = max(0.0, (event["time_us"] - beginning) * 1e-6)
        if coming and _is_mark(event, coming[-1]):
            mark = coming.pop()
            if mark.name is not None and mark.edge == "start":
                opened.append((mark.name, seconds))
            elif mark.name is not None:
                phases.append((*opened.pop(), seconds))
        elif event["action"] == "alloc":
            name = opened[-1][0] if opened else None
            block = Block(event["size"], line_of(event.get("frames", ())), name)
            live[event["addr"]] = len(points), block
            points.append((seconds, points[-1][1] + block.bytes))
        elif event["action"] == "free_completed" and event["addr"] in live:
            start, block = live.pop(event["addr"])
            lives.append((start, len(points), block))
            points.append((seconds, points[-1][1] - block.bytes))
    if coming:
        raise RuntimeError(
            f"the allocator's history of {HISTORY} events does not reach back to the start; "
            "record fewer steps"
        )
    lives += [(start, len(points), block) for start, block in live.values()]
    peak = max(range(len(points)), key=lambda i: points[i][1])
    kinds = Counter(block for start, end, block in lives if start <= peak < end)
    counted = [replace(block, count=count) for block, count in kinds.items()]
    return Timeline(
        points=thinned(points, MOST_POINTS),
        phases=sorted(phases, key=lambda phase: (phase[1], -phase[2])),
        largest=sorted(counted, key=lambda kind: (-kind.bytes, -kind.count))[:LARGEST],
    )


def _is_mark(event: Mapping[str, Any], mark: Mark) -> bool:
    found = event["action"], event["size"], event.get("addr")
    return found == ("alloc", MARK_BYTES, mark.address)


def _live_before(
    snapshot: Mapping[str, Any], trace: Iterable[Mapping[str, Any]], index: int
) -> dict[int, int]:
    """Return the size, by address, of each block that is older than the history.

    The history lacks the allocation of such a block. It has the free, or the block is still live.
    """
    made: set[int] = set()
    before: dict[int, int] = {}
    for event in trace:
        if event["action"] == "alloc":
            made.add(event["addr"])
        elif event["action"] == "free_completed" and event["addr"] not in made:
            before[event["addr"]] = event["size"]
    for segment in snapshot["segments"]:
        for block in segment["blocks"] if segment["device"] == index else ():
            if block["state"] != "inactive" and block["address"] not in made:
                before[block["address"]] = block["requested_size"]
    return before


def line_of(frames: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the innermost frame outside torch, as "file:line function", or None."""
    for frame in frames:
        file = frame["filename"]
        if not file.startswith((TORCH, "<frozen", "??")):
            return f"{Path(file).name}:{frame['line']} {frame['name']}"
    return None


def thinned(points: Sequence[tuple[float, int]], most: int) -> list[tuple[float, int]]:
    """Return at most ``most`` points: both ends, and the minimum and maximum of each interval."""
    if len(points) <= most:
        return list(points)
    inner, stretches = range(1, len(points) - 1), most // 2 - 1
    kept = {0, len(points) - 1}
    for stretch in range(stretches):
        part = inner[stretch * len(inner) // stretches : (stretch + 1) * len(inner) // stretches]
        kept |= {min(part, key=lambda i: points[i][1]), max(part, key=lambda i: points[i][1])}
    return [points[i] for i in sorted(kept)]
