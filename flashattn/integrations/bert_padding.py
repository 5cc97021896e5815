"""flash-attn's ``bert_padding``: sequences packed without their padding, and back."""

from __future__ import annotations

import torch
from torch.nn.functional import pad


def index_first_axis(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return rows ``indices`` [n] of x [rows, ...]."""
    return x.index_select(0, indices)


def index_put_first_axis(
    values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int
) -> torch.Tensor:
    """Return [first_axis_dim, ...] with the values [n, ...] in rows ``indices``, 0 elsewhere."""
    zeros = values.new_zeros(first_axis_dim, *values.shape[1:])
    return zeros.index_copy(0, indices.long(), values)


def unpad_input(
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor,
    unused_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Return the tokens that a mask selects, and their indices; the host waits for the mask.

    Args:
        hidden_states: [batch, seqlen, ...].
        attention_mask: [batch, seqlen], bool or 0 and 1; which tokens are used.
        unused_mask: likewise; which tokens are kept but not used.

    Returns:
        The tokens [total, ...]; their indices [total] in batch * seqlen; cu_seqlens, int32
        [batch + 1]; the length of the longest sequence; and the number of tokens that are used in
        each sequence, int32 [batch].
    """
    shown = attention_mask if unused_mask is None else attention_mask + unused_mask
    used, lengths = (x.sum(dim=-1, dtype=torch.int32) for x in (attention_mask, shown))
    indices = shown.flatten().nonzero().flatten()
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    cu_seqlens = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return tokens, indices, cu_seqlens, int(lengths.max()), used


def pad_input(
    hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int
) -> torch.Tensor:
    """Return [batch, seqlen, ...] with tokens [total, ...] in their rows, 0 elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(
        0, (batch, seqlen)
    )
