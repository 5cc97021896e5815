"""FlashAttention as a peer: the arguments that its functions get, here as stand-ins."""

import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from flashattn.impls.flash_attn import MODULES, NO_BOUND
from flashattn.mask import UNBOUNDED, Mask
from flashattn.problem import Problem
from flashattn.reference import reference_attention
from flashattn.registry import get
from flashattn.testing.inputs import make_inputs, make_scored


def dense(q, k, v, *, softmax_scale, causal, no_bound, window_size=None, learnable_sink=None):
    """Compute attention as flash-attn does: [B, T, H, D], bottom-right masks, a sink per head."""
    left, right = (None if x == no_bound else x for x in window_size or (no_bound, no_bound))
    mask = Mask(left, 0 if causal else right, "bottom_right")
    sink = None if learnable_sink is None else learnable_sink[None]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o, lse = reference_attention(q, k, v, mask=mask, scale=softmax_scale, sink=sink)
    return o.transpose(1, 2), lse


def varlen(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
    """Compute attention within each document of [total, H, D]."""
    parts = []
    for i in range(len(cu_seqlens_q) - 1):
        of_q, of_k = (slice(*cu[i : i + 2].tolist()) for cu in (cu_seqlens_q, cu_seqlens_k))
        rows = q[None, of_q], k[None, of_k], v[None, of_k]
        assert rows[0].shape[1] <= max_seqlen_q
        assert rows[1].shape[1] <= max_seqlen_k
        parts.append(dense(*rows, **options)[0][0])
    return torch.cat(parts), None


@pytest.fixture
def agrees(monkeypatch):
    """Return a function that compares a peer, whose module is a stand-in, with the reference."""

    def check(name, problem):
        module = MODULES[name]
        how = {"no_bound": NO_BOUND[module]}
        functions = SimpleNamespace(
            flash_attn_func=partial(dense, **how), flash_attn_varlen_func=partial(varlen, **how)
        )
        for part in (module.partition(".")[0], module):
            monkeypatch.setitem(sys.modules, part, functions)
        asked = {**problem.keywords, **make_scored(problem), "scale": 0.25}
        o, wanted = (get(x)(*make_inputs(problem), **asked)[0] for x in (name, "reference"))
        torch.testing.assert_close(o, wanted)

    return check


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize(
    ("causal", "window"),
    [
        (False, UNBOUNDED),
        ("bottom_right", UNBOUNDED),
        ("bottom_right", (3, None)),
        (False, (2, 1)),
        (False, (None, 1)),
    ],
)
def test_conventions(agrees, name, causal, window):
    """Masks are bottom-right and -1 or None is no bound, so windows mean the same as ours."""
    seq_kv = 9 if causal else 7
    agrees(name, Problem(heads=2, seq_q=7, seq_kv=seq_kv, head_dim=8, causal=causal, window=window))


def test_documents_and_sinks(agrees):
    """Documents and sinks arrive as flash-attn's arguments, and results come back as ours."""
    plain = Problem(heads=2, seq_q=19, head_dim=8, sink=True)
    agrees("flash_attn_4", plain)
    documents = (9, 4), (10, 19)
    agrees("flash_attn_4", replace(plain, seq_kv=23, causal="bottom_right", documents=documents))


def test_limits(monkeypatch):
    """A problem that FlashAttention does not take is refused with a reason."""
    monkeypatch.setattr("flashattn.impls.flash_attn._installed", lambda module: True)
    asked = {"heads": 2, "seq_q": 32, "head_dim": 64, "dtype": "bfloat16"}
    refused = {
        "takes windows and documents of known lengths": Problem(**asked, documents="unknown"),
        "flash_attn_2 takes windows and documents of known lengths": Problem(**asked, prefix=9),
        "packs documents into one batch": Problem(**asked, batch=2, documents=((32, 32),)),
        "aligns masks at the bottom right only": Problem(
            **asked, causal=True, documents=((8, 16), (24, 16))
        ),
    }
    for reason, problem in refused.items():
        said = get("flash_attn_2").why_not(problem, "cuda")
        assert said is not None
        assert reason in said, said
    assert "takes no sink" in get("flash_attn_2").why_not(Problem(**asked, sink=True), "cuda")
