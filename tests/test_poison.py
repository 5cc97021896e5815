"""Poison reveals reads and writes out of bounds and outputs left unwritten."""

from dataclasses import replace

import pytest
import torch

from flashattn.problem import Problem
from flashattn.testing.accuracy import Sample, assert_accurate
from flashattn.testing.inputs import make_inputs
from flashattn.testing.layouts import LAYOUTS
from flashattn.testing.poison import MARGIN, guard, surrounded

PROBLEM = Problem(batch=2, heads=2, seq_q=5, head_dim=6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_surrounded(layout, dtype):
    """A surrounded tensor has the same values and strides, and NaN on both sides."""
    for x in make_inputs(replace(PROBLEM, dtype=dtype), layout=layout):
        y = surrounded(x)
        assert torch.equal(x, y)
        assert x.stride() == y.stride()
        around = y.new_empty(0).set_(y.untyped_storage())
        assert around[:MARGIN].isnan().all()
        assert around[-MARGIN:].isnan().all()
        assert around.data_ptr() % 64 == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_only_move(layout):
    """A layout changes no value, except for the two that share one head or batch."""
    for x, y in zip(make_inputs(PROBLEM), make_inputs(PROBLEM, layout=layout), strict=True):
        shared = {"expanded": x[:, :1], "expanded_batch": x[:1]}.get(layout, x)
        assert torch.equal(shared.expand_as(x), y)
        assert (layout == "contiguous") == (y.is_contiguous())
    assert 0 in make_inputs(PROBLEM, layout="expanded")[0].stride()


def lost_row(q, k, v):
    """Copy q into a new output, except for its last row."""
    o = torch.empty_like(q)
    o[:, :, :-1] = q[:, :, :-1]
    return o + 0 * (k.sum() + v.sum())


def read_outside(q, k, v):
    """Add q and the element after it, times 0."""
    behind = q.as_strided((1,), (1,), q.storage_offset() + q.numel())
    return q + 0 * (behind + k.sum() + v.sum())


@pytest.mark.parametrize("wrong", [lost_row, read_outside])
def test_poison_reaches_the_output(wrong):
    """A row that is never written and an element read out of bounds make the output NaN."""
    with guard(*make_inputs(PROBLEM)) as inputs:
        assert wrong(*inputs).isnan().any()


@pytest.mark.parametrize("place", [-1, -MARGIN, 0])
@pytest.mark.parametrize("layout", ["contiguous", "packed"])
def test_writes_to_inputs_are_seen(layout, place):
    """A write to an input or in front of it fails, even a write of NaN."""
    with (
        pytest.raises(AssertionError, match="input 1, or the memory around it"),
        guard(*make_inputs(PROBLEM, layout=layout)) as (_, k, _),
    ):
        k.as_strided((1,), (1,), k.storage_offset() + place).fill_(torch.nan)


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("make", ["empty", "empty_like"])
def test_writes_around_outputs_are_seen(make, behind):
    """A write before the first or after the last element of an output fails."""
    q, k, v = make_inputs(PROBLEM)

    def call():
        o = torch.empty(q.shape) if make == "empty" else torch.empty_like(q)
        place = o.storage_offset() + (o.numel() if behind else -1)
        o.as_strided((1,), (1,), place).fill_(0.0)

    with pytest.raises(AssertionError, match=r"output of shape \[2, 2, 5, 6\]"), guard(q, k, v):
        call()


def test_new_memory_of_pytorch_is_poisoned():
    """On a CPU memory from PyTorch's own functions is NaN as well, but only under the guard."""
    q, k, v = make_inputs(PROBLEM)
    with guard(q, k, v):
        assert q.new_empty(9).isnan().all()
        assert torch.empty(3, dtype=torch.int32).shape == (3,)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.empty(4).untyped_storage().nbytes() == 16


def test_accuracy_is_judged_among_poison():
    """An implementation that is right, but writes to its input, fails."""

    def call(q, k, v):
        q.detach()[0, 0, 0, 0] += 0.0
        q.detach().as_strided((1,), (1,), 0).fill_(1.0)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v), None

    sample = Sample(problem=Problem(seq_q=4, head_dim=8), grad=False, lse=False)
    with pytest.raises(AssertionError, match="input 0"):
        assert_accurate(call, sample)
