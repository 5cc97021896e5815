"""Bytes held, peaks and timelines, of tensors on a CPU and of a fake allocator's history."""

import itertools
import pickle
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flashattn import FlashAttentionPyTorch
from flashattn.measure import memory as module
from flashattn.measure.memory import (
    Block,
    Timeline,
    held_bytes,
    peak_bytes,
    record,
    thinned,
)
from flashattn.measure.profile import phase

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)
KIB = 1024
TORCHS = [
    {"filename": "<frozen runpy>", "line": 1, "name": "run"},
    {"filename": "??", "line": 0, "name": "c10::malloc()"},
    {"filename": f"{module.TORCH}/nn/modules/linear.py", "line": 134, "name": "forward"},
]
FRAMES = [
    *TORCHS,
    {"filename": "/home/someone/model.py", "line": 12, "name": "forward"},
    {"filename": "/home/someone/train.py", "line": 7, "name": "<module>"},
]


def leaf(*shape, device=None):
    """Return a tensor that requires its gradient."""
    return torch.randn(*shape, device=device, requires_grad=True)


A, B, LAYER = leaf(8, 16), leaf(16, 4), torch.nn.Linear(16, 32)
QKV = [leaf(1, 256, 16) for _ in range(3)]


def let_go(x):
    """Return an exponential, after another computation whose result is discarded."""
    x.exp().sin().exp()
    return x.exp()


def scores(q, k, v):
    """Compute naive attention."""
    return torch.softmax(q @ k.mT, -1) @ v


@pytest.mark.parametrize(
    ("call", "without", "held"),
    [
        (partial(torch.mm, A, B), [], 8 * 16 + 16 * 4),  # its two factors
        (partial(torch.add, A, A), [], 0),
        (A.exp, [], 8 * 16),  # its result
        (torch.no_grad()(A.exp), [], 0),
        (lambda: A[:1] * A[1:2], [], 8 * 16),  # each storage once and whole, not each view's part
        (lambda: LAYER(A).sigmoid(), [*LAYER.parameters(), A[1:]], 8 * 32),  # not what is named
        (partial(let_go, A), [], 8 * 16),  # not what a discarded tensor would save
        (lambda: checkpoint(let_go, A * 2, use_reentrant=False), [], 8 * 16),  # only its input
        (leaf(1 << 20, 1 << 20, device="meta").exp, [], 1 << 40),  # without a byte of memory
        (torch.compile(lambda: A.exp().sin(), backend="aot_eager"), [A], 8 * 16),
        # An autograd function: its output and a number per row; naive attention: all its scores.
        (partial(FlashAttentionPyTorch.apply, *QKV), QKV, 256 * 16 + 256),
        (partial(scores, *QKV), QKV, 256 * 256),
    ],
)
def test_held_are_what_backward_reads(call, without, held):
    """Held bytes are those saved for the backward pass, each storage once and whole."""
    assert held_bytes(call, without=without)[0] == 4 * held


def test_gradients_are_unchanged_by_counting():
    """Backward and double backward work after a count."""
    x = leaf(8)
    _, y = held_bytes(lambda: x.exp() * x)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(first, x.exp() * (1 + x))
    torch.testing.assert_close(second, (x.exp() * (2 + x)).detach())


class Allocator:
    """A fake CUDA allocator: its counts, history and snapshot."""

    def __init__(self, patch, live):
        """Replace torch's allocator from now on, with blocks of these bytes already live."""
        self.trace, self.log, self.time = [], [], 1_800_000_000_000_000
        self.blocks = {4096 + 512 * i: size for i, size in enumerate(live)}
        self.peak = self.allocated()
        stands_in = {
            "synchronize": lambda _: self.log.append("wait"),
            "memory_allocated": lambda _: self.allocated(),
            "max_memory_allocated": lambda _: self.peak,
            "reset_peak_memory_stats": self.reset,
            "current_device": lambda: 1,
            "memory._record_memory_history": lambda on, **_: self.log.append(f"history {on}"),
            "memory._snapshot": self.snapshot,
        }
        for name, function in stands_in.items():
            patch.setattr(f"torch.cuda.{name}", function)
        patch.setattr(module.torch, "empty", self.empty)

    def event(self, action, address, size, frames=()):
        """Record an event, one microsecond after the previous one."""
        self.time += 1
        event = {"action": action, "addr": address, "size": size, "time_us": self.time}
        self.trace.append(event | {"frames": list(frames)})

    def alloc(self, size, frames=FRAMES):
        """Allocate a block at the first free address; return the address."""
        address = next(x for x in itertools.count(4096, 512) if x not in self.blocks)
        self.blocks[address] = size
        self.event("alloc", address, size, frames)
        self.peak = max(self.peak, self.allocated())
        return address

    def free(self, address):
        """Free a block, at once."""
        size = self.blocks.pop(address)
        self.event("free_requested", address, size)
        self.event("free_completed", address, size)

    def allocated(self):
        """Return the bytes that are live."""
        return sum(self.blocks.values())

    def reset(self, _):
        """Forget the peak."""
        self.log.append("reset")
        self.peak = self.allocated()

    def snapshot(self):
        """Return the history and the live blocks, with a free block and one of another device."""

        def segment(device, blocks, state):
            names = ("address", "requested_size")
            found = [dict(zip(names, x, strict=True)) | {"state": state} for x in blocks]
            return {"device": device, "blocks": found}

        first, *others = self.blocks.items()
        segments = [
            segment(0, [(7, 64)], "active_allocated"),
            segment(1, [first], "active_pending_free"),
            segment(1, others, "active_allocated"),
            segment(1, [(1 << 30, 9)], "inactive"),
        ]
        return {"device_traces": [[], self.trace], "segments": segments}

    def empty(self, size, *, dtype, device):
        """Allocate and free a block; return a tensor that has its address."""
        assert (dtype, device.type) == (torch.uint8, "cuda")
        address = self.alloc(size, [])
        self.free(address)
        return SimpleNamespace(data_ptr=lambda: address)


@pytest.fixture
def allocator(monkeypatch):
    """Return a function that replaces torch's allocator with a fake one."""
    return lambda *live: Allocator(monkeypatch, live)


def test_peak_is_of_the_call(allocator):
    """A peak is that of the call alone; the device is synchronized before and after the call."""
    gpu = allocator(100)
    gpu.free(gpu.alloc(5000))  # an earlier peak

    def call():
        address = gpu.alloc(1000)
        gpu.alloc(30)
        gpu.free(address)

    assert peak_bytes(call, CUDA, ground=60) == (40, 1070)
    assert gpu.log == ["wait", "reset", "wait"]


def test_a_cpu_has_no_peak():
    """Where no allocator counts, the peak is None and the timeline empty; the call is made."""
    made = []
    assert peak_bytes(lambda: made.append("peak"), CPU) == (None, None)
    assert record(lambda: made.append("line"), CPU) == Timeline([], [], [])
    assert made == ["peak", "line"]


def step(gpu):
    """Return a training step with phases, whose backward frees the activations.

    An earlier block is freed, and its address is reused.
    """

    def call():
        with phase("forward"):
            activations = [gpu.alloc(1000) for _ in range(3)]
            with phase("loss"):
                loss = gpu.alloc(40)
        gpu.alloc(7, TORCHS)
        with phase("backward"):
            gradient = gpu.alloc(500, [])
            for address in (*activations, loss):
                gpu.free(address)
        gpu.free(gradient)
        gpu.free(4096)
        assert gpu.alloc(100) == 4096

    return call


def test_timeline_is_of_live_bytes(allocator, tmp_path):
    """A timeline starts with the live bytes and follows every block, except those that mark phases.

    The largest blocks at the peak are listed, with the line and the phase that allocated them.
    """
    gpu = allocator(200, 60, 60, 9, 8, 6, 5, 4)
    line = record(step(gpu), CUDA, tmp_path / "snapshot.pickle")
    times, live = zip(*line.points, strict=True)
    changes = [1000, 1000, 1000, 40, 7, 500, -1000, -1000, -1000, -40, -500, -200, 100]
    assert list(live) == list(itertools.accumulate(changes, initial=352))
    assert times[0] == 0
    assert list(times) == sorted(times)
    assert times[-1] == pytest.approx(30e-6, abs=10e-6)
    assert gpu.log == ["wait", "history all", "wait", "history None"]
    assert [name for name, _, _ in line.phases] == ["forward", "loss", "backward"]
    (_, start, end), (_, loss, loss_end), (_, backward, _) = line.phases
    assert 0 < start < times[1] < loss < times[4] < loss_end < end < backward
    kept = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())  # noqa: S301 - just written
    assert kept["device_traces"][1] == gpu.trace  # unchanged, for torch's viewer
    assert line.largest == [
        Block(1000, "model.py:12 forward", "forward", 3),
        Block(500, None, "backward"),  # autograd's threads run no Python
        Block(200, None, "before"),
        Block(60, None, "before", 2),
        Block(40, "model.py:12 forward", "loss"),
        Block(9, None, "before"),
        Block(8, None, "before"),
        Block(7, None, None),
        Block(6, None, "before"),
        Block(5, None, "before"),
    ]


def test_memory_is_live_until_its_last_stream_is_done(allocator):
    """A freed block counts while a stream still reads it; other events change nothing."""
    gpu = allocator(50)

    def call():
        address = gpu.alloc(100)
        gpu.event("free_requested", address, 100)
        gpu.alloc(10)
        gpu.event("free_completed", address, gpu.blocks.pop(address))
        for action in ("segment_alloc", "segment_map", "segment_free", "snapshot", "oom"):
            gpu.event(action, 1 << 40, 2 << 20)
        del gpu.trace[-1]["addr"]

    line = record(call, torch.device("cuda"))
    assert [point[1] for point in line.points] == [50, 150, 160, 60]


def test_a_failed_recording_ends(allocator):
    """Recording ends if the call fails or if the history has lost its beginning."""
    gpu = allocator(50)

    def lose():
        step(gpu)()
        del gpu.trace[:5]

    def fail():
        raise torch.OutOfMemoryError("CUDA out of memory")

    for call, error in ((lose, "does not reach back to the start"), (fail, "out of memory")):
        with pytest.raises(RuntimeError, match=error):
            record(call, CUDA)
        assert gpu.log[-1] == "history None"
    events = len(gpu.trace)
    with phase("after"):  # marks nothing
        pass
    assert len(gpu.trace) == events


def test_thinning_keeps_ends_and_extremes():
    """Thinning keeps few points, in order, among them the ends, the peak and the lowest."""
    assert thinned([(0.0, 3), (1.0, 1), (2.0, 2)], 3) == [(0.0, 3), (1.0, 1), (2.0, 2)]
    points = [(float(i), 1000 + i % 7) for i in range(10_000)]
    points[1234], points[7777] = (1234.0, 9999), (7777.0, 1)
    few = thinned(points, 200)
    assert len(few) <= 200
    assert few == sorted(few)
    assert {points[0], points[-1], points[1234], points[7777]} <= set(few)
    # Every stretch keeps its own range.
    assert all(
        {1000, 1006} <= {size for at, size in few if start <= at < start + 250}
        for start in range(0, 10_000, 250)
    )


@pytest.mark.gpu
def test_a_gpu_is_recorded(tmp_path):
    """On a GPU a live block is in the timeline, with its line and phase, and in the peak."""
    device = torch.device("cuda")
    older = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    before = torch.cuda.memory_allocated(device)

    def call():
        with phase("first"):
            big = torch.empty(1 << 20, dtype=torch.uint8, device=device)
            small = torch.empty(4 * KIB, dtype=torch.uint8, device=device)
        del big
        with phase("second"):
            small.exp()

    line = record(call, device, tmp_path / "snapshot.pickle")
    start = line.points[0][1]
    assert 0.5 * before <= start <= before  # the allocator rounds up
    assert max(size for _, size in line.points) == start + (1 << 20) + 4 * KIB
    assert [name for name, _, _ in line.phases] == ["first", "second"]
    (made,) = [block for block in line.largest if block.phase == "first" and block.bytes == 1 << 20]
    assert made.line.split()[0].split(":")[0] == Path(__file__).name
    assert Block(older.nbytes, None, "before") in line.largest
    assert line.points[-1][0] < 60
    assert (tmp_path / "snapshot.pickle").stat().st_size > 0

    def make():
        big = torch.empty(1 << 20, dtype=torch.uint8, device=device)
        return big[:16].clone()

    before, peak = peak_bytes(make, device)
    assert peak == before + (1 << 20) + 512
