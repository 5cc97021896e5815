"""Search tiles for plan/tables/hopper.py, and compare them with cuDNN.

    python benchmarks/tune_hopper.py --head-dim 64 128 --passes forward backward --save search.json

Tiles whose results differ from the portable kernels by more than rounding are not timed. The
others and cuDNN are timed alternately, in a random order in each round, because a warm GPU is
slower. FLOPs are 4 T S D forward and 10 T S D backward, and half of that with a causal mask.
"""

import argparse
import itertools
import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flashattn.kernels import execute
from flashattn.measure.device import machine_info
from flashattn.plan.tables.hopper import ONE_PASS
from flashattn.plan.tile import (
    HopperBackward,
    HopperBackwardTile,
    HopperD256Tile,
    HopperTile,
    head_dim_split,
)

TOKENS, WIDTH = 16384, 2048  # as in the FlashAttention papers
LENGTHS = (1024, 2048, 4096, 8192, 16384)
PASSES = {"forward": 4, "backward": 10}  # FLOPs as multiples of T S D
CLOSE = 1e-2  # limit on the relative error in bf16; the tests check error budgets
ROUNDS, SHARE = 5, 0.012  # rounds, and seconds of each call per round
AHEAD = 200_000  # clock cycles to keep the device busy while the first calls are queued
PROCESSES = 12
SECTIONS = (1, 4, 8, 16, 32, 64)
# Pipeline stages of the backward that fit, by padded head dimension.
STAGES = {64: (2,), 96: (2, 3), 128: (2, 3), 192: (2, 3), 256: (2,)}
FORWARD = {
    64: (
        HopperTile(stages=4),
        HopperTile(stages=4, consumers=3, registers=160),
        HopperTile(block_kv=64, stages=6),
    ),
    96: (HopperTile(), HopperTile(own_o=False, stages=3)),
    128: (HopperTile(), HopperTile(own_o=False, stages=3)),
    192: (HopperTile(block_kv=64, own_o=False), HopperTile(block_kv=64, own_o=False, stages=3)),
    256: (HopperTile(block_kv=64, own_o=False),),
}


@dataclass(frozen=True)
class Way:
    """A candidate configuration of a pass."""

    tile: HopperTile | HopperBackward
    deterministic: bool = True  # whether gradients are accumulated in a fixed order

    def __str__(self) -> str:
        """Return the tile as a row of the table."""
        plain, given = asdict(type(self.tile)()), asdict(self.tile)
        numbers = ", ".join(f"{name}={x}" for name, x in given.items() if x != plain[name])
        return f"{type(self.tile).__name__}({numbers})" + " any order" * (not self.deterministic)


def ways(direction: str, head_dim: int, *, causal: bool) -> list[Way]:
    """Return the candidates for a ``head_dim`` from 33 to 256."""
    width = sum(head_dim_split(head_dim))
    if direction == "forward":
        return [Way(config) for config in FORWARD[width]]
    if width > ONE_PASS:
        sections = SECTIONS if causal else SECTIONS[1:2]
        return [
            Way(HopperD256Tile(stages=stages, section=section))
            for stages, section in itertools.product(STAGES[width], sections)
        ]
    configs = [
        HopperBackwardTile(stages=stages, section=section, persistent=persistent)
        for stages, section, persistent in itertools.product(STAGES[width], SECTIONS, (False, True))
    ]
    return [Way(config, kind) for kind in (False, True) for config in configs]


def make(head_dim: int, length: int, *, batch: int, heads: int) -> list[torch.Tensor]:
    """Return q, k, v and dO in bf16."""
    shape = (batch, heads, length, head_dim)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]


def prepare(
    direction: str, inputs: list[torch.Tensor], *, causal: bool
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return a function that runs the pass as a ``Way``, and one that runs the portable kernels."""
    q, k, v, grad_o = inputs
    how: dict[str, Any] = {"right": 0 if causal else None, "scale": q.shape[-1] ** -0.5}
    forward = partial(execute.forward, q, k, v, **how)
    if direction == "forward":
        return lambda way: forward(tile=way.tile, family="hopper"), forward
    back = partial(execute.backward, (grad_o, None), (q, k, v, *forward()), **how)
    by = partial(back, family="hopper")
    return lambda way: by(tile=way.tile, deterministic=way.deterministic), back


def fault(job: tuple[str, int, bool, Way]) -> str | None:
    """Compile and check a ``Way``; return its fault, or None."""
    direction, head_dim, causal, way = job
    torch.manual_seed(0)
    inputs = make(head_dim, 500, batch=3, heads=4)
    by, portable = prepare(direction, inputs, causal=causal)
    try:
        got, want = by(way), portable()
    except Exception as error:  # noqa: BLE001 - any error rules it out
        return str(error).splitlines()[0]
    errors = [
        float((a.float() - b.float()).norm() / b.float().norm())
        for a, b in zip(got, want, strict=True)
    ]
    return None if all(error < CLOSE for error in errors) else f"errors {errors}"


def elapsed(call: Callable[[], Any], times: int) -> float:
    """Return the mean device time of a call in seconds."""
    call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(AHEAD)  # noqa: SLF001 - there is no public way
    begin.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / times * 1e-3


def cudnn(direction: str, inputs: list[torch.Tensor], *, causal: bool) -> Callable[[], Any]:
    """Return a function that runs the pass with cuDNN."""
    q, k, v, grad_o = inputs
    call = partial(scaled_dot_product_attention, is_causal=causal)
    if direction == "forward":
        return partial(call, q, k, v)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = call(leaves[0], leaves[1], leaves[2])
    return lambda: torch.autograd.grad(o, leaves, grad_o, retain_graph=True)


def compare(
    direction: str, head_dim: int, length: int, found: list[Way], *, causal: bool
) -> dict[str, Any]:
    """Return the TFLOP/s of cuDNN, of the portable kernels and of each ``Way``."""
    heads, batch = WIDTH // head_dim, TOKENS // length
    inputs = make(head_dim, length, batch=batch, heads=heads)
    work = PASSES[direction] * TOKENS * length * heads * head_dim * (0.5 if causal else 1.0)
    by, portable = prepare(direction, inputs, causal=causal)
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        calls = {"cudnn": cudnn(direction, inputs, causal=causal), "portable": portable}
        calls |= {str(way): partial(by, way) for way in found}
        times = max(3, int(SHARE * 5e14 / work))
        taken: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(ROUNDS):
            for name in random.sample(list(calls), len(calls)):
                taken[name].append(elapsed(calls[name], times))
    rates = {
        name: round(work / sorted(each)[ROUNDS // 2] * 1e-12, 1) for name, each in taken.items()
    }
    case = {"pass": direction, "head_dim": head_dim, "causal": causal, "length": length}
    return case | {"tflops": rates}


def main() -> None:
    """Run the searches and print the best candidates."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--passes", nargs="+", default=list(PASSES), choices=list(PASSES))
    parser.add_argument("--head-dim", nargs="+", type=int, default=list(FORWARD))
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--show", type=int, default=4, help="ways printed for each case")
    parser.add_argument("--save", type=Path, help="write every row to this JSON file")
    options = parser.parse_args()
    searches = list(itertools.product(options.passes, options.head_dim, (False, True)))
    jobs = [
        (direction, head_dim, causal, way)
        for direction, head_dim, causal in searches
        for way in ways(direction, head_dim, causal=causal)
    ]
    with get_context("spawn").Pool(PROCESSES) as pool:
        faults = dict(zip(jobs, pool.map(fault, jobs, chunksize=1), strict=True))
    for job, why in faults.items():
        if why:
            print(*job[:3], job[3], "is left out:", why, flush=True)
    rows = []
    for (direction, head_dim, causal), length in itertools.product(searches, options.lengths):
        search = direction, head_dim, causal
        sound = [job[3] for job, why in faults.items() if job[:3] == search and why is None]
        row = compare(direction, head_dim, length, sound, causal=causal)
        rows.append(row)
        rates = sorted(row["tflops"].items(), key=lambda item: -item[1])
        shown = [f"{name}: {x:.0f}" for name, x in rates if name != "cudnn"][: options.show]
        case = f"{direction} {head_dim} {'causal' if causal else 'full'} {length}"
        print(f"{case} cudnn {row['tflops']['cudnn']:.0f} |", "; ".join(shown), flush=True)
        if options.save:
            said = {"machine": machine_info(torch.device("cuda")), "rows": rows}
            options.save.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
