"""Compile a kernel for any GPU without having one, and read what the compilers made of it.

It needs a process in which Triton is not interpreted.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flashattn.kernels import launch
from flashattn.kernels.constants import SIZES
from flashattn.kernels.hopper import offline as hopper
from flashattn.kernels.hopper.offline import HopperVariant
from flashattn.kernels.portable import backward, bf16x3, combine, forward, preprocess
from flashattn.kernels.tiles import (
    HEAD_DIMS,
    OPTIONAL,
    TABLES,
    TF32,
    Kernel,
    Tile,
    block_d,
    padding,
)

Untiled = Literal["combine", "cut", "bwd_delta", "bwd_sum"]
KERNELS: dict[str, Any] = {
    **dict.fromkeys(("fwd", "fwd_few", "fwd_short", "decode"), forward.flashattn_fwd),
    "combine": combine.flashattn_combine,
    "cut": bf16x3.flashattn_cut,
    "bwd_delta": preprocess.flashattn_bwd_delta,
    "bwd_sum": combine.flashattn_bwd_sum,
    **{str(kernel): fn for kernel, fn in backward.KERNELS.items()},
}
FIXED: dict[Untiled, tuple[int, int]] = {  # rows of a program and warps, where no table says
    "combine": (combine.COMBINE_BLOCK, combine.COMBINE_WARPS),
    "cut": (bf16x3.BLOCK, bf16x3.WARPS),
    "bwd_delta": (preprocess.DELTA_BLOCK, preprocess.DELTA_WARPS),
    "bwd_sum": (combine.SUM_BLOCK, combine.SUM_WARPS),
}
ROWS = (
    "lse",
    "lse_partial",
    "o_partial",
    "dk_terms",
    "dv_terms",
    "dq_terms",
    "grad_lse",
    "lse2",
    "delta",
)  # fp32, whatever the inputs
INPUTS = ("q", "k", "v", "grad_o")
SUMS = ("o", "dk", "dv", "dq")  # fp32, where rows are split
ELEMENTS = {2: "bf16", 4: "fp32"}
DTYPES = {2: torch.bfloat16, 4: torch.float32}
# The most that a program of one GPU of the family can have, in bytes: sm_80 stands for all of 8.x
# and 12.x, where consumer cards have 99 KiB.
SHARED_LIMIT = {"sm_80": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10}

# Ways to compile a kernel. Few queries always find keys to split but where they are many heads; and
# short and whole is what is not split.
SPLIT = {"decode": (True,), "fwd_short": (False,), "bwd_whole": (False,)}
TAKE_O = ("fwd", "fwd_few", "fwd_short", "decode", "bwd_whole")
ARCHITECTURES = tuple(SHARED_LIMIT)
EXECUTABLE = 4  # flag of a section of an ELF file
# PTX's matrix instructions with the numbers in their names: mma.sync.aligned.m16n8k16 ... .bf16,
# wgmma.mma_async.sync.aligned.m64n64k16 ... .bf16, tcgen05.mma.cta_group::1.kind::f16.
MATRIX = re.compile(
    r"\b(?:(wgmma|mma)\.[\w.]*?\.(m\d+n\d+k\d+)[\w.]*?\.f32\.(\w+)|(tcgen05)\.mma\.\S*?kind::(\w+))"
)


@dataclass(frozen=True)
class Variant:
    """One kernel as one launch compiles it.

    Args:
        arch: sm_80, sm_90, sm_100.
        kernel: which.
        size: bytes per element.
        head_dim: D.
        tile: of the launch; None for kernels that have one for all, and no mask.
        causal: whether scores are masked.
        describable: whether it serves inputs that can have descriptors; the tile may do without.
        split: whether a program has a part of the rows only that it would walk over.
        precision: as ``launch.input_precision`` takes it.
    """

    arch: str
    kernel: Kernel | Untiled
    size: int
    head_dim: int
    tile: Tile | None
    causal: bool
    describable: bool = False
    split: bool = False
    precision: str = "auto"

    def __str__(self) -> str:
        """Return what picks the tile."""
        name = f"{self.arch} {self.kernel} {ELEMENTS[self.size]} d{self.head_dim}"
        asked = f" {self.precision}" if self.precision != "auto" else ""
        if self.tile is None:
            return name + asked
        loading = "cut" if self.cut else "descriptors" if self.describable else "pointers"
        return (
            f"{name} {'causal' if self.causal else 'full'} {loading}{' split' * self.split}{asked}"
        )

    @property
    def cut(self) -> int:
        """Into how many parts its operands are cut beforehand; 0: they are whole."""
        dtype = DTYPES[self.size]
        precision = launch.input_precision(self.precision, dtype)
        return 0 if self.tile is None else launch.cuts(self.tile, dtype, precision)

    @property
    def launch(self) -> str:
        """The tile in short: block_q x block_kv, warps, stages."""
        if self.tile is None:
            return "{} w{}".format(*self._fixed)
        numbers = "{block_q}x{block_kv} w{warps} s{stages}".format(**vars(self.tile))
        numbers += f" r{self.tile.registers}" * bool(self.tile.registers)
        without = self.describable and not self.tile.descriptors
        return f"{numbers} by pointers" if without else numbers

    @property
    def _fixed(self) -> tuple[int, int]:
        return next(numbers for kernel, numbers in FIXED.items() if kernel == self.kernel)

    @property
    def options(self) -> dict[str, int]:
        """The compiler's options."""
        if self.tile is None:
            return {"num_warps": self._fixed[1]}
        return self.tile.compiler_options()

    @property
    def constants(self) -> dict[str, Any]:
        """The values of the kernel's constexpr arguments, and of others."""
        if self.tile is None:
            d = block_d(self.head_dim)
            block = self._fixed[0]
            precision = launch.input_precision(self.precision, DTYPES[self.size])
            parts = launch.PARTS.get(precision, 0)
            return {
                "PADDED": padding(self.head_dim, []),
                "BLOCK": block,
                "BLOCK_D": d,
                "PARTS": parts,
            }
        return {
            "CAUSAL": self.causal,
            "POSITIVE_SCALE": True,
            "SPLIT": self.split,
            "SPLIT_KV": self.split,
            **dict.fromkeys(("program", "programs")),
            **({} if self.kernel in TAKE_O else dict.fromkeys(("o", "o_strides"))),
            "PRECISION": (
                f"cut{self.cut}"
                if self.cut
                else launch.input_precision(self.precision, DTYPES[self.size])
            ),
            **self.tile.options(self.head_dim, []),
        }


@dataclass(frozen=True)
class Resources:
    """What one program takes.

    Args:
        registers: of a thread.
        stack: bytes of a thread: spills.
        shared: bytes of shared memory.
        code: bytes.
        matrix: instructions of the tensor cores by kind, as they stand in the code.
    """

    registers: int
    stack: int
    shared: int
    code: int
    matrix: dict[str, int]

    def complaint(self, arch: str) -> str | None:
        """Return what is wrong with it, or None."""
        if self.stack:
            return f"spills: {self.stack} bytes of stack"
        if self.shared > SHARED_LIMIT[arch]:
            return f"takes {self.shared} bytes of shared memory, {SHARED_LIMIT[arch]} is the most"
        return None


def _source(variant: Variant) -> ASTSource:
    """Return the kernel with the argument types that a launch on aligned tensors gives it."""
    fn, tile, element = KERNELS[variant.kernel], variant.tile, ELEMENTS[variant.size]
    constants = {n: x for n, x in variant.constants.items() if n in fn.arg_names}
    described = {}  # rows of the tiles that descriptors load
    if tile is not None and tile.descriptors:
        described = {
            "q": tile.block_q,
            "grad_o": tile.block_q,
            "k": tile.block_kv,
            "v": tile.block_kv,
        }
    signature: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    aligned = [["tt.divisibility", 16]]
    columns = aligned if variant.head_dim % 16 in (0, 1) else []  # one is loaded alone anyway
    for i, name in enumerate(fn.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in described:
            block = f"[1, 1, {described[name]}, {constants['BLOCK_D']}]"
            signature[name] = f"tensordesc<{'bf16' if variant.cut else element}{block}>"
        elif name.endswith("strides"):
            signature[name] = ("i32",) * 3
            attributes |= {(i, j): columns for j in range(3)}
        elif name.startswith("scale"):
            signature[name] = "fp32"
        elif name in ("pitch", "head_dim"):
            signature[name], attributes[(i,)] = "i32", aligned if name == "pitch" else columns
        elif name in SIZES:
            signature[name] = "i32"
        elif name in INPUTS and variant.cut:
            signature[name], attributes[(i,)] = "*bf16", aligned
        else:
            wide = name in ROWS or (name in SUMS and variant.split)
            signature[name] = (
                "*bf16" if name.startswith("cut_") else "*fp32" if wide else f"*{element}"
            )
            attributes[(i,)] = aligned
    return ASTSource(fn, signature, constants, attributes)


@cache
def _tools() -> Path:
    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def _said(tool: str, option: str, compiled: Any) -> str:
    """Return what one of the wheel's own tools prints of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return subprocess.run(  # noqa: S603 - a tool of Triton's
            [_tools() / tool, option, file.name], check=True, capture_output=True, text=True
        ).stdout


def matrix_instructions(ptx: str) -> dict[str, int]:
    """Count the instructions of the tensor cores by generation, shape and type of the operands.

    tcgen05 names neither a shape nor bf16: its kind f16 is all of half precision.
    """
    kinds = Counter(" ".join(filter(None, found.groups())) for found in MATRIX.finditer(ptx))
    return dict(sorted(kinds.items()))


def code_bytes(cubin: bytes) -> int:
    """Return the size of the executable sections of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count = struct.unpack_from("<HH", cubin, 58)
    sections = (struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count))
    return sum(length for _, _, flags, _, _, length in sections if flags & EXECUTABLE)


def source_of(variant: Variant | HopperVariant) -> ASTSource:
    """Return the kernel of one variant with its arguments' types, as Triton compiles it."""
    return _source(variant) if isinstance(variant, Variant) else variant.source


def compiled_kernel(variant: Variant | HopperVariant) -> Any:
    """Return what Triton makes of one variant.

    Raises:
        RuntimeError: Triton is interpreting in this process.
        Exception: whatever Triton's compiler raises.
    """
    if triton.knobs.runtime.interpret:
        msg = (
            "wanted a process without TRITON_INTERPRET=1: an interpreted kernel cannot be compiled"
        )
        raise RuntimeError(msg)
    target = GPUTarget("cuda", int(variant.arch.removeprefix("sm_")), 32)
    return triton.compile(source_of(variant), target=target, options=variant.options)


def resources_of(compiled: Any) -> Resources:
    """Return what a compiled kernel takes, from its PTX and its cubin."""
    usage = _said("cuobjdump", "-res-usage", compiled)
    registers, stack = (int(re.findall(rf"{field}:(\d+)", usage)[0]) for field in ("REG", "STACK"))
    return Resources(
        registers=registers,
        stack=stack,
        shared=compiled.metadata.shared,
        code=code_bytes(compiled.asm["cubin"]),
        matrix=matrix_instructions(compiled.asm["ptx"]),
    )


def sass_of(compiled: Any) -> str:
    """Return the code of a compiled kernel as nvdisasm prints it, in half a second."""
    return _said("nvdisasm", "-c", compiled)


def compile_variant(variant: Variant | HopperVariant) -> Resources:
    """Compile one variant and return what it takes; see ``compiled_kernel``."""
    return resources_of(compiled_kernel(variant))


def _ways(arch: str, kernel: Kernel, size: int, head_dim: int, *, causal: bool) -> tuple[bool, ...]:
    """Return whether a kernel is launched split, and whether not; "fwd" never beside "fwd_few"."""
    few = kernel == "fwd" and ("fwd_few", size, head_dim, causal, False) in TABLES[arch]
    return (False,) if few else SPLIT.get(kernel, (False, True))


def variants() -> list[Variant | HopperVariant]:
    """Return every kernel with every tile of the tables of every architecture."""
    tiled = [
        Variant(arch, kernel, size, head_dim, tile, causal, describable, split)
        for arch in ARCHITECTURES
        for (kernel, size, head_dim, causal, describable), tile in TABLES[arch].items()
        for split in _ways(arch, kernel, size, head_dim, causal=causal)
    ]
    tiled += [
        Variant(arch, kernel, 4, head_dim, tile, causal, tile.descriptors, split, "tf32")
        for arch in TF32.keys() & set(ARCHITECTURES)
        for table in TF32[arch].values()
        for (kernel, head_dim), tile in table.items()
        for causal, split in product((False, True), (False, True))
    ]
    columns = [  # a single column is none of the tables' head dims: it takes the tiles of the least
        Variant(arch, kernel, size, 1, tile, causal, describable, split)
        for arch in ARCHITECTURES
        for (kernel, size, head_dim, causal, describable), tile in TABLES[arch].items()
        if (head_dim, describable) == (HEAD_DIMS[0], False) and kernel not in OPTIONAL
        for split in _ways(arch, kernel, size, 1, causal=causal)
    ]
    fixed = [
        Variant(arch, kernel, size, head_dim, None, causal=False)
        for arch, kernel, size, head_dim in product(ARCHITECTURES, FIXED, ELEMENTS, (1, *HEAD_DIMS))
        if kernel != "cut" or (DTYPES[size] == torch.float32 and head_dim > 1)
    ]
    fixed += [
        replace(variant, precision="tf32")
        for variant in fixed
        if (variant.kernel, variant.arch) == ("cut", "sm_90")
    ]
    return [*tiled, *columns, *fixed, *hopper.variants()]
