"""The process of one revision: prepares a case and times its calls on request.

The gate runs this file by path. It imports torch and forks a worker for each revision, whose tree
is then first on ``sys.path``. This file and its clock come from the working tree. ``flashattn``
comes from the revision, which may be older than the gate, so it is imported only when needed.
Requests and replies are JSON lines on a socket; a worker ends when the other end is closed.
"""

from __future__ import annotations

import gc
import json
import math
import os
import runpy
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

TIMING = Path(__file__).parents[1] / "measure" / "timing.py"
SEED = 20231
BUSY = 200_000  # clock cycles of a busy-wait kernel, enough to be timed
SHORTEST = 1e-3  # seconds between two clock readings, which cost up to 10 microseconds each
SAMPLE = 10e-3  # seconds of calls in one sample
PACE_SECONDS = 0.2  # seconds of calls to estimate the time of one
CORRECTIONS, TURNS = 2, 20  # corrections of an injected slowdown, and paired samples for each

Call = Callable[[], Any]
Facts = dict[str, Any]


def attend(case: Facts, device: torch.device) -> Call:
    """Return a callable that runs the pass of a ``cases.AttentionCase``, given as a dict."""
    import flashattn  # noqa: PLC0415 - the revision's

    batch, heads, kv_heads, seq, dim = case["shape"]
    backward, dtype = case["step"] == "backward", getattr(torch, case["dtype"])
    rows = (heads, seq), *[(kv_heads, case["seq_kv"] or seq)] * 2
    shapes = ((batch, *of, dim) for of in rows)
    inputs = [
        torch.randn(shape, device=device).to(dtype).requires_grad_(backward) for shape in shapes
    ]
    if case["impl"] == "auto":
        forward: Call = partial(flashattn.attention, *inputs, causal=case["causal"])
    else:
        how = {"causal": "top_left" if case["causal"] else False, "scale": dim**-0.5}
        forward = partial(flashattn.get(case["impl"]), *inputs, **how)
    if not backward:
        return forward
    answer = forward()
    o = answer[0] if isinstance(answer, tuple) else answer
    return partial(torch.autograd.grad, o, inputs, torch.randn_like(o), retain_graph=True)


def step(case: Facts, device: torch.device) -> Call:
    """Return a callable that runs the step of a ``cases.Model``, given as a dict."""
    import flashattn  # noqa: PLC0415 - the revision's
    from flashattn.lm import Config  # noqa: PLC0415
    from flashattn.training import Trainer  # noqa: PLC0415

    impl = flashattn.get(case["impl"])

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return impl(q, k, v, causal="top_left", scale=None)[0]

    shape = {name: case[name] for name in ("width", "hidden", "layers", "heads", "vocab")}
    how = {name: case[name] for name in ("batch", "context", "precision", "compiled")}
    trainer = Trainer(Config(**shape), attention=attention, device=device, **how)
    return getattr(trainer, case["step"])


MAKERS: dict[str, Callable[[Facts, torch.device], Call]] = {"AttentionCase": attend, "Model": step}


def spun(call: Call, share: float, now: Callable[[], float], cost: float = 0.0) -> Call:
    """Return ``call`` followed by a busy wait for a share of that call's time.

    ``now`` returns seconds of CPU time; reading it adds ``cost`` seconds.
    """

    def slowed() -> Any:
        start = now()
        result = call()
        end = now()
        until = end + share * (end - start) - cost
        while now() < until:
            pass
        return result

    return slowed


def repeated(call: Call, times: int) -> Call:
    """Return a callable that runs ``call`` the given number of times."""

    def calls() -> Any:
        for _ in range(times):
            result = call()
        return result

    return calls


class Worker:
    """Prepares and times one case at a time, with the working tree's module ``timing``."""

    def __init__(self, device: torch.device, timing: Any) -> None:
        """Use one thread: two would wait for each other when another program takes a core."""
        torch.set_num_threads(1)
        self.device, self.timing = device, timing
        on_cuda = device.type == "cuda"
        self.clock = timing.DeviceClock.of(device) if on_cuda else timing.ProcessorClock()
        self.call: Call = tuple
        self.times = 1  # calls of the case in one ``call``

    def prepare(self, case: Facts) -> Facts:
        """Prepare a case and warm it up; return the error under "cannot" if that fails."""
        self.call, self.times = tuple, 1
        gc.collect()
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        torch.manual_seed(SEED)
        try:
            self.call = MAKERS[case["kind"]](case, self.device)
            pace = self.timing.warm_up(self.call, clock=self.clock)
        except Exception as error:  # noqa: BLE001 - an older revision may fail in any way
            said = str(error).strip().partition("\n")[0]
            return {"cannot": f"{type(error).__name__}: {said}"}
        self.clock.cover(pace.launch)
        if self.device.type == "cpu" and pace.wall < SHORTEST:
            self.times = math.ceil(SHORTEST / pace.wall)
            self.call = repeated(self.call, self.times)
        return {}

    def pace(self) -> Facts:
        """Return the seconds of one ``call``."""
        return {"seconds": self._pace(self.call)}

    def slow(self, share: float) -> Facts:
        """Slow the case down by ``share`` of its time, with real work."""
        if self.device.type == "cuda":
            self.call = self._queued(share)
        else:
            now = self.clock.now
            cost = self._pace(spun(tuple, 0.0, now)) - self._pace(tuple)
            self.call = spun(self.call, share, now, cost)
        return {}

    def _queued(self, share: float) -> Call:
        """Return the case followed by a busy-wait kernel.

        The kernel takes a different time after a call than alone, so it is calibrated after one.
        """
        call, busy, units = self.call, torch.cuda._sleep, BUSY  # noqa: SLF001 - torch's tests wait so

        def slowed() -> Any:
            result = call()
            busy(units)
            return result

        alone = self._pace(partial(busy, 2 * units)) - self._pace(partial(busy, units))
        units = round(share * self._pace(call) * units / alone)
        for _ in range(CORRECTIONS):
            units = round(units * share / max(self._added(slowed), share / 2))
        return slowed

    def sample(self, calls: int, core: int | None) -> Facts:
        """Return the seconds of each of ``calls`` calls, pinned to ``core`` unless it is None.

        An untimed first call restores the caches, which the other revision has replaced.
        """
        if core is not None:
            os.sched_setaffinity(0, {core})
        self.call()
        self.clock.synchronize()
        seconds, _ = self.clock.samples(self.call, calls)
        return {"seconds": [each / self.times for each in seconds]}

    def _added(self, slowed: Call) -> float:
        """Return the slowdown of ``slowed`` as a share; both calls are sampled alternately."""
        calls = math.ceil(SAMPLE / self._pace(self.call))
        ratios = [
            median(self.clock.samples(slowed, calls)[0])
            / median(self.clock.samples(self.call, calls)[0])
            for _ in range(TURNS)
        ]
        return median(ratios) - 1

    def _pace(self, call: Call) -> float:
        """Return the seconds of one call: the median on a GPU, the minimum on a shared CPU."""
        once = max(median(self.clock.samples(call, 3)[0]), 1e-7)
        seconds = self.clock.samples(call, min(max(int(PACE_SECONDS / once), 5), 200))[0]
        return median(seconds) if self.device.type == "cuda" else min(seconds)


def serve(tree: str, link: socket.socket, device: torch.device) -> None:
    """Answer requests to the revision in ``tree`` until the socket's other end is closed."""
    errors = os.open(f"{tree}.stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(errors, 2)
    os.dup2(2, 1)
    sys.path[0] = tree  # was the current folder
    timing = SimpleNamespace(**runpy.run_path(str(TIMING)))
    worker = Worker(device, timing)
    stream = link.makefile("rw")  # open until exit: its end comes after a dying worker's stderr

    def answer(facts: Facts) -> None:
        stream.write(json.dumps(facts) + "\n")
        stream.flush()

    import flashattn  # noqa: PLC0415 - the revision's

    answer({"flashattn": flashattn.__file__})
    for line in stream:
        request = json.loads(line)
        answer(getattr(worker, request.pop("do"))(**request))


def main() -> None:
    """Fork a worker for each pair of tree and socket descriptor on the command line."""
    device, *words = sys.argv[1:]
    links = [socket.socket(fileno=int(word)) for word in words[1::2]]
    gc.freeze()
    for tree in words[::2]:
        link = links.pop(0)
        if not os.fork():
            for other in links:
                other.close()
            serve(tree, link, torch.device(device))
            return
        link.close()  # else the socket would outlive the worker
    signal.signal(signal.SIGABRT, signal.SIG_IGN)  # meant for hanging workers
    for _ in words[::2]:
        os.wait()


if __name__ == "__main__":
    main()
