"""No size is special: drawn lengths up to 4096, 40 heads, 40 batches, every head dimension to 256.

``docs/conformance.md`` gives the probability that a run finds what depends on a size.
"""

from functools import partial

from flashattn.checks import check_scale
from flashattn.problem import Problem
from flashattn.testing.accuracy import Sample, assert_accurate
from flashattn.testing.examples import Count
from flashattn.testing.law import clause, interpreted
from flashattn.testing.seed import chance

LONGEST, MOST, WIDEST = 4096, 40, 256
ROWS_OF_FP32 = 300
DTYPES = ("bfloat16", "float16", "float32")
MASKS = (False, "top_left", "bottom_right")
DRAWN, INTERPRETED = 12, 2  # lengths; the interpreter gets fewer of everything
# Powers of two, where counters and tiles end, with their neighbours.
EDGES = sorted({n for k in range(5, 13) for n in (2**k - 1, 2**k, 2**k + 1) if n <= LONGEST})


def verify(impl, device, *, values="normal", grad=True, **sizes):
    """Verify a problem of these sizes, or the nearest that the implementation claims."""
    problem = impl.fit(Problem(**sizes))
    if impl.why_not(problem, device, grad=grad and impl.grad) is not None:
        return
    facts = {"grad": grad and impl.grad, "lse": impl.lse, "denormals": impl.denormals}
    sample = Sample(problem=problem, device=device, values=values, **facts)
    scale = check_scale(None, problem.head_dim)
    call = partial(impl, **problem.keywords, scale=scale)
    assert_accurate(call, sample, guarded=False)
    Count.passed += 1


def some(impl, device, among, least):
    """Return all of these sizes in random order, or a few of them where each takes long.

    All are held to the reference, and tiled has one loop for all lengths, so these two get few.
    """
    few = interpreted(impl, device) or impl.excused or device.type == "cuda"
    few = few or impl.name in ("reference", "tiled")
    return chance(*among).sample(among, least if few else len(among))


@clause()
def test_every_head_dim(impl, device):
    """Every head dimension from 1 to 256 is right; where each takes long, a sample of them."""
    drawn = chance("head_dim")
    claimed = [d for d in range(1, WIDEST + 1) if impl.head_dims is None or d in impl.head_dims]
    for head_dim in some(impl, device, claimed, min(6, len(claimed))):
        verify(
            impl,
            device,
            heads=2,
            seq_q=drawn.randint(2, 20),
            seq_kv=drawn.randint(2, 20),
            head_dim=head_dim,
            causal=drawn.choice(MASKS),
            dtype=drawn.choice(DTYPES[:2]),
        )


@clause()
def test_every_number_of_heads(impl, device):
    """Every number of heads and of batches from 1 to 40 is right, with any group that divides."""
    drawn = chance("heads")
    heads = some(impl, device, list(range(1, MOST + 1)), 2)
    batches = [1, MOST] if len(heads) == 2 else drawn.sample(range(1, MOST + 1), MOST)
    heads = [MOST, 1] if len(heads) == 2 else heads
    for batch, n in zip(batches, heads, strict=True):
        group = drawn.choice([g for g in range(1, n + 1) if n % g == 0])
        verify(
            impl,
            device,
            batch=batch,
            heads=n,
            kv_heads=n // group,
            seq_q=drawn.randint(4, 8),
            seq_kv=drawn.randint(4, 8),
            head_dim=16,
            causal=drawn.choice(MASKS),
            dtype=drawn.choice(DTYPES),
        )


@clause()
def test_every_kind_of_length(impl, device):
    """Lengths around each power of two up to 4096, and random lengths, are right.

    Half of the key lengths have one query: decoding has kernels of its own.
    """
    for name, other in (("seq_q", "seq_kv"), ("seq_kv", "seq_q")):
        drawn = chance(name)
        lengths = some(impl, device, EDGES, 1) + [drawn.randint(1, LONGEST) for _ in range(DRAWN)]
        if len(lengths) < len(EDGES):
            lengths = lengths[: INTERPRETED - 1]
        for n in [LONGEST, *lengths]:
            short = drawn.randint(17, 70)
            one = name == "seq_kv" and drawn.random() < 1 / 2
            verify(
                impl,
                device,
                **{name: n, other: 1 if one else short},
                heads=2,
                kv_heads=drawn.choice((1, 2)),
                head_dim=drawn.choice((32, 64)),
                causal=drawn.choice(MASKS),
                # The cost of verifying fp32 grows with the square of S.
                dtype=drawn.choice(DTYPES if n < ROWS_OF_FP32 else DTYPES[:2]),
            )


@clause()
def test_the_last_key_counts(impl, device):
    """The last keys count, at lengths around each power of two up to 4096.

    They have all the weight: among a thousand keys of equal weight, one may be lost in the budgets.
    """
    sizes = {"seq_q": 64, "head_dim": 64}
    for n in some(impl, device, EDGES, 1):
        verify(impl, device, values="rising", grad=False, seq_kv=n, **sizes)


@clause()
def test_large_squares(impl, device):
    """Many queries of many keys are right."""
    drawn = chance("square")
    least, most = (100, 140) if interpreted(impl, device) else (500, 800)
    for causal in ("top_left", False):
        sizes = {"seq_q": drawn.randint(least, most), "seq_kv": drawn.randint(least, most)}
        verify(impl, device, **sizes, head_dim=64, causal=causal, dtype=drawn.choice(DTYPES[:2]))
