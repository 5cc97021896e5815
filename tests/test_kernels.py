"""The portable kernels: launches, loading, split keys, fp32's precision, 64-bit offsets."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import replace
from inspect import signature
from threading import Thread
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton.language as tl
from triton import jit
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime.interpreter import InterpreterBuilder

from flashattn import api, attention
from flashattn.counts import single_kernel
from flashattn.counts.single_kernel import Recomputation
from flashattn.gpus import gpu_of
from flashattn.kernels import execute, launch
from flashattn.kernels.constants import HALF_BIT
from flashattn.kernels.counters import MOST
from flashattn.kernels.portable import mma, steps
from flashattn.plan import portable, tables
from flashattn.plan.gpu import CARDS
from flashattn.plan.precision import input_precision
from flashattn.plan.rows import Limits
from flashattn.plan.spec import Extras, Options, TensorSpec
from flashattn.plan.spec import signature as specs_of
from flashattn.plan.splits import num_splits, split
from flashattn.plan.tile import Tile
from flashattn.problem import Problem
from flashattn.testing.accuracy import Sample, assert_accurate, relative_errors
from flashattn.testing.inputs import make_grads, make_inputs
from flashattn.testing.layouts import scattered, shifted
from flashattn.testing.poison import guard


def forget():
    """Drop all plans."""
    api._PLANS.clear()
    for bound in (execute.bind_forward, execute.bind_backward, single_kernel._alone):
        bound.cache_clear()


@pytest.fixture
def limited(monkeypatch):
    """Return a function that changes the limits of every table, and the number of splits."""
    rows_of = tables.rows_of

    def change(splits=None, **limits):
        def changed(gpu):
            rows = rows_of(gpu)
            return replace(rows, limits=replace(rows.limits, **limits))

        monkeypatch.setattr(tables, "rows_of", changed)
        if splits is not None:
            monkeypatch.setattr(
                portable, "split", lambda rows, block, _: split(rows, block, splits)
            )
        forget()

    yield change
    forget()


def triton(causal, **options):
    """Return the Triton implementation with its mask bound."""
    return lambda q, k, v: attention(
        q, k, v, causal=causal, return_lse=True, impl="triton", **options
    )


def test_both_ways_of_loading_are_tested(device):
    """Contiguous inputs get descriptors if the table has them, misaligned ones pointers."""
    if device.type == "cuda" and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("this GPU has no descriptors")
    for layout, descriptors in (("contiguous", True), ("misaligned", False), ("expanded", False)):
        n = 8 if device.type == "cpu" else 512  # enough to do
        problem = Problem(heads=2, seq_q=n, head_dim=64, dtype="float16")
        specs = map(TensorSpec.of, make_inputs(problem, device=device, layout=layout))
        how = {"gpu": gpu_of(device), "causal": False, "precision": "ieee"}
        assert portable.tile_of("fwd", *specs, **how).descriptors is descriptors


@pytest.mark.parametrize(
    ("sizes", "descriptors"),
    [
        ({"heads": 4, "seq_q": 64, "seq_kv": 64}, False),
        ({"heads": 4, "seq_q": 64, "seq_kv": 65}, True),
        ({"heads": 4, "seq_q": 65, "seq_kv": 64}, True),
        ({"heads": 5, "seq_q": 64, "seq_kv": 64}, True),
        ({"heads": 4, "seq_q": 64, "seq_kv": 64, "batch": 2}, True),
        ({"heads": 4, "seq_q": 1, "seq_kv": 64}, False),
        ({"heads": 4, "seq_q": 1, "seq_kv": 65}, True),  # a tile of queries holds 1 or 64
    ],
)
def test_tiny_problems_are_loaded_by_pointers(sizes, descriptors, limited):
    """With few scores, the table's tile for pointers is taken."""
    limited(pointers=4 * 64 * 64)
    q, k, v = map(TensorSpec.of, make_inputs(Problem(**sizes, head_dim=64, dtype="bfloat16")))
    rows = tables.rows_of(CARDS["H200"])
    how = {"gpu": CARDS["H200"], "causal": False, "precision": "ieee"}
    for kernel, *inputs in (("fwd", q, k, v), ("bwd_dkdv", q, k, v, q), ("bwd_dq", q, k, v, q)):
        tile = portable.tile_of(kernel, *inputs, **how)
        assert tile.descriptors is descriptors
        assert tile is tables.find(rows, kernel, 2, 64, causal=False, large=descriptors)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("layout", ["contiguous", "packed"])
def test_loading_changes_no_bit(device, layout, dtype):
    """Descriptors and pointers give the same bits with the same tile, also for decomposed fp32."""
    problem = Problem(heads=2, seq_q=45, seq_kv=70, head_dim=24, dtype=dtype, causal=True)
    q, k, v = make_inputs(problem, device=device, layout=layout)
    grad_o, grad_lse = make_grads(problem, device=device)
    how = {"right": problem.band.right, "scale": 0.2}
    results = []
    for descriptors in (True, False):
        tile = Tile(32, 32, 4, 1, descriptors, decomposed=dtype == "float32")
        o, lse = execute.forward(q, k, v, tile=tile, **how)
        given = Recomputation(q=q, k=k, v=v, grad_o=grad_o, grad_lse=grad_lse, o=o, lse=lse, **how)
        kernels = steps.KERNELS.keys() - ({"bwd_one_launch"} if tile.decomposed else set())
        passes = {kernel: given.gradients(kernel, tile) for kernel in sorted(kernels)}
        apart = [*passes["bwd_dkdv"], *passes["bwd_dq"]]
        assert all(torch.equal(a, b) for a, b in zip(passes["bwd_fused"], apart, strict=True))
        results.append([o, lse, *itertools.chain(*passes.values())])
    for by_descriptor, by_pointer in zip(*results, strict=True):
        assert torch.equal(by_descriptor, by_pointer)


@pytest.mark.parametrize("layout", ["contiguous", "misaligned"])
def test_like_inputs_are_launched_again(device, layout, monkeypatch):
    """Inputs with a known signature skip Triton's launcher, and get results of their own."""
    problem = Problem(heads=2, seq_q=33, seq_kv=50, head_dim=16, dtype="float16", causal=True)
    draws = [make_inputs(problem, seed=seed, device=device, layout=layout) for seed in (0, 1)]
    grads = make_grads(problem, device=device)

    def answers(inputs):
        q, k, v = (x.detach().requires_grad_() for x in inputs)
        outputs = triton("top_left")(q, k, v)
        return [*outputs, *torch.autograd.grad(outputs, (q, k, v), grads)]

    wanted = []
    for inputs in draws:
        forget()
        wanted.append(answers(inputs))
    firsts, first = [], launch.KernelLaunch._first

    def note(self, tensors):
        firsts.append(self)
        return first(self, tensors)

    monkeypatch.setattr(launch.KernelLaunch, "_first", note)
    for inputs, exact in zip(draws, wanted, strict=True):
        got = answers(inputs)
        assert all(torch.equal(a, b) for a, b in zip(got, exact, strict=True))
    assert bool(firsts) == (device.type == "cpu")  # there every launch is interpreted


def test_unlike_inputs_are_not():
    """Specs are equal only if size, strides, dtype, device and alignment are."""
    x = torch.zeros(2, 2, 9, 16)
    others = (
        torch.zeros(2, 2, 10, 16),
        scattered(x),
        x.half(),
        x.to("meta"),
        torch.zeros(x.numel() + 1)[1:].view(x.shape),
    )
    assert TensorSpec.of(x) == TensorSpec.of(torch.ones_like(x))
    assert len({TensorSpec.of(x), *map(TensorSpec.of, others)}) == 6
    assert len({*specs_of(x, torch.ones_like(x), *others)}) == 6


def planned(bind):
    """Return how many plans are bound."""
    return bind.cache_info().currsize


# What the passes depend on, besides the tensors.
NUMBERS = {"right": 0, "scale": 0.25, "precision": "ieee"}
OTHER_NUMBERS = ({"right": None}, {"left": 1}, {"scale": 0.5}, {"precision": "tf32"})


def test_a_forward_plan_is_of_all_that_it_depends_on(device):
    """A change in anything that a launch depends on makes a new plan; equal calls make none."""
    given = list(make_inputs(Problem(heads=2, seq_q=9, head_dim=16), device=device))
    execute.bind_forward.cache_clear()
    for _ in range(2):
        execute.forward(*given, **NUMBERS)
        assert planned(execute.bind_forward) == 1
    for i, x in enumerate(given):
        for other in (shifted(x), scattered(x)):
            execute.forward(*given[:i], other, *given[i + 1 :], **NUMBERS)
    assert planned(execute.bind_forward) == 7
    for n, other in enumerate(OTHER_NUMBERS, 8):
        execute.forward(*given, **(NUMBERS | other))
        assert planned(execute.bind_forward) == n
    execute.forward(*given, **NUMBERS, tile=Tile(32, 32, 4, 1))
    execute.forward(*given, **NUMBERS, num_splits=1)
    execute.forward(*(x.half() for x in given), **NUMBERS)
    assert planned(execute.bind_forward) == 14


def test_a_backward_plan_is_of_all_that_it_depends_on(device):
    """A change in anything that a backward kernel depends on makes a new plan."""
    problem = Problem(heads=2, seq_q=9, head_dim=16)
    given = list(make_inputs(problem, device=device))
    given += execute.forward(*given, **NUMBERS)
    grad_o, grad_lse = make_grads(problem, device=device)
    execute.bind_backward.cache_clear()
    for _ in range(2):
        execute.backward((grad_o, grad_lse), given, **NUMBERS)
        assert planned(execute.bind_backward) == 1
    for i, x in enumerate(given):
        execute.backward((grad_o, grad_lse), [*given[:i], shifted(x), *given[i + 1 :]], **NUMBERS)
        assert planned(execute.bind_backward) == 2 + i
    others = (grad_o, None), (shifted(grad_o), grad_lse), (grad_o, shifted(grad_lse))
    for n, grads in enumerate(others, 7):
        execute.backward(grads, given, **NUMBERS)
        assert planned(execute.bind_backward) == n
    for n, other in enumerate(OTHER_NUMBERS, 10):
        execute.backward((grad_o, grad_lse), given, **(NUMBERS | other))
        assert planned(execute.bind_backward) == n


def test_a_plan_bound_among_poison_holds_no_outputs(device):
    """Outputs of a plan bound under ``guard`` are freed after use, and guarded only under it."""
    inputs = make_inputs(Problem(heads=2, seq_q=9, head_dim=16), device=device)
    execute.bind_forward.cache_clear()
    with guard(*inputs) as given:
        execute.forward(*given, **NUMBERS)
    o, lse = execute.forward(*inputs, **NUMBERS)
    assert lse.untyped_storage().nbytes() == lse.nbytes
    made = weakref.ref(lse)
    del o, lse
    assert made() is None
    with guard(*inputs):
        _, lse = execute.forward(*inputs, **NUMBERS)
    assert lse.untyped_storage().nbytes() > lse.nbytes


class Driver:
    """A fake CUDA driver, in which a thread has the given context, or none."""

    def __init__(self, context):
        """Start with no contexts made current."""
        self.context, self.bound, self.asked = context, [], 0

    def cuCtxGetCurrent(self, pointer):  # noqa: N802
        """Return the thread's context."""
        self.asked += 1
        pointer._obj.value = self.context

    def cuDevicePrimaryCtxRetain(self, pointer, device):  # noqa: N802
        """Return a context that encodes its device."""
        pointer._obj.value = 100 + device

    def cuCtxSetCurrent(self, context):  # noqa: N802
        """Record the context."""
        self.bound.append(context.value)


@pytest.mark.parametrize(("context", "bound"), [(None, [103]), (7, [])])
def test_a_new_thread_has_a_context(context, bound, monkeypatch):
    """A thread's first launch keeps its context or sets one; later launches do not ask."""
    cuda = Driver(context)
    monkeypatch.setattr(launch.ctypes, "CDLL", lambda name: cuda)
    monkeypatch.setattr(launch, "_current_device", lambda: 3)
    x = SimpleNamespace(get_device=lambda: 3)
    for turn in (1, 2):
        thread = Thread(target=lambda: [launch.on_device(x) for _ in range(2)])
        thread.start()
        thread.join()
        assert (cuda.bound, cuda.asked) == (bound * turn, turn)


def test_a_launcher_takes_what_it_is_given():
    """The launcher of the installed Triton takes its arguments in this order."""
    names = list(signature(CudaLauncher.__call__).parameters)
    assert names[:6] == ["self", "gridX", "gridY", "gridZ", "stream", "function"]


SPLITS = (
    Problem(heads=4, kv_heads=2, seq_q=1, seq_kv=300, head_dim=16, dtype="bfloat16"),
    Problem(batch=2, heads=4, kv_heads=1, seq_q=1, seq_kv=130, head_dim=32, causal="bottom_right"),
    Problem(heads=2, kv_heads=1, seq_q=1, seq_kv=200, head_dim=16, causal="top_left"),  # one key
    Problem(heads=2, seq_q=7, seq_kv=190, head_dim=24, causal="bottom_right", dtype="float16"),
    Problem(seq_q=70, seq_kv=300, head_dim=16, causal="top_left"),  # splits that no query sees
    Problem(seq_q=70, seq_kv=300, head_dim=16, causal="top_left", dtype="bfloat16"),
    Problem(seq_q=150, seq_kv=130, head_dim=16, causal="bottom_right"),  # fully masked rows
)


@pytest.mark.parametrize("num_splits", [2, 1000])
@pytest.mark.parametrize("problem", SPLITS, ids=str)
def test_split_keys(device, problem, num_splits, limited):
    """For any number of splits, o, lse and their gradients are within the budgets."""
    limited(splits=num_splits)
    assert_accurate(triton(problem.causal), Sample(problem=problem, device=device))


@pytest.mark.parametrize("num_splits", [2, 1000])
@pytest.mark.parametrize("problem", SPLITS, ids=str)
def test_splits_leave_counters_zero(device, problem, num_splits, limited, monkeypatch):
    """Counters of splits are zero again for the next kernel of the stream."""
    limited(splits=num_splits)
    shared = torch.zeros(MOST, dtype=torch.int32, device=device)
    monkeypatch.setattr(execute, "counters", lambda *_: shared)
    sample = Sample(problem=problem, device=device, grad=False)
    for _ in range(2):
        assert_accurate(triton(problem.causal), sample)
        assert not shared.any()


@pytest.mark.drawn("head_dim", "dtype")
@pytest.mark.parametrize(("apart", "num_splits"), [(0, 1), (1, 2), (4, 1), (4, 2)])
@pytest.mark.parametrize("head_dim", [6, 20, 40])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])  # fp32 comes decomposed
def test_columns_come_together(device, head_dim, apart, num_splits, dtype, limited):
    """Columns load as many at once as D and the row stride allow; NaN between rows is not read."""
    limited(splits=num_splits)
    attend = triton("bottom_right")

    def spread(x):
        return torch.nn.functional.pad(x, (0, apart), value=float("nan"))[..., :head_dim]

    problem = Problem(
        heads=2, seq_q=40, seq_kv=150, head_dim=head_dim, dtype=dtype, causal="bottom_right"
    )
    assert_accurate(
        lambda *inputs: attend(*map(spread, inputs)), Sample(problem=problem, device=device)
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("few", "num_splits", "tiny"),
    [
        (True, 1, True),
        (True, 1, False),
        (True, 2, True),
        (True, 2, False),
        (False, 1, True),
        (False, 2, False),
    ],
)
def test_backward_is_few_launches(device, dtype, few, num_splits, tiny, limited, monkeypatch):
    """The backward is one preprocess, one decompose, one or two passes and one reduction.

    A tiny problem takes a single launch.
    """
    problem = Problem(seq_q=384, head_dim=16, dtype=dtype)
    most = 1000 if few else 0
    limited(num_splits, fused=most, fused_decomposed=most, one_launch=1 << 20 if tiny else 0)
    inputs = make_inputs(problem, device=device)
    how = {"gpu": gpu_of(device), "causal": False}
    how["precision"] = input_precision("auto", problem.torch_dtype)
    fused, one_launch = (
        portable.finder(*map(TensorSpec.of, inputs), **how)(kernel)
        for kernel in ("bwd_fused", "bwd_one_launch")
    )
    launched = []

    def note(self, *_):
        launched.append(self._kernel.fn.__name__.removeprefix("flashattn_"))

    q, k, v = (x.requires_grad_() for x in inputs)
    monkeypatch.setattr(launch.KernelLaunch, "__call__", note)  # launches need not run
    o, _ = triton(False)(q, k, v)
    launched.clear()
    torch.autograd.grad(o.sum(), (q, k, v), retain_graph=True)
    passes = ["bwd"] if few and fused else ["bwd_dkdv", "bwd_dq"]
    terms, sums = ["decompose"] * (dtype == "float32"), ["bwd_reduce"] * (num_splits > 1)
    one = tiny and one_launch and passes == ["bwd"] and not sums
    assert launched == (["bwd"] if one else ["bwd_preprocess", *terms, *passes, *sums])


@pytest.mark.parametrize(
    ("dtype", "head_dim", "most"),
    [("bfloat16", 64, 8), ("float32", 32, 8), ("float32", 33, 2), ("float32", 64, 2)],
)
def test_small_grids_of_the_backward(dtype, head_dim, most):
    """Both passes are one launch up to 8 programs per SM, or 2 for wide decomposed fp32."""
    tile, gpu = Tile(64, 32, 4, 1, descriptors=True, decomposed=True), CARDS["H200"]
    heads = gpu.num_sms * most // 2  # each a tile of queries and one of keys
    for rows in (64, 65):
        problem = Problem(heads=heads, seq_q=rows, seq_kv=32, head_dim=head_dim, dtype=dtype)
        q, k, _ = map(TensorSpec.of, make_inputs(problem))
        precision = input_precision("auto", problem.torch_dtype)
        assert portable.small_grid(q, k, tile, gpu, precision) is (rows == 64)


@pytest.mark.parametrize("scale", [0.2, -0.2])
def test_ties_weigh_the_same_in_every_tile(device, scale):
    """Two keys of equal score get equal weights, even if one lies in a masked tile."""
    high = 1.7 if scale > 0 else -1.7
    q = torch.full((1, 1, 40, 64), 3.3, device=device)
    k = torch.full((1, 1, 129, 64), -high, device=device)
    k[:, :, [0, 128]] = high
    v = torch.zeros(1, 1, 129, 64, device=device)
    v[:, :, 0], v[:, :, 128] = 1.0, -1.0
    o, _ = triton(False, scale=scale)(q, k, v)
    assert torch.equal(o, torch.zeros_like(o))


@pytest.mark.parametrize("kernel", Limits().split)
@pytest.mark.parametrize("programs", [1, 7, 100, 100_000])
@pytest.mark.parametrize("seq_kv", [1, 64, 65, 1000, 2**20])
def test_splits_are_whole_tiles_and_cover_the_keys(kernel, programs, seq_kv):
    """Every key is in one split, no split is empty, and many programs are not split."""
    most = num_splits(Limits().split[kernel], programs, -(-seq_kv // 64), 132)
    num, length = split(seq_kv, 64, most)
    assert length % 64 == 0
    assert (num - 1) * length < seq_kv <= num * length
    if programs == 100_000:
        assert num == 1
    if (programs, seq_kv) == (1, 2**20):
        assert num > 1


@pytest.mark.parametrize("causal", [False, True])
def test_small_grids_split_long_rows(causal):
    """Splits fill the GPU with as many programs as pay, and none is too short."""
    pairs = Limits().small_grid_split_causal if causal else Limits().small_grid_split
    found = {
        (programs, keys): num_splits(pairs, programs, keys, 132)
        for programs in (1, 16, 64, 128, 256, 264, 265, 1000)
        for keys in (1, 255, 512, 1024, 4096, 8192, 2**20)
    }
    for (programs, keys), num in found.items():
        assert num == 1 or any(
            num * programs <= 132 * n and keys >= num * least for n, least in pairs
        )
    assert found[16, 1024] == 4
    assert found[64, 4096] == 4
    assert found[128, 8192] == (4 if causal else 2)
    assert found[256, 8192] == (2 if causal else 1)
    assert found[256, 1024] == found[265, 2**20] == 1


@pytest.mark.parametrize(
    ("head_dim", "causal", "most"), [(16, True, 4), (32, False, 2), (64, True, 2), (64, False, 2)]
)
def test_tiles_for_small_grids(head_dim, causal, most):
    """One wave with few keys takes ``fwd_short_kv``, other small grids ``fwd_small_grid``."""
    gpu = replace(CARDS["H200"], num_sms=8)

    def chosen(rows, keys):
        problem = Problem(seq_q=rows, seq_kv=keys, head_dim=head_dim, dtype="bfloat16")
        specs = map(TensorSpec.of, make_inputs(problem))
        return portable.forward_row(*specs, gpu, Options(0 if causal else None, 1.0))[:2]

    short, tile = chosen(17, 768)
    few, larger = chosen(17, 769)
    assert (short, few) == ("fwd_short_kv", "fwd_small_grid")
    rows, larger_rows = gpu.num_sms * tile.block_q, most * gpu.num_sms * larger.block_q
    assert chosen(rows, 768)[0] == "fwd_short_kv"
    assert chosen(rows + 1, 768)[0] == "fwd_small_grid"
    assert chosen(larger_rows, 100)[0] == "fwd_small_grid"
    assert chosen(larger_rows + 1, 100)[0] == "fwd"
    assert chosen(16, 768)[0] == "decode"


@pytest.mark.parametrize(("left", "short"), [(1023, True), (1024, False), (None, False)])
def test_tiles_for_windows(left, short):
    """A short window has its own tiles, and its keys are not split, however few programs."""
    problem = Problem(seq_q=4096, head_dim=64, dtype="bfloat16")
    q, k, v = map(TensorSpec.of, make_inputs(problem))
    gpu, options = CARDS["H200"], Options(0, 1.0, left=left)
    plan = portable.forward(q, k, v, gpu, options)
    assert (plan.tile == tables.h200.WINDOW["fwd", 64]) is short
    assert (plan.split.num == 1) is short
    many = [x._replace(shape=torch.Size((1, 64, 4096, 64))) for x in (q, k, v)]
    dq = portable.backward(*many, many[0], gpu, options).passes[1]
    assert (dq.tile == tables.h200.WINDOW["bwd_dq", 64]) is short


def test_bf16_terms_add_up(device):
    """Three bf16 terms are exact from 2^-110 on; below, they are off by at most 2^-134."""
    exponents = torch.arange(-149.0, 128.0, dtype=torch.float64)[:, None]
    mantissas = 1 + torch.arange(64.0, dtype=torch.float64).mul(0.6180339887).frac()
    wanted = (2**exponents * mantissas).float()
    wanted[:, ::2] *= -1
    q = wanted[None, None].to(device)
    terms = single_kernel.decompose(*[q] * 4, terms=3)
    assert all(torch.equal(x, terms[0]) for x in terms)
    errors = (terms[0].double().sum(1).cpu() - wanted.double()).abs().amax((0, 2))
    whole = exponents[:, 0] >= -110
    assert errors[whole].count_nonzero() == 0
    assert 0 < errors[~whole].max() <= 2.0**-134


@pytest.mark.parametrize("terms", [2, 3])
def test_the_largest_numbers_have_finite_terms(terms, device):
    """Numbers that would round to infinity in bf16 are truncated, so their terms are finite."""
    largest = torch.finfo(torch.float32).max
    nearest = 2.0**127 * (2 - 2.0**-8)  # the least that rounds to infinity
    below = torch.tensor(nearest).nextafter(torch.tensor(0.0)).item()
    wanted = torch.tensor([largest, -largest, nearest, -nearest, below, -below])
    q = wanted[None, None, :, None].to(device)
    found = single_kernel.decompose(*[q] * 4, terms=terms)[0].double().sum(1).flatten().cpu()
    assert found.isfinite().all()
    bits = 24 if terms == 3 else 16
    assert ((found / wanted.double() - 1).abs() <= 2.0**-bits).all()


@jit
def split_p(p, terms, size: tl.constexpr):
    """Write the three bf16 terms of p, decomposed as forward does."""
    at = tl.arange(0, size)
    parts = mma.decompose(tl.load(p + at), 3, HALF_BIT)
    for i in tl.static_range(3):
        tl.store(terms + i * size + at, parts[i].to(tl.float32))


def left_out(p, v):
    """Return the part of p * v that six products of bf16 terms leave out."""
    of_p = torch.empty(3, len(p), device=p.device)
    split_p[(1,)](p, of_p, len(p))
    (of_v, *_) = single_kernel.decompose(*[v[None, None, :, None]] * 4, terms=3)
    a, b = of_p.double(), of_v[0, :, :, 0].double()
    assert torch.equal(a.sum(0), p.double())
    assert torch.equal(b.sum(0), v.double())
    return a[1] * b[2] + a[2] * b[1] + a[2] * b[2]


def test_what_products_leave_out(device):
    """What is left out of P @ V has no bias, and is negligible if P is within one ulp of 1."""
    generator = torch.Generator().manual_seed(0)
    p, v = (torch.rand(4096, generator=generator).to(device) for _ in range(2))
    relative = left_out(p, v) / (p.double() * v.double())
    assert relative.mean().abs() <= 4 * relative.std() / len(p) ** 0.5
    for near in (1 - 2.0**-24, 1 + 2.0**-23):
        assert (left_out(torch.full_like(p, near), v).abs() <= 2.0**-30 * v).all()


def test_what_scores_of_a_key_leave_out(device):
    """What is left out of scores has no bias over similar queries: dv would add it up."""
    generator = torch.Generator().manual_seed(0)
    q, k = (11 + torch.rand(n, generator=generator).to(device) for n in (4096, 64))
    found = [
        single_kernel.decompose(*[x[None, None, :, None]] * 4, terms=3)[0][0, :, :, 0].double()
        for x in (q, k)
    ]
    a, b = found[0][:, :, None], found[1][:, None]
    left = (a[1] * b[2] + a[2] * b[1] + a[2] * b[2]) / (a.sum(0) * b.sum(0))
    assert left.abs().max() <= 2.0**-24
    assert (left.mean(0).abs() <= 4 * left.std(0) / len(q) ** 0.5).all()


@pytest.mark.interpreter
def test_one_key_where_p_is_below_one(monkeypatch):
    """With one key, o is v up to one rounding of the product and one of the quotient.

    P and l are off from 1 alike: on a GPU the exponent of the largest score is the rounding error
    of its product with the scale.
    """
    below = np.float32(1 - 2.0**-24)
    monkeypatch.setattr(
        InterpreterBuilder,
        "create_exp2",
        lambda self, x: self.unary_op(x, lambda data: np.exp2(data) * below),
    )
    problem = Problem(seq_q=64, head_dim=64, window=(0, 0))
    q, k, v = make_inputs(problem)
    tile = Tile(32, 32, 4, 1, True, decomposed=True)
    o, _ = execute.forward(q, k, v, right=0, left=0, scale=0.125, tile=tile)
    assert ((o - v).abs() <= torch.finfo(torch.float32).eps * v.abs()).all()


def test_denormal_numbers_count_where_nothing_is_cut(device):
    """Without decomposition fp32 keeps denormal numbers, in gradients too (a GPU need not)."""
    problem = Problem(seq_q=20, seq_kv=30, head_dim=16)
    sample = Sample(problem=problem, device=device, values="denormal")
    assert_accurate(triton(False), sample)


@pytest.mark.parametrize("precision", ["bf16x6", "tf32x3", "ieee"])
def test_fp32_precision(device, precision):
    """Every way to multiply in full fp32 is within its budgets on ordinary inputs."""
    problem = Problem(heads=2, seq_q=100, head_dim=64, causal=True)
    sample = Sample(problem=problem, device=device)
    assert_accurate(triton("top_left", precision=precision), sample)


@pytest.mark.gpu  # the interpreter computes a TF32 product in full fp32
@pytest.mark.parametrize("seq_kv", [1, 100])
def test_fp32_budgets_see_tf32(device, seq_kv):
    """One TF32 product instead of six bf16 products breaks the budgets, also where dS cancels."""
    problem = Problem(heads=2, seq_q=100, seq_kv=seq_kv, head_dim=128)
    with pytest.raises(AssertionError, match="budget"):
        assert_accurate(triton(False, precision="tf32"), Sample(problem=problem, device=device))


@pytest.mark.parametrize("few", [True, False], ids=["together", "apart"])
def test_heads_beyond_a_band(device, limited, few):
    """Longest-first order within 32 heads does not leave out the three heads after them."""
    limited(fused=1000 if few else 0)
    problem = Problem(heads=35, kv_heads=35, seq_q=33, seq_kv=33, head_dim=16, causal=True)
    if device.type == "cuda":
        problem = replace(problem, seq_q=300, seq_kv=400)
    assert_accurate(triton("top_left"), Sample(problem=problem, device=device))


@pytest.mark.parametrize("causal", [False, "bottom_right"])
def test_tf32_in_two_terms(device, causal):
    """If TF32 is enough, fp32 as two bf16 terms is right to 16 bits, but not to 20.

    Errors of scores have no bias, so they average out in the lse of a row.
    """
    problem = Problem(heads=8, seq_q=400, seq_kv=500, head_dim=64, causal=causal)
    if device.type == "cpu":
        problem = replace(problem, heads=2, kv_heads=2, seq_q=70, seq_kv=100)
    case = Sample(problem=problem, device=device).draw()
    for name, error in relative_errors(triton(causal, precision="tf32"), case).items():
        assert error < 2 * 2**-16, name
        assert name == "lse" or error > 2**-20, name


def test_torch_decides_on_tf32(matmul):
    """Precision "auto" is bf16x6, or tf32 if torch's setting allows TF32."""
    for setting, wanted in (("ieee", "bf16x6"), ("tf32", "tf32")):
        matmul.fp32_precision = setting
        assert input_precision("auto", torch.float32) == wanted
        assert input_precision("ieee", torch.float32) == "ieee"


@pytest.mark.gpu_memory
@pytest.mark.parametrize("far", [2**31 + 4096, 2**31 + 4097], ids=["descriptors", "pointers"])
def test_offsets_are_64_bit(device, far):
    """A head that begins beyond 2^31 elements has the same result and gradients as any other."""
    problem = Problem(heads=2, seq_q=20, head_dim=16, dtype="float16")
    near = make_inputs(problem, device=device)
    # Two heads, 4 GiB apart, and 4 GiB before the first, all never touched: an offset of 32 bits
    # wraps into the latter, so it reads other numbers and does not crash.
    first, apart = 2**31, 4096
    buffer = torch.empty(first + far + 3 * apart, dtype=torch.float16, device=device)
    tensors = []
    for i, x in enumerate(near):
        view = buffer.as_strided(x.shape, (0, far, 16, 1), first + i * apart)
        view.copy_(x)
        tensors.append(view)
    assert torch.equal(triton(False)(*tensors)[0], triton(False)(*near)[0])
    del buffer, view
    grads = []
    for inputs in (tensors, near):
        q, k, v = (x.detach().requires_grad_() for x in inputs)
        grads.append(torch.autograd.grad(triton(False)(q, k, v)[0].sum(), (q, k, v)))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def large(device):
    """Return a number of elements to exceed, 2^31 on a GPU, and a head dimension."""
    if device.type != "cuda":
        return 2**13, 16  # the same steps at a small size
    free, _ = torch.cuda.mem_get_info(device)
    if free < 48 << 30:
        pytest.skip(f"needs 48 GiB of free memory, got {free >> 30}")
    return 2**31, 256


@pytest.fixture
def alike(limited):
    """Launch small problems with the tiles of large ones and without splits, for equal bits."""
    limited(1, pointers=0, fused=0, short_kv=0, small_grid=0, small_grid_causal=0)


def drawn(device, *shape):
    """Return random numbers, drawn in fp16."""
    return torch.randn(shape, device=device, dtype=torch.float16)


def gradients(grad_o, *inputs):
    """Return o, dq, dk and dv."""
    q, k, v = (x.detach().requires_grad_() for x in inputs)
    o, _ = triton(False)(q, k, v)
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), grad_o)]


@pytest.mark.usefixtures("alike")
@pytest.mark.gpu_memory
def test_more_than_2_31_elements_in_heads(device):
    """Heads on both sides of element 2^31, and the last, have the same bits as alone."""
    elements, head_dim = large(device)
    border = elements // (64 * head_dim)  # the head that begins there
    q, k, v, grad_o = (drawn(device, 1, border + 2, 64, head_dim) for _ in range(4))
    whole = gradients(grad_o, q, k, v)
    assert whole[0].numel() > elements
    part = slice(border - 1, None)
    alone = gradients(*(x[:, part].clone() for x in (grad_o, q, k, v)))
    assert all(torch.equal(a[:, part], b) for a, b in zip(whole, alone, strict=True))


@pytest.mark.usefixtures("alike")
@pytest.mark.gpu_memory
def test_more_than_2_31_elements_in_queries(device):
    """Queries beyond element 2^31 of one head have the same bits as alone."""
    elements, head_dim = large(device)
    border = elements // head_dim
    q, grad_o = (drawn(device, 1, 1, border + 300, head_dim) for _ in range(2))
    k, v = (drawn(device, 1, 1, 64, head_dim) for _ in range(2))
    o, dq, *_ = gradients(grad_o, q, k, v)
    part = slice(border, None)
    alone, dq_alone, *_ = gradients(grad_o[:, :, part].clone(), q[:, :, part].clone(), k, v)
    assert torch.equal(o[:, :, part], alone)
    assert torch.equal(dq[:, :, part], dq_alone)


@pytest.mark.usefixtures("alike")
@pytest.mark.gpu_memory
def test_more_than_2_31_elements_in_keys(device):
    """A key beyond element 2^31 of one head is read, and the last keys get their gradients."""
    elements, head_dim = large(device)
    border = elements // head_dim
    k, v = (drawn(device, 1, 1, border + 300, head_dim) for _ in range(2))
    q, grad_o = (drawn(device, 1, 1, 64, head_dim) for _ in range(2))
    o, lse = triton(False)(q, k, v)
    part, how = slice(border, None), (*Extras(), None, None, 0, head_dim**-0.5)
    how += None, "auto", "triton", True, False
    backward = torch.ops.flashattn.backward
    _, dk, dv, *_ = backward(grad_o, None, q, k, v, o, lse, *how)
    _, dk_alone, dv_alone, *_ = backward(
        grad_o, None, q, k[:, :, part].clone(), v[:, :, part].clone(), o, lse, *how
    )
    assert torch.equal(dk[:, :, part], dk_alone)
    assert torch.equal(dv[:, :, part], dv_alone)
    k.zero_()[:, :, -1] = 60  # the last key takes all
    o, _ = triton(False)(torch.ones_like(q), k, v)
    assert torch.equal(o, v[:, :, -1:].expand_as(o))


def test_outputs_are_written_whole(device, monkeypatch):
    """Every element of every output is written: none keeps what the memory held before."""
    problem = Problem(batch=2, heads=4, kv_heads=2, seq_q=45, seq_kv=70, head_dim=24)

    def poisoned(make):
        def call(*args, **kwargs):
            x = make(*args, **kwargs)
            return x.fill_(torch.nan) if x.is_floating_point() else x

        return call

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    sample = Sample(problem=problem, device=device)
    assert_accurate(triton(False), sample)


@pytest.mark.parametrize("seq_kv", [1, 40])
def test_neighbours_are_not_read(device, seq_kv):
    """NaN around the inputs, in rows and columns beyond their ends, reaches no output."""
    problem = Problem(seq_q=33, seq_kv=seq_kv, head_dim=24)
    padded = []
    for x in make_inputs(problem, device=device):
        buffer = x.new_full((1, 1, x.shape[2] + 80, 32), torch.nan)
        buffer[:, :, 40:-40, 4:28] = x
        padded.append(buffer[:, :, 40:-40, 4:28])
    for x in triton(False)(*padded):
        assert x.isfinite().all()
    q, k, v = (x.detach().requires_grad_() for x in padded)
    for x in torch.autograd.grad(triton(False)(q, k, v)[0].sum(), (q, k, v)):
        assert x.isfinite().all()
