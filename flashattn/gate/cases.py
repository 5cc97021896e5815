"""The cases of the gate: few, each covering code that no other case runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Attend:
    """One attention pass on random normal inputs.

    Args:
        name: name of the case.
        why: what the case covers.
        impl: a registered name, or "auto" for the public function with its checks.
        step: "forward" or "backward".
        shape: (B, H, G, T, D) with S = T and G key/value heads.
        causal: whether to apply the top-left causal mask.
        dtype: name of a torch.dtype.
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
        name: name of the case.
        why: what the case covers.
        impl: a registered name.
        step: "forward" or "train".
        width: C.
        hidden: F.
        layers: number of blocks.
        heads: H.
        batch: B.
        context: T.
        vocab: V.
        precision: precision of the ``Trainer``.
        compiled: whether to use torch.compile.
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
    """Return the case as a JSON-serializable dict for a worker."""
    return {"kind": type(case).__name__, **asdict(case)}


CPU: tuple[Case, ...] = (
    Attend(
        name="tiled-forward-full",
        why="the tile loop without a mask: products and the online softmax",
        impl="tiled",
        step="forward",
        shape=(1, 1, 1, 256, 64),
    ),
    Attend(
        name="tiled-forward-causal-long",
        why="many tiles: the Python overhead per tile, and skipping half of the tiles",
        impl="tiled",
        step="forward",
        shape=(1, 1, 1, 384, 64),
        causal=True,
    ),
    Attend(
        name="tiled-forward-short-bf16",
        why="many rows per tile, and the casts to fp32",
        impl="tiled",
        step="forward",
        shape=(8, 4, 4, 48, 64),
        dtype="bfloat16",
    ),
    Attend(
        name="tiled-backward-full",
        why="five products per tile, and accumulation into dk and dv",
        impl="tiled",
        step="backward",
        shape=(1, 1, 1, 192, 64),
    ),
    Attend(
        name="tiled-backward-causal-grouped",
        why="masked and skipped tiles in the backward pass; dk and dv summed over a group",
        impl="tiled",
        step="backward",
        shape=(1, 2, 1, 192, 64),
        causal=True,
    ),
    Attend(
        name="reference-forward-full",
        why="the definition, on which every test waits",
        impl="reference",
        step="forward",
        shape=(1, 2, 2, 192, 64),
    ),
    Attend(
        name="reference-backward-causal",
        why="gradients of the definition, with a mask and grouped heads",
        impl="reference",
        step="backward",
        shape=(1, 2, 1, 192, 64),
        causal=True,
    ),
    Attend(
        name="naive-backward-causal",
        why="the baseline of the studies",
        impl="naive",
        step="backward",
        shape=(1, 2, 2, 192, 64),
        causal=True,
    ),
    Attend(
        name="attention-call",
        why="the public function on a tiny input: the overhead of checks and dispatch",
        impl="auto",
        step="forward",
        shape=(1, 1, 1, 16, 16),
        causal=True,
    ),
    Model(
        name="model-forward",
        why="norms, RoPE, SwiGLU and the head, with PyTorch attention",
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
        why="forward, loss, backward and AdamW, with the tiled attention",
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
        why="the main loop of flashattn_fwd without a mask",
        impl="triton",
        step="forward",
        shape=(4, 32, 32, 4096, 64),
        dtype="bfloat16",
    ),
    Attend(
        name="forward-d64-causal",
        why="both loops of flashattn_fwd: full tiles, then partially masked tiles",
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
        why="the same with a mask, and four query heads per key head",
        impl="triton",
        step="forward",
        shape=(4, 16, 4, 4096, 128),
        causal=True,
        dtype="bfloat16",
    ),
    Attend(
        name="forward-d256-causal",
        why="the tile for D = 256, where registers are scarce",
        impl="triton",
        step="forward",
        shape=(4, 8, 8, 4096, 256),
        causal=True,
        dtype="bfloat16",
    ),
    Attend(
        name="forward-auto-causal",
        why="the default of users: on Hopper, the Hopper kernels",
        impl="auto",
        step="forward",
        shape=(4, 16, 16, 4096, 128),
        causal=True,
        dtype="bfloat16",
    ),
    Attend(
        name="backward-auto-causal",
        why="the default of users: on Hopper, the one-pass backward",
        impl="auto",
        step="backward",
        shape=(4, 16, 16, 2048, 128),
        causal=True,
        dtype="bfloat16",
    ),
    Attend(
        name="forward-long-row",
        why="one head of one long sequence: few CTAs, long loops",
        impl="triton",
        step="forward",
        shape=(1, 1, 1, 32768, 64),
        causal=True,
        dtype="bfloat16",
    ),
    Attend(
        name="forward-short-rows",
        why="many short sequences: prologue and epilogue dominate",
        impl="triton",
        step="forward",
        shape=(256, 32, 32, 256, 64),
        dtype="bfloat16",
    ),
    Attend(
        name="forward-fp32-causal",
        why="fp32 forward: six bf16 products per product",
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
        why="the same without a mask, at D = 128",
        impl="triton",
        step="backward",
        shape=(4, 16, 16, 2048, 128),
        dtype="bfloat16",
    ),
    Attend(
        name="backward-d256-causal",
        why="the slowest case relative to the roof",
        impl="triton",
        step="backward",
        shape=(4, 8, 8, 2048, 256),
        causal=True,
        dtype="bfloat16",
    ),
    Attend(
        name="backward-fp32-causal",
        why="fp32 backward: six bf16 products per product",
        impl="triton",
        step="backward",
        shape=(4, 16, 16, 1024, 64),
        causal=True,
    ),
    Model(
        name="model-train-compiled",
        why="two layers of the 2.7B model, compiled: our operators in a captured graph",
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

# Slowed down by --gate-selftest, by a little and by more: cases of two kinds, but not the compiled
# model on a GPU, whose compilation in six processes takes 77 s.
SELFTEST: dict[str, dict[str, float]] = {
    "cpu": {"tiled-forward-full": 0.05, "attention-call": 0.10},
    "cuda": {"forward-d128-full": 0.05, "backward-d64-causal": 0.10},
}
