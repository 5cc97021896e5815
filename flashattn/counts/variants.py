"""List the variants: every kernel with every tile, and the ways in which launches vary them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from flashattn.counts.offline import ELEMENTS, FIXED, SUMS, Shared, Variant
from flashattn.counts.resources import SHARED_LIMIT
from flashattn.gpus import TRITON
from flashattn.kernels.hopper import offline as hopper
from flashattn.kernels.hopper.offline import HopperVariant
from flashattn.kernels.portable import steps
from flashattn.plan.bias import FORWARD, dbias_tile
from flashattn.plan.gpu import CARDS, Gpu
from flashattn.plan.rows import FP32, HEAD_DIMS, OPTIONAL, Rows
from flashattn.plan.tables import rows_of
from flashattn.plan.tile import HALF, Tile

ALL_WAYS, ANY_D = "sm_90", 64  # where, and with how many columns, a kernel is compiled in all ways
ALWAYS_SPLIT: frozenset[str] = frozenset({"decode"})
ARCHITECTURES = tuple(SHARED_LIMIT)
SHARED: dict[Shared, str] = {"bwd_dbias": "bias", "bwd_dbias_relative": "relative"}
SCORED = ("fwd", "bwd_dkdv", "bwd_dq")  # kernels that are compiled with ALiBi and biases


def _tiled(arch: str, table: Rows) -> list[Variant]:
    """Return each tile of a table once, under a mask, whose code includes full attention.

    Full attention is also compiled where it has a tile of its own, and where all ways are.
    """
    whole = [
        Variant(arch, kernel, size, head_dim, tile, causal, tma_compatible, kernel in ALWAYS_SPLIT)
        for (kernel, size, head_dim, causal, tma_compatible), tile in table.tiles.items()
        if causal
        or (arch, head_dim) == (ALL_WAYS, ANY_D)
        or tile != table.tiles[kernel, size, head_dim, True, tma_compatible]
    ]
    tf32 = [
        Variant(arch, kernel, 4, head_dim, tile, True, tile.descriptors, precision="tf32")  # noqa: FBT003
        for tiles in table.tf32
        for (kernel, head_dim), tile in tiles.items()
    ]
    window = [
        Variant(arch, kernel, HALF, head_dim, tile, causal=True, tma_compatible=True, window=True)
        for (kernel, head_dim), tile in table.window.items()
    ]
    return whole + tf32 + window


def _other_ways(tiled: list[Variant]) -> list[Variant]:
    """Return the ways to compile a kernel with a borrowed tile, for ``ANY_D`` under a mask."""
    window = {variant.kernel for variant in tiled if variant.window}
    whole = [v for v in tiled if v.precision == "auto" and not v.split and not v.window]
    one_d = [variant for variant in whole if variant.head_dim == ANY_D]
    masked = [variant for variant in one_d if variant.causal]
    half = [variant for variant in masked if variant.size == HALF]
    small_grids = {variant.size for variant in tiled if variant.kernel == "fwd_small_grid"}
    split = [
        replace(variant, split=True)
        for variant in masked
        if variant.kernel not in {"fwd_short_kv", "bwd_one_launch"}
        and not (variant.kernel == "fwd" and variant.size in small_grids)
    ]
    capped = [  # in the backward with the tiles of full attention, see ``plan.portable``
        replace(variant, softcap=True, causal=True)
        for variant in one_d
        if variant.size == HALF and variant.causal == (variant.kernel not in steps.KERNELS)
    ]
    scored = [  # likewise; some of them
        replace(variant, softcap=False, scored=scored, tile=beside(variant, scored))
        for variant, scored in product(capped, ("alibi", "bias", "relative", "sink"))
        if variant.tma_compatible and variant.kernel in (SCORED if scored != "sink" else SCORED[:1])
    ]
    scored += [
        Variant(
            ALL_WAYS,
            kernel,
            size,
            d,
            dbias_tile(d, size, CARDS["H200"]),
            causal=True,
            scored=scored,
        )
        for size, d, (kernel, scored) in product((2, 4), (64, 256), SHARED.items())
    ]
    return [
        *split,
        *(
            replace(variant, window=True)
            for variant in half
            if not (variant.kernel in window and variant.tma_compatible)
        ),
        *(replace(variant, rows=True) for variant in half),
        *capped,
        *scored,
    ]


def beside(variant: Variant, scored: str) -> Tile | None:
    """Return the tile that a variant has when its scores are made with ``scored``."""
    forward = variant.kernel == "fwd" and scored in {"bias", "relative"}
    return FORWARD if forward else variant.tile


def _columns(arch: str, table: Rows) -> list[Variant]:
    """Return the variants of a single column, which use the tiles of the smallest width."""
    return [
        Variant(arch, kernel, size, 1, tile, causal, tma_compatible, kernel in ALWAYS_SPLIT)
        for (kernel, size, head_dim, causal, tma_compatible), tile in table.tiles.items()
        if (head_dim, causal, tma_compatible) == (HEAD_DIMS[0], True, False)
        and kernel not in OPTIONAL
    ]


def _untiled(arch: str) -> list[Variant]:
    """Return the kernels with a fixed tile, for one column, ``ANY_D`` columns and the most."""
    found = [
        Variant(arch, kernel, size, head_dim, None, causal=False)
        for kernel, size, head_dim in product(FIXED, ELEMENTS, (1, ANY_D, HEAD_DIMS[-1]))
        if kernel != "decompose" or (size == FP32 and head_dim > 1)
        if kernel not in SUMS or (arch, size, head_dim) == (ALL_WAYS, HALF, ANY_D)
    ]
    decomposed = [variant for variant in found if variant.kernel == "decompose"]
    return found + [replace(v, precision="tf32") for v in decomposed if arch == ALL_WAYS]


def variants(version: tuple[int, int] = TRITON) -> list[Variant | HopperVariant]:
    """Return every kernel with every tile of the tables of every architecture.

    Args:
        version: version of Triton, on which tables depend.
    """
    found: list[Variant | HopperVariant] = []
    for arch in ARCHITECTURES:
        table = rows_of(Gpu((int(arch[3:-1]), 0), 1, version))
        tiled = _tiled(arch, table)
        ways = _other_ways(tiled) if arch == ALL_WAYS else []
        found += [*tiled, *ways, *_columns(arch, table), *_untiled(arch)]
    return found + hopper.variants()
