"""What a score is, behind the products of q and k: ALiBi."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashattn import attention
from flashattn.problem import Problem
from flashattn.testing.inputs import make_grads, make_inputs
from flashattn.testing.law import law
from flashattn.testing.results import ask, assert_agree

PROBLEM = Problem(batch=2, heads=4, kv_heads=2, seq_q=20, seq_kv=26, head_dim=16)
OURS = pytest.mark.parametrize("name", ["triton", "tiled", "reference"])


def tensors(device, **changes):
    """Return q, k, v."""
    return make_inputs(Problem(**vars(PROBLEM) | changes), device=device)


def written_out(q, k, v, *, hidden=None, softcap=None, slopes=None):
    """Return o and lse in fp64 as the formula reads."""
    q, k, v = (x.double() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if slopes is not None:
        t, s = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
        distance = (t[:, None] + len(s) - len(t) - s).abs()
        scores = scores - slopes.double().reshape(-1, q.shape[1], 1, 1) * distance
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def assert_like(got, wanted, given, grads):
    """Hold o, lse and the gradients of what was given to those that are written out."""
    gradients = torch.autograd.grad(got, given, grads)
    exact = torch.autograd.grad(wanted, given, [x.double() for x in grads])
    for a, b in zip((*got, *gradients), (*wanted, *exact), strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), atol=2e-5, rtol=2e-5)


@OURS
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("of_batches", [False, True])
def test_alibi(name, of_batches, causal, device):
    """It takes slope * |t + S - T - s| off a score, behind the softcap and before the mask."""
    given = [x.requires_grad_() for x in tensors(device)]
    slopes = torch.linspace(0, 1.5, 8 if of_batches else 4, device=device)
    slopes = slopes.view(-1, 4) if of_batches else slopes
    how = {"causal": causal, "softcap": 2.0, "return_lse": True}
    got = attention(*given, alibi_slopes=slopes, **how, impl=name)
    t, s = (torch.arange(n, device=device) for n in (20, 26))
    hidden = s > t[:, None] if causal else None
    wanted = written_out(*given, hidden=hidden, softcap=2.0, slopes=slopes)
    assert_like(got, wanted, given, make_grads(PROBLEM, device=device))


@pytest.mark.parametrize("name", ["auto", "triton", "tiled", "reference"])
def test_alibi_under_transforms(name, device):
    """Compiled, mapped, cast and differentiated attention has its slopes, after one without."""
    q, k, v = tensors(device)
    slopes = torch.linspace(0, 1, 4, device=device)
    assert not torch.equal(
        attention(q, k, v, impl=name), attention(q, k, v, alibi_slopes=slopes, impl=name)
    )

    def call(q, k, v, slopes):
        return attention(q, k, v, causal=True, alibi_slopes=slopes, impl=name)

    wanted = call(q, k, v, slopes)
    torch.compiler.reset()
    for dynamic in (False, True):
        compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        torch.testing.assert_close(compiled(q, k, v, slopes), wanted)
    several = torch.stack([slopes, slopes.flip(0)])
    mapped = torch.vmap(call, in_dims=(0, None, None, 0))(torch.stack([q, 2 * q]), k, v, several)
    torch.testing.assert_close(mapped, torch.stack([wanted, call(2 * q, k, v, several[1])]))
    mapped = torch.vmap(call, in_dims=(0, None, None, None))(torch.stack([q, 2 * q]), k, v, several)
    alone = torch.stack([call(q, k, v, several), call(2 * q, k, v, several)])
    torch.testing.assert_close(mapped, alone)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        half = [x.bfloat16() for x in (q, k, v)]
        assert torch.equal(call(q, k, v, slopes), call(*half, slopes))
    if name in ("auto", "reference"):  # others need a device
        assert call(*(x.to("meta") for x in (q, k, v, slopes))).shape == wanted.shape


def test_alibi_of_one_head(device):
    """A [B, T, D] input has one slope, or one for each batch."""
    q, k, v = tensors(device, heads=1, kv_heads=1)
    for slopes in (torch.ones(1, device=device), torch.ones(2, 1, device=device)):
        o = attention(q, k, v, alibi_slopes=slopes, impl="triton")
        flat = attention(*(x[:, 0] for x in (q, k, v)), alibi_slopes=slopes, impl="triton")
        assert torch.equal(flat, o[:, 0])


@pytest.mark.parametrize(
    ("slopes", "words"),
    [
        (1.0, "alibi_slopes: wanted an fp32 tensor, got float"),
        (torch.ones(4).double(), "alibi_slopes: wanted an fp32 tensor, got torch.float64"),
        (torch.ones(3), r"alibi_slopes: wanted shape \[4\] or \[2, 4\], got \[3\]"),
        (torch.ones(1, 4), r"alibi_slopes: wanted shape \[4\] or \[2, 4\], got \[1, 4\]"),
        (torch.ones(4, device="meta"), "alibi_slopes: wanted q's device"),
        (torch.ones(4, requires_grad=True), "alibi_slopes: they have no gradient"),
    ],
)
def test_bad_slopes(device, slopes, words):
    """What does not fit is refused before anything runs, after what does, too."""
    given = tensors(device)
    attention(*given, alibi_slopes=torch.ones(4, device=device), impl="triton")
    if isinstance(slopes, torch.Tensor) and not slopes.is_meta:
        slopes = slopes.to(device).detach().requires_grad_(slopes.requires_grad)
    for name in ("auto", "triton", "tiled"):
        with pytest.raises(ValueError, match=words):
            attention(*given, alibi_slopes=slopes, impl=name)


def test_alibi_is_not_for_documents(device):
    """Positions in a document are not known to the kernels."""
    cu = torch.tensor([0, 20], dtype=torch.int32, device=device)
    slopes = torch.ones(4, device=device)
    with pytest.raises(ValueError, match="alibi_slopes: not with documents"):
        attention(*tensors(device, seq_kv=20), documents=cu, alibi_slopes=slopes)


def scored(case, **changes):
    """Return a case whose scores are made with other tensors; None is none."""
    given = {name: x for name, x in {**case.scored, **changes}.items() if x is not None}
    problem = replace(case.problem, alibi="alibi_slopes" in given)
    return replace(case, problem=problem, scored=given)


@law(asked={"sloped": (True,)}, needs="alibi")
def test_slopes_of_zero(impl, sample):
    """They are none."""

    def zero(case):
        return scored(case, alibi_slopes=torch.zeros_like(case.scored["alibi_slopes"]))

    def none(case):
        return scored(case, alibi_slopes=None)

    assert_agree(ask(impl, sample, zero), ask(impl, sample, none))
