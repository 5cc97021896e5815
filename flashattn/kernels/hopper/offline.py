"""Variants of the Hopper kernels, as launches on aligned tensors compile them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from flashattn.kernels.hopper import (
    backward,
    backward_d256,
    backward_d256_dq,
    backward_dq,
    backward_fp32,
    config,
    forward,
    forward_fp32,
    steps,
)
from flashattn.kernels.hopper.tma import PRODUCT, SWIZZLE, WARPS
from flashattn.plan.hopper import tile_of_bias
from flashattn.plan.precision import TERMS
from flashattn.plan.tables.hopper import (
    BACKWARD,
    BACKWARD_D256,
    DETERMINISTIC,
    FORWARD,
    FP32_BACKWARD,
    FP32_D,
    NARROW_FORWARD,
    WIDEST_OF_NARROW,
)
from flashattn.plan.tile import (
    HALF,
    NARROW_VALUES,
    VECTOR,
    WARPGROUP_Q,
    HopperBackwardTile,
    HopperD256Tile,
    HopperTile,
    block_d,
)

FP32 = 4  # bytes
# The modes in which each kernel is also compiled, under a mask, and (MODE_D) with how many columns.
MODES = {
    "hopper_fwd": ("dynamic", "window", "rows", "softcap", "alibi", "bias", "relative", "sink"),
    "hopper_bwd": ("gqa_split", "window", "rows", "softcap", "alibi", "bias", "relative"),
    "hopper_bwd_postprocess": ("rows",),
    "hopper_bwd_d256_dkdv": ("gqa_split", "window", "rows", "softcap", "alibi"),
    "hopper_bwd_d256_dq": ("window", "rows", "softcap", "alibi"),
    "hopper_fwd_fp32": ("tf32", "window", "sink"),
    "hopper_bwd_fp32_dkdv": ("split", "tf32", "split tf32", "window"),
    "hopper_bwd_fp32_dq": ("split", "tf32", "split tf32", "window"),
}
# Without a mask, ALiBi and a bias ask the shift schedule for the query tile.
UNMASKED_MODES = {"hopper_bwd": ("alibi", "bias")}
MODE_D = {"hopper_bwd_d256_dkdv": 256, "hopper_bwd_d256_dq": 256}  # others: 128
ALIGNED = [["tt.divisibility", 16]]
# Strides of batches, heads, queries and keys, and the length of a relative bias. All batches share
# a bias, and its keys are contiguous.
BIAS_STRIDES: dict[str, dict[str, Any]] = {
    "bias": {"bias_strides": (None, "i32", "i32", 1, None)},
    "relative": {"bias": "*fp32", "bias_strides": (None, "i32", None, None, "i32")},
}


@dataclass(frozen=True)
class HopperVariant:
    """A kernel as one launch compiles it, in fp32 if its name has "fp32", in bf16 otherwise.

    Args:
        kernel: "hopper_fwd", "hopper_bwd" or "hopper_bwd_postprocess". After the direction, "_d256"
            means D > 128 and "_fp32" means fp32; "_dkdv" or "_dq" then names a pass.
        head_dim: D.
        config: tile of the launch; None for kernels without one.
        causal: whether scores are masked.
        mode: for the forward "dynamic" (CTAs draw their tiles); in fp32 "split" (a CTA visits a
            split of the rows) and "tf32" (two bf16 terms); for dk and dv "gqa_split" (query heads
            are split); for any kernel "window" (the mask has a left bound), "rows" (bounds of
            rows), "softcap", "alibi", "bias", "relative", "sink" or "narrow" (values of 128
            columns).
    """

    kernel: str
    head_dim: int
    config: HopperTile | HopperBackwardTile | HopperD256Tile | None
    causal: bool
    mode: str = ""

    @property
    def arch(self) -> str:
        """The architecture that all are compiled for."""
        return "sm_90"

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return FP32 if self.fp32 else HALF

    @property
    def fp32(self) -> bool:
        """Return whether it is in fp32."""
        return "fp32" in self.kernel

    @property
    def terms(self) -> int:
        """The number of bf16 terms of its operands, in fp32."""
        return TERMS["tf32" if "tf32" in self.mode else "bf16x6"]

    def __str__(self) -> str:
        """Return the name: what selects the config, and the mode."""
        mask = "causal" if self.causal else "full"
        dtype = "fp32" if self.fp32 else "bf16"
        words = [self.arch, self.kernel, dtype, f"d{self.head_dim}", mask, self.launch, self.mode]
        return " ".join(filter(None, words))

    @property
    def launch(self) -> str:
        """The config in short."""
        return str(self.config or "")

    @property
    def stored(self) -> tuple[str, ...]:
        """Gradients of keys and values that are stored in tiles; partial sums are not."""
        return () if self.mode == "gqa_split" else ("dk", "dv")

    @property
    def vector(self) -> int:
        """Keys of a bias that are loaded together."""
        return VECTOR if self.mode in BIAS_STRIDES else 1

    @property
    def options(self) -> dict[str, int]:
        """The compiler's options."""
        return {"num_warps": WARPS}

    @property
    def source(self) -> ASTSource:
        """The kernel with the types of its arguments."""
        d = self.head_dim
        constants: dict[str, Any] = {}
        dims = d, NARROW_VALUES if self.mode == "narrow" else d
        if isinstance(self.config, HopperTile):
            function, rows = forward.flashattn_hopper_fwd, {"k": self.config.block_kv}
            rows |= {"v": rows["k"]} | dict.fromkeys(("q", "o"), WARPGROUP_Q)
            how = {"before": self.mode == "alibi", "vector": self.vector}
            constants = {"t": config.forward_config(self.config, dims, **how)}
        elif isinstance(self.config, HopperBackwardTile):
            function, block_q = backward.flashattn_hopper_bwd, HopperBackwardTile.block_q(d)
            rows = dict.fromkeys(("q", "grad_o"), block_q)
            rows |= dict.fromkeys(("k", "v", *self.stored), self.config.BLOCK_KV)
            constants = {"t": config.backward_config(self.config, d, self.vector)}
        elif isinstance(self.config, HopperD256Tile):
            rows = dict.fromkeys(("q", "k", "v", "grad_o", "dq", *self.stored), WARPGROUP_Q)
            function = backward_d256.flashattn_hopper_bwd_d256_dkdv
            constants = {"t": config.d256_config(self.config, dims)}
            if self.kernel == "hopper_bwd_d256_dq":
                function = backward_d256_dq.flashattn_hopper_bwd_d256_dq
        elif self.kernel == "hopper_fwd_fp32":
            function, rows = (
                forward_fp32.flashattn_hopper_fwd_fp32,
                dict.fromkeys("qkv", WARPGROUP_Q),
            )
            constants = config.forward_fp32_constants(d, terms=self.terms)
        elif self.fp32:
            tile = FP32_BACKWARD[self.terms]
            own, others = ("k", "v"), ("q", "grad_o")
            function = backward_fp32.flashattn_hopper_bwd_fp32_dkdv
            if self.kernel == "hopper_bwd_fp32_dq":
                function, own, others = backward_fp32.flashattn_hopper_bwd_fp32_dq, others, own
            rows = dict.fromkeys(own, tile.own)
            rows |= dict.fromkeys(others, tile.other)
            constants = {"SPLIT": "split" in self.mode, "TERMS": self.terms}
        else:
            function, rows = backward_dq.flashattn_hopper_bwd_postprocess, {}
            constants = config.postprocess_constants(d)
        types, absent = _tiles(function, rows, dims)
        if isinstance(self.config, HopperBackwardTile):
            terms = _described("bf16", [1, block_q, PRODUCT], 2 * PRODUCT)
            numbers = _described("fp32", [1, block_q], 0)
            types |= {"lse": numbers if self.mode == "softcap" else terms, "minus_delta": terms}
            types["dq"] = _described("fp32", [1, 1, steps.box_lines(d), WARPGROUP_Q], 0)
            types["dbias"] = _tile(block_q, self.config.BLOCK_KV)
        if self.kernel == "hopper_bwd_d256_dkdv":
            types |= dict.fromkeys(("lse_log2", "delta"), _described("fp32", [1, WARPGROUP_Q], 0))
        types |= BIAS_STRIDES.get(self.mode, {})
        absent += _absent(function, self.mode, causal=self.causal)
        constants |= dict.fromkeys(absent)
        return _source(function, types, constants, fp32=self.fp32 or not self.stored)


def _absent(function: Any, mode: str, *, causal: bool) -> list[str]:
    """Return the arguments that are None without a mask, or outside of a mode of their own."""
    modes = {"tile_counter": "dynamic", "left": "window", "cap": "softcap"}
    modes |= dict.fromkeys(("sink", "sink_stride"), "sink")
    modes |= dict.fromkeys(("slopes", "slopes_stride", "query_offset"), "alibi")
    modes |= dict.fromkeys(("bias", "bias_strides"), "relative" if mode == "relative" else "bias")
    modes |= {"dbias": "bias"} if "dbias" in function.arg_names else {}
    rows = ("key_bounds", "query_bounds", "keys_stride", "queries_stride")
    modes |= dict.fromkeys((name for name in rows if name in function.arg_names), "rows")
    if "gqa_splits" in function.arg_names:
        modes |= dict.fromkeys(("gqa_splits", "head_dim", "strides"), "gqa_split")
    absent = [name for name in function.arg_names if modes.get(name, mode) != mode]
    return absent if causal and mode != "rows" else [*absent, "right"]


def _tiles(
    function: Any, rows: dict[str, int], dims: tuple[int, int]
) -> tuple[dict[str, Any], list[str]]:
    """Return the types of tile descriptors, and the names of second pieces that do not exist."""
    apart = {name: name[:-5] for name in function.arg_names if name.endswith("_high")}
    pieces = {x: steps.pieces_of(x, dims) if apart else (block_d(dims[0]), 0) for x in rows}
    types = {name: _tile(n, pieces[name][0]) for name, n in rows.items()}
    high = {name: (rows[x], pieces[x][1]) for name, x in apart.items() if x in rows}
    types |= {name: _tile(n, columns) for name, (n, columns) in high.items() if columns}
    return types, [name for name in apart if name not in types]


def _tile(rows: int, columns: int) -> str:
    """Return the type of a descriptor of tiles in bf16."""
    return _described("bf16", [1, 1, rows, columns], min(SWIZZLE, HALF * columns))


def _described(element: str, block: list[int], swizzle: int) -> str:
    """Return the type of a descriptor."""
    bits = {"bf16": 16, "fp32": 32}[element]
    layout = gl.NVMMASharedLayout(swizzle, bits, len(block))
    return f"tensordesc<{element}[{', '.join(map(str, block))}],{layout!r}>"


def _source(
    function: Any, types: dict[str, Any], constants: dict[Any, Any], *, fp32: bool
) -> ASTSource:
    """Return a kernel with its arguments' types; those not in ``types`` follow from their names."""
    common = dict.fromkeys(("lse", "lse_log2", "delta", "dq_accum", "slopes", "sink"), "*fp32")
    common |= {"tile_counter": "*i32", "dq_semaphore": "*i32", "bias": "*bf16"}
    common |= dict.fromkeys(("key_bounds", "query_bounds"), "*i32")
    common |= dict.fromkeys(("o", "dq", "dk", "dv"), "*fp32" if fp32 else "*bf16")
    signature: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for i, name in enumerate(function.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif isinstance(types.get(name), tuple):
            known = {j: kind for j, kind in enumerate(types[name]) if not isinstance(kind, str)}
            signature[name] = tuple("constexpr" if x in known.values() else x for x in types[name])
            constants |= {(i, j): kind for j, kind in known.items()}
            attributes |= {(i, j): ALIGNED for j in range(len(types[name])) if j not in known}
        elif name in types:
            signature[name] = types[name]
            attributes |= {(i,): ALIGNED} if types[name].startswith("*") else {}
        elif name in common:
            signature[name], attributes[(i,)] = common[name], ALIGNED
        elif name.endswith("strides"):
            signature[name] = ("i32",) * 3
            attributes |= {(i, j): ALIGNED for j in range(3)}
        elif name == "head_dim":
            signature[name], attributes[(i,)] = "i32", ALIGNED
        else:
            signature[name] = "fp32" if name.startswith(("scale", "cap")) else "i32"
    kind = GluonASTSource if types else ASTSource
    return kind(function, signature, constants, attributes)


def _beside(variant: HopperVariant, mode: str) -> Any:
    """Return a variant's config in a mode."""
    if mode in BIAS_STRIDES and isinstance(variant.config, HopperTile):
        return tile_of_bias(variant.config, variant.head_dim)
    return variant.config


def variants() -> list[HopperVariant]:
    """Return the kernels with every config of the tables, and once in each of their modes."""
    found = [
        *(
            HopperVariant("hopper_fwd", d, config, causal)
            for (d, causal), configs in FORWARD.items()
            for config in configs.values()
        ),
        *(
            HopperVariant("hopper_bwd", d, HopperBackwardTile(stages=config.stages), causal)
            for table in (BACKWARD, DETERMINISTIC)
            for (d, causal), configs in table.items()
            for config in configs.values()
        ),
        *(HopperVariant("hopper_bwd_postprocess", d, None, causal) for d, causal in BACKWARD),
        *(
            HopperVariant(f"hopper_bwd_d256_{kernel}", d, HopperD256Tile(stages=x.stages), causal)
            for (d, causal), configs in BACKWARD_D256.items()
            for x, kernel in product(configs.values(), ("dkdv", "dq"))
        ),
        *(
            HopperVariant("hopper_fwd_fp32", d, None, causal)
            for d, causal in product(FP32_D, (False, True))
        ),
        *(
            HopperVariant(f"hopper_bwd_fp32_{kernel}", d, None, causal)
            for kernel, d, causal in product(("dkdv", "dq"), FP32_D, (False, True))
        ),
    ]
    modes = [
        replace(variant, mode=mode, config=_beside(variant, mode))
        for variant in found
        if variant.head_dim == MODE_D.get(variant.kernel, 128)
        for mode in (MODES if variant.causal else UNMASKED_MODES).get(variant.kernel, ())
    ]
    narrow = [
        replace(variant, mode="narrow", config=NARROW_FORWARD)
        if variant.kernel == "hopper_fwd"
        else replace(variant, mode="narrow")
        for variant in found
        if variant.head_dim == WIDEST_OF_NARROW
    ]
    return list(dict.fromkeys([*found, *modes, *narrow]))
