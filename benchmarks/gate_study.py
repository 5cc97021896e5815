"""Error rates of the gate, on unchanged and on slower code, on a loaded machine.

    python benchmarks/gate_study.py --null 30 --reworded 10 --injected 20 --output gate.jsonl

Each pair compares the working tree with itself. In a null pair SLOWER is a false alarm. A reworded
pair adds unused functions to the new tree, which change the memory layout as any commit may. An
injected pair slows the new tree down by real work. Other processes load the machine in bursts. Each
pair is appended to the output before the next one starts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from flashattn.gate.cases import CASES, Case
from flashattn.gate.pair import Pair, terminable
from flashattn.measure.device import accelerator
from flashattn.report.gate import ROUNDS
from flashattn.report.study import Table
from flashattn.report.table import markdown

ROOT = Path(__file__).parents[1]
FOUR = {  # short and long calls, forward, backward and a whole step
    "cpu": ("tiled-forward-full", "reference-backward-causal", "attention-call", "model-forward"),
    "cuda": (
        "forward-d128-full",
        "forward-short-rows",
        "backward-d64-causal",
        "forward-d64-causal",
    ),
}
INJECTED = 0.07
# Busy for up to 0.4 s, idle for up to 0.2 s, like a neighbour that compiles or runs tests.
LOAD = """
import random, time, torch
torch.set_num_threads(1)
x = torch.randn({size}, {size}, device="{device}")
while True:
    end = time.perf_counter() + random.uniform(0, 0.4)
    while time.perf_counter() < end:
        x @ x
        {wait}
    time.sleep(random.uniform(0, 0.2))
"""


UNUSED = """

def _unused_{number}(first, second={value}):
    '''{text}'''
    return [first, second, "{value}"]
"""


@contextmanager
def loaded(processes: int, device: str) -> Iterator[None]:
    """Keep the machine busy inside the context.

    Args:
        processes: number of processes.
        device: device that they load.
    """
    on_cuda = device == "cuda"
    wait = "torch.cuda.synchronize()" if on_cuda else "pass"
    code = LOAD.format(size=4096 if on_cuda else 512, device=device, wait=wait)
    started = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(processes)]  # noqa: S603
    try:
        yield
    finally:
        for process in started:
            process.send_signal(signal.SIGKILL)
            process.wait()


def reword(tree: Path, seed: int) -> None:
    """Add unused functions to every module of a tree."""
    draw = random.Random(seed)  # noqa: S311
    for path in sorted(tree.rglob("*.py")):
        added = (
            UNUSED.format(number=n, value=draw.random(), text="x" * draw.randrange(400))
            for n in range(draw.randrange(12))
        )
        path.write_text(path.read_text() + "".join(added))


def outcomes_of(
    cases: Sequence[Case], device: str, rounds: int, *, injected: float, seed: int | None
) -> list[dict[str, Any]]:
    """Return the outcome of each case in one new pair.

    Args:
        cases: the cases to time.
        device: where to time.
        rounds: rounds of a first collection.
        injected: slowdown of the new tree, as a share of its time.
        seed: seed of the functions added to the new tree; None adds none.
    """
    pair = Pair(ROOT, None, torch.device(device))
    try:
        if seed is not None:
            reword(pair.trees["new"], seed)
        outcomes = [pair.judge(case, rounds=rounds, injected=injected) for case in cases]
    finally:
        pair.close()
    return [asdict(outcome) | {"difference": outcome.difference} for outcome in outcomes]


def kind(run: dict[str, Any]) -> str:
    """Return the kind of a pair."""
    if run["injected"]:
        return f"{run['injected']:+.0%} injected"
    return "unchanged" if run["seed"] is None else "reworded"


def summary(made: Sequence[dict[str, Any]]) -> str:
    """Return a table of verdicts and of the largest null-arm deviation, by kind of pair."""
    words = ("SLOWER", "FASTER", "SAME", "AMBIGUOUS", "UNPROVEN")
    header = ["code", "pairs", "cases", *words, "null arm, at most", "s a pair"]
    lines = []
    ordered = sorted(made, key=lambda run: (run["injected"], run["seed"] is not None))
    for name in dict.fromkeys(kind(run) for run in ordered):
        runs = [run for run in made if kind(run) == name]
        outcomes = [outcome for run in runs for outcome in run["outcomes"]]
        counts = Counter(outcome["difference"] for outcome in outcomes)
        null = max(abs(r["null"]["median"] - 1) for o in outcomes for r in o["readings"])
        seconds = sum(run["seconds"] for run in runs) / len(runs)
        shares = [f"{counts[word]} ({counts[word] / len(outcomes):.0%})" for word in words]
        numbers = [str(len(runs)), str(len(outcomes)), *shares, f"{null:.1%}", f"{seconds:.0f}"]
        lines.append([name, *numbers])
    return markdown(Table(caption="", header=header, lines=lines, rows=[]))


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--null", type=int, default=30, help="pairs of unchanged code")
    parser.add_argument(
        "--reworded", type=int, default=10, help="pairs with unused functions added"
    )
    parser.add_argument("--injected", type=int, default=20, help="pairs with a slowdown")
    parser.add_argument("--share", type=float, default=INJECTED, help="size of the slowdown")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of a first collection")
    parser.add_argument("--load", type=int, default=1, help="processes that load the machine")
    parser.add_argument("--load-gpu", action="store_true", help="load the GPU, not the CPU")
    parser.add_argument("--output", type=Path, default=Path("gate.jsonl"))
    return parser.parse_args()


def main() -> None:
    """Run the pairs and print the table."""
    options, device = arguments(), "cuda" if torch.cuda.is_available() else "cpu"
    cases = [case for case in CASES[device] if str(case) in FOUR[device]]
    header = {
        "accelerator": accelerator(torch.device(device)),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "rounds": options.rounds,
        "loaded": f"{options.load} on the {'GPU' if options.load_gpu else 'cores'}",
    }
    wanted: list[tuple[float, int | None]] = [(0.0, None)] * options.null
    wanted += [(0.0, seed) for seed in range(options.reworded)]
    wanted += [(options.share, None)] * options.injected
    random.Random(0).shuffle(wanted)  # noqa: S311 - spreads drifts of the machine over all kinds
    made = []
    with terminable(), loaded(options.load, "cuda" if options.load_gpu else "cpu"):
        for injected, seed in wanted:
            start, load = time.perf_counter(), os.getloadavg()[0]
            outcomes = outcomes_of(cases, device, options.rounds, injected=injected, seed=seed)
            run = {"injected": injected, "seed": seed, "load": load, "outcomes": outcomes}
            made.append(run | {"seconds": time.perf_counter() - start})
            with options.output.open("a") as file:
                file.write(json.dumps(header | made[-1]) + "\n")
            words = ", ".join(outcome["difference"] for outcome in outcomes)
            print(f"{kind(run)} {made[-1]['seconds']:.0f} s, load {load:.1f}: {words}", flush=True)
    print(summary(made))


if __name__ == "__main__":
    main()
