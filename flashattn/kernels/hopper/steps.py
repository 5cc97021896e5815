"""Steps of the Hopper kernels: the arguments of each launch, from a plan."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, cast

from flashattn.kernels.descriptor import DescriptorSpec
from flashattn.kernels.hopper import backward_fp32 as fp32
from flashattn.kernels.hopper.backward import flashattn_hopper_bwd
from flashattn.kernels.hopper.backward_d256 import flashattn_hopper_bwd_d256_dkdv
from flashattn.kernels.hopper.backward_d256_dq import flashattn_hopper_bwd_d256_dq
from flashattn.kernels.hopper.backward_dq import DqAccumSpec, flashattn_hopper_bwd_postprocess
from flashattn.kernels.hopper.config import (
    backward_config,
    d256_config,
    forward_config,
    forward_fp32_constants,
    postprocess_constants,
)
from flashattn.kernels.hopper.forward import flashattn_hopper_fwd
from flashattn.kernels.hopper.forward_fp32 import flashattn_hopper_fwd_fp32
from flashattn.kernels.hopper.tma import WARPS, RowStatsSpec, RowTermsSpec, TileSpec
from flashattn.kernels.launch import KernelLaunch, Step
from flashattn.kernels.portable import relative
from flashattn.kernels.portable import steps as portable
from flashattn.kernels.portable.score import Scale, ScoreLayout
from flashattn.plan.bias import MARGIN, line, vector
from flashattn.plan.hopper import row_names
from flashattn.plan.plan import BackwardPlan, ForwardPlan, Pass
from flashattn.plan.portable import padded_rows
from flashattn.plan.spec import OF_VALUES, Options, TensorSpec, dense_strides
from flashattn.plan.splits import cdiv
from flashattn.plan.tile import (
    WARPGROUP_Q,
    HopperBackwardTile,
    HopperD256Tile,
    HopperFp32Tile,
    HopperTile,
    head_dim_split,
    tile_pieces,
    value_pieces,
)
from flashattn.score import is_relative

INPUTS = ("q", "k", "v", "grad_o", "lse_log2", "delta")


def _launch(
    function: Any,
    programs: int,
    numbers: Sequence[object],
    constants: dict[str, Any],
    operands: Sequence[DescriptorSpec | None] = (),
) -> KernelLaunch:
    """Return a launch of warpgroups."""
    return KernelLaunch(function, programs, numbers, constants | {"num_warps": WARPS}, operands)


def forward(
    plan: ForwardPlan, q: TensorSpec, k: TensorSpec, v: TensorSpec, options: Options
) -> list[Step]:
    """Return the launches that fill o and lse."""
    if isinstance(plan.tile, HopperFp32Tile):
        return _forward_fp32(plan, q, k, v, options)
    (batch, heads, seq_q, head_dim), (_, kv_heads, seq_kv, _) = q.shape, k.shape
    dims = head_dim, v.shape[3]
    scale, tile = Scale.of(options, forward=True), cast("HopperTile", plan.tile)
    rows = {"q": WARPGROUP_Q, "k": tile.block_kv, "v": tile.block_kv, "o": WARPGROUP_Q}
    low, high, others = tiles_of(dims, **rows)
    blocks, dynamic = cdiv(seq_q, tile.block_q), plan.scheduler.dynamic
    lies, right = ScoreLayout.of(options, heads), options.right
    before = options.alibi > 0 and right is not None and right <= options.query_offset
    launch = _launch(
        flashattn_hopper_fwd,
        plan.programs,
        (
            *(blocks * batch * heads, blocks, heads, plan.scheduler.section, heads // kv_heads),
            *(seq_q, seq_kv, options.left, options.right),
            *bounds_strides(options, seq_q, seq_kv),
            *(lies.slopes, lies.query_offset, bias_strides(lies, options)),
            *(lies.sink, scale.log2, scale.cap),
        ),
        {"t": forward_config(tile, dims, before=before, vector=vector(options.bias, seq_kv))},
        [*low, *high],
    )
    given = "counters" if dynamic else None, *bounds_names(options), *scored_names(options)
    return [*line_step(options), Step(launch, ("q", "k", "v", "o", *others, "lse", *given))]


def pieces_of(name: str, dims: tuple[int, int]) -> tuple[int, int]:
    """Return the columns of the two pieces of a tensor's tiles; ``dims`` are (D, Dv)."""
    return value_pieces(*dims) if name in OF_VALUES else tile_pieces(dims[0])


@cache
def tiles_of(
    dims: tuple[int, int], **rows: int
) -> tuple[tuple[TileSpec | None, ...], tuple[TileSpec | None, ...], tuple[str | None, ...]]:
    """Return the first pieces of tensors' tiles, the second pieces, and the names of the latter.

    For a tile in one piece, the second piece and its name are None.

    Args:
        dims: D and Dv.
        rows: rows of a tile, by tensor.
    """
    pieces = [pieces_of(name, dims) for name in rows]
    found = [
        (TileSpec(n, low), TileSpec(n, high) if high else None, name if high else None)
        for (name, n), (low, high) in zip(rows.items(), pieces, strict=True)
    ]
    low, high, others = zip(*found, strict=True)
    return low, high, others


def _forward_fp32(
    plan: ForwardPlan, q: TensorSpec, k: TensorSpec, v: TensorSpec, options: Options
) -> list[Step]:
    """Return the launches that fill o and lse in fp32."""
    (_, heads, seq_q, head_dim), (_, kv_heads, seq_kv, _) = q.shape, k.shape
    scale, keys = Scale.of(options, forward=True), TileSpec(cast("HopperFp32Tile", plan.tile).other)
    steps, _, names = portable.terms(plan.terms, q=q, k=k, v=v)
    launch = _launch(
        flashattn_hopper_fwd_fp32,
        plan.programs,
        (
            *(q.like().strides[:3], heads, heads // kv_heads, seq_q, seq_kv),
            *(options.left, options.right, ScoreLayout.of(options, heads).sink),
            *(scale.log2, head_dim),
        ),
        forward_fp32_constants(head_dim, terms=plan.terms),
        [TileSpec(WARPGROUP_Q), keys, keys],
    )
    return [*steps, Step(launch, (*names, "o", "lse", scored_names(options)[-1]))]


def bounds_names(options: Options) -> tuple[str | None, str | None]:
    """Return the names of the bounds of keys and of queries; None where there are none."""
    return portable.BOUNDS if options.bounds else (None, None)


def bounds_strides(options: Options, seq_q: int, seq_kv: int) -> tuple[int | None, int | None]:
    """Return the strides between batches in the bounds; None where there are none."""
    return portable.bounds_strides(options, seq_q, seq_kv) or (None, None)


def bias_strides(lies: ScoreLayout, options: Options) -> tuple[int | None, ...] | None:
    """Return the strides of a bias and the length of a relative one; None without a bias."""
    if options.bias is None:
        return None
    if not is_relative(options.bias):
        return lies.batch, lies.head, lies.query, lies.key, None
    (batch, heads, _, length), strides = line(options.bias).shape, line(options.bias).strides
    return strides[0] if batch > 1 else None, strides[1] if heads > 1 else None, None, None, length


def scored_names(options: Options) -> tuple[str | None, ...]:
    """Return the names of slopes, bias and sink, as ``portable.scored_names`` does."""
    alibi, bias, sink = portable.scored_names(options)
    return alibi, bias and ("bias_line" if bias == "bias_copies" else bias), sink


def line_step(options: Options) -> list[Step]:
    """Return the launch that writes a relative bias as a line, if there is a relative bias.

    The line is in units of products, to which it is added; with a softcap, in units of scores.
    """
    bias = options.bias
    if bias is None or not is_relative(bias):
        return []
    factor = 1.0 if options.softcap else 1 / options.scale
    return [Step(relative.shift(bias, line(bias), MARGIN, factor), ("bias", "bias_line"))]


def backward(plan: BackwardPlan, specs: Sequence[TensorSpec], options: Options) -> list[Step]:
    """Return the launches that fill dk, dv and dq.

    Args:
        plan: of the Hopper kernels.
        specs: of q, k, v, grad_o and o; further ones are not used.
        options: the options of the call.
    """
    q, k, v, grad_o, o, *_ = specs
    splits = plan.gqa_splits
    tile = plan.passes[0].tile
    summing = portable.sum_partials({"dk": (k, splits), "dv": (v, splits), "dq": (q, 1)})
    sums = [portable.sum_sinks(o, options)] if options.sink else []
    if plan.dbias is not None:
        sums += [
            *portable.copies(options),
            portable.preprocessing(o, grad_o),
            *portable.dbias_steps(plan.dbias, specs, plan.precision, options),
        ]
    if isinstance(tile, HopperBackwardTile):
        counters = next(x for x in plan.workspaces if x.name == "dq_semaphore")
        return [
            *line_step(options),
            portable.preprocessing(
                o, grad_o, counters, options.scale, row_names(options), options.sink
            ),
            _one_pass(plan, tile, q, k, options),
            *summing,
            _postprocess(plan, q, k, options),
            *sums,
        ]
    rows = portable.preprocessing(o, grad_o, sink=options.sink)
    if isinstance(tile, HopperD256Tile):
        return [
            rows,
            _d256_dkdv(plan, tile, specs, options),
            *summing,
            _d256_dq(plan, tile, specs, options),
            *sums,
        ]
    decomposing, *_ = portable.terms(plan.terms, q=q, k=k, v=v, grad_o=grad_o)
    passes = [_fp32(one, specs, options) for one in plan.passes]
    of_queries, of_keys = (x.num for one in plan.passes for x in one.splits)
    summing = portable.sum_partials(
        {"dk": (k, of_queries), "dv": (v, of_queries), "dq": (q, of_keys)}
    )
    return [rows, *decomposing, *passes, *summing, *sums]


def _gqa(k: TensorSpec, splits: int) -> tuple[tuple[Any, ...], tuple[str, str]]:
    """Return the arguments for GQA splits, and the names of the outputs."""
    if splits == 1:
        return (None, None, None), ("dk", "dv")
    return (splits, k.shape[3], dense_strides(k.shape)[:3]), ("dk_partial", "dv_partial")


def _one_pass(
    plan: BackwardPlan, tile: HopperBackwardTile, q: TensorSpec, k: TensorSpec, options: Options
) -> Step:
    """Return the launch of flashattn_hopper_bwd."""
    (batch, heads, seq_q, head_dim), (_, kv_heads, seq_kv, _) = q.shape, k.shape
    splits, grads = _gqa(k, plan.gqa_splits)
    scale = Scale.of(options, forward=False)
    split_heads, blocks = kv_heads * plan.gqa_splits, cdiv(seq_kv, tile.BLOCK_KV)
    stored = options.bias is not None and options.bias_grad and plan.dbias is None
    (programs,) = plan.passes[0].programs
    block_q = tile.block_q(head_dim)
    rotates = tile.persistent and not options.causal
    queries, keys, terms = TileSpec(block_q), TileSpec(tile.BLOCK_KV), RowTermsSpec(block_q)
    lse = terms if scale.cap is None else RowStatsSpec(block_q)
    lies = ScoreLayout.of(options, heads)
    launch = _launch(
        flashattn_hopper_bwd,
        programs,
        (
            *(blocks * batch * split_heads, blocks, split_heads, *splits),
            *(plan.scheduler.section, programs if rotates else 1, tile.stagger),
            *(blocks if options.deterministic else 1, plan.dq_accumulators),
            *(heads // split_heads, seq_q, seq_kv, options.left, options.right),
            *bounds_strides(options, seq_q, seq_kv),
            *(lies.slopes, lies.query_offset, bias_strides(lies, options)),
            *(scale.factor, scale.log2, scale.cap),
        ),
        # CTAs wait for those before them, which all run (cooperative) or start in their order.
        {
            "t": backward_config(tile, head_dim, vector(options.bias, seq_kv)),
            "launch_cooperative_grid": tile.persistent,
        },
        [
            *(queries, keys, keys, queries, lse, terms),
            DqAccumSpec(box_lines(head_dim)),
            *([keys if plan.gqa_splits == 1 else None] * 2),
            TileSpec(block_q, tile.BLOCK_KV) if stored else None,
        ],
    )
    names = (
        *INPUTS[:4],
        *row_names(options),
        "dq_accum",
        *grads,
        "dbias" if stored else None,
        "dq_semaphore",
        *bounds_names(options),
        *scored_names(options)[:2],
    )
    return Step(launch, names)


def box_lines(head_dim: int) -> int:
    """Return the lines of dq_accum that are stored at a time; halves of dq are whole boxes."""
    return WARPGROUP_Q // 2 if head_dim_split(head_dim)[1] else WARPGROUP_Q


def _postprocess(plan: BackwardPlan, q: TensorSpec, k: TensorSpec, options: Options) -> Step:
    """Return the launch of flashattn_hopper_bwd_postprocess, which scales and rounds dq."""
    batch, heads, seq_q, head_dim = q.shape
    block_q = HopperBackwardTile.block_q(head_dim)
    blocks = cdiv(seq_q, block_q) * (block_q // WARPGROUP_Q)
    launch = _launch(
        flashattn_hopper_bwd_postprocess,
        batch * heads * blocks,
        (
            *(q.like().strides[:3], blocks, heads, plan.dq_accumulators),
            *(seq_q, k.shape[2], options.left, options.right),
            *(bounds_strides(options, seq_q, k.shape[2])[0], options.scale),
        ),
        postprocess_constants(head_dim),
    )
    return Step(launch, ("dq_accum", "dq", bounds_names(options)[0]))


def _d256_dkdv(
    plan: BackwardPlan, tile: HopperD256Tile, specs: Sequence[TensorSpec], options: Options
) -> Step:
    """Return the launch of flashattn_hopper_bwd_d256_dkdv."""
    q, k, v, *_ = specs
    (batch, heads, seq_q, head_dim), (_, kv_heads, seq_kv, _) = q.shape, k.shape
    dims, lies = (head_dim, v.shape[3]), ScoreLayout.of(options, heads)
    splits, grads = _gqa(k, plan.gqa_splits)
    scale = Scale.of(options, forward=False)
    split_heads, blocks = kv_heads * plan.gqa_splits, cdiv(seq_kv, tile.BLOCK_KV)
    numbers, tensors = RowStatsSpec(WARPGROUP_Q), (*INPUTS[:4], *grads)
    low, high, others = tiles_of(dims, **dict.fromkeys(tensors, WARPGROUP_Q))
    if plan.gqa_splits > 1:  # partial sums have no tiles
        low, high, others = ((*x[:4], None, None) for x in (low, high, others))
    launch = _launch(
        flashattn_hopper_bwd_d256_dkdv,
        sum(plan.passes[0].programs),
        (
            *(blocks * batch * split_heads, blocks, split_heads, *splits, tile.section),
            *(heads // split_heads, seq_q, seq_kv, options.left, options.right),
            *bounds_strides(options, seq_q, seq_kv),
            *(lies.slopes, lies.query_offset, scale.factor, scale.log2, scale.cap),
        ),
        {"t": d256_config(tile, dims)},
        [*low[:4], numbers, numbers, *low[4:], *high],
    )
    scored = scored_names(options)[:1]
    return Step(launch, (*INPUTS, *grads, *others, *bounds_names(options), *scored))


def _d256_dq(
    plan: BackwardPlan, tile: HopperD256Tile, specs: Sequence[TensorSpec], options: Options
) -> Step:
    """Return the launch of flashattn_hopper_bwd_d256_dq."""
    q, k, v, *_ = specs
    (batch, heads, seq_q, head_dim), (_, kv_heads, seq_kv, _) = q.shape, k.shape
    dims, lies = (head_dim, v.shape[3]), ScoreLayout.of(options, heads)
    blocks, scale = cdiv(seq_q, tile.BLOCK_Q), Scale.of(options, forward=False)
    (*low, stored), high, others = tiles_of(dims, **dict.fromkeys((*INPUTS[:4], "dq"), WARPGROUP_Q))
    launch = _launch(
        flashattn_hopper_bwd_d256_dq,
        sum(plan.passes[1].programs),
        (
            *(blocks * batch * heads, blocks, heads, tile.section, heads // kv_heads),
            *(seq_q, seq_kv, padded_rows(seq_q), options.left, options.right),
            *bounds_strides(options, seq_q, seq_kv),
            *(lies.slopes, lies.query_offset, scale.factor, scale.log2, scale.cap),
        ),
        {"t": d256_config(tile, dims)},
        [*low, None, None, stored, *high],
    )
    scored = scored_names(options)[:1]
    return Step(launch, (*INPUTS, "dq", *others, *bounds_names(options), *scored))


def _fp32(one: Pass, specs: Sequence[TensorSpec], options: Options) -> Step:
    """Return the launch of flashattn_hopper_bwd_fp32_dkdv, or of flashattn_hopper_bwd_fp32_dq."""
    (q, k, v), tile = specs[:3], cast("HopperFp32Tile", one.tile)
    (batch, heads, seq_q, head_dim), (_, kv_heads, seq_kv, _) = q.shape, k.shape
    own, other, scale = TileSpec(tile.own), TileSpec(tile.other), Scale.of(options, forward=False)
    function, loads = fp32.flashattn_hopper_bwd_fp32_dkdv, [other, own, own, other]
    if one.kernel.endswith("_dq"):
        function, loads = fp32.flashattn_hopper_bwd_fp32_dq, [own, other, other, own]
    grads = portable.written(one, q, k, v).values()
    launch = _launch(
        function,
        sum(one.programs),
        (
            *(strides for _, strides in grads),
            *(heads, heads // kv_heads, seq_q, seq_kv, padded_rows(seq_q)),
            *(options.left, options.right, batch, one.splits[0].length),
            *(scale.factor, scale.log2, head_dim),
        ),
        {"SPLIT": one.splits[0].num > 1, "TERMS": one.terms},
        loads,
    )
    names = [f"{name}_terms" for name in portable.INPUTS]
    return Step(launch, (*names, "lse_log2", "delta", *(where for where, _ in grads)))
