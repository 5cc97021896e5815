"""Bytes: what is kept for the backward pass, the peak, and who holds what over time.

``held_bytes`` counts on any device. A peak and a timeline are the CUDA allocator's to tell; other
devices' are None and empty. The timeline counts the bytes that were asked for; the peak counts
them as the allocator rounds them up, which is a little more.
"""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import WeakSet

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from flashattn.measure.profile import listening

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from flashattn.measure.profile import Edge

T = TypeVar("T")

MOST_POINTS = 2000
LARGEST = 10
HISTORY = 1_000_000  # events that the allocator remembers
MARK_BYTES = 333  # of the block that marks a phase's end in the history; any size that is rare
BEFORE = "before"  # the phase of blocks that were there when the recording began
TORCH = str(Path(torch.__file__).parent)


class _Held:
    """A tensor that autograd keeps; it lives as long as the graph's node that wants it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def held_bytes(call: Callable[[], T], *, without: Iterable[torch.Tensor] = ()) -> tuple[int, T]:
    """Count the bytes that are kept for the backward pass when ``call`` returns.

    Each storage counts once and whole, however many views of it are kept. What an autograd function
    hides from ``save_for_backward``, in a plain attribute, is not seen.

    Args:
        call: a forward pass; what it returns keeps the graph alive.
        without: tensors whose storages do not count: parameters and inputs.

    Returns:
        Bytes, and what ``call`` returned.
    """
    held: WeakSet[_Held] = WeakSet()

    def pack(tensor: torch.Tensor) -> _Held:
        kept = _Held(tensor.detach())  # with its node it would keep itself alive
        held.add(kept)
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        result = call()
    kept = [each.tensor for each in held]
    sizes = {StorageWeakRef(x.untyped_storage()): x.untyped_storage().nbytes() for x in kept}
    for tensor in without:
        sizes.pop(StorageWeakRef(tensor.untyped_storage()), None)
    return sum(sizes.values()), result


@dataclass(frozen=True)
class Peak:
    """Bytes of tensors on a device around a call; None where no allocator counts them.

    Args:
        before: ahead of the call.
        peak: the most during the call.
        after: with what the call returned still alive.
    """

    before: int | None = None
    peak: int | None = None
    after: int | None = None


def peak_bytes(call: Callable[[], T], device: torch.device) -> tuple[Peak, T]:
    """Run ``call`` and return the bytes around it, and what it returned."""
    if device.type != "cuda":
        return Peak(), call()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    return Peak(before, peak, torch.cuda.memory_allocated(device)), result


def allocated_bytes(device: torch.device) -> int | None:
    """Return the bytes in use on ``device`` now, None where no allocator counts them."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def above(total: int | None, ground: int | None) -> int | None:
    """Return how many bytes ``total`` is above what was in use before; None where not counted."""
    return None if total is None or ground is None else total - ground


@dataclass(frozen=True)
class Block:
    """Blocks of one size that one line allocated in one phase and that were live at the peak.

    Args:
        bytes: of one of them.
        line: the innermost line outside torch, "lm.py:123 forward"; None where no Python ran, as
            in autograd's own threads, or where the block is older than the recording.
        phase: the innermost phase in which they were allocated; None outside of all, ``BEFORE``
            ahead of the recording.
        count: how many.
    """

    bytes: int
    line: str | None
    phase: str | None
    count: int = 1


@dataclass(frozen=True)
class Timeline:
    """Live bytes over time.

    Args:
        points: seconds since the recording began and the bytes live from then on, at most
            ``MOST_POINTS``: the peak is among them.
        phases: name, start and end in the same seconds, by their start.
        largest: blocks live at the peak, the biggest first, at most ``LARGEST`` kinds of them.
    """

    points: list[tuple[float, int]] = field(default_factory=list)
    phases: list[tuple[str, float, float]] = field(default_factory=list)
    largest: list[Block] = field(default_factory=list)


class Mark(NamedTuple):
    """An end of a phase and the address of the block that was allocated at it."""

    name: str | None
    edge: Edge
    address: int


def record(
    call: Callable[[], object], device: torch.device, path: Path | str | None = None
) -> Timeline:
    """Run ``call`` while the allocator writes down its history.

    Args:
        call: what is recorded; each ``phase`` in it is marked.
        device: whose memory; for anything but a GPU the timeline is empty.
        path: of a pickle for https://pytorch.org/memory_viz, written if given. It names the files
            of every frame in full.

    Raises:
        RuntimeError: the history was too short for all that happened.
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
    torch.cuda.memory._record_memory_history(  # noqa: SLF001 - torch documents it under this name
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


class _Replay:
    """The allocator's history played from the start.

    A phase's ends are found by the blocks that were allocated at them and not by the clock, so
    that no block is taken for another phase's.
    """

    def __init__(self, before: Mapping[int, int], marks: Sequence[Mark], start: float) -> None:
        self.live = {address: Block(size, None, BEFORE) for address, size in before.items()}
        self.bytes = sum(before.values())
        self.points = [(0.0, self.bytes)]
        self.phases: list[tuple[str, float, float]] = []
        self._open: list[tuple[str, float]] = []
        self._marks = iter(marks)
        self._next = next(self._marks, None)
        self._start = start

    def step(self, event: Mapping[str, Any]) -> None:
        """Do what the allocator did."""
        seconds = max(0.0, (event["time_us"] - self._start) * 1e-6)
        if event["action"] == "alloc":
            if self._next is not None and _is_mark(event, self._next):
                self._mark(self._next, seconds)
                return
            name = self._open[-1][0] if self._open else None
            self.live[event["addr"]] = Block(event["size"], line_of(event.get("frames", ())), name)
            self.bytes += event["size"]
        elif event["action"] == "free_completed" and event["addr"] in self.live:
            self.bytes -= self.live.pop(event["addr"]).bytes
        else:
            return
        self.points.append((seconds, self.bytes))

    def finish(self) -> None:
        """Check that every mark was met.

        Raises:
            RuntimeError: the history lacks one.
        """
        if self._next is not None:
            raise RuntimeError(
                f"the allocator's history of {HISTORY} events does not reach back to the start; "
                "record fewer steps"
            )

    def _mark(self, mark: Mark, seconds: float) -> None:
        if mark.name is not None and mark.edge == "start":
            self._open.append((mark.name, seconds))
        elif mark.name is not None:
            name, start = self._open.pop()
            self.phases.append((name, start, seconds))
        self._next = next(self._marks, None)


def timeline(snapshot: Mapping[str, Any], marks: Sequence[Mark], index: int) -> Timeline:
    """Read a timeline out of what ``torch.cuda.memory._snapshot`` returns.

    Args:
        snapshot: it has the device's history, oldest first, and all that is live at its end.
        marks: the first one opens the recording; the others are ends of phases, in their order.
        index: of the device.

    Raises:
        RuntimeError: the history lacks a mark.
    """
    trace = snapshot["device_traces"][index]
    before = _live_before(snapshot, trace, index)
    start = next((e["time_us"] for e in trace if marks and _is_mark(e, marks[0])), 0)
    whole = _Replay(before, marks, start)
    peak, peak_bytes_ = 0, whole.bytes
    for number, event in enumerate(trace, 1):
        whole.step(event)
        if whole.bytes > peak_bytes_:
            peak, peak_bytes_ = number, whole.bytes
    whole.finish()
    again = _Replay(before, marks, start)
    for event in trace[:peak]:
        again.step(event)
    return Timeline(
        points=thinned(whole.points, MOST_POINTS),
        phases=sorted(whole.phases, key=lambda phase: (phase[1], -phase[2])),
        largest=_largest(again.live.values()),
    )


def _is_mark(event: Mapping[str, Any], mark: Mark) -> bool:
    return (event["action"], event["size"], event.get("addr")) == (
        "alloc",
        MARK_BYTES,
        mark.address,
    )


def _live_before(
    snapshot: Mapping[str, Any], trace: Iterable[Mapping[str, Any]], index: int
) -> dict[int, int]:
    """Return the bytes of each block, by address, that is older than the history.

    It was freed there without being allocated there, or is live at the end and was never.
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
    """Return the innermost frame that is not torch's, without its folder; None if all are."""
    for frame in frames:
        file = frame["filename"]
        if not file.startswith((TORCH, "<frozen", "??")):
            return f"{Path(file).name}:{frame['line']} {frame['name']}"
    return None


def _largest(blocks: Iterable[Block]) -> list[Block]:
    """Return the biggest blocks, those that are alike as one with their number."""
    kinds = [replace(block, count=count) for block, count in Counter(blocks).items()]
    return sorted(kinds, key=lambda kind: (-kind.bytes, -kind.count))[:LARGEST]


def thinned(points: Sequence[tuple[float, int]], most: int) -> list[tuple[float, int]]:
    """Return at most ``most`` of the points: both ends, and each stretch's lowest and highest."""
    if len(points) <= most:
        return list(points)
    inner, stretches = range(1, len(points) - 1), most // 2 - 1
    kept = {0, len(points) - 1}
    for stretch in range(stretches):
        part = inner[stretch * len(inner) // stretches : (stretch + 1) * len(inner) // stretches]
        kept |= {min(part, key=lambda i: points[i][1]), max(part, key=lambda i: points[i][1])}
    return [points[i] for i in sorted(kept)]
