"""Choose the tiles and splits of the portable kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from flashattn.plan import tables
from flashattn.plan.bias import (
    beside_bias,
    bias_workspaces,
    dbias_pass,
    dbias_workspaces,
    forward_tile,
    shares_bias,
)
from flashattn.plan.gpu import Gpu
from flashattn.plan.plan import BackwardPlan, ForwardPlan, Pass, Scheduler, Workspace
from flashattn.plan.precision import TERMS
from flashattn.plan.rows import FP32, FUSED, Kernel, Limits
from flashattn.plan.spec import Options, TensorSpec
from flashattn.plan.splits import Split, cdiv, num_splits, split
from flashattn.plan.tile import Tile, block_d

TERMS_COLUMNS = 8  # for a row's three bf16 terms: 16 bytes, the least that a descriptor takes
COMBINED_BY_LAST = 4096  # most elements of a tile whose last split combines all splits
ROW_PADDING = 256  # lse_log2 and delta are padded to whole tiles of any size
STATS_BLOCK = 64  # rows of o and dO that a program of the preprocess reduces


def padded_rows(seq_q: int) -> int:
    """Return the length of lse_log2 and delta of a head, with padding."""
    return cdiv(seq_q, ROW_PADDING) * ROW_PADDING


def scores(q: TensorSpec, k: TensorSpec, limits: Limits) -> int:
    """Count the scores as ``Limits`` does: a head has at least ``least_q`` queries."""
    batch, heads, seq_q, _ = q.shape
    return batch * heads * max(seq_q, limits.least_q) * k.shape[2]


def finder(
    *inputs: TensorSpec, gpu: Gpu, causal: bool, precision: str
) -> Callable[[Kernel], Tile | None]:
    """Return a function that finds a kernel's tile in the table for these inputs, or None.

    The tile has descriptors only if all inputs are TMA-compatible and there are enough scores; in
    fp32, only if the inputs are worth decomposing beforehand.
    """
    rows, (q, k) = tables.rows_of(gpu), inputs[:2]
    limits, enough = rows.limits, scores(q, k, rows.limits)
    size, head_dim = q.dtype.itemsize, q.shape[3]
    tma = enough > limits.pointers and all(x.tma_compatible for x in set(inputs))

    def find(kernel: Kernel) -> Tile | None:
        large = tma
        if size == FP32:
            backward = kernel.startswith("bwd")
            least = limits.decompose_backward if backward else limits.decompose_forward
            if precision == "tf32":
                tile = tables.find_tf32(rows, kernel, head_dim, tma=tma, large=enough > least)
                if tile is not None:
                    return tile
            large = precision == "bf16x6" and enough > least
        return tables.find(rows, kernel, size, head_dim, causal=causal, large=large)

    return find


def tile_of(kernel: Kernel, *inputs: TensorSpec, gpu: Gpu, causal: bool, precision: str) -> Tile:
    """Return the tile of a kernel that every table has."""
    tile = finder(*inputs, gpu=gpu, causal=causal, precision=precision)(kernel)
    if tile is None:
        raise KeyError(kernel)
    return tile


def terms_of(tile: Tile, dtype: torch.dtype, precision: str) -> int:
    """Return how many bf16 terms a tile's operands arrive as; 0 if not decomposed."""
    return TERMS.get(precision, 0) if tile.decomposed and dtype == torch.float32 else 0


def decomposed(x: TensorSpec, terms: int) -> TensorSpec:
    """Return the spec of the bf16 terms of x [B, H, N, D]: [B, terms H, N, BLOCK_D]."""
    batch, heads, rows, head_dim = x.shape
    shape = torch.Size((batch, heads * terms, rows, block_d(head_dim)))
    return x._replace(shape=shape, dtype=torch.bfloat16).copied()


def terms_workspaces(terms: int, **inputs: TensorSpec) -> tuple[Workspace, ...]:
    """Return the workspaces for the bf16 terms of inputs."""
    if not terms:
        return ()
    return tuple(
        Workspace(f"{name}_terms", tuple(decomposed(x, terms).shape), torch.bfloat16)
        for name, x in inputs.items()
    )


def packed(
    q: TensorSpec, k: TensorSpec, v: TensorSpec, seen: int
) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
    """Return q with the heads that share keys as rows, and the first ``seen`` keys and values."""
    k, v = (x._replace(shape=torch.Size((*x.shape[:2], seen, x.shape[3]))) for x in (k, v))
    return packed_rows(q, k.shape[1]), k, v


def packed_rows(x: TensorSpec, kv_heads: int) -> TensorSpec:
    """Return x [B, H, 1, D] as [B, G, H / G, D]."""
    batch, heads, _, head_dim = x.shape
    group, (along, head, _, column) = heads // kv_heads, x.strides
    shape = torch.Size((batch, kv_heads, group, head_dim))
    return x._replace(shape=shape, strides=(along, head * group, head, column))


def programs_of(q: TensorSpec, tile: Tile) -> int:
    """Return the number of programs, each of which owns a tile of queries."""
    batch, heads, seq_q, _ = q.shape
    return cdiv(seq_q, tile.block_q) * batch * heads


def forward_row(
    q: TensorSpec, k: TensorSpec, v: TensorSpec, gpu: Gpu, options: Options
) -> tuple[Kernel, Tile, str]:
    """Return the name of the table's row, its tile, and the reason."""
    rows, causal = tables.rows_of(gpu), options.causal
    limits = rows.limits
    find = finder(q, k, v, gpu=gpu, causal=causal, precision=options.precision)
    if q.shape[2] <= limits.decode_q:
        tile = cast("Tile", find("decode"))
        return "decode", tile, f"decode: {q.shape[2]} queries of a head, {limits.decode_q} at most"
    tile = cast("Tile", find("fwd"))
    window = tables.find_window(rows, "fwd", tile, q.shape[3], options.window_keys)
    if window:
        return "fwd", forward_tile(window, q, options), "the tile for a short window"
    if k.shape[2] <= limits.short_kv:
        few_keys = find("fwd_short_kv")
        if few_keys and programs_of(q, few_keys) <= gpu.num_sms:
            return "fwd_short_kv", few_keys, "short_kv: all programs run at once, over few keys"
    small = find("fwd_small_grid")
    if small:
        head_dim = block_d(q.shape[3])
        masked = causal and head_dim <= limits.small_grid_head_dim
        most = limits.small_grid_causal if masked else limits.small_grid
        if programs_of(q, small) <= most * gpu.num_sms:
            return "fwd_small_grid", small, f"small_grid: {most} programs for each SM at most"
    return "fwd", forward_tile(tile, q, options), "the tile for a full GPU"


def kv_splits(
    row: Kernel, q: TensorSpec, k: TensorSpec, tile: Tile, gpu: Gpu, options: Options
) -> int:
    """Return the most splits of the keys in a forward."""
    limits, programs = tables.rows_of(gpu).limits, programs_of(q, tile)
    if row == "fwd_short_kv" or options.window_keys <= limits.window:
        return 1
    if row == "fwd_small_grid":
        several = options.causal and block_d(q.shape[3]) < limits.one_per_sm
        fill = limits.small_grid_split_causal if several else limits.small_grid_split
        return num_splits(fill, programs, k.shape[2], gpu.num_sms)
    tiles, fill = cdiv(k.shape[2], tile.block_kv), limits.split["fwd"]
    if row == "decode":
        in_flight = 2 * tile.stages * tile.block_kv * block_d(k.shape[3]) * k.dtype.itemsize
        fill = ((1 if in_flight > limits.decode_shared else 2, 2),)
    return num_splits(fill, programs, tiles, gpu.num_sms)


def forward(
    q: TensorSpec,
    k: TensorSpec,
    v: TensorSpec,
    gpu: Gpu,
    options: Options,
    *,
    tile: object = None,
    row: Kernel | None = None,
    most: int | None = None,
) -> ForwardPlan:
    """Return the plan of flashattn_fwd; arguments as in ``choose_forward``."""
    if not isinstance(tile, Tile):
        row, tile, why = forward_row(q, k, v, gpu, options)
    else:
        decodes = q.shape[2] <= tables.rows_of(gpu).limits.decode_q
        row, why = row or ("decode" if decodes else "fwd"), "the tile was given"
    tile = beside_bias(tile, q, options)
    most = most or kv_splits(row, q, k, tile, gpu, options)
    keys = split(k.shape[2], tile.block_kv, most)
    terms = terms_of(tile, q.dtype, options.precision)
    workspaces = (*terms_workspaces(terms, q=q, k=k, v=v), *bias_workspaces(options))
    tiles, counters = programs_of(q, tile), 0
    if keys.num > 1:
        shape = tiles, keys.num, tile.block_q
        last_combines = tile.block_q * block_d(q.shape[3]) <= COMBINED_BY_LAST
        counters = tiles if last_combines else 0
        workspaces += (
            Workspace("o_partial", (*shape, block_d(q.shape[3]))),
            Workspace("lse_partial", (2, *shape)),
        )
    return ForwardPlan(
        kernel="portable",
        tile=tile,
        precision=options.precision,
        terms=terms,
        split=keys,
        programs=tiles * keys.num,
        scheduler=Scheduler("lpt" if options.causal else "linear"),
        counters=counters,
        workspaces=workspaces,
        why=(why, *_split_why(keys, "keys")),
    )


def _split_why(x: Split, rows: str) -> tuple[str, ...]:
    sentence = f"{x.num} splits of {x.length} {rows}: there are few programs otherwise"
    return () if x.num == 1 else (sentence,)


def backward(
    q: TensorSpec, k: TensorSpec, v: TensorSpec, grad_o: TensorSpec, gpu: Gpu, options: Options
) -> BackwardPlan:
    """Return the plan of the portable backward: one launch, fused passes, or two passes."""
    inputs, rows = (q, k, v, grad_o), tables.rows_of(gpu)
    causal, precision = options.causal, options.precision
    # A softcap keeps a tile of tanh; ALiBi and a bias need addresses. Only the tiles for problems
    # without a mask leave registers for these.
    masked = causal and options.softcap is None and not options.added
    how: dict[str, Any] = {"gpu": gpu, "causal": masked, "precision": precision}
    find = finder(*inputs, **how)
    fused = find("bwd_fused")
    if fused is None or not small_grid(q, k, fused, gpu, precision):
        two: tuple[Kernel, ...] = ("bwd_dkdv", "bwd_dq")
        kernels = {kernel: find(kernel) for kernel in two}
        dq = cast("Tile", kernels["bwd_dq"])
        window = tables.find_window(rows, "bwd_dq", dq, q.shape[3], options.window_keys)
        kernels["bwd_dq"] = window or dq
        why = "two passes, each with a tile of its own"
    else:
        kernels = {"bwd_fused": fused}
        why = "fused passes: they are few programs"
        if scores(q, k, rows.limits) <= rows.limits.one_launch and not needs_stats(q, k, options):
            tile = find("bwd_one_launch")
            one_launch = tile and backward_pass(
                "bwd_one_launch", *inputs, tile=beside_bias(tile, q, options), **how
            )
            if one_launch and all(x.num == 1 for x in one_launch.splits):
                sentence = "one launch: each program finds lse_log2 and delta itself"
                order = Scheduler("lpt" if causal else "linear")
                return BackwardPlan(
                    kernel="portable",
                    passes=(one_launch,),
                    scheduler=order,
                    workspaces=bias_workspaces(options),
                    why=(sentence,),
                )
    passes = tuple(
        one._replace(tile=beside_bias(cast("Tile", one.tile), q, options))
        for one in (backward_pass(x, *inputs, tile=tile, **how) for x, tile in kernels.items())
    )
    dbias = dbias_pass(q, k, gpu, options)
    return BackwardPlan(
        kernel="portable",
        passes=passes,
        dbias=dbias,
        scheduler=Scheduler("lpt" if causal else "linear"),
        workspaces=(
            *backward_workspaces(passes, q, k, v, grad_o),
            *bias_workspaces(options),
            *dbias_workspaces(dbias, q, options),
            *dsink_workspaces(q, options),
        ),
        why=(why, *(x for one in passes for each in one.splits for x in _split_why(each, "rows"))),
    )


def needs_stats(q: TensorSpec, k: TensorSpec, options: Options) -> bool:
    """Return whether gradients besides dq, dk and dv need lse_log2 and delta."""
    return options.sink > 0 or shares_bias(q, k, options)


def dsink_workspaces(q: TensorSpec, options: Options) -> tuple[Workspace, ...]:
    """Return the workspace for partial gradients of sinks, one for each block of rows."""
    if not options.sink:
        return ()
    return (Workspace("dsink_partial", (*q.shape[:2], padded_rows(q.shape[2]) // STATS_BLOCK)),)


def small_grid(q: TensorSpec, k: TensorSpec, tile: Tile, gpu: Gpu, precision: str) -> bool:
    """Return whether both passes have so few programs that one launch is faster."""
    limits = tables.rows_of(gpu).limits
    most = limits.fused
    if block_d(q.shape[3]) >= limits.decomposed_head_dim and terms_of(tile, q.dtype, precision):
        most = limits.fused_decomposed
    blocks = tile.block_q, tile.block_kv
    together = sum(tiles_owned(x, q, k, blocks) for x in ("bwd_dkdv", "bwd_dq"))
    return together <= most * gpu.num_sms


def tiles_owned(kernel: str, q: TensorSpec, k: TensorSpec, blocks: tuple[int, int]) -> int:
    """Return the number of tiles that programs own: of keys for "bwd_dkdv", else of queries."""
    x, block = (k, blocks[1]) if kernel == "bwd_dkdv" else (q, blocks[0])
    batch, heads, rows, _ = x.shape
    return cdiv(rows, block) * batch * heads


def walk(
    kernel: Kernel,
    q: TensorSpec,
    k: TensorSpec,
    blocks: tuple[int, int],
    gpu: Gpu,
    *,
    most: int | None = None,
    together: int | None = None,
) -> tuple[int, Split]:
    """Return the number of programs, and how the rows that they walk over are split.

    Args:
        kernel: "bwd_dkdv", whose programs own keys, or "bwd_dq".
        q: [B, H, T, D].
        k: [B, G, S, D].
        blocks: queries and keys of a tile.
        gpu: the GPU to plan for.
        most: the most splits, instead of as many as fill the GPU.
        together: programs of both passes before splitting, if they share a launch.
    """
    rows, block = (q.shape[2], blocks[0]) if kernel == "bwd_dkdv" else (k.shape[2], blocks[1])
    programs = tiles_owned(kernel, q, k, blocks)
    fill = tables.rows_of(gpu).limits.split["bwd_fused" if together else kernel]
    most = most or num_splits(fill, together or programs, cdiv(rows, block), gpu.num_sms)
    found = split(rows, block, most)
    return programs * found.num, found


def backward_pass(
    kernel: Kernel,
    *inputs: TensorSpec,
    gpu: Gpu,
    causal: bool,
    precision: str,
    tile: Tile | None = None,
    most: int | None = None,
) -> Pass:
    """Return the launch of one portable kernel of the backward.

    Args:
        kernel: its name.
        inputs: specs of q, k, v and grad_o.
        gpu: the GPU to plan for.
        causal: whether there is a mask.
        precision: as ``precision.input_precision`` returns it.
        tile: a tile to use instead of the table's.
        most: the most splits, instead of as many as fill the GPU.
    """
    tile = tile or tile_of(kernel, *inputs, gpu=gpu, causal=causal, precision=precision)
    q, k, blocks = inputs[0], inputs[1], (tile.block_q, tile.block_kv)
    kernels: tuple[Kernel, ...] = ("bwd_dkdv", "bwd_dq") if kernel in FUSED else (kernel,)
    together = sum(tiles_owned(x, q, k, blocks) for x in kernels) if kernel in FUSED else None
    walks = [walk(x, q, k, blocks, gpu, most=most, together=together) for x in kernels]
    programs, splits = zip(*walks, strict=True)
    return Pass(kernel, tile, programs, splits, terms_of(tile, q.dtype, precision))


def row_workspaces(
    q: TensorSpec, names: tuple[str, str] = ("lse_log2", "delta")
) -> tuple[Workspace, ...]:
    """Return the workspaces that the preprocess fills; those named "minus_" hold bf16 terms."""
    rows = (q.shape[0] * q.shape[1], padded_rows(q.shape[2]))
    return tuple(
        Workspace(name, (*rows, TERMS_COLUMNS), torch.bfloat16)
        if name.startswith("minus_")
        else Workspace(name, rows)
        for name in names
    )


def partials(num: int, **grads: TensorSpec) -> tuple[Workspace, ...]:
    """Return the workspaces for gradients that splits write as partial sums."""
    shapes = {name: (num * x.shape[0], *x.shape[1:]) for name, x in grads.items() if num > 1}
    return tuple(Workspace(f"{name}_partial", shape) for name, shape in shapes.items())


def backward_workspaces(
    passes: tuple[Pass, ...], q: TensorSpec, k: TensorSpec, v: TensorSpec, grad_o: TensorSpec
) -> tuple[Workspace, ...]:
    """Return the workspaces of the passes, whose programs own keys or queries."""
    of_queries, of_keys = [x for one in passes for x in one.splits]
    terms = max(x.terms for x in passes)
    return (
        *row_workspaces(q),
        *terms_workspaces(terms, q=q, k=k, v=v, grad_o=grad_o),
        *partials(of_queries.num, dk=k, dv=v),
        *partials(of_keys.num, dq=q),
    )
