"""PyTorch's attention runs on our kernels while they are active, and otherwise on its own.

On a CPU SDPA calls its own operator; CUDA's operators have only our kernels there.
"""

import inspect
import warnings
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch.nn.attention import (
    _registry,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
)
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from torch.nn.functional import scaled_dot_product_attention as sdpa_of_torch
from torch.utils._pytree import tree_map_only

from flashattn import attention, masks, resolve
from flashattn.bounds import of_documents
from flashattn.integrations import operators, sdpa
from flashattn.mask import Mask
from flashattn.problem import Problem
from flashattn.testing.inputs import make_grads, make_inputs
from flashattn.testing.layouts import scattered

HERE = Path(__file__).parent
# One tile per head: the operators' arguments and results do not depend on more.
PROBLEM = Problem(batch=2, heads=4, kv_heads=2, seq_q=24, head_dim=16)
UNGROUPED = Problem(batch=2, heads=3, seq_q=24, head_dim=16)  # for memory-efficient attention
aten = torch.ops.aten
# The forward operator with its arguments after q, k and v, the last one is_causal; its backward's
# arguments after out and logsumexp.
DENSE = {
    "flash": (
        "_scaled_dot_product_flash_attention",
        lambda causal: (0.0, causal),
        lambda causal, t: (None, None, t, t, 0.0, causal, None, None),
    ),
    "cudnn": (
        "_scaled_dot_product_cudnn_attention",
        lambda causal: (None, True, 0.0, causal),
        lambda causal, t: (None, None, None, None, None, t, t, 0.0, causal),
    ),
    "efficient": (
        "_scaled_dot_product_efficient_attention",
        lambda causal: (None, True, 0.0, causal),
        lambda causal, t: (None, None, 0.0, [True] * 3 + [False], causal),
    ),
}


@pytest.fixture
def calls(monkeypatch):
    """Return the names of the operators that our kernels answered, in order."""
    answered = []

    def counted(name, kernel):
        def call(*args, **options):
            result = kernel(*args, **options)
            answered.append(name)
            return result

        return call

    for name, kernel in operators.KERNELS.items():
        monkeypatch.setitem(operators.KERNELS, name, counted(name, kernel))
    return answered


@pytest.fixture
def active(device, calls):
    """Activate our kernels for a test, and return the names of the operators they answered."""
    with sdpa.enabled(device.type):
        yield calls


def halved(problem, device):
    """Return the problem, in bf16 on a GPU, where PyTorch then has one operator for it.

    In fp32 PyTorch's math runs grouped heads, and an operator that is not ours runs
    ``causal_lower_right``.
    """
    return replace(problem, dtype="bfloat16") if device.type == "cuda" else problem


def leaves(*tensors):
    """Return tensors that need gradients."""
    return [x.detach().requires_grad_() for x in tensors]


def ours(q, k, v, grad=None, **options):
    """Return o, lse and the gradients of our kernels, asked for by name."""
    q, k, v = leaves(q, k, v)
    impl = "auto" if q.is_cuda else "triton"
    o, lse = attention(q, k, v, return_lse=True, impl=impl, **options)
    gradients = () if grad is None else torch.autograd.grad(o, (q, k, v), grad)
    return o.detach(), lse.detach(), *gradients


def assert_same(got, wanted):
    """Check for equal bits: the kernels are the same."""
    assert len(got) == len(wanted)
    for x, y in zip(got, wanted, strict=True):
        assert x.shape == y.shape
        assert torch.equal(x, y)


def on_meta(args):
    """Return arguments on the meta device, for the fake kernels."""

    def bare(x):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    return tree_map_only(torch.Tensor, bare, args)


def assert_laid_as_promised(operator, args, options=None):
    """Call an operator; compare shapes, dtypes and strides with those of its fake kernel."""
    got = operator(*args, **(options or {}))
    promised = operator(*on_meta(args), **(options or {}))
    for x, y in zip(got, promised, strict=True):
        assert isinstance(x, torch.Tensor) == isinstance(y, torch.Tensor)
        if isinstance(x, torch.Tensor):
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
            strides = zip(x.shape, x.stride(), y.stride(), strict=True)
            assert x.numel() == 0 or all(n == 1 or a == b for n, a, b in strides)
    return got


def test_schemas():
    """PyTorch's private operators are those that ours were written for (torch 2.11 to 2.13)."""
    known = HERE.joinpath("sdpa_schemas.txt").read_text().splitlines()
    for name, kernel in operators.KERNELS.items():
        if not hasattr(aten, name):
            assert torch.__version__ < "2.12", f"aten::{name} is gone"
            continue
        schema = getattr(aten, name).default._schema
        assert str(schema) in known, f"aten::{name} changed in torch {torch.__version__}"
        parameters = inspect.signature(kernel).parameters.values()
        if "args" in [x.name for x in parameters]:  # passes on what another declares
            continue
        declared = {x.name: x.default_value for x in schema.arguments if x.has_default_value()}
        defaults = {x.name: x.default for x in parameters if x.default is not x.empty}
        assert declared.items() <= defaults.items(), name
        positional = [x.name for x in parameters if x.kind is not x.KEYWORD_ONLY]
        assert positional == [x.name for x in schema.arguments if not x.kwarg_only], name


LAYOUTS = ("contiguous", "sequence_first", "packed", "strided", "columns")
# PyTorch's fake kernels support fewer columns in values than in keys, except FlashAttention's.
WIDTHS = [*((name, None) for name in DENSE), ("cudnn", 8), ("efficient", 8)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "value_dim"), WIDTHS)
def test_dense_operators(device, active, name, value_dim, layout):
    """Results have our bits, in the layout that compiled code asserts, also for narrow values."""
    operator, forward, backward = DENSE[name]
    problem = UNGROUPED if name == "efficient" else PROBLEM
    if value_dim is not None:
        problem = halved(replace(problem, value_dim=value_dim), device)
    columns = layout == "columns"  # dense columns, so that results have dense columns, too
    q, k, v = make_inputs(problem, device=device, layout="contiguous" if columns else layout)
    q, k, v = (scattered(x) if columns else x for x in (q, k, v))
    grad, _ = make_grads(problem, device=device)
    o, lse, *gradients = ours(q, k, v, grad, causal=True, scale=0.3)
    scale = {"scale": 0.3}
    got = assert_laid_as_promised(getattr(aten, operator), (q, k, v, *forward(True)), scale)
    rows = got[1].reshape(*lse.shape[:2], -1)[..., : lse.shape[2]]
    assert_same([got[0], rows], [o, lse])
    given = grad, q, k, v
    given += (None,) * (name == "efficient")  # its bias
    given += (*got[:2], *backward(True, problem.seq_q))
    got = assert_laid_as_promised(getattr(aten, f"{operator}_backward"), given, scale)
    assert_same(got[:3], gradients)
    assert active == [operator, f"{operator}_backward"]


@pytest.mark.parametrize("layout", ["expanded", "expanded_batch"])
@pytest.mark.parametrize("name", ["cudnn", "efficient"])
def test_narrow_values_of_expanded_queries(device, calls, name, layout):
    """Memory-efficient attention has the promised layout; cuDNN's is left to PyTorch."""
    operator, forward, _ = DENSE[name]
    problem = halved(replace(UNGROUPED, value_dim=8), device)
    q, k, v = make_inputs(problem, device=device, layout=layout)
    with sdpa.enabled(device.type), suppress(RuntimeError) if name == "cudnn" else nullcontext():
        assert_laid_as_promised(getattr(aten, operator), (q, k, v, *forward(True)))
    assert (operator in calls) == (name == "efficient")


@pytest.mark.parametrize(("name", "value_dim"), [("flash", 8), *((name, 32) for name in DENSE)])
def test_values_of_another_width_are_left(device, calls, name, value_dim):
    """Wider values, and FlashAttention's narrow values, are left to PyTorch."""
    operator, forward, _ = DENSE[name]
    q, k, v = make_inputs(Problem(heads=2, seq_q=24, head_dim=16), device=device)
    v = torch.nn.functional.pad(v, (0, value_dim - 16))
    with sdpa.enabled(device.type):
        assert sdpa_of_torch(q, k, v).shape == v.shape
        with suppress(RuntimeError):  # on a CPU it has no such kernel
            getattr(aten, operator)(q, k, v, *forward(True))
    assert operator not in calls


@pytest.mark.parametrize("name", DENSE)
def test_corners(device, active, name):
    """Where T and S differ, is_causal is bottom-right in FlashAttention and top-left elsewhere."""
    operator, forward, _ = DENSE[name]
    corner = "bottom_right" if name == "flash" else "top_left"
    for seq_q, seq_kv in ((24, 40), (40, 24)):
        q, k, v = make_inputs(Problem(seq_q=seq_q, seq_kv=seq_kv, head_dim=16), device=device)
        o, *_ = getattr(aten, operator)(q, k, v, *forward(True), scale=0.3)
        assert_same([o], ours(q, k, v, causal=corner, scale=0.3)[:1])
    assert active == [operator] * 2


def test_no_logsumexp(device, active):
    """Memory-efficient attention keeps its promised layout when no lse is asked for."""
    q, k, v = make_inputs(UNGROUPED, device=device)
    args = q, k, v, None, False
    assert_laid_as_promised(aten._scaled_dot_product_efficient_attention, args)
    assert len(active) == 1


BIASES = {"all": (2, 3, 24, 24), "a head": (1, 3, 24, 24), "a key": (2, 1, 1, 24), "rows": (24, 24)}


@pytest.mark.parametrize("shape", BIASES.values(), ids=BIASES)
def test_a_bias_of_the_operator(device, active, shape):
    """A bias of memory-efficient attention, which PyTorch expands, has a gradient per score."""
    q, k, v = make_inputs(UNGROUPED, device=device)
    grad, _ = make_grads(UNGROUPED, device=device)
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(device)
    bias[..., 5] = -torch.inf
    bias = bias.expand(2, 3, 24, 24)
    every = leaves(q, k, v, bias)
    o, lse = attention(
        *every[:3], bias=every[3], return_lse=True, impl="auto" if q.is_cuda else "triton"
    )
    gradients = torch.autograd.grad(o, every, grad)
    operator = DENSE["efficient"][0]
    got = assert_laid_as_promised(getattr(aten, operator), (q, k, v, bias, True))
    assert_same([got[0], got[1][..., :24]], [o, lse])
    for wanted in (True, False):
        given = grad, q, k, v, bias, *got, 0.0, [True] * 3 + [wanted]
        found = assert_laid_as_promised(getattr(aten, f"{operator}_backward"), given)
        assert_same(found[: 3 + wanted], gradients[: 3 + wanted])
        assert (found[3] is not None) == wanted
    assert active == [operator, *[f"{operator}_backward"] * 2]


@pytest.mark.parametrize("shape", BIASES.values(), ids=BIASES)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_mask_tensors_of_sdpa(device, active, kind, shape):
    """PyTorch's ``attn_mask`` runs our kernels, with the results of PyTorch's own."""
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(device)
    attend = partial(sdpa_of_torch, attn_mask=mask > -1 if kind == "bool" else mask)
    inputs = leaves(*make_inputs(UNGROUPED, device=device))
    grad, _ = make_grads(UNGROUPED, device=device)
    got = run(attend, *inputs, grad)
    assert len(active) == 2
    sdpa.deactivate()
    torch.testing.assert_close(got, run(attend, *inputs, grad))
    assert len(active) == 2
    sdpa.activate(device.type)


def run(attend, q, k, v, grad):
    """Return o and the gradients of q, k and v."""
    o = attend(q, k, v)
    return o, *torch.autograd.grad(o, (q, k, v), grad)


@pytest.mark.parametrize("name", ["sdpa", *DENSE])
def test_compiled(device, active, name):
    """SDPA and each operator run our kernels under each compiler, in both passes, with groups."""
    if name == "sdpa":
        attend = partial(sdpa_of_torch, is_causal=True, enable_gqa=True)
    else:
        operator, forward, _ = DENSE[name]

        def attend(q, k, v):
            return getattr(aten, operator)(q, k, v, *forward(True))[0] * 1

    problem = UNGROUPED if name == "efficient" else halved(PROBLEM, device)
    inputs = leaves(*make_inputs(problem, device=device))
    grad, _ = make_grads(problem, device=device)
    o, _, *gradients = ours(*inputs, grad, causal=True)
    assert_same(run(attend, *inputs, grad), [o, *gradients])
    for backend in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        compiled = torch.compile(attend, backend=backend, fullgraph=True)
        assert_same(run(compiled, *inputs, grad), [o, *gradients])
    assert len(active) == 6


def test_a_backward_after_the_block():
    """A backward by PyTorch takes what our forward on a CPU has saved, dead rows included."""
    inputs = leaves(*make_inputs(PROBLEM, device="cpu"))
    grad, _ = make_grads(PROBLEM, device="cpu")
    seen = torch.ones(24, 24, dtype=torch.bool).tril()
    seen[3] = False

    def outcome(*, enabled):
        with sdpa.enabled("cpu") if enabled else nullcontext():
            o = sdpa_of_torch(*inputs, attn_mask=seen, enable_gqa=True)
        return o, *torch.autograd.grad(o, inputs, grad)

    for one, other in zip(outcome(enabled=True), outcome(enabled=False), strict=True):
        torch.testing.assert_close(one, other)


def test_autocast(device, active):
    """Autocast casts the inputs before our kernels are called."""
    inputs = leaves(*make_inputs(PROBLEM, device=device))
    with torch.autocast(device.type, dtype=torch.bfloat16):
        o = sdpa_of_torch(*inputs, enable_gqa=True)
    assert_same([o], ours(*(x.bfloat16() for x in inputs))[:1])
    grad, _ = make_grads(PROBLEM, device=device)
    *_, dq, dk, dv = ours(*(x.bfloat16() for x in inputs), grad.bfloat16())
    assert_same(
        torch.autograd.grad(o, inputs, grad.bfloat16()), [dq.float(), dk.float(), dv.float()]
    )
    assert len(active) == 2


def test_torch_decides_on_tf32(device, active, matmul):
    """A new setting of torch for fp32 products takes effect at once, as in attention()."""
    q, k, v = make_inputs(UNGROUPED, device=device)
    results = []
    for matmul.fp32_precision in ("ieee", "tf32"):
        results.append(sdpa_of_torch(q, k, v))
        assert_same(results[-1:], ours(q, k, v)[:1])
    assert not torch.equal(*results)
    assert len(active) == 2


def test_no_recursion(device, active):
    """On a CPU attention() calls SDPA, which calls our kernels, not attention()."""
    q, k, v = make_inputs(PROBLEM, device=device)
    assert_same([attention(q, k, v, causal=True)], ours(q, k, v, causal=True)[:1])
    assert len(active) == (not q.is_cuda)


def test_second_derivative(device, active):
    """PyTorch refuses a second derivative with its own message."""
    q, k, v = leaves(*make_inputs(halved(PROBLEM, device), device=device))
    o = sdpa_of_torch(q, k, v, enable_gqa=True)
    (dq,) = torch.autograd.grad(o.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"derivative for .* is not implemented"):
        dq.sum().backward()
    assert len(active) == 2


LENGTHS = [(7, 9), (0, 4), (20, 5), (13, 13)]  # of documents: queries and keys


def documents(device):
    """Return q, k, v of packed documents and a tail outside them, and the documents' starts."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = (43, 4, 16), (33, 2, 16), (33, 2, 16)
    tensors = [torch.randn(x, generator=generator, device=device) for x in shapes]
    tensors = [x.bfloat16() for x in tensors] if device.type == "cuda" else tensors
    starts = torch.tensor([(0, 0), *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return leaves(*tensors), starts.T.contiguous().to(device)


# In torch 2.11 heads may share keys without this argument.
GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def packed(of_q, of_k, window, used=None):
    """Return which keys a query sees, bool [T, S]: each document has a mask of its own."""
    left, right = (None if x < 0 else x for x in window)
    seen = torch.zeros(43, 33, dtype=torch.bool, device=of_q.device)
    for i, (queries, whole) in enumerate(LENGTHS):
        keys = whole if used is None else min(whole, int(used[i]))
        t, s = (torch.arange(n, device=seen.device) for n in (queries, keys))
        band = Mask(left, right, "bottom_right").over(queries, keys)
        inside = band.sees(t[:, None], s).expand(queries, keys)
        seen[of_q[i] : of_q[i + 1], of_k[i] : of_k[i] + keys] = inside
    return seen


WINDOWS = pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 0), (4, 3)], ids=str)


@WINDOWS
def test_varlen(device, active, window):
    """Each document attends to itself alone; rows in no document are 0 and get no gradient."""
    (q, k, v), (of_q, of_k) = documents(device)
    o, lse = varlen_attn(
        q,
        k,
        v,
        of_q,
        of_k,
        20,
        13,
        window_size=window,
        **GROUPED,
        return_aux=AuxRequest(True),
    )
    grad = torch.randn_like(o)
    gradients = torch.autograd.grad(o, (q, k, v), grad)
    own = [x.detach().transpose(0, 1)[None] for x in (q, k, v, grad)]
    wanted_o, wanted_lse, *slopes = ours(*own, mask=masks.of(packed(of_q, of_k, window)))
    wanted = [x[0].transpose(0, 1) for x in (wanted_o, *slopes)]
    assert_same([o, *gradients, lse], [*wanted, wanted_lse[0]])
    assert active == ["_flash_attention_forward", "_flash_attention_backward"]


@WINDOWS
def test_varlen_of_used_keys(device, active, window):
    """With ``seqused_k`` the mask of a document lies over its used keys."""
    (q, k, v), starts = documents(device)
    used = torch.tensor([3, 9, 0, 12], dtype=torch.int32, device=device)
    args = *starts, 20, 13, 0.0, False, False
    left, right = window
    windows = {"window_size_left": left, "window_size_right": right}
    with torch.no_grad():
        o, lse, *_ = aten._flash_attention_forward(q, k, v, *args, **windows, seqused_k=used)
    own = [x.detach().transpose(0, 1)[None] for x in (q, k, v)]
    wanted_o, wanted_lse = ours(*own, mask=masks.of(packed(*starts, window, used)))
    assert_same([o, lse], [wanted_o[0].transpose(0, 1), wanted_lse[0]])
    assert active == ["_flash_attention_forward"]


def test_layers_share_bounds(device, active, monkeypatch):
    """Bounds of the same lengths are made once, for both passes of all layers."""
    made = Mock(wraps=of_documents)
    monkeypatch.setattr(resolve, "of_documents", made)
    (q, k, v), (of_q, of_k) = documents(device)
    for _ in range(2):
        varlen_attn(q, k, v, of_q, of_k, 20, 13, **GROUPED).sum().backward()
    assert len(active) == 4
    assert made.call_count == 1


def test_varlen_layouts(device, active):
    """Varlen results have the promised layout, with documents and without."""
    (q, k, v), (of_q, of_k) = documents(device)
    packed = [torch.stack((x, x, x), 1)[:, 1].detach() for x in (q, k, v)]
    batch = [x.detach()[None, :33] for x in (q, k, v)]
    for tensors, starts in ((packed, (of_q, of_k)), (batch, (None, None))):
        given = *tensors, *starts, 20, 13, 0.0, True, False
        o, lse, *state = assert_laid_as_promised(aten._flash_attention_forward, given)
        state = state[:2]
        given = torch.ones_like(o), *tensors, o, lse, *starts, 20, 13, 0.0, True, *state
        assert_laid_as_promised(aten._flash_attention_backward, given)
    assert len(active) == 4


@pytest.mark.skipif(
    not hasattr(aten, "_flash_attention_forward_no_dropout_inplace"), reason="torch before 2.12"
)
def test_varlen_out(device, active):
    """The operator that fills a given tensor fills it with the same bits."""
    (q, k, v), (of_q, of_k) = documents(device)
    given = of_q, of_k, 20, 13, 0.0, True, False
    with torch.no_grad():
        o, lse, *_ = aten._flash_attention_forward(q, k, v, *given)
        out = torch.full_like(q, torch.nan)
        got = aten._flash_attention_forward_no_dropout_inplace(out, q, k, v, *given)
    assert_same([out, got], [o, lse])
    assert len(active) == 2
    for bad in (out.double(), out[None].repeat(2, 1, 1, 1)):
        with pytest.raises(ValueError, match=r"^out: wanted \["), torch.no_grad():
            aten._flash_attention_forward_no_dropout_inplace(bad, q, k, v, *given)


@pytest.mark.parametrize("what", ["float64", "head_dim", "dropout_p"])
def test_left_to_torch(device, active, what):
    """A problem that our kernels cannot solve has the bits of PyTorch's own kernels."""
    head_dim = 264 if what == "head_dim" else 16
    q, k, v = leaves(*make_inputs(Problem(seq_q=24, head_dim=head_dim), device=device))
    options = {}
    if what == "float64":
        q, k, v = leaves(q.double(), k.double(), v.double())
    elif what == "dropout_p":
        options["dropout_p"] = 0.5
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        o = sdpa_of_torch(q, k, v, **options)
        results.append([o, *torch.autograd.grad(o.square().sum(), (q, k, v))])
        sdpa.deactivate()
    assert not active
    assert_same(*results)
    sdpa.activate(device.type)


@contextmanager
def stand_in(device, names):
    """Replace PyTorch's kernels, and record the arguments of each call."""
    called = []
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:

            def kernel(*args, _name=name, **options):
                called.append((_name, args, options))
                returns = getattr(aten, _name).default._schema.returns
                return tuple(None if str(x.type) == "Tensor" else 7 for x in returns)

            library.impl(name, kernel, device.type.upper())
    yield called
    library._destroy()


def same(x, y):
    """Return whether a kernel's argument is the one that the operator was given."""
    return x is y if isinstance(y, torch.Tensor) else x == y


def unsupported(q, starts):
    """Yield calls that our kernels leave to PyTorch: operator, arguments, options."""
    dense, lse = torch.ones_like(q), q[..., 0].float()
    flash, cudnn, efficient = (x[0] for x in DENSE.values())
    bias = q.new_zeros(q.shape[2], q.shape[2])
    varlen = *(x[0].transpose(0, 1) for x in (q, q, q)), *starts, 24, 24, 0.0, False, False
    wide = q.repeat(1, 1, 1, 20)
    yield flash, (q, q, q, 0.5), {}
    yield flash, (q, q, q, 0.0, False, True), {}
    yield flash, (q, q, wide), {}
    yield flash, (wide, wide, wide), {}
    yield flash, (q.double(), q.double(), q.double()), {}
    yield flash, (q, q, q), {"scale": torch.inf}
    yield f"{flash}_backward", (dense, q, q, q, q, lse, lse, lse, 24, 24, 0.5, False, lse, lse), {}
    yield cudnn, (q, q, q, bias, True), {}
    yield cudnn, (q, q, q, None, True, 0.5), {}
    yield (
        f"{cudnn}_backward",
        (dense, q, q, q, q, lse, lse, lse, bias, lse, lse, 24, 24, 0.0, True),
        {},
    )
    yield efficient, (q, q, q, bias.double()[None, None], True), {}
    yield efficient, (q, q, q, None, True, 0.5), {}
    yield efficient, (q.expand(-1, 2, -1, -1), q, q, None, True), {}
    gradient = dense, q, q, q, bias.double()[None, None], q, lse, lse, lse, 0.0, [True] * 4
    yield f"{efficient}_backward", gradient, {}
    for name in ("alibi_slopes", "block_table"):
        yield "_flash_attention_forward", varlen, {name: starts[0]}
    yield "_flash_attention_forward", varlen, {"num_splits": 1}
    batch = *(x.transpose(1, 2) for x in (q, q, q)), None, None, *varlen[5:]
    yield "_flash_attention_forward", batch, {"seqused_k": starts[0]}


def test_every_operator_has_a_way_on(device, calls):
    """Dropout, odd biases and the like reach PyTorch's own kernel, with all arguments."""
    (q, _, _) = make_inputs(Problem(seq_q=24, head_dim=16), device=device)
    starts = (torch.tensor([0, 24], dtype=torch.int32, device=device),) * 2
    cases = list(unsupported(q, starts))
    with torch.no_grad(), stand_in(device, {x[0] for x in cases}) as called:
        with sdpa.enabled(device.type):
            for name, args, options in cases:
                schema = getattr(aten, name).default._schema
                if options.keys() <= {x.name for x in schema.arguments}:  # torch 2.11 has fewer
                    results = getattr(aten, name)(*args, **options)
                    assert {*results} <= {None, 7}
                    last, got, got_options = called.pop()
                    assert (last, got_options) == (name, options)
                    assert all(map(same, got, args))
        assert not called
    assert not calls


def test_no_way_on(calls):
    """Where PyTorch has no kernel, the error names the operator."""
    q = torch.randn(1, 1, 8, 16)
    message = "aten::_scaled_dot_product_flash_attention: PyTorch has no kernel for CPU"
    with sdpa.enabled("cpu"), pytest.raises(NotImplementedError, match=message):
        aten._scaled_dot_product_flash_attention(q, q, q, 0.5)
    assert not calls


def tables():
    """Return PyTorch's dispatch tables of the operators."""
    names = [x for x in operators.KERNELS if hasattr(aten, x)]
    return {x: torch._C._dispatch_dump(f"aten::{x}") for x in names}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_trace(device):
    """Deactivating restores PyTorch's kernels, and the implementation that was active before."""
    before = tables()
    assert current_flash_attention_impl() is None
    with sdpa.enabled(device):
        overridden = [name for name, table in tables().items() if table != before[name]]
        cpu_only = {x for x in before if "for_cpu" in x}
        assert set(overridden) == set(before) - (cpu_only if device == "cuda" else set())
        assert current_flash_attention_impl() == sdpa.NAMES[device]
    assert tables() == before
    with pytest.raises(KeyError), sdpa.enabled(device):
        raise KeyError
    assert current_flash_attention_impl() is None
    sdpa.activate(device)
    during = current_flash_attention_impl()
    with sdpa.enabled("cpu"):
        assert current_flash_attention_impl() == "flashattn_cpu"
    assert current_flash_attention_impl() == during
    sdpa.deactivate()
    assert tables() == before
    handle = sdpa._Overrides(device)
    handle.remove()
    assert tables() == before


def test_deactivate_leaves_others_alone(monkeypatch):
    """``deactivate`` leaves another active implementation as it is."""
    monkeypatch.setattr(_registry, "_FLASH_ATTENTION_ACTIVE", ("other", None))
    sdpa.deactivate()
    assert current_flash_attention_impl() == "other"


def test_names():
    """PyTorch lists our kernels and activates them by name; another device is refused by name."""
    assert set(sdpa.NAMES.values()) <= set(list_flash_attention_impls())
    activate_flash_attention_impl("flashattn")
    assert current_flash_attention_impl() == "flashattn"
    sdpa.deactivate()
    with pytest.raises(ValueError, match="device: wanted one of cuda, cpu, got 'tpu'"):
        sdpa.activate("tpu")


def test_lower_right_bias(device, active):
    """PyTorch's causal_lower_right, a mask tensor on a CPU, is never top-left."""
    problem = halved(Problem(seq_q=24, seq_kv=40, head_dim=16), device)
    q, k, v = make_inputs(problem, device=device)
    o = sdpa_of_torch(q, k, v, attn_mask=causal_lower_right(24, 40))
    torch.testing.assert_close(o, ours(q, k, v, causal="bottom_right")[0])
    assert len(active) == 1
