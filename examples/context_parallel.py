"""Shard one sequence over several GPUs, or over several processes on a CPU.

torchrun --nproc-per-node 2 examples/context_parallel.py
"""

from __future__ import annotations

import os
import sys

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from flashattn import attention, parallel

LENGTH = 1000  # any; ranks need not have the same number of rows


def main() -> None:
    """Run both passes on all ranks, and print how far they are from a call on one rank."""
    world = int(os.environ["WORLD_SIZE"])
    device = "cuda" if torch.cuda.device_count() >= world else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (world,))

    torch.manual_seed(0)  # the same on all ranks
    whole = [torch.randn(1, heads, LENGTH, 64, device=device) for heads in (8, 2, 2)]
    q, k, v = (parallel.shard(x, mesh, dim=2).requires_grad_() for x in whole)
    for how in ({"causal": True}, {"causal": True, "window": (100, None)}):
        o = parallel.attention(q, k, v, mesh=mesh, length=LENGTH, **how)
        (dk,) = torch.autograd.grad(o.sum(), k)

        leaves = [x.clone().requires_grad_() for x in whole]
        wanted = attention(*leaves, **how)
        (wanted_dk,) = torch.autograd.grad(wanted.sum(), leaves[1])
        pairs = {"o": (o, wanted), "dk": (dk, wanted_dk)}
        for name, (own, exact) in pairs.items():
            got = parallel.unshard(own, mesh, dim=2, length=LENGTH)
            apart = (got - exact).abs().max().item()
            if mesh.get_rank() == 0:
                print(f"{how}: {name} of {mesh.size()} ranks differs by at most {apart:.1e}")
    distributed.barrier()
    distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort a process in its destructors


if __name__ == "__main__":
    main()
