"""Compile a kernel as a launch does, for any GPU, without having one.

This needs a process in which Triton does not interpret.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

from flashattn.counts.resources import Resources, resources_of
from flashattn.kernels.cache_key import with_stable_key
from flashattn.kernels.hopper.offline import HopperVariant
from flashattn.kernels.portable import bf16x3, combine, forward, preprocess, score_gradients, steps
from flashattn.kernels.portable.config import BackwardLayout, Config, ForwardLayout
from flashattn.kernels.portable.score import Scale, ScoreLayout
from flashattn.plan.portable import terms_of
from flashattn.plan.precision import TERMS, input_precision
from flashattn.plan.rows import Kernel
from flashattn.plan.tile import VECTOR, Tile, block_d, padding

Untiled = Literal[
    "combine", "decompose", "bwd_preprocess", "bwd_reduce", "bwd_dsink", "bwd_drelative"
]
Shared = Literal["bwd_dbias", "bwd_dbias_relative"]  # for a bias that several scores share
KERNELS: dict[str, Any] = {
    **dict.fromkeys(("fwd", "fwd_small_grid", "fwd_short_kv", "decode"), forward.flashattn_fwd),
    "combine": combine.flashattn_combine,
    "decompose": bf16x3.flashattn_decompose,
    "bwd_preprocess": preprocess.flashattn_bwd_preprocess,
    "bwd_reduce": combine.flashattn_bwd_reduce,
    "bwd_dsink": score_gradients.flashattn_bwd_dsink,
    "bwd_drelative": score_gradients.flashattn_bwd_drelative,
    "bwd_dbias": score_gradients.flashattn_bwd_dbias,
    "bwd_dbias_relative": score_gradients.flashattn_bwd_dbias_relative,
    **{str(kernel): fn for kernel, fn in steps.KERNELS.items()},
}
SUMS = "bwd_dsink", "bwd_drelative"  # kernels that sum numbers without columns
FIXED: dict[Untiled, tuple[int, int]] = {  # (rows of a program, warps) of kernels without a table
    "combine": (combine.COMBINE_ROWS, combine.COMBINE_WARPS),
    "decompose": (bf16x3.BLOCK, bf16x3.WARPS),
    "bwd_preprocess": (preprocess.BLOCK, preprocess.WARPS),
    "bwd_reduce": (combine.REDUCE_BLOCK, combine.REDUCE_WARPS),
    "bwd_dsink": (score_gradients.SINK_BLOCK, score_gradients.SINK_WARPS),
    "bwd_drelative": (score_gradients.RELATIVE_BLOCK, score_gradients.RELATIVE_WARPS),
}
ELEMENTS = {2: "bf16", 4: "fp32"}
DTYPES = {2: torch.bfloat16, 4: torch.float32}


@dataclass(frozen=True)
class Variant:
    """One kernel as one launch compiles it."""

    arch: str  # sm_80, sm_90, sm_100
    kernel: Kernel | Untiled | Shared  # name of the kernel
    size: int  # bytes per element
    head_dim: int  # D
    tile: Tile | None  # of the launch; None for kernels with a fixed tile and no mask
    causal: bool  # whether scores are masked
    # Whether inputs are TMA-compatible; the tile may still load by pointers.
    tma_compatible: bool = False
    split: bool = False  # whether a program visits only a split of the rows
    precision: str = "auto"  # as ``precision.input_precision`` takes it
    window: bool = False  # whether the mask has a left bound, too
    softcap: bool = False  # whether scores are capped
    rows: bool = False  # whether the mask is bounds of rows
    # What else scores are made with: "alibi", "bias" (one per head), "relative" bias or "sink".
    # In bwd_dq each score has its own element of the bias, whose gradient is stored.
    scored: str = ""

    def __str__(self) -> str:
        """Return the name: what selects the tile."""
        name = f"{self.arch} {self.kernel} {ELEMENTS[self.size]} d{self.head_dim}"
        asked = f" {self.precision}" if self.precision != "auto" else ""
        if self.tile is None:
            return name + asked
        loading = (
            "decomposed" if self.terms else "descriptors" if self.tma_compatible else "pointers"
        )
        bounds = ("full", "causal"), ("left", "window")
        mask = "rows" if self.rows else bounds[self.window][self.causal]
        score = f"{' softcap' * self.softcap}{self.scored and f' {self.scored}'}"
        return f"{name} {mask} {loading}{' split' * self.split}{score}{asked}"

    @property
    def terms(self) -> int:
        """The number of bf16 terms that operands are decomposed into beforehand; 0 if not."""
        dtype = DTYPES[self.size]
        precision = input_precision(self.precision, dtype)
        return 0 if self.tile is None else terms_of(self.tile, dtype, precision)

    @property
    def launch(self) -> str:
        """The tile in short: block_q x block_kv, warps, stages."""
        if self.tile is None:
            return "{} w{}".format(*self._fixed)
        without = self.tma_compatible and not self.tile.descriptors
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
        vector = VECTOR if self.scored in ("bias", "relative") else 1
        return Config.of(self.tile, self.head_dim, [], precision, self.terms, vector)

    @property
    def constants(self) -> dict[str, Any]:
        """The values of the constexpr arguments of a kernel that has no tile."""
        precision = input_precision(self.precision, DTYPES[self.size])
        return {
            "PADDED": padding(self.head_dim, []),
            "BLOCK": self._fixed[0],
            "BLOCK_D": block_d(self.head_dim),
            "COUNTERS": 0,
            "BLOCK_Q": 64,
            "TERMS": TERMS.get(precision, 0),
            "SHARED": True,
            "sink_stride": None,
        }


@dataclass(frozen=True)
class Type:
    """The type of an argument, or of part of one, in a launch on aligned tensors."""

    name: str  # Triton's
    aligned: bool = False  # whether 16 divides it


INT, FLOAT = Type("i32"), Type("fp32")
FP32, BF16 = Type("*fp32", aligned=True), Type("*bf16", aligned=True)
INTS = Type("*i32", aligned=True)


def _types(variant: Variant) -> dict[str, Any]:
    """Return the types of arguments by name; None means a constant, a tuple a tuple argument."""
    given = Type(f"*{ELEMENTS[variant.size]}", aligned=True)
    columns = Type("i32", aligned=variant.head_dim % 16 in (0, 1))  # one is loaded by itself
    strides = (columns,) * 3
    if variant.tile is None:
        return {
            **dict.fromkeys(("o", "grad_o"), given),
            **dict.fromkeys(("o_strides", "grad_o_strides"), strides),
            **dict.fromkeys(("lse", "grad_lse"), FP32),
            **dict.fromkeys(("lse_log2", "delta"), FP32),
            **dict.fromkeys(("counters", "scale_log2")),
            "seq_q_rounded": Type("i32", aligned=True),
            "head_dim": columns,
            "inputs": (given,) * 4,
            "terms": (BF16,) * 4,
            "partials": (FP32,) * 3,
            "grads": (given,) * 3,
            "strides": (strides,) * (4 if variant.kernel == "decompose" else 3),
            "partial": FP32 if variant.kernel in SUMS else (FP32, FP32),
            "dsink": FP32,
            "dbias": given,
            "lies": ScoreLayout(),  # all scores share the bias
            "sinks": (None, None),
        }
    types: dict[str, Any] = {
        **dict.fromkeys(("q", "grad_o"), _operand(variant, variant.tile.block_q)),
        **dict.fromkeys(("k", "v"), _operand(variant, variant.tile.block_kv)),
        "o": given,
        "lse": FP32,
        "partial": (FP32, FP32, INTS) if variant.split else (None, None, None),
        "left": INT if variant.window else None,
        "right": INT if variant.causal and not variant.rows else None,
        "bounds": (INTS, INTS) if variant.rows else (None, None),
        "scored": _scored(variant, given),
        "lies": _score_layout(variant),
        "dbias": FP32 if variant.scored == "relative" else given,  # partial sums
        **dict.fromkeys(("split_len", "split_len_kv"), INT if variant.split else None),
    }
    cap, between = FLOAT if variant.softcap else None, (INT, INT) if variant.rows else None
    if variant.kernel not in (*steps.KERNELS, *get_args(Shared)):
        layout: Any = ForwardLayout(strides, strides, strides, strides, columns, between)
        return types | {"layout": layout, "scale": Scale(FLOAT, None, None, cap)}
    grads = steps.WRITTEN.get(variant.kernel, ())
    o = variant.kernel == "bwd_one_launch"
    layout = BackwardLayout._make(
        (
            *(strides, strides, strides, strides),
            *(strides if name in grads else None for name in steps.GRADS),
            *(strides if o else None, columns, Type("i32", aligned=True), between),
        )
    )
    return types | {
        "stats": (FP32, FP32, given if o else None),
        "grads": (FP32 if variant.split else given,) * len(grads),
        "layout": layout,
        "scale": Scale(FLOAT, FLOAT, None, cap),
    }


def _scored(variant: Variant, given: Type) -> tuple[Type | None, ...]:
    """Return the types of slopes, a bias, and a sink or, in bwd_dq, the bias's gradient."""
    bias = given if variant.scored in ("bias", "relative") else None
    sink = FP32 if variant.scored == "sink" else None
    last = bias if variant.kernel == "bwd_dq" else sink
    return FP32 if variant.scored == "alibi" else None, bias, last


def _score_layout(variant: Variant) -> ScoreLayout:
    """Return the types of the layout; rows of a bias are aligned, and all batches share it."""
    rows = Type("i32", aligned=True)
    made: dict[str, dict[str, Any]] = {
        "": {},
        "alibi": {"slopes": INT, "query_offset": INT},
        "bias": {"head": rows, "query": rows, "key": 1},
        "relative": {"head": rows, "length": rows},
        "sink": {"sink": INT},
    }
    return ScoreLayout(**made[variant.scored])


def _operand(variant: Variant, rows: int) -> Type:
    """Return the type of an operand that is loaded in tiles of ``rows`` rows."""
    element = "bf16" if variant.terms else ELEMENTS[variant.size]
    if variant.tile is None or not variant.tile.descriptors:
        return Type(f"*{element}", aligned=True)
    return Type(f"tensordesc<{element}[1, 1, {rows}, {block_d(variant.head_dim)}]>")


def source_of(variant: Variant | HopperVariant) -> ASTSource:
    """Return the kernel with the argument types that a launch on aligned tensors gives it."""
    if isinstance(variant, HopperVariant):
        return variant.source
    fn = KERNELS[variant.kernel]
    known = variant.constants if variant.tile is None else {"CONFIG": variant.config}
    types = _types(variant) | dict.fromkeys(known)
    constants: dict[Any, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}

    def signature(kind: Any, path: tuple[int, ...], value: Any = None) -> Any:
        if isinstance(kind, tuple):
            parts = [signature(x, (*path, i)) for i, x in enumerate(kind)]
            return type(kind)(*parts) if hasattr(kind, "_fields") else tuple(parts)
        if kind is None or isinstance(kind, int):
            constants[path] = value if kind is None else kind
            return "constexpr"
        if kind.aligned:
            attributes[path] = [["tt.divisibility", 16]]
        return kind.name

    names = enumerate(fn.arg_names)
    arguments = {name: signature(types.get(name, INT), (i,), known.get(name)) for i, name in names}
    return ASTSource(fn, arguments, constants, attributes)


class FrontEnd(NamedTuple):
    """The output of Triton's front end for a variant."""

    options: Any  # all options of the compiler
    context: Any  # in which the module lives
    module: Any  # after the compiler's first passes, with all calls inlined


def _target(variant: Variant | HopperVariant) -> GPUTarget:
    return GPUTarget("cuda", int(variant.arch.removeprefix("sm_")), 32)


def front_end(variant: Variant | HopperVariant) -> FrontEnd:
    """Return the output of Triton's front end for a variant, in a fifth of a second."""
    target, source = _target(variant), source_of(variant)
    backend = make_backend(target)
    options = backend.parse_options(dict(variant.options) | source.parse_options())
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    module = source.make_ir(target, options, functions, modules, context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    metadata: dict[str, Any] = {}
    for stage, lower in stages.items():  # Gluon kernels have a stage before these that does nothing
        module = lower(module, metadata)
        if stage in ("ttir", "ttgir"):
            break
    return FrontEnd(options, context, module)


def compiled_kernel(variant: Variant | HopperVariant) -> Any:
    """Compile one variant.

    Raises:
        RuntimeError: Triton is interpreting in this process.
        Exception: whatever Triton's compiler raises.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError(
            "wanted a process without TRITON_INTERPRET=1: an interpreted kernel cannot be compiled"
        )
    source = source_of(variant)
    with_stable_key(source.fn)
    return triton.compile(source, target=_target(variant), options=variant.options)


def compile_variant(variant: Variant | HopperVariant) -> Resources:
    """Compile one variant and return its resources; see ``compiled_kernel``."""
    return resources_of(compiled_kernel(variant))
