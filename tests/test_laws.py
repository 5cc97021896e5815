"""Laws of attention, for every implementation: how results change when inputs do.

No law needs to know the right result, so the reference is tested, too. Two results may differ by
the sum of their error budgets; an exact law requires equal bits. Every result is computed among
poison (``flashattn.testing.poison``).
"""

from dataclasses import replace
from functools import partial

import hypothesis
import torch
from hypothesis import strategies as st

from flashattn.mask import UNBOUNDED
from flashattn.testing.accuracy import run
from flashattn.testing.law import law
from flashattn.testing.layouts import GRAD_LAYOUTS
from flashattn.testing.results import ask, assert_agree, assert_same_bits, assert_within
from flashattn.testing.values import sunken

CAUSAL = ("top_left", "bottom_right")


def generator(sample):
    """Return a random generator that the sample seeds."""
    return torch.Generator().manual_seed(sample.seed)


def with_inputs(q=None, k=None, v=None):
    """Return a change that applies functions to the inputs of a case."""

    def change(case):
        pairs = zip((q, k, v), case.inputs, strict=True)
        return replace(case, inputs=tuple(x if f is None else f(x) for f, x in pairs))

    return change


def alive(case):
    """Return 1 for a query that sees a key, 0 for one that sees none [T]."""
    return case.seen.any(-1).double()


@law(asked={"softcaps": (None,)}, values="grid")
def test_shifting_keys(impl, sample):
    """Adding one vector u to every key adds scale * q @ u to the logsumexp, and nothing to o."""
    u = torch.randint(-16, 17, (sample.problem.head_dim,), generator=generator(sample)) / 4
    u = u.to(sample.device)
    plain = ask(impl, sample)
    shifted = ask(impl, sample, with_inputs(k=lambda k: k + u.to(k.dtype)))
    case = plain.case
    moved = case.scale * case.inputs[0].double() @ u.double()  # [B, H, T]
    dlse = torch.zeros_like(moved) if case.grad_lse is None else case.grad_lse * alive(case)
    assert_agree(
        plain,
        shifted,
        lse=lambda x: x - moved,
        dq=lambda x: x - case.scale * dlse[..., None] * u.double(),
    )


@law(drawn={"factor": st.sampled_from((2.0, 4.0, -1.0, -2.0))})
def test_scaling_queries(impl, sample, factor):
    """Multiplying q by c and dividing the scale by c divides dq by c and changes nothing else."""

    def change(case):
        q, k, v = case.inputs
        return replace(case, inputs=(q * factor, k, v), scale=case.scale / factor)

    plain, changed = ask(impl, sample), ask(impl, sample, change)
    assert_agree(plain, changed, times=abs(factor), dq=lambda x: x * factor)


@law(asked={"masks": (False,), "windowed": (False,)})
def test_permuting_keys(impl, sample):
    """Permuting keys and values together permutes dk and dv, and changes nothing else."""
    order = torch.randperm(sample.problem.seq_kv, generator=generator(sample))
    order = order.to(sample.device)

    def permuted(x):
        return x[:, :, order]

    def back(x):
        return x[:, :, order.argsort()]

    changed = ask(impl, sample, with_inputs(k=permuted, v=permuted))
    assert_agree(ask(impl, sample), changed, dk=back, dv=back)


@law(values="grid", lse=False)
def test_linear_in_values(impl, sample):
    """O, dq and dk are linear in v, and dv does not depend on it."""

    def values(change):
        return ask(impl, sample, with_inputs(v=change))

    one, other, both = (values(f) for f in (None, lambda v: v.flip(2), lambda v: v + v.flip(2)))
    for name in one.got.keys() & {"o", "dq", "dk"}:
        parts = one.got[name].double() + other.got[name].double()
        results = (one, other, both)
        assert_within(name, parts - both.got[name], *(partial(x.budget, name) for x in results))
    if "dv" in one.got:
        budgets = (partial(x.budget, "dv") for x in (one, both))
        assert_within("dv", one.got["dv"] - both.got["dv"], *budgets)


@law(grad=False)
def test_outputs_are_means_of_values(impl, sample):
    """Each element of o is between the least and the largest of the values that its row sees."""
    result = ask(impl, sample)
    problem, v = result.case.problem, result.case.inputs[2].double()
    v = v.repeat_interleave(problem.heads // problem.kv_heads, dim=1)[:, :, None]  # [B, H, 1, S, D]
    hidden = ~result.case.seen[..., None]
    low, high = v.masked_fill(hidden, torch.inf).amin(3), v.masked_fill(hidden, -torch.inf).amax(3)
    live = alive(result.case).bool()
    o = result.got["o"].double()
    outside = (low - o).clamp(min=0) + (o - high).clamp(min=0)
    outside[:, :, ~live] = 0.0  # the mean, like its budget, is over all rows
    assert_within("o", outside, result.budget("o"))
    assert not o[:, :, ~live].any()


@law(
    needs="repeats",
    asked={"masks": CAUSAL, "windowed": (False,)},
    grad=False,
    layout="contiguous",
    drawn={"poison": st.sampled_from((torch.nan, torch.inf, -torch.inf, 6e4))},
)
def test_the_future_is_not_seen(impl, sample, poison):
    """Poison in keys that a query must not see changes no bit of its row or of earlier rows."""
    problem = sample.problem
    # Row i is the last row that is compared; all keys after those that it sees are poisoned.
    rows = max(1, min(problem.seq_q, problem.seq_kv - 1 - problem.band.right))
    i = int(torch.randint(rows, (), generator=generator(sample)))
    _, first = problem.band.keys_of(i)

    def poisoned(k):
        k = k.clone(memory_format=torch.contiguous_format)
        k[:, :, first:] = poison
        return k

    plain, changed = ask(impl, sample), ask(impl, sample, with_inputs(k=poisoned))
    for name, x in plain.got.items():
        assert_same_bits(name, changed.got[name][:, :, : i + 1], x[:, :, : i + 1])


@law(
    asked={"windowed": (True,)},
    needs="repeats windows",
    grad=False,
    layout="contiguous",
    drawn={"poison": st.sampled_from((torch.nan, torch.inf, -torch.inf, 6e4))},
)
def test_outside_a_window(impl, sample, poison):
    """Poison in every key that one query does not see changes no bit of its row."""
    i = int(torch.randint(sample.problem.seq_q, (), generator=generator(sample)))
    low, high = sample.problem.band.keys_of(i)

    def poisoned(k):
        k = k.clone(memory_format=torch.contiguous_format)
        k[:, :, :low] = k[:, :, high:] = poison
        return k

    plain, changed = ask(impl, sample), ask(impl, sample, with_inputs(k=poisoned))
    for name, x in plain.got.items():
        assert_same_bits(name, changed.got[name][:, :, i], x[:, :, i])


@law(
    asked={"masks": CAUSAL, "longest": 40},
    needs="repeats strict",
    layout="contiguous",
    drawn={"poison": st.sampled_from((torch.nan, torch.inf))},
)
def test_unseen_rows(impl, sample, poison):
    """Keys and values that no query sees may be NaN or inf: no bit changes, forward or backward."""
    hypothesis.assume(not sample.draw().seen.any(0).all())

    def with_unseen(value):
        def change(case):
            unseen = ~case.seen.any(0)[:, None]
            q, k, v = case.inputs
            return replace(
                case, inputs=(q, k.masked_fill(unseen, value), v.masked_fill(unseen, value))
            )

        return change

    plain, changed = ask(impl, sample, with_unseen(0.0)), ask(impl, sample, with_unseen(poison))
    for name, x in plain.got.items():
        assert_same_bits(name, changed.got[name], x)


@law(
    asked={"masks": CAUSAL, "shortest": 2, "square": True, "windowed": (False,)},
    needs="strict",
    values="zeros",
    scale=1.0,
)
def test_hidden_scores(impl, sample):
    """Masked keys stay hidden even if every visible score is -131072 (in fp16, -32768)."""
    result = ask(impl, sample, lambda case: replace(case, inputs=sunken(*case.inputs)))
    failures = result.expected.failures(result.got)
    assert not failures, "; ".join(failures)


@law(asked={"windowed": (False,)}, needs="repeats windows strict")
def test_a_window_of_all_keys(impl, sample):
    """A window that reaches every key changes no bit, causal or not."""
    reach = sample.problem.seq_q + sample.problem.seq_kv

    def change(case):
        return replace(case, problem=replace(case.problem, window=(reach, reach)))

    plain, changed = ask(impl, sample), ask(impl, sample, change)
    for name, x in plain.got.items():
        assert_same_bits(name, changed.got[name], x)


@law(asked={"softcaps": (None,)}, needs="grad")
def test_score_gradients_sum_to_lse_gradients(impl, sample):
    """A row's score gradients sum to dlse, so dk summed over the keys is scale * dlse @ q."""
    result = ask(impl, sample)
    case, problem = result.case, result.case.problem
    dlse = 0 * case.inputs[0][..., 0].double() if case.grad_lse is None else case.grad_lse
    wanted = (dlse * alive(case))[..., None] * case.inputs[0].double() * case.scale
    wanted = wanted.unflatten(1, (problem.kv_heads, -1)).sum((2, 3))  # [B, G, D]
    found = result.got["dk"].double().sum(2)
    assert_within("dk", found - wanted, result.budget("dk", problem.seq_kv))


def part(keys, causal):
    """Return a change that restricts a case to some of its keys, under another mask."""

    def change(case):
        q, k, v = case.inputs
        k, v = k[:, :, keys], v[:, :, keys]
        problem = replace(case.problem, seq_kv=k.shape[2], causal=causal)
        return replace(case, problem=problem, inputs=(q, k, v))

    return change


@law(
    asked={"shortest": 2, "masks": (False, "top_left"), "windowed": (False,), "square": True},
    needs="lse",
    grad=False,
)
def test_merging_parts(impl, sample):
    """The results of two parts of the keys, merged by logsumexp, are the result of all keys."""
    problem = sample.problem
    n = 1 + int(torch.randint(problem.seq_kv - 1, (), generator=generator(sample)))
    # The later keys of a square problem are aligned with the queries at the bottom right.
    late = "bottom_right" if problem.causal else False
    whole = ask(impl, sample)
    parts = (
        ask(impl, sample, part(slice(0, n), problem.causal)),
        ask(impl, sample, part(slice(n, None), late)),
    )
    lse = torch.stack([x.got["lse"].double() for x in parts])
    o = torch.stack([x.got["o"].double() for x in parts])
    merged = (lse.softmax(0)[..., None] * o).sum(0)
    spread, shares = (o[0] - o[1]).abs(), {}
    for which, size in (("max", spread.max()), ("mean", spread.mean())):
        # A weight is the logistic function of the difference, whose slope is at most 1 / 4.
        slope = sum(x.budget("lse")["max"] for x in parts) / 4
        budgets = [x.budget("o") for x in parts]
        if which in budgets[0]:
            shares[which] = sum(b[which] for b in budgets) + slope * size.item()
    assert_within("o", merged - whole.got["o"], shares, whole.budget("o"))
    errors = lse.logsumexp(0) - whole.got["lse"]
    assert_within("lse", errors, *(partial(x.budget, "lse") for x in (whole, *parts)))


# Aligned, because the bits of a CPU's BLAS depend on a matrix's alignment.
@law(needs="repeats", asked={"batches": (1, 2), "aligned": True}, layout="contiguous")
def test_permuting_heads(impl, sample):
    """Permuting batches, and key heads with the query heads that read them, changes no bit."""
    problem = sample.problem
    chance = generator(sample)
    batches = torch.randperm(problem.batch, generator=chance).to(sample.device)
    heads = torch.randperm(problem.kv_heads, generator=chance).to(sample.device)

    def permuted(x):
        grouped = x[batches].unflatten(1, (problem.kv_heads, -1))
        return grouped[:, heads].flatten(1, 2)

    def change(case):
        grad_o, grad_lse = case.grad_o, case.grad_lse
        lay = GRAD_LAYOUTS[sample.grad_layout]  # their layout selects the kernels
        if grad_o is not None:
            grad_o = lay(permuted(grad_o))
        if grad_lse is not None:
            grad_lse = lay(permuted(grad_lse)[..., None])[..., 0]
        inputs = tuple(permuted(x) for x in case.inputs)
        return replace(case, inputs=inputs, grad_o=grad_o, grad_lse=grad_lse)

    plain = ask(impl, sample)
    changed = ask(impl, sample, change)
    for name, x in plain.got.items():
        assert_same_bits(name, permuted(x), changed.got[name])


@law(asked={"groups": (2, 3)})
def test_grouped_heads(impl, sample):
    """Query heads that share keys act as if each had its own copy, with dk and dv summed."""
    problem = sample.problem
    group = problem.heads // problem.kv_heads

    def repeated(case):
        q, k, v = case.inputs
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        every = replace(case.problem, kv_heads=case.problem.heads)
        return replace(case, problem=every, inputs=(q, k, v))

    def added(x):
        return x.unflatten(1, (problem.kv_heads, group)).sum(2)

    changed = ask(impl, sample, repeated)
    assert_agree(ask(impl, sample), changed, times=group, dk=added, dv=added)


@law(needs="grad", layout="contiguous")
def test_gradients_of_expanded_inputs_add_up(impl, sample):
    """The gradient of an input that all batches and heads share is the sum over its copies."""
    copies = ask(impl, sample, with_inputs(*(lambda x: x[:1, :1].expand_as(x),) * 3))
    case = copies.case
    call = partial(impl, **case.problem.keywords, scale=case.scale)

    def expanded(*shared):
        shapes = (x.shape for x in case.inputs)
        return call(*(x.expand(shape) for x, shape in zip(shared, shapes, strict=True)))

    got = run(expanded, replace(case, inputs=tuple(x[:1, :1] for x in case.inputs)))
    for name, x in zip(("dq", "dk", "dv"), case.inputs, strict=True):
        count = x.shape[0] * x.shape[1]
        added = copies.got[name].double().sum((0, 1), keepdim=True)
        assert_within(name, got[name] - added, *2 * (copies.budget(name, count),))


@law(
    asked={"shortest": 0, "masks": ("bottom_right", False), "batches": (1,)},
    needs="strict",
)
def test_fully_masked_rows(impl, sample):
    """A query that sees no key has exactly o = 0 and lse = -inf, and contributes no gradient."""

    def only_masked(case):
        masked = 1 - alive(case)
        grads = (None if x is None else x for x in (case.grad_o, case.grad_lse))
        grad_o, grad_lse = grads
        if grad_o is not None:
            grad_o = grad_o * masked.to(grad_o.dtype)[:, None]
        if grad_lse is not None:
            grad_lse = grad_lse * masked.to(grad_lse.dtype)
        return replace(case, grad_o=grad_o, grad_lse=grad_lse)

    result = ask(impl, sample, only_masked)
    masked = ~alive(result.case).bool()
    assert not result.got.pop("o")[:, :, masked].any()
    if "lse" in result.got:
        assert (result.got.pop("lse")[:, :, masked] == -torch.inf).all()
    for name, x in result.got.items():
        assert not x.any(), name


# Outliers give scores that the softcap would change; in fp16 the reference's gradients overflow.
@law(
    asked={"softcaps": (None,), "dtypes": ("float32", "bfloat16")}, needs="softcap", values="normal"
)
def test_a_softcap_far_above_the_scores(impl, sample):
    """A softcap far above the scores changes nothing."""

    def change(case):
        return replace(case, problem=replace(case.problem, softcap=1e6))

    assert_agree(ask(impl, sample), ask(impl, sample, change))


@law(asked={"softcaps": (0.7, 5.0)}, needs="softcap lse", grad=False)
def test_a_softcap_bounds_the_logsumexp(impl, sample):
    """The logsumexp of n scores within the softcap is log n, give or take the softcap."""
    result = ask(impl, sample)
    keys, cap = result.case.seen.sum(-1).log(), result.case.problem.softcap
    live = keys.isfinite()
    off = (result.got["lse"] - keys)[..., live]
    assert (off.abs() <= cap * (1 + 1e-6) + 1e-6 * keys[live]).all()


@law(needs="repeats")
def test_the_same_again(impl, sample):
    """The same sample gives the same bits again."""
    one, other = ask(impl, sample).got, ask(impl, sample).got
    for name, x in one.items():
        assert_same_bits(name, x, other[name])


def row(t):
    """Return a change that restricts a masked case to one query and the keys that it sees."""

    def change(case):
        q, k, v = case.inputs
        keys = slice(*case.problem.band.keys_of(t))
        k, v = k[:, :, keys], v[:, :, keys]
        problem = replace(case.problem, seq_q=1, seq_kv=k.shape[2], causal=False, window=UNBOUNDED)
        return replace(case, problem=problem, inputs=(q[:, :, t : t + 1], k, v))

    return change


@law(grad=False)
def test_rows_alone(impl, sample):
    """A row of masked attention equals full attention of its query over the keys that it sees."""
    t = int(torch.randint(sample.problem.seq_q, (), generator=generator(sample)))
    whole, alone = ask(impl, sample), ask(impl, sample, row(t))
    for name, x in whole.got.items():
        both = x[:, :, t : t + 1].double(), alone.got[name].double()
        finite = both[0].isfinite()
        assert torch.equal(finite, both[1].isfinite())
        errors = (both[0] - both[1])[finite]
        assert_within(name, errors, {"max": whole.budget(name)["max"]}, partial(alone.budget, name))


@law(
    asked={"longest": 60, "batches": (1,), "windowed": (False,), "softcaps": (None,)},
    values="one_hot",
    scale=1.0,
)
def test_one_key_takes_all(impl, sample):
    """With small integers and a one-hot softmax every output is exact, rounded once."""
    bits = sample.problem.head_dim - 1
    hypothesis.assume(2**bits >= sample.problem.seq_kv)

    def whole(case):
        grads = (x if x is None else x.round().clamp(-1, 1) for x in (case.grad_o, case.grad_lse))
        grad_o, grad_lse = grads
        return replace(case, grad_o=grad_o, grad_lse=grad_lse)

    result = ask(impl, sample, whole)
    for name, x in result.got.items():
        assert_same_bits(name, x, result.expected.exact[name].to(x.dtype))
