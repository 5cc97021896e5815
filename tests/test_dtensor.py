"""DTensors sharded over batches or heads give the same results without communication.

PyTorch's context parallelism, which shards rows, works on DTensors as well.
"""

import os
import subprocess
import sys
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import barrier, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental._attention import (
    context_parallel,
    context_parallel_unshard,
    set_rotate_method,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from flashattn import attention, gpus
from flashattn.integrations import dtensor, operators, sdpa
from flashattn.plan.spec import Extras
from flashattn.problem import Problem
from flashattn.testing.inputs import make_grads, make_inputs, make_scored
from flashattn.testing.patching import patch_interpreter
from flashattn.testing.ranks import fork

WORLD, SECONDS = 2, 120
FLASH = "_scaled_dot_product_flash_attention"
R, BATCH, HEADS, SEQUENCE = Replicate(), Shard(0), Shard(1), Shard(2)
SIZES = {"batch": 2, "heads": 4, "kv_heads": 2, "seq_q": 9, "seq_kv": 12, "head_dim": 16}
# Sizes, and the placements of q, of k and v, and of o.
QUIET = {
    "batch": ({}, BATCH, BATCH, BATCH),
    "heads": ({}, HEADS, HEADS, HEADS),
    "replicated": ({}, R, R, R),
    "odd batch": ({"batch": 3, "heads": 1, "kv_heads": 1}, BATCH, BATCH, BATCH),
}
MOVED = {  # DTensor has to redistribute first
    "keys replicated": ({}, HEADS, R, HEADS),
    "one key head": ({"batch": 1, "kv_heads": 1}, HEADS, R, R),
    "odd key heads": ({"batch": 1, "heads": 6, "kv_heads": 3}, HEADS, HEADS, R),
    "sequence": ({"batch": 1, "heads": 2, "kv_heads": 1}, SEQUENCE, SEQUENCE, R),
}
# They differ in everything but tensors: a call must not get the sharding rule of another.
OPTIONS = (
    {"causal": True, "return_lse": True},
    {"causal": "bottom_right", "window": (5, None), "scale": 0.7, "return_lse": False},
    {"documents": ([0, 4, 9], [0, 7, 11]), "causal": "bottom_right", "return_lse": True},
)


def sharded(x, mesh, placement):
    """Return the DTensor of a tensor that every process has in full."""
    return distribute_tensor(x, mesh, [placement], src_data_rank=None)


def attend(q, k, v, bias, sink, slopes, **options):
    """Compute attention with a bias, a sink and ALiBi."""
    made = {"bias": bias, "sink": sink, "alibi_slopes": slopes}
    return attention(q, k, v, **made, **options, impl="triton")


@cache
def answered(sizes, asked):
    """Return the arguments, outputs and gradients of attention to unsharded tensors."""
    problem = Problem(**SIZES | dict(sizes), alibi=True, bias="1hts", sink=True)
    options = dict(OPTIONS[asked])
    grads = make_grads(problem)[: 1 + options["return_lse"]]
    whole = [x.requires_grad_() for x in make_inputs(problem)]
    scored = make_scored(problem)
    whole += [scored["bias"].requires_grad_(), scored["sink"][0].requires_grad_()]
    cu = tuple(torch.tensor(x) for x in options.get("documents", ()))
    slopes = None if cu else scored["alibi_slopes"][0]
    options |= {"documents": cu} if cu else {}
    outputs = attend(*whole, slopes, **options)
    outputs = outputs if options["return_lse"] else (outputs,)
    return options, grads, whole, slopes, cu, outputs, torch.autograd.grad(outputs, whole, grads)


def check_case(mesh, case):
    """Compare attention to DTensors, and its gradients, with attention to unsharded ones."""
    sizes, of_q, of_k, of_o = (QUIET | MOVED)[case]
    for asked in range(len(OPTIONS)):
        options, grads, whole, slopes, cu, wanted, exact = answered(tuple(sizes.items()), asked)
        lse = options["return_lse"]
        if cu:
            options = options | {"documents": tuple(sharded(x, mesh, R) for x in cu)}
        given = [
            sharded(x.detach(), mesh, placed).requires_grad_()
            for x, placed in zip(whole[:3], (of_q, of_k, of_k), strict=True)
        ]
        of_heads = of_q if of_q in (HEADS, R) else R
        first = Shard(0) if of_heads == HEADS else R
        slopes = None if cu else sharded(slopes, mesh, first)
        for x, placed in zip(whole[3:], (of_heads, first), strict=True):
            given.append(sharded(x.detach(), mesh, placed).requires_grad_())
        with CommDebugMode() as communication:
            outputs = attend(*given, slopes, **options)
            outputs = outputs if lse else (outputs,)
            got = torch.autograd.grad(outputs, given, [sharded(x, mesh, of_o) for x in grads])
        assert all(x.placements == (of_o,) for x in outputs), outputs[0].placements
        if case in QUIET:
            assert communication.get_total_counts() == 0, communication.get_comm_counts()
            assert all(x.placements == (of_o,) for x in got[:3])
        for a, b in zip((*outputs, *got), (*wanted, *exact), strict=True):
            torch.testing.assert_close(a.full_tensor(), b)


class Layer(torch.nn.Module):
    """Attention between projections, whose heads tensor parallelism shards."""

    def __init__(self):
        """Make four projections, equal in each process."""
        super().__init__()
        torch.manual_seed(0)
        self.q, self.out = (torch.nn.Linear(64, 64) for _ in range(2))
        self.k, self.v = (torch.nn.Linear(64, 32) for _ in range(2))

    def forward(self, x):
        """Apply self-attention to x [B, T, 64]: 4 heads of queries, 2 of keys."""
        q, k, v = (f(x).unflatten(-1, (-1, 16)).transpose(1, 2) for f in (self.q, self.k, self.v))
        o = attention(q, k, v, causal=True, impl="triton")
        return self.out(o.transpose(1, 2).flatten(-2))


def check_layer(mesh):
    """Compare a tensor-parallel model with the same model unsharded."""
    whole, sharded, x = Layer(), Layer(), torch.randn(2, 9, 64)
    columns = ColwiseParallel(use_local_output=False)
    plan = {"q": columns, "k": columns, "v": columns, "out": RowwiseParallel()}
    parallelize_module(sharded, mesh, plan)
    outputs = [layer(x) for layer in (whole, sharded)]
    torch.testing.assert_close(*outputs)
    for o in outputs:
        o.square().sum().backward()
    for a, b in zip(sharded.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad)


def check_context_parallel(mesh):
    """Compare context parallelism on our kernels with one call, by both rotations of keys."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, 2, 32, 16) for _ in range(4))
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    o = torch.nn.functional.scaled_dot_product_attention(*whole, is_causal=True)
    wanted = [o, *torch.autograd.grad(o, whole, grad)]
    answered = []
    for name in (FLASH, f"{FLASH}_backward"):
        operators.KERNELS[name] = counted(name, operators.KERNELS[name], answered)
    for rotation in ("allgather", "alltoall"):
        set_rotate_method(rotation)
        answered.clear()
        buffers = [x.clone() for x in (q, k, v, grad)]
        with sdpa.enabled("cpu"), context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4):
            *local, local_grad = (x.clone() for x in buffers)
            shards = [DTensor.from_local(x.requires_grad_(), mesh, [SEQUENCE]) for x in local]
            # On a CPU SDPA would call an operator that context parallelism does not know.
            o = getattr(torch.ops.aten, FLASH)(*shards, 0.0, True)[0].to_local()
            own = [o, *(x.to_local() for x in torch.autograd.grad(o, shards, local_grad))]
            got = context_parallel_unshard(mesh, [x.detach().clone() for x in own], [2] * 4)
        torch.testing.assert_close(got, wanted)
        assert sorted(set(answered)) == [FLASH, f"{FLASH}_backward"]
        assert len(answered) == 2 * WORLD


def counted(name, kernel, answered):
    """Return a kernel that records its name when it returns."""

    def call(*args, **options):
        result = kernel(*args, **options)
        answered.append(name)
        return result

    return call


def work(store, rank):
    """Run all checks in one of the processes."""
    init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    dtensor.register()
    for case in QUIET | MOVED:
        sys.stderr.write(f"{case}\n")
        check_case(mesh, case)
    check_layer(mesh)
    sys.stderr.write("context parallelism\n")
    check_context_parallel(mesh)
    barrier()


@pytest.mark.why_not.with_args(lambda: gpus.INTERPRETER_FAILS)
def test_shards_are_the_whole(tmp_path):
    """Two processes get the results of one, forward and backward, from any placement.

    The same holds in PyTorch's context parallelism, which runs our kernels in both passes.
    """
    command = [sys.executable, __file__, str(tmp_path / "store")]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("heads", "placements", "offered"),
    [
        ((4, 2), [(BATCH, HEADS)] * 3, True),
        ((4, 4), [(HEADS, HEADS)] * 3, True),
        ((4, 2), [(HEADS, HEADS)] * 3, False),
        ((4, 2), [(R, HEADS), (R, R), (R, R)], True),
        ((4, 2), [(SEQUENCE, HEADS), (R, R), (R, R)], False),
        ((6, 3), [(R, Partial()), (R, R), (R, R)], False),
        ((6, 3), [(R, BATCH)] * 3, True),
    ],
)
def test_heads_are_sharded_where_they_divide(heads, placements, offered):
    """Heads are sharded if the product of the mesh dimensions that may shard them divides them."""
    mesh = SimpleNamespace(size=lambda _: 2)
    q, k, v = (
        SimpleNamespace(mesh=mesh, placements=placed, shape=(4, n, 9, 16))
        for n, placed in zip((heads[0], heads[1], heads[1]), placements, strict=True)
    )
    none, absent = [None] * len(Extras._fields), [R, R]
    options = None, 0, 0, 0.25, None, "auto", "triton", True
    rule = dtensor._forward(q, k, v, *none, *options)
    kinds, rest = [R, BATCH, *[HEADS] * offered], [None] * len(options)
    assert rule == [([x] * 2, [x] * 3 + none + rest) for x in kinds]
    one, each = (SimpleNamespace(placements=placements[0], shape=(n, 9, 2)) for n in (1, 4))
    for bounds, of_batch in ((one, R), (each, BATCH)):
        rule = dtensor._forward(q, k, v, bounds, bounds, *none[2:], *options)
        ends = [[of_batch if x == BATCH else R] * 2 + none[2:] + rest for x in kinds]
        assert rule == [([x] * 2, [x] * 3 + end) for x, end in zip(kinds, ends, strict=True)]
    rule = dtensor._backward(q, None, q, k, v, q, q, *none, *options, False)
    rest = none + rest
    assert rule == [([x] * 3 + absent, [x, None, *[x] * 5, *rest, None]) for x in kinds]


if __name__ == "__main__":
    torch.set_num_threads(1)
    patch_interpreter()
    for sizes, *_ in (QUIET | MOVED).values():  # once, for both processes
        for asked in range(len(OPTIONS)):
            answered(tuple(sizes.items()), asked)
    sys.exit(any(fork(WORLD, partial(work, sys.argv[1]), SECONDS)))
