"""Steps of the portable kernels: each launch's arguments, from a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from flashattn.kernels.constants import LOG2E
from flashattn.kernels.launch import Launch, Step, TileLoads
from flashattn.kernels.portable import bf16x3 as decompose
from flashattn.kernels.portable import combine, gradients, preprocess
from flashattn.kernels.portable.forward import flashattn_fwd
from flashattn.plan.plan import BackwardPlan, ForwardPlan, Pass
from flashattn.plan.portable import decomposed, packed, packed_rows, padded_rows
from flashattn.plan.rows import FUSED, Kernel
from flashattn.plan.spec import Options, TensorSpec, dense_strides
from flashattn.plan.splits import cdiv
from flashattn.plan.support import SMALLEST_SCALE
from flashattn.plan.tile import Tile, block_d, padding

KERNELS: dict[Kernel, Any] = {
    "bwd_fused": gradients.flashattn_bwd,
    "bwd_one_launch": gradients.flashattn_bwd,
    "bwd_dkdv": gradients.flashattn_bwd_dkdv,
    "bwd_dq": gradients.flashattn_bwd_dq,
}
INPUTS, GRADS = ("q", "k", "v", "grad_o"), ("dk", "dv", "dq")


def forward(
    plan: ForwardPlan, q: TensorSpec, k: TensorSpec, v: TensorSpec, options: Options
) -> list[Step]:
    """Return the launches that fill o and lse."""
    o, diagonal, tile = q.like(), options.diagonal, cast("Tile", plan.tile)
    if plan.pack_gqa:
        o, diagonal = packed_rows(o, k.shape[1]), None
        q, k, v = packed(q, k, v, plan.keys)
    steps, inputs, names = terms(plan.terms, q=q, k=k, v=v)
    (batch, heads, seq_q, head_dim), (_, kv_heads, seq_kv, _) = q.shape, k.shape
    split = plan.split.num > 1
    o_strides = dense_strides(q.shape) if split else o.strides
    strides = [x[:3] for x in (*(x.strides for x in inputs), o_strides)]
    scale_log2 = options.scale * LOG2E.value
    # The product with a sign is exact: were scores rounded, those in a tile with a mask would be,
    # and in others not, where the compiler joins the product with the difference from m.
    size = max(abs(scale_log2), SMALLEST_SCALE)
    launch = Launch(
        flashattn_fwd,
        plan.programs,
        [*_loads(tile, inputs, (tile.block_q, tile.block_kv, tile.block_kv)), None, None],
        (
            *strides,
            *(heads, heads // kv_heads, seq_q, seq_kv),
            diagonal or 0,
            *(batch, plan.split.length),
            *(size, scale_log2 / size),
        ),
        {
            "head_dim": head_dim,
            "CAUSAL": diagonal is not None,
            "POSITIVE_SCALE": scale_log2 >= SMALLEST_SCALE,
            "PRECISION": f"cut{plan.terms}" if plan.terms else plan.precision,
            "SPLIT": split,
            **tile.options(head_dim, strides),
        },
    )
    if not split:
        return [*steps, Step(launch, (*names, "o", "lse"))]
    rows = batch * heads * seq_q
    merge = Launch(
        combine.flashattn_combine,
        cdiv(rows, combine.COMBINE_BLOCK),
        [None] * 4,
        (o.strides[:3], plan.split.num, rows, heads, seq_q),
        _row_options(head_dim, [o.strides[:3]], combine.COMBINE_BLOCK, combine.COMBINE_WARPS),
    )
    partials = ("o_partials", "lse_partials")
    return [*steps, Step(launch, (*names, *partials)), Step(merge, (*partials, "o", "lse"))]


def terms(count: int, **inputs: TensorSpec) -> tuple[list[Step], list[TensorSpec], tuple[str, ...]]:
    """Return what decomposes inputs into bf16 terms, the specs of these, and their names."""
    if not count:
        return [], list(inputs.values()), tuple(inputs)
    specs = list(inputs.values())
    (batch, heads, seq_q, head_dim), (_, kv_heads, seq_kv, _) = specs[0].shape, specs[1].shape
    absent = [None] * (4 - len(specs))
    strides = [x.strides[:3] for x in specs] + [(0, 0, 0)] * len(absent)
    launch = Launch(
        decompose.flashattn_cut,
        sum(cdiv(x.shape[2], decompose.BLOCK) * batch * x.shape[1] for x in specs),
        [None] * 8,
        (*strides, batch, heads, kv_heads, seq_q, seq_kv),
        _row_options(head_dim, strides, decompose.BLOCK, decompose.WARPS) | {"PARTS": count},
    )
    names = tuple(f"{name}_terms" for name in inputs)
    step = Step(launch, (*inputs, *absent, *names, *absent))
    return [step], [decomposed(x, count) for x in specs], names


def _loads(tile: Tile, inputs: Sequence[TensorSpec], rows: Sequence[int]) -> list[TileLoads | None]:
    """Return how inputs are loaded, in tiles of so many rows; None is by pointers."""
    if not tile.descriptors:
        return [None] * len(inputs)
    return [
        TileLoads(x.shape, x.strides, (1, 1, n, block_d(x.shape[3])))
        for x, n in zip(inputs, rows, strict=True)
    ]


def _row_options(
    head_dim: int, strides: Sequence[Sequence[int]], block: int, warps: int
) -> dict[str, Any]:
    """Return the keyword arguments of a kernel whose programs take ``block`` rows each."""
    return {
        "head_dim": head_dim,
        "PADDED": padding(head_dim, strides),
        "BLOCK": block,
        "BLOCK_D": block_d(head_dim),
        "num_warps": warps,
    }


def backward(plan: BackwardPlan, specs: Sequence[TensorSpec], options: Options) -> list[Step]:
    """Return the launches that fill dk, dv and dq.

    Args:
        plan: of the portable kernels.
        specs: of q, k, v, grad_o and o, and others that are not asked.
        options: what is asked.
    """
    q, k, v, grad_o, o, *_ = specs
    passes = [backward_pass(one, specs, plan.precision, options) for one in plan.passes]
    if plan.passes[0].kernel == "bwd_one_launch":
        return passes
    decomposing, *_ = terms(plan.terms, q=q, k=k, v=v, grad_o=grad_o)
    of_queries, of_keys = (x.num for one in plan.passes for x in one.splits)
    summing = sum_partials({"dk": (k, of_queries), "dv": (v, of_queries), "dq": (q, of_keys)})
    return [preprocessing(o, grad_o), *decomposing, *passes, *summing]


def preprocessing(o: TensorSpec, grad_o: TensorSpec) -> Step:
    """Return the launch that fills lse_log2 and delta."""
    batch, heads, seq_q, head_dim = o.shape
    rows, strides = padded_rows(seq_q), (o.strides[:3], grad_o.strides[:3])
    launch = Launch(
        preprocess.flashattn_bwd_delta,
        rows // preprocess.DELTA_BLOCK * batch * heads,
        [None] * 6,
        (*strides, heads, seq_q, rows),
        _row_options(head_dim, strides, preprocess.DELTA_BLOCK, preprocess.DELTA_WARPS),
    )
    return Step(launch, ("o", "grad_o", "lse", "grad_lse", "lse_log2", "delta"))


def sizes(
    q: TensorSpec, k: TensorSpec, lengths: Sequence[int], options: Options
) -> tuple[object, ...]:
    """Return what kernels of a pass take, from ``heads`` to ``scale_log2``."""
    batch, heads, seq_q, _ = q.shape
    kv_heads, seq_kv = k.shape[1:3]
    last = options.diagonal or 0
    found = heads, heads // kv_heads, seq_q, seq_kv, padded_rows(seq_q), last, batch, *lengths
    return *found, options.scale, options.scale * LOG2E.value


def written(
    one: Pass, q: TensorSpec, k: TensorSpec, v: TensorSpec
) -> tuple[list[str], list[tuple[int, ...]]]:
    """Return what a pass fills, gradients or partials of them, and the strides of these."""
    of_queries, of_keys = one.splits[0], one.splits[-1]
    grads = {"dk": (k, of_queries), "dv": (v, of_queries), "dq": (q, of_keys)}
    if one.kernel.endswith("dkdv"):
        del grads["dq"]
    if one.kernel.endswith("_dq"):
        del grads["dk"], grads["dv"]
    names = [f"{name}_partials" if x.num > 1 else name for name, (_, x) in grads.items()]
    strides = [
        dense_strides(spec.shape) if x.num > 1 else spec.like().strides
        for spec, x in grads.values()
    ]
    return names, [x[:3] for x in strides]


def backward_pass(one: Pass, specs: Sequence[TensorSpec], precision: str, options: Options) -> Step:
    """Return the launch of flashattn_bwd_dkdv, flashattn_bwd_dq, or flashattn_bwd, which is both.

    Args:
        one: which, and how.
        specs: of q, k, v, grad_o and o, and others that are not asked.
        precision: as ``precision.input_precision`` returns it.
        options: what is asked.
    """
    (q, k, v, grad_o, o), tile = specs[:5], cast("Tile", one.tile)
    _, inputs, names = terms(one.terms, q=q, k=k, v=v, grad_o=grad_o)
    grads, grad_strides = written(one, q, k, v)
    lengths = [x.length for x in one.splits]
    constants: dict[str, Any] = {"SPLIT": one.splits[0].num > 1}
    if one.kernel in FUSED:
        lengths.append(one.programs[0])
        constants["SPLIT_KV"] = one.splits[1].num > 1
    else:
        constants |= dict.fromkeys(("program", "programs"))
    whole = one.kernel == "bwd_one_launch"  # which takes o, and lse itself
    rows = ("lse", "grad_lse") if whole else ("lse_log2", "delta")
    operands = (*names, *rows, *grads, *(["o"] if whole else []))
    strides = [x.strides[:3] for x in inputs] + grad_strides
    loads = _loads(tile, inputs, (tile.block_q, tile.block_kv, tile.block_kv, tile.block_q))
    launch = Launch(
        KERNELS[cast("Kernel", one.kernel)],
        sum(one.programs),
        [*loads, *[None] * (len(operands) - len(loads))],
        (
            *([] if whole else [None]),
            *strides,
            o.strides[:3] if whole else None,
            *sizes(q, k, lengths, options),
        ),
        {
            "head_dim": q.shape[3],
            "CAUSAL": options.causal,
            "PRECISION": f"cut{one.terms}" if one.terms else precision,
            **constants,
            **tile.options(q.shape[3], [*strides, o.strides[:3]]),
        },
    )
    return Step(launch, operands)


def sum_partials(grads: dict[str, tuple[TensorSpec, int]]) -> list[Step]:
    """Return the launch that adds up partials, if there are any.

    Args:
        grads: specs of k, v and q, by the names of their gradients, and how many partials these
            have.
    """
    added = {name: x for name, (x, num) in grads.items() if num > 1}
    if not added:
        return []
    (k, num), (q, num_kv) = grads["dk"], grads["dq"]
    batch, kv_heads, seq_kv, head_dim = k.shape
    strides = [added[x].like().strides[:3] if x in added else (0, 0, 0) for x in GRADS]
    launch = Launch(
        combine.flashattn_bwd_sum,
        sum(cdiv(x.shape[:3].numel(), combine.SUM_BLOCK) for x in added.values()),
        [None] * 6,
        (*strides, num, num_kv, batch, q.shape[1], kv_heads, q.shape[2], seq_kv),
        _row_options(head_dim, strides, combine.SUM_BLOCK, combine.SUM_WARPS),
    )
    partials = [f"{name}_partials" if name in added else None for name in GRADS]
    return [Step(launch, (*partials, *(name if name in added else None for name in GRADS)))]
