"""Context parallelism on four gloo processes: the ranks' shares are the whole, in both passes."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch.distributed import all_reduce, barrier, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import flashattn
from flashattn import attention, masks
from flashattn.lm import Config
from flashattn.parallel import attention as shared
from flashattn.parallel import positions, shard, unshard
from flashattn.parallel.plan import _PLANS
from flashattn.problem import Problem
from flashattn.registry import get
from flashattn.resolve import cumulative
from flashattn.testing.accuracy import Sample, expected_of
from flashattn.testing.inputs import make_grads, make_inputs
from flashattn.testing.patching import patch_interpreter
from flashattn.testing.ranks import fork
from flashattn.training import Trainer

WORLD, SECONDS, TIMEOUT = 4, 200, timedelta(seconds=20)
DIES, STATUS = 3, 7  # which rank, and how
SIZES = {"batch": 2, "heads": 4, "kv_heads": 2, "seq_q": 40, "head_dim": 16, "causal": True}
CASES = {
    "zigzag": ({}, {}),
    "contiguous": ({}, {"placement": "contiguous"}),
    "uneven": ({"seq_q": 37}, {}),
    "uneven, contiguous": ({"seq_q": 37}, {"placement": "contiguous"}),
    "fewer rows than ranks": ({"seq_q": 3}, {}),
    "kept": ({"seq_q": 37}, {"keep": True}),
    "full": ({"causal": False}, {}),
    "cross": ({"causal": False, "seq_kv": 29}, {"placement": "contiguous"}),
    "top left": ({"seq_q": 53, "seq_kv": 30}, {}),
    "bottom right": ({"seq_kv": 61, "causal": "bottom_right"}, {}),
    "rows without keys": ({"seq_kv": 21, "causal": "bottom_right"}, {}),
    "window": ({"window": (6, None)}, {}),
    "window, contiguous": ({"window": (6, None)}, {"placement": "contiguous"}),
    "wide window": ({"window": (25, 3), "causal": False, "seq_q": 37}, {"keep": True}),
    "window at the corner": ({"seq_kv": 61, "window": (6, 2), "causal": False}, {}),
    "one bound": ({"window": (None, 5), "causal": False}, {}),
    "capped": ({"softcap": 2.0}, {}),
    "bf16": ({"dtype": "bfloat16"}, {}),
    "bf16, window": ({"dtype": "bfloat16", "window": (6, None)}, {}),
    "documents": ({"documents": ((9, 9), (0, 0), (1, 1), (20, 20), (7, 7)), "seq_q": 37}, {}),
    "documents, cross": ({"documents": ((3, 9), (20, 14)), "seq_q": 29, "seq_kv": 23}, {}),
    "documents, window": (
        {"documents": ((9, 9), (28, 28)), "seq_q": 40, "window": (6, None)},
        {"placement": "contiguous", "keep": True},
    ),
    "documents, heads": (
        {"documents": ((9, 9), (28, 28)), "seq_q": 37, "kv_heads": 4},
        {"exchange": "heads"},
    ),
    "documents, triton": (
        {"documents": ((9, 9), (28, 28)), "seq_q": 37, "batch": 1},
        {"impl": "triton"},
    ),
    "triton": ({"seq_q": 37, "batch": 1, "softcap": 2.0}, {"impl": "triton"}),
    "triton, rows without keys": (
        {"batch": 1, "seq_kv": 21, "causal": "bottom_right"},
        {"impl": "triton"},
    ),
    "triton, window": ({"batch": 1, "window": (6, None)}, {"impl": "triton", "keep": True}),
    "heads": ({"kv_heads": 4, "seq_q": 37}, {"exchange": "heads"}),
    "heads, window": ({"kv_heads": 4, "window": (6, None)}, {"exchange": "heads"}),
}


def run(mesh, problem, inputs, grads, **how):
    """Return this rank's o, lse, and gradients of its q, k and v."""
    cut = partial(shard, mesh=mesh, dim=2, placement=how.get("placement", "zigzag"))
    leaves = [cut(x).detach().requires_grad_() for x in inputs]
    length = problem.seq_q, problem.seq_kv
    given = {**problem.keywords, "length": length, "return_lse": True, "impl": "tiled", **how}
    if problem.documents is not None:
        given["documents"] = cumulative(problem.documents, "cpu")
        if all(t == s for t, s in problem.documents):
            given["documents"] = given["documents"][0]
    outputs = shared(*leaves, mesh=mesh, **given)
    return [*outputs, *torch.autograd.grad(outputs, leaves, [cut(x) for x in grads])]


def gathered(mesh, problem, results, placement="zigzag"):
    """Return the whole of o, lse, dq, dk and dv by their names."""
    lengths = [problem.seq_q] * 3 + [problem.seq_kv] * 2
    found = [
        unshard(x, mesh, dim=2, length=n, placement=placement)
        for x, n in zip(results, lengths, strict=True)
    ]
    return dict(zip(("o", "lse", "dq", "dk", "dv"), found, strict=True))


def check_case(mesh, case):
    """Check the gathered results against the budgets of one call, and two runs for equal bits."""
    sizes, how = CASES[case]
    problem = Problem(**SIZES | sizes)
    inputs, grads = make_inputs(problem), make_grads(problem)
    results = run(mesh, problem, inputs, grads, **how)
    assert all(map(torch.equal, results, run(mesh, problem, inputs, grads, **how)))
    got = gathered(mesh, problem, results, how.get("placement", "zigzag"))
    if mesh.get_rank() == 0:
        failures = expected_of(Sample(problem=problem)).failures(got)
        assert not failures, failures


def check_rest(mesh):
    """Compare sinks, narrow values, no head dimension, masks and autocast with one plain call."""
    problem = Problem(**SIZES | {"seq_q": 37})
    q, k, v = make_inputs(problem)
    sink = torch.linspace(-1, 2, 4, requires_grad=True)
    cut = partial(shard, mesh=mesh, dim=2)
    for how in ({}, {"exchange": "heads"}):
        inputs = [q, *(x.repeat_interleave(2, 1) for x in (k, v))] if how else [q, k, v]
        inputs = [*inputs[:2], inputs[2][..., :12]]
        given = {"causal": True, "scale": 0.3, "sink": sink, "impl": "tiled"}
        wanted = attention(*inputs, **given)
        got = shared(*map(cut, inputs), mesh=mesh, length=37, **given, **how)
        torch.testing.assert_close(unshard(got, mesh, dim=2, length=37), wanted)
        (of_sink,) = torch.autograd.grad(got.sum(), sink)
        all_reduce(of_sink)
        torch.testing.assert_close(of_sink, torch.autograd.grad(wanted.sum(), sink)[0])
    one = [x[:, 0] for x in (q, k, v)]
    got = shared(*(shard(x, mesh, dim=1) for x in one), mesh=mesh, length=37, impl="tiled")
    torch.testing.assert_close(unshard(got, mesh, dim=1, length=37), attention(*one, impl="tiled"))
    lengths = torch.tensor([37, 20])
    for mask in (masks.padding(lengths), masks.chunked(9) & masks.padding(lengths, side="left")):
        wanted = attention(q, k, v, window=(12, 3), mask=mask, impl="tiled")
        given = {"window": (12, 3), "mask": mask, "length": 37, "impl": "tiled"}
        got = shared(*map(cut, (q, k, v)), mesh=mesh, **given)
        torch.testing.assert_close(unshard(got, mesh, dim=2, length=37), wanted)
    with torch.autocast("cpu", torch.bfloat16):
        assert shared(*map(cut, (q, k, v)), mesh=mesh, length=37).dtype == torch.bfloat16
    mine = [cut(x).requires_grad_() for x in (q, k, v)]
    loss = shared(*mine, mesh=mesh, length=37, impl="tiled").square().sum()
    outside = torch.autograd.grad(loss, mine, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        inside = torch.autograd.grad(loss, mine)
    assert all(torch.equal(one, other) for one, other in zip(inside, outside, strict=True))
    assert torch.equal(positions(37, mesh), shard(torch.arange(37), mesh, dim=0))


def check_refusals(mesh, both):
    """Check that every rank refuses what does not fit, before anything is exchanged."""
    q = torch.randn(1, 3, 8, 16)
    refused = {
        "mesh: wanted one dimension": {"mesh": both},
        "placement: wanted one of contiguous, zigzag": {"placement": "striped"},
        "exchange: wanted one of keys, heads": {"exchange": "rows"},
        "q: wanted 10 rows": {"length": 40},
        "documents: wanted": {"documents": torch.tensor([0, 99])},
        "mask: wanted": {"mask": q},
        "impl: wanted one of auto": {"impl": "sdpa"},
        "impl: hopper": {"impl": "hopper"},
        "q: wanted a number of heads that 4": {"exchange": "heads"},
        "window: wanted": {"window": (-1, 0)},
        "sink: wanted shape": {"sink": torch.zeros(2)},
        "sink: wanted a plain tensor": {"sink": distribute_tensor(torch.zeros(3), mesh)},
        "k: wanted q's dtype": {"q": q.bfloat16()},
        "k: wanted D = 8, as q has, got 16": {"q": q[..., :8]},
        "v: wanted 8 rows": {"v": q[:, :, 1:], "exchange": "heads"},
    }
    for sentence, how in refused.items():
        with pytest.raises((ValueError, NotImplementedError), match=f"^{sentence}"):
            shared(how.pop("q", q), q, how.pop("v", q), **{"mesh": mesh, **how})
    for length in (16, 64):  # other rows on every rank
        with pytest.raises(ValueError, match=f"^x: wanted {length // 4} rows of {length}"):
            unshard(q, mesh, dim=2, length=length)


def check_tensor_parallel(both):
    """Check rows sharded along one mesh dimension and heads along the other, as DTensors."""
    problem = Problem(**SIZES | {"seq_q": 37})
    inputs, (grad, _) = make_inputs(problem), make_grads(problem)
    whole = [x.clone().requires_grad_() for x in (*inputs, torch.randn(problem.heads))]
    wanted = attention(*whole[:3], sink=whole[3], causal=True, impl="tiled")
    wanted = [wanted, *torch.autograd.grad(wanted, whole, grad)]

    def placed(x, *placements):
        return distribute_tensor(x, both, placements, src_data_rank=None)

    leaves = [placed(x, Shard(2), Shard(1)).requires_grad_() for x in inputs]
    leaves.append(placed(whole[3].detach(), Replicate(), Shard(0)).requires_grad_())
    how = {"mesh": both["rows"], "placement": "contiguous", "causal": True, "impl": "tiled"}
    got = shared(*leaves[:3], sink=leaves[3], **how)
    assert got.placements == (Shard(2), Shard(1))
    got = [got, *torch.autograd.grad(got, leaves, placed(grad, Shard(2), Shard(1)))]
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.full_tensor(), b)
    for kinds in ((Shard(1), Shard(2)), (Shard(2), Shard(3)), (Replicate(), Shard(1))):
        with pytest.raises(ValueError, match="wanted batches or heads sharded evenly"):
            shared(*(placed(x, *kinds) for x in inputs), **how)
    rows = [x[:, 0] for x in inputs]  # of one head: [B, rows, D]
    rows[2] = rows[2][..., :5]
    by_rows = [placed(x, Shard(1), Shard(0)) for x in rows]
    got = shared(*by_rows, return_lse=True, **how)
    wanted = attention(*rows, return_lse=True, causal=True, impl="tiled")
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a.full_tensor(), b)
    with pytest.raises(ValueError, match="wanted batches or heads sharded evenly"):
        shared(*(placed(x, Shard(1), Shard(1)) for x in rows), **how)
    three = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("rows", "heads", "more"))
    kinds = Shard(2), Shard(1), Shard(1)  # two heads of keys over four ranks
    with pytest.raises(ValueError, match="wanted batches or heads sharded evenly"):
        shared(
            *(distribute_tensor(x, three, kinds, src_data_rank=None) for x in inputs),
            **how | {"mesh": three["rows"]},
        )


def check_compiled(mesh):
    """Check that a full graph gives the same bits, for tensors laid out as in models.

    Ranks alternate, so that compiled ranks meet others that are not compiled.
    """
    problem = Problem(**SIZES)
    inputs = [shard(x, mesh, dim=2).transpose(1, 2).contiguous() for x in make_inputs(problem)]

    def call(*rows, **how):
        q, k, v = (x.transpose(1, 2) for x in rows)
        return shared(q, k, v, mesh=mesh, causal=True, impl="tiled", **how) * 2

    graph = torch.compile(call, fullgraph=True, backend="aot_eager")
    for turn, how in enumerate(({}, {"keep": True, "documents": torch.tensor([0, 9, 37])})):
        results = []
        for function in (call, graph if mesh.get_rank() % 2 == turn else call):
            leaves = [x.clone().requires_grad_() for x in inputs]
            o = function(*leaves, **how)
            results.append([o, *torch.autograd.grad(o.square().sum(), leaves)])
        assert all(map(torch.equal, *results))


def check_compiled_first(mesh):
    """Check that a full graph needs no plan made before, and is made again for other lengths."""

    def call(x, documents):
        return shared(x, x, x, mesh=mesh, causal=True, documents=documents)

    torch.compiler.reset()
    graph, documents = torch.compile(call, fullgraph=True, backend="aot_eager"), [0, 9, 30]
    for rows in (10, 8):
        _PLANS.clear()
        given = torch.randn(1, 2, rows, 8), torch.tensor(documents)
        assert torch.equal(graph(*given), call(*given))


def check_other_derivatives(mesh):
    """Check that second and forward-mode derivatives are refused by name."""
    for exchange in ("keys", "heads"):
        call = partial(shared, mesh=mesh, length=16, exchange=exchange, impl="tiled")
        x = torch.randn(1, 4, 4, 8)
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            torch.func.jvp(lambda x, call=call: call(x, x, x), (x,), (x,))
    q = torch.randn(1, 2, 4, 16, requires_grad=True)
    (grad,) = torch.autograd.grad(
        shared(q, q, q, mesh=mesh, length=16).square().sum(), q, create_graph=True
    )
    with pytest.raises(NotImplementedError, match="no second derivative"):
        grad.sum().backward()


def check_training(mesh):
    """Check that a model with sharded tokens and parameters trains as an unsharded one."""
    config = Config(width=32, hidden=48, layers=2, heads=4, vocab=97, longest=32)
    facts = {"batch": 2, "precision": "fp32", "device": "cpu"}
    for context, checkpoint in ((32, False), (29, True)):
        alone = partial(attention, causal=True, impl="tiled")
        both = partial(shared, mesh=mesh, causal=True, length=context, impl="tiled")
        one = Trainer(config, attention=alone, context=context, **facts)
        many = Trainer(
            config, attention=both, context=context, mesh=mesh, checkpoint=checkpoint, **facts
        )
        share = sum(x.to_local().numel() for x in many.model.parameters())
        assert share < 0.3 * config.parameters
        for _ in range(2):
            loss, part = one.train(), many.train()
            all_reduce(part)
            torch.testing.assert_close(part / WORLD, loss)
        for a, b in zip(many.model.parameters(), one.model.parameters(), strict=True):
            torch.testing.assert_close(a.full_tensor(), b, rtol=1e-3, atol=1e-5)
    both = partial(shared, mesh=mesh, causal=True, length=1, impl="tiled")
    assert Trainer(config, attention=both, context=1, mesh=mesh, **facts).train().isfinite()


def check_death(mesh):
    """Check that when a rank dies the others fail, well before they would time out."""
    barrier()
    if mesh.get_rank() == DIES:
        os._exit(STATUS)
    start = time.monotonic()
    q = torch.randn(1, 2, 4, 16)
    with pytest.raises(RuntimeError):
        shared(q, q, q, mesh=mesh, causal=True)
    assert time.monotonic() - start < TIMEOUT.total_seconds() / 2


def work(store, rank):
    """Check everything, as one of the processes."""
    init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=TIMEOUT
    )
    mesh = init_device_mesh("cpu", (WORLD,))
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "heads"))
    for case, (_, how) in CASES.items():
        if get(how.get("impl", "tiled")).why_not(Problem(), "cpu"):
            continue  # the interpreter of an older Triton needs an older numpy
        sys.stderr.write(f"{rank}: {case}\n")
        check_case(mesh, case)
    checks = (check_compiled_first, check_rest, check_compiled, check_other_derivatives)
    checks += (check_training,)
    for check in checks:
        sys.stderr.write(f"{rank}: {check.__name__}\n")
        check(mesh)
    sys.stderr.write(f"{rank}: meshes of two dimensions\n")
    check_refusals(mesh, both)
    check_tensor_parallel(both)
    sys.stderr.write(f"{rank}: death\n")
    check_death(mesh)


def test_ranks_share_the_whole(tmp_path):
    """Four processes compute what one computes, and end when one of them dies."""
    root = Path(flashattn.__file__).parents[1]
    env = os.environ | {
        "PYTHONPATH": str(root),
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    with (tmp_path / "said.txt").open("w") as said:
        process = subprocess.Popen(
            [sys.executable, __file__, str(tmp_path / "store")],
            env=env,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            start_new_session=True,
        )
        try:
            statuses, _ = process.communicate(timeout=SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    wanted = [STATUS if rank == DIES else 0 for rank in range(WORLD)]
    assert [*map(int, statuses.split())] == wanted, (tmp_path / "said.txt").read_text()


if __name__ == "__main__":
    torch.set_num_threads(1)
    patch_interpreter()
    # Done once, before the fork: importing the compiler and its imports, and preparing kernels.
    for module in ("torch._inductor.compile_fx", "networkx"):
        import_module(module)
    if not get("triton").why_not(Problem(), "cpu"):
        q = torch.randn(1, 1, 40, 16, requires_grad=True)
        attention(q, q, q, impl="triton").sum().backward()
    statuses = fork(WORLD, partial(work, sys.argv[1]), SECONDS)
    sys.stdout.write(" ".join(map(str, statuses)))
