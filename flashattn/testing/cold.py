"""A process of its own, for what a first step costs: ``python -m flashattn.testing.cold``."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import torch

from flashattn.measure.timing import clock_of
from flashattn.testing.trained import Trained


def steps_in_a_new_process(**facts: Any) -> list[float]:
    """Return the seconds of training steps that follow a warm-up in a process that did nothing yet.

    Args:
        facts: ``run``'s arguments.

    Raises:
        RuntimeError: the process failed; the message has the end of what it said.
    """
    command = [sys.executable, "-m", "flashattn.testing.cold", json.dumps(facts)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode != 0:
        raise RuntimeError(f"a new process for cold steps failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def run(
    *,
    size: str,
    context: int,
    batch: int,
    precision: str,
    warm_steps: int,
    measured: int,
    device: str,
) -> list[float]:
    """Make a model, take ``warm_steps`` training steps, and return the seconds of the next ones.

    Host time, each step waited for: of a first step most is spent on the host.

    Args:
        size: a key of ``lm.SIZES``.
        context: T.
        batch: B.
        precision: one of Trainer's.
        warm_steps: taken before the clock starts.
        measured: how many steps are timed.
        device: its type.
    """
    where = torch.device(device)
    trained = Trained(
        size=size, context=context, batch=batch, precision=precision, impl="naive", device=where
    )
    step, wait = trained.trainer.train, clock_of(where).synchronize
    for _ in range(warm_steps):
        step()
    seconds = []
    for _ in range(measured):
        wait()
        start = time.perf_counter()
        step()
        wait()
        seconds.append(time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    sys.stdout.write(json.dumps(run(**json.loads(sys.argv[1]))) + "\n")
