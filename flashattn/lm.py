"""The transformer that attention is studied in: RMSNorm, RoPE, SwiGLU, five sizes.

The legend: ``B`` batch, ``T`` context, ``C`` width, ``F`` hidden, ``V`` vocabulary, ``H`` heads,
``D = C / H``. Attention is an argument of the model.

The residual stream is fp32, under ``torch.autocast`` too: the embedding and the norms are not
products, so autocast leaves them alone, and what a block adds to the stream is promoted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - everybody's name for it
from torch.utils.checkpoint import checkpoint as rerun

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class Config:
    """The shape of a transformer.

    Args:
        width: C, of the residual stream.
        hidden: F, between the MLP's matrices.
        layers: blocks.
        heads: H; must divide C into head dimensions that are even, for RoPE turns pairs.
        vocab: V.
        theta: RoPE's base: pair i turns by ``t * theta ** (-2 i / D)`` at position t.
        longest: the largest context; RoPE's tables have a row for each position.

    Raises:
        ValueError: a size is below 1, H does not divide C, D is odd, or theta is not above 0.
    """

    width: int
    hidden: int
    layers: int
    heads: int
    vocab: int = 10_000
    theta: float = 10_000.0
    longest: int = 8192

    def __post_init__(self) -> None:
        """Check."""
        for name in ("width", "hidden", "layers", "heads", "vocab", "longest"):
            if getattr(self, name) < 1:
                msg = f"{name}: wanted at least 1, got {getattr(self, name)}"
                raise ValueError(msg)
        if self.width % self.heads != 0 or self.head_dim % 2 != 0:
            msg = (
                f"heads: wanted a divisor of the width {self.width} that leaves an even head"
                f" dimension, got {self.heads}"
            )
            raise ValueError(msg)
        if not self.theta > 0:
            msg = f"theta: wanted a number above 0, got {self.theta}"
            raise ValueError(msg)

    @property
    def head_dim(self) -> int:
        """D."""
        return self.width // self.heads

    @property
    def block_matrices(self) -> int:
        """Weights of one block's matrices: q, k, v, o are C x C; w1, w3 are F x C, w2 is C x F."""
        return 4 * self.width**2 + 3 * self.width * self.hidden

    @property
    def parameters(self) -> int:
        """Blocks with two norms each, the final norm, the embedding and the untied head."""
        block = self.block_matrices + 2 * self.width
        return self.layers * block + self.width + 2 * self.vocab * self.width


SIZES = {
    "tiny": Config(width=128, hidden=512, layers=2, heads=4, vocab=1000),  # for a laptop
    "small": Config(width=768, hidden=3072, layers=12, heads=12),
    "medium": Config(width=1024, hidden=4096, layers=24, heads=16),
    "large": Config(width=1280, hidden=5120, layers=36, heads=20),
    "xl": Config(width=1600, hidden=6400, layers=48, heads=25),
    "2.7B": Config(width=2560, hidden=10240, layers=32, heads=32),
}


@torch.no_grad()
def _truncated_normal(weight: torch.Tensor, std: float) -> None:
    """Fill with normal numbers cut at three deviations, by the inverse of their distribution.

    Unlike ``nn.init.trunc_normal_`` it never looks at what it drew, so it works on the meta device
    and a GPU need not wait.
    """
    edge = math.erf(3 / math.sqrt(2))
    weight.uniform_(-edge, edge).erfinv_().mul_(std * math.sqrt(2))


def _linear(inputs: int, outputs: int) -> nn.Linear:
    """Return a matrix without bias whose outputs have the variance of its inputs."""
    linear = nn.Linear(inputs, outputs, bias=False)
    _truncated_normal(linear.weight, std=inputs**-0.5)
    return linear


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dimension; statistics in fp32.

    The result has x's dtype. Source: Zhang and Sennrich, 2019.
    """

    def __init__(self, width: int) -> None:
        """Start as the identity on rows whose mean square is 1."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x [..., C]."""
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), EPS)


class RoPE(nn.Module):
    """Turn each pair (x[i], x[i + D / 2]) at position t by ``t * theta ** (-2 i / D)``.

    The half-rotation form: pairs are half a head apart, not neighbours. A score then depends on
    the distance of its two positions only. Source: Su et al., 2021, equation 34.
    """

    cos: torch.Tensor  # [longest, D / 2]
    sin: torch.Tensor

    def __init__(self, config: Config) -> None:
        """Tabulate in fp64, keep in fp32: at position 8191 an fp32 angle is off by 5e-4."""
        super().__init__()
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float64)
        turns = config.theta ** (-half / config.head_dim)
        angles = torch.arange(config.longest, dtype=torch.float64)[:, None] * turns
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Turn x [B, T, ..., D] in fp32; the result has x's dtype."""
        rows = (x.shape[1], *[1] * (x.ndim - 3), x.shape[-1] // 2)
        cos, sin = (table[: x.shape[1]].view(rows) for table in (self.cos, self.sin))
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class SelfAttention(nn.Module):
    """Multi-head self-attention without biases; what a query sees is up to ``attention``.

    q, k and v come from one product, so that their input is cast once and the GPU is kept busy,
    and are handed on as [B, H, T, D] views of memory laid out [B, T, ..., H, D], without a copy.
    """

    def __init__(self, config: Config, attention: Attention) -> None:
        """Make the matrices."""
        super().__init__()
        self.attention, self.head_dim = attention, config.head_dim
        self.qkv = _linear(config.width, 3 * config.width)
        self.o = _linear(config.width, config.width)

    def forward(self, x: torch.Tensor, rope: RoPE) -> torch.Tensor:
        """Attend from x [B, T, C] to itself."""
        qkv = self.qkv(x).unflatten(-1, (3, -1, self.head_dim))  # [B, T, 3, H, D]
        q, k = rope(qkv[:, :, :2]).transpose(1, 3).unbind(2)
        v = qkv[:, :, 2].transpose(1, 2)
        return self.o(self.attention(q, k, v).transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """``w2(silu(w1 x) * w3 x)``, w1 and w3 stacked in one matrix. Source: Shazeer, 2020."""

    def __init__(self, config: Config) -> None:
        """Make the matrices."""
        super().__init__()
        self.w13 = _linear(config.width, 2 * config.hidden)
        self.w2 = _linear(config.hidden, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [B, T, C]."""
        gate, up = self.w13(x).chunk(2, dim=-1)
        return self.w2(F.silu(gate) * up)


class Block(nn.Module):
    """Attention, then the MLP, each added to the stream and each behind its norm."""

    def __init__(self, config: Config, attention: Attention) -> None:
        """Make the parts."""
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(config.width), RMSNorm(config.width)
        self.attention = SelfAttention(config, attention)
        self.mlp = SwiGLU(config)

    def forward(self, x: torch.Tensor, rope: RoPE) -> torch.Tensor:
        """Add to the residual stream x [B, T, C]."""
        x = x + self.attention(self.norm1(x), rope)
        return x + self.mlp(self.norm2(x))


class TransformerLM(nn.Module):
    """A decoder-only transformer language model.

    Args:
        config: its shape.
        attention: ``attention(q, k, v) -> o``, all [B, H, T, D], q, k and v strided views. It must
            be causal, which nothing here checks.
        checkpoint: keep only each block's input for backward, and run the block again there.
    """

    def __init__(self, config: Config, attention: Attention, *, checkpoint: bool = False) -> None:
        """Make the parts, from torch's global random numbers."""
        super().__init__()
        self.config, self.checkpoint = config, checkpoint
        self.embedding = nn.Embedding(config.vocab, config.width)
        _truncated_normal(self.embedding.weight, std=1.0)
        self.rope = RoPE(config)
        self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config.layers))
        self.norm = RMSNorm(config.width)
        self.head = _linear(config.width, config.vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, T, V] of each next token.

        Args:
            tokens: [B, T], integers below V.

        Raises:
            ValueError: T is above ``config.longest``.
        """
        if tokens.shape[1] > self.config.longest:
            msg = f"tokens: wanted a context up to {self.config.longest}, got {tokens.shape[1]}"
            raise ValueError(msg)
        x = self.embedding(tokens)  # [B, T, C]
        for block in self.blocks:
            if self.checkpoint:
                x = rerun(block, x, self.rope, use_reentrant=False)
            else:
                x = block(x, self.rope)
        return self.head(self.norm(x))


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy, in fp32, of logits [B, T, V] and targets [B, T]."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
