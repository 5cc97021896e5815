"""flash-attn's functions: its signatures, layouts and conventions, and right results."""

import inspect
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import pytest
import torch

from flashattn import attention
from flashattn.integrations import flash_attn
from flashattn.mask import Mask
from flashattn.problem import Problem
from flashattn.testing.accuracy import Sample, assert_accurate
from flashattn.testing.inputs import make_grads, make_inputs

# flash-attn 2.8: the arguments that all functions have, and those before and after them.
COMMON = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
POSITIONAL = {
    "flash_attn_func": (("q", "k", "v"), {}),
    "flash_attn_kvpacked_func": (("q", "kv"), {}),
    "flash_attn_qkvpacked_func": (("qkv",), {}),
    "flash_attn_varlen_func": (("q", "k", "v", *LENGTHS), {"block_table": None}),
    "flash_attn_varlen_kvpacked_func": (("q", "kv", *LENGTHS), {}),
    "flash_attn_varlen_qkvpacked_func": (("qkv", "cu_seqlens", "max_seqlen"), {}),
}
# FlashAttention-4's arguments.
MODS = {"learnable_sink": None, "score_mod": None, "mask_mod": None, "block_sparse_tensors": None}
PAGES = {"seqused_q": None, "seqused_k": None, "page_table": None}
KEYWORDS = {
    "flash_attn_func": {**MODS, "return_lse": False},
    "flash_attn_varlen_func": {**PAGES, **MODS, "return_lse": False},
}
# For each argument a value that does not mean the same as the default.
CHANGES = {
    "dropout_p": 0.1,
    "softmax_scale": 0.3,
    "causal": True,
    "window_size": (3, 2),
    "softcap": 5.0,
    "alibi_slopes": torch.ones(4),
    "deterministic": True,
    "return_attn_probs": True,
    "block_table": torch.zeros(1, 1, dtype=torch.int32),
}
REFUSED = {
    "dropout_p": "there is no dropout",
    "alibi_slopes": "there is no ALiBi with packed documents or a cache",
    "block_table": "keys and values are not read from pages",
    "page_table": "keys and values are not read from pages",
    "score_mod": "scores are not modified",
    "mask_mod": "the only masks are causal and window_size",
    "block_sparse_tensors": "the only masks are causal and window_size",
}
EVERY = pytest.mark.parametrize("name", POSITIONAL)


class FlashProblem(Problem):
    """A problem whose masks are all aligned at the bottom right, as in flash-attn."""

    @property
    def mask(self):
        """The mask that the arguments mean in flash-attn."""
        left, right = self.window
        return Mask(left, 0 if self.causal else right, "bottom_right")


def usual(name, **changes):
    """Return a problem that a function takes."""
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "seq_q": 20, "seq_kv": 33, "head_dim": 16}
    if "qkvpacked" in name:
        sizes |= {"kv_heads": 4, "seq_kv": 20}
    return FlashProblem(**sizes | changes)


def leading(name, q, k, v):
    """Return the required arguments of a function for q, k and v of [B, H, T, D].

    A varlen function takes the batches as B documents.
    """
    batch, queries, keys = len(q), q.shape[2], k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    lengths = ()
    if "varlen" in name:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        ends = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
        lengths = (queries * ends, keys * ends, queries, keys)
        lengths = lengths[::2] if "qkv" in name else lengths
    if "qkvpacked" in name:
        return torch.stack([q, k, v], dim=-3), *lengths
    if "kvpacked" in name:
        return q, torch.stack([k, v], dim=-3), *lengths
    return q, k, v, *lengths


def call(name, q, k, v, **options):
    """Call a function with q, k, v of [B, H, T, D]; return out and softmax_lse in that layout."""
    o, lse, probs = getattr(flash_attn, name)(
        *leading(name, q, k, v), return_attn_probs=True, **options
    )
    assert probs is None
    if "varlen" in name:
        o = o.unflatten(0, (len(q), -1))
        lse = lse.unflatten(1, (len(q), -1)).transpose(0, 1)
    assert o.is_contiguous()
    return o.transpose(1, 2), lse


@EVERY
def test_signature(name):
    """Arguments, their order and their defaults are flash-attn's."""
    parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
    first, behind = POSITIONAL[name]
    empty = inspect.Parameter.empty
    by_position = [(x.name, x.default) for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
    required = [(argument, empty) for argument in first]
    assert by_position == [*required, *COMMON.items(), *behind.items()]
    by_keyword = {x.name: x.default for x in parameters if x.kind is x.KEYWORD_ONLY}
    assert by_keyword == KEYWORDS.get(name, {})
    assert len(parameters) == len(by_position) + len(by_keyword)


MASKS = {
    "full": {},
    "causal": {"causal": True},
    "causal window": {"causal": True, "window_size": (5, 9)},
    "left": {"window_size": (4, -1)},
    "right": {"window_size": (None, 3)},
    "window": {"window_size": (4, 3)},
    "wide window": {"window_size": (40, 30)},
    "softcap": {"causal": True, "softcap": 0.7},
}
SIZES = {
    "T < S": {},
    "T > S": {"seq_q": 33, "seq_kv": 20},
    "T = S": {"seq_q": 30, "seq_kv": 30, "dtype": "bfloat16"},
    "one key head": {"kv_heads": 1, "batch": 1},
    "a head for each": {"kv_heads": 4, "dtype": "float16"},
}


@pytest.mark.drawn("sizes")
@EVERY
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sizes", SIZES)
def test_numbers(name, mask, sizes, device):
    """Outputs and gradients are within the budgets; masks are aligned at the bottom right."""
    given, changes = MASKS[mask], dict(SIZES[sizes])
    if "qkvpacked" in name:
        changes = {x: changes[x] for x in ("dtype",) if x in changes}
    left, right = (None if x == -1 else x for x in given.get("window_size", (-1, -1)))
    changes |= {"softcap": given.get("softcap"), "causal": given.get("causal", False)}
    problem = usual(name, window=(left, right), **changes)
    attend = partial(call, name, softmax_scale=0.3, **given)
    assert_accurate(attend, Sample(problem=problem, scale=0.3, device=device))


@EVERY
@pytest.mark.parametrize("mask", MASKS)
def test_out_alone(name, mask, device):
    """Without softmax_lse, out is the same, also for queries that see no key."""
    sizes = {} if "qkvpacked" in name else SIZES["T > S"]
    inputs = make_inputs(usual(name, **sizes), device=device)
    given = leading(name, *inputs)
    function = partial(getattr(flash_attn, name), *given, **MASKS[mask])
    torch.testing.assert_close(function(), function(return_attn_probs=True)[0])


@pytest.mark.parametrize(
    ("name", "argument"),
    [(name, x) for name in POSITIONAL for x in COMMON | POSITIONAL[name][1]],
)
def test_by_position_and_by_keyword(name, argument, device, monkeypatch):
    """An argument means the same by position and by keyword, and not what its default means."""
    spy = Mock(wraps=attention)
    monkeypatch.setattr(flash_attn, "attention", spy)
    given = leading(name, *make_inputs(usual(name), device=device))

    def outcome(*args, **options):
        spy.reset_mock()
        try:
            result = getattr(flash_attn, name)(*given, *args, **options)
        except NotImplementedError as error:
            return str(error)
        return str(([call.kwargs for call in spy.call_args_list], result))

    defaults = COMMON | POSITIONAL[name][1]
    before = list(defaults.values())[: list(defaults).index(argument)]
    changed = CHANGES[argument]
    changed = changed.to(device) if isinstance(changed, torch.Tensor) else changed
    by_position = outcome(*before, changed)
    assert by_position == outcome(**{argument: changed})
    assert by_position != outcome()


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        (name, argument)
        for name, (_, behind) in POSITIONAL.items()
        for argument in COMMON | behind | KEYWORDS.get(name, {})
        if argument in REFUSED and (argument != "alibi_slopes" or "varlen" in name)
    ],
)
def test_what_we_lack_is_refused(name, argument, device):
    """An unsupported argument is refused by name; values that switch it off are taken."""
    given = leading(name, *make_inputs(usual(name), device=device))
    function = getattr(flash_attn, name)
    with pytest.raises(NotImplementedError, match=f"^{argument}: {REFUSED[argument]}$"):
        function(*given, **{argument: CHANGES.get(argument, torch.ones(4))})
    for off in (None, 0.0) if argument == "dropout_p" else (None,):
        assert torch.equal(function(*given, **{argument: off}), function(*given))


@pytest.mark.parametrize("name", [name for name in POSITIONAL if "varlen" not in name])
def test_alibi(name, device):
    """ALiBi slopes are those of ``attention``, with positions aligned at the bottom right."""
    sizes = {} if "qkvpacked" in name else {"seq_q": 33, "seq_kv": 20}
    q, k, v = make_inputs(usual(name, **sizes), device=device)
    for shape in ((4,), (len(q), 4)):
        slopes = torch.linspace(0.1, 1, torch.Size(shape).numel(), device=device).view(shape)
        o, lse = call(name, q, k, v, causal=True, alibi_slopes=slopes)
        given = {"causal": "bottom_right", "alibi_slopes": slopes, "return_lse": True}
        wanted = attention(q, k, v, impl="reference", **given)
        torch.testing.assert_close((o, lse), wanted)
        assert not torch.allclose(lse, call(name, q, k, v, causal=True)[1])


@pytest.mark.parametrize("name", KEYWORDS)
def test_learnable_sink(name, device):
    """A learnable sink is attention's sink; in rows that see no key it is the logsumexp."""
    q, k, v = make_inputs(usual(name, seq_q=33, seq_kv=20), device=device)
    sink = torch.linspace(-1, 2, 4, device=device)
    for causal, window in ((True, (-1, -1)), (False, (3, 2))):
        how = {"causal": causal, "window_size": window}
        o, lse = call(name, q, k, v, **how, learnable_sink=sink)
        plain, alone = call(name, q, k, v, **how)
        dead = alone == -torch.inf
        assert dead.any()
        assert torch.equal(lse[dead], sink[:, None].expand_as(lse)[dead])
        share = (alone.exp() / (alone.exp() + sink[:, None].exp()))[..., None]
        torch.testing.assert_close(o, plain * share)
        torch.testing.assert_close(lse.exp(), alone.exp() + sink[:, None].exp())


@pytest.mark.parametrize("name", KEYWORDS)
@pytest.mark.parametrize("columns", [8, 24])
def test_values_of_another_width(name, columns, device):
    """Values of another width give the same columns as values of the keys' width."""
    q, k, v = make_inputs(usual(name, head_dim=16), device=device)
    other = make_inputs(usual(name, head_dim=columns), device=device)[2]
    o, _ = call(name, q, k, other, causal=True)
    assert o.shape == (*q.shape[:3], columns)
    for part in (slice(0, 8), slice(columns - 8, None)):
        padded = torch.cat([other[..., part], torch.zeros_like(v[..., 8:])], -1)
        torch.testing.assert_close(o[..., part], call(name, q, k, padded, causal=True)[0][..., :8])


@pytest.mark.parametrize("name", KEYWORDS)
def test_return_lse(name, device):
    """FlashAttention-4's ``return_lse`` gives a pair; ``return_attn_probs`` gives three."""
    given = leading(name, *make_inputs(usual(name), device=device))
    function = getattr(flash_attn, name)
    pair = function(*given, return_lse=True)
    assert len(pair) == 2
    for triple in (
        function(*given, return_attn_probs=True, return_lse=True),
        function(*given, return_attn_probs=True),
    ):
        assert triple[2] is None
        assert all(map(torch.equal, pair, triple[:2]))
    shape = (4, 40) if "varlen" in name else (2, 4, 20)
    assert pair[1].shape == shape


@EVERY
def test_nothing_is_copied(name, device, monkeypatch):
    """One call reads q, k and v in place, and returns the memory that it wrote."""
    seen = []

    def spy(*tensors, **options):
        seen[:] = *tensors, attention(*tensors, **options, impl="triton")
        return seen[-1]

    monkeypatch.setattr(flash_attn, "attention", spy)
    given = leading(name, *make_inputs(usual(name), device=device, layout="sequence_first"))
    out = getattr(flash_attn, name)(*given)
    *read, written = seen
    given = [x[None] if "varlen" in name else x for x in given if isinstance(x, torch.Tensor)]
    packed = [[x] if x.ndim == 4 else x.unbind(2) for x in given if x.ndim > 2]
    wanted = [x.transpose(1, 2) for tensors in packed for x in tensors]
    places = [[(x.data_ptr(), x.shape, x.stride()) for x in tensors] for tensors in (read, wanted)]
    assert places[0] == places[1]
    assert out.data_ptr() == written.data_ptr()
    assert out.is_contiguous()


DOCUMENTS = {  # lengths of queries and keys, and tokens after the last
    "some": ([9, 0, 20, 5], [12, 4, 9, 3], (2, 2)),
    "empty": ([0, 0], [0, 5], (4, 0)),
}


def packed(problem, queries, keys, behind, device):
    """Return q, k, v, gradients of out and softmax_lse, and cu_seqlens; tokens behind are NaN."""
    total = [sum(x) + n for x, n in zip((queries, keys), behind, strict=True)]
    whole = replace(problem, seq_q=total[0], seq_kv=total[1])
    q, k, v = (x[0].transpose(0, 1).clone() for x in make_inputs(whole, device=device))
    for x, n in zip((q, k, v), (*behind, behind[1]), strict=True):
        x[len(x) - n :] = torch.nan
        x.requires_grad_()
    grad_o, grad_lse = (x[0] for x in make_grads(whole, device=device))
    ends = (torch.tensor([0, *x], device=device).cumsum(0).int() for x in (queries, keys))
    return (q, k, v), (grad_o.transpose(0, 1), grad_lse), tuple(ends)


@pytest.mark.parametrize(
    ("documents", "sides"), [("empty", ""), *(("some", x) for x in ("", "q", "k", "qk"))]
)
@pytest.mark.parametrize("mask", MASKS)
def test_used(documents, sides, mask, device):
    """Unused tokens may be NaN and give 0 and -inf; documents are as in calls of their own."""
    queries, keys, behind = DOCUMENTS[documents]
    problem = Problem(heads=4, kv_heads=2, head_dim=16)
    inputs, grads, ends = packed(problem, queries, keys, behind, device)
    used = {
        "q": torch.tensor([7, 0, 20, 0] if "q" in sides else queries, device=device),
        "k": torch.tensor([5, 9, 0, 3] if "k" in sides else keys, device=device),
    }
    places = {"q": [], "k": []}
    for side, starts in zip("qk", ends, strict=True):
        for start, end, n in zip(starts, starts[1:], used[side], strict=False):
            places[side].append(slice(int(start), int(torch.minimum(start + n, end))))
    q, k, v = inputs
    with torch.no_grad():
        for i, (start, end) in enumerate(zip(ends[1], ends[1][1:], strict=False)):
            k[places["k"][i].stop : end] = v[places["k"][i].stop : end] = torch.nan
            del start
        for i, end in enumerate(ends[0][1:]):
            q[places["q"][i].stop : end] = torch.nan
    given = {f"seqused_{side}": used[side] for side in sides} | MASKS[mask]
    got = flash_attn.flash_attn_varlen_func(*inputs, *ends, 0, 0, return_lse=True, **given)
    got = *got, *torch.autograd.grad(got, inputs, grads)
    wanted = [torch.zeros_like(x) for x in (q, got[1], *inputs)]
    wanted[1].fill_(-torch.inf)
    for rows, columns in zip(places["q"], places["k"], strict=True):
        parts = zip(inputs, (rows, columns, columns), strict=True)
        own = [x[part].detach()[None].requires_grad_() for x, part in parts]
        o, lse = flash_attn.flash_attn_func(*own, return_lse=True, **MASKS[mask])
        slopes = torch.autograd.grad((o, lse), own, (grads[0][None, rows], grads[1][None, :, rows]))
        wanted[1][:, rows] = lse.detach()[0]
        parts = (
            (wanted[0], rows, o),
            *zip(wanted[2:], (rows, columns, columns), slopes, strict=True),
        )
        for x, part, result in parts:
            x[part] = result.detach()[0]
    torch.testing.assert_close(got, tuple(wanted))


ONES = {n: torch.ones(*[2] * n) for n in range(1, 7)}
ENDS = torch.tensor([0, 2], dtype=torch.int32)


def varlen(cu_q, cu_k, ones=ONES[3]):
    """Return the arguments of a varlen function for two tokens."""
    return ones, ones, ones, cu_q, cu_k, 2, 2


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("func", (ONES[3],) * 3, r"q: wanted .* \[batch, seqlen, nheads, headdim\], got \[2,"),
        ("func", (ONES[4], [1], ONES[4]), "k: wanted a tensor .*, got list"),
        ("func", (ONES[4], ONES[4][:1], ONES[4]), r"k: wanted shape \[2, 2, 2, 2\], got \[1,"),
        ("func", (ONES[4], ONES[4][..., :1], ONES[4]), "k: wanted shape"),
        ("func", (ONES[4], ONES[4], ONES[4][:, :1]), "v: wanted shape"),
        ("func", (ONES[4], ONES[4][:, :1], ONES[4]), "v: wanted shape"),
        ("qkvpacked_func", (ONES[5],), r"qkv: wanted .*batch, seqlen, 3, nheads, headdim\], got"),
        ("kvpacked_func", (ONES[4], ONES[4]), r"kv: wanted a tensor \[batch, seqlen, 2, nheads"),
        ("varlen_func", varlen(ENDS, ENDS, ONES[4]), r"q: wanted .*\[total, nheads, headd"),
        ("varlen_func", varlen(ENDS, ENDS[:1]), r"cu_seqlens_k: wanted \[N \+ 1\] .* got \[2, 1\]"),
        ("varlen_func", varlen(ENDS, ENDS.clamp(1)), r"cu_seqlens_k: .*\[1, 2\]"),
        ("varlen_func", varlen(2 * ENDS, ENDS), "cu_seqlens_q: .* 0 to 2 at the most"),
        ("varlen_func", varlen(ENDS.flip(0), ENDS), r"cu_seqlens_q: .*\[2, 0\]"),
        ("varlen_func", varlen(ENDS.float(), ENDS), r"cu_seqlens_q: .* int32 or int64 .*float32"),
        ("varlen_func", varlen(ENDS[1], ENDS), r"cu_seqlens_q: .* torch.int32 \[\]"),
        ("varlen_func", varlen(ENDS[:0], ENDS), r"cu_seqlens_q: wanted \[N \+ 1\] .* \[0, 2\]"),
        ("varlen_qkvpacked_func", (ONES[4], ENDS, 2), r"qkv: wanted .*\[total, 3, nheads, headdim"),
    ],
)
def test_bad_tensors(name, args, words):
    """Bad tensors are refused by flash-attn's names and order of dimensions."""
    with pytest.raises(ValueError, match=words):
        getattr(flash_attn, f"flash_attn_{name}")(*args)


@pytest.mark.parametrize(
    ("used", "words"),
    [
        ([2], "wanted a tensor, got list"),
        (2, "wanted a tensor, got int"),
        (torch.tensor([2.0]), "wanted a 1-dimensional int32 or int64 tensor"),
        (torch.tensor([1, 1]), r"wanted integers \[1\] on cpu, got \[2\] on cpu"),
    ],
)
@pytest.mark.parametrize("name", ["seqused_q", "seqused_k"])
def test_bad_used_lengths(name, used, words):
    """Numbers of used tokens are integers, one for each document."""
    with pytest.raises(ValueError, match=f"{name}: {words}"):
        flash_attn.flash_attn_varlen_func(*varlen(ENDS, ENDS), **{name: used})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *(
            (
                {"window_size": x},
                r"window_size: wanted \(left, right\), each an int from 0 on, or -1",
            )
            for x in (3, (1,), (1, 2, 3), (-2, 5), (1.0, 2), (True, 0), None, "12")
        ),
        ({"causal": "top_left"}, "causal: wanted one of False, True, got 'top_left'"),
        ({"softmax_scale": "x"}, "softmax_scale: wanted a finite number"),
    ],
)
def test_bad_options(options, words):
    """Bad options are refused by name."""
    with pytest.raises(ValueError, match=words):
        flash_attn.flash_attn_func(*[ONES[4]] * 3, **options)
