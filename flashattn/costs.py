"""FLOPs and memory of a training step of the transformer in ``lm``, by formula.

Shapes as in ``lm``: ``B`` batch, ``T`` context, ``C`` width, ``F`` hidden size of the MLP, ``V``
vocabulary, ``H`` heads, ``D = C / H``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flashattn.checks import check_among
from flashattn.lm import Config
from flashattn.mask import CAUSAL

Step = Literal["forward", "backward", "forward+backward", "train"]

BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}  # bytes of a product's operand
FP32 = 4  # bytes of a number that autocast does not cast
PASSES = {"forward": (1, 0), "backward": (0, 1), "forward+backward": (1, 1), "train": (1, 1)}
HELD = ("naive", "naive_autocast", "flash")


def _passes(step: Step) -> tuple[int, int]:
    """Return the number of forward and backward passes of a step."""
    check_among("step", step, PASSES)
    return PASSES[step]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of an eager step of ``TransformerLM`` and ``cross_entropy``.

    N is ``B * T`` tokens; e is the size of a product's operand, 4 bytes, or 2 under autocast.
    Rounding by the allocator is not included.

    Args:
        config: shape of the model.
        batch: B.
        context: T.
        precision: "fp32", "tf32", or under autocast "bf16" or "fp16".
        attention: the tensors saved by attention. "naive": the softmax in the dtype of q, and the
            mask. "naive_autocast": the same code under autocast on a GPU, which computes the
            softmax in fp32 and casts it; equal to "naive" in fp32. "flash": q, k, v, o and the fp32
            logsumexp.
        documents: lengths of the documents packed into each sequence, which attend to themselves
            only; None means one of length T. Bytes of their masks are not included.
        checkpoint: whether the model recomputes its blocks.
        device: on "cuda" RMSNorm is one kernel; elsewhere it also saves the normalized x.

    Raises:
        ValueError: batch or context is below 1, documents do not sum to T, or precision, attention
            or a step is unknown.
    """

    config: Config
    batch: int
    context: int
    precision: str = "fp32"
    attention: str = "naive"
    documents: tuple[int, ...] | None = None
    checkpoint: bool = False
    device: str = "cuda"

    def __post_init__(self) -> None:
        """Validate the arguments."""
        for name in ("batch", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: wanted at least 1, got {getattr(self, name)}")
        check_among("precision", self.precision, BYTES)
        check_among("attention", self.attention, HELD)
        if self.documents is not None and sum(self.documents) != self.context:
            msg = f"documents: wanted {self.context} tokens in all, got {sum(self.documents)}"
            raise ValueError(msg)

    @property
    def tokens(self) -> int:
        """N = B * T."""
        return self.batch * self.context

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return self.config.parameters

    def flops(self, step: Step) -> int:
        """Return the model FLOPs of a step, the numerator of model FLOPs utilization (MFU).

        2 FLOPs per token and matrix weight, and 4 D per head and causal pair (t >= s) of the same
        document. Backward has twice the FLOPs of forward. Recomputation in checkpointed blocks does
        not count here; ``executed`` includes it.
        """
        forwards, backwards = _passes(step)
        matrices = self._block_products + self._head_products
        attention = self._attention_products(self._pairs)
        return (forwards + 2 * backwards) * (matrices + attention)

    def executed(self, step: Step) -> int:
        """Return the executed FLOPs of a step.

        Naive attention computes all T * T pairs. Flash computes the pairs t >= s of each document,
        and recomputes q @ k.T in backward, which has 2.5 times the FLOPs of forward. A checkpointed
        block runs forward again before backward, except its last product, w2.
        """
        forwards, backwards = _passes(step)
        if self.attention == "flash":
            attention = self._attention_products(self._pairs)
            again = attention // 2
        else:
            attention, again = self._attention_products(self.context**2), 0
        if self.checkpoint:
            c = self.config
            again += self._block_products + attention
            again -= 2 * self.tokens * c.layers * c.width * c.hidden
        matrices = self._block_products + self._head_products
        return (forwards + 2 * backwards) * (matrices + attention) + backwards * again

    @property
    def _block_products(self) -> int:
        return 2 * self.tokens * self.config.layers * self.config.block_matrices

    @property
    def _head_products(self) -> int:
        return 2 * self.tokens * self.config.vocab * self.config.width

    @property
    def _pairs(self) -> int:
        """Causal pairs of one head and one sequence."""
        return sum(CAUSAL.over(n, n).pairs for n in self.documents or (self.context,))

    def _attention_products(self, pairs: int) -> int:
        """FLOPs of q @ k.T and p @ v in all layers, given the pairs of one head."""
        return 4 * self.config.width * self.batch * pairs * self.config.layers

    @property
    def parameter_bytes(self) -> int:
        """4 bytes per parameter, also under autocast."""
        return 4 * self.parameters

    @property
    def gradient_bytes(self) -> int:
        """4 bytes per parameter."""
        return 4 * self.parameters

    @property
    def optimizer_bytes(self) -> int:
        """8 bytes per parameter for the two moments of AdamW; step counts are not included."""
        return 8 * self.parameters

    @property
    def cast_bytes(self) -> int:
        """2 bytes per matrix weight under autocast, for the copies cast in forward.

        Autocast caches them until its context ends, even without gradients, and the graph saves
        them until backward has passed the product. Checkpointed blocks save none in the graph.
        """
        blocks = self.config.layers * self.config.block_matrices
        return self._cast(blocks + self.config.vocab * self.config.width)

    def _cast(self, weights: int) -> int:
        return 0 if self._operand == FP32 else self._operand * weights

    @property
    def activation_bytes(self) -> int:
        """Bytes saved for backward, except parameters, their casts and the tokens.

        Every block, or only its fp32 input [N, C] if checkpointed; the final norm; the input of the
        head, e N C; and for the loss the fp32 log-softmax, 4 N V, and a divisor.
        """
        block = FP32 * self.tokens * self.config.width if self.checkpoint else self._block_bytes
        return self.config.layers * block + self._head_bytes

    @property
    def _operand(self) -> int:
        return BYTES[self.precision]

    @property
    def _head_bytes(self) -> int:
        c = self.config
        logarithms = FP32 * self.tokens * c.vocab
        return self._norm_bytes + self._operand * self.tokens * c.width + logarithms + FP32

    @property
    def _norm_bytes(self) -> int:
        """The input and 1 / rms in fp32; without a fused kernel also the normalized x."""
        wide = 1 if self.device == "cuda" else 2
        return FP32 * self.tokens * (wide * self.config.width + 1)

    @property
    def _block_bytes(self) -> int:
        """Two norms; the inputs of qkv, o and w13, e N C each; the MLP, e N 4 F; attention.

        The MLP saves the output of w13 (2 F wide), silu of the gate and the input of w2 (F each).
        """
        matrices = self._operand * self.tokens * (3 * self.config.width + 4 * self.config.hidden)
        return 2 * self._norm_bytes + matrices + self._attention_bytes

    @property
    def _attention_bytes(self) -> int:
        """Bytes saved by attention; o counts as the input of the next product.

        Flash: the rotated q and k; v, a view that keeps all of qkv alive; lse. Naive: dense copies
        of q, k and v made by the products (views as in flash if B = 1), the softmax, and the mask.
        """
        c, n = self.config, self.tokens
        views, copies = (self._operand * wide * n * c.width for wide in (5, 3))
        if self.attention == "flash":
            return views + FP32 * n * c.heads
        scores = self._score_bytes * n * c.heads * self.context
        return (views if self.batch == 1 else copies) + scores + self.context**2

    @property
    def _score_bytes(self) -> int:
        """Bytes saved per pair: p in the dtype of the product, and in fp32 before a cast."""
        cast = self.attention == "naive_autocast" and self._operand != FP32
        return self._operand + (FP32 if cast else 0)

    def bytes(self, step: Step) -> int:
        """Predict the peak memory of a step; "forward" is without gradients.

        Parameters, RoPE tables and two int64 per token are always allocated, in training also the
        optimizer state. The peak adds the largest of these moments:

        * Forward without gradients: the casts, and the tensors of one block or of the head.
        * The loss: all activations, and the logits or two fp32 gradients of them.
        * Backward of the last block: the gradients of the head, and the temporaries of the block.
        * Backward of the first block: likewise, with the gradients of all other blocks.
        * The end: all gradients and that of the stream. The fused optimizer adds nothing.

        Memory is linear in the block between the last and the first, so the peak is at one of them.
        """
        c = self.config
        _, backwards = _passes(step)
        always = self.parameter_bytes + FP32 * c.longest * c.head_dim + 16 * self.tokens
        if not backwards:
            return always + self._forward_peak
        state = self.optimizer_bytes if step == "train" else 0
        end = self.gradient_bytes + FP32 * self.tokens * c.width
        return always + state + max(self._loss_peak, *self._block_peaks, end)

    @property
    def _forward_peak(self) -> int:
        """The MLP or the naive attention of the last block, or the head, plus the casts so far.

        During the MLP three stream tensors are live: the input of the block, its sum with attention
        and the norm.
        """
        c, n, e = self.config, self.tokens, self._operand
        before_mlp = (c.layers - 1) * c.block_matrices + 4 * c.width**2
        before_w2 = before_mlp + 2 * c.width * c.hidden
        mlp = n * (FP32 * 3 * c.width + e * 4 * c.hidden) + self._cast(before_w2)
        scores = self._score_peak * n * c.heads * self.context + self.context**2
        naive = n * (FP32 * 2 * c.width + e * 7 * c.width) + scores
        naive += self._cast(before_mlp - c.width**2)
        head = n * (FP32 * 2 * c.width + e * (c.width + c.vocab)) + self.cast_bytes
        return max(mlp, head) if self.attention == "flash" else max(mlp, head, naive)

    @property
    def _score_peak(self) -> int:
        """Bytes per pair during the softmax: input and output, under autocast also in fp32."""
        cast = self._score_bytes != self._operand
        return self._operand + 2 * FP32 if cast else 2 * self._operand

    @property
    def _loss_peak(self) -> int:
        """The logits twice with all casts inside autocast; later their gradients twice."""
        c, casts = self.config, self.cast_bytes
        kept = self._cast(c.vocab * c.width) if self.checkpoint else casts
        wide = self._operand + (FP32 if casts else 0)
        ends = (casts + wide * self.tokens * c.vocab, kept + 2 * FP32 * self.tokens * c.vocab)
        return self.activation_bytes + max(ends)

    @property
    def _block_peaks(self) -> tuple[int, int]:
        """Bytes during the backward of the last block and of the first."""
        c = self.config
        below = FP32 * self.tokens * c.width  # saved by a block before its backward
        if not self.checkpoint:
            below = self._block_bytes + self._cast(c.block_matrices)
        above = FP32 * c.block_matrices  # gradients of a block after its backward
        here = self._block_bytes + self._cast(c.block_matrices) + self._block_backward
        here += FP32 * c.vocab * c.width
        others = c.layers - 1
        return here + others * below, here + others * above

    @property
    def _block_backward(self) -> int:
        """Bytes that the backward of a block adds, at most, in its MLP or later in its attention.

        MLP: the gradients of the stream, of w2 and of two tensors of width F. Naive attention: two
        gradients of the scores.
        """
        c, n, e = self.config, self.tokens, self._operand
        stream, matrix = FP32 * n * c.width, FP32 * c.width * c.hidden
        mlp = stream + matrix + e * n * 2 * c.hidden
        if self.attention == "flash":
            return mlp
        done = self._norm_bytes + e * n * (c.width + 4 * c.hidden)
        pair = 2 * FP32 - e if self._score_bytes != e else 2 * e
        scores = pair * n * c.heads * self.context
        return max(mlp, stream + 3 * matrix + scores - done)
