"""Training as benchmarks ask for it: a Trainer by names, its costs, and its steps as callables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

import flashattn.impls  # noqa: F401 - registers everyone
from flashattn import registry
from flashattn.costs import Costs
from flashattn.lm import SIZES, Attention
from flashattn.measure.memory import allocated_bytes
from flashattn.problem import Problem
from flashattn.training import Trainer

# What attention keeps, where that is not what flash does. Autocast widens a softmax on CUDA only.
HOLDS = {
    "cuda": {"naive": "naive_autocast", "sdpa_math": "naive"},
    "cpu": {"naive": "naive", "sdpa_math": "naive"},
}


def attend(name: str) -> Attention:
    """Return the causal attention of a registered implementation, as a model takes it."""
    impl = registry.get(name)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return impl(q, k, v, causal="top_left", scale=None)[0]

    return attention


class Trained:
    """A model in training.

    Args:
        size: a key of ``lm.SIZES``.
        context: T.
        batch: B.
        precision: one of Trainer's.
        impl: the name of the attention.
        device: where.
        compiled: through torch.compile.
        phase: see Trainer.
    """

    def __init__(
        self,
        *,
        size: str,
        context: int,
        batch: int,
        precision: str,
        impl: str,
        device: torch.device,
        compiled: bool = False,
        phase: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Make it; this is where a model that is too large runs out of memory."""
        self.ground = allocated_bytes(device)  # not the model's
        self.costs = costs(
            size=size,
            context=context,
            batch=batch,
            precision=precision,
            impl=impl,
            device=device,
        )
        self.trainer = Trainer(
            SIZES[size],
            attention=attend(impl),
            batch=batch,
            context=context,
            precision=precision,
            device=device,
            compiled=compiled,
            phase=phase,
        )

    def timed(self, step: str) -> tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]:
        """Return a step, and what makes its arguments outside the clock."""
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
        """Return the bytes of parameters, gradients and the optimizer's state, as they are now."""
        parameters = list(self.trainer.model.parameters())
        state = [
            x
            for entry in self.trainer.optimizer.state.values()
            for x in entry.values()
            if isinstance(x, torch.Tensor)
        ]
        return {
            "parameters": _bytes(parameters),
            "gradients": _bytes([p.grad for p in parameters if p.grad is not None]),
            "optimizer": _bytes(state),
        }

    def kept_anyway(self) -> list[torch.Tensor]:
        """Return what lives on without a graph: parameters, tables, tokens."""
        model = self.trainer.model
        return [*model.parameters(), *model.buffers(), self.trainer.tokens, self.trainer.targets]


def costs(
    *, size: str, context: int, batch: int, precision: str, impl: str, device: torch.device
) -> Costs:
    """Return what a step costs, before anything is made."""
    return Costs(
        config=SIZES[size],
        batch=batch,
        context=context,
        precision=precision,
        attention=HOLDS[device.type].get(impl, "flash"),
        device=device.type,
    )


def problem_of(costs: Costs) -> Problem:
    """Return the attention in each layer of the model that costs this."""
    config = costs.config
    return Problem(
        batch=costs.batch,
        heads=config.heads,
        seq_q=costs.context,
        head_dim=config.head_dim,
        causal=True,
        dtype={"bf16": "bfloat16", "fp16": "float16"}.get(costs.precision, "float32"),
    )


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)
