"""Memory is linear in the length: what is allocated is known to the byte, and no score matrix is.

All that operators make is counted, inputs are not; on a GPU the allocator is asked, too.
"""

from __future__ import annotations

import pytest
import torch

from flashattn import tiled
from flashattn.impls.naive import naive_attention
from flashattn.kernels import launch
from flashattn.kernels.backward import ROW_PADDING, backward
from flashattn.kernels.forward import forward
from flashattn.problem import Problem
from flashattn.registry import get
from flashattn.testing.inputs import make_grads, make_inputs
from flashattn.testing.live import Live

FP32 = 4


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


def kernels(problem, device, parts=1):
    """Launch the kernels, below the operators that hide what they allocate."""
    q, k, v = make_inputs(problem, device=device)
    grads = make_grads(problem, device=device)
    how = {"diagonal": problem.diagonal, "scale": 0.25}
    with Live(q, k, v, *grads) as live:
        o, lse = forward(q, k, v, parts=parts, **how)
        peaks = [live.peak]
        backward(grads, (q, k, v, o, lse), **how)
    return live, [*peaks, live.peak]


def tiles(problem, device):
    """Run the tiled algorithm in PyTorch."""
    q, k, v = make_inputs(problem, device=device)
    grads = make_grads(problem, device=device)
    how = {"diagonal": problem.diagonal, "scale": 0.25}
    with Live(q, k, v, *grads) as live:
        o, lse = tiled.tiled_forward(q, k, v, **how)
        peaks = [live.peak]
        tiled.tiled_backward(grads, (q, k, v, o, lse), **how)
    return live, [*peaks, live.peak]


def naively(problem, device):
    """Run the three lines that everybody writes."""
    q, k, v = (x.requires_grad_() for x in make_inputs(problem, device=device))
    with Live(q, k, v) as live:
        o = naive_attention(q, k, v, diagonal=problem.diagonal, scale=0.25)
        peaks = [live.peak]
        torch.autograd.grad(o.sum(), (q, k, v))
    return live, [*peaks, live.peak]


@pytest.mark.parametrize("way", [kernels, tiles])
def test_no_tensor_is_a_score_matrix(device, way):
    """No tensor of forward and backward is larger than o; naive attention's have T x S."""
    problem = problem_of(256, heads=1)
    assert way(problem, device)[0].largest == 256 * 16 * FP32
    assert naively(problem, device)[0].largest == 256 * 256 * FP32


def test_bytes_grow_linearly(device):
    """Each further tile of length adds the same bytes to the tiled algorithm; naive adds more."""
    found = [[way(problem_of(n), device)[1] for n in (128, 192, 256)] for way in (tiles, naively)]
    for a, b, c in zip(*found[0], strict=True):
        assert c - b == b - a > 0
    for a, b, c in zip(*found[1], strict=True):
        assert c - b > b - a


@pytest.mark.parametrize("length", [64, 130])
def test_kernels_allocate_what_they_return(device, length):
    """Forward allocates o and lse, backward the gradients and two numbers a query: to the byte."""
    problem = problem_of(length, heads=4, kv_heads=2, seq_kv=90)
    _, (after_forward, after_backward) = kernels(problem, device)
    o, lse, grads, rows = sizes(problem)
    assert after_forward == o + lse
    assert after_backward == o + lse + grads + rows


@pytest.mark.parametrize("seq_kv", [300, 1200])
def test_split_keys_take_a_bounded_scratch(device, seq_kv):
    """Each part has an o and an lse in fp32, and no more parts are than programs fill the GPU."""
    problem = problem_of(64, heads=1, seq_kv=seq_kv, causal=False)
    likes = map(launch.Like.of, make_inputs(problem, device=device))
    tile = launch.pick_tile("fwd", *likes, causal=False)
    programs = -(-64 // tile.block_q)
    parts, _ = launch.split("fwd", programs, seq_kv, tile.block_kv, device)
    assert 1 < parts * programs <= launch.PROGRAMS["fwd"] * launch.multiprocessors(device)
    o, lse, _, _ = sizes(problem)
    _, (after_forward, _) = kernels(problem, device, parts=None)
    assert after_forward == (1 + parts) * (o + lse)


def requested(call, device):
    """Return the most bytes that were asked of the GPU's allocator at once, and the result."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    result = call()
    torch.cuda.synchronize(device)
    # Not the bytes of its blocks, which it rounds up by as much as a MiB.
    return torch.cuda.memory_stats(device)["requested_bytes.all.peak"] - before, result


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("causal", [False, "top_left"])
def test_a_gpu_allocates_what_is_returned(device, causal, dtype):
    """On a GPU, too, to the byte, at every length: 16 times the length is 16 times the bytes.

    The heads are so many that no keys are split.
    """
    if device.type != "cuda":
        pytest.skip("a CPU's allocator does not count; its operators are counted above")
    impl, ratios = get("triton"), []
    for length in (2048, 2048, 8192, 32768):  # the first call compiles and is not judged
        problem = problem_of(length, heads=64, kv_heads=2, head_dim=64, causal=causal, dtype=dtype)
        q, k, v = (x.requires_grad_() for x in make_inputs(problem, device=device))
        grads = make_grads(problem, device=device)
        forward_bytes, outputs = requested(
            lambda q=q, k=k, v=v: impl(q, k, v, causal=causal, scale=0.125), device
        )
        backward_bytes, _ = requested(
            lambda q=q, k=k, v=v, o=outputs, g=grads: torch.autograd.grad(o, (q, k, v), g), device
        )
        ratios.append((forward_bytes, backward_bytes, *sizes(problem)))
        del outputs
    for forward_bytes, backward_bytes, o, lse, of_grads, rows in ratios[1:]:
        assert forward_bytes == o + lse
        assert backward_bytes == of_grads + rows
    assert [ratios[-1][i] / ratios[1][i] for i in (0, 1)] == [16, 16]
