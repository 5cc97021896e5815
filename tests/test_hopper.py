"""The Hopper kernels: every config is accurate on a Hopper GPU; plans are tested anywhere."""

import runpy
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashattn import api, attention, explain, gpus, registry
from flashattn.api import FASTEST_FIRST
from flashattn.checks import check_scale
from flashattn.kernels import execute
from flashattn.kernels.hopper import backward_fp32, steps
from flashattn.kernels.hopper.offline import variants
from flashattn.kernels.hopper.score import tanh_approx
from flashattn.mask import Mask
from flashattn.plan import hopper
from flashattn.plan.choose import choose, choose_backward, choose_forward
from flashattn.plan.gpu import CARDS
from flashattn.plan.precision import input_precision
from flashattn.plan.spec import Options, TensorSpec
from flashattn.plan.splits import dq_accumulators, gqa_splits
from flashattn.plan.support import why_not_hopper_pass, why_not_tma
from flashattn.plan.tables.hopper import (
    BACKWARD,
    BACKWARD_D256,
    DETERMINISTIC,
    FORWARD,
    FP32_BACKWARD,
    MANY_SHORT_HEADS,
    NARROW_FORWARD,
    SHORT_HEADS,
    WIDEST_OF_NARROW,
)
from flashattn.plan.tile import (
    NARROW_VALUES,
    HopperBackwardTile,
    HopperD256Tile,
    HopperTile,
    block_d,
    head_dim_split,
)
from flashattn.problem import Problem
from flashattn.registry import get
from flashattn.testing.accuracy import Sample, assert_accurate, relative_errors, run
from flashattn.testing.inputs import GRAD_LAYOUTS, LAYOUTS, make_inputs

SHARED = 227 << 10  # bytes for a CTA
H200 = CARDS["H200"]
CONFIGS = sorted({(d, c) for (d, _), of in FORWARD.items() for c in of.values()}, key=str)
BACKWARDS = sorted(
    {(d, MANY_SHORT_HEADS, False) for d in SHORT_HEADS}
    | {
        (d, c, table is DETERMINISTIC)
        for table in (BACKWARD, DETERMINISTIC)
        for (d, _), of in table.items()
        for c in of.values()
    },
    key=str,
)
WIDES = sorted({(d, c, True) for (d, _), of in BACKWARD_D256.items() for c in of.values()}, key=str)
WIDES += [(256, HopperD256Tile(section=3), False)]
SHAPES = {
    "ragged": {"batch": 2, "heads": 4, "kv_heads": 2, "seq_q": 700, "seq_kv": 900},
    "tall": {"batch": 2, "heads": 4, "kv_heads": 2, "seq_q": 900, "seq_kv": 700},
    "many": {"batch": 9, "heads": 8, "seq_q": 512},  # more tiles than CTAs
    "short": {"heads": 2, "seq_q": 1, "seq_kv": 130},
    "one": {"heads": 2, "seq_q": 70, "seq_kv": 1},
}
MASKS = (False, "top_left", "bottom_right")
HALF = ("bfloat16", "float16")
WIDTHS = (64, 96, 128, 192, 256)
KINDS = ("causal", "window70+30", "full")  # of masks


def alternately(options, *positions):
    """Return one of two options, so that each meets every value of every other parameter.

    A kernel takes seconds to compile, and few bugs need three parameters at once.
    """
    return options[sum(positions) % 2]


def not_here():
    """Return why Hopper's kernels do not run on this machine, or None."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return gpus.why_not_hopper(Problem(seq_q=64, head_dim=64, dtype="bfloat16"), device)


on_hopper = pytest.mark.why_not.with_args(not_here)


def call(config, q, k, v, *, causal, scale):
    """Run the forward with a config."""
    last = Mask.of(causal).over(q.shape[2], k.shape[2]).right
    scale = check_scale(scale, q.shape[3])
    return execute.forward(q, k, v, right=last, scale=scale, family="hopper", tile=config)


class Attend(torch.autograd.Function):
    """Attention with a config for the backward."""

    @staticmethod
    def forward(ctx, q, k, v, causal, scale, how):
        """Run the forward that the plan chooses."""
        ctx.how = how | {
            "family": "hopper",
            "right": Mask.of(causal).over(q.shape[2], k.shape[2]).right,
            "scale": scale,
        }
        o, lse = call(None, q, k, v, causal=causal, scale=scale)
        ctx.save_for_backward(q, k, v, o, lse)
        return o, lse

    @staticmethod
    def backward(ctx, grad_o, grad_lse):
        """Run the backward with the config that is tested."""
        return *execute.backward((grad_o, grad_lse), ctx.saved_tensors, **ctx.how), *[None] * 3


def verify(attend, sample):
    """Hold results to their budgets, and those of a second run to the same bits."""
    assert_accurate(attend, sample)
    one, other = run(attend, sample.draw()), run(attend, sample.draw())
    assert all(torch.equal(other[name], x) for name, x in one.items())


def masked(mask, dtype, **facts):
    """Return a problem of two batches with a mask; except in bf16, two heads share keys."""
    asked, shared = Mask.parse(mask), 1 if dtype == "bfloat16" else 2
    sizes = {"batch": 2, "heads": 4, "kv_heads": 4 // shared, "seq_q": 700, "seq_kv": 900}
    return Problem(**(sizes | facts), causal=asked.causal, window=asked.window, dtype=dtype)


def half_of(head_dim, mask):
    """Return a dtype for a width and a mask, so that each width and each mask meets both."""
    return alternately(HALF, WIDTHS.index(head_dim), mask in (False, "full"))


@pytest.mark.parametrize("causal", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("head_dim", "config"), CONFIGS, ids=str)
@on_hopper
def test_every_config(device, head_dim, config, shape, causal):
    """Each config of the table is within the budgets, also with padded columns."""
    d = head_dim - 24 if shape in ("many", "one") else head_dim
    dtype = half_of(head_dim, causal)
    problem = Problem(**SHAPES[shape], head_dim=d, causal=causal, dtype=dtype)
    sample = Sample(problem=problem, device=device, grad=False)
    assert_accurate(partial(call, config, causal=causal, scale=d**-0.5), sample)


@pytest.mark.drawn("head_dim", "config", "deterministic")
@pytest.mark.parametrize("causal", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("head_dim", "config", "deterministic"), BACKWARDS + WIDES, ids=str)
@on_hopper
def test_every_backward_config(device, head_dim, config, deterministic, shape, causal):
    """Each backward config of the tables is within the budgets, also with padded columns."""
    d = head_dim - 24 if shape in ("many", "one") else head_dim
    dtype = half_of(head_dim, causal)
    problem = Problem(**SHAPES[shape], head_dim=d, causal=causal, dtype=dtype)
    how = {"tile": config, "deterministic": deterministic}

    def attend(q, k, v):
        return Attend.apply(q, k, v, causal, d**-0.5, how)

    assert_accurate(attend, Sample(problem=problem, device=device))


WINDOWS = [(70, 0), (300, 33), (129, None), (None, 40), (0, 0), (63, 500)]


@pytest.mark.drawn("head_dim")
@pytest.mark.parametrize("corner", [False, "bottom_right"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("shape", ["ragged", "tall", "short", "one"])
@pytest.mark.parametrize("head_dim", WIDTHS)
@on_hopper
def test_windows(device, head_dim, shape, window, corner):
    """Windows are within the budgets in any order of dQ; deterministic bits repeat."""
    window = window if corner is False else (window[0], None)
    asked = Problem(**SHAPES[shape], head_dim=head_dim, window=window, causal=corner)
    bounded = [side is None for side in (asked.band.left, asked.band.right)]
    half = alternately(HALF, WIDTHS.index(head_dim), *bounded)
    full = head_dim <= 128 and shape in ("ragged", "tall") and half == "bfloat16"
    for dtype in (half, *["float32"] * full):
        problem = replace(asked, dtype=dtype)
        sample = Sample(problem=problem, device=device)
        verify(windowed(problem, deterministic=True), sample)
        if alternately((True, False), WIDTHS.index(head_dim), bounded[0]):
            assert_accurate(windowed(problem, deterministic=False), sample)


@pytest.mark.drawn("value_dim")
@pytest.mark.parametrize("mask", ["causal", "window70+30", "full"])
@pytest.mark.parametrize("value_dim", [40, 64, 128])
@pytest.mark.parametrize("head_dim", [136, 192])
@on_hopper
def test_narrow_values(device, head_dim, value_dim, mask):
    """Values narrower than keys, with sinks, are within the budgets; a second run is equal."""
    widths = {"head_dim": head_dim, "value_dim": value_dim}
    dtype = half_of(192, mask)
    cap = alternately((None, 5.0), KINDS.index(mask), head_dim == 192)
    problem = masked(mask, dtype, **widths, softcap=cap, sink=True)
    attend = partial(get("hopper"), **problem.keywords, scale=head_dim**-0.5)
    verify(attend, Sample(problem=problem, device=device))


DOCUMENTS = {
    "packed": ((300, 300), (0, 0), (11, 11), (384, 384), (128, 128)),
    "uneven": ((200, 700), (90, 0), (0, 60), (1, 1), (500, 64)),
    "short": ((16, 16),) * 50,
    "one": ((900, 900),),
}


@pytest.mark.drawn("head_dim")
@pytest.mark.parametrize("mask", ["causal", "causal_br", "window70+30", "full"])
@pytest.mark.parametrize("packed", DOCUMENTS)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@on_hopper
def test_documents(device, head_dim, packed, mask):
    """Packed documents, with rows after the last, are within the budgets."""
    sizes = {"seq_q": 900, "seq_kv": 1000, "head_dim": head_dim}
    problem = masked(mask, half_of(head_dim, mask), **sizes, documents=DOCUMENTS[packed])
    sample = Sample(problem=problem, device=device)
    attend = partial(get("hopper"), **problem.keywords, scale=head_dim**-0.5)
    verify(partial(attend, deterministic=True), sample)
    assert_accurate(partial(attend, deterministic=False), sample)


@pytest.mark.drawn("head_dim")
@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 168, 256])
@on_hopper
def test_what_is_in_no_document(device, head_dim, sink, mask):
    """Keys that no query sees and queries that see none, even NaN, have no effect or gradient."""
    documents = (70, 0), (0, 200), (300, 400), (0, 150), (200, 0), (280, 130)
    sizes = {"seq_q": 900, "seq_kv": 1000, "head_dim": head_dim, "documents": documents}
    problem = masked(mask, half_of(128, mask), **sizes, sink=sink)
    attend = partial(get("hopper"), **problem.keywords, scale=head_dim**-0.5, deterministic=True)
    case = Sample(problem=problem, device=device).draw()
    plain, changed = (run(attend, case.with_hidden(value)) for value in (0.0, torch.nan))
    assert all(torch.equal(plain[name], x) for name, x in changed.items())
    assert all(x.isfinite().all() for name, x in changed.items() if name != "lse")


@pytest.mark.drawn("head_dim")
@pytest.mark.parametrize("values", ["normal", "extreme", "negative"])
@pytest.mark.parametrize("mask", KINDS)
@pytest.mark.parametrize("cap", [0.7, 5.0, 50.0])
@pytest.mark.parametrize("head_dim", WIDTHS)
@on_hopper
def test_softcap(device, head_dim, cap, mask, values):
    """Capped scores and their gradients are within the budgets; a second run is equal."""
    problem = masked(mask, half_of(head_dim, mask), head_dim=head_dim, softcap=cap)
    attend = partial(get("hopper"), **problem.keywords, scale=head_dim**-0.5)
    verify(attend, Sample(problem=problem, device=device, values=values))


@pytest.mark.drawn("head_dim")
@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("head_dim", [64, 192, 256])
@on_hopper
def test_slopes(device, head_dim, mask):
    """Scores with ALiBi are within the budgets; a second run is equal."""
    problem = masked(mask, half_of(head_dim, mask), head_dim=head_dim, alibi=True)
    attend = partial(get("hopper"), **problem.keywords, scale=head_dim**-0.5)
    verify(attend, Sample(problem=problem, device=device))


@pytest.mark.drawn("head_dim")
@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("head_dim", WIDTHS)
@on_hopper
def test_biases(device, head_dim, mask):
    """Biases by matrix or distance, in any dtype and layout, are accurate, and the bits repeat."""
    bias = alternately(("bhts", "1hr"), WIDTHS.index(head_dim), mask == "full")
    problem = masked(mask, half_of(head_dim, mask), head_dim=head_dim, bias=bias)
    attend = partial(get("hopper"), **problem.keywords, scale=head_dim**-0.5)
    # Two seeds share a dtype of the bias, contiguous and transposed; each kind meets both dtypes.
    first = 2 * (WIDTHS.index(head_dim) // 2 + (mask == "full"))
    for seed in (first, first + 1):
        verify(attend, Sample(problem=problem, device=device, grad=head_dim <= 128, seed=seed))


@pytest.mark.parametrize(("seq_kv", "softcap"), [(300, None), (304, None), (304, 5.0)])
@pytest.mark.parametrize("mask", ["causal", "full"])
@on_hopper
def test_a_learned_bias(device, mask, seq_kv, softcap):
    """TMA stores dbias where rows and scores allow it; elsewhere "auto" is portable."""
    how = {"heads": 120, "seq_q": 300, "seq_kv": seq_kv, "dtype": "bfloat16", "bias": "1hts"}
    problem = Problem(**how, head_dim=128, causal=mask == "causal", softcap=softcap)
    given, stored = specs(problem), seq_kv == 304 and not softcap
    auto, asked = (choose(problem, given, H200, family=x).backward for x in ("auto", "hopper"))
    assert (auto.kernel, asked.kernel) == ("sm90" if stored else "portable", "sm90")
    assert (asked.dbias is None) == stored
    attend = partial(get("hopper"), **problem.keywords, scale=128**-0.5)
    verify(attend, Sample(problem=problem, device=device))


@pytest.mark.drawn("head_dim")
@pytest.mark.parametrize("mask", [*KINDS, "causal_br"])
@pytest.mark.parametrize("head_dim", WIDTHS)
@on_hopper
def test_sinks(device, head_dim, mask):
    """Sinks and their gradients are within the budgets, with packed documents and without."""
    packed = alternately((None, "uneven"), WIDTHS.index(head_dim), mask in ("causal", "full"))
    facts = {"documents": packed and DOCUMENTS[packed], "sink": True}
    full = ("float32",) if head_dim == 96 and packed is None else ()
    for dtype in (half_of(head_dim, mask), *full):
        problem = masked(mask, dtype, seq_q=1000, head_dim=head_dim, **facts)
        attend = partial(get("hopper"), **problem.keywords, scale=head_dim**-0.5)
        verify(attend, Sample(problem=problem, device=device))


@gluon.jit
def tanh_kernel(x, y):
    """Write tanh_approx of 128 numbers."""
    at = gl.program_id(0) * 128 + gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(y + at, tanh_approx(gl.load(x + at)))


@on_hopper
def test_tanh_is_as_it_is_emulated(device):
    """The GPU's tanh has a relative error of at most 2^-16, and is 1 from 10 on."""
    x = torch.cat([torch.logspace(-30, 4, 1 << 20, base=2.0), torch.tensor([10.0, 1e9, torch.inf])])
    x = torch.cat([x, -x, torch.zeros(128 - 2 * x.numel() % 128)]).to(device)
    y = torch.empty_like(x)
    tanh_kernel[(x.numel() // 128,)](x, y, num_warps=4)
    exact = x.double().tanh()
    assert ((y - exact).abs() <= 2**-16 * exact.abs()).all()
    assert torch.equal(y[x.abs() >= 10], x[x.abs() >= 10].sign())


def windowed(problem, *, deterministic):
    """Return attention by Hopper's kernels for a problem with any mask."""
    scale = check_scale(None, problem.head_dim)
    precision = input_precision("auto", problem.torch_dtype)
    band = problem.band
    options = Options(band.right, scale, precision, "hopper", deterministic, band.left)

    class Windowed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            o, lse = execute.prepare_forward(q, k, v, options)(q, k, v)
            ctx.save_for_backward(q, k, v, o, lse)
            return o, lse

        @staticmethod
        def backward(ctx, *grads):
            q, k, v, o, lse = ctx.saved_tensors
            launched = execute.prepare_backward(grads, ctx.saved_tensors, options)
            return launched(q, k, v, grads[0], o, lse, grads[1])

    return Windowed.apply


CUTS = {
    "many": {"batch": 2, "heads": 4, "kv_heads": 2, "seq_q": 700, "seq_kv": 900},
    "tall": {"heads": 2, "seq_q": 900, "seq_kv": 700},
    "parts of dk": {"heads": 1, "seq_q": 1500, "seq_kv": 600},
    "full": {"batch": 4, "heads": 16, "seq_q": 1024},
    "a band and more": {"heads": 35, "kv_heads": 35, "seq_q": 300, "seq_kv": 400},
}


@pytest.mark.drawn("head_dim")
@pytest.mark.parametrize("values", ["normal", "extreme", "huge_v", "ties"])
@pytest.mark.parametrize("causal", MASKS)
@pytest.mark.parametrize("shape", CUTS)
@pytest.mark.parametrize("head_dim", [33, 64, 65, 96, 128])
@on_hopper
def test_cut(device, head_dim, shape, causal, values):
    """Decomposed into three bf16 terms, fp32 is within its budgets, and the bits repeat."""
    problem = Problem(**CUTS[shape], head_dim=head_dim, causal=causal)
    sample = Sample(problem=problem, device=device, values=values)
    attend = partial(get("hopper"), causal=causal, scale=head_dim**-0.5)
    assert_accurate(attend, sample)
    case = sample.draw()
    runs = [run(attend, case) for _ in range(10)]
    assert all(torch.equal(again[name], x) for again in runs for name, x in runs[0].items())


@pytest.mark.drawn("head_dim")
@pytest.mark.parametrize("causal", MASKS)
@pytest.mark.parametrize("shape", CUTS)
@pytest.mark.parametrize("head_dim", [72, 128])
@on_hopper
def test_cut_in_two(device, head_dim, shape, causal):
    """Decomposed into two bf16 terms, fp32 is right to 16 bits; one TF32 product keeps 11."""
    problem = Problem(**CUTS[shape], head_dim=head_dim, causal=causal)
    case = Sample(problem=problem, device=device).draw()
    how = {"causal": causal, "scale": head_dim**-0.5, "precision": "tf32"}
    for name, error in relative_errors(partial(get("hopper"), **how), case).items():
        assert error < 4 * 2 * 2**-16, name
        assert name == "lse" or error > 2**-20, name  # errors of two terms average out in lse


def specs(problem, **how):
    """Return the specs of q, k and v."""
    return [TensorSpec.of(x) for x in make_inputs(problem, **how)]


def of_backward(q, k):
    """Return the specs of a backward's q, k, v, o, dO and lse, for one batch."""
    _, heads, rows, _ = q.shape
    strides = heads * rows, rows, 1
    lse = q._replace(shape=q.shape[:3], strides=strides, dtype=torch.float32)
    return q, k, k, q, q, lse


@pytest.mark.parametrize(
    ("head_dim", "length", "precision", "auto", "refused"),
    [
        (128, 1024, "bf16x6", "sm90_fp32", None),
        (64, 1024, "bf16x6", "portable", None),
        (128, 64, "bf16x6", "portable", None),
        (128, 1024, "tf32", "sm90_fp32", None),
        (128, 1024, "ieee", "portable", "hopper: fp32 is not decomposed"),
    ],
)
def test_what_is_decomposed(head_dim, length, precision, auto, refused):
    """Few scores or columns are decomposed only for "hopper"; other precisions never are."""
    q, k, _ = specs(Problem(seq_q=length, head_dim=head_dim))
    given, options = of_backward(q, k), Options(None, 0.1, precision, "auto")
    assert choose_backward(given, H200, options).kernel == auto
    options = options._replace(family="hopper")
    if refused is None:
        assert choose_backward(given, H200, options).kernel == "sm90_fp32"
        return
    with pytest.raises(ValueError, match=refused):
        choose_backward(given, H200, options)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@on_hopper
def test_the_same_bits(device, head_dim):
    """Fifty runs give the same bits, whichever CTA takes which tile."""
    problem = Problem(**SHAPES["many"], head_dim=head_dim, causal=True, dtype="bfloat16")
    inputs = make_inputs(problem, device=device)
    first = call(None, *inputs, causal=True, scale=0.1)
    for _ in range(50):
        again = call(None, *inputs, causal=True, scale=0.1)
        assert all(map(torch.equal, first, again))


@pytest.mark.parametrize("passes", ["forward", "backward"])
def test_what_is_written_must_be_reached_too(passes):
    """TMA can load padded rows of 65 columns, but cannot store the dense ones of a result."""
    problem = Problem(heads=2, seq_q=70, head_dim=65, dtype="bfloat16")
    given, options = specs(problem, layout="pitched"), Options(None, 0.1, family="hopper")
    assert all(x.tma_compatible for x in given)
    chosen = {
        "forward": partial(choose_forward, given),
        "backward": partial(choose_backward, of_backward(*given[:2])),
    }
    with pytest.raises(ValueError, match="hopper: TMA cannot store a result"):
        chosen[passes](H200, options)
    assert chosen[passes](H200, options._replace(family="auto")).kernel == "portable"


NOT_DENSE, UNREACHED = {"strided"}, {"misaligned", "expanded", "expanded_batch"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_it_cannot_reach_is_copied(layout):
    """What TMA cannot address is copied for "hopper"; "auto" copies only what is not dense."""
    problem = Problem(batch=2, heads=2, seq_q=70, head_dim=72, dtype="bfloat16")
    given = specs(problem, layout=layout)
    for family, copied in (("auto", NOT_DENSE), ("hopper", NOT_DENSE | UNREACHED)):
        plan = choose_forward(given, H200, Options(None, 0.1, family=family))
        assert plan.kernel == ("sm90" if family == "hopper" else "portable")
        assert plan.copies == (("q", "k", "v") if layout in copied else ())


@pytest.mark.parametrize("scale", [-0.1, 0.0, 2.0**-65])
def test_scales_that_it_refuses(scale):
    """A scale that is not positive, or tiny, is an error for "hopper", and portable for "auto"."""
    inputs = make_inputs(Problem(heads=40, seq_q=4096, head_dim=64, dtype="bfloat16"))
    how = {"scale": scale, "gpu": "H200"}
    with pytest.raises(ValueError, match="hopper: the scale is"):
        explain(*inputs, **how, impl="hopper")
    plan = explain(*inputs, **how)
    assert (plan.forward.kernel, plan.backward.kernel) == ("portable", "portable")
    assert explain(*inputs, **how | {"scale": 2.0**-64}).forward.kernel == "sm90"


def test_gradients_that_it_refuses(monkeypatch):
    """If Hopper has only a forward, gradients are an error for "hopper"; "auto" takes triton."""
    monkeypatch.setattr(gpus, "gpu_of", lambda _: H200)
    problem = Problem(heads=40, seq_q=4096, head_dim=192, dtype="bfloat16", bias="1hts")
    impl, cuda = get("hopper"), torch.device("cuda")
    assert impl.why_not(problem, cuda) is None
    assert "beyond 128 columns adds no bias" in impl.why_not(problem, cuda, grad=True)
    assert api._choose("auto", problem, cuda, grad=True, lse=True) == (
        get("triton"),
        {"family": "auto"},
    )


@on_hopper
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_wide_rows(device, layout):
    """Inputs and gradients in any layout are within the budgets."""
    problem = Problem(heads=2, seq_q=300, head_dim=72, causal=True, dtype="bfloat16")
    grad_layout = layout if layout in GRAD_LAYOUTS else "contiguous"
    sample = Sample(problem=problem, device=device, layout=layout, grad_layout=grad_layout)
    assert_accurate(partial(get("hopper"), causal=True, scale=72**-0.5), sample)


def test_why_not_tma():
    """TMA takes tensors that have elements and that descriptors reach, at a positive scale."""
    x = torch.zeros(1, 2, 8, 64, dtype=torch.bfloat16)
    assert why_not_tma(TensorSpec.of(x), scale=0.1) is None
    assert why_not_tma(TensorSpec.of(x), scale=0.0)
    assert why_not_tma(TensorSpec.of(x[:, :, :0]), scale=0.1)
    assert why_not_tma(TensorSpec.of(x), TensorSpec.of(x[..., 1:]), scale=0.1)


def test_many_heads_of_one_short_key_are_planned():
    """Heads are planned even if each has a share of less than a byte of the keys."""
    q = torch.zeros(1, 600, 1, 64, dtype=torch.bfloat16)
    given = TensorSpec.of(q), *[TensorSpec.of(q[:, :1])] * 2
    options = Options(None, 0.1, family="hopper")
    plan = choose_forward(given, H200, options, tile=FORWARD[64, False][0])
    assert plan.kernel == "sm90"
    assert not plan.scheduler.dynamic


def test_who_takes_what(device):
    """On other devices the reason names the GPU; on Hopper it names who takes the problem."""
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


BOTH, NEITHER = (True, True), (False, False)
FORWARD_ONLY, BACKWARD_ONLY = (True, False), (False, True)


def taken(problem):
    """Return whether Hopper's kernels are taken for the forward, and for the backward."""
    size = torch.Size((problem.batch, problem.heads, problem.seq_q, problem.head_dim))
    keys = torch.Size((problem.batch, problem.kv_heads, problem.seq_kv, problem.head_dim))
    q = TensorSpec(size, (), problem.torch_dtype, torch.device("cuda"), 0)
    given = q, q._replace(shape=keys), H200
    options = Options(problem.band.right, 1.0, left=problem.band.left)
    backward, _ = hopper.backward_pays(*given, options)
    return hopper.forward_pays(*given, options)[0], backward


@pytest.mark.parametrize(
    ("shape", "passes"),
    [
        ({"batch": 16, "heads": 16, "seq_q": 1024, "head_dim": 128}, BOTH),
        ({"batch": 16, "heads": 16, "seq_q": 1024, "head_dim": 64}, BOTH),
        ({"heads": 1, "seq_q": 128 * 132, "head_dim": 128}, BOTH),
        ({"heads": 1, "seq_q": 128 * 131, "head_dim": 128}, BOTH),
        ({"heads": 1, "seq_q": 128 * 98, "head_dim": 128}, FORWARD_ONLY),
        ({"heads": 1, "seq_q": 128 * 79, "head_dim": 128}, NEITHER),
        ({"heads": 8, "seq_q": 2048, "head_dim": 128}, BOTH),
        ({"heads": 6, "seq_q": 2048, "head_dim": 128}, FORWARD_ONLY),
        ({"heads": 8, "seq_q": 2048, "head_dim": 64}, BOTH),
        ({"heads": 13, "seq_q": 1024, "head_dim": 64}, FORWARD_ONLY),
        ({"heads": 9, "seq_q": 1024, "head_dim": 64}, FORWARD_ONLY),
        ({"heads": 8, "seq_q": 1024, "head_dim": 64}, NEITHER),
        ({"heads": 73, "seq_q": 128, "head_dim": 96}, BACKWARD_ONLY),
        ({"heads": 72, "seq_q": 128, "head_dim": 96}, NEITHER),
        ({"heads": 8, "seq_q": 2048, "head_dim": 128, "causal": True}, BOTH),
        ({"heads": 10, "seq_q": 1024, "head_dim": 128, "causal": True}, NEITHER),
        ({"heads": 4, "seq_q": 4096, "head_dim": 64, "causal": True}, BOTH),
        ({"heads": 2, "seq_q": 8192, "head_dim": 64, "causal": True}, BOTH),
        ({"heads": 1, "seq_q": 16384, "head_dim": 64, "causal": True}, BACKWARD_ONLY),
        ({"heads": 16, "seq_q": 16384, "head_dim": 64, "window": (255, 0)}, NEITHER),
        ({"heads": 16, "seq_q": 16384, "head_dim": 64, "window": (128, 128)}, BACKWARD_ONLY),
        ({"heads": 16, "seq_q": 16384, "head_dim": 64, "window": (511, 0)}, BACKWARD_ONLY),
        (
            {"heads": 64, "kv_heads": 16, "seq_q": 8192, "head_dim": 64, "window": (63, 0)},
            NEITHER,
        ),
        (
            {"heads": 64, "kv_heads": 8, "seq_q": 8192, "head_dim": 64, "window": (127, 0)},
            BACKWARD_ONLY,
        ),
        ({"heads": 16, "seq_q": 16384, "head_dim": 64, "window": (512, 0)}, BOTH),
        ({"heads": 16, "seq_q": 16384, "head_dim": 96, "window": (127, 0)}, BACKWARD_ONLY),
        ({"heads": 16, "seq_q": 16384, "head_dim": 128, "window": (128, 0)}, BOTH),
        ({"heads": 16, "seq_q": 16384, "head_dim": 64, "window": (9, None)}, BOTH),
        ({"heads": 2, "seq_q": 8192, "head_dim": 128, "causal": True}, BOTH),
        ({"heads": 1, "seq_q": 16384, "head_dim": 128, "causal": True}, BACKWARD_ONLY),
        ({"heads": 10, "seq_q": 1024, "head_dim": 64, "causal": True}, FORWARD_ONLY),
        ({"heads": 9, "seq_q": 1024, "head_dim": 64, "causal": True}, NEITHER),
        ({"heads": 1, "seq_q": 128 * 132, "head_dim": 64, "causal": True}, BOTH),
        ({"heads": 1, "seq_q": 128 * 125, "head_dim": 64, "causal": True}, NEITHER),
        ({"heads": 5, "seq_q": 128 * 66, "head_dim": 64, "causal": True}, BOTH),
        ({"heads": 8, "seq_q": 512, "head_dim": 256}, BOTH),
        ({"heads": 8, "seq_q": 512, "head_dim": 128}, NEITHER),
        ({"heads": 4, "seq_q": 2048, "head_dim": 256, "causal": True}, BOTH),
        ({"heads": 1, "seq_q": 4096, "head_dim": 256, "causal": True}, BACKWARD_ONLY),
        ({"heads": 32, "kv_heads": 8, "seq_q": 2048, "head_dim": 128}, BOTH),
        ({"heads": 32, "kv_heads": 8, "seq_q": 1024, "head_dim": 128}, BOTH),
        ({"heads": 16, "kv_heads": 8, "seq_q": 512, "head_dim": 128}, NEITHER),
        ({"heads": 8, "kv_heads": 1, "seq_q": 128, "head_dim": 128}, BACKWARD_ONLY),
        ({"heads": 0, "seq_q": 256, "head_dim": 64}, NEITHER),
        ({"heads": 16, "kv_heads": 4, "seq_q": 256, "head_dim": 64}, NEITHER),
        ({"heads": 16, "kv_heads": 4, "seq_q": 512, "head_dim": 64}, BACKWARD_ONLY),
        ({"heads": 64, "kv_heads": 8, "seq_q": 512, "head_dim": 64, "causal": True}, BOTH),
        ({"heads": 1, "seq_q": 1024, "head_dim": 136}, NEITHER),
        ({"heads": 1, "seq_q": 1152, "head_dim": 136}, BACKWARD_ONLY),
        ({"heads": 1, "seq_q": 128 * 132, "head_dim": 128, "causal": True}, BOTH),
        ({"heads": 1, "seq_q": 128 * 125, "head_dim": 128, "causal": True}, NEITHER),
        ({"heads": 1, "seq_q": 128 * 125, "head_dim": 128, "window": (99, None)}, NEITHER),
        ({"heads": 1, "seq_q": 128 * 63, "head_dim": 128}, NEITHER),
        ({"heads": 1, "seq_q": 64, "seq_kv": 2**20, "head_dim": 128}, NEITHER),
        (
            {"batch": 64, "heads": 32, "kv_heads": 8, "seq_q": 1, "head_dim": 128},
            NEITHER,
        ),  # decoding
    ],
)
def test_where_it_is_the_fastest(shape, passes):
    """``impl="auto"`` takes, for each pass, the kernels that were measured to be faster."""
    problem = Problem(**shape, dtype="bfloat16")
    assert taken(problem) == passes


def test_short_windows_in_fp32():
    """In fp32, Hopper's forward is taken even for short windows."""
    sizes = {"heads": 16, "seq_q": 8192, "window": (127, 0), "dtype": "float32"}
    assert taken(Problem(**sizes, head_dim=64)) == FORWARD_ONLY
    assert taken(Problem(**sizes, head_dim=128)) == BOTH


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
def test_where_its_forward_is_the_fastest_in_fp32(shape, own):
    """In fp32 with few tiles, the portable forward is taken, which splits keys."""
    assert taken(Problem(**shape, head_dim=100)) == (BOTH if own else BACKWARD_ONLY)


@pytest.mark.parametrize(
    ("sizes", "head_dim", "slabs"),
    [
        ((1, 256), 64, 8),  # one head of 32 768 keys
        ((1, 256), 128, 4),
        ((1, 132), 128, 1),  # all run at once, and the first have the most to do
        ((4, 132), 64, 2),
        ((200, 256), 64, 2),  # many heads run at once
        ((200, 32), 128, 2),
        ((200, 31), 128, 1),  # too short for a second workspace to pay
        ((200, 257), 128, 1),  # longer than was measured
    ],
)
def test_dq_accumulators(sizes, head_dim, slabs):
    """A head's CTAs have as many dQ accumulators as keep them from queueing, as measured."""
    assert dq_accumulators(*sizes, 132, head_dim=head_dim) == slabs


@pytest.mark.parametrize(("left", "slabs"), [(None, 8), (1024, 1)])
def test_a_window_needs_one_dq_accumulator(left, slabs):
    """In a window one accumulator is enough: a CTA waits only for CTAs of its window."""
    x, options = spec(1, 32768, 64).copied(), Options(0, 0.1, family="hopper", left=left)
    plan = choose_backward(of_backward(x, x), H200, options)
    assert (plan.kernel, plan.dq_accumulators) == ("sm90", slabs)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "seq", "head_dim", "causal", "count"),
    [
        (32, 32, 1024, 128, False, 1),  # no keys in common
        (8, 1, 2048, 128, False, 8),
        (32, 8, 1024, 128, False, 2),  # with 4, 256 CTAs would make two waves
        (32, 8, 2048, 128, False, 1),
        (32, 8, 2048, 128, True, 4),  # CTAs of few queries start while others are at work
        (48, 8, 2048, 96, True, 3),
        (64, 8, 512, 256, False, 2),
        (32, 8, 2048, 256, True, 1),
    ],
)
def test_gqa_splits(heads, kv_heads, seq, head_dim, causal, count):
    """Query heads that share keys are split over the number of CTAs that was measured best."""
    q, k = (TensorSpec.of(torch.empty(1, n, seq, head_dim)) for n in (heads, kv_heads))
    tiles = kv_heads * (-(-seq // (128 if head_dim <= 128 else 64)))
    assert gqa_splits(q, k, tiles, 132, Options(0 if causal else None, 1.0)) == count


@pytest.mark.parametrize(
    ("heads", "seq", "mask", "count"),
    [
        ((32, 8), 8192, {"right": 0}, 2),
        ((16, 2), 8192, {"right": 0, "left": 1023}, 1),  # all CTAs have as much to do
        ((8, 1), 4096, {"right": 0, "left": 1023}, 4),  # else only 32 CTAs
        ((16, 2), 8192, {"right": None, "bounds": 1}, 4),
        ((32, 8), 16384, {"right": None, "bounds": 1}, 1),  # sums take as long as short documents
    ],
)
def test_gqa_splits_under_masks(heads, seq, mask, count):
    """The cost of a split is relative to the number of queries that see a key, as measured."""
    q, k = (TensorSpec.of(torch.empty(1, n, seq, 128, device="meta")) for n in heads)
    assert gqa_splits(q, k, heads[1] * seq // 128, 132, Options(scale=1.0, **mask)) == count


@pytest.mark.parametrize(
    ("shape", "section"),
    [
        ((16, 8192, 8192, 128), 1),  # 64 tiles of keys, two tiles of queries each
        ((16, 8192, 16384, 128), 2),
        ((16, 2048, 16384, 128), 8),
        ((4, 1024, 8192, 128), 4),  # there are no more heads
        ((16, 4096, 4096, 64), 8),  # tiles of 128 queries
    ],
)
@pytest.mark.parametrize("deterministic", [True, False])
def test_programs_of_a_head_do_not_queue(shape, section, deterministic):
    """CTAs of a head are two query tiles apart, or heads share the CTAs, as measured."""
    heads, seq_q, seq_kv, head_dim = shape
    q, k = (spec(heads, n, head_dim).copied() for n in (seq_q, seq_kv))
    options = Options(None, 0.1, family="hopper", deterministic=deterministic)
    plan = choose_backward(of_backward(q, k), H200, options)
    assert plan.scheduler.section == section


@pytest.mark.parametrize(
    ("mask", "section"),
    [({"right": 0}, 4), ({"right": 0, "left": 1023}, 16), ({"right": None, "bounds": 1}, 16)],
)
def test_a_section_has_room_for_what_is_seen(mask, section):
    """The keys and values that a query tile sees, of a section's heads, stay in the L2 cache."""
    q = spec(16, 16384, 128).copied()
    plan = choose_forward((q, q, q), H200, Options(scale=0.1, family="hopper", **mask))
    assert plan.scheduler.section == section


def test_the_tile_of_documents():
    """Documents get the tile of a head with a third of all queries, in any order of dQ too."""
    q, options = spec(32, 16384, 64), Options(None, 0.1, deterministic=False)
    assert hopper.backward_tile(q, q, H200, options._replace(right=0)).section == 8
    assert hopper.backward_tile(q, q, H200, options._replace(bounds=1)).section == 32
    assert hopper.backward_tile(q, q, H200, options._replace(right=0, left=99)).section == 8


@pytest.mark.parametrize(
    ("sizes", "kernels"),
    [
        ({"heads": 73, "seq_q": 128, "head_dim": 96}, ("portable", "sm90")),
        ({"heads": 6, "seq_q": 2048, "head_dim": 128}, ("sm90", "portable")),
    ],
)
@pytest.mark.parametrize("sunk", [False, True])
@on_hopper
def test_one_of_both_is_portable(device, sizes, kernels, sunk):
    """With ``family="auto"`` one pass may be portable, and both are within the budgets."""
    problem = Problem(**sizes, sink=sunk, dtype="bfloat16")
    q, k, v = make_inputs(problem, device=device)
    plan = explain(q, k, v, sink=torch.zeros(problem.heads, device=device) if sunk else None)
    assert (plan.forward.kernel, plan.backward.kernel) == kernels
    attends = partial(get("hopper"), causal=False, scale=0.1, family="auto")
    assert_accurate(attends, Sample(problem=problem, device=device, scale=0.1))


def test_tiles_fit():
    """Every tile fits in shared memory, and every tile is compiled for the counts."""
    for head_dim, tile, *_ in CONFIGS + BACKWARDS + WIDES:
        assert tile.shared(head_dim) <= SHARED - 1024
    compiled = {(v.head_dim, v.config) for v in variants() if v.config is not None}
    assert NARROW_FORWARD.shared(WIDEST_OF_NARROW, NARROW_VALUES) <= SHARED - 1024
    assert NARROW_FORWARD.shared(WIDEST_OF_NARROW) > SHARED  # 128 keys, two stages: no wider v fits
    stages = {(d, HopperBackwardTile(stages=tile.stages)) for d, tile, _ in BACKWARDS}
    stages |= {(d, HopperD256Tile(stages=tile.stages)) for d, tile, _ in WIDES}
    biased = hopper.tile_of_bias(FORWARD[128, True][0], 128)
    assert compiled == {*CONFIGS, *stages, (WIDEST_OF_NARROW, NARROW_FORWARD), (128, biased)}
    for head_dim, tile in CONFIGS:  # plus fp32 rows of 64 queries for each warpgroup
        beside = hopper.tile_of_bias(replace(tile, consumers=2), head_dim)
        assert beside.shared(head_dim) + 2 * 64 * 4 * beside.block_kv <= SHARED - 1024


@pytest.mark.parametrize("terms", FP32_BACKWARD)
def test_fp32_tiles_are_the_kernels(terms):
    """Planned fp32 tiles have the sizes that the kernels use."""
    tile = FP32_BACKWARD[terms]
    assert (tile.own, tile.other) == (backward_fp32.OWNED.value, backward_fp32.walked(terms))


@pytest.mark.parametrize(
    ("heads", "seq_q", "causal", "groups"),
    [
        (16, 2048, False, 2),  # 256 tiles of 128 queries, 176 of 192: two waves each
        (8, 3072, False, 3),  # 192 and 128: two waves or one
        (8, 4096, False, 2),
        (4, 6144, False, 3),
        (16, 3072, False, 3),  # three waves or two, each longer by a third
        (64, 1024, False, 2),  # four or three
        (1, 16384, False, 2),  # one wave each
        (40, 512, False, 3),  # however short
        (32, 4096, False, 3),  # 8 waves count as many
        (33, 4096, True, 2),
        (2, 32768, True, 2),  # 4 waves: longer than 8192, and few
        (4, 65536, True, 3),
    ],
)
def test_few_tiles_are_counted_in_waves(heads, seq_q, causal, groups):
    """At D = 64, larger tiles are taken only if they make fewer waves, or if waves are many."""
    tile = hopper.forward_tile(spec(heads, seq_q, 60), H200, Options(0 if causal else None, 0.1))
    assert tile.consumers == groups


def spec(heads, seq_q, head_dim):
    """Return the spec of a bf16 tensor [1, heads, seq_q, head_dim]."""
    size = torch.Size((1, heads, seq_q, head_dim))
    return TensorSpec(size, (), torch.bfloat16, torch.device("cuda"), 0)


def test_tables():
    """A width between two in the table gets the tile of the next; too small ones have none."""
    gpu = replace(H200, num_sms=100)

    def forward(head_dim, seq_q, *, causal, heads=1000, **options):
        asked = Options(0 if causal else None, 0.1, **options)
        return hopper.forward_tile(spec(heads, seq_q, head_dim), gpu, asked)

    def backward(head_dim, seq_q, *, deterministic, causal=True, heads=95):
        x = spec(heads, seq_q, head_dim)
        options = Options(0 if causal else None, 0.1, deterministic=deterministic)
        return hopper.backward_tile(x, x, gpu, options)

    assert forward(80, 100, causal=True) == FORWARD[96, True][0]
    assert forward(97, 100, causal=True) == FORWARD[128, True][0]
    assert forward(130, 100, causal=False) == FORWARD[192, False][0]
    assert forward(64, 2047, causal=False) == FORWARD[64, False][0]
    assert forward(64, 2048, causal=False) == FORWARD[64, False][2048]
    assert forward(64, 5000, causal=False).consumers == 3
    assert forward(64, 9000, causal=True, left=4095).consumers == 3
    assert forward(64, 9000, causal=True, left=4094) == FORWARD[64, True][0]
    assert forward(64, 9000, causal=True, bounds=1) == FORWARD[64, True][0]
    assert forward(64, 5000, causal=False, bounds=1) == FORWARD[64, True][0]
    assert forward(64, 5000, causal=False, alibi=1) == FORWARD[64, False][0]
    assert forward(32, 5000, causal=True) is None
    assert forward(32, 5000, causal=False, heads=1) is None
    assert forward(128, 5000, causal=False, heads=1) == FORWARD[128, False][0]
    assert backward(40, 2049, deterministic=False) == BACKWARD[64, True][0]
    assert backward(40, 2048, deterministic=False) == MANY_SHORT_HEADS
    assert backward(40, 2048, deterministic=False, heads=94) == BACKWARD[64, True][0]
    assert backward(128, 1025, deterministic=False) == BACKWARD[128, True][0]
    assert backward(64, 100, deterministic=False, causal=False) == BACKWARD[64, False][0]
    assert backward(128, 100, deterministic=True) == DETERMINISTIC[128, True][0]
    assert backward(32, 100, deterministic=False) is None
    assert backward(200, 100, deterministic=False) == BACKWARD_D256[256, True][0]


@pytest.mark.parametrize("head_dim", [33, 64, 65, 96, 97, 128, 129, 192, 193, 256])
def test_columns(head_dim):
    """The columns that are multiplied cover the head dimension, with fewer than 64 more."""
    first, rest = head_dim_split(head_dim)
    assert rest in (0, first // 2)
    assert first + rest <= block_d(head_dim)
    assert head_dim <= first + rest < head_dim + 64


def test_programs_that_wait_run_together():
    """Persistent CTAs wait for each other, so their launch is cooperative."""
    x = TensorSpec.of(torch.zeros(1, 2, 256, 64, dtype=torch.bfloat16))
    given, options = of_backward(x, x), Options(None, 0.1, family="hopper")
    for persistent in (False, True):
        tile = HopperBackwardTile(persistent=persistent)
        plan = choose_backward(given, H200, options, tile=tile)
        _, one_pass, _ = steps.backward(plan, given, options)
        assert one_pass.launch._options["launch_cooperative_grid"] is persistent


def test_what_the_tables_hold_was_searched():
    """The search times every config of the tables."""
    search = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "tune_hopper.py"))
    tables = [("forward", FORWARD, True), ("backward", BACKWARD, False)]
    tables += [("backward", DETERMINISTIC, True), ("backward", BACKWARD_D256, True)]
    for direction, table, deterministic in tables:
        for (head_dim, causal), configs in table.items():
            found = search["ways"](direction, head_dim, causal=causal)
            given = {search["Way"](config, deterministic) for config in configs.values()}
            assert given <= set(found)
            assert len(set(map(str, found))) == len(found)


@pytest.mark.parametrize(
    ("tile", "change", "words"),
    [
        (HopperTile, {"block_kv": 96}, "block_kv: wanted a power of two from 64 on, got 96"),
        (HopperTile, {"stages": 1}, "stages: wanted 2 at least, got 1"),
        (HopperTile, {"consumers": 4}, "consumers: wanted 2 or 3, got 4"),
        (
            HopperTile,
            {"registers": 250},
            "registers: wanted a multiple of 8 from 24 to 240, got 250",
        ),
        (HopperBackwardTile, {"stages": 1}, "stages: wanted 2 at least, got 1"),
        (HopperBackwardTile, {"section": 0}, "section: wanted 1 at least, got 0"),
        (HopperBackwardTile, {"stagger": 0}, "stagger: wanted 1 at least, got 0"),
        (HopperD256Tile, {"section": 0}, "section: wanted 1 at least, got 0"),
    ],
)
def test_bad_configs(tile, change, words):
    """A config that no kernel can have is an error that names what was wanted."""
    with pytest.raises(ValueError, match=words):
        tile(**change)


@pytest.mark.interpreter
def test_auto_is_traced_with_symbolic_sizes(monkeypatch):
    """One graph serves all lengths: the faster kernels are chosen at the launch."""

    def limits(problem, device):
        del device
        return why_not_hopper_pass(problem, H200)

    monkeypatch.setitem(FASTEST_FIRST, "cpu", ("hopper",))
    monkeypatch.setitem(registry._impls, "hopper", replace(get("hopper"), limits=limits))
    torch.compiler.reset()
    compiled = torch.compile(
        partial(attention, causal=True), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    with torch._dynamo.config.patch(error_on_recompile=True):
        for heads, rows in ((2, 50), (3, 70)):  # no two sizes are equal
            q, k, v = make_inputs(Problem(heads=heads, seq_q=rows, head_dim=40), device="cpu")
            wanted = attention(q, k, v, causal=True, impl="reference")
            torch.testing.assert_close(compiled(q, k, v), wanted)
