"""Compile a kernel for any GPU without having one, and read what the assembler made of it.

``python -m flashattn.kernels.offline`` compiles every kernel with every tile of the table and fails
if one spills or does not fit. It needs a process in which Triton is not interpreted.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flashattn.kernels import backward, forward
from flashattn.kernels.primitives import SIZES
from flashattn.kernels.tiles import TABLES, Kernel, Tile

KERNELS = {
    "fwd": forward.flashattn_fwd,
    "bwd_dkdv": backward.flashattn_bwd_dkdv,
    "bwd_dq": backward.flashattn_bwd_dq,
}
ELEMENTS = {2: "bf16", 4: "fp32"}
# The most that a program of one GPU of the family can have, in bytes: sm_80 stands for all of 8.x
# and 12.x, where consumer cards have 99 KiB.
SHARED_LIMIT = {"sm_80": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10}


# fp32 at BLOCK_D 256: three TF32 products split operands 256 wide in registers, twice 128 a thread,
# and no tile of the search has room for that. Reported, and not held against the table.
KNOWN_TO_SPILL = {(4, 256)}


@dataclass(frozen=True)
class Variant:
    """One kernel as one launch compiles it."""

    arch: str
    kernel: Kernel
    size: int
    head_dim: int
    tile: Tile
    causal: bool

    def __str__(self) -> str:
        """Return a row's label."""
        mask = "causal" if self.causal else "full"
        return (
            f"{self.arch} {self.kernel} {ELEMENTS[self.size]} d{self.head_dim} {mask} {self.tile}"
        )


@dataclass(frozen=True)
class Resources:
    """What one program takes: registers a thread, stack bytes a thread (spills), shared bytes."""

    registers: int
    stack: int
    shared: int

    def complaint(self, arch: str) -> str | None:
        """Return what is wrong with it, or None."""
        if self.stack:
            return f"spills: {self.stack} bytes of stack"
        if self.shared > SHARED_LIMIT[arch]:
            return f"takes {self.shared} bytes of shared memory, {SHARED_LIMIT[arch]} is the most"
        return None


def _source(variant: Variant) -> ASTSource:
    """Return the kernel with the argument types that a launch on aligned tensors gives it."""
    fn, tile, d = KERNELS[variant.kernel], variant.tile, variant.head_dim
    element = ELEMENTS[variant.size]
    rows = {"q": tile.block_q, "grad_o": tile.block_q, "k": tile.block_kv, "v": tile.block_kv}
    options = tile.options(d)
    constants: dict[str, Any] = {
        "CAUSAL": variant.causal,
        "POSITIVE_SCALE": True,
        "PRECISION": "tf32x3" if element == "fp32" else "ieee",
        **{name: options[name] for name in options if name.isupper()},
    }
    signature: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    aligned = [["tt.divisibility", 16]]
    for i, name in enumerate(fn.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in rows and tile.descriptors:
            signature[name] = f"tensordesc<{element}[1, 1, {rows[name]}, {options['BLOCK_D']}]>"
        elif name.endswith("strides"):
            signature[name] = ("i32",) * 3
            attributes |= {(i, j): aligned for j in range(3)}
        elif name.startswith("scale"):
            signature[name] = "fp32"
        elif name in ("pitch", "head_dim"):
            signature[name], attributes[(i,)] = "i32", aligned
        elif name in SIZES:
            signature[name] = "i32"
        else:
            signature[name] = "*fp32" if name in ("lse", "lse2", "delta") else f"*{element}"
            attributes[(i,)] = aligned
    return ASTSource(
        fn, signature, {n: constants[n] for n in fn.arg_names if n in constants}, attributes
    )


@cache
def _cuobjdump() -> str:
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")


def compile_variant(variant: Variant) -> Resources:
    """Compile one variant and read its resources from the cubin.

    Raises:
        RuntimeError: Triton is interpreting in this process.
        Exception: whatever Triton's compiler raises.
    """
    if triton.knobs.runtime.interpret:
        msg = (
            "wanted a process without TRITON_INTERPRET=1: an interpreted kernel cannot be compiled"
        )
        raise RuntimeError(msg)
    options = {"num_warps": variant.tile.warps, "num_stages": variant.tile.stages}
    target = GPUTarget("cuda", int(variant.arch.removeprefix("sm_")), 32)
    compiled = triton.compile(_source(variant), target=target, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(  # noqa: S603 - the wheel's own tool
            [_cuobjdump(), "-res-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    registers, stack = (int(re.findall(rf"{field}:(\d+)", usage)[0]) for field in ("REG", "STACK"))
    return Resources(registers, stack, compiled.metadata.shared)


def variants(arches: list[str]) -> list[Variant]:
    """Return every kernel with every tile of the tables of these architectures."""
    return [
        Variant(arch, kernel, size, head_dim, tile, causal)
        for arch in arches
        for (kernel, size, head_dim, causal, _), tile in TABLES[arch].items()
    ]


def _report(variant: Variant) -> tuple[Variant, str | None, str]:
    try:
        resources = compile_variant(variant)
    except Exception as error:  # noqa: BLE001 - one that does not compile must not hide the others
        return variant, f"does not compile: {error}", ""
    if (variant.size, variant.head_dim) in KNOWN_TO_SPILL and resources.stack:
        spilled, resources = resources, replace(resources, stack=0)  # all but that is still judged
        return variant, resources.complaint(variant.arch), f"{spilled}, known to spill"
    return variant, resources.complaint(variant.arch), str(resources)


def main(arguments: list[str] | None = None) -> int:
    """Compile the tables; return how many variants are wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m flashattn.kernels.offline", description=__doc__
    )
    arches = [arch for arch in TABLES if arch in SHARED_LIMIT]
    parser.add_argument("arch", nargs="*", default=arches, help=f"of {', '.join(arches)}")
    wanted = variants(parser.parse_args(arguments).arch)
    wrong = 0
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for variant, complaint, resources in pool.map(_report, wanted):
            wrong += complaint is not None
            print(f"{'FAIL' if complaint else 'ok'} {variant} {complaint or ''} {resources}")
    print(f"triton {triton.__version__}: {len(wanted) - wrong} passed, {wrong} failed")
    return wrong


if __name__ == "__main__":
    sys.exit(main() > 0)
