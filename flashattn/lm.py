"""The transformer used in the studies: RMSNorm, RoPE, SwiGLU; attention is an argument.

Shapes: ``B`` batch, ``T`` context, ``C`` width, ``F`` hidden size of the MLP, ``V`` vocabulary,
``H`` heads, ``D = C / H``.

The residual stream is fp32 even under ``torch.autocast``: autocast does not cast the embedding and
the norms, and the outputs of a block are promoted when they are added.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the conventional name
from torch.utils.checkpoint import checkpoint as rerun

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Rotation = Callable[[torch.Tensor], torch.Tensor]

EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class Config:
    """The shape of a transformer.

    Args:
        width: C, the width of the residual stream.
        hidden: F, the hidden size of the MLP.
        layers: number of blocks.
        heads: H; must divide C, and C / H must be even for RoPE.
        vocab: V.
        theta: base of RoPE: position t rotates pair i by ``t * theta ** (-2 i / D)``.
        longest: maximum context, the length of the RoPE tables.

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
        """Validate the sizes."""
        for name in ("width", "hidden", "layers", "heads", "vocab", "longest"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: wanted at least 1, got {getattr(self, name)}")
        if self.width % self.heads != 0 or self.head_dim % 2 != 0:
            raise ValueError(
                f"heads: wanted a divisor of the width {self.width} that leaves an even head"
                f" dimension, got {self.heads}"
            )
        if not self.theta > 0:
            raise ValueError(f"theta: wanted a number above 0, got {self.theta}")

    @property
    def head_dim(self) -> int:
        """D."""
        return self.width // self.heads

    @property
    def block_matrices(self) -> int:
        """Matrix weights of a block: q, k, v and o are C x C, w1 and w3 are F x C, w2 is C x F."""
        return 4 * self.width**2 + 3 * self.width * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters: blocks with two norms each, final norm, embedding and untied head."""
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
    """Fill with a normal distribution truncated at 3 std, by inverse transform sampling.

    Unlike ``nn.init.trunc_normal_`` this never reads the values, so it works on the meta device and
    does not synchronize a GPU.
    """
    edge = math.erf(3 / math.sqrt(2))
    weight.uniform_(-edge, edge).erfinv_().mul_(std * math.sqrt(2))


def _linear(inputs: int, outputs: int) -> nn.Linear:
    """Return a linear layer without bias, initialized to preserve variance."""
    linear = nn.Linear(inputs, outputs, bias=False)
    _truncated_normal(linear.weight, std=inputs**-0.5)
    return linear


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dimension; statistics in fp32.

    The result has the dtype of x. Source: Zhang and Sennrich, 2019.
    """

    def __init__(self, width: int) -> None:
        """Initialize the weight to ones."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x [..., C]."""
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), EPS)


class RoPE(nn.Module):
    """Rotate each pair (x[i], x[i + D / 2]) at position t by ``t * theta ** (-2 i / D)``.

    This is the rotate-half form. Scores then depend only on the distance between positions.
    Source: Su et al., 2021, equation 34.
    """

    cos: torch.Tensor  # [longest, D / 2]
    sin: torch.Tensor

    def __init__(self, config: Config) -> None:
        """Compute the tables in fp64, because fp32 angles at position 8191 are off by 5e-4."""
        super().__init__()
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float64)
        frequencies = config.theta ** (-half / config.head_dim)
        angles = torch.arange(config.longest, dtype=torch.float64)[:, None] * frequencies
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Rotate x [B, T, ..., D] in fp32; the result has the dtype of x.

        Args:
            x: rows at positions 0 ... T - 1, unless ``positions`` is given.
            positions: [T], the positions of the rows.
        """
        rows = (x.shape[1], *[1] * (x.ndim - 3), x.shape[-1] // 2)
        at = slice(x.shape[1]) if positions is None else positions
        cos, sin = (table[at].view(rows) for table in (self.cos, self.sin))
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class SelfAttention(nn.Module):
    """Multi-head self-attention without biases; ``attention`` applies the mask.

    One product computes q, k and v, so their input is cast once. They are passed on as [B, H, T, D]
    views of a [B, T, ..., H, D] layout, without a copy.
    """

    def __init__(self, config: Config, attention: Attention) -> None:
        """Create the projections."""
        super().__init__()
        self.attention, self.head_dim = attention, config.head_dim
        self.qkv = _linear(config.width, 3 * config.width)
        self.o = _linear(config.width, config.width)

    def forward(self, x: torch.Tensor, rope: Rotation) -> torch.Tensor:
        """Map x [B, T, C] to [B, T, C]."""
        qkv = self.qkv(x).unflatten(-1, (3, -1, self.head_dim))  # [B, T, 3, H, D]
        q, k = rope(qkv[:, :, :2]).transpose(1, 3).unbind(2)
        v = qkv[:, :, 2].transpose(1, 2)
        return self.o(self.attention(q, k, v).transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """``w2(silu(w1 x) * w3 x)``, w1 and w3 stacked in one matrix. Source: Shazeer, 2020."""

    def __init__(self, config: Config) -> None:
        """Create the matrices."""
        super().__init__()
        self.w13 = _linear(config.width, 2 * config.hidden)
        self.w2 = _linear(config.hidden, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [B, T, C] to [B, T, C]."""
        gate, up = self.w13(x).chunk(2, dim=-1)
        return self.w2(F.silu(gate) * up)


class Block(nn.Module):
    """A pre-norm block: attention, then the MLP."""

    def __init__(self, config: Config, attention: Attention) -> None:
        """Create the layers."""
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(config.width), RMSNorm(config.width)
        self.attention = SelfAttention(config, attention)
        self.mlp = SwiGLU(config)

    def forward(self, x: torch.Tensor, rope: Rotation) -> torch.Tensor:
        """Add the block's outputs to the residual stream x [B, T, C]."""
        x = x + self.attention(self.norm1(x), rope)
        return x + self.mlp(self.norm2(x))


class TransformerLM(nn.Module):
    """A decoder-only transformer language model.

    Args:
        config: shape of the model.
        attention: ``attention(q, k, v) -> o``, all [B, H, T, D]; q, k and v are strided views. It
            must apply a causal mask; this is not checked.
        checkpoint: save only the input of each block and recompute the rest in backward.
    """

    def __init__(self, config: Config, attention: Attention, *, checkpoint: bool = False) -> None:
        """Create the layers, using the global random state."""
        super().__init__()
        self.config, self.checkpoint = config, checkpoint
        self.embedding = nn.Embedding(config.vocab, config.width)
        _truncated_normal(self.embedding.weight, std=1.0)
        self.rope = RoPE(config)
        self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config.layers))
        self.norm = RMSNorm(config.width)
        self.head = _linear(config.width, config.vocab)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits of the next tokens.

        Args:
            tokens: [B, T], integers below V.
            positions: [T], each below ``config.longest``: the positions of these tokens, if they
                are part of a longer sequence, whose other tokens ``attention`` gets elsewhere.

        Returns:
            Logits [B, T, V].

        Raises:
            ValueError: T is above ``config.longest``.
        """
        if tokens.shape[1] > self.config.longest:
            msg = f"tokens: wanted a context up to {self.config.longest}, got {tokens.shape[1]}"
            raise ValueError(msg)
        x = self.embedding(tokens)  # [B, T, C]
        rope = self.rope if positions is None else partial(self.rope, positions=positions)
        for block in self.blocks:
            x = rerun(block, x, rope, use_reentrant=False) if self.checkpoint else block(x, rope)
        return self.head(self.norm(x))


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy in fp32 of logits [B, T, V] and targets [B, T]."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
