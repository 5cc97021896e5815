"""The contract, clause by clause: found by trying, on implementations that break just one."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from flashattn import registry
from flashattn.mask import UNBOUNDED, Mask
from flashattn.reference import reference_attention
from flashattn.testing import contract
from flashattn.testing.contract import CLAUSES, ERRORS_KEEP, main, try_clause, try_contract, usual

CPU = torch.device("cpu")


def made(call, **facts):
    """Return an implementation that claims to take anything."""
    return registry.Impl(name="mine", call=call, limits=lambda *_: None, **facts)


def good(q, k, v, *, causal, scale, window=UNBOUNDED):
    """Answer as the definition does."""
    return reference_attention(q, k, v, mask=Mask.of(causal, window), scale=scale)


def top_left(q, k, v, *, causal, scale):
    """Know one alignment."""
    return good(q, k, v, causal=causal and "top_left", scale=scale)


def no_left_bound(q, k, v, *, causal, scale, window=UNBOUNDED):
    """Take a window for a causal mask."""
    return good(q, k, v, causal=causal or window != UNBOUNDED, scale=scale)


def unsloped(q, k, v, *, causal, scale, alibi_slopes=None):
    """Forget the slopes."""
    del alibi_slopes
    return good(q, k, v, causal=causal, scale=scale)


def unbiased(q, k, v, *, causal, scale, bias=None):
    """Forget the bias, but for a gradient of zeros."""
    o, lse = good(q, k, v, causal=causal, scale=scale)
    return (o, lse) if bias is None else (o + 0 * bias.sum(), lse)


def unsunk(q, k, v, *, causal, scale, sink=None):
    """Forget the sink likewise."""
    return unbiased(q, k, v, causal=causal, scale=scale, bias=sink)


def uncapped(q, k, v, *, causal, scale, softcap=None):
    """Forget the softcap."""
    del softcap
    return good(q, k, v, causal=causal, scale=scale)


def first_heads(q, k, v, **how):
    """Read the first key heads, whatever the group."""
    group = q.shape[1] // max(k.shape[1], 1)
    k, v = (x.repeat(1, group, 1, 1)[:, : q.shape[1]] for x in (k, v))
    return good(q, k, v, **how)


def forgetful(q, k, v, **how):
    """Return the logsumexp without its gradient."""
    o, lse = good(q, k, v, **how)
    return o, lse.detach() + 0 * o.sum()


def dense(q, k, v, **how):
    """Read memory as if it were contiguous."""
    q, k, v = (
        x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride()) for x in (q, k, v)
    )
    return good(q, k, v, **how)


def nan_for_nothing(q, k, v, *, causal, scale):
    """Give NaN to a query that sees no key."""
    o, lse = good(q, k, v, causal=causal, scale=scale)
    return torch.where(lse[..., None] == -torch.inf, torch.nan, o), lse


def sees_poison(q, k, v, **how):
    """Let every key touch every row, by a sum that is nothing unless it is NaN."""
    o, lse = good(q, k, v, **how)
    return o + k.sum() * 0, lse


def restless(q, k, v, **how):
    """Add the last bit now and then."""
    restless.calls += 1
    o, lse = good(q, k, v, **how)
    return o * (1 + restless.calls % 2 * 2**-7), lse


restless.calls = 0


def silent_second(q, k, v, *, causal, scale):
    """Lose the second derivative without a word."""

    class Lost(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            ctx.save_for_backward(*inputs)
            return good(*inputs, causal=causal, scale=scale)

        @staticmethod
        def backward(ctx, *grads):
            inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            with torch.enable_grad():
                outputs = good(*inputs, causal=causal, scale=scale)
            nothing = sum(0 * x.sum() for x in ctx.saved_tensors)
            return tuple(x + nothing for x in torch.autograd.grad(outputs, inputs, grads))

    return Lost.apply(q, k, v)


class InOrder(torch.autograd.Function):
    """Write a gradient as if it were contiguous."""

    @staticmethod
    def forward(_, o):
        """Return the same."""
        return o.clone()

    @staticmethod
    def backward(_, grad):
        """Read memory in its order."""
        return grad.as_strided(grad.shape, torch.empty(grad.shape, device="meta").stride())


def dense_gradients(q, k, v, **how):
    """Read the gradient's memory as if it were contiguous."""
    o, lse = good(q, k, v, **how)
    return InOrder.apply(o), lse


def widened(q, k, v, **how):
    """Return o in fp32, whatever q is."""
    o, lse = good(q, k, v, **how)
    return o.float(), lse


def finite_mask(q, k, v, *, causal, scale):
    """Hide keys by a finite number."""
    scores = (q @ k.mT).float() * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -1e4)
    return (scores.softmax(-1) @ v.float()).to(q.dtype), scores.logsumexp(-1)


def long_rows(q, k, v, **how):
    """Go wrong from 300 rows on."""
    o, lse = good(q, k, v, **how)
    return o * (1 if q.shape[2] < 300 else 1.5), lse


def last_heads(q, k, v, **how):
    """Forget heads beyond 32."""
    o, lse = good(q, k, v, **how)
    return o * (torch.arange(q.shape[1]) < 32)[:, None, None], lse


def drawing(q, k, v, **how):
    """Draw from the global generator."""
    torch.rand(1)
    return good(q, k, v, **how)


BROKEN = [
    (top_left, "causal bottom-right, T < S"),
    (no_left_bound, "causal window"),
    (no_left_bound, "two-sided window"),
    (first_heads, "grouped heads"),
    (forgetful, "gradient of lse"),
    (dense, "any strides"),
    (nan_for_nothing, "no visible key: 0 and -inf"),
    (uncapped, "softcap"),
    (unsloped, "ALiBi, T < S"),
    (unbiased, "bias of each score"),
    (unbiased, "bias of all batches, causal"),
    (unbiased, "relative bias, T < S"),
    (unsunk, "sink, causal"),
    (sees_poison, "NaN and inf in keys behind the mask"),
    (sees_poison, "NaN and inf where no query looks"),
    (dense_gradients, "any strides of gradients"),
    (widened, "dtype, shape and memory of results"),
    (finite_mask, "scores of -131072, causal"),
    (long_rows, "4096 rows, 40 batches, 40 heads"),
    (last_heads, "4096 rows, 40 batches, 40 heads"),
    (drawing, "no trace left behind"),
    (restless, "same bits every run"),
    (silent_second, ERRORS_KEEP),
]


def test_the_definition_keeps_everything():
    """The reference keeps every clause, but that 0 times a hidden NaN is NaN."""
    found = {clause: try_clause(registry.get("reference"), CPU, clause) for clause in CLAUSES}
    broken = {clause for clause, x in found.items() if x["verdict"] != "keeps"}
    assert broken == {"NaN and inf in values behind the mask"}


@pytest.mark.parametrize(("call", "clause"), BROKEN, ids=lambda x: getattr(x, "__name__", None))
def test_a_broken_clause_is_found(call, clause):
    """Whoever answers wrongly breaks that clause, and keeps the usual ones."""
    impl = made(call, lse=True, sink=call is unsunk)
    found = try_clause(impl, CPU, clause)
    assert found["verdict"] == "breaks"
    assert found["said"]
    if call is sees_poison:
        assert "nan" in found["said"]
        assert "show" in found["said"]
    if call is not restless:
        assert try_clause(impl, CPU, "T != S")["verdict"] == "keeps"


def test_an_error_is_a_refusal():
    """Whoever raises an error refuses; where an error is what is asked, it keeps the clause."""

    def picky(q, k, v, **how):
        if q.shape[2] != k.shape[2]:
            raise NotImplementedError("only squares\nand more")
        assert q.shape[1] == k.shape[1], "only as many heads"
        return good(q.detach(), k.detach(), v.detach(), **how)[0]

    impl = made(picky)
    assert try_clause(impl, CPU, "T != S") == {"verdict": "refuses", "said": "only squares"}
    refused = try_clause(impl, CPU, "grouped heads")
    assert refused == {"verdict": "refuses", "said": "only as many heads"}
    assert try_clause(impl, CPU, "lse returned")["verdict"] == "refuses"
    assert try_clause(impl, CPU, ERRORS_KEEP)["verdict"] == "keeps"


def test_the_usual_problem_is_in_a_dtype_that_is_taken():
    """Clauses that are not of a dtype are tried in one that the implementation takes."""
    picky = replace(made(good), limits=lambda p, _: None if p.dtype == "float32" else "fp32 only")
    assert usual(picky, CPU).dtype == "float32"
    assert usual(made(good), CPU).dtype == "bfloat16"


def test_a_process_of_its_own_prints_lines(capsys):
    """The command prints a verdict for each clause that was asked, and knows its names."""
    assert main(["cpu", "reference", "causal", "T != S"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [{"clause": c, "verdict": "keeps", "said": None} for c in ("causal", "T != S")]
    assert main(["cpu", "nobody"]) == 2
    assert "impl: wanted one of" in capsys.readouterr().err


def left(returncode, *lines):
    """Return what a process left that printed ``lines``."""
    return SimpleNamespace(returncode=returncode, stdout="\n".join(lines), stderr="impl: no")


def line(clause, word="keeps"):
    """Return what a process prints of a clause."""
    return json.dumps({"clause": clause, "verdict": word, "said": None})


def test_a_crash_is_a_verdict(monkeypatch):
    """After a crash the clause that was tried has it, and a new process goes on behind it."""
    first, second, third, *rest = CLAUSES
    asked = []

    def fake(command, **_):
        asked.append(command[5:])
        if len(asked) == 1:  # ended without a word
            return left(-11, line(first))
        if len(asked) == 2:  # ended itself, its context lost
            return left(1, line(third, "crashes"))
        return left(0, *map(line, rest))

    monkeypatch.setattr(contract.subprocess, "run", fake)
    found = try_contract(made(good), torch.device("cuda"))
    assert set(found) == set(CLAUSES)
    assert found[second] == {"verdict": "crashes", "said": "exit status -11"}
    assert [name for name, x in found.items() if x["verdict"] == "crashes"] == [second, third]
    assert asked[1:] == [[third, *rest], rest]


def test_a_name_that_a_process_does_not_know_is_an_error(monkeypatch):
    """A plugin's name that only this process knows is told, and not tried for ever."""
    monkeypatch.setattr(contract.subprocess, "run", lambda *_, **__: left(2))
    with pytest.raises(RuntimeError, match="a new process for the contract failed: impl: no"):
        try_contract(made(good), torch.device("cuda"))
