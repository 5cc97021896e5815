"""Choose the tiles and schedules of Hopper's kernels, and where they replace portable ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from flashattn.plan import portable
from flashattn.plan.bias import (
    bias_workspaces,
    dbias_pass,
    dbias_workspaces,
    line_workspaces,
    shares_bias,
    tma_stores,
)
from flashattn.plan.gpu import Gpu
from flashattn.plan.plan import BackwardPlan, ForwardPlan, Pass, Scheduler, Workspace
from flashattn.plan.precision import TERMS
from flashattn.plan.rows import Kernel
from flashattn.plan.spec import Options, TensorSpec
from flashattn.plan.splits import (
    cdiv,
    dq_accumulators,
    equal_sections,
    gqa_splits,
    rotating_section,
)
from flashattn.plan.support import why_not_hopper, why_not_scale, why_not_tma
from flashattn.plan.tables import hopper as rows
from flashattn.plan.tile import (
    NARROW_VALUES,
    WARPGROUP_Q,
    HopperBackward,
    HopperBackwardTile,
    HopperD256Tile,
    HopperTile,
    block_d,
    head_dim_split,
)
from flashattn.problem import ALIGNMENT
from flashattn.score import is_relative

Of = TypeVar("Of")
NO_TILE = "no tile for so few columns"


def columns(head_dim: int) -> int:
    """Return the number of columns that Hopper's kernels multiply."""
    return sum(head_dim_split(head_dim))


def _from(
    table: Mapping[tuple[int, bool], Mapping[int, Of]], head_dim: int, queries: int, *, causal: bool
) -> Of | None:
    """Return a table's entry for a head dimension and a number of queries, or None."""
    found = table.get((columns(head_dim), causal))
    return found[max(least for least in found if least <= queries)] if found else None


def _up_to(table: Mapping[tuple[int, bool], Of], head_dim: int, *, causal: bool) -> Of:
    """Return the first entry of a table with enough columns."""
    return next(x for (d, mask), x in table.items() if head_dim <= d and mask == causal)


def _longest_window(table: Mapping[int, int], q: TensorSpec) -> int:
    """Return the longest window for which the portable kernels are faster; 0 in fp32."""
    if q.dtype == torch.float32:
        return 0
    return next((keys for d, keys in table.items() if q.shape[3] <= d), 0)


def forward_pays(q: TensorSpec, k: TensorSpec, gpu: Gpu, options: Options) -> tuple[bool, str]:
    """Return whether Hopper's forward beats the portable one, and why."""
    causal = options.causal
    reason = why_not_hopper(q.dtype, q.shape[3], gpu)
    if reason is not None:
        return False, f"the portable kernel: {reason}"
    batch, heads, seq_q, head_dim = q.shape
    tiles = cdiv(seq_q, rows.TILE_Q) * batch * heads
    if seq_q < rows.TILE_Q:
        return False, f"the portable kernel: a head has less than a tile of {rows.TILE_Q} queries"
    if options.window_keys <= _longest_window(rows.FORWARD_WINDOW, q):
        return False, "the portable kernel, of smaller tiles: the window is short"
    fp32_bias = options.bias is not None and options.bias.dtype == torch.float32
    if fp32_bias and not causal and head_dim <= rows.ONE_PASS:  # measured: H200 (tuning-log.md)
        return False, "the portable kernel: a bias in fp32 takes long to exchange"
    if q.dtype == torch.float32:
        enough = rows.FORWARD_FP32_FROM[causal]
    else:
        by_keys = _up_to(rows.FORWARD_FROM, head_dim, causal=causal)
        enough = next(n for most, n in by_keys if k.shape[2] <= most)
    pays = tiles >= enough * gpu.num_sms
    kernels = "Hopper's kernel" if pays else "the portable kernel"
    return pays, f"{kernels}: {tiles} tiles for {gpu.num_sms} SMs, Hopper's needs {enough:.2g} each"


def backward_pays(q: TensorSpec, k: TensorSpec, gpu: Gpu, options: Options) -> tuple[bool, str]:
    """Return whether Hopper's backward beats the portable one, and why."""
    reason = why_not_hopper(q.dtype, q.shape[3], gpu)
    if reason is not None:
        return False, f"the portable kernels: {reason}"
    if q.dtype == torch.float32:
        pays = block_d(q.shape[3]) == rows.FP32_BACKWARD_D
        kernels = "Hopper's kernels" if pays else "the portable kernels"
        return pays, f"{kernels}: fp32 of {q.shape[3]} columns"
    if not (tma_stores(q, k, options) or shares_bias(q, k, options)):
        return False, "the portable kernels: TMA cannot store the gradient of the bias"
    batch, heads, seq_q, head_dim = q.shape
    if seq_q < rows.TILE_Q:
        return False, f"the portable kernels: a head has less than a tile of {rows.TILE_Q} queries"
    group = heads // max(1, k.shape[1])
    if options.window_keys * group <= _longest_window(rows.BACKWARD_WINDOW, q):
        return False, "the portable kernels, of smaller tiles: the window is short"
    tiles = cdiv(k.shape[2], rows.TILE_KV) * batch * heads * max(1, group**3 / rows.GROUP_CUBE)
    enough = _up_to(rows.BACKWARD_FROM, head_dim, causal=options.causal)
    pays = tiles >= enough * gpu.num_sms
    kernels = "Hopper's kernels" if pays else "the portable kernels"
    return pays, f"{kernels}: {tiles:.0f} tiles for {gpu.num_sms} SMs, Hopper's need {enough} each"


def takes_values(q: TensorSpec, v: TensorSpec) -> bool:
    """Return whether Hopper's kernels support values of v's width."""
    head_dim, value_dim = q.shape[3], v.shape[3]
    if q.dtype == torch.float32 or value_dim * v.dtype.itemsize % ALIGNMENT:
        return value_dim == head_dim
    narrow_values = rows.ONE_PASS < head_dim <= rows.WIDEST_OF_NARROW and value_dim <= NARROW_VALUES
    return value_dim == head_dim or narrow_values


def sums_values(q: TensorSpec, k: TensorSpec, v: TensorSpec, gpu: Gpu, options: Options) -> bool:
    """Return whether dv is as wide as dk, or needs no partial sums (which have k's width)."""
    return v.shape == k.shape or _d256_splits(q, k, gpu, options) == 1


def _d256_splits(q: TensorSpec, k: TensorSpec, gpu: Gpu, options: Options) -> int:
    """Return the GQA splits of the backward for D from 129 to 256."""
    tiles = cdiv(k.shape[2], HopperD256Tile.BLOCK_KV) * k.shape[0] * k.shape[1]
    return gqa_splits(q, k, tiles, gpu.num_sms, options)


def forward_tile(q: TensorSpec, gpu: Gpu, options: Options) -> HopperTile | None:
    """Return the forward's tile, or None where there is none."""
    causal, (batch, heads, seq_q, head_dim) = options.causal, q.shape
    if options.bounds or options.added:  # three consumers would have too few registers each
        return _from(rows.FORWARD, head_dim, 0, causal=causal)

    def waves(tile: HopperTile) -> int:
        return cdiv(batch * heads * cdiv(seq_q, tile.block_q), gpu.num_sms)

    small_grid = rows.FEW_WAVES_FORWARD.get((columns(head_dim), causal))
    if small_grid and waves(small_grid[0]) < rows.FEW_WAVES:
        # A wave takes 4/3 of the time with three consumers, which share its prologue.
        return min(small_grid, key=lambda tile: waves(tile) * (tile.consumers + 1))
    # A query sees as many keys by a window as, on average, by a causal mask over twice its length.
    queries = int(min(seq_q, 2 * options.window_keys))
    return _from(rows.FORWARD, head_dim, queries, causal=causal)


def tile_of_bias(tile: HopperTile, head_dim: int) -> HopperTile:
    """Return a tile that leaves shared memory for rows of a bias."""
    keys = tile.block_kv if head_dim <= rows.ONE_PASS else WARPGROUP_Q
    return replace(tile, block_kv=keys, own_o=False)


def forward(
    q: TensorSpec, k: TensorSpec, v: TensorSpec, gpu: Gpu, options: Options, tile: object = None
) -> ForwardPlan | str:
    """Return the plan of Hopper's forward, or why there is none; args as in ``choose_forward``."""
    if q.dtype == torch.float32:
        return _forward_fp32(q, k, v, gpu, options)
    found: HopperTile | None = rows.NARROW_FORWARD
    if v.shape[3] == q.shape[3]:
        found = forward_tile(q, gpu, options)
    if found and options.bias is not None and not is_relative(options.bias):
        found = tile_of_bias(found, q.shape[3])
    if isinstance(tile, HopperTile):
        found = tile
    if found is None:
        return NO_TILE
    reason = why_not_tma(q, k, v, scale=options.scale)
    if reason is not None:
        return reason
    batch, heads, seq_q, head_dim = q.shape
    tiles = cdiv(seq_q, found.block_q) * batch * heads
    programs = min(gpu.num_sms, tiles)
    dynamic = options.causal and programs < tiles
    row = (head_dim + v.shape[3]) * q.dtype.itemsize  # bytes of a key and its value
    kept = options.reach(k.shape[2]) * row * k.shape[1] / heads  # bytes per query head
    scheduler = Scheduler(
        "lpt" if options.causal else "linear",
        persistent=True,
        dynamic=dynamic,
        section=equal_sections(batch * heads, rows.SECTION_BYTES / kept),
    )
    return ForwardPlan(
        kernel="sm90",
        tile=found,
        precision=options.precision,
        programs=programs,
        scheduler=scheduler,
        counters=int(dynamic),
        workspaces=line_workspaces(options),
        why=(f"{tiles} tiles of {found.block_q} queries on {gpu.num_sms} SMs",),
    )


def _terms(kernel: Kernel, inputs: Sequence[TensorSpec], gpu: Gpu, options: Options) -> int | str:
    """Return into how many bf16 terms fp32 is decomposed (always for "hopper"), or why not."""
    precision, q = options.precision, inputs[0]
    if block_d(q.shape[3]) not in rows.FP32_D:
        return "fp32 takes 33 to 128 columns"
    if options.family == "hopper":
        return TERMS.get(precision) or "fp32 is not decomposed: another precision"
    row = portable.tile_of(kernel, *inputs, gpu=gpu, causal=options.causal, precision=precision)
    return portable.terms_of(row, q.dtype, precision) or "fp32 is not decomposed: few scores"


def _forward_fp32(
    q: TensorSpec, k: TensorSpec, v: TensorSpec, gpu: Gpu, options: Options
) -> ForwardPlan | str:
    """Return the plan of the fp32 forward, or why there is none."""
    causal, precision = options.causal, options.precision
    terms = _terms("fwd", (q, k, v), gpu, options)
    if isinstance(terms, str):
        return terms
    reason = why_not_scale(options.scale)
    if reason is not None:
        return reason
    tile, (batch, heads, seq_q, _) = rows.FP32_FORWARD, q.shape
    return ForwardPlan(
        kernel="sm90_fp32",
        tile=tile,
        precision=precision,
        terms=terms,
        programs=cdiv(seq_q, tile.own) * batch * heads,
        scheduler=Scheduler("lpt" if causal else "linear"),
        workspaces=portable.terms_workspaces(terms, q=q, k=k, v=v),
        why=("many scores: fp32 is decomposed beforehand",),
    )


def backward_tile(
    q: TensorSpec, k: TensorSpec, gpu: Gpu, options: Options
) -> HopperBackward | None:
    """Return the backward's tile, or None where there is none."""
    causal, deterministic, (_, _, seq_q, head_dim) = options.causal, options.deterministic, q.shape
    d256 = _from(rows.BACKWARD_D256, head_dim, seq_q, causal=causal)
    if d256 is not None:
        return d256
    short_heads = causal and seq_q <= rows.SHORT_HEADS.get(columns(head_dim), 0)
    many_heads = k.shape[0] * k.shape[1] >= rows.MANY_HEADS * gpu.num_sms
    if short_heads and many_heads and not deterministic:
        return rows.MANY_SHORT_HEADS
    if options.bounds:
        queries = max(options.reach(seq_q), min(seq_q, rows.LONG_HEAD))
        return _from(rows.DETERMINISTIC, head_dim, queries, causal=causal)
    table = rows.DETERMINISTIC if deterministic else rows.BACKWARD
    return _from(table, head_dim, seq_q, causal=causal)


def backward(
    q: TensorSpec, k: TensorSpec, gpu: Gpu, options: Options, tile: HopperBackward | None
) -> BackwardPlan | str:
    """Return the plan of Hopper's backward with a tile, or why there is none."""
    if isinstance(tile, HopperBackwardTile):
        return _backward_half(q, k, gpu, options, tile)
    if isinstance(tile, HopperD256Tile):
        return _backward_d256(q, k, gpu, options, tile)
    return _backward_fp32(q, k, gpu, options)


def row_names(options: Options) -> tuple[str, str]:
    """Return the names of the row statistics that the backward for D up to 128 reads.

    Without a softcap, a product subtracts lse. A softcap is applied to scores before that.
    """
    return "minus_lse" if options.softcap is None else "lse_log2", "minus_delta"


def _backward_half(
    q: TensorSpec, k: TensorSpec, gpu: Gpu, options: Options, tile: HopperBackwardTile
) -> BackwardPlan:
    """Return the plan of the backward for D up to 128."""
    causal, deterministic = options.causal, options.deterministic
    (batch, heads, seq_q, head_dim), (_, kv_heads, seq_kv, _) = q.shape, k.shape
    blocks, block_q = cdiv(seq_kv, tile.BLOCK_KV), tile.block_q(head_dim)
    tiles = blocks * batch * kv_heads
    splits = gqa_splits(q, k, tiles, gpu.num_sms, options)
    tiles, group = tiles * splits, heads // (kv_heads * splits)
    accumulators = 1
    if (
        deterministic and causal and options.left is None and not options.bounds
    ):  # otherwise few programs queue for a tile
        of_keys = batch * kv_heads * splits
        accumulators = dq_accumulators(of_keys, blocks, gpu.num_sms, head_dim=head_dim)
    query_tiles = cdiv(seq_q, block_q)
    section = tile.section if causal else rotating_section(blocks, query_tiles, gpu.num_sms)
    if options.left is not None and (options.right or 0) > 0:
        # The first keys have fewer queries, so later programs start at other times, and those that
        # share a window read all of it at once.
        section = min(section, rows.SECTION_BYTES / (8 * group * options.reach(seq_q) * head_dim))
    lines = query_tiles * (block_q // WARPGROUP_Q) * columns(head_dim)
    semaphores = accumulators * batch * heads * query_tiles
    programs = min(gpu.num_sms, tiles) if tile.persistent else tiles
    dbias = dbias_pass(q, k, gpu, options, tma=True)
    rows_read = portable.row_workspaces(q, row_names(options))
    why = ["one pass: programs own keys, and add to dq"]
    if splits > 1:
        why.append(f"{splits} GQA splits: few programs would have much to do each")
    if accumulators > 1:
        why.append(f"{accumulators} dQ accumulators: programs of a head queue for one")
    return BackwardPlan(
        kernel="sm90",
        passes=(Pass("hopper_bwd", tile, (programs,)),),
        dbias=dbias,
        dq="semaphore" if deterministic else "atomic",
        dq_accumulators=accumulators,
        gqa_splits=splits,
        scheduler=Scheduler(
            "lpt" if causal else "linear",
            persistent=tile.persistent,
            section=equal_sections(batch * kv_heads * splits, section),
        ),
        workspaces=(
            *dict.fromkeys((*rows_read, *(portable.row_workspaces(q) if dbias else ()))),
            *line_workspaces(options),
            *(bias_workspaces(options) if dbias else ()),
            *dbias_workspaces(dbias, q, options),
            *portable.partials(splits, dk=k, dv=k),
            Workspace("dq_accum", (accumulators * batch, heads, lines, WARPGROUP_Q)),
            Workspace("dq_semaphore", (semaphores,), torch.int32),  # the preprocess clears it
            *portable.dsink_workspaces(q, options),
        ),
        why=tuple(why),
    )


def _backward_d256(
    q: TensorSpec, k: TensorSpec, gpu: Gpu, options: Options, tile: HopperD256Tile
) -> BackwardPlan:
    """Return the plan of the backward for D from 129 to 256."""
    tiles, causal = cdiv(k.shape[2], tile.BLOCK_KV) * k.shape[0] * k.shape[1], options.causal
    splits = _d256_splits(q, k, gpu, options)
    queries = cdiv(q.shape[2], tile.BLOCK_Q) * q.shape[0] * q.shape[1]
    why = ["two passes: one would own 64 keys, and add to dq as often as it loads"]
    if splits > 1:
        why.append(f"{splits} GQA splits: few programs would have much to do each")
    return BackwardPlan(
        kernel="sm90_d256",
        passes=(
            Pass("hopper_bwd_d256_dkdv", tile, (tiles * splits,)),
            Pass("hopper_bwd_d256_dq", tile, (queries,)),
        ),
        gqa_splits=splits,
        scheduler=Scheduler("lpt" if causal else "linear", section=tile.section),
        workspaces=(
            *portable.row_workspaces(q),
            *portable.partials(splits, dk=k, dv=k),
            *portable.dsink_workspaces(q, options),
        ),
        why=tuple(why),
    )


def _backward_fp32(q: TensorSpec, k: TensorSpec, gpu: Gpu, options: Options) -> BackwardPlan | str:
    """Return the plan of the fp32 backward, or why there is none."""
    terms = _terms("bwd_dq", (q, k), gpu, options)
    if isinstance(terms, str):
        return terms
    tile = rows.FP32_BACKWARD[terms]
    own, other = tile.own, tile.other
    keys, of_queries = portable.walk("bwd_dkdv", q, k, (other, own), gpu)
    queries, of_keys = portable.walk("bwd_dq", q, k, (own, other), gpu)
    passes = (
        Pass("hopper_bwd_fp32_dkdv", tile, (keys,), (of_queries,), terms),
        Pass("hopper_bwd_fp32_dq", tile, (queries,), (of_keys,), terms),
    )
    return BackwardPlan(
        kernel="sm90_fp32",
        passes=passes,
        scheduler=Scheduler("lpt" if options.causal else "linear"),
        workspaces=(
            *portable.backward_workspaces(passes, q, k, k, q),
            *portable.dsink_workspaces(q, options),
        ),
        why=("two passes over bf16 terms of fp32",),
    )
