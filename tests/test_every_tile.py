"""Every shipped tile is accurate on this machine, in each dtype, forward and gradients.

Tiles are shipped per architecture, so a GPU runs those of its own table. The ordinary cases have
each tile, with and without a mask, in one dtype of its size; a run in workers draws half of them.
``--every-tile`` takes all, and adds what may compile to another binary or take another path: the
other dtype; head dimensions in between, which are padded; unaligned addresses, in fp32 too; both
alignments of the mask; and lengths that are whole tiles, or that leave queries without a key. The
interpreter has one tile for everything, so a few cases are enough there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import pytest
import torch

from flashattn.gpus import gpu_of
from flashattn.plan import portable
from flashattn.plan.gpu import CARDS
from flashattn.plan.precision import input_precision
from flashattn.plan.rows import HEAD_DIMS
from flashattn.plan.spec import Options, TensorSpec
from flashattn.plan.tables import find, rows_of
from flashattn.problem import DTYPES, Problem
from flashattn.registry import get
from flashattn.testing.accuracy import Sample, assert_accurate, relative_errors
from flashattn.testing.layouts import LAYOUTS as LAYOUTS_OF

MANY = {"batch": 4, "heads": 32, "kv_heads": 16}  # large enough that each pass has its own launch
FEW = {"heads": 2, "kv_heads": 1}
SHAPES = {
    "ragged": MANY | {"seq_q": 300, "seq_kv": 500},  # no tile divides either
    "tall": MANY | {"seq_q": 500, "seq_kv": 300},  # bottom-right: 200 queries see no key
    "whole": MANY | {"seq_q": 512, "seq_kv": 512},  # every tile divides both
    "few": FEW | {"seq_q": 700, "seq_kv": 900},  # one fused backward
    "low": FEW | {"seq_q": 500, "seq_kv": 700},  # too few keys to split
    "tiny": FEW | {"batch": 2, "seq_q": 90, "seq_kv": 150},  # the backward is one launch
    "short": FEW | {"seq_q": 90, "seq_kv": 150},  # too short to decompose fp32
    "decode": {"batch": 2, "heads": 8, "kv_heads": 2, "seq_q": 9, "seq_kv": 900},
    "small": {"heads": 2, "kv_heads": 1, "seq_q": 70, "seq_kv": 100},  # for the interpreter
}
BETWEEN = (8, 24, 40, 80, 192)  # padded to 16, 32, 64, 128 and 256
HALF, FULL = ("bfloat16", "float16"), ("float32",)
MASKS = (False, "top_left", "bottom_right")
FP32 = 4  # bytes
ALIGNED, LAYOUTS = ("contiguous",), ("contiguous", "misaligned")  # descriptors; pointers


@dataclass(frozen=True)
class Case:
    """What selects a tile, and the lengths that it is tested with."""

    dtype: str
    head_dim: int
    layout: str
    causal: bool | str
    shape: str

    def __str__(self):
        """Return the name of the test."""
        mask = self.causal or "full"
        return f"{self.dtype}-d{self.head_dim}-{mask}-{self.layout}-{self.shape}"

    @property
    def problem(self):
        """The problem."""
        return Problem(
            **SHAPES[self.shape], head_dim=self.head_dim, dtype=self.dtype, causal=self.causal
        )

    @property
    def kernels(self):
        """The kernels of the table that are launched, if the table has fused backwards."""
        fused = dict.fromkeys(("few", "low", "decode"), "bwd_fused") | {"tiny": "bwd_one_launch"}
        both = fused.get(self.shape)
        passes = [both] if both else ["bwd_dkdv", "bwd_dq"]
        few = {"few": "fwd_small_grid", "low": "fwd_short_kv", "tiny": "fwd_short_kv"}
        if DTYPES[self.dtype] == FP32:
            few = {}
        return [(few | {"decode": "decode"}).get(self.shape, "fwd"), *passes]

    def tile(self, kernel, gpu):
        """Return the tile that a GPU's table has for the case."""
        size, causal = DTYPES[self.dtype], self.causal is not False
        described = self.layout in ALIGNED and self.shape != "tiny"
        if size == FP32:
            described = self.shape != "short"
        return find(rows_of(gpu), kernel, size, self.head_dim, causal=causal, large=described)


def cases(dtypes, *options):
    """Return every combination of head dimensions, layouts, masks and shapes, in every dtype."""
    return [Case(*of) for of in product(dtypes, *options)]


def alternating(*options):
    """Return each combination in one half-precision dtype, so that each dtype has every option."""
    places = product(*(range(len(x)) for x in options))
    return [Case(HALF[sum(at) % 2], *of) for at, of in zip(places, product(*options), strict=True)]


# The length decides whether fp32 is decomposed or loaded by pointers; the layout does not.
ORDINARY = [
    *alternating(HEAD_DIMS, LAYOUTS, (False, "bottom_right"), ("ragged", "few", "decode")),
    *alternating(HEAD_DIMS, ALIGNED, (False, "bottom_right"), ("low", "tiny")),
    *cases(FULL, HEAD_DIMS, ALIGNED, (False, "bottom_right"), ("ragged", "few", "short", "decode")),
]
EVERY = [
    *cases(
        HALF + FULL,
        HEAD_DIMS + BETWEEN,
        LAYOUTS,
        MASKS,
        ("ragged", "tall", "whole", "few", "decode"),
    ),
    *cases(HALF, HEAD_DIMS + BETWEEN, LAYOUTS, MASKS, ("low", "tiny")),
    *cases(FULL, HEAD_DIMS + BETWEEN, LAYOUTS, MASKS, ("short",)),
]
INTERPRETED = cases(
    ("bfloat16", "float32"), (16, 32, 64), LAYOUTS, (False, "bottom_right"), ("small",)
)


def pytest_generate_tests(metafunc):
    """Choose the cases by the machine and by ``--every-tile``."""
    if "case" in metafunc.fixturenames:
        every = metafunc.config.getoption("--every-tile")
        chosen = EVERY if every else ORDINARY if torch.cuda.is_available() else INTERPRETED
        metafunc.parametrize("case", chosen, ids=str)


def sample(case, device):
    """Return the sample of a case: o, lse, and the gradients of both."""
    return Sample(problem=case.problem, device=device, layout=case.layout)


@pytest.mark.drawn("case")
def test_every_tile(case, device):
    """Each tile of this machine's table, by descriptors and by pointers, is within the budgets."""
    asked = sample(case, device)
    scale = case.head_dim**-0.5
    assert_accurate(partial(get("triton"), **case.problem.keywords, scale=scale), asked)


@pytest.mark.parametrize("gpu", [CARDS["A100"], CARDS["H200"]], ids=["A100", "H200"])
def test_the_ordinary_run_meets_every_tile(gpu):
    """The ordinary cases pick every tile of the table, of every kernel."""
    for (kernel, size, d, causal, _), tile in rows_of(gpu).tiles.items():
        picked = [
            case.tile(kernel, gpu)
            for case in ORDINARY
            if (DTYPES[case.dtype], case.head_dim, case.causal is not False) == (size, d, causal)
            and kernel in case.kernels
        ]
        assert tile in picked, (kernel, size, d, causal)


def test_each_dtype_meets_every_option():
    """Each half-precision dtype is tested with every head dimension, layout, mask and shape."""
    every = [{case for case in ORDINARY if case.dtype == dtype} for dtype in HALF]
    for option in ("head_dim", "layout", "causal", "shape"):
        bf16, fp16 = ({getattr(case, option) for case in own} for own in every)
        assert bf16 == fp16


@pytest.mark.gpu  # the interpreter has one tile for all
def test_cases_launch_what_they_say(device):
    """A case launches the kernels that it is meant for, with the tiles of the table."""
    gpu = gpu_of(device)
    for case in ORDINARY:
        p = case.problem
        rows = [(p.heads, p.seq_q)] + [(p.kv_heads, p.seq_kv)] * 2
        inputs = [torch.empty(p.batch, *x, p.head_dim, device=device) for x in rows]
        specs = [TensorSpec.of(LAYOUTS_OF[case.layout](x.to(p.torch_dtype))) for x in inputs]
        precision, causal = input_precision("auto", p.torch_dtype), p.causal is not False
        how = {"gpu": gpu, "causal": causal, "precision": precision}
        find = portable.finder(*specs, **how)
        fused = find("bwd_fused")
        if fused is not None:
            few = portable.small_grid(*specs[:2], fused, gpu, precision)
            assert few is (case.shape in ("few", "low", "decode", "tiny")), case
        for kernel in case.kernels:
            assert find(kernel) == case.tile(kernel, gpu), case
        options = Options(p.band.right, 0.1, precision)
        assert portable.forward_row(*specs, gpu, options)[0] == case.kernels[0], case


@pytest.mark.drawn("head_dim")
@pytest.mark.gpu  # the interpreter computes a TF32 product in full fp32
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128])
@pytest.mark.parametrize("causal", [False, "bottom_right"])
@pytest.mark.parametrize("shape", ["ragged", "few", "short"])  # the last is not decomposed
def test_every_tile_for_tf32(device, shape, head_dim, causal):
    """Each tile for TF32 loses at most what four products in a row lose, 2^-10 a factor."""
    problem = Problem(**SHAPES[shape], head_dim=head_dim, causal=causal)
    case = Sample(problem=problem, device=device).draw()
    attend = partial(get("triton"), causal=causal, scale=head_dim**-0.5, precision="tf32")
    for name, error in relative_errors(attend, case).items():
        assert error < 4 * 2 * 2**-10, name
        assert name == "lse" or error > 2**-20, name  # errors of two terms average out in lse


def test_every_case_is_more_than_the_ordinary_ones():
    """``--every-tile`` has each ordinary case under every mask, and each padded width."""
    assert set(ORDINARY) < set(EVERY)
    for case in ORDINARY:
        assert {replace(case, causal=mask) for mask in MASKS} <= set(EVERY)
    padded = {case.head_dim for case in EVERY} - set(HEAD_DIMS)
    assert len({1 << (d - 1).bit_length() for d in padded}) == 5 == len(padded)


def test_shapes_are_what_they_say():
    """Every tile divides whole lengths, none a ragged one; tall ones have fully masked rows."""
    blocks = {
        size
        for tile in rows_of(CARDS["H200"]).tiles.values()
        for size in (tile.block_q, tile.block_kv)
    }
    for name, wanted in (("ragged", False), ("tall", False), ("whole", True)):
        for length in (SHAPES[name]["seq_q"], SHAPES[name]["seq_kv"]):
            assert {length % block == 0 for block in blocks} == {wanted}
    tall = Problem(**SHAPES["tall"], causal="bottom_right")
    assert tall.fully_masked_rows == 200


@pytest.mark.drawn("head_dim")
@pytest.mark.gpu  # the interpreter has no such tiles
@pytest.mark.parametrize("head_dim", [40, 64, 128])
@pytest.mark.parametrize("window", [(100, 0), (150, 70), (900, 0)], ids=str)
@pytest.mark.parametrize("shape", ["ragged", "tall", "few"])
def test_every_tile_for_windows(device, shape, window, head_dim):
    """Each tile for short windows is accurate, with and without tiles that need no mask."""
    dtype = HALF[sum(window) % 4 == 0]
    problem = Problem(**SHAPES[shape], head_dim=head_dim, window=window, dtype=dtype)
    assert_accurate(
        partial(get("triton"), **problem.keywords, scale=head_dim**-0.5),
        Sample(problem=problem, device=device),
    )
