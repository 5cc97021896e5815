"""Search tiles on this GPU: check every candidate, time it, print what kernels/tiles.py stores.

    python benchmarks/tune.py --head-dim 64 128 --dtype bfloat16 --kernel fwd bwd_dkdv bwd_dq

A candidate that spills, does not fit, or gives another result than the reference is never timed.
The figure is the kernel's own TFLOP/s, products that it recomputes included, for full and causal
attention; fp32 that comes cut was cut before.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path

import torch
import triton

from flashattn.kernels import backward, forward, launch
from flashattn.kernels.cut import cut_all
from flashattn.kernels.offline import Variant, compile_variant
from flashattn.kernels.tiles import Kernel, Tile
from flashattn.problem import Problem
from flashattn.reference import reference_attention
from flashattn.testing.inputs import make_grads, make_inputs

PRODUCTS = {"fwd": 2, "bwd": 7, "bwd_dkdv": 4, "bwd_dq": 3}  # matrix products of each kernel
TOKENS, WIDTH, LENGTH = 16384, 2048, 4096  # the community's protocol: batch and heads follow
RELATIVE = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 2e-5}  # gross errors; tests hold budgets
BLOCKS, WARPS = (16, 32, 64, 128), (4, 8)
# Bytes of an element where tiles are loaded: 6 are three parts of an fp32 that comes cut.
STAGES = {2: (1, 2, 3, 4), 4: (1, 2), 6: (1, 2, 3)}  # fp32 has no room for more
# A thread's part of the accumulators: with fewer it idles, with more it must spill. Six bf16
# products split what is not cut in registers, which leaves less of them.
REGISTERS = {2: range(24, 241), 4: range(4, 145), 6: range(4, 241)}
SHARED = 227 << 10
WIDE = 128  # head dimension
SHOWN = ("block_q", "block_kv", "warps", "stages", "registers")

Outputs = tuple[torch.Tensor, ...]


def problem(kernel: Kernel, head_dim: int, dtype: str, *, causal: bool) -> Problem:
    """Return what a tile is judged by: a single head for "bwd", which is for few programs."""
    heads = 1 if kernel == "bwd" else max(WIDTH // head_dim, 1)
    batch = 1 if kernel == "bwd" else TOKENS // LENGTH
    return Problem(
        batch=batch, heads=heads, seq_q=LENGTH, head_dim=head_dim, dtype=dtype, causal=causal
    )


def candidates(
    kernel: Kernel, size: int, head_dim: int, *, descriptors: bool, limits: Sequence[int] = (0,)
) -> list[Tile]:
    """Return the tiles whose accumulators fit the registers and whose loads the shared memory.

    Args:
        kernel: which.
        size: bytes per element.
        head_dim: D.
        descriptors: whether tiles are loaded by them.
        limits: of registers.
    """
    owned, scores = {"fwd": (1, 1), "bwd_dq": (1, 2)}.get(kernel, (2, 2))
    found, loaded = [], 6 if descriptors and size == 4 else size  # noqa: PLR2004 - bytes
    rows = 8 if head_dim <= WIDE else 4  # of its own that a warp has at least, in half precision
    for block_q, block_kv, warps, stages in itertools.product(
        BLOCKS, BLOCKS, WARPS, STAGES[loaded]
    ):
        of_keys = kernel in ("bwd", "bwd_dkdv")
        own, walked = (block_kv, block_q) if of_keys else (block_q, block_kv)
        registers = (owned * own * head_dim + scores * block_q * block_kv) // (32 * warps)
        resident = own * (1 if kernel == "fwd" else 2)
        shared = loaded * head_dim * (resident + 2 * stages * walked)
        fits = registers in REGISTERS[loaded] and shared <= SHARED
        if fits and (size == 4 or own >= rows * warps):  # noqa: PLR2004
            tile = Tile(block_q, block_kv, warps, stages, descriptors, cut=loaded != size)
            found += [replace(tile, registers=n) for n in limits]
    return found


@functools.lru_cache(2)
def prepare(kernel: Kernel, asked: Problem) -> tuple[Callable[[Tile], Outputs], Outputs, Outputs]:
    """Return the kernel as a function of its tile, its first head's result, and its inputs."""
    q, k, v = make_inputs(asked, device="cuda")
    grad_o, _ = make_grads(asked, device="cuda")
    options = {"diagonal": asked.diagonal, "scale": asked.head_dim**-0.5}
    one = [x[:1, :1].float().requires_grad_() for x in (q, k, v)]
    exact, exact_lse = reference_attention(*one, **options)
    if kernel == "fwd":
        return (
            lambda tile: forward.forward(q, k, v, tile=tile, **options)[:1],
            (exact.detach(),),
            (q, k, v),
        )
    dq, dk, dv = torch.autograd.grad(exact, one, grad_o[:1, :1].float())
    o, lse = torch.zeros_like(q), torch.zeros_like(q[..., 0], dtype=torch.float32)
    o[:1, :1], lse[:1, :1] = exact.detach(), exact_lse.detach()
    lse2, delta = backward.row_terms(grad_o, None, o, lse)
    given = backward.Recomputation(
        q=q, k=k, v=v, grad_o=grad_o, lse2=lse2, delta=delta, precision="auto", **options
    )
    wanted = {"bwd": (dk, dv, dq), "bwd_dkdv": (dk, dv), "bwd_dq": (dq,)}[kernel]
    return lambda tile: given.gradients(kernel, tile), wanted, (q, k, v, grad_o)


def check(kernel: Kernel, asked: Problem, tile: Tile) -> None:
    """Run the kernel once.

    Raises:
        ValueError: its result is wrong.
    """
    call, wanted, _ = prepare(kernel, asked)
    for got, exact in zip(call(tile), wanted, strict=True):
        error = ((got[:1, :1] - exact).norm() / exact.norm()).item()
        if not error < RELATIVE[asked.dtype]:
            msg = f"relative error {error:.1e}"
            raise ValueError(msg)


def fault(kernel: Kernel, asked: Problem, tile: Tile) -> str | None:
    """Return what keeps a tile out of the race, or None; compiles it into Triton's cache."""
    arch = f"sm_{torch.cuda.get_device_capability()[0]}0"
    size = asked.torch_dtype.itemsize
    try:
        variant = Variant(arch, kernel, size, asked.head_dim, tile, bool(asked.causal))
        complaint = compile_variant(variant).complaint(arch)
        if complaint is None:
            check(kernel, replace(asked, batch=1), tile)
    except Exception as error:  # noqa: BLE001 - one that the compiler refuses is out, as well
        return f"{type(error).__name__}: {str(error)[:100]}"
    return complaint


def rate(kernel: Kernel, asked: Problem, tile: Tile) -> float:
    """Return the kernel's flop/s on this problem, after checking its result.

    To cut what it takes cut is timed by itself, and taken off.
    """
    check(kernel, asked, tile)
    call, _, inputs = prepare(kernel, asked)
    bench = functools.partial(triton.testing.do_bench, warmup=15, rep=50, return_mode="median")
    seconds = bench(lambda: call(tile)) / 1e3
    if launch.cuts(tile, asked.torch_dtype, launch.input_precision("auto", asked.torch_dtype)):
        seconds -= bench(lambda: cut_all(*inputs)) / 1e3
    return 2 * PRODUCTS[kernel] * asked.pairs * asked.head_dim / seconds


def faults(jobs: list[tuple[Kernel, Problem, Tile]]) -> list[str | None]:
    """Return every job's fault, found side by side.

    A kernel that reads where it must not breaks its whole process: what else failed there in that
    way is tried again in a process of its own.
    """
    context, cores = get_context("spawn"), len(os.sched_getaffinity(0))
    with context.Pool(cores) as pool:
        found = pool.starmap(fault, jobs, chunksize=1)
    broken = [i for i, reason in enumerate(found) if reason and "CUDA" in reason]
    if not broken:
        return found
    with context.Pool(cores, maxtasksperchild=1) as pool:
        again = pool.starmap(fault, [jobs[i] for i in broken], chunksize=1)
    for i, reason in zip(broken, again, strict=True):
        found[i] = reason
    return found


def tune(
    kernel: Kernel, dtype: str, head_dim: int, *, descriptors: bool, limits: Sequence[int]
) -> list[dict[str, object]]:
    """Return every candidate's row, the fastest first."""
    full, causal = (problem(kernel, head_dim, dtype, causal=mask) for mask in (False, True))
    size = full.torch_dtype.itemsize
    tiles = candidates(kernel, size, head_dim, descriptors=descriptors, limits=limits)
    found = faults([(kernel, asked, tile) for tile in tiles for asked in (full, causal)])
    rows = []
    for tile, *reasons in zip(tiles, found[::2], found[1::2], strict=True):
        reason = next((x for x in reasons if x), None)
        rates = [] if reason else [rate(kernel, asked, tile) for asked in (full, causal)]
        row = {"kernel": kernel, "dtype": dtype, "head_dim": head_dim, **asdict(tile)}
        score = math.sqrt(math.prod(rates)) if rates else 0.0
        rows.append(row | {"rates": rates, "score": score, "fault": reason})
    return sorted(rows, key=lambda row: row["score"], reverse=True)


def main() -> None:
    """Search and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kernel", nargs="+", default=list(PRODUCTS), choices=list(PRODUCTS))
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"], choices=list(RELATIVE))
    parser.add_argument("--head-dim", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--pointers", action="store_true", help="load by pointers, not descriptors")
    parser.add_argument("--registers", nargs="+", type=int, default=[0], help="limits; 0 is none")
    parser.add_argument("--show", type=int, default=4, help="rows printed for each search")
    parser.add_argument("--save", type=Path, help="write every row to this JSON file")
    options = parser.parse_args()
    everything: list[dict[str, object]] = []
    for dtype, head_dim, kernel in itertools.product(
        options.dtype, options.head_dim, options.kernel
    ):
        rows = tune(
            kernel, dtype, head_dim, descriptors=not options.pointers, limits=options.registers
        )
        everything += rows
        for row in rows[: options.show]:
            rates = " ".join(f"{x * 1e-12:.0f}" for x in row["rates"]) or row["fault"]
            tile = tuple(row[name] for name in SHOWN)
            print(f"{dtype} {head_dim} {kernel} {tile} {rates}", flush=True)
        if options.save:
            options.save.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
