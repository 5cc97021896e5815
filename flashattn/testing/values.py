"""Values of q, k and v, by name: ordinary inputs, and inputs that have broken kernels.

Each maker takes three normal draws in fp32, q [B, H, T, D], k [B, G, S, D] and v [B, G, S, Dv], and
returns the inputs, which are then rounded to the problem's dtype.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Maker = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Tensors]

ONE_HOT = 64  # with scale 1 the second best key scores 128 less: exp(-128) is 0 in fp32


def _negative(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
    # A running maximum that starts at 0 underflows the row; exp(0 - lse), as for a padding key,
    # overflows.
    root = q.shape[-1] ** 0.25
    return (q.abs() / 4 + 11) / root, -(k.abs() / 4 + 11) / root, v


def _rising(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
    ramp = torch.arange(k.shape[2], device=k.device)[:, None] / 8
    return q.abs(), k + ramp, v


def _outliers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
    def channel(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[..., :1] * 20, x[..., 1:]], dim=-1)

    return channel(q), channel(k), channel(v)


def _grid(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
    q, k, v = ((x.clamp(-4, 4) * 4).round() / 4 for x in (q, k, v))
    return q, k, v


def _one_hot(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
    """Encode each key's index in its signs, and give each query the signs of one key.

    That key is visible under any causal mask. The last column makes its score 0, and each different
    sign lowers a score by 2 * ONE_HOT. So with scale 1 the logsumexp is exactly 0, and P is exactly
    1 for that key and 0 elsewhere.
    """
    (seq_q, d), seq_kv = q.shape[2:], k.shape[2]
    numbers = torch.arange(seq_kv, device=k.device)
    bits = numbers[:, None] >> torch.arange(d - 1, device=k.device).clamp(max=62) & 1
    signs = torch.cat([bits * 2.0 - 1, bits.new_full((seq_kv, 1), 1 - d)], dim=1)  # [S, D]
    rows = torch.arange(seq_q, device=q.device)
    seen = torch.minimum(rows, rows + seq_kv - seq_q).clamp(0, max(seq_kv - 1, 0)) + 1
    found = ((q[..., 0] * 977).frac().abs() * seen).long()  # [B, H, T]
    wanted = signs[found] if seq_kv else torch.ones_like(q)
    wanted = torch.cat([wanted[..., :-1], torch.ones_like(q[..., :1])], dim=-1)
    return wanted * ONE_HOT, signs.expand_as(k), v.round()


def sunken(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
    """Make every score -131072 if q = 0 and scale = 1; -32768 in fp16, which ends at 65504."""
    root = 2.0**7 if q.dtype == torch.float16 else 2.0**8
    q, k = (x.clone(memory_format=torch.contiguous_format) for x in (q, k))
    q[..., 0], k[..., 0] = root, -2 * root
    return q, k, v


VALUES: dict[str, Maker] = {
    "normal": lambda q, k, v: (q, k, v),
    # Scores of about +-60: one key takes all the weight.
    "extreme": lambda q, k, v: (q * 8, k * 8, v),
    "negative": _negative,  # every logsumexp is below -88.7, where exp(-lse) overflows fp32
    "rising": _rising,  # each tile of keys has a new maximum
    "shifted": lambda q, k, v: (q + 1, k - 2, v + 4),  # nonzero means
    "outliers": _outliers,  # one channel is 20 times as large, as in trained models
    "ties": lambda q, k, v: (q.sign(), k.sign(), v.round()),
    # All elements of a row are equal.
    "constant": lambda q, k, v: (q[..., :1].expand_as(q), k[..., :1].expand_as(k), v),
    "same_keys": lambda q, k, v: (q, k[..., :1, :].expand_as(k), v),  # dq is 0 by cancellation
    "zeros": lambda q, k, v: (q * 0, k, v),  # a uniform softmax
    "huge_v": lambda q, k, v: (q, k, v * 1e3),  # sums over keys overflow fp16, means do not
    "tiny": lambda q, k, v: (q, k, v * 1e-5),  # denormal in fp16
    # In fp32; 0 in half precision: Triton's interpreter (3.6, 3.9) converts bf16 denormals wrongly.
    "denormal": lambda q, k, v: (q * 4e-42, k, v * 4e-42),
    "grid": _grid,  # multiples of 1/4 up to 4: the sum of two is exact in every dtype
    "one_hot": _one_hot,
}
ALIKE = ("zeros", "same_keys", "denormal")  # all scores of a row are equal
