"""FlashAttention compared with the alternatives: forward, backward, and both.

Three protocols: 16 384 tokens with a hidden size of 2048, divided into sequences of length N, as in
the FlashAttention papers; one causal head of one sequence, which shows short rows and small grids;
and one causal head of eight sequences in fp32.
"""

from functools import partial
from itertools import product

import pytest

from flashattn.measure.device import memory_bytes
from flashattn.problem import DTYPES, Problem


def tokens(
    total: int, width: int, *, seq: list[int], head_dim: list[int], dtype: list[str]
) -> list[Problem]:
    """Return square problems, full and causal, of ``total`` tokens and hidden size ``width``."""
    return [
        Problem(batch=total // n, heads=width // d, seq_q=n, head_dim=d, causal=mask, dtype=name)
        for name, d, mask, n in product(dtype, head_dim, (False, True), seq)
    ]


def one_head(batch: int, *, seq: list[int], head_dim: list[int], dtype: list[str]) -> list[Problem]:
    """Return causal problems with one head."""
    return [
        Problem(batch=batch, seq_q=n, head_dim=d, causal=True, dtype=name)
        for name, d, n in product(dtype, head_dim, seq)
    ]


community = partial(tokens, 16384, 2048)
eight = partial(one_head, 8, dtype=["float32"])
HALF, BOTH = ["bfloat16"], ["bfloat16", "float32"]
ROWS = [1 << n for n in range(7, 17)]  # of one head
SMOKE = tokens(256, 256, seq=[64, 256], head_dim=[64], dtype=["float32"])
CELLS = community(seq=[1024, 4096, 8192, 16384], head_dim=[64, 128], dtype=HALF)
DEFAULT = [
    *CELLS,
    *community(seq=[4096, 16384], head_dim=[192, 256], dtype=HALF),
    *one_head(1, seq=[512, 4096, 32768], head_dim=[64, 128], dtype=HALF),
    *eight(seq=[16384], head_dim=[64, 128]),
]
FULL = [
    *community(seq=[512, 1024, 2048, 4096, 8192, 16384], head_dim=[64, 128], dtype=HALF),
    *community(seq=[1024, 2048, 4096, 8192, 16384], head_dim=[16, 32], dtype=HALF),
    *community(seq=[1024, 4096, 16384], head_dim=[96, 192], dtype=HALF),
    *community(seq=[512, 4096, 16384], head_dim=[256], dtype=HALF),
    *community(seq=[4096], head_dim=[64, 128, 256], dtype=["float16"]),
    *community(seq=[4096], head_dim=[64, 128], dtype=["float32"]),
    *one_head(1, seq=ROWS, head_dim=[16, 32, 64, 128], dtype=BOTH),
    *eight(seq=[4096, 8192, 16384], head_dim=[16, 32, 64, 128]),
]


def in_passes(problems, together, any_order):
    """Return the problems by benchmark; timing both passes together adds little, so it gets few."""
    one_by_one = dict.fromkeys(("bench_forward", "bench_backward"), problems)
    return one_by_one | {"bench_forward_backward": together, "bench_backward_any_order": any_order}


SWEEPS = {
    "smoke": in_passes(SMOKE, SMOKE, []),
    "default": in_passes(DEFAULT, community(seq=[4096], head_dim=[64, 128], dtype=HALF), CELLS),
    "full": in_passes(
        FULL,
        [
            *community(seq=[512, 4096, 16384], head_dim=[64, 128], dtype=HALF),
            *one_head(1, seq=ROWS, head_dim=[16, 32, 64, 128], dtype=BOTH),
        ],
        CELLS,
    ),
}
# Compiling a shape takes 10 s or more, so only these are: (queries, head dimension, dtype).
COMPILED = {(4096, 64, "bfloat16"), (4096, 128, "bfloat16"), (16384, 128, "bfloat16")}
TOGETHER = {(4096, 64, "bfloat16")}
MOST_TILED = 1024  # most queries of ``tiled``, which loops over tiles in Python
HOLDS_SCORES = ("reference", "naive", "compiled", "sdpa_math")
SCORE_MATRICES = 4  # fewest score matrices that these hold at once


@pytest.fixture
def reason(problem, device, facts):
    """Return a function that says why passes are not timed, or None; record the protocol."""
    one = problem.heads == 1
    facts["protocol"] = "tokens" if not one else "one_head" if problem.batch == 1 else "batch"
    rows = problem.batch * problem.heads * problem.seq_q
    scores = DTYPES[problem.dtype] * rows * problem.seq_kv
    shape = (problem.seq_q, problem.head_dim, problem.dtype)

    def tell(impl, passes):
        reasons = {
            f"is for study: timed up to {MOST_TILED} queries": impl.name == "tiled"
            and problem.seq_q > MOST_TILED,
            "would hold more scores than there is memory": impl.name in HOLDS_SCORES
            and SCORE_MATRICES * scores > memory_bytes(device),
            "compiles every shape for seconds: timed at few": impl.compiles
            and shape not in (TOGETHER if passes == "forward+backward" else COMPILED),
            "is the definition, not a way to compute: naive is timed": impl.name == "reference",
        }
        return next((f"{impl.name} {why}" for why, holds in reasons.items() if holds), None)

    return tell


def bench_forward(time_pass):
    """Time the forward pass without gradients."""
    time_pass("forward")


def bench_backward(time_pass):
    """Time the backward pass alone."""
    time_pass("backward")


def bench_forward_backward(time_pass):
    """Time both passes together."""
    time_pass("forward+backward")


def bench_backward_any_order(time_pass):
    """Time the backward pass that accumulates dq in any order, as FlashAttention-4's does."""
    time_pass("backward")
