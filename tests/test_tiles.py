"""Tiles and their tables: checked numbers, a row for everything, and no search."""

import itertools
import runpy
from pathlib import Path

import pytest

from flashattn.gpus import TRITON
from flashattn.plan.gpu import CARDS, Gpu
from flashattn.plan.tables import find, find_tf32, h200, rows_of
from flashattn.plan.tile import Tile, block_d, padding

GPUS = {name: Gpu(x.capability, x.num_sms, TRITON) for name, x in CARDS.items()}
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
    """An impossible tile is refused by name."""
    with pytest.raises(ValueError, match=words):
        Tile(*numbers)


@pytest.mark.parametrize("gpu", GPUS)
def test_tables_are_complete(gpu):
    """Every table has a row without descriptors for every kernel, size, head dim and mask."""
    for key in itertools.product(KERNELS, SIZES, HEAD_DIMS, (False, True)):
        assert not rows_of(GPUS[gpu]).tiles[(*key, False)].descriptors


def test_block_d():
    """Head dims are padded to a power of two, 16 at least; one column is not padded."""
    assert [block_d(d) for d in (2, 16, 17, 80, 128, 129, 256)] == [16, 16, 32, 128, 128, 256, 256]
    assert block_d(1) == 1


@pytest.mark.parametrize(
    ("head_dim", "strides", "wanted"),
    [
        (64, [(1000, 64, 1)], 0),  # no columns are added
        (1, [(10, 10, 1)], 0),
        (40, [(4000, 400, 40), (0, 0, 120)], 8),
        (48, [(4800, 480, 48)], 8),  # a thread loads at most 16 bytes at once
        (40, [(4000, 400, 40), (4100, 410, 41)], 1),
        (40, [(4004, 400, 40)], 4),
        (20, [(2000, 200, 20)], 4),
        (24, [(2400, 240, 26)], 2),
        (7, [(8, 8, 8)], 1),
    ],
)
def test_padding(head_dim, strides, wanted):
    """A padded D gives the largest power of 2, up to 8, that divides D and all strides; else 0."""
    assert padding(head_dim, strides) == wanted


def test_find():
    """A known GPU gets its own table, an unknown one the A100's, and no GPU the interpreter's."""

    def found(gpu, large):
        return find(rows_of(gpu), "fwd", 2, 100, causal=True, large=large)

    tiles = {name: rows_of(gpu).tiles for name, gpu in GPUS.items()}
    assert found(GPUS["H200"], True) is tiles["H200"]["fwd", 2, 128, True, True]
    assert found(GPUS["H200"], False) is tiles["H200"]["fwd", 2, 128, True, False]
    assert found(Gpu((8, 6), 84), True) is tiles["A100"]["fwd", 2, 128, True, False]
    assert found(Gpu((13, 0), 84), False) is tiles["A100"]["fwd", 2, 128, True, False]
    assert found(Gpu.INTERPRETER, True) is tiles["interpreter"]["fwd", 2, 128, True, True]
    column = find(rows_of(GPUS["H200"]), "fwd", 2, 1, causal=True, large=True)
    assert column is tiles["H200"]["fwd", 2, 16, True, False]
    assert rows_of(Gpu((9, 0), 132, (3, 6))) is h200.ROWS
    assert rows_of(Gpu((9, 0), 132, (3, 7))) is h200.ROWS_LATER


def test_tf32_has_tiles_of_its_own():
    """On Hopper TF32 has its own tiles where they beat those of bf16x6 and can be loaded."""
    rows = rows_of(GPUS["H200"])
    whole, decomposed = rows.tf32
    few, many = {"tma": True, "large": False}, {"tma": False, "large": True}
    assert find_tf32(rows, "fwd", 30, **few) is whole["fwd", 32]
    assert find_tf32(rows, "fwd", 30, **few | {"tma": False}) is None
    assert find_tf32(rows, "fwd", 60, **many) is decomposed["fwd", 64]  # by descriptors, always
    assert find_tf32(rows, "fwd", 60, **few) is None
    assert find_tf32(rows, "bwd_dq", 16, **few) is None
    for gpu in ("A100", "interpreter"):
        assert find_tf32(rows_of(GPUS[gpu]), "fwd", 64, **few) is None
    for gpu in GPUS.values():
        for terms, table in enumerate(rows_of(gpu).tf32):
            assert all(tile.decomposed is bool(terms) for tile in table.values())


def test_what_was_measured_can_be_found_again():
    """Every tile of the Hopper table is among the candidates of the search."""
    search = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "tune.py"))
    table = rows_of(GPUS["H200"])
    rows = [(*key[:3], "auto", tile) for key, tile in table.tiles.items()]
    rows += [
        (kernel, 4, head_dim, "tf32", tile)
        for of in table.tf32
        for (kernel, head_dim), tile in of.items()
    ]
    for kernel, size, head_dim, precision, tile in rows:
        if kernel in search["PRODUCTS"]:
            dtype = {2: "bfloat16", 4: "float32"}[size]
            way = search["way"](dtype, precision, "cut" if tile.decomposed else "descriptors")
            limits = tuple({0, tile.registers})
            found = search["candidates"](
                kernel, head_dim, way, descriptors=tile.descriptors, limits=limits
            )
            assert tile in found
            assert len(set(found)) == len(found)
