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

from flashattn.gpus import TRITON
from flashattn.kernels.hopper import offline as hopper
from flashattn.kernels.hopper.offline import HopperVariant
from flashattn.kernels.portable import bf16x3, combine, forward, preprocess, steps
from flashattn.kernels.portable.config import BackwardLayout, Config, ForwardLayout
from flashattn.kernels.portable.score import Scale, ScoreLayout
from flashattn.plan.gpu import Gpu
from flashattn.plan.portable import terms_of
from flashattn.plan.precision import TERMS, input_precision
from flashattn.plan.rows import HEAD_DIMS, OPTIONAL, Kernel
from flashattn.plan.tables import rows_of
from flashattn.plan.tile import Tile, block_d, padding

Untiled = Literal["combine", "decompose", "bwd_preprocess", "bwd_reduce"]
KERNELS: dict[str, Any] = {
    **dict.fromkeys(("fwd", "fwd_small_grid", "fwd_short_kv", "decode"), forward.flashattn_fwd),
    "combine": combine.flashattn_combine,
    "decompose": bf16x3.flashattn_decompose,
    "bwd_preprocess": preprocess.flashattn_bwd_preprocess,
    "bwd_reduce": combine.flashattn_bwd_reduce,
    **{str(kernel): fn for kernel, fn in steps.KERNELS.items()},
}
FIXED: dict[Untiled, tuple[int, int]] = {  # rows of a program and warps, where no table says
    "combine": (combine.COMBINE_BLOCK, combine.COMBINE_WARPS),
    "decompose": (bf16x3.BLOCK, bf16x3.WARPS),
    "bwd_preprocess": (preprocess.BLOCK, preprocess.WARPS),
    "bwd_reduce": (combine.REDUCE_BLOCK, combine.REDUCE_WARPS),
}
ELEMENTS = {2: "bf16", 4: "fp32"}
DTYPES = {2: torch.bfloat16, 4: torch.float32}
# The most that a program of one GPU of the family can have, in bytes: sm_80 stands for all of 8.x
# and 12.x, where consumer cards have 99 KiB.
SHARED_LIMIT = {"sm_80": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10}

# Ways to compile a kernel. Few queries always find keys to split but where they are many heads; and
# short and whole is what is not split.
SPLIT = {"decode": (True,), "fwd_short_kv": (False,), "bwd_one_launch": (False,)}
ARCHITECTURES = tuple(SHARED_LIMIT)
TABLES = {arch: rows_of(Gpu((int(arch[3:-1]), 0), 1, TRITON)) for arch in ARCHITECTURES}
SCORED = ("fwd", "bwd_dkdv", "bwd_dq")  # kernels that are compiled with what is added to scores
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
        split: whether a program has only a split of the rows that it would walk over.
        precision: as ``precision.input_precision`` takes it.
        window: whether the mask has a left bound, too.
        softcap: whether scores are capped.
        rows: whether the mask is bounds of rows.
        alibi: whether heads have slopes.
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
    window: bool = False
    softcap: bool = False
    rows: bool = False
    alibi: bool = False

    def __str__(self) -> str:
        """Return what picks the tile."""
        name = f"{self.arch} {self.kernel} {ELEMENTS[self.size]} d{self.head_dim}"
        asked = f" {self.precision}" if self.precision != "auto" else ""
        if self.tile is None:
            return name + asked
        loading = "decomposed" if self.terms else "descriptors" if self.describable else "pointers"
        bounds = ("full", "causal"), ("left", "window")
        mask = "rows" if self.rows else bounds[self.window][self.causal]
        score = f"{' softcap' * self.softcap}{' alibi' * self.alibi}"
        return f"{name} {mask} {loading}{' split' * self.split}{score}{asked}"

    @property
    def terms(self) -> int:
        """How many bf16 terms its operands are decomposed into beforehand; 0: they are not."""
        dtype = DTYPES[self.size]
        precision = input_precision(self.precision, dtype)
        return 0 if self.tile is None else terms_of(self.tile, dtype, precision)

    @property
    def launch(self) -> str:
        """The tile in short: block_q x block_kv, warps, stages."""
        if self.tile is None:
            return "{} w{}".format(*self._fixed)
        without = self.describable and not self.tile.descriptors
        return f"{self.tile} by pointers" if without else str(self.tile)

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
    def config(self) -> Config:
        """The constants of a kernel that has a tile."""
        if self.tile is None:
            raise ValueError(f"{self} has no tile")
        precision = input_precision(self.precision, DTYPES[self.size])
        return Config.of(self.tile, self.head_dim, [], precision, self.terms)

    @property
    def constants(self) -> dict[str, Any]:
        """The values of the constexpr arguments of a kernel that has no tile."""
        precision = input_precision(self.precision, DTYPES[self.size])
        return {
            "PADDED": padding(self.head_dim, []),
            "BLOCK": self._fixed[0],
            "BLOCK_D": block_d(self.head_dim),
            "TERMS": TERMS.get(precision, 0),
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


@dataclass(frozen=True)
class Type:
    """The type of an argument, or of a part of one, as a launch on aligned tensors gives it.

    Args:
        name: Triton's.
        aligned: whether 16 divides it.
    """

    name: str
    aligned: bool = False


INT, FLOAT = Type("i32"), Type("fp32")
FP32, BF16 = Type("*fp32", aligned=True), Type("*bf16", aligned=True)
INTS = Type("*i32", aligned=True)


def _types(variant: Variant) -> dict[str, Any]:
    """Return the type of each argument by its name; None is a constant, and tuples are tuples."""
    given = Type(f"*{ELEMENTS[variant.size]}", aligned=True)
    columns = Type("i32", aligned=variant.head_dim % 16 in (0, 1))  # one is loaded alone anyway
    strides = (columns,) * 3
    if variant.tile is None:
        return {
            **dict.fromkeys(("o", "grad_o"), given),
            **dict.fromkeys(("o_strides", "grad_o_strides"), strides),
            **dict.fromkeys(("o_partial", "lse_partial", "lse", "grad_lse"), FP32),
            **dict.fromkeys(("lse_log2", "delta"), FP32),
            "seq_q_rounded": Type("i32", aligned=True),
            "head_dim": columns,
            "inputs": (given,) * 4,
            "terms": (BF16,) * 4,
            "partials": (FP32,) * 3,
            "grads": (given,) * 3,
            "strides": (strides,) * (4 if variant.kernel == "decompose" else 3),
        }
    written = FP32 if variant.split else given
    types: dict[str, Any] = {
        **dict.fromkeys(("q", "grad_o"), _operand(variant, variant.tile.block_q)),
        **dict.fromkeys(("k", "v"), _operand(variant, variant.tile.block_kv)),
        "o": written,
        "lse": FP32,
        "left": INT if variant.window else None,
        "right": INT if variant.causal and not variant.rows else None,
        "bounds": (INTS, INTS) if variant.rows else (None, None),
        "scored": (FP32 if variant.alibi else None,),
        **dict.fromkeys(("split_len", "split_len_kv"), INT if variant.split else None),
    }
    cap, between = FLOAT if variant.softcap else None, (INT, INT) if variant.rows else None
    score = ScoreLayout(INT, INT) if variant.alibi else None
    if variant.kernel not in steps.KERNELS:
        layout: Any = ForwardLayout(strides, strides, strides, strides, columns, between, score)
        return types | {"layout": layout, "scale": Scale(FLOAT, None, None, cap)}
    grads = steps.WRITTEN[variant.kernel]  # type: ignore[index]
    o = variant.kernel == "bwd_one_launch"
    layout = BackwardLayout._make(
        (
            *(strides, strides, strides, strides),
            *(strides if name in grads else None for name in steps.GRADS),
            *(strides if o else None, columns, Type("i32", aligned=True), between, score),
        )
    )
    return types | {
        "stats": (FP32, FP32, given if o else None),
        "grads": (written,) * len(grads),
        "layout": layout,
        "scale": Scale(FLOAT, FLOAT, None, cap),
    }


def _operand(variant: Variant, rows: int) -> Type:
    """Return the type of what is loaded in tiles of so many rows."""
    element = "bf16" if variant.terms else ELEMENTS[variant.size]
    if variant.tile is None or not variant.tile.descriptors:
        return Type(f"*{element}", aligned=True)
    return Type(f"tensordesc<{element}[1, 1, {rows}, {block_d(variant.head_dim)}]>")


def _source(variant: Variant) -> ASTSource:
    """Return the kernel with the argument types that a launch on aligned tensors gives it."""
    fn = KERNELS[variant.kernel]
    known = variant.constants if variant.tile is None else {"CONFIG": variant.config}
    types = _types(variant) | dict.fromkeys(known)
    constants: dict[Any, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}

    def signature(kind: Any, path: tuple[int, ...], value: Any = None) -> Any:
        if isinstance(kind, tuple):
            parts = [signature(x, (*path, i)) for i, x in enumerate(kind)]
            return type(kind)(*parts) if hasattr(kind, "_fields") else tuple(parts)
        if kind is None:
            constants[path] = value
            return "constexpr"
        if kind.aligned:
            attributes[path] = [["tt.divisibility", 16]]
        return kind.name

    names = enumerate(fn.arg_names)
    arguments = {name: signature(types.get(name, INT), (i,), known.get(name)) for i, name in names}
    return ASTSource(fn, arguments, constants, attributes)


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
    """Return whether a kernel is launched split, and whether not; "fwd" not if small grids are."""
    few = (
        kernel == "fwd" and ("fwd_small_grid", size, head_dim, causal, False) in TABLES[arch].tiles
    )
    return (False,) if few else SPLIT.get(kernel, (False, True))


def variants() -> list[Variant | HopperVariant]:
    """Return every kernel with every tile of the tables of every architecture."""
    tiled = [
        Variant(arch, kernel, size, head_dim, tile, causal, describable, split)
        for arch in ARCHITECTURES
        for (kernel, size, head_dim, causal, describable), tile in TABLES[arch].tiles.items()
        for split in _ways(arch, kernel, size, head_dim, causal=causal)
    ]
    tiled += [
        Variant(arch, kernel, 4, head_dim, tile, causal, tile.descriptors, split, "tf32")
        for arch in ARCHITECTURES
        for table in TABLES[arch].tf32
        for (kernel, head_dim), tile in table.items()
        for causal, split in product((False, True), (False, True))
    ]
    columns = [  # a single column is none of the tables' head dims: it takes the tiles of the least
        Variant(arch, kernel, size, 1, tile, causal, describable, split)
        for arch in ARCHITECTURES
        for (kernel, size, head_dim, causal, describable), tile in TABLES[arch].tiles.items()
        if (head_dim, describable) == (HEAD_DIMS[0], False) and kernel not in OPTIONAL
        for split in _ways(arch, kernel, size, 1, causal=causal)
    ]
    fixed = [
        Variant(arch, kernel, size, head_dim, None, causal=False)
        for arch, kernel, size, head_dim in product(ARCHITECTURES, FIXED, ELEMENTS, (1, *HEAD_DIMS))
        if kernel != "decompose" or (DTYPES[size] == torch.float32 and head_dim > 1)
    ]
    fixed += [
        replace(variant, precision="tf32")
        for variant in fixed
        if (variant.kernel, variant.arch) == ("decompose", "sm_90")
    ]
    dense = [
        variant
        for variant in tiled
        if (variant.size, variant.head_dim, variant.split) == (2, 64, False)
    ]
    windowed = [replace(variant, window=True) for variant in dense]
    windowed += [replace(variant, rows=True) for variant in dense if variant.causal]
    capped = [  # which in the backward takes the tiles of full attention, see ``plan.portable``
        replace(variant, softcap=True, causal=causal)
        for variant, causal in product(dense, (False, True))
        if variant.causal == (causal and variant.kernel not in steps.KERNELS)
    ]
    scored = [  # likewise; a few
        replace(variant, softcap=False, alibi=True)
        for variant in capped
        if variant.causal and variant.describable and variant.kernel in SCORED
    ]
    return [*tiled, *columns, *fixed, *windowed, *capped, *scored, *hopper.variants()]
