"""The verifier: which cases may be timed, and which results are right."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from flashattn import registry
from flashattn.problem import Problem
from flashattn.testing import verifier as module
from flashattn.testing.graph import Graph
from flashattn.testing.verifier import Verifier

PROBLEM = Problem(batch=2, heads=4, kv_heads=2, seq_q=48, head_dim=16, causal=True)
LONG = Problem(heads=2, kv_heads=1, seq_q=96, head_dim=16, causal=True)
WINDOW = replace(LONG, window=(30, None))
SUNK = replace(LONG, alibi=True, sink=True)
BIASED = replace(LONG, heads=4, kv_heads=2, bias="1hts", sink=True)


def outputs(problem, device):
    """Return the results of the reference: o, lse, dq, dk, dv, dbias, dsink."""
    graph = Graph(registry.get("reference"), problem, device, learned=True)
    o, lse = graph._call()
    grads = torch.autograd.grad(o, graph.inputs, graph.grad_o)
    return {"o": o, "lse": lse, **dict(zip(graph.grads, grads, strict=True))}


def test_a_graph_passes_options_on(device):
    """Options besides the problem reach the implementation at each call."""
    seen = []

    def call(q, *_, deterministic, **how):
        seen.append(deterministic)
        return q * how["scale"]

    impl = registry.Impl(name="asked", call=call, limits=lambda *_: None)
    graph = Graph(impl, PROBLEM, device, deterministic=False)
    graph.forward()
    graph.forward()
    assert seen == [False, False]


@pytest.fixture
def short(monkeypatch):
    """Verify only the last queries, even of problems as small as a test's."""
    monkeypatch.setattr(module, "SCORES_OF_A_GROUP", 1000)
    monkeypatch.setattr(module, "LAST", 40)
    module._expected.cache_clear()
    yield
    module._expected.cache_clear()


def test_facts_are_noted(device):
    """Admitting a case records implementation, problem, pass, flops and bytes, and says why not."""
    facts = {}
    limited = registry.Impl(name="limited", call=print, limits=lambda p, d: "limited by nature")
    assert (
        Verifier(limited, PROBLEM, device, facts).admit("forward+backward") == "limited by nature"
    )
    assert facts["impl"] == "limited"
    assert facts["problem"] == str(PROBLEM)
    assert facts["pass"] == "forward+backward"
    assert facts["flops"] == PROBLEM.flops("forward") + PROBLEM.flops("backward")
    assert facts["bytes"] == PROBLEM.bytes("forward") + PROBLEM.bytes("backward")
    assert facts["head_dim"] == 16


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("name", ["o", "lse", "dq", "dk", "dv"])
@pytest.mark.parametrize("problem", [PROBLEM, LONG, WINDOW, SUNK, BIASED], ids=str)
def test_one_wrong_row_is_seen(device, problem, name):
    """One row of the last head that is wrong by a hundredth fails, in any output.

    In a long problem it is one of the last queries and keys. Right results are admitted.
    """
    found = {key: x.detach().clone() for key, x in outputs(problem, device).items()}
    verifier = Verifier(registry.get("reference"), problem, device, {})
    verifier.check(**found)
    row = found[name][-1, -1, -20]  # there every gradient has terms
    row += 0.01 * found[name].abs().max()
    with pytest.raises(AssertionError, match=f"reference: {name}: max error"):
        verifier.check(**found)


def test_another_dtype_and_a_missing_logsumexp_are_seen(device):
    """A result has the dtype of the inputs, and an implementation that claims lse returns it."""
    found = {key: x.detach() for key, x in outputs(PROBLEM, device).items()}
    verifier = Verifier(registry.get("reference"), PROBLEM, device, {})
    for name in ("o", "dq", "dk", "dv"):
        with pytest.raises(AssertionError, match=f"{name}: wanted torch.float32, got torch.float"):
            verifier.check(**found | {name: found[name].double()})
    with pytest.raises(AssertionError, match="lse: wanted the logsumexp, got None"):
        verifier.check(**found | {"lse": None})


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("name", ["dbias", "dsink"])
@pytest.mark.parametrize(
    ("problem", "seen"),
    [(BIASED, True), (replace(BIASED, batch=2), False), (SUNK, False)],
    ids=["of a head", "of batches", "of rows that are not verified"],
)
def test_a_wrong_gradient_of_a_bias_or_sinks_is_seen(device, problem, seen, name):
    """A wrong gradient of the last head fails, unless rows that are not verified add to it."""
    found = {key: x.detach().clone() for key, x in outputs(problem, device).items()}
    if name in found:
        found[name][-1, -1] += 0.1 * found[name].abs().max()
    verifier = Verifier(registry.get("reference"), problem, device, {})
    with pytest.raises(AssertionError, match=f"{name}: max error") if seen else nullcontext():
        verifier.check(**found)
