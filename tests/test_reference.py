"""The reference: the definition that everything else is judged by."""

import math

import hypothesis
import torch

from flashattn.reference import reference_attention
from flashattn.testing.inputs import make_inputs
from flashattn.testing.strategies import SCALES, one_of, problems

FP64 = ("float64",)


def by_hand(q, k, v, band, scale):
    """Compute attention of one head in scalars, as on paper."""
    rows, lses = [], []
    for t, query in enumerate(q.tolist()):
        keys = [s for s in range(len(k)) if band.sees(t, s)]
        scores = [
            scale * sum(a * b for a, b in zip(query, k[s].tolist(), strict=True)) for s in keys
        ]
        weights = [math.exp(x) for x in scores]
        total = sum(weights)
        lses.append(math.log(total) if keys else -math.inf)
        rows.append(
            [
                sum(w * v[s, d].item() for w, s in zip(weights, keys, strict=True)) / total
                for d in range(len(v[0]))
            ]
            if keys
            else [0.0] * q.shape[1]
        )
    return torch.tensor(rows, dtype=torch.float64), torch.tensor(lses, dtype=torch.float64)


@hypothesis.given(problem=problems(longest=6, dtypes=FP64), scale=one_of(*SCALES))
def test_definition(problem, scale):
    """Every head is softmax(scale * q @ k.T + mask) @ v, computed number by number."""
    scale = 0.5 if scale is None else scale
    q, k, v = make_inputs(problem)
    o, lse = reference_attention(q, k, v, mask=problem.mask, scale=scale)
    for b in range(problem.batch):
        for h in range(problem.heads):
            g = h // (problem.heads // problem.kv_heads)
            if problem.seq_q and problem.seq_kv:
                wanted_o, wanted_lse = by_hand(q[b, h], k[b, g], v[b, g], problem.band, scale)
                assert torch.allclose(o[b, h], wanted_o, rtol=1e-12, atol=1e-14)
                assert torch.allclose(lse[b, h], wanted_lse, rtol=1e-12, atol=1e-14)


@hypothesis.settings(max_examples=10)
@hypothesis.given(problem=problems(longest=4, dtypes=FP64))
def test_gradients(problem):
    """First and second derivatives are those of finite differences."""
    hypothesis.assume(problem.batch * problem.head_dim * problem.heads <= 12)
    inputs = [x.requires_grad_() for x in make_inputs(problem)]
    t = torch.arange(problem.seq_q)
    low, high = problem.band.keys_of(t)
    live = torch.as_tensor(low < high).expand_as(t)

    def call(q, k, v):
        o, lse = reference_attention(q, k, v, mask=problem.mask, scale=0.5)
        return o, lse[..., live]

    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)
