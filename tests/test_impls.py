"""Every implementation is within the error budgets against fp64: o, lse, dq, dk, dv."""

import dataclasses
from functools import partial

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from flashattn.checks import check_scale
from flashattn.problem import Problem
from flashattn.testing import law
from flashattn.testing.accuracy import Sample, assert_accurate, run_reference
from flashattn.testing.layouts import GRAD_LAYOUTS, LAYOUTS
from flashattn.testing.strategies import BIASES, SCALES, one_of, problems
from flashattn.testing.values import VALUES

CASES = [
    Problem(seq_q=64, head_dim=64, dtype="bfloat16"),  # whole tiles of everything
    Problem(seq_q=129, head_dim=64, dtype="bfloat16", causal=True),  # one row into the next tile
    Problem(seq_q=127, head_dim=32, causal=True),  # one row short of it, fp32
    Problem(seq_q=33, seq_kv=1, head_dim=16),  # one key: dS is exactly 0
    Problem(seq_q=1, seq_kv=300, head_dim=64, dtype="float16"),  # decoding
    Problem(seq_q=1, seq_kv=70, head_dim=32, causal="bottom_right"),  # decoding sees every key
    Problem(seq_q=1, seq_kv=70, head_dim=32, causal="top_left"),  # ... and here only the first key
    Problem(seq_q=50, seq_kv=130, head_dim=16, causal="top_left"),  # keys that no query sees
    Problem(seq_q=50, seq_kv=130, head_dim=16, causal="bottom_right"),  # chunked prefill
    Problem(seq_q=130, seq_kv=50, head_dim=16, causal="top_left"),  # a plateau of full rows
    Problem(seq_q=130, seq_kv=50, head_dim=16, causal="bottom_right"),  # 80 rows see no key
    Problem(seq_q=96, seq_kv=32, head_dim=16, causal="bottom_right"),  # ... whole tiles of them
    Problem(seq_q=70, head_dim=16, causal=True, softcap=0.7),  # most scores are capped
    Problem(seq_q=90, seq_kv=70, head_dim=64, dtype="bfloat16", window=(20, 33), softcap=5),
    Problem(heads=2, seq_q=70, head_dim=16, causal=True, alibi=True),
    Problem(  # the last queries are at the last keys, which no query sees
        batch=2, heads=4, kv_heads=2, seq_q=50, seq_kv=130, head_dim=16, causal=True, alibi=True
    ),
    Problem(
        heads=2, seq_q=90, seq_kv=70, head_dim=64, dtype="bfloat16", window=(20, 33), alibi=True
    ),
    Problem(heads=4, kv_heads=1, seq_q=1, seq_kv=300, head_dim=64, dtype="float16", alibi=True),
    # Biases: of each score, of all batches, of rows, of columns, of all, of distances.
    Problem(batch=2, heads=2, kv_heads=1, seq_q=70, seq_kv=40, head_dim=16, bias="bhts"),
    Problem(heads=2, seq_q=70, head_dim=16, causal=True, bias="1hts"),  # tiles that are not visited
    Problem(batch=2, heads=2, seq_q=70, seq_kv=130, head_dim=64, dtype="bfloat16", bias="1hts"),
    Problem(batch=2, heads=4, kv_heads=2, seq_q=40, head_dim=16, softcap=5, bias="bh1s"),
    Problem(batch=2, heads=2, seq_q=50, seq_kv=70, head_dim=16, window=(20, 9), bias="11t1"),
    Problem(batch=2, heads=2, seq_q=40, head_dim=16, bias="1111"),
    Problem(batch=2, heads=2, seq_q=50, seq_kv=90, head_dim=16, causal=True, bias="1hr"),
    Problem(batch=2, heads=2, seq_q=90, seq_kv=50, head_dim=64, dtype="float16", bias="bhr"),
    Problem(seq_q=70, head_dim=16, bias="b1ts", documents=((40, 40), (0, 0), (24, 24))),
    Problem(heads=2, seq_q=70, seq_kv=50, head_dim=64, dtype="bfloat16", bias="1hts"),  # in fp32
    # Values narrower than keys; the second has DeepSeek's widths.
    Problem(heads=4, kv_heads=2, seq_q=70, seq_kv=90, head_dim=40, value_dim=23, causal=True),
    Problem(heads=2, seq_q=130, head_dim=192, value_dim=128, dtype="bfloat16", causal=True),
    Problem(seq_q=1, seq_kv=70, head_dim=16, documents=((1, 40),)),
    Problem(seq_q=1, seq_kv=300, head_dim=16, bias="11ts", sink=True),
    Problem(heads=2, seq_q=130, head_dim=16, causal=True, window=(30, None), sink=True),
    Problem(batch=2, heads=4, kv_heads=2, seq_q=70, head_dim=16, causal=True, sink=True),
    Problem(heads=2, seq_q=130, seq_kv=50, head_dim=16, causal="bottom_right", sink=True),
    Problem(heads=2, seq_q=9, seq_kv=0, head_dim=16, sink=True),  # all of the softmax is the sink's
    Problem(seq_q=200, head_dim=16, causal=True, window=(70, None)),  # a tile outside the window
    Problem(seq_q=200, head_dim=16, dtype="bfloat16", window=(20, 33)),  # masked at both ends
    Problem(seq_q=70, head_dim=16, causal=True, window=(0, None)),  # every query sees itself alone
    Problem(seq_q=70, seq_kv=300, head_dim=16, causal="bottom_right", window=(20, None)),  # prefill
    Problem(seq_q=130, seq_kv=50, head_dim=16, window=(9, 9)),  # the last rows see no key
    Problem(
        seq_q=130, seq_kv=50, head_dim=16, causal="bottom_right", window=(9, None)
    ),  # the first rows see no key
    # Packed documents: an empty one, one that ends with a tile, and rows after the last.
    Problem(seq_q=150, head_dim=16, causal=True, documents=((40, 40), (0, 0), (24, 24), (70, 70))),
    Problem(  # more keys than queries in one, no keys in another, no queries in the last
        heads=4,
        kv_heads=2,
        seq_q=90,
        seq_kv=170,
        head_dim=64,
        dtype="bfloat16",
        causal="bottom_right",
        documents=((30, 70), (20, 0), (40, 50), (0, 20)),
    ),
    Problem(
        seq_q=200, head_dim=32, dtype="float16", window=(20, 5), documents=((99, 99), (90, 90))
    ),
    Problem(seq_q=100, head_dim=16, documents=((100, 100),)),  # one document is no mask
    Problem(seq_q=70, head_dim=16, causal=True, documents=((1, 1),) * 70),  # each row its own
    Problem(heads=4, kv_heads=1, seq_q=65, head_dim=16, causal=True),  # multi-query
    Problem(batch=2, heads=6, kv_heads=2, seq_q=40, head_dim=32, dtype="bfloat16"),  # grouped
    Problem(batch=3, heads=2, seq_q=17, head_dim=8),  # smaller than any tile
    Problem(heads=2, kv_heads=1, seq_q=1, head_dim=128),  # one key: dq is 0 by cancellation
    Problem(seq_q=48, head_dim=1),  # the smallest head
    Problem(seq_q=40, head_dim=80, dtype="bfloat16", causal=True),  # padded to 128
    Problem(seq_q=40, head_dim=256, dtype="float16"),  # the largest head
    Problem(seq_q=36, head_dim=300),  # larger than the kernels take
    Problem(seq_q=40, head_dim=16, dtype="float64", causal=True),  # wider than the kernels take
    Problem(batch=0, seq_q=8, head_dim=16),  # nothing at all
    Problem(heads=0, seq_q=8, head_dim=16),
    Problem(seq_q=0, seq_kv=9, head_dim=16),  # keys, but no queries
    Problem(seq_q=9, seq_kv=0, head_dim=16),  # every row sees no key
]
HEAD_DIMS = {"hopper": tuple(range(40, 137, 8))}  # it refuses most others in half precision
COMPILED = 4  # the first cases, for implementations that compile
# On a GPU most examples compile new kernels: run a third of the profile's examples, in tests that
# compile in parallel.
SHARES, DIVISOR = (10, 3) if torch.cuda.is_available() else (1, 1)
BIG = [
    Problem(batch=2, heads=4, seq_q=1024, head_dim=64, dtype="bfloat16", causal=True),
    Problem(batch=2, heads=8, kv_heads=2, seq_q=1000, head_dim=128, dtype="bfloat16", causal=True),
    Problem(heads=2, seq_q=4096, head_dim=128, dtype="float16"),  # long rows
    Problem(heads=2, seq_q=2047, seq_kv=4095, head_dim=64, causal="bottom_right"),
    Problem(heads=2, seq_q=777, seq_kv=3001, head_dim=192, dtype="bfloat16"),
    Problem(heads=1, seq_q=1, seq_kv=32768, head_dim=128, dtype="bfloat16"),
    Problem(batch=300, heads=300, seq_q=16, head_dim=16, dtype="bfloat16"),  # above 65 535 heads
]


def unasked(impl, problem):
    """Return why an implementation is not asked to solve a problem, or None."""
    if impl.compiles and problem not in CASES[:COMPILED]:
        return f"{impl.name} compiles for seconds at every new shape: a few will do"
    return impl.why_not(problem, law.DEVICE, grad=impl.grad)


def unasked_if_small(impl, problem):
    """Return the same, or that size makes no difference to an implementation."""
    same = impl.name in ("tiled", "reference")
    return f"{impl.name} is the same code at any size" if same else unasked(impl, problem)


strictly = pytest.mark.why_not.with_args(lambda impl: law.unasked(impl, law.DEVICE, "strict"))


def verify(impl, device, problem, **how):
    """Hold an implementation to its budgets, or skip with the reason why not.

    A peer that misses a budget is an expected failure, for its authors to fix.
    """
    reason = impl.why_not(problem, device, grad=impl.grad)
    if reason is not None:
        pytest.skip(reason)
    if impl.compiles:
        torch.compiler.reset()  # or it gives up compiling after some shapes
    sample = Sample(
        problem=problem,
        device=device,
        lse=impl.lse,
        grad=impl.grad,
        denormals=impl.denormals,
        **how,
    )
    scale = check_scale(sample.scale, problem.head_dim)
    call = partial(impl, **problem.keywords, scale=scale)
    try:
        assert_accurate(call, sample, guarded=not impl.compiles)
    except AssertionError as error:
        if not impl.excused:
            raise
        pytest.xfail(f"{impl.name}: {error}")


def verify_strictly(impl, device, problem, **how):
    """Verify on unusual inputs, which only implementations that claim the contract must take."""
    verify(impl, device, impl.fit(problem), **how)


@pytest.mark.why_not.with_args(unasked)
@pytest.mark.parametrize("problem", CASES, ids=str)
def test_cases(impl, device, problem):
    """Hand-picked problems stay within the budgets."""
    verify(impl, device, problem)


@pytest.mark.gpu  # the interpreter would need minutes
@pytest.mark.why_not.with_args(unasked_if_small)
@pytest.mark.parametrize("problem", BIG, ids=str)
def test_big_cases(impl, device, problem):
    """Problems of many tiles, which only a GPU has the time for, stay within the budgets."""
    verify(impl, device, problem)


@strictly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", VALUES)
def test_values(impl, device, name, dtype):
    """Large, negative, tied, constant, zero, huge and tiny inputs stay within the budgets."""
    problem = Problem(seq_q=70, head_dim=32, causal=True, dtype=dtype)
    verify_strictly(impl, device, problem, values=name)


@strictly
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(impl, device, layout):
    """Inputs may have any strides."""
    problem = Problem(
        batch=2, heads=4, kv_heads=2, seq_q=40, seq_kv=70, head_dim=24, dtype="float16"
    )
    verify_strictly(impl, device, problem, layout=layout)


@strictly
@pytest.mark.why_not.with_args(lambda impl: law.unasked(impl, law.DEVICE, "grad"))
@pytest.mark.parametrize("layout", GRAD_LAYOUTS)
def test_grad_layouts(impl, device, layout):
    """The gradients of o and lse may have any strides."""
    problem = Problem(
        batch=2, heads=4, kv_heads=2, seq_q=40, seq_kv=70, head_dim=24, dtype="bfloat16"
    )
    verify_strictly(impl, device, problem, grad_layout=layout)


@strictly
@pytest.mark.parametrize(  # the first is so small that the backward is one launch
    ("heads", "seq_kv"), [(2, 30), (4, 70)]
)
def test_mixed_layouts(impl, device, heads, seq_kv):
    """Each of q, k, v, o and the gradient of o is read by its own strides."""
    problem = Problem(
        heads=heads, kv_heads=heads // 2, seq_q=40, seq_kv=seq_kv, head_dim=16, dtype="float16"
    )  # decomposed fp32 would have the kernels' own layout
    lay = [LAYOUTS[name] for name in ("sequence_first", "packed", "misaligned")]

    def call(*inputs, **options):
        o, lse = impl(*(make(x) for make, x in zip(lay, inputs, strict=True)), **options)
        return LAYOUTS["packed"](o), lse

    verify_strictly(dataclasses.replace(impl, call=call, prepares=False), device, problem)


@strictly
@pytest.mark.parametrize(
    "problem",
    [Problem(heads=2, seq_q=40, seq_kv=70, head_dim=64), Problem(seq_q=2, head_dim=1)],
    ids=str,
)
def test_far_below_zero(impl, device, problem):
    """If lse is below -88.7, so that exp(-lse) is inf, padded keys of a tile give no NaN."""
    exact = run_reference(Sample(problem=problem, device=device, values="negative").draw())
    assert exact["lse"].max() < -88.7
    verify_strictly(impl, device, problem, values="negative")


@strictly
@pytest.mark.why_not.with_args(
    lambda impl, scale: None if impl.takes_scale(scale) else f"{impl.name} takes no such scale"
)
@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-45, 3.0])
def test_scales(impl, device, scale):
    """A scale may be zero, negative, denormal or large."""
    problem = Problem(heads=2, seq_q=40, head_dim=16, causal=True)
    verify_strictly(impl, device, problem, scale=scale)


@pytest.mark.drawn("share")
@strictly
@pytest.mark.parametrize("share", range(SHARES))
@hypothesis.settings(max_examples=hypothesis.settings.default.max_examples // DIVISOR // SHARES)
@hypothesis.given(data=st.data(), seed=st.integers(0, 2**31))
def test_any_problem(impl, device, share, data, seed):
    """Any problem, in any layout, of any values, at any scale, stays within the budgets."""
    del share  # each test draws its own examples
    longest, heads = (80, 4) if device.type == "cpu" else (700, 12)
    drawn = problems(
        longest=longest,
        head_dims=HEAD_DIMS.get(impl.name, ()),
        packed=(False, False, True),
        prefixed=(False, False, False, True),
        sloped=(False, False, True),
        biases=BIASES,
        sunk=(False, False, True),
        narrowed=(False, False, False, True),
    )
    problem = impl.fit(data.draw(drawn, label="problem"))
    hypothesis.assume(problem.batch * problem.heads <= heads)  # run one by one in the interpreter
    hypothesis.assume(impl.why_not(problem, device, grad=impl.grad) is None)
    verify(
        impl,
        device,
        problem,
        values=data.draw(one_of(*VALUES), label="values"),
        layout=data.draw(one_of(*LAYOUTS), label="layout"),
        grad_layout=data.draw(one_of(*GRAD_LAYOUTS), label="grad_layout"),
        scale=data.draw(one_of(*filter(impl.takes_scale, SCALES)), label="scale"),
        seed=seed,
    )
