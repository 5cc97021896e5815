"""Error budgets allow rounding and nothing else."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from flashattn.mask import Mask
from flashattn.problem import Problem
from flashattn.reference import reference_attention
from flashattn.registry import get
from flashattn.testing.accuracy import (
    Error,
    Expected,
    Sample,
    assert_accurate,
    largest,
    last_place,
    one_by_one,
    run,
    run_reference,
)
from flashattn.testing.results import ask
from flashattn.testing.stored import of_two_sums

PROBLEM = Problem(heads=4, kv_heads=2, seq_q=70, head_dim=32, causal=True, dtype="bfloat16")
SAMPLE = Sample(problem=PROBLEM, scale=0.2)


def naive(q, k, v, scale=0.2, last=0):
    """Run the reference with a scale and a mask that a test may get wrong."""
    o, lse = reference_attention(q, k, v, mask=Mask(right=last), scale=scale)
    return o, lse.to(torch.promote_types(lse.dtype, torch.float32))


WRONG = {
    "scale": lambda q, k, v: naive(q, k, v, scale=0.2 * 1.02),
    "mask-late": lambda q, k, v: naive(q, k, v, last=1),
    "no-mask": lambda q, k, v: naive(q, k, v, last=None),
    "grouping": lambda q, k, v: naive(q, k.flip(1), v),
    "half-dv": lambda q, k, v: naive(q, k, v.detach() + v * 0.5 - v.detach() * 0.5),
    "no-dlse": lambda q, k, v: (naive(q, k, v)[0], naive(q, k, v)[1].detach() + 0 * q.sum()),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_errors_are_seen(wrong):
    """A scale off by 2%, a mask off by one, a wrong group or a wrong gradient breaks a budget."""
    with pytest.raises(AssertionError, match=r" error .*, budget "):
        assert_accurate(WRONG[wrong], SAMPLE)


@pytest.mark.parametrize("name", ["o", "lse", "dq", "dk", "dv"])
@pytest.mark.parametrize("damage", [1.03, torch.nan, torch.inf, "lost row"])
def test_each_output_is_judged(name, damage):
    """An output that is 3% off, lacks a row or has one NaN or infinity is reported by name."""
    case = SAMPLE.draw()
    got = run(naive, case)
    if damage == "lost row":
        got[name] = got[name][:, :, :-1]
    elif damage == 1.03:
        got[name] = got[name] * damage
    else:
        got[name].view(-1)[17] = damage
    failures = Expected.of(case).failures(got)
    assert failures
    assert all(sentence.startswith(f"{name}: ") for sentence in failures)


def test_the_mean_is_judged():
    """An error within the max budget, but in every element, breaks the mean budget."""
    case = SAMPLE.draw()
    expected = Expected.of(case)
    got = run_reference(case)
    got["o"] = expected.exact["o"] + expected.naive["o"].max
    assert [sentence.split(" error")[0] for sentence in expected.failures(got)] == ["o: mean"]


def test_infinities_are_compared():
    """The lse of a fully masked row must be -inf; a finite number, +inf and NaN fail."""
    case = Sample(
        problem=Problem(seq_q=4, seq_kv=2, head_dim=4, causal="bottom_right"), grad=False
    ).draw()
    expected = Expected.of(case)
    for wrong in (0.0, torch.inf, torch.nan):
        got = run_reference(case)
        got["lse"][0, 0, 0] = wrong
        assert expected.failures(got) == [
            "lse: infinite or NaN where the exact result is not, or the reverse"
        ]


def test_fp64_is_judged_too():
    """In fp64, where naive is exact, a scale off by 1e-9 breaks a budget."""
    sample = Sample(problem=Problem(seq_q=40, head_dim=16, dtype="float64"))
    assert_accurate(lambda q, k, v: naive(q, k, v, scale=0.25, last=None), sample)
    with pytest.raises(AssertionError):
        assert_accurate(lambda q, k, v: naive(q, k, v, scale=0.25 * (1 + 1e-9), last=None), sample)


def in_turn(q, k, v):
    """Compute attention; sum each score term by term, from the last column to the first."""
    scores = sum(q[..., :, None, j] * k[..., None, :, j] for j in reversed(range(q.shape[-1])))
    p = (scores * q.shape[-1] ** -0.5).softmax(-1)
    return p @ v, (scores * q.shape[-1] ** -0.5).logsumexp(-1)


def test_any_order_of_a_sum_is_naive():
    """Terms of one sign may be summed in any order; keys without their last six bits fail."""
    problem = Problem(heads=2, seq_q=72, seq_kv=11, head_dim=128)
    asked = Sample(problem=problem, values="negative", grad=False)
    assert_accurate(in_turn, asked)
    with pytest.raises(AssertionError, match="o: mean error"):
        assert_accurate(
            lambda q, k, v: in_turn(q, (k.view(torch.int32) & -64).view(torch.float32), v), asked
        )


@pytest.mark.parametrize("length", [16, 64, 256])
@pytest.mark.parametrize("sign", [torch.clone, torch.abs], ids=["any", "one"])
def test_two_sums_of_a_score(sign, length):
    """Forward and reverse sums differ by what budgets allow, and not by much less.

    With terms of one sign they differ three to ten times as much as with terms of any sign.
    """
    terms = sign(torch.randn(10_000, length, generator=torch.Generator().manual_seed(0)))
    forward, back = sum(terms.T), sum(terms.T.flip(0))
    exact = terms.double()
    squares = of_two_sums(exact.sum(1), exact.square().sum(1), length)
    eps = squares.sqrt() * torch.finfo(torch.float32).eps
    spread = ((forward - back).double() / eps).square().mean().sqrt()
    assert 1 / 6 < spread < 12**-0.5  # one standard deviation; budgets allow 3.5


def test_gradients_of_one_key():
    """With one key, dP and delta cancel; the largest error left is 20 to 100% of its budget."""
    asked = Problem(heads=2, kv_heads=2, seq_q=1, seq_kv=1, head_dim=32, bias="bhts")
    how = {"device": torch.device("cpu"), "values": "shifted", "grad_layout": "expanded_columns"}
    found = [ask(get("tiled"), Sample(problem=asked, seed=seed, **how)) for seed in range(200, 240)]
    errors = [one.got["dbias"][..., 0].double() - one.case.grad_lse for one in found]
    budgets = [one.budget("dbias")["max"] for one in found]
    shares = [float(x.abs().max()) / size for x, size in zip(errors, budgets, strict=True)]
    assert 0.2 < max(shares) < 1


def test_scores_one_by_one_are_the_references():
    """If sums are exact their order changes nothing; infinite scores are not summed one by one."""
    problem = Problem(heads=2, kv_heads=1, seq_q=9, seq_kv=12, head_dim=8, causal="bottom_right")
    case = Sample(problem=problem, values="grid", grad=False).draw()
    wanted = run_reference(case)
    assert all(torch.equal(x, wanted[name]) for name, x in one_by_one(case).items())
    case.inputs[0][0, 0, 0, 0] = torch.inf
    assert one_by_one(case) == {}


def test_what_is_infinite_is_no_error():
    """A logsumexp of -inf counts neither in the size of an output nor in its error."""
    exact = torch.tensor([-torch.inf, -2.0, 1.0], dtype=torch.float64)
    assert largest({"lse": exact, "o": exact[:0]}) == {"lse": 2.0, "o": 0.0}
    assert Error.of(torch.tensor([-torch.inf, -2.5, 3.5]), exact) == Error(2.5, 1.5, 1.0)
    assert Error.of(exact[:1].float(), exact[:1]) == Error()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_last_place_of_a_number(dtype):
    """The last place is the distance to the next number; all denormals have the same one."""
    info = torch.finfo(dtype)
    for x in (1.0, 4.0, info.tiny, info.tiny / 4, info.tiny * info.eps):
        bits = {2: torch.int16, 4: torch.int32}[info.bits // 8]
        following = (torch.tensor(x, dtype=dtype).view(bits) + 1).view(dtype)
        assert last_place(dtype, x) == following.item() - x
    assert last_place(dtype, 0.0) == 0


def test_rounding_denormals_twice_is_within():
    """Among denormals one more rounding is within budget; an error of four places is not."""
    asked = Sample(problem=Problem(seq_q=260, seq_kv=65, head_dim=16), values="denormal")
    place = last_place(torch.float32, torch.finfo(torch.float32).tiny)

    def attend(q, k, v, places):
        o, lse = naive(q, k, v, scale=0.25, last=None)
        return o + places * place, lse

    assert_accurate(partial(attend, places=1), asked)
    with pytest.raises(AssertionError, match="o: "):
        assert_accurate(partial(attend, places=4), asked)


def test_rows_that_see_nothing_are_right():
    """Fully masked rows pass, even so many that the mean of their lse would be judged."""
    problem = Problem(seq_q=1100, seq_kv=8, head_dim=16, documents=((1100, 0), (0, 8)))
    call = partial(get("reference"), **problem.keywords, scale=0.25)
    assert_accurate(call, Sample(problem=problem))


def test_rows_that_are_alike_count_as_one():
    """If all rows of o in a head are equal, naive is run on more draws, up to a limit."""
    small, long = (Problem(heads=3, kv_heads=1, seq_q=n, head_dim=43) for n in (65, 2000))
    copies = {
        (values, problem.seq_q): Sample(problem=problem, values=values).enlarged().problem.batch
        for values in ("normal", "same_keys")
        for problem in (small, long)
    }
    assert copies["normal", 65] == copies["normal", 2000] == copies["same_keys", 2000] == 1
    assert copies["same_keys", 65] == 96  # each has 43 elements; ``POOL`` is 4096
    for gone in ("batch", "heads", "seq_q", "seq_kv"):
        none = replace(small, **{gone: 0} | ({"kv_heads": 0} if gone == "heads" else {}))
        Sample(problem=none, values="same_keys").enlarged()
