"""Softcap, ALiBi, biases, sinks, narrow values: what do they cost, forward and backward?

Slopes, biases and sinks are created once, before timing starts. PyTorch's SDPA takes a bias as its
``attn_mask``; a relative bias is expanded in each call. SDPA has no softcap, ALiBi or sinks.
"""

from dataclasses import replace
from typing import Any

from flashattn.problem import Problem

ADDED: tuple[dict[str, Any], ...] = ({"alibi": True}, {"bias": "1hts"}, {"bias": "1hr"})
CAPPED: dict[str, Any] = {"softcap": 50.0}
SUNK: dict[str, Any] = {"sink": True}


def scores(plain: Problem, *changes: dict[str, Any]) -> list[Problem]:
    """Return a plain problem, and its variants with other scores."""
    return [plain, *(replace(plain, **change) for change in changes)]


# Batch size 1 and one bias per head: the bias's gradient is verified head by head.
HEADS = Problem(dtype="bfloat16", heads=16, seq_q=4096, head_dim=128)
NARROW = replace(HEADS, heads=32, kv_heads=32, head_dim=64)
GPT_OSS = Problem(
    dtype="bfloat16", heads=64, kv_heads=8, seq_q=8192, head_dim=64, causal=True, window=(127, None)
)
LONG = replace(HEADS, seq_q=16384, seq_kv=16384, causal=True)
DEEPSEEK = replace(HEADS, seq_q=4096, seq_kv=4096, head_dim=192, value_dim=128, causal=True)
MLA = [DEEPSEEK, replace(DEEPSEEK, seq_q=16384, seq_kv=16384)]
TINY = Problem(heads=2, seq_q=40, head_dim=16)
SMOKE = scores(TINY, CAPPED, *ADDED, SUNK, {"value_dim": 8})
DEFAULT = [
    *scores(HEADS, CAPPED, *ADDED, SUNK),
    *scores(GPT_OSS, SUNK),
    *scores(replace(GPT_OSS, window=(None, None)), SUNK),
    *scores(LONG, CAPPED, {"alibi": True}),
    *MLA,
]
FULL = [
    *DEFAULT,
    *scores(NARROW, CAPPED, *ADDED, SUNK),
    *scores(replace(HEADS, causal=True), CAPPED, *ADDED, SUNK),
    *scores(LONG, SUNK)[1:],
    *scores(replace(HEADS, heads=8, kv_heads=8, head_dim=256), CAPPED, *ADDED, SUNK),
]
SWEEPS = {
    name: {
        "bench_forward": problems,
        "bench_backward": problems,
        "bench_backward_learned": [x for x in problems if x.bias or x.sink],
    }
    for name, problems in {"smoke": SMOKE, "default": DEFAULT, "full": FULL}.items()
}


def bench_forward(time_pass):
    """Time the forward pass without gradients."""
    time_pass("forward")


def bench_backward(time_pass):
    """Time the gradients of q, k and v alone."""
    time_pass("backward")


def bench_backward_learned(time_pass):
    """Time the gradients of q, k, v and of the bias or the sinks."""
    time_pass("backward", learned=True)
