"""Training cases of the benchmarks: a Trainer by names, its costs, and its steps as callables."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import accumulate, pairwise
from multiprocessing import get_context
from typing import Any

import torch

import flashattn.impls  # noqa: F401 - registers everyone
from flashattn import registry
from flashattn.bounds import Bounds
from flashattn.costs import Costs
from flashattn.lm import SIZES, Attention
from flashattn.measure.memory import allocated_bytes
from flashattn.measure.timing import clock_of
from flashattn.problem import Problem
from flashattn.testing.sample import bounds_of
from flashattn.testing.sweep import DEVICE, UNEQUAL
from flashattn.training import Trainer

# What attention saves (see ``Costs``), if not "flash". Autocast widens a softmax on CUDA only.
HOLDS = {
    "cuda": {"naive": "naive_autocast", "sdpa_math": "naive"},
    "cpu": {"naive": "naive", "sdpa_math": "naive"},
}
PASSED_ON = ("context", "batch", "precision", "checkpoint")  # fields of Costs that Trainer takes
MODELS: dict[tuple[Any, ...], Trained] = {}  # at most one, that of the last case


def attend(name: str, bounds: Bounds | None = None) -> Attention:
    """Return the causal attention of a registered implementation, as a model takes it.

    ``bounds`` are the mask instead, if given. They are made once for all calls, whereas under
    autocast each call with ``documents`` would make them again.
    """
    impl = registry.get(name)
    mask: dict[str, Any] = {"causal": "top_left"}
    if bounds is not None:
        mask = {"causal": False, "bounds": bounds}

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return impl(q, k, v, **mask, scale=q.shape[-1] ** -0.5)[0]

    return attention


class Trained:
    """A model in training; ``asked`` are arguments of ``costs``, the rest of ``Trainer``."""

    def __init__(
        self,
        *,
        compiled: bool = False,
        phase: Callable[[str], AbstractContextManager[object]] = nullcontext,
        **asked: Any,
    ) -> None:
        """Create the model; one that is too large runs out of memory here."""
        device = asked["device"]
        self.ground = allocated_bytes(device)  # allocated before the model
        self.costs = costs(**asked)
        self.trainer = Trainer(
            self.costs.config,
            attention=attend(asked["impl"], bounds_of(problem_of(self.costs), device)),
            device=device,
            compiled=compiled,
            phase=phase,
            **{name: getattr(self.costs, name) for name in PASSED_ON},
        )

    def timed(self, step: str) -> tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]:
        """Return a step, and a function that makes its arguments, untimed."""
        trainer = self.trainer
        trainer.optimizer.zero_grad(set_to_none=True)
        if step != "backward":
            steps = {
                "forward": trainer.forward,
                "forward+backward": trainer.forward_backward,
                "train": trainer.train,
            }
            return steps[step], tuple

        def graph() -> tuple[torch.Tensor]:
            trainer.optimizer.zero_grad(set_to_none=True)
            return (trainer.loss(),)

        return trainer.backward, graph

    def state_bytes(self) -> dict[str, int]:
        """Return the current bytes of parameters, gradients and optimizer state."""
        parameters = list(self.trainer.model.parameters())
        state = (x for entry in self.trainer.optimizer.state.values() for x in entry.values())
        return {
            "parameters": _bytes(parameters),
            "gradients": _bytes(p.grad for p in parameters),
            "optimizer": _bytes(state),
        }

    def kept_anyway(self) -> list[torch.Tensor]:
        """Return the tensors that live on without a graph: parameters, buffers, tokens, targets."""
        model = self.trainer.model
        return [*model.parameters(), *model.buffers(), self.trainer.tokens, self.trainer.targets]


def forget_models() -> None:
    """Drop the cached model, and the code compiled for it."""
    MODELS.clear()
    gc.collect()
    torch.compiler.reset()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def costs(
    *,
    size: str,
    context: int,
    batch: int,
    precision: str,
    impl: str,
    device: torch.device,
    packed: bool = False,
    checkpoint: bool = False,
) -> Costs:
    """Return the costs of a step, before anything is allocated.

    If ``packed``, the sequence is packed from ``documents_of(context)``. With ``checkpoint`` each
    block is recomputed in the backward.
    """
    config = SIZES[size]
    return Costs(
        config=replace(config, longest=max(config.longest, context)),
        batch=batch,
        context=context,
        precision=precision,
        attention=HOLDS[device.type].get(impl, "flash"),
        documents=documents_of(context) if packed else None,
        checkpoint=checkpoint,
        device=device.type,
    )


def documents_of(context: int) -> tuple[int, ...]:
    """Return document lengths in proportion to ``UNEQUAL`` that add up to ``context``."""
    ends = (end * context // sum(UNEQUAL) for end in accumulate(UNEQUAL, initial=0))
    return tuple(end - start for start, end in pairwise(ends))


def problem_of(costs: Costs) -> Problem:
    """Return the attention problem of each layer of the model with these costs."""
    config = costs.config
    return Problem(
        batch=costs.batch,
        heads=config.heads,
        seq_q=costs.context,
        head_dim=config.head_dim,
        causal=True,
        documents=tuple((n, n) for n in costs.documents) if costs.documents else None,
        dtype={"bf16": "bfloat16", "fp16": "float16"}.get(costs.precision, "float32"),
    )


def _bytes(tensors: Iterable[object]) -> int:
    return sum(x.nbytes for x in tensors if isinstance(x, torch.Tensor))


def cold_steps(**facts: Any) -> list[float]:
    """Return the seconds of training steps after a warm-up, in a new process.

    This is host time, with a synchronization after each step: most of a first step is spent on the
    host.

    Args:
        facts: size, context, batch and precision, see ``Trained``; ``device``, a device type;
            ``warm_steps``, the number of untimed steps; ``measured``, that of timed steps.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as new:
        return new.submit(_steps, **facts).result()


def _steps(*, warm_steps: int, measured: int, device: str, **facts: Any) -> list[float]:
    where = torch.device(device)
    trainer = Trained(impl="naive", device=where, **facts).trainer
    wait = clock_of(where).synchronize
    for _ in range(warm_steps):
        trainer.train()
    seconds = []
    for _ in range(measured):
        wait()
        start = time.perf_counter()
        trainer.train()
        wait()
        seconds.append(time.perf_counter() - start)
    return seconds
