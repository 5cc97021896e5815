"""The contract is tried clause by clause, here on implementations that break one each."""

import json
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from flashattn import registry
from flashattn.mask import UNBOUNDED, Mask
from flashattn.reference import reference_attention
from flashattn.testing import contract
from flashattn.testing.contract import CLAUSES, ERRORS_KEEP, main, try_clause, try_contract, usual

CPU = torch.device("cpu")
SAME_BITS, LARGE = "same bits every run", "4096 rows, 40 batches, 40 heads"


def made(call, **facts):
    """Return an implementation that claims to take anything."""
    return registry.Impl(name="mine", call=call, limits=lambda *_: None, **facts)


def good(q, k, v, *, causal, scale, window=UNBOUNDED, softcap=None, alibi_slopes=None, **learned):
    """Compute attention by the reference, but ignore softcap, ALiBi, biases and sinks."""
    del softcap, alibi_slopes
    o, lse = reference_attention(q, k, v, mask=Mask.of(causal, window), scale=scale)
    return o + sum(0 * x.sum() for x in learned.values()), lse


def after(change):
    """Return an implementation that changes the right results."""
    return lambda q, k, v, **how: change(q, k, *good(q, k, v, **how))


def in_order(x):
    """Return x's memory, read as if x were contiguous."""
    return x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride())


def top_left(*qkv, causal, **how):
    """Align every causal mask at the top left."""
    return good(*qkv, causal=causal and "top_left", **how)


def no_left_bound(*qkv, causal, window=UNBOUNDED, **how):
    """Treat a window as a causal mask."""
    return good(*qkv, causal=causal or window != UNBOUNDED, **how)


def first_heads(q, k, v, **how):
    """Read key head h % G, not h // (H // G)."""
    group = q.shape[1] // max(k.shape[1], 1)
    k, v = (x.repeat(1, group, 1, 1)[:, : q.shape[1]] for x in (k, v))
    return good(q, k, v, **how)


def silent_second(q, k, v, **how):
    """Lose the second derivative without an error."""
    q = q * 1
    q.register_hook(lambda grad: grad.detach() + 0 * k.sum())
    return good(q, k, v, **how)


def gradient_in_order(q, k, o, lse):
    """Read the gradient's memory as if it were contiguous."""
    del q, k
    o.register_hook(in_order)
    return o, lse


def finite_mask(q, k, v, *, causal, scale):
    """Mask scores with a finite number."""
    scores = (q @ k.mT).float() * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -1e4)
    return (scores.softmax(-1) @ v.float()).to(q.dtype), scores.logsumexp(-1)


def drawing(q, k, v, **how):
    """Draw from the global generator."""
    torch.rand(1)
    return good(q, k, v, **how)


def off(wrong):
    """Return an implementation that is right, except that o is 1.5 times as large if ``wrong``."""
    return after(lambda q, k, o, lse: (o * (1.5 if wrong(q, k) else 1), lse))


TURNS = count()
AS_POISON = after(lambda q, k, o, lse: (o + k.sum() * 0, lse))
BROKEN = [
    ("float32", after(lambda q, k, o, lse: (o.bfloat16().to(o.dtype), lse))),
    ("float16", off(lambda q, _: q.dtype == torch.float16)),
    ("bfloat16", off(lambda q, k: q.dtype == torch.bfloat16 and q.shape[2] == k.shape[2])),
    ("head dims 8, 80, 256, 7", off(lambda q, _: q.shape[3] == 7)),
    ("T != S", off(lambda q, k: q.shape[2] < k.shape[2])),
    ("causal", lambda *qkv, causal, **how: good(*qkv, causal=False, **how)),
    (
        "causal top-left, T < S",
        lambda *qkv, causal, **how: good(*qkv, causal=causal and "bottom_right", **how),
    ),
    ("causal bottom-right, T < S", top_left),
    ("causal window", no_left_bound),
    ("two-sided window", no_left_bound),
    ("softcap", good),
    ("ALiBi, T < S", good),
    ("bias of each score", good),
    ("bias of all batches, causal", good),
    ("relative bias, T < S", good),
    ("sink, causal", good),
    ("grouped heads", first_heads),
    (
        "zero lengths",
        after(lambda q, k, o, lse: (o, lse if k.shape[2] else torch.zeros_like(lse))),
    ),
    ("scales 0.3, 0, -0.2", lambda *qkv, scale, **how: good(*qkv, scale=scale or 1.0, **how)),
    ("offsets above 2^31", off(lambda q, _: q.stride(1) >= 2**31)),
    (
        "lse returned",
        after(lambda q, k, o, lse: (o, lse * (2 if q.shape[2] == k.shape[2] else 1))),
    ),
    ("gradient of lse", after(lambda q, k, o, lse: (o, lse.detach() + 0 * o.sum()))),
    ("any strides", lambda q, k, v, **how: good(*map(in_order, (q, k, v)), **how)),
    ("any strides of gradients", after(gradient_in_order)),
    (
        "no visible key: 0 and -inf",
        after(lambda q, k, o, lse: (torch.where(lse[..., None] == -torch.inf, torch.nan, o), lse)),
    ),
    ("NaN and inf in keys behind the mask", AS_POISON),
    ("NaN and inf in values behind the mask", good),  # 0 times NaN
    ("NaN and inf where no query looks", AS_POISON),
    ("dtype, shape and memory of results", after(lambda q, k, o, lse: (o.float(), lse))),
    ("scores of -131072, causal", finite_mask),
    (LARGE, after(lambda q, k, o, lse: (o * (1 if q.shape[2] < 300 else 1.5), lse))),
    (LARGE, after(lambda q, k, o, lse: (o * (torch.arange(o.shape[1]) < 32)[:, None, None], lse))),
    ("no trace left behind", drawing),
    (SAME_BITS, after(lambda q, k, o, lse: (o * (1 + next(TURNS) % 2 * 2**-7), lse))),
    (ERRORS_KEEP, silent_second),
]


def test_the_definition_keeps_everything():
    """The reference keeps every clause but one: 0 times a hidden NaN is NaN."""
    found = {clause: try_clause(registry.get("reference"), CPU, clause) for clause in CLAUSES}
    broken = {clause for clause, x in found.items() if x["verdict"] != "keeps"}
    assert broken == {"NaN and inf in values behind the mask"}


@pytest.mark.parametrize(("clause", "call"), BROKEN, ids=lambda x: x if isinstance(x, str) else "")
def test_a_broken_clause_is_found(clause, call):
    """A wrong implementation breaks its clause, and keeps an ordinary one."""
    impl = made(call, lse=True, sink=True)
    found = try_clause(impl, CPU, clause)
    assert found["verdict"] == "breaks"
    assert found["said"]
    if call is AS_POISON:
        assert "nan" in found["said"]
        assert "show" in found["said"]
    if clause not in (SAME_BITS, "T != S"):
        assert try_clause(impl, CPU, "T != S")["verdict"] == "keeps"


def test_every_clause_can_be_broken():
    """Every clause has an implementation that breaks it."""
    assert {clause for clause, _ in BROKEN} == set(CLAUSES)


def test_an_error_is_a_refusal():
    """An error refuses a clause; if the clause asks for an error, it keeps the clause."""

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


@pytest.mark.parametrize("clause", ["T != S", ERRORS_KEEP])
@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError(), torch.AcceleratorError("CUDA error: out of memory")],
    ids=repr,
)
def test_too_little_memory_is_no_verdict(error, clause):
    """A clause is not judged, not even one that asks for an error, if there is no memory for it."""

    def hungry(*_, **__):
        raise error

    found = try_clause(made(hungry), CPU, clause)
    assert found["verdict"] == "not judged"


def test_the_usual_problem_is_in_a_dtype_that_is_taken():
    """Clauses that name no dtype are tried in one that the implementation takes."""
    picky = replace(made(good), limits=lambda p, _: None if p.dtype == "float32" else "fp32 only")
    assert usual(picky, CPU).dtype == "float32"
    assert usual(made(good), CPU).dtype == "bfloat16"


def test_a_process_of_its_own_prints_lines(capsys):
    """The command prints a verdict for each clause asked for; an unknown name is an error."""
    assert main(["cpu", "reference", "causal", "T != S"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [{"clause": c, "verdict": "keeps", "said": None} for c in ("causal", "T != S")]
    for arguments in (["cpu", "nobody"], ["nowhere", "reference"], []):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
    assert "impl: wanted one of" in capsys.readouterr().err


def left(returncode, *lines):
    """Return the result of a process that printed ``lines``."""
    return SimpleNamespace(returncode=returncode, stdout="\n".join(lines), stderr="impl: no")


def line(clause, word="keeps"):
    """Return the line that a process prints for a clause."""
    return json.dumps({"clause": clause, "verdict": word, "said": None})


def test_a_crash_is_a_verdict(monkeypatch):
    """A crash is the verdict on the clause being tried; a new process goes on with the next."""
    first, second, third, *rest = CLAUSES
    asked = []

    def fake(command, **_):
        asked.append(command[5:])
        if len(asked) == 1:  # ended without reporting the crash
            return left(-11, line(first))
        if len(asked) == 2:  # reported the crash: its context is lost
            return left(1, line(third, "crashes"))
        return left(0, *map(line, rest))

    monkeypatch.setattr(contract.subprocess, "run", fake)
    found = try_contract(made(good), torch.device("cuda"))
    assert set(found) == set(CLAUSES)
    assert found[second] == {"verdict": "crashes", "said": "exit status -11"}
    assert [name for name, x in found.items() if x["verdict"] == "crashes"] == [second, third]
    assert asked[1:] == [[third, *rest], rest]


def test_a_name_that_a_process_does_not_know_is_an_error(monkeypatch):
    """A name that only this process knows is an error, and is not tried forever."""
    monkeypatch.setattr(contract.subprocess, "run", lambda *_, **__: left(2))
    with pytest.raises(RuntimeError, match="a new process for the contract failed: impl: no"):
        try_contract(made(good), torch.device("cuda"))
