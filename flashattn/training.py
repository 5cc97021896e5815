"""Training steps of one model on one batch, for the studies of time, profile and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.distributed.device_mesh import DeviceMesh

from flashattn.checks import check_among
from flashattn.lm import Attention, Config, TransformerLM, cross_entropy

# The dtype of autocast for each precision; None disables autocast.
AUTOCAST = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Trainer:
    """A ``TransformerLM`` with fp32 parameters, random tokens, and AdamW.

    Each part of a step runs under ``phase``: "forward", "loss", "backward" and "optimizer".

    Args:
        config: shape of the model.
        attention: causal attention of the model.
        batch: B.
        context: T.
        precision: "fp32" for IEEE products; "tf32" for tensor cores on a GPU; "bf16" and "fp16" for
            ``torch.autocast`` (fp16 without a gradient scaler, so only for measurements).
        device: where to run.
        compiled: whether to compile the model as one graph, or each block if there is a mesh.
        checkpoint: whether to recompute each block in backward.
        seed: seed of the parameters and the tokens.
        phase: ``phase(name)`` returns the context of a part.
        mesh: a mesh of one dimension, over whose ranks the tokens of each sequence and the
            parameters (FSDP2) are sharded. ``attention`` then attends to the tokens of all ranks,
            as ``flashattn.parallel.attention`` does, and a loss is this rank's share: the loss of
            all tokens is the mean over the ranks.
        placement: which rank has which tokens, see ``flashattn.parallel.shard``.

    Raises:
        ValueError: precision is unknown, batch is below 1, or context is below 1 or above
            ``config.longest``; or the mesh or the placement is wrong.
    """

    def __init__(
        self,
        config: Config,
        *,
        attention: Attention,
        batch: int,
        context: int,
        precision: str,
        device: torch.device | str,
        compiled: bool = False,
        checkpoint: bool = False,
        seed: int = 0,
        phase: Callable[[str], AbstractContextManager[object]] = nullcontext,
        mesh: DeviceMesh | None = None,
        placement: str = "zigzag",
    ) -> None:
        """Create model, batch and optimizer; the global random state is unchanged."""
        _check(config, batch=batch, context=context, precision=precision)
        self.device, self.precision, self.phase = torch.device(device), precision, phase
        on_cuda = self.device.type == "cuda"
        with torch.random.fork_rng(devices=[self.device] if on_cuda else []), self.device:
            torch.manual_seed(seed)
            self.model = TransformerLM(config, attention, checkpoint=checkpoint)
            self.tokens, self.targets = torch.randint(config.vocab, (2, batch, context))
        self.positions: torch.Tensor | None = None
        if mesh is not None:
            self._share(mesh, placement, compiled=compiled)
            compiled = False
        # FSDP averages gradients over ranks, which may have different numbers of tokens.
        ranks = 1 if mesh is None else mesh.size()
        self._weight = ranks * self.tokens.numel() / (batch * context)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=on_cuda)
        self._call = torch.compile(self.model, fullgraph=True) if compiled else self.model

    def _share(self, mesh: DeviceMesh, placement: str, *, compiled: bool) -> None:
        """Shard tokens and parameters; compile each block, as FSDP breaks graphs between blocks."""
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - slow to import

        from flashattn.parallel import positions, shard  # noqa: PLC0415

        self.positions = positions(self.tokens.shape[1], mesh, placement=placement)
        self.tokens, self.targets = (
            shard(x, mesh, dim=1, placement=placement) for x in (self.tokens, self.targets)
        )
        for block in self.model.blocks:
            if compiled:
                block.compile(fullgraph=True)
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    @torch.no_grad()
    def forward(self) -> torch.Tensor:
        """Return the logits [B, T, V] without a graph."""
        with self._precision(), self.phase("forward"):
            return self._call(self.tokens, self.positions)

    def loss(self) -> torch.Tensor:
        """Return the mean cross-entropy with its graph."""
        with self._precision():
            with self.phase("forward"):
                logits = self._call(self.tokens, self.positions)
            with self.phase("loss"):
                if not self.targets.numel():  # a rank may have no tokens; FSDP wants its graph
                    return logits.float().sum()
                loss = cross_entropy(logits, self.targets)
                return loss if self._weight == 1 else loss * self._weight

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradients of ``loss`` and free its graph."""
        # Backward repeats the dtypes of autocast by itself, but not the TF32 setting.
        with _products(tf32=self.precision == "tf32"), self.phase("backward"):
            loss.backward()

    def forward_backward(self) -> torch.Tensor:
        """Compute new gradients and return the detached loss."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss()
        self.backward(loss)
        return loss.detach()

    def train(self) -> torch.Tensor:
        """Take one AdamW step and return the detached loss before it."""
        loss = self.forward_backward()
        with self.phase("optimizer"):
            self.optimizer.step()
        return loss

    @contextmanager
    def _precision(self) -> Iterator[None]:
        dtype = AUTOCAST[self.precision]
        cast = torch.autocast(self.device.type, dtype=dtype) if dtype else nullcontext()
        with _products(tf32=self.precision == "tf32"), cast:
            yield


def _check(config: Config, *, batch: int, context: int, precision: str) -> None:
    check_among("precision", precision, AUTOCAST)
    if batch < 1:
        raise ValueError(f"batch: wanted at least 1, got {batch}")
    if not 1 <= context <= config.longest:
        raise ValueError(f"context: wanted 1 to {config.longest}, got {context}")


@contextmanager
def _products(*, tf32: bool) -> Iterator[None]:
    """Set whether fp32 products on a GPU use TF32; restore the setting afterwards."""
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "tf32" if tf32 else "ieee"
    try:
        yield
    finally:
        settings.fp32_precision = before
