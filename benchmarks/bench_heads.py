"""Grouped heads, cross-attention and decoding: what do the shapes of language models cost?

Training has 4 to 8 query heads per key/value head. Cross-attention, and parts of a sequence that is
sharded over GPUs, have more keys than queries and no mask. Decoding has one query, so its lower
bound is the time to read the keys and values at the bandwidth of a copy.
"""

from dataclasses import replace
from itertools import product

from flashattn.problem import Problem


def training(batch: int, heads: int, kv_heads: int, rows: int, head_dim: int) -> Problem:
    """Return a causal problem, as in training or prefill."""
    return Problem(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        seq_q=rows,
        head_dim=head_dim,
        causal=True,
        dtype="bfloat16",
    )


def crossing(heads: int, kv_heads: int, queries: int, keys: int, head_dim: int) -> Problem:
    """Return an unmasked problem with few queries and many keys."""
    return replace(training(1, heads, kv_heads, queries, head_dim), seq_kv=keys, causal=False)


def decoding(batch: int, heads: int, kv_heads: int, keys: int, head_dim: int) -> Problem:
    """Return a problem with one query."""
    return replace(crossing(heads, kv_heads, 1, keys, head_dim), batch=batch)


TRAINING = [
    training(2, 32, 8, 8192, 128),
    training(1, 64, 8, 4096, 128),
    training(4, 32, 4, 2048, 64),
]
CROSSING = [crossing(32, 8, 2048, 16384, 128), crossing(16, 16, 1024, 8192, 64)]
DECODING = [
    decoding(4, 32, 8, 32768, 128),
    decoding(64, 32, 8, 4096, 128),
    decoding(1, 64, 8, 131072, 128),
    decoding(16, 16, 1, 8192, 64),
]
MORE = [training(1, 32, 8, 16384, d) for d in (64, 128)]
MORE += [  # one sequence, all group sizes; short sequences hardly fill a GPU
    replace(training(1, heads, kv_heads, n, d), causal=causal)
    for heads, kv_heads, n, d, causal in product(
        (8, 16, 32, 64), (1, 2, 4, 8), (512, 1024, 2048, 4096, 8192), (64, 128), (True, False)
    )
    if heads > kv_heads
]
SMALL = [decoding(1, 32, 8, n, 128) for n in (1024, 4096, 16384, 65536)]
SMOKE = [training(1, 4, 2, 40, 16), crossing(2, 2, 20, 50, 16), decoding(2, 4, 1, 200, 16)]
SWEEPS = {
    name: {"bench_forward": problems, "bench_backward": [x for x in problems if x.seq_q > 1]}
    for name, problems in {
        "smoke": SMOKE,
        "default": [*TRAINING, *CROSSING, *DECODING],
        "full": list(dict.fromkeys([*TRAINING, *MORE, *CROSSING, *DECODING, *SMALL])),
    }.items()
}


def bench_forward(time_pass):
    """Time the forward pass without gradients."""
    time_pass("forward")


def bench_backward(time_pass):
    """Time the backward pass alone."""
    time_pass("backward")
