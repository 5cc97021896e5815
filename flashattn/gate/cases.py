"""The gate's cases: a small set, each covering code that no other case runs, as commented."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any


@dataclass(frozen=True)
class Case:
    """A call to time."""

    name: str  # unique on a device; a test's id
    impl: str  # a registered name, or "auto" for the public function with its checks
    step: str  # "forward" or "backward" of attention; "forward" or "train" of a model

    def __str__(self) -> str:
        """Return the name."""
        return self.name

    def message(self) -> dict[str, Any]:
        """Return the case as a JSON-serializable dict for a worker."""
        return {"kind": type(self).__name__, **asdict(self)}


@dataclass(frozen=True)
class AttentionCase(Case):
    """One attention pass on random normal inputs."""

    shape: tuple[int, int, int, int, int]  # (B, H, G, T, D) with G key/value heads
    causal: bool = False  # top-left
    dtype: str = "float32"
    seq_kv: int | None = None  # S, where it is not T


@dataclass(frozen=True, kw_only=True)
class Model(Case):
    """One step of the transformer with causal attention.

    The first five fields are those of ``lm.Config``, the others arguments of ``Trainer``.
    """

    width: int
    hidden: int
    layers: int
    heads: int
    vocab: int = 10_000
    batch: int
    context: int
    precision: str = "fp32"
    compiled: bool = False


tiny = partial(Model, width=64, hidden=256, heads=2, batch=1, context=32, vocab=1000)
CPU: tuple[Case, ...] = (
    # The tile loop without a mask: products and the online softmax.
    AttentionCase("tiled-forward-full", "tiled", "forward", (1, 1, 1, 256, 64)),
    # Many tiles: Python overhead per tile, and half of the tiles skipped.
    AttentionCase("tiled-forward-causal-long", "tiled", "forward", (1, 1, 1, 384, 64), causal=True),
    # Many rows per tile, and the casts to fp32.
    AttentionCase(
        "tiled-forward-short-bf16", "tiled", "forward", (8, 4, 4, 48, 64), dtype="bfloat16"
    ),
    # Five products per tile, and accumulation into dk and dv.
    AttentionCase("tiled-backward-full", "tiled", "backward", (1, 1, 1, 192, 64)),
    # Masked and skipped tiles in the backward pass; dk and dv summed over a group.
    AttentionCase(
        "tiled-backward-causal-grouped", "tiled", "backward", (1, 2, 1, 192, 64), causal=True
    ),
    # The reference implementation, whose run time every test pays for.
    AttentionCase("reference-forward-full", "reference", "forward", (1, 2, 2, 192, 64)),
    # Gradients of the reference, with a mask and grouped heads.
    AttentionCase(
        "reference-backward-causal", "reference", "backward", (1, 2, 1, 192, 64), causal=True
    ),
    # Naive attention, the baseline of the studies.
    AttentionCase("naive-backward-causal", "naive", "backward", (1, 2, 2, 192, 64), causal=True),
    # The public function on a tiny input: the overhead of checks and dispatch.
    AttentionCase("attention-call", "auto", "forward", (1, 1, 1, 16, 16), causal=True),
    # Norms, RoPE, SwiGLU and the output layer, with PyTorch's attention.
    tiny("model-forward", "sdpa", "forward", layers=2),
    # Forward, loss, backward and AdamW, with tiled attention.
    tiny("model-train", "tiled", "train", layers=1),
)

half = partial(AttentionCase, dtype="bfloat16")
CUDA: tuple[Case, ...] = (
    # The main loop of flashattn_fwd without a mask.
    half("forward-d64-full", "triton", "forward", (4, 32, 32, 4096, 64)),
    # Both loops of flashattn_fwd: full tiles, then partially masked tiles.
    half("forward-d64-causal", "triton", "forward", (4, 32, 32, 4096, 64), causal=True),
    # The head dimension of most models.
    half("forward-d128-full", "triton", "forward", (4, 16, 16, 4096, 128)),
    # The same with a mask, and four query heads per key head.
    half("forward-d128-causal-grouped", "triton", "forward", (4, 16, 4, 4096, 128), causal=True),
    # The tile for D = 256, where registers are scarce.
    half("forward-d256-causal", "triton", "forward", (4, 8, 8, 4096, 256), causal=True),
    # What users get by default: on Hopper, the Hopper kernels with the one-pass backward.
    half("forward-auto-causal", "auto", "forward", (4, 16, 16, 4096, 128), causal=True),
    half("backward-auto-causal", "auto", "backward", (4, 16, 16, 2048, 128), causal=True),
    # Eight times as many keys as queries: a head's CTAs wait in turn to add to dq, if so planned.
    half("backward-auto-cross", "auto", "backward", (1, 32, 8, 2048, 128), seq_kv=16384),
    # One head of one long sequence: few CTAs, long loops.
    half("forward-long-row", "triton", "forward", (1, 1, 1, 32768, 64), causal=True),
    # Many short sequences: prologue and epilogue dominate.
    half("forward-short-rows", "triton", "forward", (256, 32, 32, 256, 64)),
    # fp32 forward: six bf16 products per product.
    AttentionCase("forward-fp32-causal", "triton", "forward", (4, 16, 16, 2048, 64), causal=True),
    # The three backward kernels with a mask.
    half("backward-d64-causal", "triton", "backward", (4, 32, 32, 2048, 64), causal=True),
    # The same without a mask, at D = 128.
    half("backward-d128-full", "triton", "backward", (4, 16, 16, 2048, 128)),
    # The slowest case relative to the roof.
    half("backward-d256-causal", "triton", "backward", (4, 8, 8, 2048, 256), causal=True),
    # fp32 backward: six bf16 products per product.
    AttentionCase("backward-fp32-causal", "triton", "backward", (4, 16, 16, 1024, 64), causal=True),
    # Two layers of the 2.7B model, compiled: our operators in a captured graph.
    Model(
        "model-train-compiled",
        "triton",
        "train",
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

# Cases of two kinds that --gate-selftest slows down, and by how much. The compiled model is left
# out: compiling it in six processes takes 77 s.
SELFTEST: dict[str, dict[str, float]] = {
    "cpu": {"tiled-forward-full": 0.05, "attention-call": 0.10},
    "cuda": {"forward-d128-full": 0.05, "backward-d64-causal": 0.10},
}
