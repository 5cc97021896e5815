"""The Hopper kernels, emulated on a CPU: right in any order of events; bugs are caught."""

from __future__ import annotations

import runpy
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from flashattn import masks
from flashattn.bounds import of_documents
from flashattn.checks import check_scale
from flashattn.emulate import barriers, language, mma, tma
from flashattn.emulate.launching import Program, emulated, run
from flashattn.emulate.memory import Descriptor, Shared
from flashattn.emulate.schedule import DeadlockError, Schedule, here
from flashattn.emulate.source import STAND_INS
from flashattn.kernels import execute
from flashattn.kernels.hopper import compat, score
from flashattn.kernels.hopper.tma import TileSpec
from flashattn.kernels.portable import steps
from flashattn.mask import Mask
from flashattn.plan import hopper
from flashattn.plan import portable as plan_portable
from flashattn.plan.plan import BackwardPlan
from flashattn.plan.precision import input_precision
from flashattn.plan.spec import Extras, Options, TensorSpec, signature
from flashattn.plan.tables import hopper as rows
from flashattn.plan.tables.hopper import NARROW_FORWARD
from flashattn.plan.tile import HopperBackwardTile, HopperD256Tile, HopperTile
from flashattn.problem import Problem
from flashattn.resolve import bounds_of, bounds_of_lengths
from flashattn.testing.accuracy import (
    InaccurateError,
    Sample,
    assert_accurate,
    relative_errors,
)
from flashattn.testing.inputs import make_grads, make_inputs
from flashattn.testing.layouts import LAYOUTS, scattered
from flashattn.testing.results import assert_same_bits
from flashattn.testing.sample import hidden_rows

pytestmark = pytest.mark.interpreter
MUTANTS = Path(__file__).parent / "mutants" / "mutants.py"
PLANTED = list(runpy.run_path(str(MUTANTS))["planted"]("hopper.diff", "kernels/hopper/"))
SMALL = HopperTile(block_kv=64)
WIDE = HopperTile(block_kv=64, own_o=False)
THREE = HopperTile(block_kv=64, consumers=3, registers=160)
UNSTAGED = HopperTile(own_o=False, stages=3)


def attend(problem, config, how=None, precision="auto", bounds=(None, None)):
    """Return attention to a problem's inputs by a config of the forward, with its backward."""
    how = {"deterministic": False} | (how or {})
    band, query_offset = problem.band, problem.seq_kv - problem.seq_q
    if problem.by_rows and bounds[0] is None:
        rows_of = problem.seq_q, problem.seq_kv, torch.device("cpu")
        bounds = bounds_of_lengths(problem.documents, problem.prefix, problem.mask, *rows_of)
    options = Options(
        None if problem.by_rows else band.right,
        check_scale(None, problem.head_dim),
        input_precision(precision, problem.torch_dtype),
        "hopper",
        how.pop("deterministic"),
        None if problem.by_rows else band.left,
        problem.softcap,
        query_offset=query_offset if problem.alibi else 0,
    )

    class Attend(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, *scored):
            given = [x for x in (*bounds, *scored) if x is not None]
            ctx.extras = Extras(*bounds, *scored) if given else ()
            bias_grad = scored[1] is not None and scored[1].requires_grad
            ctx.options = options._replace(bias_grad=bias_grad).given(ctx.extras)
            run = execute.prepare_forward(q, k, v, ctx.options, tile=config)
            o, lse = run(q, k, v, *ctx.extras)
            ctx.save_for_backward(q, k, v, o, lse)
            return o, lse

        @staticmethod
        def backward(ctx, *grads):
            (grad_o, grad_lse), (q, k, v, o, lse) = grads, ctx.saved_tensors
            run = execute.prepare_backward(grads, ctx.saved_tensors, ctx.options, **how)
            dq, dk, dv, *others = run(q, k, v, grad_o, o, lse, grad_lse, *ctx.extras)
            dbias = others.pop(0) if ctx.options.bias_grad else None
            return dq, dk, dv, None, dbias, *(others or [None])

    def call(q, k, v, alibi_slopes=None, bias=None, sink=None):
        return Attend.apply(q, k, v, alibi_slopes, bias, sink)

    return call


class Asked(NamedTuple):
    """A problem, and how the kernels run it.

    Args:
        problem: the problem.
        config: tile of the forward; None for fp32.
        how: tile of the backward, and whether it is deterministic; None for no backward.
        at_once: how many CTAs run at once.
        values: kind of input values, see ``Sample``.
    """

    problem: Problem
    config: HopperTile | None = SMALL
    how: dict[str, Any] | None = None
    at_once: int = 1
    values: str = "normal"

    def __str__(self):
        """Return the id of the test."""
        return " ".join(map(str, (*self[:2], *(self.how or {}).values(), *self[3:])))


def check(asked, *, seed=0, edit=None, call=None, layout="contiguous", drawn=0):
    """Hold results and gradients to the budgets, and return the kernels that were launched."""
    problem, config, how, at_once, values = asked
    grad = how is not None
    sample = Sample(problem=problem, values=values, grad=grad, layout=layout, seed=drawn)
    shared = torch.zeros(1, dtype=torch.int32)
    with (
        emulated(seed=seed, num_sms=at_once, edit=edit) as launched,
        mock.patch.object(execute, "counters", return_value=shared),
    ):
        assert_accurate(call or attend(problem, config, how), sample)
    assert not shared.any()  # the next kernel starts at the first tile
    return launched


def answer(asked, case, seed=0):
    """Return o, lse, dq, dk and dv."""
    given = [x.detach().requires_grad_() for x in case.inputs]
    with emulated(seed=seed, num_sms=asked.at_once):
        o, lse = attend(*asked[:3])(*given, **case.scored)
        return o, lse, *torch.autograd.grad(o, given, case.grad_o)


def bf16(**sizes):
    """Return a bf16 problem."""
    return Problem(dtype="bfloat16", **sizes)


def fp16(**sizes):
    """Return an fp16 problem."""
    return Problem(dtype="float16", **sizes)


def in_turns(**tile):
    """Return the options of a deterministic backward."""
    return {"tile": HopperBackwardTile(**tile), "deterministic": True}


def in_any_order(**tile):
    """Return the options of a backward that adds dQ in any order."""
    return in_turns(**tile) | {"deterministic": False}


TURNS, UNTURNED = in_turns(), in_any_order(persistent=True)
ROUND = in_turns(persistent=True, stagger=1)
WIDE_PASSES = {"tile": HopperD256Tile()}
PACKED = ((90, 90), (0, 0), (38, 38), (130, 130))  # one is empty; rows after the last
# More keys than queries, queries that see no key, keys that no query sees, and two short ones.
UNEVEN = ((40, 200), (70, 0), (0, 60), (1, 1), (90, 100))
SPARSE = ((64, 0), (192, 200))
FORWARDS = [
    Asked(bf16(heads=2, seq_q=140, seq_kv=200)),
    Asked(fp16(heads=4, kv_heads=2, seq_q=70, seq_kv=130, causal=True)),
    # Fully masked rows; dynamic tile scheduler.
    Asked(bf16(heads=3, seq_q=200, seq_kv=70, causal="bottom_right"), at_once=2),
    Asked(bf16(heads=2, seq_q=260, causal=True, head_dim=128), UNSTAGED, at_once=3),  # dynamic
    Asked(
        fp16(batch=2, heads=2, seq_q=200, seq_kv=130, head_dim=40),
        HopperTile(consumers=3, stages=4),
        at_once=3,
    ),
    Asked(bf16(heads=2, seq_q=1, seq_kv=270, causal="bottom_right")),
    Asked(bf16(heads=2, seq_q=130, seq_kv=1), at_once=2),
    Asked(fp16(seq_q=70, seq_kv=150, head_dim=256), WIDE),
    Asked(  # 64 + 32
        bf16(heads=2, seq_q=200, seq_kv=150, head_dim=88, causal=True), HopperTile(), at_once=2
    ),
    Asked(  # 128 + 64
        fp16(seq_q=70, seq_kv=300, head_dim=168), HopperTile(block_kv=64, own_o=False, stages=3)
    ),
    Asked(bf16(heads=2, seq_q=140, seq_kv=200, head_dim=192, value_dim=128), NARROW_FORWARD),
    Asked(fp16(seq_q=200, causal=True, head_dim=136, value_dim=40), NARROW_FORWARD, at_once=2),
    Asked(bf16(seq_q=300, head_dim=168, value_dim=72, window=(70, 20), documents=PACKED), WIDE),
    Asked(bf16(heads=2, seq_q=300, window=(70, 0)), at_once=2),  # dynamic tile scheduler
    Asked(fp16(seq_q=500, window=(300, 33))),  # masked tiles, full ones, masked ones
    Asked(bf16(heads=2, seq_q=500, window=(300, 33)), THREE, at_once=2),  # the same in one loop
    Asked(fp16(heads=2, seq_q=300, causal=True, documents=PACKED), THREE, at_once=2),
    # Fully masked rows.
    Asked(bf16(heads=3, seq_q=260, seq_kv=150, window=(20, None), head_dim=128), WIDE, at_once=2),
    Asked(bf16(seq_q=70, seq_kv=400, window=(20, None), causal="bottom_right"), HopperTile()),
    Asked(fp16(seq_q=130, seq_kv=330, window=(140, 3), head_dim=256), WIDE),
    Asked(bf16(heads=2, seq_q=300, causal=True, documents=PACKED), at_once=2),
    Asked(fp16(heads=2, seq_q=250, seq_kv=400, causal="bottom_right", documents=UNEVEN), UNSTAGED),
    Asked(bf16(seq_q=300, head_dim=128, window=(70, 20), documents=PACKED), WIDE),
    Asked(bf16(seq_q=300, head_dim=168, window=(70, 20), documents=PACKED), WIDE),
]
BACKWARDS = [
    Asked(bf16(heads=2, seq_q=200, seq_kv=140), SMALL, UNTURNED),
    Asked(fp16(heads=4, kv_heads=2, seq_q=70, seq_kv=300, causal=True), SMALL, TURNS, 3),
    Asked(bf16(heads=2, seq_q=200, seq_kv=140, causal="bottom_right"), SMALL, in_turns(section=4)),
    Asked(bf16(seq_q=200, seq_kv=260, causal=True, head_dim=128), SMALL, in_any_order(stages=3), 2),
    Asked(fp16(heads=2, seq_q=130, seq_kv=260, head_dim=128), SMALL, in_turns(section=2), 3),
    Asked(bf16(batch=2, seq_q=1, seq_kv=200, head_dim=40), SMALL, UNTURNED, 3),
    Asked(bf16(heads=2, seq_q=70, seq_kv=1, head_dim=96), SMALL, TURNS, 2),
    Asked(bf16(seq_q=300, seq_kv=70, causal="bottom_right", head_dim=80), SMALL, in_any_order()),
    Asked(fp16(heads=3, seq_q=200, seq_kv=390, causal=True), SMALL, in_turns(persistent=True), 2),
    Asked(bf16(heads=2, seq_q=70, seq_kv=390, head_dim=96), SMALL, in_any_order(section=2), 3),
    Asked(bf16(heads=3, seq_q=140, seq_kv=520), SMALL, in_turns(section=2, persistent=True), 5),
    Asked(fp16(heads=4, kv_heads=2, seq_q=140, seq_kv=390, head_dim=128), SMALL, ROUND, 4),
    Asked(bf16(seq_q=70, seq_kv=700, head_dim=96), SMALL, ROUND, 6),  # no room for all
    Asked(bf16(batch=2, seq_q=200, seq_kv=260), SMALL, in_any_order(persistent=True, stagger=1), 3),
    Asked(bf16(seq_q=70), SMALL, TURNS, values="negative"),  # P of padding would be inf
]
WINDOWS = [
    {"heads": 2, "seq_q": 300, "window": (70, 0)},
    {"seq_q": 330, "window": (150, 33)},  # masked tiles, full ones, masked ones
    {"seq_q": 300, "seq_kv": 390, "window": (20, 33)},  # keys that no query sees
    {"seq_q": 390, "seq_kv": 300, "window": (70, None)},  # no right bound; fully masked rows
    {"seq_q": 70, "seq_kv": 400, "window": (20, None), "causal": "bottom_right"},  # left < 0
    {"seq_q": 400, "seq_kv": 150, "window": (30, None), "causal": "bottom_right"},  # right < 0
    {"heads": 2, "kv_heads": 1, "seq_q": 330, "window": (129, None), "causal": "bottom_right"},
    {"heads": 2, "seq_q": 300, "causal": True, "documents": PACKED},
    {"seq_q": 250, "seq_kv": 400, "causal": "bottom_right", "documents": UNEVEN},
    {"seq_q": 500, "window": (150, 40), "documents": ((420, 420), (50, 50))},
    {"heads": 4, "kv_heads": 2, "seq_q": 270, "seq_kv": 210, "documents": SPARSE},
    {"seq_q": 300, "seq_kv": 390, "window": (150, None), "prefix": 130},
]


def of_windows(*hows):
    """Return the cases of ``WINDOWS``, with each backward in rotation."""
    return [
        Asked(bf16(head_dim=head_dim, **shape), WIDE, how, 2)
        for shape, head_dim, how in zip(WINDOWS, cycle((64, 128, 128, 64)), cycle(hows))
    ]


WIDE_BACKWARDS = [
    Asked(problem, WIDE, {"tile": HopperD256Tile(stages=stages, section=2)}, at_once)
    for stages, at_once, problem in (
        (2, 1, bf16(heads=4, kv_heads=2, seq_q=140, seq_kv=130, head_dim=256)),
        (2, 2, fp16(heads=3, seq_q=70, seq_kv=200, head_dim=200, causal="bottom_right")),
        # Fully masked rows, here and under a window below.
        (2, 3, bf16(heads=2, seq_q=200, seq_kv=70, head_dim=256, causal="bottom_right")),
        (3, 1, bf16(seq_q=1, seq_kv=70, head_dim=136)),
        (3, 2, bf16(heads=2, seq_q=330, window=(150, 20), head_dim=136)),
        (3, 1, bf16(heads=2, seq_q=200, seq_kv=330, head_dim=192, value_dim=128)),
        (3, 3, fp16(heads=4, kv_heads=2, seq_q=140, causal=True, head_dim=168, value_dim=72)),
        (3, 2, bf16(heads=2, seq_q=330, window=(150, 20), head_dim=136, value_dim=40)),
        (2, 3, fp16(heads=2, kv_heads=1, seq_q=200, seq_kv=140, window=(0, None), head_dim=256)),
        (2, 1, bf16(seq_q=70, seq_kv=330, window=(9, None), causal="bottom_right", head_dim=256)),
        (2, 1, bf16(seq_q=200, seq_kv=330, window=(9, 0), head_dim=256)),  # unseen keys
        (2, 2, bf16(heads=2, seq_q=300, causal=True, documents=PACKED, head_dim=256)),
        (3, 2, fp16(seq_q=250, seq_kv=400, causal="bottom_right", documents=UNEVEN, head_dim=168)),
        (3, 1, bf16(seq_q=500, window=(150, 40), documents=((420, 420), (50, 50)), head_dim=136)),
        (2, 3, bf16(heads=4, kv_heads=2, seq_q=270, seq_kv=210, documents=SPARSE, head_dim=200)),
        (3, 2, bf16(seq_q=300, documents=PACKED, head_dim=192, value_dim=128)),
        (2, 1, fp16(seq_q=300, seq_kv=390, window=(150, None), prefix=130, head_dim=136)),
    )
]
FP32 = [
    Asked(Problem(**{"head_dim": 128} | shape), None, {}, 2)
    for shape in (
        {"heads": 4, "kv_heads": 2, "seq_q": 100, "seq_kv": 130},
        {"heads": 2, "seq_q": 130, "seq_kv": 100, "causal": "bottom_right"},  # some see no key
        {"heads": 2, "seq_q": 100, "seq_kv": 130, "head_dim": 72, "causal": "top_left"},
        {"heads": 1, "seq_q": 200, "seq_kv": 60, "causal": True},  # dk and dv are split
        {"heads": 1, "seq_q": 60, "seq_kv": 200},  # dq is split
        {"heads": 2, "seq_q": 130, "seq_kv": 150, "head_dim": 40, "causal": "bottom_right"},
        {"heads": 2, "seq_q": 200, "window": (70, 3)},
        {"heads": 1, "seq_q": 200, "seq_kv": 60, "window": (20, None)},  # masked rows; dk, dv split
        {"heads": 1, "seq_q": 60, "seq_kv": 200, "window": (5, None), "causal": "bottom_right"},
    )
]
# Longest-first order within 32 heads must not leave out the head after them.
MANY_HEADS = Problem(heads=33, kv_heads=1, seq_q=129, seq_kv=1, head_dim=40, causal=True)
LAUNCHED = [
    (Asked(MANY_HEADS, None, at_once=2), ["fwd_fp32"]),
    *((asked, ["fwd"]) for asked in FORWARDS),
    *((asked, ["fwd", "bwd"]) for asked in BACKWARDS + of_windows(TURNS, UNTURNED)),
    *((asked, ["fwd", "bwd_d256_dkdv", "bwd_d256_dq"]) for asked in WIDE_BACKWARDS),
    *((asked, ["fwd_fp32", "bwd_fp32_dkdv", "bwd_fp32_dq"]) for asked in FP32),
]


@pytest.mark.parametrize(("asked", "launched"), LAUNCHED, ids=str)
def test_accuracy(asked, launched):
    """Results and gradients are within the budgets, even if asynchronous operations end late."""
    assert check(asked) == [f"flashattn_hopper_{name}" for name in launched]


SCORES = [
    {"alibi": True},
    {"softcap": 0.7},  # most scores are capped
    {"alibi": True, "sink": True},
    {"softcap": 50.0, "sink": True},  # hardly any score is
    {"softcap": 5.0, "alibi": True},
]
# Matrices for each batch and for all, a row, a column; and biases by distance.
BIASES = [
    {"bias": "bhts"},
    {"bias": "1hr", "sink": True},
    {"bias": "11ts", "alibi": True},
    {"bias": "b11s", "softcap": 5.0},
    {"bias": "bhr", "alibi": True, "softcap": 5.0},
    {"bias": "1ht1"},
    {"bias": "11r"},
]
# If scores share a bias, a portable kernel computes its gradient, which is slow here.
LEARNED = [{"bias": "bhts"} | score for score in ({}, {"alibi": True}, {"softcap": 5.0})]
LEARNED += [{"bias": "bhts", "sink": True}, *({"bias": x} for x in ("bhr", "b11s", "1ht1"))]


def scored(problem, score):
    """Return a problem with other scores.

    Rows of a full bias become multiples of 16 bytes, so that TMA can store its gradient, unless
    there is a single key.
    """
    q, kv = problem.seq_q, problem.seq_kv
    if score.get("bias") == "bhts" and kv > 1:
        aligned = kv + -kv % 8
        problem = replace(problem, seq_q=aligned if q == kv else q, seq_kv=aligned)
    return replace(problem, **score)


SCORED = [
    (asked._replace(problem=scored(asked.problem, score)), seed)
    for of, scores in (
        (FORWARDS, SCORES),
        (FORWARDS, BIASES),
        (of_windows(UNTURNED, TURNS), LEARNED),
        (BACKWARDS, LEARNED[::-1]),
        (of_windows(UNTURNED, TURNS), SCORES[::-1]),
        (BACKWARDS, SCORES),
        (WIDE_BACKWARDS, SCORES),
        (FP32[:3], [{"sink": True}]),
    )
    for asked, score, seed in zip(of, cycle(scores), cycle((1, 2, 0, 3)))
]
FLAT = bf16(heads=2, seq_q=100, seq_kv=140, softcap=0.7)  # tanh is flat, gradients are small
SCORED += [
    (Asked(replace(FLAT, head_dim=head_dim), WIDE, how, values=values), 0)
    for head_dim, how in ((128, UNTURNED), (256, WIDE_PASSES))
    for values in ("extreme", "negative")
]


@pytest.mark.parametrize(("asked", "seed"), SCORED, ids=str)
def test_scores(asked, seed):
    """Scores with ALiBi, a bias, a softcap or a sink are within the budgets.

    Rows that see no key have a sink's logit as lse.
    """
    first, *_ = check(asked, seed=seed, drawn=seed)
    assert first.startswith("flashattn_hopper_fwd")


# Queries without keys, and keys without queries: before, between and after the others.
WITH_GAPS = (10, 0), (0, 70), (60, 100), (0, 140), (70, 0), (90, 90)


@pytest.mark.parametrize("score", [{}, {"softcap": 5.0, "sink": True}], ids=str)
@pytest.mark.parametrize(
    ("head_dim", "config", "how"),
    [
        (128, SMALL, TURNS),
        (64, THREE, UNTURNED),
        (168, WIDE, WIDE_PASSES),
        (256, WIDE, WIDE_PASSES),
    ],
    ids=["one pass", "one loop", "two pieces", "two passes"],
)
def test_what_is_in_no_document(head_dim, config, how, score):
    """Keys that no query sees and queries that see none may be NaN, and o and gradients are 0.

    The last tiles hold nothing else. Tiles of 168 columns are stored in two pieces.
    """
    sizes = {"heads": 2, "kv_heads": 1, "seq_q": 390, "seq_kv": 530, "head_dim": head_dim}
    problem = bf16(**sizes, documents=WITH_GAPS, **score)
    drawn, results = Sample(problem=problem).draw(), []
    dead, unseen = hidden_rows(problem, torch.device("cpu"))
    for value in (0.0, float("nan")):
        case = drawn.with_hidden(value)
        leaves = [x.requires_grad_() for x in (*case.inputs, *case.scored.values())]
        with emulated(num_sms=2):
            o, _ = attend(problem, config, how)(*case.inputs, **case.scored)
            results.append([o, *torch.autograd.grad(o, leaves, case.grad_o)])
    for name, one, other in zip(("o", "dq", "dk", "dv", "dsink"), *results, strict=False):
        assert_same_bits(name, one, other)
    for x, where in zip(results[1][:4], (dead, dead, unseen, unseen), strict=True):
        assert x.any()
        assert not x[:, :, where].any()


@pytest.mark.parametrize("how", [TURNS, UNTURNED], ids=["in turns", "in any order"])
def test_documents_that_begin_late(how):
    """Rows before the first document are those of documents without keys and without queries."""
    documents = (80, 0), (0, 200), (250, 130)
    problem = bf16(seq_q=330, seq_kv=330, documents=documents)
    cu = torch.tensor([80, 330]), torch.tensor([200, 330])
    bounds = of_documents(*cu, problem.seq_q, problem.seq_kv, problem.mask)
    asked = Asked(problem, SMALL, how, 2)
    check(asked, call=attend(problem, SMALL, how, bounds=bounds))


EACH_KERNEL = pytest.mark.parametrize(
    ("dtype", "head_dim", "config", "how"),
    [
        ("bfloat16", 64, WIDE, TURNS),
        ("float16", 256, WIDE, WIDE_PASSES),
        ("float32", 128, None, {}),
    ],
    ids=["one pass", "two passes", "fp32"],
)


@pytest.mark.parametrize("window", [(199, None), (None, 199)])
@EACH_KERNEL
def test_a_window_of_all_masks_nothing(window, dtype, head_dim, config, how):
    """A window that hides nothing gives the bits of no window, in both passes."""
    unbounded = tuple(None if x is None or x >= 199 else x for x in window)
    how = how | {"deterministic": True}
    for causal in (False, "top_left") if window[1] is None else (False,):
        problem = Problem(dtype=dtype, seq_q=200, head_dim=head_dim, causal=causal)
        case = Sample(problem=problem).draw()
        found = [
            answer(Asked(replace(problem, window=bounds), config, how, 3), case)
            for bounds in (window, unbounded)
        ]
        assert all(map(torch.equal, *found))


def test_the_next_tile_is_drawn_late(monkeypatch):
    """A CTA draws its next tile only after all loads of its own but the last values."""
    loads, drawn = [], []
    load, draw = tma.load_tile, language.atomic_add

    def loaded(*given):
        loads.append(given)
        return load(*given)

    def draws(*given):
        drawn.append(len(loads))
        return draw(*given)

    monkeypatch.setitem(STAND_INS, id(compat.load_tile), loaded)
    monkeypatch.setattr(language, "atomic_add", draws)
    problem = bf16(seq_q=384, causal=True)
    with emulated(num_sms=1):
        attend(problem, HopperTile())(*make_inputs(problem))
    assert drawn == [7, 13, 17]  # two tiles of queries each; of keys and of values three, two, one


CAPPED, SLOPED = {"softcap": 0.7, "sink": True}, {"softcap": 5.0, "alibi": True}
SHARES = [
    (bf16(batch=2, heads=4, kv_heads=1, seq_q=200, seq_kv=140), 4, {"deterministic": True}),
    (fp16(heads=6, kv_heads=1, seq_q=70, seq_kv=300, head_dim=128, causal=True, **CAPPED), 3, {}),
    (bf16(heads=4, kv_heads=2, seq_q=140, seq_kv=70, head_dim=88, causal="bottom_right"), 2, {}),
    (bf16(batch=2, heads=4, kv_heads=1, seq_q=70, seq_kv=130, head_dim=40, **SLOPED), 2, {}),
    (fp16(heads=4, kv_heads=2, seq_q=130, seq_kv=70, head_dim=200, **CAPPED), 2, {}),
    (bf16(heads=2, kv_heads=1, seq_q=300, window=(140, 5), **SLOPED), 2, {"deterministic": True}),
    (bf16(heads=3, kv_heads=1, seq_q=260, window=(70, 0), head_dim=256), 3, {}),
    (bf16(heads=3, kv_heads=1, seq_q=70, seq_kv=130, head_dim=256, causal=True), 3, {}),
    (bf16(heads=4, kv_heads=1, seq_q=70, seq_kv=130, head_dim=136, **CAPPED), 2, {}),  # 128 + 64
    (bf16(heads=2, kv_heads=1, seq_q=300, documents=PACKED, head_dim=136, **SLOPED), 2, {}),
]


@pytest.mark.parametrize(("problem", "count", "how"), SHARES, ids=str)
def test_shares(problem, count, how, monkeypatch):
    """Query heads split over CTAs are within the budgets; all bits but those of dq repeat."""
    monkeypatch.setattr(hopper, "gqa_splits", lambda *_, **__: count)
    asked = Asked(problem, SMALL if problem.head_dim <= 128 else WIDE, how, 3)
    check(asked)
    assert differing(asked, 2) <= {"dq"}


def differing(asked, orders):
    """Return which of o, lse, dq, dk and dv change bits with the order of events."""
    case = Sample(problem=asked.problem).draw()
    answers = [answer(asked, case, seed) for seed in range(orders)]
    results = zip(("o", "lse", "dq", "dk", "dv"), zip(*answers, strict=True), strict=True)
    return {
        name for name, (one, *others) in results if not all(torch.equal(one, x) for x in others)
    }


@EACH_KERNEL
def test_sinks_of_each_batch(dtype, head_dim, config, how):
    """Batches may have their own sinks; one of -inf has the bits of none, and no gradient."""
    sizes = {"heads": 2, "seq_q": 150, "seq_kv": 100, "causal": "bottom_right"}  # masked rows
    problem = Problem(dtype=dtype, batch=2, head_dim=head_dim, **sizes)
    case = Sample(problem=problem).draw()
    attends = attend(problem, config, how | {"deterministic": True})

    def answer(part, sink=None):
        given = [x[part].detach().requires_grad_() for x in case.inputs]
        given += [] if sink is None else [sink.clone().requires_grad_()]
        outputs = attends(*given[:3], sink=given[3] if given[3:] else None)
        grads = case.grad_o[part], case.grad_lse[part]
        return *outputs, *torch.autograd.grad(outputs, given, grads)

    sinks = torch.tensor([[-torch.inf, 1.0], [2.0, -torch.inf]])
    with emulated():
        *both, dsink = answer(slice(None), sinks)
        for batch in range(2):
            part = slice(batch, batch + 1)
            *alone, of_sink = answer(part, sinks[part])
            assert torch.equal(dsink[part], of_sink)
            for x, one, none in zip(both, alone, answer(part), strict=True):
                assert torch.equal(x[part], one)
                assert torch.equal(x[part, batch], none[:, batch])
    assert torch.equal(dsink == 0, sinks.isinf())


MATRIX = bf16(heads=2, seq_q=140, seq_kv=520, bias="11ts")
DISTANCES = replace(MATRIX, bias="11r")


@pytest.mark.parametrize(
    ("problem", "config", "dtype"),
    [
        (MATRIX, SMALL, torch.float32),
        (MATRIX, WIDE, torch.float32),
        (MATRIX, WIDE, torch.bfloat16),
        (DISTANCES, WIDE, torch.bfloat16),
        (replace(DISTANCES, softcap=5.0), WIDE, torch.bfloat16),
    ],
)
def test_keys_that_a_bias_hides(problem, config, dtype):
    """A bias of -inf hides keys: the first tiles that are visited, one in between, a whole row.

    Rows that see a key have the bits of a finite bias so low that P is 0. So have dk and dv, if the
    other rows have no gradient.
    """
    case = Sample(problem=problem).draw()
    inputs = [x.detach().requires_grad_() for x in case.inputs]
    blind = slice(7, 70) if problem.bias == MATRIX.bias else slice(0, 1)  # they see no key
    grad_o = case.grad_o.clone()
    grad_o[:, :, blind] = 0
    results = []
    for hidden in (-torch.inf, -1e5):
        bias = case.scored["bias"].to(dtype, copy=True)
        if problem.bias == MATRIX.bias:
            bias[..., 300:], bias[..., 128:192], bias[..., blind, :] = (hidden,) * 3
        else:
            bias[..., problem.seq_q - 1 :] = hidden  # a query's own position and all after it
        with emulated(num_sms=2):
            o, lse = attend(problem, config, TURNS)(*inputs, bias=bias)
            results.append((o, lse, *torch.autograd.grad(o, inputs, grad_o)))
    (o, lse, dq, dk, dv), low = results
    assert not o[:, :, blind].any()
    assert (lse[:, :, blind] == -torch.inf).all()
    for rows_of in (slice(0, blind.start), slice(blind.stop, None)):
        for x, y in zip((o, lse, dq), low, strict=False):
            assert torch.equal(x[:, :, rows_of], y[:, :, rows_of])
    assert_same_bits("dk and dv", torch.stack((dk, dv)), torch.stack(low[3:]))
    assert not torch.stack((dk, dv))[:, :, :, 300:].any()


@pytest.mark.parametrize(("head_dim", "how"), [(64, TURNS), (168, WIDE_PASSES)])
def test_bounds_of_each_batch(head_dim, how):
    """Each batch may see other keys, and has the bits of the batch alone."""
    problem = bf16(batch=2, heads=2, seq_q=200, head_dim=head_dim, documents="unknown")
    case, results = Sample(problem=problem).draw(), []
    for part in (slice(0, 1), slice(1, 2), slice(None)):
        given = [x[part].detach().requires_grad_() for x in case.inputs]
        mask = masks.padding(torch.tensor([70, 190])[part])
        bounds = bounds_of(*given[:2], Mask(), None, mask)
        with emulated(num_sms=2):
            o, _ = attend(problem, WIDE, how, bounds=bounds)(*given)
            results.append([o, *torch.autograd.grad(o, given, case.grad_o[part])])
    for one, other, both in zip(*results, strict=True):
        assert torch.equal(torch.cat([one, other]), both)


def promised(x):
    """Return tanh(x) with the largest error that PTX allows ``tanh.approx.f32``."""
    up = x.contiguous().view(torch.int32) & 1
    return x.tanh() * (1 + (2.0 * up - 1) * 2.0**-11)


@pytest.mark.parametrize(("head_dim", "how"), [(64, UNTURNED), (256, WIDE_PASSES)])
def test_fp16_takes_the_exact_tanh(head_dim, how, monkeypatch):
    """fp16 uses the exact tanh; the error that PTX allows tanh.approx can break budgets."""
    monkeypatch.setitem(STAND_INS, id(score.tanh_approx), promised)
    sizes = {"heads": 2, "seq_q": 200, "seq_kv": 140, "head_dim": head_dim, "softcap": 50.0}
    check(Asked(fp16(**sizes), WIDE, how, values="negative"))
    with pytest.raises(InaccurateError):
        check(Asked(bf16(**sizes), WIDE, how, values="negative"))


@pytest.mark.parametrize(("causal", "left"), [("bottom_right", None), (False, None), (True, 390)])
@pytest.mark.parametrize("deterministic", [True, False])
def test_the_same_bits(deterministic, causal, left):
    """Deterministic gradients have the same bits in any order of events; o and lse always do."""
    sizes = {"seq_q": 900} if left else {"heads": 2, "seq_q": 200, "seq_kv": 520 if causal else 900}
    problem = bf16(**sizes, causal=causal, window=(left, None))
    how = in_turns(persistent=not causal) | {"deterministic": deterministic}
    assert differing(Asked(problem, SMALL, how, 5), 4) == (set() if deterministic else {"dq"})


def test_terms():
    """Terms of -lse / scale and -delta add up to 24 bits; rows without keys get the lowest bf16."""
    lse = torch.tensor([[[-torch.inf, torch.inf, 0.0, 1e-30, -7.3, 1e5, 3.1]]])
    o, grad_o = torch.randn(2, 1, 1, 7, 64, generator=torch.Generator().manual_seed(0)).to(
        torch.bfloat16
    )
    spec = TensorSpec(*signature(o)[0])
    filled = plan_portable.row_workspaces(spec, ("minus_lse", "minus_delta"))
    step = steps.preprocessing(spec, spec, None, 0.1, tuple(x.name for x in filled))
    plan = BackwardPlan(kernel="portable")
    bound = execute.Bound(("o", "grad_o", "lse", "grad_lse"), {}, filled, plan, [step], o.device)
    minus_lse, minus_delta = bound(o, grad_o, lse, None)
    assert minus_lse[0, [0, *range(7, 256)], 0].unique().tolist() == [torch.finfo(o.dtype).min]
    assert minus_lse[0, 1, 0] == -torch.inf
    assert not minus_lse[0, [0, 1, *range(7, 256)], 1:].any()
    assert not torch.cat([minus_lse, minus_delta])[..., 3:].any()
    products = (o.double() * grad_o.double())[0, 0, 2:]
    lse = 10 * lse[0, 0, 2:]
    for terms, wanted, size in (
        (minus_lse, -lse, 2**-21 * lse.abs()),
        (minus_delta, -products.sum(-1), 64 * 2**-24 * products.abs().sum(-1)),  # fp32's sum
    ):
        assert ((terms[0, 2:7].double().sum(-1) - wanted).abs() <= size).all()


@pytest.mark.parametrize(("head_dim", "accumulators"), [(64, 1), (128, 3)])
def test_semaphores_are_cleared(head_dim, accumulators, monkeypatch):
    """Whatever the memory of the semaphores held before, no CTA waits forever."""
    monkeypatch.setattr(hopper, "dq_accumulators", lambda *_, **__: accumulators)
    empty = torch.empty

    def used(*args, **how):
        x = empty(*args, **how)
        return x.fill_(-7) if x.dtype == torch.int32 else x

    monkeypatch.setattr(torch, "empty", used)
    problem = bf16(batch=2, heads=2, seq_q=200, seq_kv=400, causal=True, head_dim=head_dim)
    check(Asked(problem, WIDE, TURNS, 3))


@pytest.mark.parametrize("causal", ["top_left", "bottom_right"])
def test_slabs(causal, monkeypatch):
    """CTAs that queue share several dQ accumulators, whose sum has the same bits every time."""
    monkeypatch.setattr(rows, "QUEUE", (1, 1))
    found, chosen = [], hopper.dq_accumulators
    monkeypatch.setattr(
        hopper,
        "dq_accumulators",
        lambda *sizes, **how: found.append(chosen(*sizes, **how)) or found[-1],
    )
    asked = Asked(bf16(seq_q=200, seq_kv=520, causal=causal), SMALL, TURNS, 3)
    check(asked)
    assert not differing(asked, 2)
    assert set(found) == {3}


FEW_FP32 = FP32[0], FP32[5], FP32[6]


@pytest.mark.parametrize("asked", FEW_FP32, ids=str)
@pytest.mark.parametrize(
    ("values", "layout"), [("extreme", "contiguous"), ("normal", "sequence_first")]
)
def test_fp32(asked, values, layout):
    """Decomposed fp32 is within the budgets for large scores, and for another layout."""
    check(asked._replace(values=values), layout=layout)


@pytest.mark.parametrize("asked", FEW_FP32, ids=str)
def test_tf32(asked):
    """Decomposed into two bf16 terms, fp32 is right to 16 bits; one TF32 product keeps 11."""
    case = Sample(problem=asked.problem).draw()
    with emulated(num_sms=asked.at_once):
        errors = relative_errors(attend(*asked[:3], "tf32"), case)
    for name, error in errors.items():
        assert error < 4 * 2 * 2**-16, name
        assert name == "lse" or error > 2**-20, name  # errors of two terms average out in lse


def test_one_key_where_p_is_below_one(monkeypatch):
    """With one key, o is v up to one rounding of the product and one of the quotient."""
    below = torch.tensor(1 - 2.0**-24)
    monkeypatch.setattr(language, "exp2", lambda x: torch.exp2(x) * below)
    problem = Problem(heads=2, seq_q=100, head_dim=64, window=(0, 0))
    q, k, v = Sample(problem=problem).draw().inputs
    with emulated(num_sms=2):
        o, _ = attend(problem, None, {})(q, k, v)
    assert ((o - v).abs() <= torch.finfo(torch.float32).eps * v.abs()).all()


# What all planted bugs depend on: plans say which CTAs run at once, and so which bugs show.
CONCERNED = "tests/test_hopper_emulated.py", "flashattn/emulate"
CONCERNED += "flashattn/plan/hopper.py", "flashattn/plan/splits.py"
ASKED = {
    "full": Asked(bf16(seq_q=300, seq_kv=130), WIDE),
    "staged": Asked(bf16(heads=2, seq_q=300, seq_kv=130)),
    "drawn": Asked(bf16(seq_q=300, seq_kv=130, causal=True)),
    "gradients": Asked(bf16(seq_q=200, seq_kv=260, head_dim=128), SMALL, UNTURNED),
    "fp16": Asked(fp16(seq_q=200, seq_kv=260), SMALL, UNTURNED),
    "in turns": Asked(bf16(seq_q=200, seq_kv=260), SMALL, TURNS),
    "round": Asked(bf16(heads=2, seq_q=260, seq_kv=390), SMALL, ROUND),
    "wide": Asked(
        bf16(heads=4, kv_heads=2, seq_q=200, seq_kv=130, head_dim=136, causal=True),
        WIDE,
        WIDE_PASSES,
    ),
    "narrow": Asked(
        bf16(heads=2, seq_q=200, seq_kv=390, head_dim=136, value_dim=72),
        NARROW_FORWARD,
        WIDE_PASSES,
    ),
    "shares": Asked(  # if three CTAs run at once
        bf16(batch=2, heads=4, kv_heads=1, seq_q=200, seq_kv=100, head_dim=96), SMALL, TURNS
    ),
    "columns": Asked(bf16(seq_q=200, seq_kv=260, head_dim=96), HopperTile(), TURNS),
    "window": Asked(bf16(heads=2, seq_q=450, window=(140, 3)), SMALL, TURNS),
    "unseen keys": Asked(
        bf16(seq_q=70, seq_kv=400, window=(20, None), causal="bottom_right"), SMALL, TURNS
    ),
    "packed": Asked(
        bf16(heads=2, kv_heads=1, seq_q=290, seq_kv=270, documents=((100, 150),)), WIDE, TURNS
    ),
    "wide packed": Asked(
        bf16(
            heads=2,
            kv_heads=1,
            seq_q=290,
            seq_kv=270,
            head_dim=136,
            documents=((100, 150),),
            softcap=5.0,
        ),
        WIDE,
        WIDE_PASSES,
    ),
    "wide short": Asked(
        bf16(seq_q=100, seq_kv=270, head_dim=136, documents=((0, 30), (40, 120)), softcap=5.0),
        WIDE,
        WIDE_PASSES,
    ),
    "biased": Asked(
        bf16(batch=2, heads=2, seq_q=200, seq_kv=130, bias="bhts", softcap=5.0), HopperTile()
    ),
    "learned bias": Asked(
        fp16(heads=4, kv_heads=2, seq_q=250, seq_kv=264, head_dim=128, bias="1hts"), WIDE, ROUND
    ),
    "bias in fp32": Asked(fp16(batch=2, seq_q=200, seq_kv=130, bias="bhts"), WIDE, TURNS),
    "by distance": Asked(bf16(seq_q=200, seq_kv=140, bias="1hr"), WIDE, TURNS),
    "capped by distance": Asked(
        bf16(heads=2, seq_q=200, seq_kv=130, bias="1hr", softcap=5.0), WIDE
    ),
    "wide sloped": Asked(
        bf16(heads=4, kv_heads=2, seq_q=200, seq_kv=130, head_dim=136, causal=True, alibi=True),
        WIDE,
        WIDE_PASSES,
    ),
    "wide window": Asked(bf16(seq_q=330, window=(150, 3), head_dim=136), WIDE, WIDE_PASSES),
    "growing": Asked(fp16(seq_q=500, window=(200, 3)), THREE, values="extreme"),
    "wide growing": Asked(bf16(seq_q=70, seq_kv=400, head_dim=168), WIDE, values="extreme"),
    "far below zero": Asked(bf16(seq_q=70), SMALL, UNTURNED, values="negative"),
    "capped": Asked(bf16(heads=2, seq_q=300, window=(70, 0), softcap=0.7), SMALL, TURNS),
    "wide capped": Asked(
        bf16(heads=4, kv_heads=2, seq_q=200, head_dim=136, causal=True, softcap=0.7),
        WIDE,
        WIDE_PASSES,
    ),
    "sloped": Asked(bf16(heads=2, seq_q=200, seq_kv=260, alibi=True), SMALL, TURNS),
    "sloped back": Asked(
        bf16(heads=2, seq_q=200, seq_kv=260, alibi=True, causal="bottom_right"), SMALL, TURNS
    ),
    "sunk": Asked(bf16(heads=2, seq_q=200, seq_kv=130, sink=True), SMALL, TURNS),
    "cut sunk": Asked(Problem(heads=2, seq_q=130, seq_kv=150, head_dim=128, sink=True), None, {}),
    "cut": Asked(Problem(heads=2, kv_heads=1, seq_q=130, seq_kv=150, head_dim=128), None, {}),
    "cut causal": Asked(
        Problem(seq_q=200, seq_kv=150, head_dim=72, causal="bottom_right"), None, {}
    ),
}
SHOWN = AssertionError, AttributeError, DeadlockError, InaccurateError, RuntimeError, TypeError
ERRORS = {error.__name__: error for error in SHOWN}


@pytest.mark.parametrize("move", [LAYOUTS["strided"], scattered])
@pytest.mark.parametrize("which", range(6))
def test_what_is_not_dense_is_copied(move, which):
    """Any tensor of either pass that is not dense is copied; the bits are those of a dense one."""
    problem = fp16(heads=2, seq_q=64, head_dim=64)
    q, k, v = make_inputs(problem, device="cpu")
    grad_o, grad_lse = make_grads(problem, device="cpu")
    how = {"right": None, "scale": 0.1, "family": "hopper"}
    with emulated() as launched:
        o, lse = execute.forward(q, k, v, **how)
        given = [q, k, v, o, grad_o, grad_lse]
        exact = execute.backward((grad_o, grad_lse), (q, k, v, o, lse), **how, deterministic=True)
        once = list(launched)
        given[which] = move(given[which])
        moved = execute.forward(*given[:3], **how)
        saved = *given[:4], lse
        got = execute.backward(tuple(given[4:]), saved, **how, deterministic=True)
    assert launched == once * 2
    assert all(map(torch.equal, (*moved, *got), (o, lse, *exact)))


def test_planted_bugs_apply():
    """The text that a planted bug replaces is in the source exactly once; its case is known."""
    for bug in PLANTED:
        case, shows = bug.caught.split(": ")
        assert case in ASKED
        assert ERRORS.keys() >= set(shows.split())
        source = (MUTANTS.parents[2] / "flashattn" / bug.path).read_text()
        assert bug.applied(source) != source


@pytest.mark.mutants
@pytest.mark.parametrize(
    "bug",
    [
        pytest.param(
            bug,
            id=bug.name,
            marks=pytest.mark.concerns(f"flashattn/{bug.path}", *CONCERNED, of=repr(bug)),
        )
        for bug in PLANTED
    ],
)
def test_planted(bug):
    """A bug in a kernel is caught by a wrong result, or at once if it hangs."""
    case, shows = bug.caught.split(": ")

    def edit(path, text):
        return bug.applied(text) if path.endswith(bug.path) else text

    errors = tuple(ERRORS[name] for name in shows.split())
    with pytest.raises(errors):  # noqa: PT012 - in one of these orders of events
        for seed in range(8):
            check(ASKED[case]._replace(at_once=1 + seed % 3), seed=seed, edit=edit)


@pytest.mark.mutants
@pytest.mark.concerns("flashattn/kernels/hopper", *CONCERNED)
@pytest.mark.parametrize("asked", ASKED)
def test_nothing_planted(asked):
    """Without a bug the same cases pass, in the same orders of events."""
    for seed in range(3):
        check(ASKED[asked]._replace(at_once=1 + seed % 3), seed=seed)


def play(*roles, seed=0):
    """Run these functions as warps."""
    schedule = Schedule(seed)
    for i, role in enumerate(roles):
        schedule.start(f"role {i}", role)
    schedule.run()


def barrier(arrivals):
    """Return a new barrier."""
    made = barriers.Barriers(2).index(1)
    barriers.init(made, arrivals)
    return made


def test_phases():
    """A phase ends when all have arrived; at a new barrier, a wait for phase 1 passes."""
    bar, said = barrier(2), []

    def wait():
        barriers.wait(bar, 1)
        for phase in (0, 1, 0):
            barriers.wait(bar, phase)
            said.append(bar.phase)

    def arrive():
        for n in range(3):
            barriers.wait(bar, (n & 1) ^ 1)
            while len(said) < n:  # the one that waits must not miss a phase
                here().pause()
            barriers.arrive(bar)

    play(wait, arrive, arrive)
    assert said == [1, 0, 1]


def test_too_many_arrive():
    """More arrivals than a phase waits for are an error; so is a barrier without init."""
    with pytest.raises(RuntimeError, match="2 arrive at a barrier that waits for 1"):
        play(lambda: barriers.arrive(barrier(1), count=2))
    with pytest.raises(RuntimeError, match="1 arrive at a barrier that waits for 0"):
        play(lambda: barriers.arrive(barriers.Barrier()))
    with pytest.raises(IndexError, match="barrier 2 of 2"):
        barriers.Barriers(2).index(2)


def test_named_barriers():
    """A phase ends when its threads have arrived; too many, or too few at the end, are errors."""
    said = []

    def enter(*numbers, threads=256):
        here().program = program
        for number in numbers:
            barriers.barrier_wait(number, threads)
            said.append(number)

    for seed in range(4):
        program = Program(0, 1)
        play(partial(enter, 1, 2, 1), partial(enter, 1, 2, 1), seed=seed)
        assert said == [1, 1, 2, 2, 1, 1]
        said.clear()
    program = Program(0, 1)
    with pytest.raises(RuntimeError, match="256 threads arrive at a barrier of 160"):
        play(*[partial(enter, 1, threads=160)] * 2)
    with pytest.raises(RuntimeError, match=r"amid a phase of named barriers \[3\]"):
        run(partial(barriers.barrier_arrive, 3, 256), 1, [], Schedule(), 1)


def test_deadlock():
    """A deadlock is reported at once, with the role that waits and its line."""
    bar = barrier(1)
    with pytest.raises(DeadlockError, match=r"role 1 in <lambda> \(test_hopper_emulated.py:\d+\)$"):
        play(lambda: None, lambda: barriers.wait(bar, 0))


def test_errors_end_all():
    """An error in one role is raised, and roles that wait end."""
    bar, begun, ended = barrier(1), [], []

    def wait():
        begun.append(wait)
        try:
            barriers.wait(bar, 0)
        finally:
            ended.append(wait)

    for seed in range(4):
        with pytest.raises(ZeroDivisionError):
            play(wait, lambda: 1 / 0, wait, seed=seed)
    assert begun
    assert begun == ended


def test_a_seed_repeats():
    """A seed always gives the same order of events, and other seeds give others."""

    def order(seed):
        said = []

        def role(name):
            for _ in range(4):
                here().pause()
                said.append(name)

        play(*(partial(role, name) for name in "abc"), seed=seed)
        return said

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(8)}) > 4


@pytest.mark.parametrize(("start", "rows"), [(-2, [2, 3]), (0, range(4)), (3, [0, 1]), (7, [])])
def test_loads_come_late(start, rows):
    """A tile is NaN until its barrier has been waited for; outside the tensor it is 0."""
    x = torch.ones(1, 1, 5, 64)[..., :40].bfloat16().contiguous()
    tile, bar = Shared.allocate([1, 1, 4, 64], x.dtype), barrier(1)

    def role():
        form, *lies = TileSpec(4).tiles(x)
        described = Descriptor(form.describe(x, *lies))
        barriers.expect(bar, described.block_type.nbytes)
        tile.outer.zero_()
        tma.load_tile(described, [0, 0, start, 0], bar, tile)
        assert tile.load(None).isnan().all()
        barriers.wait(bar, 0)

    play(role)
    wanted = torch.zeros(1, 1, 4, 64)
    wanted[:, :, list(rows), :40] = 1
    assert torch.equal(tile.own.float(), wanted)
    assert torch.equal(tile.outer.float(), wanted)


@pytest.mark.parametrize("waits", [True, False])
def test_stores_leave_late(waits):
    """A store may read until it is waited for; it sees what was written before a fence."""
    seen = set()

    def role():
        form, *lies = TileSpec(2).tiles(x)
        described = Descriptor(form.describe(x, *lies))
        for n in (1, 2):
            tile.store(torch.full_like(tile.own, n))
            tma.fence_async_shared()
            if n == 1:
                tma.store_tile(described, [0, 0, 1, 0], tile)
                if waits:
                    tma.store_wait(0)
                here().pause()

    for seed in range(8):
        x, tile = torch.zeros(1, 1, 2, 64).half(), Shared.allocate([1, 1, 2, 64], torch.float16)
        play(role, seed=seed)
        assert x[0, 0, 0].sum() == 0
        seen.add(int(x.max()))
    assert seen == ({1} if waits else {1, 2})


@pytest.mark.parametrize("waits", [True, False])
def test_products_read_late(waits):
    """A product may read its operands until it is waited for."""
    seen = set()

    def role():
        a, b = (Shared.allocate([4, 4], torch.float16) for _ in "ab")
        for tile in (a, b):
            tile.store(torch.ones_like(tile.own))
        tma.fence_async_shared()
        product = mma.warpgroup_mma(a, b, None, use_acc=False, is_async=True)
        if waits:
            product = mma.warpgroup_mma_wait(0, [product])
        a.store(torch.zeros_like(a.own))
        tma.fence_async_shared()
        seen.add(int(mma.warpgroup_mma_wait(0, [product]).max()))

    for seed in range(8):
        play(role, seed=seed)
    assert seen == ({4} if waits else {0, 4})


def test_numbers():
    """Integers divide towards zero, as on a GPU, also after further arithmetic."""
    n = language.Number(-7)
    assert (n // 2, n % 2, 7 // language.Number(-2), (n + 1) // 4, 3 - n) == (-3, -1, -3, -1, 10)
    assert language.cdiv(language.Number(7), 2) == 4
