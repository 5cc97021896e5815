"""The Hopper kernels: every config is right on such a GPU; elsewhere, who takes what."""

from __future__ import annotations

import runpy
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch

from flashattn import ops
from flashattn.api import FASTEST_FIRST
from flashattn.kernels import launch
from flashattn.kernels.hopper import backward, backward_fp32, forward, gqa, semaphore
from flashattn.kernels.hopper.config import (
    BACKWARD,
    DETERMINISTIC,
    FORWARD,
    MANY_SHORT,
    SHARED,
    SHORT,
    WIDE,
    BackwardConfig,
    Config,
    WideConfig,
    columns,
    pick,
    pick_backward,
    pick_wide,
)
from flashattn.kernels.hopper.offline import variants
from flashattn.kernels.launch import Like
from flashattn.kernels.portable import backward as portable_backward
from flashattn.kernels.portable import forward as portable_forward
from flashattn.kernels.tiles import block_d
from flashattn.mask import Mask
from flashattn.problem import Problem, check_scale
from flashattn.registry import get
from flashattn.testing.accuracy import Sample, assert_accurate, relative_errors, run
from flashattn.testing.inputs import make_inputs

CONFIGS = sorted({(d, c) for (d, _), of in FORWARD.items() for c in of.values()}, key=str)
BACKWARDS = sorted(
    {(d, MANY_SHORT, False) for d in SHORT}
    | {
        (d, c, table is DETERMINISTIC)
        for table in (BACKWARD, DETERMINISTIC)
        for (d, _), of in table.items()
        for c in of.values()
    },
    key=str,
)
WIDES = sorted({(d, c, True) for (d, _), of in WIDE.items() for c in of.values()}, key=str)
WIDES += [(256, WideConfig(band=3), False)]
SHAPES = {
    "ragged": {"batch": 2, "heads": 4, "kv_heads": 2, "seq_q": 700, "seq_kv": 900},
    "tall": {"batch": 2, "heads": 4, "kv_heads": 2, "seq_q": 900, "seq_kv": 700},
    "many": {"batch": 9, "heads": 8, "seq_q": 512},  # more tiles than programs
    "short": {"heads": 2, "seq_q": 1, "seq_kv": 130},
    "one": {"heads": 2, "seq_q": 70, "seq_kv": 1},
}
MASKS = (False, "top_left", "bottom_right")


def not_here():
    """Return why Hopper's kernels do not run on this machine, or None."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return ops.why_not_hopper(Problem(seq_q=64, head_dim=64, dtype="bfloat16"), device)


on_hopper = pytest.mark.why_not.with_args(not_here)


def call(config, q, k, v, *, causal, scale):
    """Attend with a config."""
    last = Mask.of(causal).over(q.shape[2], k.shape[2]).right
    scale = check_scale(scale, q.shape[3])
    return forward.forward(q, k, v, diagonal=last, scale=scale, config=config)


class Attend(torch.autograd.Function):
    """The kernels with a config of the backward."""

    @staticmethod
    def forward(ctx, q, k, v, causal, scale, how):
        """Attend."""
        ctx.how = how | {
            "diagonal": Mask.of(causal).over(q.shape[2], k.shape[2]).right,
            "scale": scale,
        }
        o, lse = call(None, q, k, v, causal=causal, scale=scale)
        ctx.save_for_backward(q, k, v, o, lse)
        return o, lse

    @staticmethod
    def backward(ctx, grad_o, grad_lse):
        """Launch what is tested."""
        return *backward.backward((grad_o, grad_lse), ctx.saved_tensors, **ctx.how), *[None] * 3


@pytest.mark.parametrize("causal", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("head_dim", "config"), CONFIGS, ids=str)
@on_hopper
def test_every_config(device, head_dim, config, shape, causal):
    """Each config of the table is within the budgets, padded too, in both dtypes."""
    for dtype, d in product(("bfloat16", "float16"), (head_dim, head_dim - 24)):
        problem = Problem(**SHAPES[shape], head_dim=d, causal=causal, dtype=dtype)
        sample = Sample(problem=problem, device=device, grad=False)
        assert_accurate(partial(call, config, causal=causal, scale=d**-0.5), sample)


@pytest.mark.parametrize("causal", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("head_dim", "config", "deterministic"), BACKWARDS + WIDES, ids=str)
@on_hopper
def test_every_backward_config(device, head_dim, config, deterministic, shape, causal):
    """So are the gradients of each config, of o and of lse."""
    for dtype, d in product(("bfloat16", "float16"), (head_dim, head_dim - 24)):
        problem = Problem(**SHAPES[shape], head_dim=d, causal=causal, dtype=dtype)
        how = {"config": config, "deterministic": deterministic}

        def attend(q, k, v, how=how, d=d):
            return Attend.apply(q, k, v, causal, d**-0.5, how)

        assert_accurate(attend, Sample(problem=problem, device=device))


CUTS = {
    "many": {"batch": 2, "heads": 4, "kv_heads": 2, "seq_q": 700, "seq_kv": 900},
    "tall": {"heads": 2, "seq_q": 900, "seq_kv": 700},
    "parts of dk": {"heads": 1, "seq_q": 1500, "seq_kv": 600},
    "full": {"batch": 4, "heads": 16, "seq_q": 1024},
    "a band and more": {"heads": 35, "kv_heads": 35, "seq_q": 300, "seq_kv": 400},
}


@pytest.mark.parametrize("values", ["normal", "extreme", "huge_v", "ties"])
@pytest.mark.parametrize("causal", MASKS)
@pytest.mark.parametrize("shape", CUTS)
@pytest.mark.parametrize("head_dim", [33, 64, 65, 96, 128])
@on_hopper
def test_cut(device, head_dim, shape, causal, values):
    """In fp32 what comes cut in three is within the budgets of fp32, and the same bits."""
    problem = Problem(**CUTS[shape], head_dim=head_dim, causal=causal)
    sample = Sample(problem=problem, device=device, values=values)
    attend = partial(get("hopper"), causal=causal, scale=head_dim**-0.5)
    assert_accurate(attend, sample)
    case = sample.draw()
    runs = [run(attend, case) for _ in range(10)]
    assert all(torch.equal(again[name], x) for again in runs for name, x in runs[0].items())


@pytest.mark.parametrize("causal", MASKS)
@pytest.mark.parametrize("shape", CUTS)
@pytest.mark.parametrize("head_dim", [72, 128])
@on_hopper
def test_cut_in_two(device, head_dim, shape, causal):
    """What comes cut in two is right to 16 bits, where one product of TF32 keeps 11."""
    problem = Problem(**CUTS[shape], head_dim=head_dim, causal=causal)
    case = Sample(problem=problem, device=device).draw()
    how = {"causal": causal, "scale": head_dim**-0.5, "precision": "tf32"}
    # With few scores the forward is one product of TF32, and the gradients follow from its o.
    kept = 16 if problem.heads * problem.seq_q * problem.seq_kv > launch.CUT_FORWARD else 10
    for name, error in relative_errors(partial(get("hopper"), **how), case).items():
        assert 2**-20 < error < 4 * 2 * 2**-kept, name


@on_hopper
def test_what_is_not_cut_is_the_portable_kernels(device, monkeypatch):
    """Other head dims, few scores, and other ways to multiply fp32 are the portable passes'."""
    asked = []
    passes = backward_fp32.portable
    monkeypatch.setattr(
        backward_fp32, "portable", lambda *given: asked.append(given) or passes(*given)
    )
    for head_dim, length, precision, own in (
        (128, 1024, "bf16x6", True),
        (64, 1024, "bf16x6", False),
        (128, 64, "bf16x6", False),
        (128, 1024, "tf32", True),
        (128, 1024, "ieee", False),
    ):
        asked.clear()
        problem = Problem(seq_q=length, head_dim=head_dim)
        q, k, v = make_inputs(problem, device=device)
        o, lse = call(None, q, k, v, causal=False, scale=0.1)
        how = {"diagonal": None, "scale": 0.1, "precision": precision}
        backward.portable_plan(
            (o, None), (q, k, v, o, lse), **how, passes=partial(backward_fp32.passes)
        )
        assert bool(asked) is not own


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@on_hopper
def test_the_same_bits(device, head_dim):
    """Fifty runs give the same bits, whichever program draws which tile."""
    problem = Problem(**SHAPES["many"], head_dim=head_dim, causal=True, dtype="bfloat16")
    inputs = make_inputs(problem, device=device)
    first = call(None, *inputs, causal=True, scale=0.1)
    for _ in range(50):
        again = call(None, *inputs, causal=True, scale=0.1)
        assert all(map(torch.equal, first, again))


@pytest.mark.parametrize("change", ["stride", "address", "expanded", "scale"])
@on_hopper
def test_what_it_cannot_reach_is_the_portable_kernels(device, monkeypatch, change):
    """Tensors that no descriptor can have, and scales that are not positive, are answered too."""
    problem = Problem(heads=2, seq_q=70, head_dim=64, dtype="bfloat16")
    q, k, v = make_inputs(problem, device=device)
    scale = -0.1 if change == "scale" else 0.1
    if change == "stride":
        q = torch.nn.functional.pad(q, (0, 1))[..., :64]
    if change == "address":
        q = torch.nn.functional.pad(q, (8, 0)).flatten()[1 : q.numel() + 1].view_as(q)
    if change == "expanded":
        k = k[:, :1].expand(-1, 2, -1, -1)
    asked = []
    monkeypatch.setattr(
        forward, "portable", lambda *given, **how: asked.append(given) or (torch.empty(0),) * 2
    )
    call(None, q, k, v, causal=False, scale=scale)
    assert len(asked) == 1


def test_takes(device):
    """The kernel takes what has elements that descriptors reach, at a positive scale."""
    x = torch.zeros(1, 2, 8, 64, device=device, dtype=torch.bfloat16)
    assert forward.takes(Like.of(x), scale=0.1)
    assert not forward.takes(Like.of(x), scale=0.0)
    assert not forward.takes(Like.of(x[:, :, :0]), scale=0.1)
    assert not forward.takes(Like.of(x), Like.of(x[..., 1:]), scale=0.1)


def test_many_heads_of_one_short_key_are_planned(device):
    """Keys of which a query head has less than a byte make a band as any others."""
    q = torch.zeros(1, 600, 1, 64, device=device, dtype=torch.bfloat16)
    likes = Like.of(q), *[Like.of(q[:, :1])] * 2
    assert not forward._plan(*likes, None, 0.1, "ieee", FORWARD[64, False][0]).drawn


def test_who_takes_what(device):
    """On another device it says what it needs; on a Hopper GPU what it leaves to others."""
    half = Problem(seq_q=64, head_dim=64, dtype="bfloat16")
    said = get("hopper").why_not(half, torch.device("cpu"))
    assert said == "hopper needs a GPU of compute capability 9.0, an H100 or H200"
    assert FASTEST_FIRST["cuda"][:2] == ("hopper", "triton")
    if get("hopper").why_not(half, device) is None:
        for dtype, head_dim, words in (
            ("float64", 64, "reference take fp64"),
            ("float32", 32, "33 to 128; triton takes others"),
            ("bfloat16", 32, "triton takes smaller ones"),
        ):
            problem = replace(half, dtype=dtype, head_dim=head_dim)
            assert words in get("hopper").why_not(problem, device)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"batch": 16, "heads": 16, "seq_q": 1024, "head_dim": 128}, {}),
        ({"batch": 16, "heads": 16, "seq_q": 1024, "head_dim": 64}, {}),
        ({"heads": 1, "seq_q": 128 * 132, "head_dim": 128}, {}),
        ({"heads": 1, "seq_q": 128 * 131, "head_dim": 128}, {}),
        ({"heads": 1, "seq_q": 128 * 98, "head_dim": 128}, None),
        ({"heads": 8, "seq_q": 2048, "head_dim": 128}, {}),
        ({"heads": 6, "seq_q": 2048, "head_dim": 128}, {"joint_passes": True}),
        ({"heads": 8, "seq_q": 2048, "head_dim": 64}, {}),
        ({"heads": 13, "seq_q": 1024, "head_dim": 64}, {"joint_passes": True}),
        ({"heads": 9, "seq_q": 1024, "head_dim": 64}, {"joint_passes": True}),
        ({"heads": 8, "seq_q": 1024, "head_dim": 64}, None),
        ({"heads": 73, "seq_q": 128, "head_dim": 96}, {"split_keys": True}),
        ({"heads": 72, "seq_q": 128, "head_dim": 96}, None),
        ({"heads": 8, "seq_q": 2048, "head_dim": 128, "causal": True}, {"joint_passes": True}),
        ({"heads": 10, "seq_q": 1024, "head_dim": 128, "causal": True}, None),
        ({"heads": 4, "seq_q": 4096, "head_dim": 64, "causal": True}, {"joint_passes": True}),
        ({"heads": 2, "seq_q": 8192, "head_dim": 64, "causal": True}, {"joint_passes": True}),
        ({"heads": 1, "seq_q": 16384, "head_dim": 64, "causal": True}, None),
        ({"heads": 2, "seq_q": 8192, "head_dim": 128, "causal": True}, {"joint_passes": True}),
        ({"heads": 1, "seq_q": 16384, "head_dim": 128, "causal": True}, None),
        ({"heads": 10, "seq_q": 1024, "head_dim": 64, "causal": True}, {"joint_passes": True}),
        ({"heads": 9, "seq_q": 1024, "head_dim": 64, "causal": True}, None),
        ({"heads": 2, "seq_q": 128 * 132, "head_dim": 64, "causal": True}, {"split_keys": True}),
        ({"heads": 5, "seq_q": 128 * 66, "head_dim": 64, "causal": True}, {}),
        ({"heads": 8, "seq_q": 512, "head_dim": 256}, {}),
        ({"heads": 8, "seq_q": 512, "head_dim": 128}, None),
        ({"heads": 4, "seq_q": 2048, "head_dim": 256, "causal": True}, {}),
        ({"heads": 1, "seq_q": 4096, "head_dim": 256, "causal": True}, {"split_keys": True}),
        ({"heads": 32, "kv_heads": 8, "seq_q": 2048, "head_dim": 128}, {}),
        ({"heads": 32, "kv_heads": 8, "seq_q": 1024, "head_dim": 128}, {}),
        ({"heads": 16, "kv_heads": 8, "seq_q": 512, "head_dim": 128}, None),
        ({"heads": 8, "kv_heads": 1, "seq_q": 128, "head_dim": 128}, {"split_keys": True}),
        ({"heads": 0, "seq_q": 256, "head_dim": 64}, None),
        ({"heads": 16, "kv_heads": 4, "seq_q": 256, "head_dim": 64}, None),
        ({"heads": 16, "kv_heads": 4, "seq_q": 512, "head_dim": 64}, {"split_keys": True}),
        ({"heads": 64, "kv_heads": 8, "seq_q": 512, "head_dim": 64, "causal": True}, {}),
        ({"heads": 1, "seq_q": 1024, "head_dim": 136}, None),
        ({"heads": 1, "seq_q": 1152, "head_dim": 136}, {"split_keys": True}),
        ({"heads": 1, "seq_q": 128 * 132, "head_dim": 128, "causal": True}, {}),
        ({"heads": 1, "seq_q": 128 * 131, "head_dim": 128, "causal": True}, None),
        ({"heads": 1, "seq_q": 128 * 63, "head_dim": 128}, None),
        ({"heads": 1, "seq_q": 64, "seq_kv": 2**20, "head_dim": 128}, None),
        ({"batch": 64, "heads": 32, "kv_heads": 8, "seq_q": 1, "head_dim": 128}, None),  # decoding
    ],
)
def test_where_it_is_the_fastest(monkeypatch, device, shape, options):
    """As measured: ``impl="auto"`` takes it, with the portable forward, or goes on to the next."""
    properties = type("Properties", (), {"multi_processor_count": 132})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert ops.hopper_fastest(Problem(**shape, dtype="bfloat16"), device) == options


@pytest.mark.parametrize(
    ("shape", "own"),
    [
        ({"seq_q": 128 * 132, "causal": True}, True),
        ({"seq_q": 128 * 131, "causal": True}, False),
        ({"heads": 99, "seq_q": 128}, True),
        ({"heads": 98, "seq_q": 128}, False),
        ({"batch": 64, "heads": 32, "seq_q": 1, "seq_kv": 4096}, False),  # decoding
    ],
)
def test_where_its_forward_is_the_fastest_in_fp32(monkeypatch, device, shape, own):
    """Where there are fewer tiles than multiprocessors, the portable forward splits keys."""
    properties = type("Properties", (), {"multi_processor_count": 132})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    options = {} if own else {"split_keys": True}
    assert ops.hopper_fastest(Problem(**shape, head_dim=100), device) == options


@pytest.mark.parametrize(
    ("sizes", "head_dim", "slabs"),
    [
        ((1, 256), 64, 8),  # one head of 32 768 keys
        ((1, 256), 128, 4),
        ((1, 132), 128, 1),  # all run at once, and the first have the most to do
        ((4, 132), 64, 2),
        ((200, 256), 64, 1),  # many heads run at once
    ],
)
def test_slabs(monkeypatch, device, sizes, head_dim, slabs):
    """As measured: a head's programs share so many workspaces that they hardly queue."""
    monkeypatch.setattr(launch, "multiprocessors", lambda _: 132)
    assert semaphore.slabs_for(*sizes, device, head_dim=head_dim) == slabs


@pytest.mark.parametrize(
    ("heads", "kv_heads", "seq", "head_dim", "causal", "count"),
    [
        (32, 32, 1024, 128, False, 1),  # no keys in common
        (8, 1, 2048, 128, False, 8),
        (32, 8, 1024, 128, False, 2),  # with 4, 256 programs would make two rounds
        (32, 8, 2048, 128, False, 1),
        (32, 8, 2048, 128, True, 4),  # programs of few queries start while others are at work
        (48, 8, 2048, 96, True, 3),
        (64, 8, 512, 256, False, 2),
        (32, 8, 2048, 256, True, 1),
    ],
)
def test_shares(monkeypatch, device, heads, kv_heads, seq, head_dim, causal, count):
    """As measured: heads that share keys are divided among as many programs."""
    monkeypatch.setattr(launch, "multiprocessors", lambda _: 132)
    q, k = (Like.of(torch.empty(1, n, seq, head_dim, device=device)) for n in (heads, kv_heads))
    tiles = kv_heads * (-(-seq // (128 if head_dim <= 128 else 64)))
    assert gqa.shares_for(q, k, tiles, causal=causal) == count


def test_kernels_by_name():
    """What splits keys is the portable forward, what joins passes the portable backward."""
    assert ops._launchers("hopper") == (forward, backward)
    assert ops._launchers("split") == (portable_forward, backward)
    assert ops._launchers("joint") == (forward, portable_backward)


@pytest.mark.parametrize(
    ("option", "own"), [("split_keys", "backward"), ("joint_passes", "forward")]
)
@on_hopper
def test_one_of_both_is_portable(device, monkeypatch, option, own):
    """With ``split_keys`` the forward is the portable one, with ``joint_passes`` the backward."""
    problem = Problem(heads=2, seq_q=300, head_dim=64, causal=True, dtype="bfloat16")
    called = []
    for module in (forward, backward):
        name, plan = module.__name__.split(".")[-1], module.plan
        monkeypatch.setattr(
            module,
            "plan",
            lambda *a, plan=plan, name=name, **k: called.append(name) or plan(*a, **k),
        )
    attends = partial(get("hopper"), causal=True, scale=0.1, **{option: True})
    assert_accurate(attends, Sample(problem=problem, device=device, scale=0.1))
    assert called == [own]


def test_configs_fit():
    """Tiles of every config fit the shared memory; those compiled for the counts are all."""
    for head_dim, config, *_ in CONFIGS + BACKWARDS + WIDES:
        assert config.shared(head_dim) <= SHARED - 1024
    compiled = {(v.head_dim, v.config) for v in variants() if v.config is not None}
    slots = {(d, BackwardConfig(slots=config.slots)) for d, config, _ in BACKWARDS}
    assert compiled == {*CONFIGS, *slots, (192, WideConfig()), (256, WideConfig())}


@pytest.mark.parametrize(
    ("heads", "seq_q", "causal", "groups"),
    [
        (16, 2048, False, 2),  # 256 tiles of 128 queries, 176 of 192: two rounds each
        (8, 3072, False, 3),  # 192 and 128: two rounds or one
        (8, 4096, False, 2),
        (4, 6144, False, 3),
        (16, 3072, False, 3),  # three rounds or two, each longer by a third
        (64, 1024, False, 2),  # four or three
        (1, 16384, False, 2),  # one round each
        (40, 512, False, 3),  # however short
        (32, 4096, False, 3),  # 8 rounds: as where there are many
        (33, 4096, True, 2),
        (2, 32768, True, 2),  # 4 rounds: longer than 8192, and few
        (4, 65536, True, 3),
    ],
)
def test_few_tiles_are_counted_in_rounds(heads, seq_q, causal, groups):
    """At D = 64 the larger tiles are taken only where they make fewer rounds, or there are many."""
    assert pick(60, seq_q, causal=causal, heads=heads, multiprocessors=132).groups == groups


def test_tables():
    """Widths between are computed as the next; where there is no config, elsewhere."""
    many = {"heads": 1000, "multiprocessors": 100}
    assert pick(80, 100, causal=True, **many) == FORWARD[96, True][0]
    assert pick(97, 100, causal=True, **many) == FORWARD[128, True][0]
    assert pick(130, 100, causal=False, **many) == FORWARD[192, False][0]
    assert pick(64, 2047, causal=False, **many) == FORWARD[64, False][0]
    assert pick(64, 2048, causal=False, **many) == FORWARD[64, False][2048]
    assert pick(64, 5000, causal=False, **many).groups == 3
    assert pick(32, 5000, causal=True, **many) is None
    assert pick(32, 5000, causal=False, heads=1, multiprocessors=100) is None
    assert pick(128, 5000, causal=False, heads=1, multiprocessors=100) == FORWARD[128, False][0]
    of = partial(pick_backward, causal=True, heads=95, multiprocessors=100)
    assert of(40, 2049, deterministic=False) == BACKWARD[64, True][0]
    assert of(40, 2048, deterministic=False) == MANY_SHORT
    assert of(40, 2048, deterministic=False, heads=94) == BACKWARD[64, True][0]
    assert of(128, 1025, deterministic=False) == BACKWARD[128, True][0]
    assert of(64, 100, deterministic=False, causal=False) == BACKWARD[64, False][0]
    assert of(128, 100, deterministic=True) == DETERMINISTIC[128, True][0]
    assert of(256, 100, deterministic=False) is None
    assert pick_wide(200, 100, causal=True) == WIDE[256, True][0]
    assert pick_wide(128, 100, causal=True) is None


@pytest.mark.parametrize("head_dim", [33, 64, 65, 96, 97, 128, 129, 192, 193, 256])
def test_columns(head_dim):
    """A tile's columns that are multiplied are all that a head has, and fewer than 64 more."""
    first, rest = columns(head_dim)
    assert rest in (0, first // 2)
    assert first + rest <= block_d(head_dim)
    assert head_dim <= first + rest < head_dim + 64


def test_programs_that_wait_run_together(device):
    """Persistent programs wait for one another: the launch needs all of them at once."""
    x = Like.of(torch.zeros(1, 2, 256, 64, device=device, dtype=torch.bfloat16))
    for persistent in (False, True):
        config = BackwardConfig(persistent=persistent)
        plan = backward._narrow(x, x, x, x, None, 0.1, True, config)
        assert plan.fold._options["launch_cooperative_grid"] is persistent


def test_what_the_tables_hold_was_searched():
    """The search has every config of the tables among what it times."""
    search = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "tune_hopper.py"))
    tables = [("forward", FORWARD, True), ("backward", BACKWARD, False)]
    tables += [("backward", DETERMINISTIC, True), ("backward", WIDE, True)]
    for direction, table, deterministic in tables:
        for (head_dim, causal), configs in table.items():
            found = search["ways"](direction, head_dim, causal=causal)
            given = {search["Way"](config, deterministic) for config in configs.values()}
            assert given <= set(found)
            assert len(set(map(str, found))) == len(found)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_kv": 96}, "block_kv: wanted a power of two from 64 on, got 96"),
        ({"slots": 1}, "slots: wanted 2 at least, got 1"),
        ({"groups": 4}, "groups: wanted 2 or 3, got 4"),
        ({"registers": 250}, "registers: wanted a multiple of 8 from 24 to 240, got 250"),
    ],
)
def test_bad_configs(change, words):
    """A config that no kernel can have is an error that names what was wanted."""
    with pytest.raises(ValueError, match=words):
        Config(**change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"slots": 1}, "slots: wanted 2 at least, got 1"),
        ({"band": 0}, "band: wanted 1 at least, got 0"),
        ({"apart": 0}, "apart: wanted 1 at least, got 0"),
    ],
)
def test_bad_backward_configs(change, words):
    """So for the backward."""
    with pytest.raises(ValueError, match=words):
        BackwardConfig(**change)


def test_bad_wide_config():
    """So for the backward of wide heads."""
    with pytest.raises(ValueError, match="band: wanted 1 at least, got 0"):
        WideConfig(band=0)
