"""What a training step of ``lm``'s transformer must multiply, move and hold, each by a formula.

The legend is ``lm``'s: ``B`` batch, ``T`` context, ``C`` width, ``F`` hidden, ``V`` vocabulary,
``H`` heads, ``D = C / H``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flashattn.lm import Config
from flashattn.mask import CAUSAL

Step = Literal["forward", "backward", "forward+backward", "train"]

BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}  # precision: of an operand of a product
FP32 = 4  # bytes of what is never cast
PASSES = {"forward": (1, 0), "backward": (0, 1), "forward+backward": (1, 1), "train": (1, 1)}
HELD = ("naive", "naive_autocast", "flash")


def _passes(step: Step) -> tuple[int, int]:
    """Return how often a step goes forward and backward."""
    if step not in PASSES:
        msg = f"step: wanted one of {', '.join(PASSES)}, got {step!r}"
        raise ValueError(msg)
    return PASSES[step]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a step of ``TransformerLM`` and ``cross_entropy``, eager, must do and hold.

    N is ``B * T`` tokens, e the bytes of a product's operand: 4, or 2 under autocast. What the
    allocator adds by rounding is left out.

    Args:
        config: the model's shape.
        batch: B.
        context: T.
        precision: "fp32", "tf32", or under autocast "bf16" or "fp16".
        attention: what it holds: "naive" the scores' softmax in q's dtype, and the mask;
            "naive_autocast" the same lines left to autocast on a GPU, which takes the softmax in
            fp32 and casts it; "flash" q, k, v, o and the fp32 logsumexp. In fp32 both naives agree.
        checkpoint: as the model's.
        device: "cuda", whose RMSNorm is one kernel; elsewhere torch writes it out, and keeps the
            normalised x, too.

    Raises:
        ValueError: batch or context is below 1, or precision, attention or a step is unknown.
    """

    config: Config
    batch: int
    context: int
    precision: str = "fp32"
    attention: str = "naive"
    checkpoint: bool = False
    device: str = "cuda"

    def __post_init__(self) -> None:
        """Check."""
        for name in ("batch", "context"):
            if getattr(self, name) < 1:
                msg = f"{name}: wanted at least 1, got {getattr(self, name)}"
                raise ValueError(msg)
        for name, known in {"precision": tuple(BYTES), "attention": HELD}.items():
            if getattr(self, name) not in known:
                msg = f"{name}: wanted one of {', '.join(known)}, got {getattr(self, name)!r}"
                raise ValueError(msg)

    @property
    def tokens(self) -> int:
        """N = B * T."""
        return self.batch * self.context

    @property
    def parameters(self) -> int:
        """How many numbers are learned."""
        return self.config.parameters

    def flops(self, step: Step) -> int:
        """Count what a step must multiply, the numerator of model flop utilisation.

        2 flops for each token and weight of a matrix, 4 D for each head and pair t >= s of
        attention; backward twice that.
        """
        forwards, backwards = _passes(step)
        matrices = self._block_products + self._head_products
        attention = self._attention_products(CAUSAL.over(self.context, self.context).pairs)
        return (forwards + 2 * backwards) * (matrices + attention)

    def executed(self, step: Step) -> int:
        """Count what is really multiplied.

        Naive attention takes all T * T pairs. Flash takes the pairs t >= s, and backward q @ k.T
        once more: 2.5 times forward. Checkpointed blocks run forward once more before backward, up
        to w2, whose product nothing waits for.
        """
        forwards, backwards = _passes(step)
        if self.attention == "flash":
            attention = self._attention_products(CAUSAL.over(self.context, self.context).pairs)
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

    def _attention_products(self, pairs: int) -> int:
        """Flops of q @ k.T and p @ v in all layers, for the pairs of one head."""
        return 4 * self.config.width * self.batch * pairs * self.config.layers

    @property
    def parameter_bytes(self) -> int:
        """4 for each parameter: fp32 under autocast, too."""
        return 4 * self.parameters

    @property
    def gradient_bytes(self) -> int:
        """4 for each parameter."""
        return 4 * self.parameters

    @property
    def optimizer_bytes(self) -> int:
        """8 for each parameter: AdamW's two moments. Its step counts are left out."""
        return 8 * self.parameters

    @property
    def cast_bytes(self) -> int:
        """2 for each weight of a matrix under autocast: copies that forward makes.

        Autocast keeps them until its context ends, and each product of the graph until backward
        has passed it, so they weigh on a forward without gradients, too. Checkpointed blocks keep
        none in the graph.
        """
        blocks = self.config.layers * self.config.block_matrices
        return self._cast(blocks + self.config.vocab * self.config.width)

    def _cast(self, weights: int) -> int:
        return 0 if self._operand == FP32 else self._operand * weights

    @property
    def activation_bytes(self) -> int:
        """What a forward keeps for backward, besides parameters, their casts and the tokens.

        Every block, or only its input [N, C] in fp32 where it is checkpointed; the final norm;
        the head's input, e N C; the loss: the fp32 logarithms of the softmax, 4 N V, and a divisor.
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
        """The input and 1 / rms in fp32; written out, the normalised x, too."""
        wide = 1 if self.device == "cuda" else 2
        return FP32 * self.tokens * (wide * self.config.width + 1)

    @property
    def _block_bytes(self) -> int:
        """Two norms; inputs of qkv, o and w13, e N C each; the MLP's e N 4 F; attention.

        The MLP keeps w13's output, 2 F wide, silu of its gate and w2's input, F wide each.
        """
        matrices = self._operand * self.tokens * (3 * self.config.width + 4 * self.config.hidden)
        return 2 * self._norm_bytes + matrices + self._attention_bytes

    @property
    def _attention_bytes(self) -> int:
        """Flash: q and k, turned; v, a view that keeps all of qkv; lse. o is the next input.

        Naive: the products' own dense copies of q, k and v (for a batch of 1 they need none, and
        views keep as much as under flash), the softmax, and the mask in bytes.
        """
        c, n = self.config, self.tokens
        views, copies = (self._operand * wide * n * c.width for wide in (5, 3))
        if self.attention == "flash":
            return views + FP32 * n * c.heads
        scores = self._score_bytes * n * c.heads * self.context
        return (views if self.batch == 1 else copies) + scores + self.context**2

    @property
    def _score_bytes(self) -> int:
        """Bytes kept for each pair: p as the product with v takes it, and before it was cast."""
        cast = self.attention == "naive_autocast" and self._operand != FP32
        return self._operand + (FP32 if cast else 0)

    def bytes(self, step: Step) -> int:
        """Predict a step's peak; "forward" is without gradients, "backward" with what it needs.

        Parameters, RoPE's tables and two int64 a token are always there, and the optimizer's
        state in training. On top of them comes the largest of some moments.

        * Forward without gradients: the casts, and what one block or the head holds at once.
        * The loss: all activations, and the logits or two gradients of them in fp32.
        * The last block going backward: no head any more, but its gradients, and what the block
          computes on the way.
        * The first block going backward: no other block any more, but all their gradients.
        * The end: all gradients, and that of the stream. The fused optimizer needs nothing more.

        Between the first and the last block all terms are linear, so the peak is at an end.
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
        """The last block's MLP or naive attention, or the head, beside the weights cast so far.

        Three widths of the stream are alive in an MLP: the block's input, its middle and its norm.
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
        """Bytes of a pair in the softmax: in and out, and under autocast the fp32 in, too."""
        cast = self._score_bytes != self._operand
        return self._operand + 2 * FP32 if cast else 2 * self._operand

    @property
    def _loss_peak(self) -> int:
        """Inside autocast the logits twice, with all casts; then their gradients, twice."""
        c, casts = self.config, self.cast_bytes
        kept = self._cast(c.vocab * c.width) if self.checkpoint else casts
        wide = self._operand + (FP32 if casts else 0)
        ends = (casts + wide * self.tokens * c.vocab, kept + 2 * FP32 * self.tokens * c.vocab)
        return self.activation_bytes + max(ends)

    @property
    def _block_peaks(self) -> tuple[int, int]:
        """The last and the first block going backward."""
        c = self.config
        below = FP32 * self.tokens * c.width  # what a block holds that backward has not reached
        if not self.checkpoint:
            below = self._block_bytes + self._cast(c.block_matrices)
        above = FP32 * c.block_matrices  # and the gradients of one that it has passed
        here = self._block_bytes + self._cast(c.block_matrices) + self._block_backward
        here += FP32 * c.vocab * c.width
        others = c.layers - 1
        return here + others * below, here + others * above

    @property
    def _block_backward(self) -> int:
        """Count what a block adds to what it kept, in its MLP or, when that is done, attention.

        The MLP: gradients of the stream, of w2 and of two tensors F wide. Naive attention: two
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
