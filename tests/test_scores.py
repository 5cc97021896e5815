"""Score modifications after q @ k.T: ALiBi, biases, sinks."""

from dataclasses import replace
from functools import partial

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch.nn.functional import pad

from flashattn import attention, explain, relative
from flashattn.gpus import gpu_of
from flashattn.kernels.execute import backward, forward
from flashattn.plan.spec import Extras
from flashattn.problem import Problem
from flashattn.registry import get
from flashattn.score import dimensions, with_sink
from flashattn.testing.inputs import make_grads, make_inputs
from flashattn.testing.law import law
from flashattn.testing.layouts import scattered
from flashattn.testing.live_bytes import Live
from flashattn.testing.poison import guard
from flashattn.testing.results import ask, assert_agree, assert_same_bits, assert_within

PROBLEM = Problem(batch=2, heads=4, kv_heads=2, seq_q=20, seq_kv=26, head_dim=16)
OURS = pytest.mark.parametrize("name", ["triton", "tiled", "reference"])
ALL = pytest.mark.parametrize("name", ["auto", "triton", "tiled", "reference"])


def tensors(device, **changes):
    """Return q, k, v."""
    return make_inputs(Problem(**vars(PROBLEM) | changes), device=device)


def written_out(q, k, v, *, hidden=None, softcap=None, slopes=None, bias=None, sink=None):
    """Return o and lse in fp64, written out as the formula reads."""
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
    scores = scores if bias is None else scores + bias.double()
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    if sink is not None:
        column = sink.double()[:, None, None].expand(*scores.shape[:3], 1)
        scores, v = torch.cat([scores, column], -1), pad(v, (0, 0, 0, 1))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def matrix(vector, seq_q, seq_kv):
    """Return the full matrix of a relative bias, whose elements are at s - t + T - 1."""
    t, s = torch.arange(seq_q)[:, None], torch.arange(seq_kv)
    return vector[..., (s - t + seq_q - 1).to(vector.device)]


def assert_like(got, wanted, given, grads, within=2e-5):
    """Compare o, lse and the gradients of the inputs with those that are written out."""
    gradients = torch.autograd.grad(got, given, grads)
    exact = torch.autograd.grad(wanted, given, [x.double() for x in grads])
    for a, b in zip((*got, *gradients), (*wanted, *exact), strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), atol=within, rtol=within)


@OURS
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("of_batches", [False, True])
def test_alibi(name, of_batches, causal, device):
    """ALiBi subtracts slope * |t + S - T - s| from a score, after the softcap, before the mask."""
    given = [x.requires_grad_() for x in tensors(device)]
    slopes = torch.linspace(0, 1.5, 8 if of_batches else 4, device=device)
    slopes = slopes.view(-1, 4) if of_batches else slopes
    how = {"causal": causal, "softcap": 2.0, "return_lse": True}
    got = attention(*given, alibi_slopes=slopes, **how, impl=name)
    t, s = (torch.arange(n, device=device) for n in (20, 26))
    hidden = s > t[:, None] if causal else None
    wanted = written_out(*given, hidden=hidden, softcap=2.0, slopes=slopes)
    assert_like(got, wanted, given, make_grads(PROBLEM, device=device))


def test_alibi_is_not_for_documents(device):
    """ALiBi is refused with documents, in which the kernels do not know positions."""
    cu = torch.tensor([0, 20], dtype=torch.int32, device=device)
    slopes = torch.ones(4, device=device)
    with pytest.raises(ValueError, match="alibi_slopes: not with documents"):
        attention(*tensors(device, seq_kv=20), documents=cu, alibi_slopes=slopes)


SHAPES = {  # of B, H, T, S = 2, 4, 20, 26
    "all": (2, 4, 20, 26),
    "a_head": (4, 20, 26),
    "a_batch": (2, 1, 20, 26),
    "rows": (20, 1),
    "columns": (26,),
    "columns_of_heads": (4, 1, 26),
    "heads": (4, 1, 1),
    "one": (),
}


@pytest.mark.drawn("shape")
@OURS
@pytest.mark.parametrize("shape", SHAPES)
def test_bias(name, shape, device):
    """A bias is added after the softcap, however it is broadcast, and gets its gradient."""
    given = [x.requires_grad_() for x in tensors(device)]
    torch.manual_seed(0)
    given.append(torch.randn(SHAPES[shape], device=device).requires_grad_())
    how = {"causal": True, "softcap": 2.0, "return_lse": True}
    got = attention(*given[:3], bias=given[3], **how, impl=name)
    t, s = (torch.arange(n, device=device) for n in (20, 26))
    wanted = written_out(*given[:3], hidden=s > t[:, None], softcap=2.0, bias=given[3])
    assert_like(got, wanted, given, make_grads(PROBLEM, device=device))


@pytest.mark.drawn("shape")
@OURS
@pytest.mark.parametrize("shape", [(4, 45), (1, 45), (2, 4, 45), (2, 1, 45)])
@pytest.mark.parametrize("window", [(None, None), (9, 7)])
def test_relative_bias(name, shape, window, device):
    """A vector stands for a bias matrix whose elements depend on s - t, and gets its gradient."""
    given = [x.requires_grad_() for x in tensors(device)]
    torch.manual_seed(0)
    given.append(torch.randn(shape, device=device).requires_grad_())
    got = attention(*given[:3], bias=relative(given[3]), window=window, return_lse=True, impl=name)
    t, s = (torch.arange(n, device=device) for n in (20, 26))
    apart = s - t[:, None]
    hidden = None if window[0] is None else (apart < -9) | (apart > 7)
    wanted = written_out(*given[:3], hidden=hidden, bias=matrix(given[3], 20, 26))
    assert_like(got, wanted, given, make_grads(PROBLEM, device=device))


@ALL
@pytest.mark.parametrize("causal", [False, "bottom_right"])
def test_sink(name, causal, device):
    """A sink is one more key's score in o, lse and all gradients, in fully masked rows, too."""
    given = [x.requires_grad_() for x in tensors(device, seq_kv=12)]
    given.append(torch.linspace(-2, 3, 4, device=device).requires_grad_())
    how = {"causal": causal, "return_lse": True, "impl": name}
    t, s = (torch.arange(n, device=device) for n in (20, 12))
    hidden = s > t[:, None] - 8 if causal else None
    wanted = written_out(*given[:3], hidden=hidden, sink=given[3])
    grads = make_grads(PROBLEM, device=device)
    assert_like(attention(*given[:3], sink=given[3], **how), wanted, given, grads, within=1e-5)
    none = torch.full((4,), -torch.inf, device=device, requires_grad=True)
    nothing = attention(*given[:3], sink=none, **how)
    assert all(map(torch.equal, nothing, attention(*given[:3], **how)))
    (gradient,) = torch.autograd.grad(nothing, none, grads)
    assert gradient.isfinite().all()


@ALL
@pytest.mark.parametrize("columns", [8, 24])
def test_values_of_another_width(name, columns, device):
    """If v is narrower or wider than k, o and gradients are right and lse is the same."""
    other = replace(PROBLEM, head_dim=columns)
    (q, k, v), wide = tensors(device), make_inputs(other, device=device)[2]
    how = {"causal": True, "return_lse": True, "impl": name}
    given = [x.requires_grad_() for x in (q, k, wide)]
    got = attention(*given, **how)
    t, s = (torch.arange(n, device=device) for n in (20, 26))
    wanted = written_out(*given, hidden=s > t[:, None])
    assert_like(got, wanted, given, make_grads(other, device=device), within=1e-5)
    assert torch.equal(got[1], attention(q, k, v, **how)[1])
    for wrong in (wide[:, :1], wide[..., :0]):
        with pytest.raises(ValueError, match="v: wanted"):
            attention(q, k, wrong, **how)


@OURS
@pytest.mark.parametrize("sizes", [(0, 0), (0, 1), (0, 5), (1, 0), (5, 0)])
def test_empty_problems(name, sizes, device):
    """Without queries or keys lse is the sink, a bias adds nothing, and gradients are zeros.

    Only a sink has a gradient, through lse; a sink of -inf, which is no sink, has 0.
    """
    given = [x.requires_grad_() for x in tensors(device, seq_q=sizes[0], seq_kv=sizes[1])]
    sink = torch.tensor([-torch.inf, -1.0, 0.0, 1.0], device=device).requires_grad_()
    vector = torch.zeros(4, max(sum(sizes) - 1, 0), device=device).requires_grad_()
    full = torch.zeros(4, *sizes, device=device).requires_grad_()
    for x, bias in ((vector, relative(vector)), (full, full)):
        o, lse = attention(*given, bias=bias, sink=sink, return_lse=True, impl=name)
        assert torch.equal(lse, sink[:, None].expand_as(lse))
        gradients = torch.autograd.grad((o.sum() + lse.sum()), (*given, x, sink))
        assert not any(y.any() for y in (o, *gradients[:-1]))
        wanted = torch.full_like(sink, 2 * sizes[0]).masked_fill(sink.isinf(), 0.0)
        assert torch.equal(gradients[-1], wanted)


@OURS
@pytest.mark.parametrize("sizes", [(1, 1), (1, 40), (40, 1)])
def test_relative_bias_of_one_row(name, sizes, device):
    """A relative bias works for one query, or one key, and nothing beyond the bias is read."""
    problem = Problem(**vars(PROBLEM) | dict(zip(("seq_q", "seq_kv"), sizes, strict=True)))
    drawn = *make_inputs(problem, device=device), torch.randn(4, sum(sizes) - 1, device=device)
    with guard(*drawn) as given:
        for x in given:
            x.requires_grad_()
        got = attention(*given[:3], bias=relative(given[3]), return_lse=True, impl=name)
        wanted = written_out(*given[:3], bias=matrix(given[3], *sizes))
        assert_like(got, wanted, given, make_grads(problem, device=device))


@pytest.mark.parametrize("name", ["auto", "triton", "reference"])  # on a CPU auto is tiled
def test_under_transforms(name, device):
    """Windows and all scores work under a compiler, vmap and autocast, and on meta tensors."""
    q, k, v = tensors(device)
    torch.manual_seed(0)
    bias, vector, sink = (torch.randn(x, device=device) for x in ((4, 20, 26), (4, 45), 4))
    slopes = torch.linspace(0, 1, 8, device=device).view(2, 4)
    plain = attention(q, k, v, causal=True, impl=name)  # first, so what it keeps has none of these
    ones = {"bias": bias, "sink": sink, "alibi_slopes": slopes, "window": (5, None), "softcap": 2.0}
    for argument, x in ones.items():
        assert not torch.equal(attention(q, k, v, causal=True, **{argument: x}, impl=name), plain)

    def call(q, k, v, bias, sink, slopes):
        how = {"causal": True, "window": (5, None), "softcap": 2.0, "alibi_slopes": slopes}
        return attention(q, k, v, bias=bias, sink=sink, **how, impl=name)

    def far(q, k, v, vector, sink, slopes):
        return call(q, k, v, relative(vector), sink, slopes)

    # Whether graphs are dynamic; those of tiled have each length as a constant anyway.
    graphs = ((False, True), (True,)) if name == "triton" else ((False,), (False,))
    for f, x, kinds in zip((call, far), (bias, vector), graphs, strict=True):
        given = q, k, v, x, sink, slopes
        wanted = f(*given)
        torch.compiler.reset()
        for kind in kinds:
            compiled = torch.compile(f, fullgraph=True, dynamic=kind, backend="aot_eager")
            torch.testing.assert_close(compiled(*given), wanted)
        several = [torch.stack([y, 2 * y], dim=1) for y in given]
        one_by_one = torch.stack([f(*x) for x in zip(*(y.unbind(1) for y in several), strict=True)])
        torch.testing.assert_close(torch.vmap(f, in_dims=1)(*several), one_by_one)
        shared = torch.vmap(f, in_dims=(1, *[None] * 5))(several[0], *given[1:])
        torch.testing.assert_close(shared, torch.stack([wanted, f(2 * q, *given[1:])]))
        with torch.autocast(device.type, dtype=torch.bfloat16):
            half = [y.bfloat16() for y in (q, k, v)]
            assert f(*given).dtype == torch.bfloat16
            assert torch.equal(f(*given), f(*half, x, sink, slopes))
        if name in ("auto", "reference"):  # others need a device
            assert f(*(y.to("meta") for y in given)).shape == wanted.shape


@ALL
def test_softcap_under_transforms(name, device):
    """A softcap alone works under a compiler, vmap, autocast and hooks of saved tensors."""
    q, k, v = tensors(device)
    call = partial(attention, causal=True, softcap=0.5, impl=name)
    wanted = call(q, k, v)
    torch.compiler.reset()
    dynamic = name == "auto"  # on a CPU it is one of the others, whose dynamic graphs take seconds
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), wanted)
    mapped = torch.vmap(call, in_dims=(0, None, None))(torch.stack([q, 2 * q]), k, v)
    torch.testing.assert_close(mapped, torch.stack([wanted, call(2 * q, k, v)]))
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert torch.equal(call(q, k, v), call(*(x.bfloat16() for x in (q, k, v))))
    q.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(scattered, lambda x: x):
        (dq,) = torch.autograd.grad(call(q, k, v).sum(), q)
    exact, _ = written_out(
        q, k, v, hidden=torch.ones(20, 26).triu(1).bool().to(device), softcap=0.5
    )
    torch.testing.assert_close(dq, torch.autograd.grad(exact.sum(), q)[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["triton", "tiled"])
def test_gradients_under_transforms(name, device):
    """Mapped gradients of a bias and of sinks, own or shared, are those of each example alone.

    The same holds under a compiler, and with hooks that move what is saved.
    """
    q, k, v = tensors(device)
    torch.manual_seed(0)
    bias, sink = (torch.randn(x, device=device) for x in ((4, 20, 26), 4))

    def loss(q, bias, sink):
        how = {"causal": True, "softcap": 2.0, "impl": name}
        return attention(q, k, v, bias=bias, sink=sink, **how).square().sum()

    gradients = torch.func.grad(loss, argnums=(0, 1, 2))
    given = q, bias, sink
    wanted = gradients(*given)
    for sign, dims in ((-1, (0, 0, 0)), (1, (0, None, None))):
        other = 2 * q, sign * bias, sign * sink
        several = [
            x if dim is None else torch.stack([x, y])
            for x, y, dim in zip(given, other, dims, strict=True)
        ]
        got = torch.vmap(gradients, in_dims=dims)(*several)
        each = zip(wanted, gradients(*other), strict=True)
        torch.testing.assert_close(got, tuple(map(torch.stack, each)), atol=1e-4, rtol=1e-4)
    given = [x.requires_grad_() for x in given]
    with torch.autograd.graph.saved_tensors_hooks(scattered, lambda x: x):
        moved = torch.autograd.grad(loss(*given), given)  # by other addresses and strides
    torch.testing.assert_close(moved, wanted, atol=1e-4, rtol=1e-4)
    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*given), given)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_only_gradients_that_are_wanted(device):
    """A bias or a sink alone may be learned, and a bias that is not learned gets no gradient."""
    q, k, v = tensors(device, seq_kv=60)
    bias = torch.randn(4, 20, 60, device=device).requires_grad_()
    sink = torch.zeros(4, device=device).requires_grad_()
    o = attention(q, k, v, bias=bias, sink=sink, impl="triton")
    both = torch.autograd.grad(o.sum(), (bias, sink))
    o = attention(q, k, v, bias=bias, sink=sink.detach(), impl="triton")
    assert torch.equal(torch.autograd.grad(o.sum(), bias)[0], both[0])
    with Live(q, k, v, bias, sink) as live:
        o = attention(q, k, v, bias=bias.detach(), sink=sink, impl="triton")
        (alone,) = torch.autograd.grad(o.sum(), sink)
    assert torch.equal(alone, both[1])
    assert live.largest < bias.nbytes


@pytest.mark.parametrize("lay", [scattered, lambda x: x[:, ::2, :, 1::3]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias_lies_anyhow(lay, dtype, device):
    """A bias is read by its own strides and dtype, and its gradient has the same dtype."""
    q, k, v = (x.bfloat16() for x in tensors(device))
    torch.manual_seed(0)
    bias = lay(torch.randn(2, 8, 20, 80, device=device).to(dtype))[:, :4, :, :26]
    given = [x.detach().requires_grad_() for x in (bias, bias.contiguous())]
    both = [attention(q, k, v, causal=True, bias=x, impl="triton") for x in given]
    assert torch.equal(*both)
    gradients = [torch.autograd.grad(o.sum(), x)[0] for o, x in zip(both, given, strict=True)]
    assert torch.equal(*gradients)
    assert gradients[0].dtype == dtype


@pytest.mark.parametrize("name", ["triton", "tiled"])
def test_a_bias_that_is_a_negated_view(name, device):
    """A bias that PyTorch negates lazily, as ``imag`` of a conjugate, is negated for the kernel."""
    bias = torch.randn(20, 26, dtype=torch.complex64, device=device).conj().imag
    given = tensors(device)
    o, same = (attention(*given, bias=x, impl=name) for x in (bias, bias.clone()))
    assert bias.is_neg()
    assert torch.equal(o, same)


@pytest.mark.parametrize(
    ("argument", "shape", "with_heads"),
    [
        ("alibi_slopes", (1,), (1,)),
        ("alibi_slopes", (2, 1), (2, 1)),
        ("bias", (20, 26), (1, 20, 26)),
        ("bias", (2, 20, 26), (2, 1, 20, 26)),
        ("sink", (1,), (1,)),
    ],
)
def test_one_head(argument, shape, with_heads, device):
    """A [B, T, D] input has the slopes and the sink of one head, and a bias without heads."""
    q, k, v = tensors(device, heads=1, kv_heads=1)
    x = torch.rand(shape, device=device)
    o = attention(q, k, v, **{argument: x.view(with_heads)}, impl="triton")
    flat = attention(*(y[:, 0] for y in (q, k, v)), **{argument: x}, impl="triton")
    assert torch.equal(flat, o[:, 0])


FIT = {"alibi_slopes": torch.ones(4), "bias": torch.ones(20, 26), "sink": torch.ones(4)}


@pytest.mark.parametrize(
    ("argument", "bad", "words"),
    [
        ("alibi_slopes", 1.0, "wanted a tensor, got float"),
        ("alibi_slopes", torch.ones(4).double(), "wanted an fp32 tensor, got torch.float64"),
        ("alibi_slopes", torch.ones(3), r"wanted shape \[4\] or \[2, 4\], got \[3\]"),
        ("alibi_slopes", torch.ones(1, 4), r"wanted shape \[4\] or \[2, 4\], got \[1, 4\]"),
        ("alibi_slopes", torch.ones(4, device="meta"), "wanted q's device"),
        ("alibi_slopes", torch.ones(4, requires_grad=True), "they have no gradient"),
        ("bias", 1.0, "wanted a tensor, got float"),
        ("bias", torch.ones(20, 26).bool(), "wanted a tensor of q's dtype, .* got torch.bool"),
        ("bias", torch.ones(20, 26).half(), "wanted a tensor of q's dtype, .* got torch.float16"),
        ("bias", torch.ones(20, 25), r"wanted what broadcasts to \[2, 4, 20, 26\], got \[20, 25\]"),
        ("bias", torch.ones(1, 2, 4, 20, 26), r"wanted what broadcasts .* got \[1, 2, 4, 20, 26\]"),
        ("bias", torch.ones(20, 26, device="meta"), "wanted q's device"),
        ("bias", relative(torch.ones(4, 46)), r"wanted .* to \[2, 4, 45\], got \[4, 46\]"),
        ("bias", relative(torch.ones(4, 1)), r"wanted .* to \[2, 4, 45\], got \[4, 1\]"),
        ("sink", 1.0, "wanted a tensor, got float"),
        ("sink", torch.ones(4).int(), "wanted a floating-point tensor, got torch.int32"),
        ("sink", torch.ones(3), r"wanted shape \[4\], one for each head, got \[3\]"),
        ("sink", torch.ones(4, device="meta"), "wanted q's device, .*, got meta"),
    ],
)
def test_bad_score_tensors(argument, bad, words, device):
    """What does not fit is refused before anything runs, also after a tensor that does."""
    given = tensors(device)
    attention(*given, **{argument: FIT[argument].to(device)}, impl="triton")
    if isinstance(bad, torch.Tensor) and not bad.is_meta:
        bad = bad.to(device).detach().requires_grad_(bad.requires_grad)
    elif not isinstance(bad, (float, torch.Tensor)):
        bad = relative(bad.vector.to(device))
    for name in ("auto", "triton", "tiled"):
        with pytest.raises(ValueError, match=f"{argument}: {words}"):
            attention(*given, **{argument: bad}, impl=name)


@pytest.mark.parametrize("vector", [torch.ones(45), [1.0], torch.ones(1, 1, 4, 45)])
def test_bad_vectors(vector):
    """A relative bias has a dimension of heads, or of batches and of heads."""
    with pytest.raises(ValueError, match="vector: wanted"):
        relative(vector)


def test_a_relative_bias_takes_linear_memory(device):
    """With a relative bias no tensor of either pass has T x S elements, as its matrix would."""
    problem = Problem(seq_q=256, head_dim=16)
    q, k, v = make_inputs(problem, device=device)
    grads = make_grads(problem, device=device)
    vector = torch.randn(1, 1, 511, device=device)
    how = {"right": None, "scale": 0.25, "extras": Extras(bias=vector)}
    with Live(q, k, v, vector, *grads) as live:
        o, lse = forward(q, k, v, num_splits=1, **how)
        *_, dbias = backward(grads, (q, k, v, o, lse), bias_grad=True, **how)
    assert dbias.shape == vector.shape
    assert live.largest < 4 * 256 * 256


@pytest.mark.parametrize("seed", range(2))
def test_padding_around_a_bias_is_not_read(seed, device):
    """NaN around a bias, and where a mask hides scores, reaches no result."""
    q, k, v = tensors(device)
    torch.manual_seed(seed)
    buffer = torch.full((2, 4, 60, 64), torch.nan, device=device)
    bias = buffer[:, :, 20:40, 16:42].copy_(torch.randn(2, 4, 20, 26))
    bias[:, :, torch.arange(26) > torch.arange(20)[:, None]] = torch.nan
    given = [x.requires_grad_() for x in (q, k, v, bias.detach())]
    o, lse = attention(*given[:3], causal=True, bias=given[3], return_lse=True, impl="triton")
    for x in (o, lse, *torch.autograd.grad(o.sum() + lse.sum(), given)):
        assert x.isfinite().all()


@pytest.mark.drawn("shape")
@OURS
@pytest.mark.parametrize("shape", ["all", "a_head", "rows", "columns", "one", "relative"])
def test_bias_and_sink_of_documents(name, shape, device):
    """Packed documents take a bias and sinks, and hidden scores get no part of them."""
    given = [x.requires_grad_() for x in tensors(device)]
    torch.manual_seed(0)
    given.append(torch.randn(SHAPES.get(shape, (4, 45)), device=device).requires_grad_())
    given.append(torch.linspace(-2, 3, 4, device=device).requires_grad_())
    far = shape == "relative"
    cu_q, cu_k = (torch.tensor(x, device=device) for x in ([0, 7, 7, 19], [0, 9, 14, 25]))
    how = {"bias": relative(given[3]) if far else given[3], "sink": given[4], "impl": name}
    got = attention(*given[:3], documents=(cu_q, cu_k), **how, return_lse=True)
    of_q, of_k = (
        torch.searchsorted(cu, torch.arange(n, device=device), right=True)
        for cu, n in ((cu_q, 20), (cu_k, 26))
    )
    hidden = (of_q[:, None] != of_k) | (of_q[:, None] == 4) | (of_k == 4)
    bias = matrix(given[3], 20, 26) if far else given[3]
    wanted = written_out(*given[:3], hidden=hidden, bias=bias, sink=given[4])
    assert_like(got, wanted, given, make_grads(PROBLEM, device=device))


@pytest.mark.parametrize("name", ["triton"])
@pytest.mark.parametrize("shape", [(2, 4, 130, 150), (4, 130, 150), (4, 279)])
def test_hidden_scores_give_a_bias_nothing(name, shape, device):
    """The gradient of a bias is 0 where a mask hides whole tiles, whatever was in its memory."""
    given = *tensors(device, seq_q=130, seq_kv=150), torch.randn(shape, device=device)
    far = len(shape) == 2
    with guard(*given) as (q, k, v, bias):
        bias.requires_grad_()
        window = {"causal": True, "window": (9, 0)}
        added = relative(bias) if far else bias
        o = attention(q, k, v, bias=added, **window, impl=name)
        (gradient,) = torch.autograd.grad(o.sum(), bias)
    if far:
        apart = torch.arange(279, device=device) - 129
    else:
        t, s = (torch.arange(n, device=device) for n in (130, 150))
        apart = s - t[:, None]
    hidden = (apart > 0) | (apart < -9)
    assert not gradient[..., hidden].any()
    assert gradient[..., ~hidden].any()


@pytest.mark.parametrize("family", ["triton"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_sink_of_split_keys(family, causal, device):
    """A sink counts once, in the first split of the keys, however many splits there are."""
    q, k, v = tensors(device, seq_kv=300)
    sink = torch.linspace(-2, 3, 8, device=device).view(2, 4)
    how = {"right": 250 if causal else None, "scale": 0.25, "extras": Extras(sink=sink)}
    how |= {"family": family}
    whole, parts = (forward(q, k, v, num_splits=n, **how) for n in (1, 3))
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize("name", ["triton"])
def test_a_sink_behind(name, device):
    """A sink is applied through lse for an implementation that takes none, with equal gradients.

    This holds for a query without keys, or without key and sink; a sink of -inf has no gradient.
    """
    given = [x.requires_grad_() for x in tensors(device, seq_kv=12)]
    sink = torch.tensor([[-torch.inf, -2.0, 0.0, 3.0]], device=device)
    given.append(sink.requires_grad_())
    how = {"causal": "bottom_right", "scale": 0.25}
    inside, behind = get(name), replace(get(name), name="behind", sink=False)
    grads, results = make_grads(PROBLEM, device=device), []
    for impl in (inside, behind):
        outputs = impl(*given[:3], sink=given[3], **how)
        gradients = torch.autograd.grad(outputs, given, grads)
        assert not gradients[-1][:, 0].any()
        results.append((*outputs, *gradients))
    torch.testing.assert_close(*results)
    without = replace(behind, lse=False, prepares=False, call=lambda q, *_, **__: q)
    with pytest.raises(ValueError, match="sink: behind takes none, and returns no logsumexp"):
        without(*given[:3], sink=given[3], **how)


def test_plans_say_what_scores_are_made_with(device):
    """A bias that scores share has a launch for its gradient; one of each score has none."""
    q, k, v = tensors(device)
    shared = explain(q, k, v, bias=torch.ones(4, 20, 26, device=device), gpu=gpu_of(device))
    assert "bwd_dbias" in str(shared)
    each = explain(q, k, v, bias=torch.ones(2, 4, 20, 26, device=device), gpu=gpu_of(device))
    assert "bwd_dbias" not in str(each)
    half = [x.bfloat16() for x in tensors(device, head_dim=64)]
    bias = torch.ones(20, 26, device=device)
    full = tensors(device, head_dim=64)
    with pytest.raises(ValueError, match="Hopper's kernels in fp32 add no bias to scores"):
        explain(*full, bias=bias, impl="hopper", gpu="H200")
    biased = explain(*half, bias=bias, impl="hopper", gpu="H200")
    assert (biased.forward.kernel, biased.backward.kernel) == ("sm90", "sm90")
    assert "bwd_dbias" in str(biased)
    sloped = explain(*half, alibi_slopes=torch.ones(4, device=device), impl="hopper", gpu="H200")
    assert (sloped.forward.kernel, sloped.backward.kernel) == ("sm90", "sm90")
    sunk = explain(*half, sink=torch.ones(4, device=device), impl="hopper", gpu="H200")
    assert (sunk.forward.kernel, sunk.backward.kernel) == ("sm90", "sm90")
    assert "dsink_partial" in [x.name for x in sunk.backward.workspaces]


def scored(case, **changes):
    """Return a case with other score tensors; None removes a tensor."""
    given = {name: x for name, x in {**case.scored, **changes}.items() if x is not None}
    bias, sink = dimensions(given.get("bias")), "sink" in given
    problem = replace(case.problem, alibi="alibi_slopes" in given, bias=bias, sink=sink)
    return replace(case, problem=problem, scored=given)


BIASES = ("bhts", "1hts", "b11s", "1ht1", "1111", "1hr", "bhr")


@law(asked={"sloped": (True,)}, needs="alibi")
def test_slopes_of_zero(impl, sample):
    """Slopes of zero are the same as no slopes."""

    def zero(case):
        return scored(case, alibi_slopes=torch.zeros_like(case.scored["alibi_slopes"]))

    def none(case):
        return scored(case, alibi_slopes=None)

    assert_agree(ask(impl, sample, zero), ask(impl, sample, none))


@law(asked={"masks": ("top_left",), "windowed": (False,), "square": True}, needs="alibi bias")
def test_causal_alibi_is_a_bias_of_columns(impl, sample):
    """Causal ALiBi is a bias of slope * s; only lse differs, by one number per row."""
    p = sample.problem
    slopes = torch.exp2(-torch.arange(1.0, p.heads + 1))[None].to(sample.device)
    s = torch.arange(p.seq_kv, device=sample.device)
    column = (slopes[..., None] * s)[:, :, None]

    def sloped(case):
        return scored(case, alibi_slopes=slopes)

    def biased(case):
        return scored(case, bias=column)

    one, other = ask(impl, sample, sloped), ask(impl, sample, biased)
    other.got.pop("dbias", None)
    assert_agree(one, other, lse=lambda x: x - column[..., 0, :].double())


@law(asked={"biases": BIASES}, needs="bias")
def test_a_number_added_to_a_bias(impl, sample):
    """A number added to a bias is added to lse, and changes nothing else."""

    def moved(case):
        return scored(case, bias=case.scored["bias"] + 2)

    hypothesis.assume(sample.draw().scored["bias"].dtype == torch.float32)
    assert_agree(ask(impl, sample), ask(impl, sample, moved), lse=lambda x: x - 2)


@law(
    asked={
        "biases": ("bhts",),
        "masks": (False,),
        "windowed": (False,),
        "batches": (1, 2),
        "shortest": 2,
    },
    needs="bias intervals strict",
)
def test_a_bias_of_minus_infinity_is_a_mask(impl, sample):
    """A bias of -inf acts as a mask, even where half of the rows see no key."""
    p = sample.problem
    half = p.seq_q // 2
    documents = (half, 0), (p.seq_q - half, p.seq_kv)
    masked = {"documents": documents, "causal": "bottom_right", "window": (7, None)}
    t, s = (torch.arange(n, device=sample.device) for n in (p.seq_q, p.seq_kv))
    band = replace(p, **masked).bands[1]
    seen = (t[:, None] >= half) & band.sees(t[:, None] - half, s)

    def hidden(case):
        return scored(case, bias=case.scored["bias"].masked_fill(~seen, -torch.inf))

    def by_mask(case):
        return replace(case, problem=replace(case.problem, **masked))

    assert_agree(ask(impl, sample, by_mask), ask(impl, sample, hidden))


@law(asked={"biases": BIASES, "batches": (2,), "groups": (2,)}, needs="bias grad")
def test_a_broadcast_bias_has_the_sum_of_gradients(impl, sample):
    """A broadcast bias has the gradient of the full bias, summed over what shares an element."""
    p = sample.problem

    def spread(case):
        bias = case.scored["bias"]
        full = matrix(bias, p.seq_q, p.seq_kv) if bias.ndim == 3 else bias
        sizes = case.problem.batch, p.heads, p.seq_q, p.seq_kv
        return scored(case, bias=full.expand(sizes).contiguous())

    def back(x):
        like = one.got["dbias"]
        if like.ndim == 4:
            return x.sum_to_size(like.shape)
        t, s = torch.arange(p.seq_q)[:, None], torch.arange(p.seq_kv)
        at = (s - t + p.seq_q - 1).flatten().to(x.device)
        summed = x.new_zeros((*x.shape[:2], like.shape[-1])).index_add_(2, at, x.flatten(2))
        return summed.sum_to_size(like.shape)

    one, other = ask(impl, sample), ask(impl, sample, spread)
    shared = p.batch * p.heads * p.seq_q * p.seq_kv / max(one.got["dbias"].numel(), 1)
    for name, x in one.got.items():
        if name != "dbias":
            budgets = (partial(each.budget, name) for each in (one, other))
            assert_within(name, (x.double() - other.got[name])[x.isfinite()], *budgets)
    errors = one.got["dbias"].double() - back(other.got["dbias"].double())
    budgets = partial(one.budget, "dbias"), partial(other.budget, "dbias", max(shared, 1))
    assert_within("dbias", errors, *budgets)


@law(asked={"biases": ("bhts",)}, needs="bias grad lse")
def test_gradients_of_a_row_of_a_bias_add_up(impl, sample):
    """The gradients of a row of a bias sum to the gradient of its logsumexp."""
    result = ask(impl, sample)
    case = result.case
    alive = case.seen.any(-1).double()
    wanted = 0.0 if case.grad_lse is None else case.grad_lse.double() * alive
    errors = result.got["dbias"].double().sum(-1) - wanted
    assert_within("dbias", errors, result.budget("dbias", sample.problem.seq_kv))


@law(asked={"sunk": (True,)}, needs="lse")
def test_a_sink_of_minus_infinity(impl, sample):
    """A sink of -inf is no sink, and has no gradient."""

    def none(case):
        return scored(case, sink=None)

    def nothing(case):
        return scored(case, sink=torch.full_like(case.scored["sink"], -torch.inf))

    other = ask(impl, sample, nothing)
    assert not other.got.pop("dsink", torch.zeros(1)).any()
    assert_agree(ask(impl, sample, none), other)


@law(asked={"sunk": (True,)}, needs="lse")
def test_a_sink_takes_its_share(impl, sample):
    """A sink scales o by 1 - exp(sink - lse), where lse includes the sink."""

    def none(case):
        return scored(case, sink=None)

    sunk, plain = ask(impl, sample), ask(impl, sample, none)
    sink = sunk.case.scored["sink"][..., None].double()
    lse = plain.got["lse"].double()
    budgets = (partial(x.budget, "lse") for x in (sunk, plain))
    assert_within("lse", sunk.got["lse"] - torch.logaddexp(lse, sink), *budgets)
    weighed = plain.got["o"].double() * (lse - torch.logaddexp(lse, sink)).exp()[..., None]
    slack = {name: x * plain.expected.sizes["o"] for name, x in plain.budget("lse").items()}
    assert_within("o", sunk.got["o"] - weighed, sunk.budget("o"), plain.budget("o"), slack)


@law(asked={"sunk": (True,), "batches": (2, 3)}, needs="lse strict")
def test_batches_have_their_own_sinks(impl, sample):
    """With sinks of its own, each batch has the results of a call with these sinks."""
    p = sample.problem

    def own(case):
        of_batch = torch.arange(len(case.inputs[0]), device=sample.device) % p.batch
        return scored(case, sink=case.scored["sink"] + of_batch[:, None])

    together = ask(impl, sample, own)
    for i in range(p.batch):

        def change(case, i=i):
            return scored(case.batches(i, p.batch), sink=case.scored["sink"] + i)

        alone = ask(impl, sample, change)
        got = {name: x[i : i + 1] for name, x in together.got.items()}
        assert_agree(alone, replace(alone, got=got))


@law(
    asked={"sloped": (False, True), "biases": BIASES, "sunk": (False, True)},
    needs="repeats bias lse",
)
def test_the_same_again(impl, sample):
    """Whatever modifies the scores, the same sample gives the same bits again."""
    one, other = ask(impl, sample).got, ask(impl, sample).got
    for name, x in one.items():
        assert_same_bits(name, x, other[name])


@law(
    asked={"sloped": (False, True), "biases": ("", *BIASES), "sunk": (False, True)},
    needs="alibi bias lse",
    drawn={"factor": st.sampled_from((2.0, -1.0))},
)
def test_scaling_queries(impl, sample, factor):
    """Multiplying q by c and dividing the scale by c divides dq by c and changes nothing else."""

    def change(case):
        q, k, v = case.inputs
        return replace(case, inputs=(q * factor, k, v), scale=case.scale / factor)

    plain, changed = ask(impl, sample), ask(impl, sample, change)
    assert_agree(plain, changed, times=abs(factor), dq=lambda x: x * factor)


def test_a_sink_behind_rows_that_see_no_key():
    """The lse of a row without keys is the sink, which gets its gradient unless it is -inf."""
    o, lse, sink = torch.zeros(1, 2, 3, 8), torch.full((1, 2, 3), -torch.inf), (-torch.inf, 2.0)
    given = [lse.requires_grad_(), torch.tensor([sink]).requires_grad_()]
    got = with_sink(o, *given)[1]
    of_lse, of_sink = torch.autograd.grad(got.sum(), given)
    assert torch.equal(got, given[1][..., None].expand_as(got))
    assert not of_lse.any()
    assert of_sink.tolist() == [[0.0, 3.0]]


@pytest.mark.parametrize("logit", [-40.0, -20.0, 0.0, 20.0, 40.0])
def test_a_sink_behind_a_kernel_that_takes_little_or_all(logit):
    """The gradients of sink and lse stay exact where one has nearly all of the softmax."""
    shapes, seed = ((1, 2, 30, 8), (1, 2, 30), (1, 2, 30, 8)), torch.Generator().manual_seed(0)
    (o, lse, grad_o), found = (torch.randn(x, generator=seed) for x in shapes), []
    for dtype in (torch.float32, torch.float64):
        given = [x.to(dtype).requires_grad_() for x in (o, lse, torch.full((1, 2), logit))]
        got, _ = with_sink(*given)
        found.append(torch.autograd.grad(got, given[1:], grad_o.to(dtype)))
    for x, exact in zip(*found, strict=True):
        torch.testing.assert_close(x.double(), exact, rtol=1e-4, atol=0)


def test_a_sink_behind_takes_a_denormal_share():
    """A denormal share of the softmax has gradients as exact as denormals, on either side."""
    found = []
    for dtype in (torch.float32, torch.float64):
        o = torch.ones(1, 2, 1, 4, dtype=dtype)
        lse = torch.tensor([[[93.0], [-93.0]]], dtype=dtype, requires_grad=True)
        sink = torch.zeros(1, 2, dtype=dtype, requires_grad=True)
        found += [
            torch.autograd.grad(x.sum(), (lse, sink), retain_graph=True)
            for x in with_sink(o, lse, sink)
        ]
    for got, wanted in zip(found[:2], found[2:], strict=True):
        for x, y in zip(got, wanted, strict=True):
            assert y.count_nonzero() == y.numel()
            torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=2**-149)
