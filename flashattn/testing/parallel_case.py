"""Jobs that a process group measures together: attention, a training step, and the links.

``ranks`` starts the processes, each with ``main``. Meshes have one dimension; ``rounds`` is the
number of samples.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F  # noqa: N812 - the conventional name
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashattn import parallel
from flashattn.lm import SIZES
from flashattn.measure.device import out_of_memory
from flashattn.measure.timing import DeviceClock, HostClock
from flashattn.parallel.placement import Placement
from flashattn.parallel.plan import seen_by
from flashattn.problem import Problem
from flashattn.resolve import cumulative
from flashattn.testing.accuracy import OF_KEYS, Expected
from flashattn.testing.inputs import make_grads, make_inputs
from flashattn.testing.results import unlike
from flashattn.testing.sample import Case
from flashattn.training import Trainer

# Arguments of ``flashattn.parallel.attention``; "pytorch" is context_parallel with cuDNN instead.
METHODS: dict[str, dict[str, Any]] = {
    "keys": {},
    "keys, kept": {"keep": True},
    "keys, contiguous": {"placement": "contiguous"},
    "heads": {"exchange": "heads"},
    "pytorch": {},
}
SAID = "rank{}.txt"
VERIFIED = 64  # at most so many of a rank's last rows are verified
PIECE = {"cuda": 1 << 26, "cpu": 1 << 20}  # bytes that each rank sends when links are measured
Tensors = tuple[torch.Tensor, ...]


def attention(mesh: DeviceMesh, *, problem: str, method: str, passes: str, rounds: int) -> Any:
    """Verify and time attention by one of ``METHODS``, forward or forward+backward.

    ``problem`` is the name of the whole problem, whose lengths the ranks divide.

    Returns:
        ``samples``, seconds of the slowest rank; ``wrong``, a sentence for each exceeded budget;
        ``peak_bytes``, the maximum over the ranks; ``other_bits``, a sentence for each output whose
        bits differ in a second call; or ``unsupported``, why PyTorch's method cannot do it.
    """
    asked, device = Problem.parse(problem), mesh.device_type
    whole = [*make_inputs(asked, device=device), make_grads(asked, device=device)[0]]
    grad = passes != "forward"
    with _rows(mesh, method, whole) as rows, torch.set_grad_enabled(grad):
        leaves = [x.requires_grad_(grad) for x in rows[:3]]
        attend = _attend(mesh, method, asked)

        def call() -> Tensors:
            o = attend(*leaves)
            return (o, *torch.autograd.grad(o, leaves, rows[3])) if grad else (o,)

        try:
            got = call()
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            if method != "pytorch" or out_of_memory(error):
                raise
            return {"unsupported": f"PyTorch's context_parallel: {error}".splitlines()[0]}
        wrong = _wrong(mesh, asked, method, [leaves[0].detach(), *whole[1:3], rows[3]], got)
        other_bits = _other_bits(got, call())
        del got
        whole.clear()
        facts = _timed(mesh, call, rounds)
    for name, said in {"wrong": wrong, "other_bits": other_bits}.items():
        facts[name] = [text for texts in _gathered(mesh, said) for text in texts]
    return facts


def _other_bits(first: Tensors, second: Tensors) -> list[str]:
    """Return a sentence for each of o, dq, dk and dv whose bits differ in a second call."""
    pairs = zip(("o", "dq", "dk", "dv"), first, second, strict=False)
    return [f"in a second call {said}" for x in pairs if (said := unlike(*x))]


@contextmanager
def _rows(mesh: DeviceMesh, method: str, whole: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield this rank's rows of each tensor; for "pytorch", within ``context_parallel``."""
    if method != "pytorch" or mesh.size() == 1:
        placement = METHODS[method].get("placement", "zigzag")
        yield [parallel.shard(x, mesh, dim=2, placement=placement) for x in whole]
        return
    from torch.distributed.tensor.experimental import context_parallel  # noqa: PLC0415
    from torch.distributed.tensor.experimental._attention import (  # noqa: PLC0415
        set_rotate_method,
    )

    set_rotate_method("allgather")
    buffers = [x.clone() for x in whole]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * len(buffers)):
        yield [x.clone() for x in buffers]


def _attend(mesh: DeviceMesh, method: str, problem: Problem) -> Callable[..., torch.Tensor]:
    if method != "pytorch":
        impl = "auto" if mesh.device_type == "cuda" else "tiled"
        given = {**problem.keywords, **METHODS[method], "impl": impl}
        if isinstance(problem.documents, tuple):
            given["documents"] = cumulative(problem.documents, torch.device(mesh.device_type))[0]
        ours: Any = partial(parallel.attention, mesh=mesh, **given)
        return ours

    def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):  # looked up now: context_parallel replaces it
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=bool(problem.causal), enable_gqa=q.shape[1] != k.shape[1]
            )

    return sdpa


def _wrong(
    mesh: DeviceMesh, problem: Problem, method: str, given: list[torch.Tensor], got: Tensors
) -> list[str]:
    """Return a sentence for each budget (see ``accuracy``) that this rank's last rows exceed.

    ``given`` has this rank's rows of q, the whole k and v, and this rank's rows of the gradient of
    o. ``got`` has this rank's o and, if gradients are computed, dq, dk and dv.
    """
    kind = METHODS[method].get("placement", "zigzag")
    chunks = Placement(kind, mesh.size()).chunks(problem.seq_q)
    chunk = [x for x in chunks if x.rank == mesh.get_local_rank()][-1]
    keys, few = _last_rows(problem, slice(max(chunk.start, chunk.stop - VERIFIED), chunk.stop))
    count = few.seq_q
    found = []
    for g in sorted({0, problem.kv_heads - 1}):
        heads, own = slice(g * few.heads, (g + 1) * few.heads), slice(g, g + 1)
        q, grad_o = (x[:1, heads, -count:] for x in (given[0], given[3]))
        case = Case(
            problem=few,
            inputs=(q, given[1][:1, own, keys], given[2][:1, own, keys]),
            scale=problem.head_dim**-0.5,
            grad_o=grad_o if len(got) > 1 else None,
        )
        expected = Expected.of(case)
        results = {
            name: x[:1, heads, -count:].detach()
            for name, x in zip(("o", "dq"), got[:2], strict=False)
        }
        if len(got) > 1 and problem.causal and chunk.stop == problem.seq_kv:
            # No other rank sees the last keys, which are also the last keys of this rank.
            results |= dict(zip(OF_KEYS, (x[:1, own, -count:] for x in got[2:]), strict=True))
            expected = expected.of_keys(slice(-count, None))
        found += [f"{method}: {sentence}" for sentence in expected.failures(results)]
    return found


def _last_rows(problem: Problem, rows: slice) -> tuple[slice, Problem]:
    """Return the keys that some rows see, and both as a problem of one group of heads.

    If the rows belong to several documents, only those of the last one count.
    """
    lengths = problem.documents if isinstance(problem.documents, tuple) else ()
    start_q = start_kv = 0
    for document_q, document_kv in lengths or ((problem.seq_q, problem.seq_kv),):
        if start_q + document_q >= rows.stop:
            break
        start_q, start_kv = start_q + document_q, start_kv + document_kv
    own = slice(max(0, rows.start - start_q), rows.stop - start_q)
    keys, mask = seen_by(problem.mask, document_q, document_kv, own)
    few = replace(
        problem,
        batch=1,
        heads=problem.heads // problem.kv_heads,
        kv_heads=1,
        seq_q=own.stop - own.start,
        seq_kv=keys.stop - keys.start,
        causal=mask.causal,
        window=mask.window,
        documents=None,
    )
    return slice(keys.start + start_kv, keys.stop + start_kv), few


def train(
    mesh: DeviceMesh, *, size: str, context: int, precision: str, checkpoint: bool, rounds: int
) -> dict[str, Any]:
    """Time a training step of the transformer on one sequence; its parameters are sharded, too.

    Returns:
        ``samples`` and ``peak_bytes`` as ``attention`` does, and the ``losses`` of all steps.
    """
    device = mesh.device_type
    impl = "auto" if device == "cuda" else "tiled"
    attend: Any = partial(parallel.attention, mesh=mesh, length=context, causal=True, impl=impl)
    config = replace(SIZES[size], longest=context)
    facts: dict[str, Any] = {"batch": 1, "context": context, "precision": precision}
    facts |= {"checkpoint": checkpoint, "mesh": mesh if mesh.size() > 1 else None}
    trainer = Trainer(config, attention=attend, device=device, **facts)
    losses: list[torch.Tensor] = []
    measured = _timed(mesh, lambda: losses.append(trainer.train()), rounds)
    mean = torch.stack(losses)
    distributed.all_reduce(mean)
    return measured | {"losses": (mean / mesh.size()).tolist()}


def link(mesh: DeviceMesh, *, rounds: int) -> dict[str, float]:
    """Measure the link and memory figures of ``scaling.Machine``."""
    device, world = mesh.device_type, mesh.size()
    group = mesh.get_group().group_name
    collectives = torch.ops._c10d_functional  # noqa: SLF001 - as the product calls them

    def gather(x: torch.Tensor) -> torch.Tensor:
        arrived = collectives.all_gather_into_tensor(x, world, group)
        return collectives.wait_tensor(arrived)

    piece = torch.zeros(PIECE[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(piece)
    least = {
        name: min(_timed(mesh, call, rounds)["samples"])
        for name, call in {
            "latency": partial(gather, piece[:16]),
            "gather": partial(gather, piece),
            "copy": partial(target.copy_, piece),
        }.items()
    }
    data = max(least["gather"] - least["latency"], 1e-9)
    return {
        "latency": least["latency"],
        "link": (world - 1) * len(piece) / data,
        "copy": 2 * len(piece) / least["copy"],
    }


def _timed(mesh: DeviceMesh, call: Callable[[], Any], rounds: int) -> dict[str, Any]:
    """Return the seconds of the slowest rank for each call, and the largest peak of memory.

    All ranks begin a call together. Caches stay warm: the data of a call is larger than they are.
    """
    device = torch.device(mesh.device_type)
    token = torch.zeros(1, device=device)
    together = partial(distributed.all_reduce, token)
    for _ in range(2):
        call()
    samples: list[float] = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        event = partial(torch.cuda.Event, enable_timing=True)
        clock = DeviceClock(event, together, torch.cuda.synchronize)
        samples, _ = clock.samples(call, rounds)
    else:
        for _ in range(rounds):
            together()
            samples += HostClock().samples(call, 1)[0]
    slowest = torch.tensor(samples, device=device, dtype=torch.float64)
    distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    peaks = [x for x in _gathered(mesh, peak) if x is not None]
    return {"samples": slowest.tolist(), "peak_bytes": max(peaks, default=None)}


def _gathered(mesh: DeviceMesh, x: Any) -> list[Any]:
    """Return the objects of all ranks."""
    found: list[Any] = [None] * mesh.size()
    distributed.all_gather_object(found, x, mesh.get_group())
    return found


JOBS: dict[str, Callable[..., Any]] = {"attention": attention, "train": train, "link": link}


def main(rank: int, world: int, device: str, folder: Path, link: Connection[Any, Any]) -> None:
    """Do each job that arrives on the link; the first rank answers.

    The folder has the store in which the ranks meet, and their output.
    """
    with (folder / SAID.format(rank)).open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    limit, backend = timedelta(seconds=300), "nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
    distributed.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=limit
    )
    mesh = init_device_mesh(device, (world,))
    with suppress(EOFError):  # the asking process has ended
        while True:
            job = link.recv()
            answer = JOBS[job.pop("job")](mesh, **job)
            if rank == 0:
                link.send(answer)
    os._exit(0)  # gloo's threads sometimes abort a process that runs its destructors
