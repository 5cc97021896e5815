"""What the gate times: few cases, each for a part of the code that no other case runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Attend:
    """One pass of one attention on random normal inputs.

    Args:
        name: of the case.
        why: it is here.
        impl: a registered name, or "auto" for the public function and its checks.
        step: forward or backward.
        shape: B, H, G, T and D, with S = T; G the key/value heads.
        causal: top-left, or nothing is hidden.
        dtype: the name of a torch.dtype.
    """

    name: str
    why: str
    impl: str
    step: str
    shape: tuple[int, int, int, int, int]
    causal: bool = False
    dtype: str = "float32"

    def __str__(self) -> str:
        """Return the name, which is a test's id."""
        return self.name


@dataclass(frozen=True, kw_only=True)
class Model:
    """One step of the transformer with causal attention.

    Args:
        name: of the case.
        why: it is here.
        impl: a registered name.
        step: forward or train.
        width: C.
        hidden: F.
        layers: blocks.
        heads: H.
        batch: B.
        context: T.
        vocab: V.
        precision: of the Trainer.
        compiled: through torch.compile.
    """

    name: str
    why: str
    impl: str
    step: str
    width: int
    hidden: int
    layers: int
    heads: int
    batch: int
    context: int
    vocab: int = 10_000
    precision: str = "fp32"
    compiled: bool = False

    def __str__(self) -> str:
        """Return the name, which is a test's id."""
        return self.name


Case = Attend | Model


def message(case: Case) -> dict[str, Any]:
    """Return what a worker is told of the case: JSON's own types."""
    return {"kind": type(case).__name__, **asdict(case)}


CPU: tuple[Case, ...] = (
    Attend(
        name="tiled-forward-full",
        why="the tile loop, nothing hidden: products and the online softmax",
        impl="tiled",
        step="forward",
        shape=(1, 1, 1, 256, 64),
    ),
    Attend(
        name="tiled-forward-causal-long",
        why="many tiles: what a tile costs in Python, and that half of them are skipped",
        impl="tiled",
        step="forward",
        shape=(1, 1, 1, 384, 64),
        causal=True,
    ),
    Attend(
        name="tiled-forward-short-bf16",
        why="many rows in one tile, and the casts to fp32",
        impl="tiled",
        step="forward",
        shape=(8, 4, 4, 48, 64),
        dtype="bfloat16",
    ),
    Attend(
        name="tiled-backward-full",
        why="five products a tile, and sums into dk and dv",
        impl="tiled",
        step="backward",
        shape=(1, 1, 1, 192, 64),
    ),
    Attend(
        name="tiled-backward-causal-grouped",
        why="the mask and its skipped tiles in the backward pass; dk and dv summed over a group",
        impl="tiled",
        step="backward",
        shape=(1, 2, 1, 192, 64),
        causal=True,
    ),
    Attend(
        name="reference-forward-full",
        why="the definition, which every test waits for",
        impl="reference",
        step="forward",
        shape=(1, 2, 2, 192, 64),
    ),
    Attend(
        name="reference-backward-causal",
        why="its gradients, with a mask and grouped heads",
        impl="reference",
        step="backward",
        shape=(1, 2, 1, 192, 64),
        causal=True,
    ),
    Attend(
        name="naive-backward-causal",
        why="what the studies compare with",
        impl="naive",
        step="backward",
        shape=(1, 2, 2, 192, 64),
        causal=True,
    ),
    Attend(
        name="attention-call",
        why="the public function on next to nothing: what its checks and its choice cost",
        impl="auto",
        step="forward",
        shape=(1, 1, 1, 16, 16),
        causal=True,
    ),
    Model(
        name="model-forward",
        why="norms, RoPE, SwiGLU and the head, with PyTorch's attention",
        impl="sdpa",
        step="forward",
        width=64,
        hidden=256,
        layers=2,
        heads=2,
        batch=1,
        context=32,
        vocab=1000,
    ),
    Model(
        name="model-train",
        why="forward, loss, backward and AdamW, with our attention in it",
        impl="tiled",
        step="train",
        width=64,
        hidden=256,
        layers=1,
        heads=2,
        batch=1,
        context=32,
        vocab=1000,
    ),
)

CUDA: tuple[Case, ...] = (
    Attend(
        name="forward-d64-full",
        why="the main loop of flashattn_fwd, nothing hidden",
        impl="triton",
        step="forward",
        shape=(4, 32, 32, 4096, 64),
        dtype="bfloat16",
    ),
    Attend(
        name="forward-d64-causal",
        why="its two loops: full tiles, then those that the mask cuts",
        impl="triton",
        step="forward",
        shape=(4, 32, 32, 4096, 64),
        causal=True,
        dtype="bfloat16",
    ),
    Attend(
        name="forward-d128-full",
        why="the head dimension of most models",
        impl="triton",
        step="forward",
        shape=(4, 16, 16, 4096, 128),
        dtype="bfloat16",
    ),
    Attend(
        name="forward-d128-causal-grouped",
        why="the same with a mask, four query heads to a key head",
        impl="triton",
        step="forward",
        shape=(4, 16, 4, 4096, 128),
        causal=True,
        dtype="bfloat16",
    ),
    Attend(
        name="forward-d256-causal",
        why="a tile of its own: registers are scarce",
        impl="triton",
        step="forward",
        shape=(4, 8, 8, 4096, 256),
        causal=True,
        dtype="bfloat16",
    ),
    Attend(
        name="forward-auto-causal",
        why="what a user gets: on Hopper the kernel of its own",
        impl="auto",
        step="forward",
        shape=(4, 16, 16, 4096, 128),
        causal=True,
        dtype="bfloat16",
    ),
    Attend(
        name="backward-auto-causal",
        why="likewise, one pass where there is one",
        impl="auto",
        step="backward",
        shape=(4, 16, 16, 2048, 128),
        causal=True,
        dtype="bfloat16",
    ),
    Attend(
        name="forward-long-row",
        why="one head of one long sequence: few blocks, long loops",
        impl="triton",
        step="forward",
        shape=(1, 1, 1, 32768, 64),
        causal=True,
        dtype="bfloat16",
    ),
    Attend(
        name="forward-short-rows",
        why="many short sequences: a block's beginning and end are all there is",
        impl="triton",
        step="forward",
        shape=(256, 32, 32, 256, 64),
        dtype="bfloat16",
    ),
    Attend(
        name="forward-fp32-causal",
        why="six bf16 products for each fp32 one",
        impl="triton",
        step="forward",
        shape=(4, 16, 16, 2048, 64),
        causal=True,
    ),
    Attend(
        name="backward-d64-causal",
        why="the three backward kernels with a mask",
        impl="triton",
        step="backward",
        shape=(4, 32, 32, 2048, 64),
        causal=True,
        dtype="bfloat16",
    ),
    Attend(
        name="backward-d128-full",
        why="the same, nothing hidden",
        impl="triton",
        step="backward",
        shape=(4, 16, 16, 2048, 128),
        dtype="bfloat16",
    ),
    Attend(
        name="backward-d256-causal",
        why="the weakest spot, which must not become weaker",
        impl="triton",
        step="backward",
        shape=(4, 8, 8, 2048, 256),
        causal=True,
        dtype="bfloat16",
    ),
    Attend(
        name="backward-fp32-causal",
        why="backward by six bf16 products",
        impl="triton",
        step="backward",
        shape=(4, 16, 16, 1024, 64),
        causal=True,
    ),
    Model(
        name="model-train-compiled",
        why="two layers of the 2.7B model, compiled: our operators inside somebody's graph",
        impl="triton",
        step="train",
        width=2560,
        hidden=10240,
        layers=2,
        heads=32,
        batch=4,
        context=1024,
        precision="bf16",
        compiled=True,
    ),
)
CASES: dict[str, tuple[Case, ...]] = {"cpu": CPU, "cuda": CUDA}

# Slowed down on purpose by --gate-selftest: each kind of call; on a GPU without the model, which
# each of six processes would compile anew (measured: 77 of 281 s, where all else took 204).
SELFTEST: dict[str, tuple[str, ...]] = {
    "cpu": ("tiled-forward-full", "attention-call"),
    "cuda": ("forward-d128-full", "backward-d64-causal"),
}
