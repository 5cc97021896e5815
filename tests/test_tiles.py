"""Tile and its table: checked numbers, a row for everything, and no search."""

from __future__ import annotations

import itertools
import runpy
from pathlib import Path

import pytest

from flashattn.kernels.tiles import (
    ARCHITECTURES,
    TABLES,
    TF32,
    Tile,
    block_d,
    padding,
    pick,
    pick_tf32,
)

KERNELS, SIZES, HEAD_DIMS = ("fwd", "decode", "bwd_dkdv", "bwd_dq"), (2, 4), (16, 32, 64, 128, 256)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((48, 64, 4, 2), "block_q: wanted a power of two from 16 to 256, got 48"),
        ((64, 8, 4, 2), "block_kv: wanted a power of two from 16 to 256, got 8"),
        ((64, 64, 3, 2), "warps: wanted a power of two from 1 to 16, got 3"),
        ((64, 64, 4, 0), "stages: wanted 1 to 8, got 0"),
    ],
)
def test_bad_tiles(numbers, words):
    """A tile that no kernel could have is refused by name."""
    with pytest.raises(ValueError, match=words):
        Tile(*numbers)


@pytest.mark.parametrize("arch", TABLES)
def test_tables_are_complete(arch):
    """Every table has a row without descriptors for every kernel, size, head dim and mask."""
    for key in itertools.product(KERNELS, SIZES, HEAD_DIMS, (False, True)):
        assert not TABLES[arch][(*key, False)].descriptors


def test_block_d():
    """Head dims are computed in the next power of two, from 16 on; one column is not padded."""
    assert [block_d(d) for d in (2, 16, 17, 80, 128, 129, 256)] == [16, 16, 32, 128, 128, 256, 256]
    assert block_d(1) == 1


@pytest.mark.parametrize(
    ("head_dim", "strides", "wanted"),
    [
        (64, [(1000, 64, 1)], 0),  # all columns are there
        (1, [(10, 10, 1)], 0),
        (40, [(4000, 400, 40), (0, 0, 120)], 8),
        (48, [(4800, 480, 48)], 8),  # 16 bytes is all that a thread loads at once
        (40, [(4000, 400, 40), (4100, 410, 41)], 1),
        (40, [(4004, 400, 40)], 4),
        (20, [(2000, 200, 20)], 4),
        (24, [(2400, 240, 26)], 2),
        (7, [(8, 8, 8)], 1),
    ],
)
def test_padding(head_dim, strides, wanted):
    """A power of two that divides the columns and the distances of rows, up to 8; or no padding."""
    assert padding(head_dim, strides) == wanted


def test_pick():
    """A known GPU gets its table, an unknown one that of an sm_80, no GPU the interpreter's."""

    def picked(capability, descriptors):
        return pick("fwd", 2, 100, capability, causal=True, descriptors=descriptors)

    assert picked((9, 0), True) is TABLES["sm_90"]["fwd", 2, 128, True, True]
    assert picked((9, 0), False) is TABLES["sm_90"]["fwd", 2, 128, True, False]
    assert picked((8, 6), True) is TABLES["sm_80"]["fwd", 2, 128, True, False]
    assert picked((13, 0), False) is TABLES["sm_80"]["fwd", 2, 128, True, False]
    assert picked(None, True) is TABLES["interpreter"]["fwd", 2, 128, True, True]
    column = pick("fwd", 2, 1, (9, 0), causal=True, descriptors=True)
    assert column is TABLES["sm_90"]["fwd", 2, 16, True, False]
    assert set(ARCHITECTURES.values()) | {"interpreter"} == set(TABLES)


@pytest.mark.parametrize("kernel", ["fwd_few", "fwd_short"])
def test_few_programs_have_a_tile_where_they_were_measured(kernel):
    """On Hopper, of half precision; not for a single column, nor for fp32."""
    how = {"causal": True, "descriptors": True}
    for head_dim in HEAD_DIMS:
        assert pick(kernel, 2, head_dim, (9, 0), **how)
        assert pick(kernel, 4, head_dim, (9, 0), **how) is None
        assert pick(kernel, 2, head_dim, (8, 0), **how) is None
    assert pick(kernel, 2, 1, (9, 0), **how) is None


def test_both_passes_have_a_tile_where_they_were_measured():
    """On Hopper, to D = 128; not for a single column, nor for fp32 that is not cut."""

    def picked(size, head_dim, capability=(9, 0), **how):
        return pick(
            "bwd", size, head_dim, capability, **{"causal": True, "descriptors": True} | how
        )

    for head_dim in HEAD_DIMS:
        assert (picked(2, head_dim) is not None) == (head_dim <= 128)
        assert (picked(4, head_dim) is not None) == (head_dim <= 64)
        assert picked(4, head_dim, descriptors=False) is None
        assert picked(2, head_dim, (8, 0)) is None
    assert picked(2, 1) is None
    assert picked(2, 32) == picked(2, 32, descriptors=False)  # by pointers, whatever there is
    assert picked(2, 64).descriptors
    assert not picked(2, 64, descriptors=False).descriptors


def test_tf32_has_tiles_of_its_own():
    """On Hopper, where one was faster than that of six products and can be loaded."""
    whole, cut = TF32["sm_90"][False], TF32["sm_90"][True]
    few, many = {"descriptors": True, "large": False}, {"descriptors": False, "large": True}
    assert pick_tf32("fwd", 30, (9, 0), **few) is whole["fwd", 32]
    assert pick_tf32("fwd", 30, (9, 0), **few | {"descriptors": False}) is None
    assert pick_tf32("fwd", 60, (9, 0), **many) is cut["fwd", 64]  # parts always have descriptors
    assert pick_tf32("fwd", 60, (9, 0), **few) is None
    for kernel, head_dim, capability in (
        ("bwd_dq", 16, (9, 0)),
        ("fwd", 64, (8, 0)),
        ("fwd", 64, None),
    ):
        assert pick_tf32(kernel, head_dim, capability, **few) is None
    for tables in TF32.values():
        assert all(tile.cut is cut for cut, table in tables.items() for tile in table.values())


def test_what_was_measured_can_be_found_again():
    """Every tile that the table for Hopper has is among the candidates of the search."""
    search = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "tune.py"))
    rows = [(*key[:3], "auto", tile) for key, tile in TABLES["sm_90"].items()]
    rows += [
        (kernel, 4, head_dim, "tf32", tile)
        for table in TF32["sm_90"].values()
        for (kernel, head_dim), tile in table.items()
    ]
    for kernel, size, head_dim, precision, tile in rows:
        if kernel in search["PRODUCTS"]:
            dtype = {2: "bfloat16", 4: "float32"}[size]
            way = search["way"](dtype, precision, "cut" if tile.cut else "descriptors")
            limits = tuple({0, tile.registers})
            found = search["candidates"](
                kernel, head_dim, way, descriptors=tile.descriptors, limits=limits
            )
            assert tile in found
            assert len(set(found)) == len(found)
