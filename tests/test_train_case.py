"""Training cases: the steps that benchmarks time, and cold steps in a process of their own."""

from unittest.mock import Mock

import pytest
import torch

from flashattn import registry
from flashattn.lm import SIZES
from flashattn.testing import train_case
from flashattn.testing.sweep import UNEQUAL
from flashattn.testing.train_case import (
    Trained,
    cold_steps,
    costs,
    documents_of,
    problem_of,
)

TINY = {"size": "tiny", "context": 16, "batch": 2, "precision": "fp32"}


@pytest.fixture
def model(device):
    """Return a tiny model."""
    return Trained(**TINY, impl="sdpa", device=device)


def test_steps_do_what_they_are_called(model):
    """Forward leaves no gradients, backward and both leave them, train moves the parameters."""
    weight = model.trainer.model.head.weight
    before = weight.detach().clone()
    for step, learns in (("forward", False), ("backward", True), ("forward+backward", True)):
        call, setup = model.timed(step)
        assert weight.grad is None
        call(*setup())
        assert (weight.grad is not None) is learns
        assert torch.equal(weight, before)
    call, setup = model.timed("train")
    call(*setup())
    assert not torch.equal(weight, before)


def test_backward_can_be_repeated(model):
    """Each call of backward has a graph of its own, and no gradients to add to."""
    call, setup = model.timed("backward")
    grads = []
    for _ in range(2):
        call(*setup())
        grads.append(model.trainer.model.head.weight.grad.clone())
    torch.testing.assert_close(*grads)


def test_state_is_what_is_held(model):
    """Parameters, gradients and both moments take four bytes a parameter each, once allocated."""
    count = model.costs.parameters
    assert model.state_bytes() == {"parameters": 4 * count, "gradients": 0, "optimizer": 0}
    call, _ = model.timed("train")
    call()
    held = model.state_bytes()
    assert held["gradients"] == 4 * count
    assert held["optimizer"] == pytest.approx(8 * count, rel=1e-3)  # plus the step counts


def test_costs_by_name(device):
    """Costs charge only naive attention for its scores; a layer's problem is the model's."""
    long = TINY | {"context": 1024}
    naive, ours = (costs(**long, impl=name, device=device) for name in ("naive", "triton"))
    assert naive.activation_bytes > ours.activation_bytes
    problem = problem_of(ours)
    assert (problem.batch, problem.heads, problem.seq_q, problem.head_dim) == (2, 4, 1024, 32)
    assert problem.causal == "top_left"


def test_documents_fill_the_context():
    """Documents fill any context, with the same proportions."""
    assert documents_of(16384) == UNEQUAL
    assert documents_of(65536) == tuple(4 * n for n in UNEQUAL)
    assert sum(documents_of(100)) == 100


def test_packed_documents_are_apart(device):
    """In a packed causal model each document has the logits that it has alone."""
    facts = TINY | {"context": 64, "batch": 1}
    packed, whole = (
        Trained(**facts, impl="tiled", device=device, packed=p).trainer for p in (True, False)
    )
    logits, start = packed.forward(), 0
    for length in filter(None, documents_of(64)):
        document = slice(start, start := start + length)
        alone = whole.model(whole.tokens[:, document])
        torch.testing.assert_close(logits[:, document], alone, atol=1e-4, rtol=1e-4)
    assert problem_of(costs(**facts, impl="tiled", device=device, packed=True)).documents
    assert not torch.allclose(logits, whole.forward(), atol=1e-2)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_mask_of_documents_is_made_once(device, precision, monkeypatch):
    """Every layer gets the same bounds, also under autocast and when it is recomputed."""
    tiled = Mock(wraps=registry.get("tiled"))
    monkeypatch.setattr(train_case.registry, "get", lambda _: tiled)
    facts = TINY | {"precision": precision, "packed": True, "checkpoint": True}
    Trained(**facts, impl="tiled", device=device).trainer.train()
    first, *others = (call.kwargs["bounds"] for call in tiled.call_args_list)
    assert 1 + len(others) == 2 * SIZES["tiny"].layers
    assert all(bounds is first for bounds in others)


def test_contexts_beyond_the_table(device):
    """RoPE's table is as long as the context, and the costs count it so."""
    long = TINY | {"context": 9000, "batch": 1}
    model = Trained(**long, impl="sdpa", device=device)
    assert len(model.trainer.model.rope.cos) == model.costs.config.longest == 9000


def test_cold_steps():
    """A new process returns as many step times as asked for."""
    seconds = cold_steps(**TINY, warm_steps=1, measured=3, device="cpu")
    assert len(seconds) == 3
    assert all(second > 0 for second in seconds)
