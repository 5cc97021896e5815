"""Steps of the portable kernels: the launches of a plan, with their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from flashattn.kernels.constants import LOG2E
from flashattn.kernels.descriptor import TileLoadSpec
from flashattn.kernels.launch import KernelLaunch, Name, Step
from flashattn.kernels.portable import bf16x3 as decompose
from flashattn.kernels.portable import combine, preprocess, relative, score_gradients
from flashattn.kernels.portable.backward import (
    flashattn_bwd,
    flashattn_bwd_dkdv,
    flashattn_bwd_dq,
)
from flashattn.kernels.portable.config import BackwardLayout, Config, ForwardLayout
from flashattn.kernels.portable.forward import flashattn_fwd
from flashattn.kernels.portable.score import Scale, ScoreLayout
from flashattn.plan.bias import shares_bias, shifted, vector
from flashattn.plan.plan import BackwardPlan, ForwardPlan, Pass, Workspace
from flashattn.plan.portable import decomposed, packed, packed_rows, padded_rows
from flashattn.plan.rows import FUSED, Kernel
from flashattn.plan.spec import Extras, Options, TensorSpec, dense_strides
from flashattn.plan.splits import cdiv
from flashattn.plan.tile import Tile, block_d, padding
from flashattn.score import is_relative

KERNELS: dict[Kernel, Any] = {
    "bwd_fused": flashattn_bwd,
    "bwd_one_launch": flashattn_bwd,
    "bwd_dkdv": flashattn_bwd_dkdv,
    "bwd_dq": flashattn_bwd_dq,
}
BOUNDS, SCORED = Extras._fields[:2], Extras._fields[2:]
PARTIAL = ("o_partial", "lse_partial")
BACKWARD_SCORED = (*SCORED[:2], "dbias")
INPUTS, GRADS = ("q", "k", "v", "grad_o"), ("dk", "dv", "dq")
WRITTEN: dict[str, tuple[str, ...]] = {  # in the order of each kernel's arguments
    **dict.fromkeys(FUSED, GRADS),
    **dict.fromkeys(("bwd_dkdv", "hopper_bwd_fp32_dkdv"), GRADS[:2]),
    **dict.fromkeys(("bwd_dq", "hopper_bwd_fp32_dq"), GRADS[2:]),
}


def forward(
    plan: ForwardPlan, q: TensorSpec, k: TensorSpec, v: TensorSpec, options: Options
) -> list[Step]:
    """Return the launches that fill o and lse."""
    o, left, right, tile = q.like(), options.left, options.right, cast("Tile", plan.tile)
    if plan.pack_gqa:
        o, right = packed_rows(o, k.shape[1]), None
        q, k, v = packed(q, k, v, plan.keys)
    steps, inputs, names = terms(plan.terms, q=q, k=k, v=v)
    (batch, heads, seq_q, head_dim), (_, kv_heads, seq_kv, _) = q.shape, k.shape
    split = plan.split.num > 1
    strides = [x.strides[:3] for x in (*inputs, o)]
    extras, absent = extra_names(options)
    if split:
        counted = "counters" if plan.counters else None
        extras, absent = (*extras, *absent, (*PARTIAL, counted)), ()
    else:
        absent += ((None, None, None),)
    launch = KernelLaunch(
        flashattn_fwd,
        plan.programs,
        (
            *absent,
            ScoreLayout.of(options, heads),
            ForwardLayout._make((*strides, head_dim, bounds_strides(options, seq_q, seq_kv))),
            *(heads, heads // kv_heads, seq_q, seq_kv, left, right, batch),
            plan.split.length if split else None,
            Scale.of(options, forward=True),
        ),
        {
            "CONFIG": Config.of(
                tile, head_dim, strides, plan.precision, plan.terms, vector(options.bias, seq_kv)
            ),
            **tile.compiler_options(),
        },
        _loads(tile, inputs, (tile.block_q, tile.block_kv, tile.block_kv)),
    )
    steps += copies(options)
    steps.append(Step(launch, (*names, "o", "lse", *extras)))
    if split and not plan.counters:
        steps.append(_combine(plan, q, o))
    return steps


def _combine(plan: ForwardPlan, q: TensorSpec, o: TensorSpec) -> Step:
    """Return the launch that combines the splits of all tiles."""
    (_, heads, seq_q, head_dim), rows = q.shape, combine.COMBINE_ROWS
    block_q, tiles = cast("Tile", plan.tile).block_q, plan.programs // plan.split.num
    options = _row_options(head_dim, [o.strides[:3]], rows, combine.COMBINE_WARPS)
    launch = KernelLaunch(
        combine.flashattn_combine,
        tiles * (block_q // rows),
        (o.strides[:3], plan.split.num, tiles, heads, seq_q),
        options | {"BLOCK_Q": block_q},
    )
    return Step(launch, (PARTIAL, "o", "lse"))


def extra_names(
    options: Options, scored: Sequence[str | None] | None = None
) -> tuple[tuple[Name, ...], tuple[tuple[None, ...], ...]]:
    """Return the names of the bounds and of the score tensors, as kernels take them.

    Args:
        options: what the call asks for.
        scored: names of the score tensors, instead of those in ``SCORED`` that are given.

    Returns:
        The names, and the placeholders that a launch has as numbers if there are no such tensors.
    """
    absent = (None,) * len(BOUNDS), (None,) * len(SCORED)
    if not options.extras:
        return (), absent
    scored = scored_names(options, scored)
    return (BOUNDS if options.bounds else absent[0], scored), ()


def scored_names(
    options: Options, scored: Sequence[str | None] | None = None
) -> tuple[str | None, ...]:
    """Return the names of the score tensors, None for absent ones; arguments as above."""
    if scored is None:
        given = zip(SCORED, options.scored, strict=True)
        scored = [name if there else None for name, there in given]
    if copies(options):
        scored = ["bias_copies" if name == "bias" else name for name in scored]
    return tuple(scored)


def copies(options: Options) -> list[Step]:
    """Return the launch that fills the copies of a relative bias, if there is one."""
    bias = options.bias
    if bias is None or not is_relative(bias):
        return []
    return [Step(relative.shift(bias, shifted(bias)), ("bias", "bias_copies"))]


def bounds_strides(options: Options, seq_q: int, seq_kv: int) -> tuple[int, int] | None:
    """Return the batch strides of the bounds: of the keys and of the queries."""
    if not options.bounds:
        return None
    return (0, 0) if options.bounds == 1 else (2 * seq_q, 2 * seq_kv)


def terms(count: int, **inputs: TensorSpec) -> tuple[list[Step], list[TensorSpec], tuple[str, ...]]:
    """Return the launch that decomposes inputs into bf16 terms, and their specs and names."""
    if not count:
        return [], list(inputs.values()), tuple(inputs)
    specs = list(inputs.values())
    (batch, heads, seq_q, head_dim), (_, kv_heads, seq_kv, _) = specs[0].shape, specs[1].shape
    absent = (None,) * (4 - len(specs))
    strides = (*(x.strides[:3] for x in specs), *((0, 0, 0),) * len(absent))
    launch = KernelLaunch(
        decompose.flashattn_decompose,
        sum(cdiv(x.shape[2], decompose.BLOCK) * batch * x.shape[1] for x in specs),
        (strides, batch, heads, kv_heads, seq_q, seq_kv),
        _row_options(head_dim, strides, decompose.BLOCK, decompose.WARPS) | {"TERMS": count},
    )
    names = tuple(f"{name}_terms" for name in inputs)
    step = Step(launch, ((*inputs, *absent), (*names, *absent)))
    return [step], [decomposed(x, count) for x in specs], names


def _loads(tile: Tile, inputs: Sequence[TensorSpec], rows: Sequence[int]) -> list[TileLoadSpec]:
    """Return the descriptors of inputs, in tiles of so many rows; none with pointers."""
    if not tile.descriptors:
        return []
    return [
        TileLoadSpec(x.shape, x.strides, (1, 1, n, block_d(x.shape[3])))
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
        specs: of q, k, v, grad_o and o, and others that are not used.
        options: what the call asks for.
    """
    q, k, v, grad_o, o, *_ = specs
    passes = [backward_pass(one, specs, plan.precision, options) for one in plan.passes]
    if plan.passes[0].kernel == "bwd_one_launch":
        return [*copies(options), *passes]
    decomposing, *_ = terms(plan.terms, q=q, k=k, v=v, grad_o=grad_o)
    of_queries, of_keys = (x.num for one in plan.passes for x in one.splits)
    summing = sum_partials({"dk": (k, of_queries), "dv": (v, of_queries), "dq": (q, of_keys)})
    if plan.dbias is not None:
        summing += dbias_steps(plan.dbias, specs, plan.precision, options)
    if options.sink:
        summing.append(sum_sinks(o, options))
    first = [preprocessing(o, grad_o, sink=options.sink), *decomposing, *copies(options)]
    return [*first, *passes, *summing]


def preprocessing(
    o: TensorSpec,
    grad_o: TensorSpec,
    counters: Workspace | None = None,
    scale: float | None = None,
    filled: tuple[str, str] = ("lse_log2", "delta"),
    sink: int = 0,
) -> Step:
    """Return the launch that fills lse_log2 (or terms of -lse / scale) and delta (or of -delta).

    Args:
        o: its spec.
        grad_o: its spec.
        counters: counters that the launch also clears, or None.
        scale: of the scores, if it fills terms.
        filled: names of the workspaces that it fills.
        sink: batch size of the sinks; with sinks, it also fills the partial sums of dsink.
    """
    batch, heads, seq_q, head_dim = o.shape
    rows, strides = padded_rows(seq_q), (o.strides[:3], grad_o.strides[:3])
    programs = rows // preprocess.BLOCK * batch * heads
    (cleared,), name = (counters.shape, counters.name) if counters else ((0,), None)
    each = 1 << (cdiv(cleared, programs) - 1).bit_length() if cleared else 0
    launch = KernelLaunch(
        preprocess.flashattn_bwd_preprocess,
        programs,
        (
            *(() if sink else ((None, None),)),
            *(*strides, heads, seq_q, rows, cleared),
            None if scale is None else scale * LOG2E.value,
        ),
        _row_options(head_dim, strides, preprocess.BLOCK, preprocess.WARPS)
        | {"sink_stride": None if not sink else heads if sink > 1 else 0, "COUNTERS": each},
    )
    sinks = (("sink", "dsink_partial"),) if sink else ()
    return Step(launch, ("o", "grad_o", "lse", "grad_lse", *filled, name, *sinks))


def sum_sinks(o: TensorSpec, options: Options) -> Step:
    """Return the launch that sums the partial gradients of sinks."""
    batch, heads, seq_q, _ = o.shape
    launch = KernelLaunch(
        score_gradients.flashattn_bwd_dsink,
        options.sink * heads,
        (heads, batch, padded_rows(seq_q) // preprocess.BLOCK),
        {
            "SHARED": options.sink == 1,
            "BLOCK": score_gradients.SINK_BLOCK,
            "num_warps": score_gradients.SINK_WARPS,
        },
    )
    return Step(launch, ("dsink_partial", "dsink"))


def written(
    one: Pass, q: TensorSpec, k: TensorSpec, v: TensorSpec
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the tensor and strides to which a pass writes each gradient or its partial sums."""
    of_queries, of_keys = one.splits[0], one.splits[-1]
    grads = {"dk": (k, of_queries), "dv": (v, of_queries), "dq": (q, of_keys)}
    found = {}
    for name in WRITTEN[one.kernel]:
        like, split = grads[name]
        if split.num > 1:
            found[name] = f"{name}_partial", dense_strides(like.shape)[:3]
        else:
            found[name] = name, like.like().strides[:3]
    return found


def backward_pass(one: Pass, specs: Sequence[TensorSpec], precision: str, options: Options) -> Step:
    """Return the launch of flashattn_bwd_dkdv, flashattn_bwd_dq, or flashattn_bwd, which is both.

    Args:
        one: the plan's pass.
        specs: of q, k, v, grad_o and o, and others that are not used.
        precision: as ``precision.input_precision`` returns it.
        options: what the call asks for.
    """
    (q, k, v, grad_o, o), tile = specs[:5], cast("Tile", one.tile)
    (batch, heads, seq_q, head_dim), (_, kv_heads, seq_kv, _) = q.shape, k.shape
    _, inputs, names = terms(one.terms, q=q, k=k, v=v, grad_o=grad_o)
    grads = written(one, q, k, v)
    split_lens = [x.length if x.num > 1 else None for x in one.splits]
    whole = one.kernel == "bwd_one_launch"  # takes o, and lse instead of lse_log2
    rows = ("lse", "grad_lse", "o") if whole else ("lse_log2", "delta", None)
    read, write = [x.strides[:3] for x in inputs], [strides for _, strides in grads.values()]
    lies = (grads[name][1] if name in grads else None for name in GRADS)
    layout = BackwardLayout._make(
        (
            *(*read, *lies, o.strides[:3] if whole else None, head_dim, padded_rows(seq_q)),
            bounds_strides(options, seq_q, seq_kv),
        )
    )
    stored = "dq" in grads and options.bias_grad and not shares_bias(q, k, options)
    alibi, bias, _ = options.scored
    there = zip(BACKWARD_SCORED, (alibi, bias, stored and bias), strict=True)
    extras, absent = extra_names(options, [name if x else None for name, x in there])
    loads = _loads(tile, inputs, (tile.block_q, tile.block_kv, tile.block_kv, tile.block_q))
    strides = [*read, *write, o.strides[:3]]
    config = Config.of(tile, head_dim, strides, precision, one.terms, vector(options.bias, seq_kv))
    launch = KernelLaunch(
        KERNELS[cast("Kernel", one.kernel)],
        sum(one.programs),
        (
            *absent,
            ScoreLayout.of(options, heads),
            layout,
            *(heads, heads // kv_heads, seq_q, seq_kv, options.left, options.right, batch),
            *split_lens,
            *([one.programs[0]] if one.kernel in FUSED else []),
            Scale.of(options, forward=False),
        ),
        {"CONFIG": config, **tile.compiler_options()},
        loads,
    )
    return Step(launch, (*names, rows, tuple(where for where, _ in grads.values()), *extras))


def dbias_steps(
    one: Pass, specs: Sequence[TensorSpec], precision: str, options: Options
) -> list[Step]:
    """Return the launches for the gradient of a bias that several scores share; args as above."""
    (q, k, *_), tile = specs, cast("Tile", one.tile)
    (batch, heads, seq_q, head_dim), (_, kv_heads, seq_kv, _) = q.shape, k.shape
    strides = [x.strides[:3] for x in specs[:4]]
    layout = BackwardLayout._make(
        (
            *(*strides, None, None, None, None, head_dim, padded_rows(seq_q)),
            bounds_strides(options, seq_q, seq_kv),
        )
    )
    scored = ("alibi_slopes" if options.alibi else None, "bias", None)
    extras, _ = extra_names(options, scored)
    lies = ScoreLayout.of(options, heads)
    config = Config.of(tile, head_dim, strides, precision, 0, vector(options.bias, seq_kv))
    shared, relative = score_gradients.flashattn_bwd_dbias, lies.length is not None
    launch = KernelLaunch(
        score_gradients.flashattn_bwd_dbias_relative if relative else shared,
        sum(one.programs),
        (
            lies,
            *(layout, heads, heads // kv_heads, seq_q, seq_kv, options.left, options.right, batch),
            Scale.of(options, forward=False),
        ),
        {"CONFIG": config, **tile.compiler_options()},
    )
    names = (*INPUTS, ("lse_log2", "delta", None))
    if not relative:
        return [Step(launch, (*names, "dbias", *extras))]
    *rows, size = cast("TensorSpec", options.bias).shape
    block, warps = score_gradients.RELATIVE_BLOCK, score_gradients.RELATIVE_WARPS
    summing = KernelLaunch(
        score_gradients.flashattn_bwd_drelative,
        rows[0] * rows[1] * cdiv(size, block),
        (lies, heads, batch, size),
        {"BLOCK": block, "num_warps": warps},
    )
    parts = "dbias_partial"
    return [Step(launch, (*names, parts, *extras)), Step(summing, (parts, "dbias"))]


def sum_partials(grads: dict[str, tuple[TensorSpec, int]]) -> list[Step]:
    """Return the launch that sums the splits of gradients, if there are any.

    Args:
        grads: by the names of gradients, the specs of k, v and q, and of how many splits each
            gradient is the sum.
    """
    added = {name: x for name, (x, num) in grads.items() if num > 1}
    if not added:
        return []
    (k, num), (q, num_kv) = grads["dk"], grads["dq"]
    batch, kv_heads, seq_kv, head_dim = k.shape
    strides = tuple(added[x].like().strides[:3] if x in added else (0, 0, 0) for x in GRADS)
    launch = KernelLaunch(
        combine.flashattn_bwd_reduce,
        sum(cdiv(x.shape[:3].numel(), combine.REDUCE_BLOCK) for x in added.values()),
        (strides, num, num_kv, batch, q.shape[1], kv_heads, q.shape[2], seq_kv),
        _row_options(head_dim, strides, combine.REDUCE_BLOCK, combine.REDUCE_WARPS),
    )
    sums = tuple(name if name in added else None for name in GRADS)
    partials = tuple(f"{name}_partial" if name in added else None for name in GRADS)
    return [Step(launch, (partials, sums))]
