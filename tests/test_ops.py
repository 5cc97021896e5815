"""The operators: PyTorch's own checks, the compiler, vmap, and the same bits every time."""

from dataclasses import replace
from itertools import count

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from flashattn import attention, gpus, ops, tiled
from flashattn.bounds import of_rows
from flashattn.impls import sdpa
from flashattn.mask import FULL
from flashattn.plan.spec import Extras
from flashattn.prepare import prepare
from flashattn.problem import Problem
from flashattn.testing.inputs import make_grads, make_inputs
from flashattn.testing.layouts import scattered, shifted

# One tile per head: the operators' promises need no more, and interpreted tiles take long.
PROBLEM = Problem(heads=4, kv_heads=2, seq_q=32, seq_kv=24, head_dim=16)
# Diagonal, scale, softcap, precision, kernels, deterministic.
OPTIONS = 0, 0.25, None, "auto", "triton", True


def arguments(device, layout="contiguous", problem=PROBLEM):
    """Return q, k, v that need gradients."""
    return [x.detach().requires_grad_() for x in make_inputs(problem, device=device, layout=layout)]


@pytest.mark.parametrize(
    ("layout", "left", "right"),
    [
        ("contiguous", None, None),
        ("sequence_first", None, 0),
        ("strided", None, -8),
        ("expanded", 3, None),
    ],
)
def test_opcheck(device, layout, left, right):
    """Schema, fake tensors, autograd and dynamic shapes agree with what the operator does."""
    q, k, v = arguments(device, layout)
    given = (q, k, v, *Extras(), left, right, *OPTIONS)
    torch.library.opcheck(torch.ops.flashattn.forward, given)


NARROW = replace(PROBLEM, value_dim=8)


@pytest.mark.parametrize("layout", ["contiguous", "sequence_first", "strided", "columns"])
def test_opcheck_of_narrow_values(device, layout):
    """Both operators pass opcheck when values have fewer columns than keys, in each layout."""
    columns = layout == "columns"  # each column is dense
    q, k, v = arguments(device, "contiguous" if columns else layout, NARROW)
    inputs = [scattered(x.detach()) if columns else x.detach() for x in (q, k, v)]
    q, k, v = (x.detach().requires_grad_() for x in inputs)
    how = (*Extras(), None, 0, *OPTIONS)
    torch.library.opcheck(torch.ops.flashattn.forward, (q, k, v, *how))
    saved = (*inputs, *torch.ops.flashattn.forward(*inputs, *how))
    given = (*make_grads(NARROW, device=device), *saved, *how, False)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.flashattn.backward, given, test_utils=checks)


EXTRAS = {  # of q [B, H, T, D] and k
    "bounds": lambda q, k: Extras(
        *of_rows(*torch.arange(2 * q.shape[2], device=q.device).view(2, 1, -1), k.shape[2])
    ),
    "slopes": lambda q, k: Extras(
        alibi_slopes=torch.linspace(0, 1, q.shape[1], device=q.device)[None]
    ),
    "bias": lambda q, k: Extras(
        bias=torch.randn(1, q.shape[1], q.shape[2], k.shape[2], device=q.device)
    ),
    "relative bias and sinks": lambda q, k: Extras(
        bias=torch.randn(1, q.shape[1], q.shape[2] + k.shape[2] - 1, device=q.device),
        sink=torch.linspace(-1, 1, q.shape[1], device=q.device)[None],
    ),
}


@pytest.mark.parametrize("extras", EXTRAS)
def test_opcheck_with_extras(device, extras):
    """The forward operator passes opcheck with tensors besides q, k and v."""
    q, k, v = arguments(device)
    given = [q, k, v, *EXTRAS[extras](q, k), None, None, *OPTIONS]
    for i in (ops.FORWARD - 2, ops.FORWARD - 1):
        given[i] = None if given[i] is None else given[i].requires_grad_()
    torch.library.opcheck(torch.ops.flashattn.forward, given)


@pytest.mark.parametrize("extras", [None, *EXTRAS])
def test_opcheck_backward(device, extras):
    """The backward operator passes opcheck, with and without extra tensors."""
    q, k, v = (x.detach() for x in arguments(device))
    grad_o, grad_lse = make_grads(PROBLEM, device=device)
    how = (*(EXTRAS[extras](q, k) if extras else Extras()), *(None, None), *OPTIONS)
    o, lse = torch.ops.flashattn.forward(q, k, v, *how)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    for gradient in (grad_lse, None) if extras is None else (grad_lse,):
        saved = (grad_o, gradient, q, k, v, o, lse, *how, True)
        torch.library.opcheck(torch.ops.flashattn.backward, saved, test_utils=checks)


class Watcher(TorchDispatchMode):
    """A mode that records which operators are called."""

    def __init__(self):
        """Start with no calls."""
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Record the operator and call it."""
        self.seen.append(str(func))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("grad", [False, True])
def test_who_watches_sees_the_operators(device, grad):
    """A mode sees the operators as a whole; without a mode the bits are the same."""
    q, k, v = (x.requires_grad_(grad) for x in arguments(device))

    def run():
        o = attention(q, k, v, causal=True, impl="triton")
        return [o, *torch.autograd.grad(o.sum(), (q, k, v))] if grad else [o]

    alone = run()
    with Watcher() as watcher:
        watched = run()
    assert all(map(torch.equal, alone, watched))
    assert "flashattn.forward.default" in watcher.seen
    assert ("flashattn.backward.default" in watcher.seen) is grad


def test_who_watches_the_backward_alone_sees_it(device):
    """A mode that is active only during the backward sees the backward operator."""
    inputs = arguments(device)
    o = attention(*inputs, impl="triton")
    exact = torch.autograd.grad(o.sum(), inputs, retain_graph=True)
    with Watcher() as watcher:
        watched = torch.autograd.grad(o.sum(), inputs)
    assert "flashattn.backward.default" in watcher.seen
    assert all(map(torch.equal, watched, exact))


@pytest.mark.parametrize(
    ("causal", "problem"),
    [(False, PROBLEM), ("top_left", PROBLEM), ("bottom_right", PROBLEM), (False, NARROW)],
    ids=str,
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(device, causal, problem, dynamic):
    """torch.compile makes one graph of attention, forward and backward, and changes no bit."""
    q, k, v = arguments(device, problem=problem)

    def call(q, k, v):
        return attention(q, k, v, causal=causal, return_lse=True, impl="triton")

    torch.compiler.reset()
    o, lse = torch.compile(call, fullgraph=True, dynamic=dynamic)(q, k, v)
    wanted = call(q, k, v)
    assert torch.equal(o, wanted[0])
    assert torch.equal(lse, wanted[1])
    got, gradients = (torch.autograd.grad(x.sum(), (q, k, v)) for x in (o, wanted[0]))
    assert all(torch.equal(a, b) for a, b in zip(got, gradients, strict=True))


def test_compile_auto(device):
    """Attention that chooses its implementation compiles as one graph, with all its options."""
    q, k, v = arguments(device)
    how = {"causal": True, "precision": "ieee", "deterministic": False}
    torch.compiler.reset()
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, **how), fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), attention(q, k, v, **how))


def test_vmap(device):
    """Vmap folds the mapped dimension into the batch; a tensor that is not mapped is shared.

    In half precision, since how fp32 is multiplied depends on the size of the problem.
    """
    half = replace(NARROW, dtype="float16")
    q, k, v = (x.detach() for x in arguments(device, problem=half))
    stacked = torch.stack([q, q + 1, q - 1], dim=1)
    got = torch.func.vmap(lambda q, k: attention(q, k, v, impl="triton"), in_dims=(1, None))(
        stacked, k
    )
    folded = stacked.transpose(0, 1).flatten(0, 1)
    wanted = attention(folded, *(x.repeat(3, 1, 1, 1) for x in (k, v)), impl="triton")
    assert torch.equal(got.flatten(0, 1), wanted)
    one_by_one = torch.stack([attention(x, k, v, impl="triton") for x in stacked.unbind(1)])
    assert torch.equal(got, one_by_one)


@pytest.mark.parametrize("dim", [0, 2])
def test_vmap_of_tiled(dim, device):
    """The vmap rule of ``tiled`` moves the mapped dimension to the front and shares the others."""
    q, k, v = (x.detach() for x in arguments(device))

    def attend(k):
        return tiled._Tiled.apply(q[:, :2], k, v, *[None] * 4, FULL, 0.25, None, 0, q.shape[2])

    many = torch.stack([k, -k], dim=dim)
    wanted = [torch.stack(x) for x in zip(*map(attend, (k, -k)), strict=True)]
    torch.testing.assert_close(torch.vmap(attend, dim)(many), tuple(wanted))


NAMES = ("triton", "tiled", "reference", "sdpa", "auto")
BY_NAME = pytest.mark.parametrize("name", NAMES)


def loss_of(name, like=None):
    """Return a loss of q, k and v through o, and through lse if ``like`` returns one."""
    lse = (like or name) in ("triton", "tiled", "reference")

    def loss(q, k, v):
        outputs = attention(q, k, v, causal=True, return_lse=lse, impl=name)
        return sum(x.square().sum() for x in (outputs if lse else (outputs,)))

    return loss


def plain_gradients(loss, *inputs):
    """Return autograd's gradients, without a transform."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    return torch.autograd.grad(loss(*inputs), inputs)


def vjp_later(loss, *, grad):
    """Return a function that takes gradients after the transform has ended."""

    def gradients(*inputs):
        value, pull = torch.func.vjp(loss, *inputs)
        with torch.set_grad_enabled(grad):
            return pull(torch.ones_like(value))

    return gradients


GRADIENTS = {
    "grad": lambda loss: torch.func.grad(loss, argnums=(0, 1, 2)),
    "vjp": lambda loss: vjp_later(loss, grad=True),
    "vjp without gradients of its own": lambda loss: vjp_later(loss, grad=False),
    "compiled": lambda loss: torch.compile(
        torch.func.grad(loss, argnums=(0, 1, 2)), fullgraph=True, backend="aot_eager"
    ),
}


@BY_NAME
@pytest.mark.parametrize("transform", GRADIENTS)
def test_gradients_by_function(name, transform, device):
    """torch.func's gradients are autograd's."""
    q, k, v = (x.detach() for x in arguments(device))
    loss = loss_of(name)
    torch.compiler.reset()
    got = GRADIENTS[transform](loss)(q, k, v)
    torch.testing.assert_close(got, plain_gradients(loss, q, k, v))


@BY_NAME
@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet impl")
@pytest.mark.parametrize("order", ["vmap of grad", "grad of vmap"])
def test_gradients_of_many(name, order, device):
    """Mapped gradients and gradients of a map are those of one input after the other."""
    q, k, v = (x.detach() for x in arguments(device))
    loss, many = loss_of(name), torch.stack([q, q + 1, -q], dim=1)
    grad, dims = torch.func.grad, (1, None, None)
    if order == "vmap of grad":
        got = torch.vmap(grad(loss, argnums=(0, 1, 2)), dims, out_dims=1)(many, k, v)
    else:
        got = grad(lambda *x: torch.vmap(loss, dims)(*x).sum(), argnums=(0, 1, 2))(many, k, v)
    each = zip(*(plain_gradients(loss, x, k, v) for x in many.unbind(1)), strict=True)
    wanted = [torch.stack(x, dim=1) for x in each]
    if order == "grad of vmap":
        wanted[1:] = (x.sum(1) for x in wanted[1:])
    torch.testing.assert_close(got, tuple(wanted))


@pytest.mark.parametrize("name", ["triton", "tiled"])
def test_second_derivatives_by_function(name, device):
    """Second derivatives are refused as autograd's are, within a transform and around one."""
    q, k, v = arguments(device)
    grad, words = torch.func.grad, 'has no second derivative; impl="reference" has'

    def first(q):
        return grad(loss_of(name))(q, k.detach(), v.detach()).sum()

    with pytest.raises(NotImplementedError, match=words):
        grad(first)(q.detach())
    dq = grad(loss_of(name))(q.detach(), k, v.detach())
    with pytest.raises(NotImplementedError, match=words):
        torch.autograd.grad(dq.sum(), k)


def dual(f, x, tangent):
    """Return a forward-mode derivative without torch.func."""
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(f(forward_ad.make_dual(x, tangent)))
        return torch.zeros_like(out.primal) if out.tangent is None else out.tangent


def jvp(f, x, tangent):
    """Return a forward-mode derivative by torch.func."""
    return torch.func.jvp(f, (x,), (tangent,))[1]


FORWARD_MODE = {
    "dual": dual,
    "jvp": jvp,
    "jvp of vmap": lambda f, x, t: jvp(lambda x: torch.vmap(f)(x[None])[0], x, t),
    "vmap of jvp": lambda f, x, t: torch.vmap(lambda x: jvp(f, x, t))(x[None])[0],
}


@pytest.mark.parametrize("name", [*NAMES, "sdpa_math"])  # in fp64 on a GPU PyTorch uses its math
@pytest.mark.parametrize("transform", FORWARD_MODE)
@pytest.mark.parametrize("inner", ["value", "gradient"])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_forward_mode(name, transform, inner, needs_grad, device):
    """A forward-mode derivative is right, or refused by naming the reference; never silently 0."""
    dtype = "float64" if name in ("reference", "sdpa", "sdpa_math") else "float32"
    given = arguments(device, problem=replace(PROBLEM, dtype=dtype))
    q, k, v = (x.requires_grad_(needs_grad) for x in given)
    tangent = torch.ones_like(q.detach())

    def asked(of):
        def value(q):
            return loss_of(of, like=name)(q, k, v)

        def gradient(q):
            return (torch.func.grad(value)(q) * tangent).sum()

        return value if inner == "value" else gradient

    try:
        got = FORWARD_MODE[transform](asked(name), q, tangent)
    except NotImplementedError as error:
        assert str(error).endswith('has no forward-mode derivative; impl="reference" has')  # noqa: PT017
        assert name != "reference"
    else:
        (dq,) = plain_gradients(asked("reference"), q)
        torch.testing.assert_close(got, (dq * tangent).sum())


def test_other_errors_of_sdpa_are_its_own(device, monkeypatch):
    """Any other NotImplementedError of SDPA is passed on as it is."""

    def fail(*_, **__):
        raise NotImplementedError("something else")

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", fail)
    with pytest.raises(NotImplementedError, match="something else"):
        attention(*arguments(device), impl="sdpa")


def test_outputs_keep_the_layout(device):
    """O has the memory layout of q, so that merging its heads copies nothing."""
    q, k, v = (x.detach() for x in arguments(device, "sequence_first"))
    assert attention(q, k, v, impl="triton").stride() == q.stride()
    narrow = torch.empty_like(q[..., :8])
    assert attention(q, k, v[..., :8], impl="triton").stride() == narrow.stride()


@pytest.mark.parametrize(("seq_q", "seq_kv"), [(5, 0), (0, 5)])
def test_empty_problems_keep_the_layout_that_tracing_promises(seq_q, seq_kv, device):
    """Also where nothing is launched, results lie as those of the fake operators."""
    sizes = {"q": seq_q, "k": seq_kv, "v": seq_kv}
    q, k, v = (torch.randn(2, 2, 8, n, device=device).mT for n in sizes.values())
    given = [x.requires_grad_() for x in (q, k, v)]

    def strides(*given):
        o = attention(*given, impl="triton")
        results = (o, *torch.autograd.grad(o.sum(), given))
        return [x.stride() for x in results if x.numel()]  # PyTorch lays out empty fakes otherwise

    got = strides(*given)
    with FakeTensorMode() as mode:
        assert strides(*(mode.from_tensor(x) for x in given)) == got


@pytest.mark.parametrize("move", [scattered, shifted])
def test_inputs_may_lie_anyhow(device, move):
    """Each input is read by its own strides and address, or copied if its rows are not dense."""
    given = [x.detach() for x in arguments(device)]
    exact = attention(*given, causal=True, impl="triton")
    for i, x in enumerate(given):
        moved = *given[:i], move(x), *given[i + 1 :]
        assert torch.equal(attention(*moved, causal=True, impl="triton"), exact)


@pytest.mark.parametrize("move", [scattered, shifted])
@pytest.mark.parametrize("which", range(5))
def test_saved_tensors_may_move(device, move, which):
    """Saved-tensor hooks may give back tensors with other strides and addresses.

    The same forward has had gradients before, with saved tensors that were not moved.
    """
    inputs = arguments(device)
    grad_o, _ = make_grads(PROBLEM, device=device)

    def gradients():
        o = attention(*inputs, causal=True, impl="triton")
        return torch.autograd.grad(o, inputs, grad_o)

    exact, numbers = gradients(), count()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: (next(numbers), x.clone()),
        lambda kept: move(kept[1]) if kept[0] == which else kept[1],
    ):
        moved = gradients()
    assert next(numbers) == 5
    assert all(map(torch.equal, moved, exact))
    assert all(map(torch.equal, gradients(), exact))


def test_gradients_may_lie_anyhow(device):
    """Output gradients are read by their own strides and addresses, whatever the forward had."""
    inputs = arguments(device)
    dense, lse = make_grads(PROBLEM, device=device)
    one = dense.new_ones(()).expand_as(dense)

    def gradients(*grads):
        outputs = attention(*inputs, return_lse=True, impl="triton")
        some = [i for i, x in enumerate(grads) if x is not None]
        return torch.autograd.grad([outputs[i] for i in some], inputs, [grads[i] for i in some])

    for given in (
        (dense, lse),
        (scattered(dense), lse),
        (shifted(dense), lse),
        (dense, scattered(lse)),
        (dense, shifted(lse)),
        (dense, None),
        (one, None),
        (None, lse),
    ):
        copies = (None if x is None else x.clone().contiguous() for x in given)
        assert all(map(torch.equal, gradients(*given), gradients(*copies)))


def test_gradients_are_of_the_precision_that_torch_allows_then(device, matmul):
    """Backward multiplies fp32 as PyTorch's setting says at that time, not as it said before."""
    inputs = arguments(device)
    prepared = prepare(*inputs)
    for plans, precision in ((1, "ieee"), (2, "tf32"), (2, "ieee")):
        o, _ = prepared(*inputs)
        matmul.fp32_precision = precision
        torch.autograd.grad(o.sum(), inputs)
        assert len(prepared._backwards) == plans


def test_gradients_plans_are_few(device, monkeypatch):
    """Gradients whose strides keep changing leave only a bounded number of plans in memory."""
    monkeypatch.setattr(ops, "MOST_BACKWARDS", 2)
    q, k, v = arguments(device)
    prepared = prepare(q, k, v)
    wide = torch.ones(*q.shape[:3], 40, device=device)
    for n in range(16, 21):
        o, _ = prepared(q, k, v)
        torch.autograd.grad(o, (q, k, v), torch.as_strided(wide, o.shape, (0, 0, n, 1)))
        assert 1 <= len(prepared._backwards) <= 2


def test_a_forward_without_gradients_saves_nothing(device):
    """Where gradients are disabled or not needed, o has no history, whatever ran before."""
    inputs = arguments(device)
    assert attention(*inputs, impl="triton").requires_grad
    with torch.no_grad():
        assert not attention(*inputs, impl="triton").requires_grad
    with torch.inference_mode():
        assert attention(*inputs, impl="triton").is_inference()
    assert attention(*inputs, impl="triton").requires_grad
    for i in range(3):
        given = [x.detach().requires_grad_(i == j) for j, x in enumerate(inputs)]
        assert attention(*given, impl="triton").requires_grad
    assert not attention(*(x.detach() for x in inputs), impl="triton").requires_grad


def test_why_not():
    """A limit is a sentence that names what works instead."""
    cpu = torch.device("cpu")
    assert "tiled and reference" in gpus.why_not(Problem(dtype="float64"), cpu)
    assert "up to 256" in gpus.why_not(Problem(head_dim=257), cpu)
    assert "not on meta" in gpus.why_not(Problem(), torch.device("meta"))


@pytest.mark.parametrize(
    ("triton", "numpy", "fails"),
    [("3.6.0", "2.4.1", True), ("3.6.0", "2.3.5", False), ("3.7.0", "2.4.1", False)],
)
def test_an_interpreter_that_fails_is_told(triton, numpy, fails):
    """A numpy that Triton 3.6's interpreter cannot use is refused, with a reason and a remedy."""
    reason = gpus.why_not_interpreted(triton, numpy)
    assert (reason is not None) is fails
    assert not fails or "pip install 'numpy<2.4'" in reason
