"""``attention``: arguments, the choice of an implementation, plans and errors."""

import gc
import time
import weakref
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import flashattn
from flashattn import api, attention, masks, registry, relative
from flashattn.problem import Problem
from flashattn.registry import Impl
from flashattn.testing.inputs import make_inputs
from flashattn.testing.layouts import scattered, shifted

OURS = pytest.mark.parametrize("name", ["triton", "tiled", "reference"])
PROBLEM = Problem(batch=2, heads=4, kv_heads=2, seq_q=33, seq_kv=40, head_dim=16)


def tensors(device, **changes):
    """Return q, k, v."""
    return make_inputs(
        Problem(**{"batch": 2, "heads": 2, "seq_q": 20, "head_dim": 16} | changes), device=device
    )


@OURS
def test_one_head(name, device):
    """A [B, T, D] input is one head, and so are its outputs."""
    q, k, v = tensors(device, heads=1)
    o, lse = attention(q, k, v, causal=True, return_lse=True, impl=name)
    flat_o, flat_lse = attention(q[:, 0], k[:, 0], v[:, 0], causal=True, return_lse=True, impl=name)
    assert torch.equal(flat_o, o[:, 0])
    assert torch.equal(flat_lse, lse[:, 0])


@OURS
def test_bottom_right_is_not_top_left(name, device):
    """If T != S the alignments differ, and with bottom-right the last query sees every key."""
    q, k, v = make_inputs(PROBLEM, device=device)
    top, bottom = (attention(q, k, v, causal=c, impl=name) for c in ("top_left", "bottom_right"))
    full = attention(q, k, v, impl=name)
    assert not torch.allclose(top, bottom)
    torch.testing.assert_close(bottom[:, :, -1], full[:, :, -1])
    torch.testing.assert_close(top[:, :, 0], v[:, :, 0].repeat_interleave(2, 1))
    assert torch.equal(attention(q, k, v, causal=True, impl=name), top)


@OURS
def test_lse_alone_is_differentiable(name, device):
    """The gradient of the sum of the logsumexp alone is dq = scale * P @ K."""
    q, k, v = (x.requires_grad_() for x in tensors(device))
    _, lse = attention(q, k, v, return_lse=True, impl=name)
    (dq,) = torch.autograd.grad(lse.sum(), q)
    torch.testing.assert_close(dq, 0.25 * (q @ k.mT * 0.25).softmax(-1) @ k)


@OURS
def test_autocast(name, device):
    """Under autocast, the result is that of inputs cast to its dtype."""
    q, k, v = tensors(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        o = attention(q, k, v, impl=name)
    assert o.dtype == torch.bfloat16
    assert torch.equal(o, attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), impl=name))


@OURS
def test_autocast_leaves_fp64(name, device):
    """As in PyTorch, autocast does not round fp64: it is computed as it is, or refused."""
    given = tensors(device, dtype="float64")
    with torch.autocast(device.type, dtype=torch.bfloat16):
        if name == "triton":
            with pytest.raises(ValueError, match="triton takes fp32, fp16 and bf16"):
                attention(*given, impl=name)
            return
        o = attention(*given, impl=name)
    assert o.dtype == torch.float64
    assert torch.equal(o, attention(*given, impl=name))


def test_autocast_passes_all_on(device):
    """Autocast passes on all other arguments, and bad arguments are still refused."""
    q, k, v = (x[:, 0] for x in tensors(device))
    asked = {"causal": "bottom_right", "scale": 0.3, "return_lse": True, "impl": "tiled"}
    with torch.autocast(device.type, dtype=torch.bfloat16):
        outputs = attention(q, k, v, **asked)
        for options, words in (({"precision": "fp8"}, "precision"), ({"deterministic": 2}, "det")):
            with pytest.raises(ValueError, match=words):
                attention(q, k, v, **options)
        with pytest.raises(ValueError, match="q: wanted a tensor, got list"):
            attention([1.0], k, v)
    exact = attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), **asked)
    assert all(torch.equal(a, b) for a, b in zip(outputs, exact, strict=True))


@OURS
def test_autocast_casts_a_bias(name, device):
    """Under autocast a bias is cast like q, k and v, unless it is fp32."""
    q, k, v = tensors(device)
    bias = torch.randn(20, 20, device=device)
    cast = [x.bfloat16() for x in (q, k, v)]
    for given, kept in ((bias.half(), bias.half().bfloat16()), (bias, bias)):
        vector = given[None, :, 0].repeat(1, 2)[:, :39]
        with torch.autocast(device.type, dtype=torch.bfloat16):
            o = attention(q, *cast[1:], bias=given, impl=name)
            o_relative = attention(q, k, v, bias=relative(vector), impl=name)
        assert torch.equal(o, attention(*cast, bias=kept, impl=name))
        vector = vector.to(kept.dtype)
        assert torch.equal(o_relative, attention(*cast, bias=relative(vector), impl=name))


@pytest.mark.parametrize("name", ["triton", "tiled"])
def test_backward_inside_autocast(name, device):
    """Gradients are not rounded by an autocast that begins after the forward."""
    given = [x.requires_grad_() for x in tensors(device)]
    o = attention(*given, impl=name)
    wanted = torch.autograd.grad(o.square().sum(), given, retain_graph=True)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        got = torch.autograd.grad(o.square().sum(), given)
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))


@pytest.mark.parametrize("name", ["triton", "reference"])
def test_batched_gradients(name, device):
    """``is_grads_batched`` computes the gradients of several dO."""
    given = [x.requires_grad_() for x in tensors(device)]
    o = attention(*given, impl=name)
    several = torch.randn(3, *o.shape, device=device)
    got = torch.autograd.grad(o, given, several, is_grads_batched=True, retain_graph=True)
    for i, grad_o in enumerate(several):
        wanted = torch.autograd.grad(o, given, grad_o, retain_graph=True)
        torch.testing.assert_close(tuple(x[i] for x in got), wanted)


def test_batched_gradients_of_tiled_are_refused(device):
    """The tiled attention says what takes batched gradients."""
    given = [x.requires_grad_() for x in tensors(device)]
    o = attention(*given, impl="tiled")
    with pytest.raises(NotImplementedError, match=r"is_grads_batched.*torch.func.vmap only"):
        torch.autograd.grad(o, given, o[None], is_grads_batched=True)


@pytest.mark.parametrize("causal", ["top_left", "bottom_right"])
def test_auto_does_not_read_what_no_query_sees(causal, device):
    """Keys behind a causal mask may be NaN, whichever implementation "auto" takes."""
    q, k, v = (x.requires_grad_() for x in tensors(device, seq_kv=30))
    with torch.no_grad():
        k[:, :, 20:] = v[:, :, 20:] = torch.nan
    o = attention(q, k, v, causal=causal)
    if causal == "bottom_right":  # the last query sees all of them
        assert o[:, :, -1].isnan().all()
        return
    grads = torch.autograd.grad(o.sum(), (q, k, v))
    assert all(x.isfinite().all() for x in (o, *grads))


def test_auto_takes_the_fastest_with_its_options(device, monkeypatch):
    """Auto skips what is not the fastest; what it takes gets its own options, or the user's."""
    asked = []

    def call(*inputs, **options):
        asked.append(options.get("num_splits"))
        return inputs[0]

    able = {"call": call, "limits": lambda *_: None, "lse": False}
    impls = {
        "slow": Impl(name="slow", fastest=lambda *_: None, **able),
        "fast": Impl(name="fast", fastest=lambda *_: {"num_splits": True}, **able),
    }
    monkeypatch.setattr(api, "_PLANS", {})
    monkeypatch.setattr(api, "FASTEST_FIRST", {device.type: ("slow", "fast")})
    monkeypatch.setattr(api.registry, "get", impls.get)
    inputs = tensors(device)
    attention(*inputs)
    attention(*inputs, num_splits=False)
    attention(*inputs, impl="slow")
    assert asked == [True, False, None]
    monkeypatch.setattr(api, "FASTEST_FIRST", {device.type: ("slow",)})
    with pytest.raises(ValueError, match="slow is not the fastest here"):
        attention(*tensors(device, seq_q=30))


def test_auto(device):
    """On a GPU auto is triton; on a CPU it is sdpa, or the reference if the lse is wanted."""
    q, k, v = tensors(device)
    alone, pair = ("triton", "triton") if device.type == "cuda" else ("sdpa", "reference")
    assert torch.equal(attention(q, k, v), attention(q, k, v, impl=alone))
    how = {"return_lse": True}
    assert all(map(torch.equal, attention(q, k, v, **how), attention(q, k, v, **how, impl=pair)))


def test_auto_takes_windows(device):
    """Auto gives windows to triton or tiled, which compute only the tiles that they touch."""
    q, k, v = tensors(device)
    how = {"causal": True, "window": (5, None), "return_lse": True}
    alone = "triton" if device.type == "cuda" else "tiled"
    assert all(map(torch.equal, attention(q, k, v, **how), attention(q, k, v, **how, impl=alone)))


@pytest.mark.parametrize("name", ["auto", "triton", "tiled", "reference", "sdpa", "naive"])
def test_windows_are_inclusive(name, device):
    """A query sees left + 1 + right keys, its own included; causal sets right to 0."""
    q, k, v = tensors(device)
    alone = attention(q, k, v, causal=True, window=(0, 7), impl=name)
    torch.testing.assert_close(alone, v)
    for left, right in ((2, 1), (1, 2), (2, None)):
        inner = attention(q, k, v, window=(left, right), impl=name)[:, :, 9]
        keys = slice(9 - left, None if right is None else 10 + right)
        few = attention(q[:, :, 9:10], k[:, :, keys], v[:, :, keys], impl=name)[:, :, 0]
        torch.testing.assert_close(inner, few)


def test_windows_end_where_causal_says(device):
    """Query positions start at the first key; with bottom-right they end at the last key."""
    q, k, v = make_inputs(PROBLEM, device=device)
    top = attention(q, k, v, causal=True, window=(3, None))
    assert torch.equal(top, attention(q, k, v, window=(3, 0)))
    bottom = attention(q, k, v, causal="bottom_right", window=(3, None))
    for o, keys in ((top, slice(29, 33)), (bottom, slice(36, 40))):
        last = attention(q[:, :, -1:], k[:, :, keys], v[:, :, keys])
        torch.testing.assert_close(o[:, :, -1:], last)


CAPPED = {"softcap": 0.5, "causal": True, "return_lse": True}


@pytest.mark.parametrize("name", ["auto", "triton", "tiled", "reference"])
def test_softcap(name, device):
    """A score becomes softcap * tanh(score / softcap), written out for a query of two keys."""
    q, k, v = tensors(device)
    attention(q, k, v, **CAPPED | {"softcap": None}, impl=name)  # what it keeps has no softcap
    o, lse = attention(q, k, v, **CAPPED, impl=name)
    s = (q[:, :, 1:2] @ k[:, :, :2].mT) * q.shape[-1] ** -0.5
    s = 0.5 * torch.tanh(s / 0.5)
    torch.testing.assert_close(lse[:, :, 1], s.logsumexp(-1)[:, :, 0])
    torch.testing.assert_close(o[:, :, 1], (s.softmax(-1) @ v[:, :, :2])[:, :, 0])


def test_narrow_values_are_padded_for_who_takes_others(device, monkeypatch):
    """Narrow v is passed on if the implementation takes its width, else it is padded to D."""
    asked = []

    def call(q, k, v, *, causal, scale):
        assert not causal
        asked.append(v.shape[-1])
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)

    def why_not(problem, _):
        return "takes 8 columns" if problem.value_dim not in (None, 8) else None

    impl = registry.Impl(name="some", call=call, limits=why_not, narrow_values=True)
    monkeypatch.setitem(registry._impls, "some", impl)
    q, k, v = tensors(device)
    for columns in (8, 9, v.shape[-1]):
        o = attention(q, k, v[..., :columns], impl="some")
        torch.testing.assert_close(o, attention(q, k, v, impl="reference")[..., :columns])
    assert asked == [8, v.shape[-1], v.shape[-1]]
    assert "only where it holds all scores" in registry.get("sdpa").why_not(
        Problem(head_dim=16, value_dim=8), "cpu"
    )


@pytest.mark.parametrize("name", ["auto", "triton", "tiled", "sdpa"])
def test_bad_windows(name, device):
    """Every implementation refuses bad windows, even after a good one that compares equal."""
    given, words = tensors(device), r"window: wanted \(left, right\), each an int from 0 on or None"
    if registry.get("tiled" if name == "auto" else name).windows:
        assert torch.equal(
            attention(*given, window=[1, 0], impl=name), attention(*given, window=(1, 0), impl=name)
        )
    for window in ((True, False), (1.0, 0), (-1, 0), (1,), (1, 0, 0), 8, None, "10", torch.ones(2)):
        for _ in range(2):
            with pytest.raises(ValueError, match=words):
                attention(*given, window=window, impl=name)


def test_auto_takes_fp64_and_large_heads(device):
    """Auto also solves what the kernels do not take."""
    for changes in ({"dtype": "float64"}, {"head_dim": 300}):
        q, k, v = tensors(device, **changes)
        torch.testing.assert_close(attention(q, k, v), attention(q, k, v, impl="reference"))


def test_a_name_never_falls_back(device):
    """A named implementation that cannot solve a problem is an error with the reason."""
    q, k, v = tensors(device, dtype="float64")
    with pytest.raises(ValueError, match="triton takes fp32, fp16 and bf16"):
        attention(q, k, v, impl="triton")
    with pytest.raises(ValueError, match="sdpa does not return the logsumexp"):
        attention(q, k, v, impl="sdpa", return_lse=True)
    with pytest.raises(ValueError, match="sdpa takes no sink, and returns no logsumexp"):
        attention(q, k, v, impl="sdpa", sink=torch.ones(2, device=device))
    with pytest.raises(ValueError, match="impl: wanted one of triton, hopper, tiled, reference"):
        attention(q, k, v, impl="nobody")
    with pytest.raises(ValueError, match=r"impl: wanted a name, got \['triton'\]"):
        attention(q, k, v, impl=["triton"])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("kind", ["meta", "cpu", "cuda"])
@pytest.mark.parametrize("lse", [False, True])
def test_shapes_without_numbers(dtype, kind, lse, device):
    """Meta tensors, and fake tensors on any device, give the shapes and dtypes of real ones."""
    given = tensors(device, dtype=dtype, kv_heads=1, seq_kv=9)
    grad = kind != "cuda" or device.type == "cuda"  # else torch aborts in fake gradients
    if not grad and dtype == "float64":
        pytest.skip("torch cannot index fake CUDA tensors without CUDA, which tiled does")

    def shapes(*inputs):
        inputs = [x.requires_grad_(grad) for x in inputs]
        o = attention(*inputs, causal=True, return_lse=lse)
        outputs = o if lse else (o,)
        gradients = torch.autograd.grad([x.sum() for x in outputs], inputs) if grad else ()
        return [(x.shape, x.dtype, x.device.type) for x in (*outputs, *gradients)]

    with nullcontext() if kind == "meta" else FakeTensorMode():
        got = shapes(*(torch.empty(x.shape, dtype=x.dtype, device=kind) for x in given))
    assert got == [(*facts[:2], kind) for facts in shapes(*given)]


@OURS
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_lse_is_fp32(name, dtype, device):
    """The lse is fp32 for half precision, too: combining splits takes more than 11 bits."""
    q, k, v = tensors(device, dtype=dtype)
    _, lse = attention(q, k, v, return_lse=True, impl=name)
    exact = attention(*(x.double() for x in (q, k, v)), return_lse=True, impl="reference")[1]
    torch.testing.assert_close(lse, exact.float())


@pytest.mark.parametrize("which", range(3))
def test_who_has_no_gradient_is_told_of_each(device, which, monkeypatch):
    """A forward-only implementation refuses any input that needs a gradient, also after a call."""
    monkeypatch.setattr(registry, "_impls", dict(registry._impls))
    registry.register("forward", grad=False)(lambda q, k, v, *, causal, scale: q.detach())
    given = tensors(device)
    attention(*given, impl="forward")
    given[which].requires_grad_()
    with pytest.raises(ValueError, match="impl: forward is not differentiable"):
        attention(*given, impl="forward")


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"return_lse": True}], ids=str)
def test_a_second_derivative_is_right_or_refused(device, options):
    """Auto's second derivative is the reference's, or an error that names it; never a zero."""
    q, k, v = (x.requires_grad_() for x in tensors(device))

    def second(**how):
        o = attention(q, k, v, **options, **how)
        o = o[0] if options.get("return_lse") else o
        (dq,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
        return torch.autograd.grad(dq.square().sum(), (q, k, v))

    if options.get("return_lse") and device.type == "cpu":
        assert all(map(torch.equal, second(), second(impl="reference")))
    else:
        with pytest.raises(NotImplementedError, match='impl="reference"'):
            second()


@pytest.mark.parametrize("name", ["hopper", "triton", "tiled", "sdpa", "reference"])
def test_auto_takes_the_same_options_everywhere(device, name, monkeypatch):
    """Whatever auto chooses takes, or ignores, ``precision`` and ``deterministic``."""
    chosen = {name for names in api.FASTEST_FIRST.values() for name in names}
    assert chosen == {"hopper", "triton", "tiled", "sdpa", "reference"}
    given, how = tensors(device, head_dim=64), {"precision": "ieee", "deterministic": False}
    if registry.get(name).why_not(Problem(head_dim=64), device) is not None:
        assert "precision" in registry.get(name).options
        return
    monkeypatch.setattr(api, "_PLANS", {})
    monkeypatch.setattr(api, "FASTEST_FIRST", {device.type: (name,)})
    mask = {"window": (5, 5)} if name == "tiled" else {}  # else not the fastest on a CPU
    torch.testing.assert_close(attention(*given, **how, **mask), attention(*given, **mask))


BAD = {
    "scale: wanted a finite number": [torch.nan, torch.inf, "1", True, 10**400, torch.ones(1)],
    'causal: wanted False, True, "top_left" or "bottom_right"': ["middle", [], 2, None],
    "softcap: wanted a number from 1e-06 to 1000000 or None": [
        *(0, 0.0, -1.0, True, "50", 1e7, 1e-7, torch.nan, torch.inf, torch.ones(1)),
    ],
    "precision: wanted one of auto, bf16x6": ["fp8", True, None, ["auto"], torch.ones(1)],
    "deterministic: wanted one of False, True": ["no", 2, None, [True], torch.ones(1)],
}


@pytest.mark.parametrize("name", ["auto", "triton", "tiled", "sdpa"])
@pytest.mark.parametrize("words", BAD)
def test_bad_keywords(device, name, words):
    """Every implementation refuses a bad value, even after a good one that compares equal."""
    given = tensors(device)
    attention(*given, impl=name, scale=1)
    for value in BAD[words]:
        for _ in range(2):
            with pytest.raises(ValueError, match=words):
                attention(*given, **({"impl": name, "scale": 1} | {words.split(":")[0]: value}))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"is_causal": True}, r'is_causal: no argument of attention\(impl="\w+"\); use causal'),
        ({"sm_scale": 1.0}, "sm_scale: no argument of .*; use scale"),
        ({"softmax_scale": 1.0}, "softmax_scale: no argument of .*; use scale"),
        ({"retrun_lse": True}, "retrun_lse: no argument of .*; use return_lse"),
        ({"attn_mask": None}, "attn_mask: .*; use mask=flashattn.masks.of"),
        ({"window_size": (8, 8)}, "window_size: .*; use window"),
        ({"dropout_p": 0.0}, "dropout_p: .*; there is no dropout"),
        ({"enable_gqa": True}, "enable_gqa: .*; k and v may have fewer heads than q"),
        ({"num_splits": True}, r'num_splits: .*impl="\w+"\); its own options are '),
    ],
)
def test_unknown_keywords(device, options, words):
    """An unknown argument is refused; the message names what to use, or what there is."""
    for name in ("auto", "sdpa", "reference", "triton"):
        with pytest.raises(TypeError, match=words):
            attention(*tensors(device), impl=name, **options)
    with pytest.raises(TypeError, match=r"precision: .*tiled.*; PyTorch's settings"):
        attention(*tensors(device), impl="tiled", precision="ieee")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda q, k, v: (q, k.half(), v), "k: wanted q's dtype, torch.float32, got torch.float16"),
        (lambda q, k, v: (q, k, v[:, :, :-1]), r"v: wanted .*2, 20, 16\], got \[2, 2, 19, 16\]"),
        (lambda q, k, v: (q, k[..., :8], v), r"k: wanted .*2, 20, 16\], got \[2, 2, 20, 8\]"),
        (lambda q, k, v: (q[:1], k, v), r"k: wanted shape \[1, 2, 20, 16\]"),
        (lambda q, k, v: (q[:, :1], k, v), "kv_heads: wanted a divisor of the 1 .*, got 2"),
        (lambda q, k, v: (q.int(), k.int(), v.int()), "q: wanted dtype float64, float32"),
        (lambda q, k, v: (q, k[0], v), "k: wanted q's number of dimensions, 4, got 3"),
        (lambda q, k, v: (q[0, 0], k[0, 0], v[0, 0]), "q: wanted .* got 2 dimensions"),
        (lambda q, k, v: (q.to_sparse(), k, v), "q: wanted a dense .* got torch.sparse_coo"),
        (lambda q, k, v: (q, k, [1.0]), "v: wanted a tensor, got list"),
        (lambda q, k, v: (q, k, v.to("meta")), "v: wanted q's device"),
        (lambda *qkv: [x[..., :0] for x in qkv], "head_dim: wanted at least 1, got 0"),
    ],
)
@pytest.mark.parametrize("name", ["auto", "triton", "tiled", "reference"])
def test_bad_tensors(name, change, words, device):
    """Tensors that do not fit together are refused by name before anything runs."""
    with pytest.raises(ValueError, match=words):
        attention(*change(*tensors(device)), impl=name)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused(device):
    """A nested tensor is refused, though its type is torch.Tensor and it has no shape."""
    ragged = torch.nested.nested_tensor([torch.ones(2, 3, 8), torch.ones(2, 4, 8)], device=device)
    with pytest.raises(ValueError, match=r"q: wanted a dense .* got nested"):
        attention(ragged, ragged, ragged)
    refused_beside_dense(ragged, "nested", device)


def test_a_sparse_tensor_is_refused(device):
    """So is a sparse one, which has a shape but no strides."""
    refused_beside_dense(torch.eye(4, device=device).to_sparse(), "torch.sparse_coo", device)


def refused_beside_dense(x, got, device):
    """Check that other arguments of attention than q, k and v refuse a tensor by name."""
    q, k, v = tensors(device)
    for name in ("bias", "sink", "alibi_slopes", "documents"):
        with pytest.raises(ValueError, match=f"{name}: wanted a dense .* {got}"):
            attention(q, k, v, **{name: x})
    for make in (masks.padding, masks.of):
        with pytest.raises(ValueError, match=f"wanted a dense .* {got}"):
            make(x)


def test_public_names():
    """The package exports its names, sorted, and each of them exists."""
    assert flashattn.__all__ == sorted(flashattn.__all__)
    assert all(hasattr(flashattn, name) for name in flashattn.__all__)


@pytest.fixture(params=[False, True], ids=["own_lengths", "any_length"])
def prepared(request, monkeypatch):
    """Register an implementation, "prepares"; return the options of each of its plans."""
    asked = []

    def prepare(*inputs, **options):
        assert len(inputs) == 3
        asked.append(options)
        return lambda q, k, v: (q, q[..., 0])

    able = {"limits": lambda *_: None, "lse": True, "prepares": True, "any_length": request.param}
    known(monkeypatch, Impl(name="prepares", call=prepare, **able))
    return asked


def known(monkeypatch, impl):
    """Register an implementation and drop all plans."""
    monkeypatch.setattr(api, "_PLANS", {})
    monkeypatch.setattr(api, "_PREPARERS", {})
    monkeypatch.setattr(registry, "_impls", registry._impls | {impl.name: impl})


CHANGES = {
    "device": lambda *qkv: ([x.to("meta") for x in qkv], {}),
    "q's size": lambda q, k, v: ((q[:, :, 1:], k, v), {}),
    "keys": lambda q, k, v: ((q, k[:, :, 1:], v[:, :, 1:]), {}),
    "heads of keys": lambda q, k, v: ((q, k[:, :1], v[:, :1]), {}),
    "q's strides": lambda q, k, v: ((scattered(q), k, v), {}),
    "k's strides": lambda q, k, v: ((q, scattered(k), v), {}),
    "v's strides": lambda q, k, v: ((q, k, scattered(v)), {}),
    "q's address": lambda q, k, v: ((shifted(q), k, v), {}),
    "k's address": lambda q, k, v: ((q, shifted(k), v), {}),
    "v's address": lambda q, k, v: ((q, k, shifted(v)), {}),
    "dtype": lambda q, k, v: ((q.half(), k.half(), v.half()), {}),
    "gradient": lambda q, k, v: ((q, k, v.clone().requires_grad_()), {}),
    "one head": lambda q, k, v: ((q[:, 0], k[:, 0], v[:, 0]), {}),
    "mask": lambda q, k, v: ((q, k, v), {"causal": True}),
    "scale": lambda q, k, v: ((q, k, v), {"scale": 2.0}),
    "lse": lambda q, k, v: ((q, k, v), {"return_lse": True}),
    "option": lambda q, k, v: ((q, k, v), {"own": 1}),
    "precision": lambda q, k, v: ((q, k, v), {"precision": "ieee"}),
    "order": lambda q, k, v: ((q, k, v), {"deterministic": False}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_is_repeated_only_for_its_like(device, prepared, change):
    """A plan is reused for tensors and options of the same signature, and for no others."""
    given = tensors(device)
    like = tuple(x.clone() for x in given)
    first = attention(*given, impl="prepares")
    other, options = CHANGES[change](*given)
    assert torch.equal(attention(*like, impl="prepares"), first)
    assert len(prepared) == 1
    for _ in range(2):
        attention(*other, impl="prepares", **options)
        assert len(prepared) == 2
    attention(*like, impl="prepares")
    assert len(prepared) == 2


@pytest.mark.parametrize("options", [({"own": 1}, {"own": True}), ({"a": 1}, {"b": 1})])
def test_options_are_told_apart(device, prepared, options):
    """Plans differ by an option's name, type and value; a call with a tensor keeps no plan."""
    given = tensors(device)
    for asked in options * 2:
        attention(*given, impl="prepares", **asked)
    assert [list(map(repr, told.items()))[2:] for told in prepared] == [
        list(map(repr, asked.items())) for asked in options
    ]
    for _ in range(2):
        attention(*given, impl="prepares", tensor=torch.zeros(1))
    assert len(prepared) == 4
    assert len(api._PLANS) == 2


@pytest.mark.parametrize(("any_length", "times"), [(True, 1), (False, 4)])
def test_limits_that_look_at_no_length(device, monkeypatch, any_length, times):
    """Limits of ``any_length`` are checked once for all lengths but 0; bad lengths are refused."""
    asked = []
    able = {"limits": lambda problem, _: asked.append(problem), "any_length": any_length}

    def prepare(*inputs, **_):
        size = inputs[0].shape
        return lambda q, k, v: (q.new_full(size, k.shape[2] + v.shape[2]), None)

    known(monkeypatch, Impl(name="able", call=prepare, prepares=True, **able))
    q, k, v = tensors(device)

    def call(seq_q, seq_k, seq_v):
        return attention(q[:, :, :seq_q], k[:, :, :seq_k], v[:, :, :seq_v], impl="able")

    for seq_q, seq_kv in ((3, 4), (3, 3), (2, 4), (1, 1)):
        o = call(seq_q, seq_kv, seq_kv)
        assert o.shape[2] == seq_q
        assert (o == 2 * seq_kv).all()
    assert len(asked) == times
    for seq_k, seq_v in ((4, 3), (3, 4), (0, 4)):
        with pytest.raises(ValueError, match="v: wanted shape"):
            call(3, seq_k, seq_v)
    for seq_q, seq_kv in ((0, 4), (3, 0)):
        call(seq_q, seq_kv, seq_kv)
    assert len(asked) == times + 2
    other = q.new_zeros(*q.shape[:3], 2 * q.shape[3])
    attention(other, other, other, impl="able")
    assert len(asked) == times + 3


SETTINGS = {
    "deterministic": torch.use_deterministic_algorithms,
    "fp32 products": lambda on: setattr(
        torch.backends.cuda.matmul, "fp32_precision", "tf32" if on else "ieee"
    ),
}


@pytest.mark.usefixtures("matmul")
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_plan_is_of_its_settings(device, prepared, setting):
    """A plan is made again if a setting of torch changes that a launch depends on."""
    given, switch = tensors(device), SETTINGS[setting]
    try:
        for plans, on in ((1, False), (2, True), (2, False), (2, True)):
            switch(on)
            attention(*given, impl="prepares")
            assert len(prepared) == plans
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_plan_is_of_its_implementation(device, prepared):
    """Another implementation under the same name does not get the old plan."""
    given = tensors(device)
    attention(*given, impl="prepares")
    registry._impls["prepares"] = replace(registry.get("prepares"))
    for _ in range(2):
        attention(*given, impl="prepares")
        assert len(prepared) == 2


def test_bad_arguments_are_refused_every_time(device, prepared):
    """Bad arguments get neither a new plan nor that of good ones."""
    q, k, v = tensors(device)
    attention(q, k, v, impl="prepares")
    wrong = ((q, k[..., 1:], v), "k: wanted shape"), ((None, k, v), "q: wanted a tensor, got None")
    for given, words in wrong * 2:
        with pytest.raises(ValueError, match=words):
            attention(*given, impl="prepares")
    assert len(prepared) == len(api._PLANS) == 1


def test_who_watches_is_answered_anew(device, prepared):
    """Under modes, transforms, autocast and subclasses, plans are neither reused nor kept."""
    given = tensors(device)

    def call(*inputs):
        return attention(*inputs, impl="prepares")

    call(*given)
    with Shown():
        call(*given)
    torch.func.vmap(call)(*(x[None] for x in given))
    with torch.autocast(device.type, dtype=torch.float16):
        call(*given)
    call(*(x.as_subclass(Kind) for x in given))
    assert len(prepared) == 5
    assert len(api._PLANS) == 2  # one is for the tensors that autocast has cast


class Shown(TorchDispatchMode):
    """A mode that changes nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Call the operator."""
        return func(*args, **kwargs or {})


class Kind(torch.Tensor):
    """A subclass of tensors."""


@OURS
def test_plans_hold_no_tensors(device, name):
    """A plan keeps no inputs, results or gradients alive."""
    q, k, v = (x.requires_grad_() for x in tensors(device))
    o = attention(q, k, v, impl=name)
    grads = torch.autograd.grad(o.sum(), (q, k, v))
    storages = [weakref.ref(x.untyped_storage()) for x in (q, k, v, o, *grads)]
    del q, k, v, o, grads
    end = time.monotonic() + 10  # on a GPU autograd's thread may release them later
    while any(storage() for storage in storages) and time.monotonic() < end:
        gc.collect()
    assert [storage() for storage in storages] == [None] * 7


def test_gradients_after_a_call_without(device):
    """A plan made without gradients is not reused by a call that wants them."""
    inputs = make_inputs(Problem(heads=2, seq_q=6, head_dim=16), device=device)
    found = []
    for name in ("triton", "reference"):
        plain = [x.detach() for x in inputs]
        for _ in range(2):
            o = attention(*plain, causal=True, impl=name)
            assert not o.requires_grad
        given = [x.requires_grad_() for x in plain]
        o = attention(*given, causal=True, impl=name)
        found.append((o, *torch.autograd.grad(o.sum(), given)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_lengths_share_what_depends_on_none(device, monkeypatch):
    """One plan serves all lengths, and another those with keys that no query sees."""
    asked, ours = [], registry.get("triton")
    known(
        monkeypatch, replace(ours, call=lambda *x, **how: asked.append(x) or ours.call(*x, **how))
    )
    inputs = make_inputs(Problem(heads=2, seq_q=6, head_dim=16), device=device)
    for seq_q, seq_kv, times in ((6, 6, 1), (5, 5, 1), (6, 4, 1), (4, 6, 2), (3, 3, 2)):
        given = [x[:, :, :n] for x, n in zip(inputs, (seq_q, seq_kv, seq_kv), strict=True)]
        found, wanted = (attention(*given, causal=True, impl=x) for x in ("triton", "reference"))
        torch.testing.assert_close(found, wanted)
        assert len(asked) == times


def test_plans_are_few(device, monkeypatch):
    """The number of kept plans is bounded when shapes keep changing."""
    monkeypatch.setattr(api, "_MOST_PLANS", 3)
    able = {"limits": lambda *_: None, "prepares": True, "any_length": True}
    known(monkeypatch, Impl(name="able", call=lambda *_, **__: lambda q, *_: (q, None), **able))
    for n in range(1, 9):
        q = torch.randn(1, 1, n, 8 + n, device=device)
        attention(q, q, q, impl="able")
        assert 0 < len(api._PLANS) <= 3
        assert 0 < len(api._PREPARERS) <= 3
