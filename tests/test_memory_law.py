"""Memory is linear in the length: what is allocated is known to the byte, and no score matrix is.

All that operators make is counted, inputs are not; on a GPU the allocator is asked, too.
"""

from __future__ import annotations

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
    """Return the bytes of o, of lse, of dq, dk and dv together, and of what backward works with."""
    wide = torch.finfo(problem.torch_dtype).bits // 8 * problem.head_dim
    rows = problem.batch * problem.heads * problem.seq_q
    keys = problem.batch * problem.kv_heads * problem.seq_kv
    padded = -(-problem.seq_q // ROW_PADDING) * ROW_PADDING * problem.batch * problem.heads
    return wide * rows, FP32 * rows, wide * (rows + 2 * keys), 2 * FP32 * padded  # lse2, delta


def decomposed(problem, device, *rows, kernel="fwd"):
    """Return the bytes of tensors of so many rows as bf16 terms, if they are decomposed."""
    specs = map(TensorSpec.of, make_inputs(problem, device=device))
    how = {"gpu": gpu_of(device), "causal": problem.causal is not False, "precision": "bf16x6"}
    terms = terms_of(tile_of(kernel, *specs, **how), problem.torch_dtype, "bf16x6")
    return terms * HALF * problem.head_dim * sum(rows)


def rows_of(problem):
    """Return the rows of q and those of k."""
    heads, kv_heads = problem.batch * problem.heads, problem.batch * problem.kv_heads
    return heads * problem.seq_q, kv_heads * problem.seq_kv


def partial_sums(problem, device):
    """Return the bytes of partial gradients: as many as programs that fill the GPU write."""
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
    """Launch the kernels, below the operators that hide what they allocate."""
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
    """Run the three lines that everybody writes."""
    q, k, v = (x.requires_grad_() for x in make_inputs(problem, device=device))
    with Live(q, k, v) as live:
        o = naive_attention(q, k, v, mask=problem.mask, scale=0.25)
        peaks = [live.peak]
        torch.autograd.grad(o.sum(), (q, k, v))
    return live, [*peaks, live.peak]


@pytest.mark.parametrize("way", [kernels, tiles])
def test_no_tensor_is_a_score_matrix(device, way):
    """No tensor of forward and backward is larger than o, or its bf16 terms; naive's have T x S."""
    heads = 1 if device.type == "cpu" else 128  # so many that nothing is split
    problem = problem_of(256, heads=heads)
    largest = heads * 256 * 16 * FP32
    if way is kernels:
        largest = max(largest, decomposed(problem, device, heads * 256))
    assert way(problem, device)[0].largest == largest
    assert naively(problem, device)[0].largest == heads * 256 * 256 * FP32


def test_bytes_grow_linearly(device):
    """Each further tile of length adds the same bytes to the tiled algorithm; naive adds more."""
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
    """Forward allocates o and lse, backward the gradients and two numbers a query: to the byte.

    And, where there is much to do in fp32, the bf16 terms of the inputs; where there is next to
    nothing to do, not even the two numbers.
    """
    if device.type == "cuda":  # where less is never decomposed, and fp32 has its two numbers always
        much = length == 130  # for a backward
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
    """Each part of what is split has gradients in fp32."""
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
    """Each part of a tile has o and two numbers a row in fp32, and programs just fill the GPU."""
    problem = problem_of(64, heads=1, seq_kv=seq_kv, causal=False)
    specs, gpu = [TensorSpec.of(x) for x in make_inputs(problem, device=device)], gpu_of(device)
    plan = choose_forward(specs, gpu, Options(None, 0.25, "bf16x6"))
    parts, most = plan.split.num, tables.rows_of(gpu).limits.split["fwd"][0][0]
    assert 1 < plan.programs <= most * gpu.num_sms
    o, lse, _, _ = sizes(problem)
    counters(specs[0].device, 1)  # which a GPU keeps
    _, (after_forward, _) = kernels(problem, device, num_splits=None)
    queries, keys = rows_of(problem)
    tiles = -(-problem.seq_q // plan.tile.block_q)
    scratch = parts * (o + 2 * lse) * tiles * plan.tile.block_q // problem.seq_q
    scratch += 4 * plan.counters * (device.type == "cpu")
    assert after_forward == o + lse + scratch + decomposed(problem, device, queries, keys, keys)


def requested(call, device):
    """Return the most bytes that were asked of the GPU's allocator at once, and the result."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    result = call()
    torch.cuda.synchronize(device)
    # Not the bytes of its blocks, which it rounds up by as much as a MiB.
    return torch.cuda.memory_stats(device)["requested_bytes.all.peak"] - before, result


@pytest.mark.gpu  # a CPU's allocator does not count; its operators are counted above
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("causal", [False, "top_left"])
def test_a_gpu_allocates_what_is_returned(device, causal, dtype):
    """On a GPU, too, to the byte, at every length: 16 times the length is 16 times the bytes.

    The heads are so many that nothing is split.
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
