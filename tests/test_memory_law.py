"""Memory is linear in the length: allocations are known to the byte, and none is a score matrix.

All allocations of operators count, inputs do not; on a GPU the allocator's counts are checked, too.
"""

import gc
from dataclasses import replace

import pytest
import torch

from flashattn import tiled
from flashattn.gpus import gpu_of
from flashattn.impls.naive import naive_attention
from flashattn.kernels.counters import counters
from flashattn.kernels.execute import backward, forward
from flashattn.plan import tables
from flashattn.plan.choose import choose_backward, choose_forward
from flashattn.plan.portable import ROW_PADDING, terms_of, tile_of
from flashattn.plan.spec import Options, TensorSpec
from flashattn.problem import Problem
from flashattn.registry import get
from flashattn.testing.inputs import make_grads, make_inputs
from flashattn.testing.live_bytes import Live

FP32, HALF = 4, 2


def problem_of(length, **changes):
    """Return a causal problem of a length."""
    return Problem(**{"heads": 2, "seq_q": length, "head_dim": 16, "causal": True} | changes)


def sizes(problem):
    """Return the bytes of o, of lse, of dq, dk and dv in all, and of backward's row statistics."""
    wide = torch.finfo(problem.torch_dtype).bits // 8 * problem.head_dim
    rows = problem.batch * problem.heads * problem.seq_q
    keys = problem.batch * problem.kv_heads * problem.seq_kv
    padded = -(-problem.seq_q // ROW_PADDING) * ROW_PADDING * problem.batch * problem.heads
    return wide * rows, FP32 * rows, wide * (rows + 2 * keys), 2 * FP32 * padded  # lse_log2, delta


def decomposed(problem, device, *rows, kernel="fwd"):
    """Return the bytes of the bf16 terms of this many rows, or 0 if they are not decomposed."""
    specs = map(TensorSpec.of, make_inputs(problem, device=device))
    how = {"gpu": gpu_of(device), "causal": problem.causal is not False, "precision": "bf16x6"}
    terms = terms_of(tile_of(kernel, *specs, **how), problem.torch_dtype, "bf16x6")
    return terms * HALF * problem.head_dim * sum(rows)


def rows_of(problem):
    """Return the number of rows of q and of k."""
    heads, kv_heads = problem.batch * problem.heads, problem.batch * problem.kv_heads
    return heads * problem.seq_q, kv_heads * problem.seq_kv


def partial_sums(problem, device):
    """Return the bytes of partial gradients; check that their programs at most fill the GPU."""
    q, k, v = map(TensorSpec.of, make_inputs(problem, device=device))
    lse = TensorSpec.of(torch.empty(q.shape[:3], device=device))
    gpu = gpu_of(device)
    plan = choose_backward((q, k, v, q, q, lse), gpu, Options(problem.band.right, 0.25, "bf16x6"))
    queries, keys = rows_of(problem)
    scratch = 0
    for one in plan.passes:
        fused = len(one.splits) > 1
        written = {"bwd_dkdv": (2 * keys,), "bwd_dq": (queries,)}.get(
            one.kernel, (2 * keys, queries)
        )
        most = max(
            n for n, _ in tables.rows_of(gpu).limits.split["bwd_fused" if fused else one.kernel]
        )
        beside = sum(n // x.num for n, x in zip(one.programs, one.splits, strict=True))
        for rows, x in zip(written, one.splits, strict=True):
            assert x.num == 1 or x.num * beside <= most * gpu.num_sms
            scratch += (x.num > 1) * x.num * FP32 * problem.head_dim * rows
    return scratch


def kernels(problem, device, num_splits=1):
    """Launch the kernels directly, because operators hide their allocations."""
    q, k, v = make_inputs(problem, device=device)
    grads = make_grads(problem, device=device)
    how = {"right": problem.band.right, "scale": 0.25}
    with Live(q, k, v, *grads) as live:
        o, lse = forward(q, k, v, num_splits=num_splits, **how)
        peaks = [live.peak]
        gc.collect()  # Triton's interpreter leaves tensors in cycles
        backward(grads, (q, k, v, o, lse), **how)
    return live, [*peaks, live.peak]


def tiles(problem, device):
    """Run the tiled algorithm in PyTorch."""
    q, k, v = make_inputs(problem, device=device)
    grads = make_grads(problem, device=device)
    how = {"mask": problem.mask, "scale": 0.25}
    with Live(q, k, v, *grads) as live:
        o, lse = tiled.tiled_forward(q, k, v, **how)
        peaks = [live.peak]
        tiled.tiled_backward(grads, (q, k, v, o, lse), **how)
    return live, [*peaks, live.peak]


def naively(problem, device):
    """Run naive attention."""
    q, k, v = (x.requires_grad_() for x in make_inputs(problem, device=device))
    with Live(q, k, v) as live:
        o = naive_attention(q, k, v, mask=problem.mask, scale=0.25)
        peaks = [live.peak]
        torch.autograd.grad(o.sum(), (q, k, v))
    return live, [*peaks, live.peak]


@pytest.mark.parametrize("way", [kernels, tiles])
def test_no_tensor_is_a_score_matrix(device, way):
    """No tensor of either pass is larger than o or its bf16 terms; naive attention has T x S."""
    heads = 1 if device.type == "cpu" else 128  # enough that nothing is split
    problem = problem_of(256, heads=heads)
    largest = heads * 256 * 16 * FP32
    if way is kernels:
        largest = max(largest, decomposed(problem, device, heads * 256))
    assert way(problem, device)[0].largest == largest
    assert naively(problem, device)[0].largest == heads * 256 * 256 * FP32


def test_bytes_grow_linearly(device):
    """Each further tile of rows adds the same bytes to the tiled algorithm, and more to naive."""
    found = [[way(problem_of(n), device)[1] for n in (128, 192, 256)] for way in (tiles, naively)]
    for a, b, c in zip(*found[0], strict=True):
        assert c - b == b - a > 0
    for a, b, c in zip(*found[1], strict=True):
        assert c - b > b - a


@pytest.mark.parametrize(
    ("length", "seq_kv", "dtype", "also"),
    [
        (64, 90, "float32", {"terms", "rows"}),
        (130, 90, "float32", {"terms", "rows"}),
        (30, 30, "float32", set()),
        (130, 90, "bfloat16", {"rows"}),
        (30, 30, "bfloat16", set()),
    ],
)
def test_kernels_allocate_what_they_return(device, length, seq_kv, dtype, also):
    """Forward allocates exactly o and lse, and backward the gradients and two numbers per query.

    Large fp32 problems also allocate the bf16 terms of the inputs, and tiny problems not even the
    two numbers.
    """
    if device.type == "cuda":  # small inputs are not decomposed; fp32 always has the two numbers
        much = length == 130  # enough for a backward
        also = ({"terms", "rows"} if much else {"rows"}) if dtype == "float32" else set()
    problem = replace(problem_of(length, heads=4, kv_heads=2, seq_kv=seq_kv), dtype=dtype)
    _, (after_forward, after_backward) = kernels(problem, device)
    o, lse, grads, rows = sizes(problem)
    queries, keys = rows_of(problem)
    assert after_forward == o + lse + decomposed(problem, device, queries, keys, keys)
    given = decomposed(problem, device, queries, keys, keys, queries, kernel="bwd_dkdv")
    assert (given > 0) is ("terms" in also)
    rows = rows if "rows" in also else 0
    assert after_backward == o + lse + grads + rows + given + partial_sums(problem, device)


@pytest.mark.parametrize(("seq_q", "seq_kv"), [(128, 60), (64, 256)])
def test_split_gradients_take_a_bounded_scratch(device, seq_q, seq_kv):
    """A split backward allocates its partial gradients in fp32, and nothing else beside."""
    problem = problem_of(seq_q, heads=1, seq_kv=seq_kv, causal=False)
    o, lse, grads, rows = sizes(problem)
    scratch = partial_sums(problem, device)
    assert scratch
    _, (_, after_backward) = kernels(problem, device)
    queries, keys = rows_of(problem)
    given = decomposed(problem, device, queries, keys, keys, queries, kernel="bwd_dkdv")
    assert after_backward == o + lse + grads + rows + given + scratch


@pytest.mark.parametrize("seq_kv", [300, 1200])
def test_split_keys_take_a_bounded_scratch(device, seq_kv):
    """Each key split allocates fp32 o and two numbers a row, and programs at most fill the GPU."""
    problem = problem_of(64, heads=1, seq_kv=seq_kv, causal=False)
    specs, gpu = [TensorSpec.of(x) for x in make_inputs(problem, device=device)], gpu_of(device)
    plan = choose_forward(specs, gpu, Options(None, 0.25, "bf16x6"))
    parts, most = plan.split.num, tables.rows_of(gpu).limits.split["fwd"][0][0]
    assert 1 < plan.programs <= most * gpu.num_sms
    o, lse, _, _ = sizes(problem)
    counters(specs[0].device, 1)  # a GPU keeps them
    _, (after_forward, _) = kernels(problem, device, num_splits=None)
    queries, keys = rows_of(problem)
    tiles = -(-problem.seq_q // plan.tile.block_q)
    scratch = parts * (o + 2 * lse) * tiles * plan.tile.block_q // problem.seq_q
    scratch += 4 * plan.counters * (device.type == "cpu")
    assert after_forward == o + lse + scratch + decomposed(problem, device, queries, keys, keys)


def requested(call, device):
    """Return the peak of bytes requested from the GPU's allocator, and the result."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    result = call()
    torch.cuda.synchronize(device)
    # Requested bytes, not those of blocks, which the allocator rounds up by as much as a MiB.
    return torch.cuda.memory_stats(device)["requested_bytes.all.peak"] - before, result


@pytest.mark.gpu  # a CPU's allocator does not count; its operators are counted above
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("causal", [False, "top_left"])
def test_a_gpu_allocates_what_is_returned(device, causal, dtype):
    """A GPU allocates exactly what is known: 16 times the length takes 16 times the bytes.

    There are enough heads that nothing is split.
    """
    impl, ratios = get("triton"), []
    for length in (2048, 2048, 8192, 32768):  # the first call compiles and is not judged
        problem = problem_of(length, heads=64, kv_heads=32, head_dim=64, causal=causal, dtype=dtype)
        q, k, v = (x.requires_grad_() for x in make_inputs(problem, device=device))
        grads = make_grads(problem, device=device)
        forward_bytes, outputs = requested(
            lambda q=q, k=k, v=v: impl(q, k, v, causal=causal, scale=0.125), device
        )
        backward_bytes, _ = requested(
            lambda q=q, k=k, v=v, o=outputs, g=grads: torch.autograd.grad(o, (q, k, v), g), device
        )
        queries, keys = rows_of(problem)
        given = decomposed(problem, device, queries, keys, keys)
        more = decomposed(problem, device, queries)
        ratios.append((forward_bytes, backward_bytes, *sizes(problem), given, more))
        del outputs
    for forward_bytes, backward_bytes, o, lse, of_grads, rows, given, more in ratios[1:]:
        assert forward_bytes == o + lse + given
        assert backward_bytes == of_grads + rows + given + more
    assert [ratios[-1][i] / ratios[1][i] for i in (0, 1)] == [16, 16]
