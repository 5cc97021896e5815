"""Two processes of PyTorch's context parallelism, which meet at a file."""

from __future__ import annotations

import sys
from datetime import timedelta
from functools import partial
from importlib import import_module

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._attention import (
    context_parallel,
    context_parallel_unshard,
    set_rotate_method,
)

from flashattn.integrations import operators, sdpa
from flashattn.testing.patching import patch_interpreter
from flashattn.testing.ranks import fork

WORLD = 2
NAME = "_scaled_dot_product_flash_attention"


def main(meeting, rank):
    """Try both ways to send keys and values around."""
    limit = timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD, timeout=limit
    )
    mesh = init_device_mesh("cpu", (WORLD,))
    answered = []
    for name in (NAME, f"{NAME}_backward"):
        operators.KERNELS[name] = counted(name, operators.KERNELS[name], answered)
    for rotation in ("allgather", "alltoall"):
        set_rotate_method(rotation)
        answered.clear()
        compare(mesh, answered)
    dist.barrier()


def compare(mesh, answered):
    """Compare o and gradients of two processes with those of one."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, 2, 32, 16) for _ in range(4))
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    o = torch.nn.functional.scaled_dot_product_attention(*whole, is_causal=True)
    wanted = [o, *torch.autograd.grad(o, whole, grad)]

    buffers = [x.clone() for x in (q, k, v, grad)]
    with sdpa.enabled("cpu"), context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4):
        *local, local_grad = (x.clone() for x in buffers)
        shards = [DTensor.from_local(x.requires_grad_(), mesh, [Shard(2)]) for x in local]
        # On a CPU SDPA would call an operator that context parallelism does not know.
        o = getattr(torch.ops.aten, NAME)(*shards, 0.0, True)[0].to_local()
        own = [o, *(x.to_local() for x in torch.autograd.grad(o, shards, local_grad))]
        got = context_parallel_unshard(mesh, [x.detach().clone() for x in own], [2] * 4)
    torch.testing.assert_close(got, wanted)
    assert sorted(set(answered)) == [NAME, f"{NAME}_backward"]
    assert len(answered) == 2 * WORLD


def counted(name, kernel, answered):
    """Return a kernel that notes its name when it has answered."""

    def call(*args, **options):
        result = kernel(*args, **options)
        answered.append(name)
        return result

    return call


if __name__ == "__main__":
    for module in ("torch._dynamo", "flashattn.kernels.execute"):  # or each process would
        import_module(module)
    torch.set_num_threads(1)
    patch_interpreter()
    sys.exit(any(fork(WORLD, partial(main, sys.argv[1]), seconds=120)))
