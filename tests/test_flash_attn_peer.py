"""FlashAttention as a peer: what its functions are given, with stand-ins of their own names."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import torch

from flashattn.problem import Problem
from flashattn.registry import get
from flashattn.testing.inputs import make_inputs, make_scored

SCALE = 0.25


def dense(q, k, v, *, softmax_scale, causal, learnable_sink=None):
    """Attend as FlashAttention-4 does: [B, T, H, D], masks at the bottom right, a sink a head."""
    corner = "bottom_right" if causal else False
    sink = None if learnable_sink is None else learnable_sink[None]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o, lse = get("reference")(q, k, v, causal=corner, scale=softmax_scale, sink=sink)
    return o.transpose(1, 2), lse


def varlen(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
    """Attend within each document of [total, H, D]."""
    parts = []
    for i in range(len(cu_seqlens_q) - 1):
        of_q, of_k = (slice(*cu[i : i + 2].tolist()) for cu in (cu_seqlens_q, cu_seqlens_k))
        rows = q[None, of_q], k[None, of_k], v[None, of_k]
        assert rows[0].shape[1] <= max_seqlen_q
        assert rows[1].shape[1] <= max_seqlen_k
        parts.append(dense(*rows, **options)[0][0])
    return torch.cat(parts), None


def test_documents_and_sinks(monkeypatch):
    """Lengths of documents and sinks arrive as flash-attn's arguments, results as ours."""
    for name in ("flash_attn", "flash_attn.cute"):
        module = ModuleType(name)
        module.flash_attn_func, module.flash_attn_varlen_func = dense, varlen
        monkeypatch.setitem(sys.modules, name, module)
    plain = Problem(heads=2, seq_q=19, head_dim=8, sink=True)
    documents = (9, 4), (10, 19)
    packed = replace(plain, seq_kv=23, causal="bottom_right", documents=documents)
    sink = make_scored(packed)
    for asked in (packed, plain):
        inputs = make_inputs(asked)
        how = {**asked.keywords, **sink, "scale": SCALE}
        o, _ = get("flash_attn_4")(*inputs, **how)
        torch.testing.assert_close(o, get("reference")(*inputs, **how)[0])


def test_limits(monkeypatch):
    """What FlashAttention cannot be asked is refused by a sentence."""
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
