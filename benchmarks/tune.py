"""Search tiles for plan/tables on this GPU: check and time every candidate.

    python benchmarks/tune.py --head-dim 64 128 --dtype bfloat16 --kernel fwd bwd_dkdv bwd_dq

Candidates that spill, do not fit, or differ from the reference are not timed. The printed rates are
the kernel's TFLOP/s for full and causal attention. They include recomputed products, and exclude
the time to pre-split fp32. ``--precision tf32`` tunes for settings that allow TF32.
"""

import argparse
import functools
import itertools
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton

from flashattn.counts.offline import Variant, compile_variant
from flashattn.counts.single_kernel import Recomputation, decompose
from flashattn.kernels import execute
from flashattn.plan.portable import terms_of
from flashattn.plan.precision import input_precision
from flashattn.plan.rows import FUSED, OPTIONAL, Kernel
from flashattn.plan.tile import Tile
from flashattn.problem import Problem
from flashattn.reference import reference_attention
from flashattn.testing.inputs import make_grads, make_inputs

# Number of matrix products of each kernel.
PRODUCTS = {"bwd_fused": 7, "bwd_one_launch": 7, "bwd_dkdv": 4, "bwd_dq": 3}
PRODUCTS |= dict.fromkeys(("fwd", "fwd_small_grid", "fwd_short_kv"), 2)
TOKENS, WIDTH, LENGTH = 16384, 2048, 4096  # as in the FlashAttention papers
SHORT = {"fwd_short_kv": 512, "bwd_one_launch": 256}  # sequence lengths of short-sequence kernels
# Limits for gross errors; the tests check error budgets.
RELATIVE = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 2e-5, "tf32": 8e-3}
BLOCKS, WARPS = (16, 32, 64, 128), (4, 8)
SHARED = 227 << 10
WIDE = 128  # largest head dimension whose tiles need 8 rows per warp
SHOWN = ("block_q", "block_kv", "warps", "stages", "registers")

Outputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Way:
    """How a kernel receives its operands."""

    loaded: int  # bytes per element; of all bf16 terms together if pre-split
    stages: tuple[int, ...]  # pipeline stages to try
    # Accumulators per thread: fewer leave threads idle, more spill; bf16x6 also holds its terms.
    registers: range
    cut: bool = False  # whether operands are pre-split


HALF = Way(2, (1, 2, 3, 4), range(24, 241))
WHOLE = {"auto": Way(4, (1, 2), range(4, 145)), "tf32": Way(4, (1, 2, 3), range(24, 241))}
CUT = {
    "auto": Way(6, (1, 2, 3), range(4, 241), cut=True),
    "tf32": Way(4, (1, 2, 3), range(4, 241), cut=True),
}


def way(dtype: str, precision: str, load: str) -> Way:
    """Return the ``Way`` of a dtype."""
    if dtype != "float32":
        return HALF
    return (CUT if load == "cut" else WHOLE)[precision]


def problem(kernel: Kernel, head_dim: int, dtype: str, *, causal: bool) -> Problem:
    """Return the problem to time; kernels for small grids get a single head."""
    sizes: dict[str, Any] = {"batch": TOKENS // LENGTH, "heads": max(WIDTH // head_dim, 1)}
    return Problem(
        **({} if kernel in OPTIONAL else sizes),
        seq_q=SHORT.get(kernel, LENGTH),
        head_dim=head_dim,
        dtype=dtype,
        causal=causal,
    )


def candidates(
    kernel: Kernel, head_dim: int, given: Way, *, descriptors: bool, limits: Sequence[int] = (0,)
) -> list[Tile]:
    """Return the tiles that fit in registers and shared memory, with each register limit.

    ``descriptors``: whether operands are loaded through tensor descriptors (TMA).
    """
    of_forward, short = kernel.startswith("fwd"), kernel == "fwd_short_kv"
    owned, scores = (1, 1) if of_forward else (1, 2) if kernel == "bwd_dq" else (2, 2)
    found = []
    # fewest rows per warp in half precision
    rows = 1 if short else 8 if head_dim <= WIDE else 4
    limited = range(given.registers.stop) if short else given.registers
    for block_q, block_kv, warps, stages in itertools.product(BLOCKS, BLOCKS, WARPS, given.stages):
        of_keys = kernel in {"bwd_dkdv", *FUSED}
        own, walked = (block_kv, block_q) if of_keys else (block_q, block_kv)
        registers = (owned * own * head_dim + scores * block_q * block_kv) // (32 * warps)
        resident = own * (1 if of_forward else 2)
        buffers = stages - short  # wgmma needs more than 16 rows to read shared memory
        shared = given.loaded * head_dim * (resident + 2 * buffers * walked)
        fits = registers in limited and shared <= SHARED
        if fits and (given is not HALF or own >= rows * warps):
            tile = Tile(block_q, block_kv, warps, stages, descriptors, decomposed=given.cut)
            found += [replace(tile, registers=n) for n in limits]
    return found


@functools.lru_cache(2)
def prepare(
    kernel: Kernel, asked: Problem, precision: str
) -> tuple[Callable[[Tile], Outputs], Outputs, Outputs]:
    """Return the kernel as a function of its tile, one head's expected result, and the inputs."""
    q, k, v = make_inputs(asked, device="cuda")
    grad_o, _ = make_grads(asked, device="cuda")
    options = {"right": asked.band.right, "scale": asked.head_dim**-0.5}
    one = [x[:1, :1].float().requires_grad_() for x in (q, k, v)]
    exact, exact_lse = reference_attention(*one, mask=asked.mask, scale=options["scale"])
    if kernel.startswith("fwd"):
        how: dict[str, Any] = {"row": kernel, "precision": precision, **options}
        fold = functools.partial(execute.forward, q, k, v, **how)
        return lambda tile: fold(tile=tile)[:1], (exact.detach(),), (q, k, v)
    dq, dk, dv = torch.autograd.grad(exact, one, grad_o[:1, :1].float())
    o, lse = torch.zeros_like(q), torch.zeros_like(q[..., 0], dtype=torch.float32)
    o[:1, :1], lse[:1, :1] = exact.detach(), exact_lse.detach()
    splits = 1 if kernel == "bwd_one_launch" else None
    how = {"precision": precision, "num_splits": splits, **options}
    given = Recomputation(q=q, k=k, v=v, grad_o=grad_o, grad_lse=None, o=o, lse=lse, **how)
    wanted = {"bwd_dkdv": (dk, dv), "bwd_dq": (dq,)}.get(kernel, (dk, dv, dq))
    return lambda tile: given.gradients(kernel, tile), wanted, (q, k, v, grad_o)


def check(kernel: Kernel, asked: Problem, tile: Tile, precision: str) -> None:
    """Run the kernel once and check its result.

    Raises:
        ValueError: the result is wrong.
    """
    call, wanted, _ = prepare(kernel, asked, precision)
    most = RELATIVE[precision if precision in RELATIVE else asked.dtype]
    for got, exact in zip(call(tile), wanted, strict=True):
        error = ((got[:1, :1] - exact).norm() / exact.norm()).item()
        if not error < most:
            raise ValueError(f"relative error {error:.1e}")


def fault(kernel: Kernel, asked: Problem, tile: Tile, precision: str) -> str | None:
    """Compile and check a tile; return its fault, or None."""
    arch = f"sm_{torch.cuda.get_device_capability()[0]}0"
    size = asked.torch_dtype.itemsize
    try:
        variant = Variant(
            arch, kernel, size, asked.head_dim, tile, bool(asked.causal), precision=precision
        )
        complaint = compile_variant(variant).complaint(arch)
        if complaint is None:
            check(kernel, replace(asked, batch=1), tile, precision)
    except Exception as error:  # noqa: BLE001 - compiler errors rule a tile out too
        return f"{type(error).__name__}: {str(error)[:100]}"
    return complaint


def rate(kernel: Kernel, asked: Problem, tile: Tile, precision: str) -> float:
    """Check the result, then return FLOP/s; the time to pre-split operands is excluded."""
    check(kernel, asked, tile, precision)
    call, _, inputs = prepare(kernel, asked, precision)
    bench = functools.partial(triton.testing.do_bench, warmup=15, rep=50, return_mode="median")
    seconds = bench(lambda: call(tile)) / 1e3
    terms = terms_of(tile, asked.torch_dtype, input_precision(precision, asked.torch_dtype))
    if terms:
        seconds -= bench(lambda: decompose(*inputs, terms=terms)) / 1e3
    return 2 * PRODUCTS[kernel] * asked.pairs * asked.head_dim / seconds


def faults(jobs: list[tuple[Kernel, Problem, Tile, str]]) -> list[str | None]:
    """Check all jobs in parallel; return the fault of each.

    An illegal memory access breaks its whole process, so jobs with CUDA errors are repeated, each
    in a new process.
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
    kernel: Kernel, dtype: str, head_dim: int, tiles: Sequence[Tile], precision: str = "auto"
) -> list[dict[str, Any]]:
    """Return the rows of all tiles, fastest first."""
    full, causal = (problem(kernel, head_dim, dtype, causal=mask) for mask in (False, True))
    found = faults([(kernel, asked, tile, precision) for tile in tiles for asked in (full, causal)])
    rows = []
    for tile, *reasons in zip(tiles, found[::2], found[1::2], strict=True):
        reason = reasons[0] or reasons[1]
        rates = [] if reason else [rate(kernel, asked, tile, precision) for asked in (full, causal)]
        row: dict[str, Any] = {"kernel": kernel, "dtype": dtype, "head_dim": head_dim}
        row |= {"precision": precision, **asdict(tile)}
        score = math.sqrt(math.prod(rates)) if rates else 0.0
        rows.append(row | {"rates": rates, "score": score, "fault": reason})
    return sorted(rows, key=lambda row: row["score"], reverse=True)


def main() -> None:
    """Run the searches and print the best tiles."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kernel", nargs="+", default=list(PRODUCTS), choices=list(PRODUCTS))
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"], choices=list(RELATIVE))
    parser.add_argument("--head-dim", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--precision", default="auto", choices=("auto", "tf32"), help="of fp32")
    loads = ("descriptors", "pointers", "cut")
    parser.add_argument("--load", choices=loads, help="(default: cut in fp32, else descriptors)")
    parser.add_argument("--registers", nargs="+", type=int, default=[0], help="limits; 0 is none")
    parser.add_argument("--show", type=int, default=4, help="rows printed for each search")
    parser.add_argument("--save", type=Path, help="write every row to this JSON file")
    options = parser.parse_args()
    everything: list[dict[str, Any]] = []
    for dtype, head_dim, kernel in itertools.product(
        options.dtype, options.head_dim, options.kernel
    ):
        usual = "cut" if dtype == "float32" else "descriptors"
        load = options.load or ("pointers" if kernel in SHORT else usual)
        given = way(dtype, options.precision, load)
        tiles = candidates(
            kernel, head_dim, given, descriptors=load != "pointers", limits=options.registers
        )
        rows = tune(kernel, dtype, head_dim, tiles, options.precision)
        everything += rows
        for row in rows[: options.show]:
            rates = " ".join(f"{x * 1e-12:.0f}" for x in row["rates"]) or row["fault"]
            tile = tuple(row[name] for name in SHOWN if row[name])
            size = getattr(torch, dtype).itemsize
            print(f'("{kernel}", {size}, {head_dim}): {tile},  # {dtype} {load}: {rates}')
        if options.save:
            options.save.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
