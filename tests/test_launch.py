"""Launches share a compiled kernel exactly where Triton itself would reuse it."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton.compiler
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler.compiler import CompiledKernel
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language import constexpr
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from flashattn import attention, explain, gpus
from flashattn.kernels import descriptor, execute, launch
from flashattn.kernels.counters import counters
from flashattn.kernels.descriptor import TileLoadSpec
from flashattn.kernels.hopper.backward_dq import DqAccumSpec
from flashattn.kernels.hopper.tma import RowStatsSpec, RowTermsSpec, TileSpec
from flashattn.kernels.launch import KernelLaunch
from flashattn.plan.gpu import CARDS
from flashattn.plan.spec import Extras
from flashattn.problem import Problem
from flashattn.testing.inputs import make_grads, make_inputs
from flashattn.testing.layouts import shifted
from flashattn.testing.results import assert_same_bits


class Compiled(CompiledKernel):
    """A kernel compiled without a GPU, which records the arguments of each launch."""

    def __init__(self, source):
        """Pretend that the kernel is loaded."""
        self.src, self.name, self.launched = source, "name", []
        self.module, self.function, self.packed_metadata = "module", object(), (4, 1, 0)
        self._run = lambda *given: self.launched.append(given)

    def __del__(self):
        """Unload nothing."""


def pretended(patch):
    """Fake an H200 with a ``device`` and a ``stream``, whose ``compiled`` counts compilations.

    ``run`` can be set to a function that makes the launcher of a compiled kernel.
    """
    found = SimpleNamespace(device=0, stream=7, compiled=0, run=None)

    def compiled(source, target, options):
        del target, options
        found.compiled += 1
        made = Compiled(source)
        if found.run is not None:
            made._run = found.run(source, made.launched)
        return made

    active = SimpleNamespace(
        get_current_device=lambda: found.device,
        get_current_stream=lambda device: (device, found.stream),
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        utils=SimpleNamespace(
            fill_tma_descriptor=lambda *given: [
                tuple(x) if isinstance(x, list) else x for x in given
            ]
        ),
    )
    patch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # otherwise Triton warns of a new default
    patch.setattr(driver, "_active", active)
    patch.setattr(triton.compiler, "compile", compiled)
    patch.setattr(launch, "INTERPRETED", SimpleNamespace(value=False))
    patch.setattr(launch, "_COMPILED", {})
    return found


@pytest.fixture
def gpu(monkeypatch):
    """Fake an H200."""
    return pretended(monkeypatch)


def sample(q, k, size, rows, lies, scale, columns, BLOCK: constexpr):  # noqa: N803
    """Do nothing; Triton specializes on the type of ``size``, and not on its value."""


def kernel(kind=JITFunction):
    """Return a kernel that Triton has not seen before."""
    return kind(sample, do_not_specialize=["size"])


def tensor(*shape, dtype=torch.float16, offset=0):
    """Return a tensor that begins ``offset`` elements past a multiple of 16 bytes."""
    return torch.zeros(torch.Size(shape).numel() + 64, dtype=dtype)[offset:][
        : torch.Size(shape).numel()
    ].view(shape)


def given(q=None, k=None, tiles=(None, None), **changed):
    """Return the arguments of a launch of ``sample``: tensors, tiles, numbers, options."""
    values = {"size": 37, "rows": 37, "lies": (37, 48, None), "scale": 0.5} | changed
    names = "size", "rows", "lies", "scale"
    numbers = tuple(values[name] for name in names)
    options = {"columns": 24, "BLOCK": 32, "num_warps": 4}
    options |= {name: x for name, x in changed.items() if name not in names}
    q, k = (tensor(2, 3, 40, 64) if x is None else x for x in (q, k))
    return (q, k), tiles, numbers, options


def launched(function, tensors, tiles, numbers, options):
    """Make a first launch; return the compiled kernel and its arguments."""
    made = KernelLaunch(function, 5, numbers, options, tiles)
    made(*tensors)
    return made._compiled, made._compiled.launched.pop()


def as_triton(function, tensors, tiles, numbers, options, grid=(5, 1, 1)):
    """Let Triton launch; return the compiled kernel and its arguments."""
    operands = [
        described(tile, x) if tile is not None and isinstance(x, torch.Tensor) else x
        for x, tile in itertools.zip_longest(tensors, tiles)
    ]
    compiled = function[grid](*operands, *numbers, **options)
    return compiled, compiled.launched.pop()


def described(operand, x):
    """Return the descriptor of x that Triton would make."""
    form, shape, strides = operand.tiles(x)
    given = {name: form.common[name] for name in ("block_shape", "layout") if name in form.common}
    return form.kind(x, list(shape), list(strides), **given)


SHAPE = 2, 3, 40, 64
LOADS = TileLoadSpec(SHAPE, (7680, 2560, 64, 1), (1, 1, 32, 64))
LONG = 2**31
# Changes to an aligned launch, with numbers 37 and 48, for which Triton compiles again.
OTHER = {
    "an address": {"q": tensor(*SHAPE, offset=1)},
    "another address": {"k": tensor(*SHAPE, offset=4)},
    "a dtype": {"q": tensor(*SHAPE, dtype=torch.bfloat16)},
    "fp32": {"k": tensor(*SHAPE, dtype=torch.float32)},
    "1": {"rows": 1},
    "a multiple of 16": {"rows": 48},
    "64 bits": {"rows": LONG + 1},
    "64 bits, a multiple of 16": {"rows": LONG},
    "64 bits of a size": {"size": LONG + 1},
    "None": {"rows": None},
    "a flag": {"rows": True},
    "1 in a tuple": {"lies": (1, 48, None)},
    "a multiple of 16 in a tuple": {"lies": (48, 48, None)},
    "none in a tuple": {"lies": (37, 47, None)},
    "64 bits in a tuple": {"lies": (37, LONG, None)},
    "None in a tuple": {"lies": (None, 48, None)},
    "no None in a tuple": {"lies": (37, 48, 37)},
    "an int": {"scale": 2},
    "a number by name": {"columns": 32},
    "1 by name": {"columns": 1},
    "a constant": {"BLOCK": 64},
    "warps": {"num_warps": 8},
    "an option": {"num_stages": 2},
    "a descriptor": {"tiles": (LOADS, None)},
    "two descriptors": {"tiles": (LOADS, LOADS)},
}
# Changes for which Triton reuses the compiled kernel.
ALIKE = {
    "numbers": {"rows": 41, "size": 48, "lies": (39, 64, None), "scale": 0.25, "columns": 40},
    "a size of 1": {"size": 1},
    "the largest of 32 bits": {"rows": LONG - 1, "size": LONG - 1},
    "the smallest of 32 bits": {"rows": -LONG + 1, "size": -LONG},
    "a shape": {"q": tensor(1, 8, 64), "k": tensor(7)},
}


@pytest.mark.parametrize("kind", [JITFunction, GluonJITFunction])
@pytest.mark.parametrize("case", [*OTHER, *ALIKE])
def test_a_launch_starts_what_triton_would_choose(case, kind, gpu):
    """A launch starts the kernel of an earlier launch if, and only if, Triton would."""
    function, other = kernel(kind), given(**(OTHER | ALIKE)[case])
    first, _ = launched(function, *given())
    ours, theirs = launched(function, *other), as_triton(function, *other)
    assert ours[0] is theirs[0]
    assert (ours[0] is first) == (case in ALIKE)
    assert gpu.compiled == 2 - (case in ALIKE)
    same_arguments(ours[1], theirs[1])


def same_arguments(ours, theirs):
    """Check that a launch gets the arguments of Triton's own, except for launch hooks."""
    assert ours[:6] == theirs[:6]
    for mine, exact in zip(ours[9:], theirs[9:], strict=True):
        if hasattr(exact, "block_shape"):
            assert type(mine) is type(exact)
            assert vars(mine) == vars(exact)
        else:
            assert mine is exact or (type(mine), mine) == (type(exact), exact)


@pytest.mark.parametrize("tiles", [(None, None), (LOADS, None)])
@pytest.mark.parametrize("heard", [False, True])
def test_a_repeated_launch_starts_what_triton_would_start(tiles, heard, gpu, monkeypatch):
    """From the second call on, Triton's launcher gets what Triton itself would pass.

    The stream is the one that is current then. A launch hook, such as a profiler's, is called.
    """
    monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [print] if heard else [])
    function, (first, _, numbers, options) = kernel(), given()
    made = KernelLaunch(function, 5, numbers, options, tiles)
    made(*first)
    tensors, gpu.stream = (tensor(*SHAPE), tensor(*SHAPE)), 8
    made(*tensors)
    before, ours = made._compiled.launched
    _, theirs = as_triton(function, *given(*tensors, tiles=tiles))
    assert (before[3], ours[3]) == ((0, 7), (0, 8))
    same_arguments(ours, theirs)
    told = theirs[6:9] if heard else [None] * 3  # hooks, and what they are told
    assert list(map(type, ours[6:9])) == list(map(type, told))


def test_triton_is_not_asked_twice(gpu, monkeypatch):
    """Triton binds only the first of two launches that differ in numbers and descriptor shapes."""
    runs, run = [], JITFunction.run
    monkeypatch.setattr(JITFunction, "run", lambda *x, **how: runs.append(x) or run(*x, **how))
    function = kernel()
    other = TileLoadSpec((2, 3, 39, 64), (7488, 2496, 64, 1), LOADS.block)
    given_these = [
        given(tiles=(tile, None), rows=rows) for tile, rows in ((LOADS, 37), (other, 41))
    ]
    (one, _), (two, (*_, described_, _, _, rows, _, _, _, _)) = (
        launched(function, *x) for x in given_these
    )
    assert (one is two, len(runs), gpu.compiled) == (True, 1, 1)
    assert (described_.shape, rows) == ([2, 3, 39, 64], 41)


def other_forms():
    """Return pairs of a tensor and a tile for each of which Triton compiles another kernel."""
    half, bf16 = tensor(*SHAPE), tensor(*SHAPE, dtype=torch.bfloat16)
    fp32 = tensor(*SHAPE, dtype=torch.float32)
    rows, terms = tensor(3, 128, dtype=torch.float32), tensor(3, 128, 32)
    return [
        *((half, TileSpec(n, m)) for n in (64, 128) for m in (16, 32, 64)),
        *((x, TileSpec(64)) for x in (bf16, fp32, tensor(2, 3, 40, 32, dtype=torch.bfloat16))),
        *((rows, RowStatsSpec(n)) for n in (32, 64)),
        *((terms, RowTermsSpec(n)) for n in (32, 64)),
        (terms.bfloat16(), RowTermsSpec(32)),
        *((fp32, DqAccumSpec(n)) for n in (32, 64)),
        *(
            (x, TileLoadSpec(SHAPE, half.stride(), (1, 1, n, 64)))
            for n in (32, 64)
            for x in (half, bf16)
        ),
    ]


def test_a_form_is_what_triton_compiles_for(gpu):
    """Two descriptors have one form if, and only if, Triton compiles the same kernel for both."""
    pairs = other_forms()
    forms, types, function = [], [], kernel(GluonJITFunction)
    for x, operand in pairs:
        forms.append(operand.tiles(x)[0])
        compiled, _ = as_triton(function, *given(x, tensor(8), (operand, None)))
        types.append(compiled.src.signature["q"])
    assert len(set(forms)) == len(set(types)) == len(pairs) == gpu.compiled
    again = [operand.tiles(x.clone())[0] for x, operand in other_forms()]
    assert again == forms
    for (x, operand), form in zip(pairs, forms, strict=True):
        _, shape, strides = operand.tiles(x)
        fields = form.fields(shape, strides)
        assert fields | {"base": x} == vars(described(operand, x))


def test_a_descriptor_has_its_place(gpu):
    """The same descriptor at another argument position needs another kernel."""
    function = kernel()
    (q, _), *_ = given()
    for tensors in ((q, None), (None, q)):
        how = (tensors, (LOADS, LOADS), *given()[2:])
        assert launched(function, *how)[0] is as_triton(function, *how)[0]
    assert gpu.compiled == 2


def test_a_kernel_is_of_a_device_and_of_settings(gpu, monkeypatch):
    """Another device, another kernel of one source, or another Triton setting compiles again."""
    one, two = kernel(), kernel()
    found = [launched(one, *given())[0], launched(two, *given())[0]]
    gpu.device = 1
    found.append(launched(one, *given())[0])
    for owner, name, value in (
        (knobs.runtime, "debug", True),
        (knobs.compilation, "instrumentation_mode", "anything"),
    ):
        monkeypatch.setattr(owner, name, value)
        found.append(launched(one, *given())[0])
    assert len(set(map(id, found))) == gpu.compiled == 5
    assert launched(one, *given())[0] is found[-1]


@pytest.mark.usefixtures("gpu")
def test_a_hook_that_inspects_stages_is_asked_each_time(monkeypatch):
    """No launch is shared under a stages inspection hook: its answer is part of Triton's key."""
    (q, k), _, numbers, options = given()
    asked = kernel(), (q, k, *numbers), options, ()
    assert launch._key(*asked) is not None
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", lambda *_: ("one", "key"))
    assert launch._key(*asked) is None


@pytest.mark.parametrize("device_caches", [None, {0: (1, 2)}, {0: (lambda *_, **__: (1, 2),)}])
def test_where_triton_cannot_be_asked_it_launches(device_caches, gpu):
    """Without a binder of the known form, Triton itself makes the first call of every launch."""
    function, runs = kernel(), []
    asked = SimpleNamespace(arg_names=function.arg_names, device_caches=device_caches)

    class Stranger:
        def __getattr__(self, name):
            return getattr(asked, name)

        def __getitem__(self, grid):
            runs.append(grid)
            return function[grid]

    stranger = Stranger()
    assert launched(stranger, *given())[0] is launched(stranger, *given())[0]
    assert (len(runs), launch._COMPILED, gpu.compiled) == (2, {}, 1)


def places_of(source):
    """Return the positions of descriptors among a kernel's arguments."""
    kinds = enumerate(source.signature.values())
    return [i for i, kind in kinds if isinstance(kind, str) and kind.startswith("tensordesc")]


def starting(launched):
    """Return a launcher that records its arguments and, as if compiled from C, has no bytecode."""
    return partial(lambda *given: launched.append(given))


class Run:
    """The parts of Triton 3.6's launcher that we rely on."""

    launch_cooperative_grid, launch_pdl = True, False
    global_scratch_size = profile_scratch_size = 0

    def __init__(self, source, launched):
        """Expand descriptors, if there are any."""
        places, started = places_of(source), starting(launched)
        metadata = [
            {"swizzle": 3, "elem_size": 2, "elem_type": 8, "block_size": [i], "fp4_padded": False}
            for i in places
        ]
        self.launch = expanding(started, places, metadata) if places else started

    def __call__(self, x, y, z, stream, function, *given):
        """Start the kernel."""
        options = self.launch_cooperative_grid, self.launch_pdl, None, None
        self.launch(x, y, z, stream, function, *options, *given)


def expanding(launcher, tensordesc_indices, tensordesc_meta):
    """Return a function that expands descriptors and has the free variables of Triton's."""

    def inner(*given):
        known, operands, metadata = given[:13], given[13:], iter(tensordesc_meta)
        found = [
            nvidia.make_tensordesc_arg(x, next(metadata)) if i in tensordesc_indices else [x]
            for i, x in enumerate(operands)
        ]
        return launcher(*known, *itertools.chain.from_iterable(found))

    return inner


def expand(x, metadata):
    """Return the kernel arguments that replace a descriptor."""
    *tile, kind, block = [
        metadata[name] for name in ("swizzle", "elem_size", "elem_type", "block_size")
    ]
    tile += [nvidia.TMA_DTYPE_DEVICE_TO_HOST[kind], block]
    made = driver.active.utils.fill_tma_descriptor(x.base.data_ptr(), *tile, x.shape, x.strides, 0)
    return [made, *x.shape, *x.strides]


def triton_3_6(source, launched):
    """Return Triton 3.6's own launcher, without a C compiler."""
    metadata = {"swizzle": 3, "elem_size": 2, "elem_type": 6, "block_size": [1, 1, 32, 64]}
    metadata |= {"fp4_padded": False}
    asked = {"tensordesc_meta": [metadata] * len(places_of(source)), "global_scratch_align": 1}
    asked |= {"global_scratch_size": 0, "profile_scratch_size": 0, "profile_scratch_align": 1}
    asked |= {"launch_cooperative_grid": True, "launch_pdl": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvidia, "make_launcher", lambda *_: "")
        patch.setattr(nvidia, "library_dirs", list)
        made = SimpleNamespace(launch=starting(launched))
        patch.setattr(nvidia, "compile_module_from_src", lambda **_: made)
        return nvidia.CudaLauncher(source, SimpleNamespace(**asked))


@pytest.fixture(params=["as we know it", "itself"])
def below(request, gpu, monkeypatch):
    """Pretend that Triton is 3.6, whose Python launcher can be bypassed."""
    if request.param == "as we know it":
        monkeypatch.setattr(nvidia, "make_tensordesc_arg", expand)
        gpu.run = Run
    elif gpus.TRITON != (3, 6):
        pytest.skip("Triton is another")
    else:
        gpu.run = triton_3_6
    monkeypatch.setattr(launch, "TRITON", (3, 6))
    return gpu


@pytest.mark.parametrize(
    "tiles",
    [(None, None), (LOADS, None), (None, LOADS), (LOADS, LOADS)],
    ids=["none", "first", "second", "both"],
)
@pytest.mark.usefixtures("below")
def test_triton_3_6_is_started_below_its_python(tiles, monkeypatch):
    """The C launcher gets the arguments that Triton passes; with a launch hook, Triton launches.

    A descriptor's arguments are made once per address.
    """
    function, (_, _, numbers, options) = kernel(), given()
    made = KernelLaunch(function, 5, numbers, options, tiles)
    pairs = [(tensor(*SHAPE), tensor(*SHAPE)) for _ in range(2)]
    made(*pairs[0])  # Triton makes the first launch
    for tensors in (*pairs, *pairs):
        compiled, theirs = as_triton(function, *given(*tensors, tiles=tiles))
        made(*tensors)
        ours = compiled.launched.pop()
        assert made._launcher is not None
        assert len(ours) == len(theirs)
        assert ours[:10] == theirs[:10]
        assert ours[10:13] == (None, None, None)  # no launch hooks
        for mine, exact in zip(ours[13:], theirs[13:], strict=True):
            assert mine is exact or mine == exact
    kept = [x for x in made._expanded if x is not None]
    assert [len(x) for x in kept] == [2] * (2 - tiles.count(None))
    monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [print])
    made(*tensors)
    told = compiled.launched.pop()
    assert told[:10] == theirs[:10]
    assert None not in told[10:12]


@pytest.mark.usefixtures("below")
def test_addresses_that_keep_changing_are_few(monkeypatch):
    """Descriptor arguments are cached for a bounded number of addresses, and are never stale."""
    monkeypatch.setattr(descriptor, "MOST_ADDRESSES", 3)
    function, (_, _, numbers, options) = kernel(), given()
    made = KernelLaunch(function, 5, numbers, options, (LOADS, None))
    tensors = [tensor(*SHAPE) for _ in range(8)]
    made(*tensors[:2])
    for q in tensors:
        compiled, theirs = as_triton(function, *given(q, tensors[0], tiles=(LOADS, None)))
        made(q, tensors[0])
        assert compiled.launched.pop()[13] == theirs[13]
        assert len(made._expanded[0]) <= 3


def scratching(name):
    """Return the launcher of a kernel that needs scratch memory."""
    return type("Scratching", (Run,), {name: 16})


class Elsewhere(Run):
    """A launcher that expands descriptors in another function."""

    def __init__(self, source, launched):
        """Wrap the launcher once more."""
        super().__init__(source, launched)
        self.launch = lambda *given, inside=self.launch: inside(*given)


@pytest.mark.parametrize(
    ("run", "version"),
    [
        (Run, (3, 7)),
        (Elsewhere, (3, 6)),
        (scratching("global_scratch_size"), (3, 6)),
        (scratching("profile_scratch_size"), (3, 6)),
    ],
)
def test_what_is_not_known_is_triton_s_business(run, version, gpu, monkeypatch):
    """Triton's Python launches where its form is unknown or scratch memory is needed."""
    monkeypatch.setattr(nvidia, "make_tensordesc_arg", expand)
    monkeypatch.setattr(launch, "TRITON", version)
    calls, call = [], Run.__call__
    monkeypatch.setattr(Run, "__call__", lambda *x: calls.append(x) or call(*x))
    gpu.run = run
    function, (tensors, tiles, numbers, options) = kernel(), given(tiles=(LOADS, None))
    made = KernelLaunch(function, 5, numbers, options, tiles)
    for times in (1, 2, 3):
        made(*tensors)
        assert len(calls) == times
    assert made._launcher is None


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["triton", "hopper"])
def test_started_below_python_or_not_bits_are_the_same(family, device, monkeypatch):
    """Under Triton 3.6 every kernel bypasses Triton's Python, with the bits of its launches."""
    problem = Problem(heads=4, seq_q=300, seq_kv=300, head_dim=64, dtype="bfloat16")
    reason = (gpus.why_not_hopper if family == "hopper" else gpus.why_not)(problem, device)
    if reason is not None:
        pytest.skip(reason)
    inputs, grads = make_inputs(problem, device=device), make_grads(problem, device=device)
    known, found = launch.launcher_of, []
    results = []
    for launcher_of in (lambda x: found.append(known(x)) or found[-1], lambda _: None):
        monkeypatch.setattr(launch, "launcher_of", launcher_of)
        monkeypatch.setattr(launch, "_COMPILED", {})
        for bind in (execute.bind_forward, execute.bind_backward):
            bind.cache_clear()
        how = {"right": 0, "scale": 0.125, "family": family}
        for _ in range(2):
            outputs = execute.forward(*inputs, **how)
            results.append((*outputs, *execute.backward(grads, (*inputs, *outputs), **how)))
    assert found
    assert all((x is not None) == (gpus.TRITON == (3, 6)) for x in found)
    assert all(all(map(torch.equal, results[0], others)) for others in results[1:])


# Lengths that are and are not multiples of a tile or of 16, and 1.
LENGTHS = (1, 17, 48, 64, 100, 128, 255, 256, 300, 301, 512, 1000, 1001, 1024, 1025, 2047, 2048)
LAID = {
    "dense": lambda x: x,
    "sequence first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "misaligned": shifted,
}
SCORED = {
    "nothing": lambda q: (),
    "slopes": lambda q: Extras(alibi_slopes=torch.zeros(1, q.shape[1])),
    "sinks": lambda q: Extras(sink=torch.zeros(q.shape[0], q.shape[1])),
    "a bias": lambda q: Extras(bias=q.new_zeros(1, 1, q.shape[2], q.shape[2])),
}


@pytest.mark.parametrize("laid", LAID)
@pytest.mark.parametrize("family", ["triton", "hopper"])
def test_launches_that_share_give_the_same_bits(family, laid, device, monkeypatch):
    """At every length, launches that share kernels give the bits of Triton's own launches."""
    problem = Problem(heads=4, kv_heads=2, head_dim=64, dtype="bfloat16")
    reason = (gpus.why_not_hopper if family == "hopper" else gpus.why_not)(problem, device)
    if reason is not None:
        pytest.skip(reason)
    for seq_q in LENGTHS if device.type == "cuda" else (17, 32, 33):
        longer = replace(problem, seq_q=seq_q, seq_kv=seq_q)
        inputs = [LAID[laid](x) for x in make_inputs(longer, device=device)]
        grads = make_grads(longer, device=device)
        results = []
        for key in (launch._key, lambda *_: None):
            with monkeypatch.context() as patch:
                patch.setattr(launch, "_key", key)
                for bind in (execute.bind_forward, execute.bind_backward):
                    bind.cache_clear()
                how = {"right": 0, "scale": 0.125, "family": family}
                outputs = execute.forward(*inputs, **how)
                gradients = execute.backward(grads, (*inputs, *outputs), **how)
                results.append((*outputs, *gradients))
        assert all(map(torch.equal, *results))


def attend(length, dtype, dims, laid, scored, family, heads=(2, 4, 2), right=0):
    """Plan and launch both passes."""
    batch, of_queries, of_keys = heads
    q = torch.zeros(batch, of_queries, length, dims[0], dtype=dtype)
    k, v = (torch.zeros(batch, of_keys, length, d, dtype=dtype) for d in dims)
    q, k, v = map(LAID[laid], (q, k, v))
    extras = SCORED[scored](q)
    how = {"right": right, "scale": 0.125, "family": family, "extras": extras}
    o, lse = execute.forward(q, k, v, **how)
    for deterministic in (True, False):
        execute.backward(
            (torch.zeros_like(o), None), (q, k, v, o, lse), **how, deterministic=deterministic
        )


def check_our_kernels(patch):
    """Compare each launch of our kernels on an H200 with Triton's own; count those that share."""
    pretended(patch)
    shared, first = Counter(), KernelLaunch._first
    patch.setitem(gpus._KNOWN, torch.device("cpu"), replace(CARDS["H200"], triton=gpus.TRITON))
    for module in (launch, execute):
        patch.setattr(module, "check_device", lambda device: None)

    def compared(self, tensors):
        known = len(launch._COMPILED)
        if not first(self, tensors):
            self(*tensors)
        shared[self._kernel.fn.__name__] += len(launch._COMPILED) == known
        ours = self._compiled.launched.pop()
        compiled, theirs = as_triton(
            self._kernel, tensors, self._operands, self._numbers, self._options, self._grid
        )
        assert compiled is self._compiled
        same_arguments(ours, theirs)
        return True

    patch.setattr(KernelLaunch, "_first", compared)
    half = torch.float16
    for length in LENGTHS:
        for (dims, laid), family in itertools.product(
            [((64, 64), laid) for laid in LAID] + [((d, d), "dense") for d in (72, 96, 128, 256)],
            ("hopper", "triton"),
        ):
            attend(length, half, dims, laid, "nothing", family)
        for dtype, scored in itertools.product((torch.bfloat16, torch.float32), SCORED):
            attend(length, dtype, (128, 128), "dense", scored, "auto", right=None)
        attend(length, half, (192, 128), "dense", "nothing", "hopper", heads=(1, 2, 2))
        attend(length, torch.bfloat16, (64, 64), "dense", "nothing", "hopper", heads=(1, 8, 1))
    return shared


CODE = """
import pytest
from test_launch import check_our_kernels
with pytest.MonkeyPatch.context() as patch:
    for name, times in check_our_kernels(patch).items():
        print(name, times)
"""


def test_our_kernels_start_as_triton_would_start_them(monkeypatch):
    """Our kernels start as Triton would start them, and each shares some compiled kernels."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # interpreted kernels have no key
    command = [sys.executable, "-W", "ignore", "-c", CODE]
    folder = Path(__file__).parent
    done = subprocess.run(command, cwd=folder, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr
    shared = dict(line.split() for line in done.stdout.splitlines())
    assert len(shared) >= 15
    assert all(int(times) > 0 for times in shared.values()), shared


@pytest.mark.gpu
def test_kernels_that_may_meet_share_no_counters(device):
    """Each stream keeps its counters for its next kernel, and a captured graph has its own."""
    q, k, v = (torch.randn(1, 2, n, 64, device=device) for n in (1, 4096, 4096))
    kept = counters(q.device, 1)
    assert counters(q.device, 2) is kept
    with torch.cuda.stream(torch.cuda.Stream(device)):
        assert counters(q.device, 1) is not kept
    options = {"causal": False, "impl": "triton"}
    assert explain(q, k, v, **options).forward.counters
    expected = attention(q, k, v, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attention(q, k, v, **options)
    for _ in range(2):
        got.zero_()
        graph.replay()
        assert_same_bits("o", got, expected)
    assert not kept.any()
