"""Measuring several ranks: their answers, their verification, and the model of their time."""

import os
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from flashattn import attention
from flashattn.parallel.placement import Placement
from flashattn.problem import Problem
from flashattn.resolve import cumulative
from flashattn.testing import parallel_case
from flashattn.testing.inputs import make_grads, make_inputs
from flashattn.testing.ranks import Ranks
from flashattn.testing.scaling import Machine, predict

PROBLEM = Problem(heads=4, kv_heads=2, seq_q=256, head_dim=32, causal=True)
LONG = Problem(heads=32, kv_heads=8, seq_q=1 << 17, head_dim=128, causal=True, dtype="bfloat16")
IDEAL = Machine(forward=6e14, backward=5e14, link=1e30, copy=1e30, latency=0.0)


def test_jobs():
    """Two ranks answer job after job; one that dies ends the other, and its error is reported."""
    ranks = Ranks(2, "cpu")
    try:
        job = {"job": "attention", "method": "keys", "rounds": 2}
        for passes in ("forward", "forward+backward"):
            found = ranks.ask(60, problem=str(PROBLEM), passes=passes, **job)
            assert len(found["samples"]) == 2
            assert found["wrong"] == []
            assert found["other_bits"] == []
        found = ranks.ask(
            60, job="train", size="tiny", context=32, precision="fp32", checkpoint=True, rounds=2
        )
        assert found["losses"][-1] < found["losses"][0]
        assert ranks.ask(60, job="link", rounds=2)["link"] > 0
        os.kill(ranks._processes[0].pid, signal.SIGSTOP)  # as if it waited for the other
        with pytest.raises(RuntimeError, match=r"(?s)a process of 2 died: .*KeyError: 'none'"):
            ranks.ask(20, job="none")
        assert not ranks.alive
    finally:
        ranks.close()


def test_other_bits_are_told():
    """An output that has other bits in a second call is named, with the first position."""
    o, dq = torch.zeros(1, 1, 2, 2), torch.ones(1, 1, 2, 2)
    assert parallel_case._other_bits((o, dq), (o.clone(), dq.clone())) == []
    other = dq.clone()
    other[..., 1, 0] = 2
    said = "in a second call dq: 1 elements differ, the first at [0, 0, 1, 0]: 1.0 and 2.0"
    assert parallel_case._other_bits((o, dq), (o, other)) == [said]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": False},
        {"window": (40, None)},
        {"documents": ((100, 100), (156, 156))},
        {"documents": ((220, 220), (36, 36)), "window": (40, None)},
    ],
)
def test_wrong_rows_are_told(changes):
    """Before timing, a wrong last row of the first or last head is reported, for any output."""
    problem, mesh = (
        replace(PROBLEM, **changes),
        SimpleNamespace(size=lambda: 1, get_local_rank=lambda: 0),
    )
    leaves = [x.requires_grad_() for x in make_inputs(problem)]
    (grad, _), options = make_grads(problem), problem.keywords
    if problem.documents:
        options["documents"] = cumulative(problem.documents, "cpu")
    o = attention(*leaves, impl="tiled", **options)
    got = [o.detach(), *torch.autograd.grad(o, leaves, grad)]
    given = [*(x.detach() for x in leaves), grad]
    assert parallel_case._wrong(mesh, problem, "keys", given, tuple(got)) == []
    for i, name in enumerate(["o", "dq", "dk", "dv"] if problem.causal else ["o", "dq"]):
        off = [x.clone() for x in got]
        off[i][:, -1, -1] += 0.01
        told = parallel_case._wrong(mesh, problem, "keys", given, tuple(off))
        assert told
        assert all(text.startswith(f"keys: {name}: ") for text in told)


@pytest.mark.parametrize("passes", ["forward", "forward+backward"])
@pytest.mark.parametrize("changes", [{}, {"causal": False}, {"window": (512, None)}])
def test_ideal_links_scale_linearly(passes, changes):
    """If only kernels take time, W ranks take 1 / W of it, since zig-zag shares work evenly."""
    problem = replace(LONG, **changes)
    alone = problem.flops("forward") / 6e14
    alone += problem.flops("backward") / 5e14 if passes != "forward" else 0.0
    for world in (1, 2, 8):
        seconds = predict(problem, Placement("zigzag", world), IDEAL, passes=passes)
        assert seconds * world == pytest.approx(alone, rel=0.01)
    contiguous = predict(replace(LONG, causal=True), Placement("contiguous", 8), IDEAL)
    assert contiguous * 8 > 1.8 * predict(LONG, Placement("zigzag", 1), IDEAL)


def test_slow_links_cost_what_kernels_do_not_hide():
    """An exchange costs the time by which it outlasts the local keys; windows exchange less."""
    cut = Placement("zigzag", 8)
    slow = IDEAL._replace(link=1e10)
    arrival = 2 * 2 * 128 * 8 * (1 << 17) * 7 / 8 / 1e10
    own = predict(LONG, Placement("zigzag", 1), IDEAL, passes="forward") / 64
    gained = predict(LONG, cut, slow, passes="forward") - predict(
        LONG, cut, IDEAL, passes="forward"
    )
    assert gained == pytest.approx(arrival - own, rel=0.02)
    backward = [predict(LONG, cut, slow, passes="backward", keep=keep) for keep in (True, False)]
    assert backward[1] - backward[0] == pytest.approx(arrival, rel=0.02)
    window = replace(LONG, window=(4096, None))
    assert predict(window, cut, slow, passes="forward") < 0.5 * arrival
