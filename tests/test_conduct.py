"""Side effects of calls: what they change, what influences them, and what they keep."""

import gc
import threading
import time
import weakref
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch

from flashattn.registry import get
from flashattn.testing.accuracy import Expected, Sample, run, run_checked
from flashattn.testing.law import ORDINARY, clause, interpreted
from flashattn.testing.state import unchanged

# A result that varies in half of all calls is missed once in 2^47 runs, one that varies in a tenth
# once in 140. The interpreter is slow.
REPEATS, INTERPRETED_REPEATS = 48, 24


def usual(impl, device):
    """Return an ordinary small problem that the implementation takes, or None."""
    small = [replace(x, heads=2, seq_q=24, seq_kv=40, head_dim=16) for x in ORDINARY]
    for problem in map(impl.fit, (*small, *ORDINARY)):
        if impl.why_not(problem, device, grad=impl.grad) is None:
            return problem
    return None


class Asked:
    """A sample, and an implementation that it is run on."""

    def __init__(self, impl, problem, device, **how):
        """Draw the sample."""
        how = {"grad": impl.grad, "lse": impl.lse, "denormals": impl.denormals} | how
        self.sample = Sample(problem=problem, device=device, **how)
        self.case = self.sample.draw()
        self.call = partial(impl, **problem.keywords, scale=self.case.scale)

    def leaves(self):
        """Return new copies of q, k and v."""
        return [x.detach().clone().requires_grad_(self.sample.grad) for x in self.case.inputs]

    def forward(self, inputs):
        """Return o and the logsumexp, or None for it, of some inputs."""
        with torch.set_grad_enabled(self.sample.grad):
            return self.call(*inputs)

    def backward(self, outputs, inputs, **how):
        """Return by name the gradients of inputs that require one; an output may be None."""
        grads = (self.case.grad_o, self.case.grad_lse)
        pairs = [
            (x, grad)
            for x, grad in zip(outputs, grads, strict=True)
            if x is not None and x.requires_grad
        ]
        assert pairs, "no result has a gradient"
        named = zip(("dq", "dk", "dv"), inputs, strict=True)
        wanted = {name: x for name, x in named if x.requires_grad}
        outputs, grads = zip(*pairs, strict=True)
        got = torch.autograd.grad(outputs, list(wanted.values()), grads, **how)
        return dict(zip(wanted, got, strict=True))

    def both(self, inputs):
        """Return all outputs by name."""
        outputs = self.forward(inputs)
        named = dict(zip(("o", "lse"), outputs, strict=True))
        if self.sample.grad:
            named |= self.backward(outputs, inputs)
        return {name: x.detach() for name, x in named.items() if x is not None}

    def check(self, got, said, change=lambda case: case):
        """Hold some outputs to their budgets."""
        case, more = (change(x.draw()) for x in (self.sample, self.sample.enlarged()))
        failures = Expected.of(case, more).failures(got)
        assert not failures, f"{said}: {'; '.join(failures)}"


@clause()
def test_leaves_no_trace(impl, device):
    """A call does not change generators, settings, modes or its inputs."""
    tiled = get("tiled")  # torch imports modules at first use
    first = Asked(tiled, usual(tiled, device), device)
    first.both(first.leaves())
    asked = Asked(impl, usual(impl, device), device)
    for turn in range(2):
        inputs = asked.leaves()
        with unchanged(device, inputs, turn):
            asked.both(inputs)
    with torch.no_grad():
        inputs = [x.detach() for x in asked.leaves()]
        with unchanged(device, inputs, 0):
            asked.call(*inputs)


@contextmanager
def default(name, value):
    """Change torch's default dtype or device."""
    get, put = (getattr(torch, f"{verb}_default_{name}") for verb in ("get", "set"))
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before if name == "dtype" else None)


SETTINGS = {
    "fp64 is the default dtype": lambda: default("dtype", torch.float64),
    "fp16 is the default dtype": lambda: default("dtype", torch.float16),
    "meta is the default device": lambda: default("device", "meta"),
    "no gradients are recorded": torch.no_grad,
    "in inference mode": torch.inference_mode,
}


@clause()
def test_settings_do_not_sway_it(impl, device):
    """Results do not depend on torch's defaults, on grad mode, or on the calling thread."""
    asked = Asked(impl, usual(impl, device), device)
    for said, setting in SETTINGS.items():
        try:
            with setting():
                o, lse = asked.call(*(x.detach() for x in asked.case.inputs))
        except RuntimeError as error:
            raise AssertionError(f"{said}: {error}") from error
        forward = {"o": o} | ({} if lse is None else {"lse": lse})
        asked.check({name: x.clone() for name, x in forward.items()}, said)
        assert o.dtype == asked.case.inputs[0].dtype, f"{said}: o has dtype {o.dtype}"
        assert o.device.type == device.type, f"{said}: o is on {o.device}"
        if "default" in said and asked.sample.grad:
            with setting():
                got = run_checked(asked.call, asked.case)
            asked.check(got, said)
    got = []
    thread = threading.Thread(target=lambda: got.append(run_checked(asked.call, asked.case)))
    thread.start()
    thread.join()
    assert got, "in another thread: it raised an error"
    asked.check(got[0], "in another thread")


def test_an_excused_one_may_raise():
    """A peer that raises an error under some setting is an expected failure."""

    def never(*_, **__):
        raise RuntimeError("no kernel")

    peer = replace(get("reference"), name="peer", call=never, strict=False)
    with pytest.raises(pytest.xfail.Exception, match="peer: fp64 is the default dtype: no kernel"):
        test_settings_do_not_sway_it(peer, torch.device("cpu"))


def variants(impl, device):
    """Return the usual problem, and (problem, options) that differ from it in one fact."""
    p = usual(impl, device)
    changes = [
        {"causal": False if p.causal else "top_left"},
        {"causal": "bottom_right"},
        {"window": (5, 3), "causal": False},
        {"seq_kv": p.seq_kv + 9},
        {"seq_q": p.seq_q - 5},
        {"batch": 2},
        {"heads": 4, "kv_heads": 4},
        {"head_dim": 2 * p.head_dim},
        *({"dtype": dtype} for dtype in ("float32", "float16", "bfloat16")),
    ]
    problems = dict.fromkeys(impl.fit(replace(p, **change)) for change in changes)
    solved = [x for x in problems if impl.why_not(x, device, grad=impl.grad) is None]
    asked = [(x, {}) for x in solved if x != p]
    asked += [(p, {"seed": 1})]
    return p, asked + ([(p, {"scale": 0.3}), (p, {"layout": "packed"})] if impl.strict else [])


@clause()
def test_calls_do_not_remember(impl, device):
    """A call is right after one that differs in one fact, and writes to no earlier result."""
    problem, others = variants(impl, device)
    plain = Asked(impl, problem, device)
    inputs = plain.leaves()
    first = plain.both(inputs)
    kept = {name: x.clone() for name, x in first.items()}
    for other, how in others:
        said = f"after {problem}, {other} {how or ''}".rstrip()
        asked = Asked(impl, other, device, **how)
        asked.check(run(asked.call, asked.case), said)
        for name, x in kept.items():
            assert torch.equal(first[name], x), f"{name}: a later call ({other}) wrote to it"
    plain.check(plain.both(inputs), "when it was asked again")


@clause()
def test_memory_may_be_written_anew(impl, device):
    """New values in the memory of the last call are new inputs."""
    asked, other = (Asked(impl, usual(impl, device), device, seed=seed) for seed in range(2))
    inputs = asked.leaves()
    asked.both(inputs)
    with torch.no_grad():
        for x, y in zip(inputs, other.case.inputs, strict=True):
            x.copy_(y)
    got = dict(zip(("o", "lse"), other.forward(inputs), strict=True))
    got = {name: x.detach() for name, x in got.items() if x is not None}
    other.check(got, "with other numbers in the memory of the call before")


@clause(needs="grad")
def test_calls_may_be_nested(impl, device):
    """A backward belongs to its own forward, whatever ran in between, and may be repeated."""
    problem, others = variants(impl, device)
    plain = Asked(impl, problem, device)
    inputs = plain.leaves()
    outputs = plain.forward(inputs)
    for other, how in [*others[:3], *reversed(others[-3:])]:
        asked = Asked(impl, other, device, **how)
        run(asked.call, asked.case)
    for said in ("of an earlier forward", "a second time"):
        plain.check(plain.backward(outputs, inputs, retain_graph=True), f"backward {said}")


@clause(needs="grad")
def test_each_gradient_alone(impl, device):
    """Each gradient is right if it alone is wanted, and if o or lse alone has a gradient."""
    asked = Asked(impl, usual(impl, device), device)
    for i, name in enumerate(("dq", "dk", "dv")):
        inputs = [x.requires_grad_(j == i) for j, x in enumerate(asked.leaves())]
        asked.check(asked.backward(asked.forward(inputs), inputs), f"{name} alone")
    inputs = asked.leaves()
    o, lse = asked.forward(inputs)
    got = asked.backward((o, None), inputs, retain_graph=True)
    asked.check(got, "of o alone", lambda case: replace(case, grad_lse=None))
    if lse is not None:
        got = asked.backward((None, lse), inputs, materialize_grads=True)
        asked.check(got, "of lse alone", lambda case: replace(case, grad_o=0 * case.grad_o))


@clause(needs="grad")
def test_inputs_that_were_overwritten(impl, device):
    """If an input or o is written to before backward, gradients are right or an error is raised."""
    asked = Asked(impl, usual(impl, device), device)
    for i in range(4):
        inputs = asked.leaves()
        outputs = asked.forward(inputs)
        with torch.no_grad():
            (*inputs, outputs[0])[i].mul_(3)
        try:
            got = asked.backward(outputs, inputs)
        except RuntimeError:  # autograd's, or the implementation's own
            continue
        asked.check(got, f"{'qkvo'[i]} was written to before backward")


@clause()
def test_nothing_is_held(impl, device):
    """Inputs and results are freed when the caller drops them."""
    asked = Asked(impl, usual(impl, device), device)
    inputs = asked.leaves()
    outputs = [x for x in asked.forward(inputs) if x is not None]
    if asked.sample.grad:
        outputs += asked.backward((*outputs, None)[:2], inputs).values()
    names = [*"qkv", "o", *["lse"] * impl.lse, "dq", "dk", "dv"]
    held = [weakref.ref(x.untyped_storage()) for x in (*inputs, *outputs)]
    del inputs, outputs
    gc.collect()
    for _ in range(20):  # on a GPU, autograd's thread may release its last task later
        alive = [name for name, storage in zip(names, held, strict=False) if storage() is not None]
        if not alive:
            break
        time.sleep(0.05)
    assert not alive, f"{', '.join(alive)}: memory is held after the call"


@clause(needs="repeats")
def test_same_bits(impl, device):
    """The same inputs give the same bits in every call."""
    asked = Asked(impl, usual(impl, device), device)
    first = run(asked.call, asked.case)
    for call in range(INTERPRETED_REPEATS if interpreted(impl, device) else REPEATS):
        for name, x in run(asked.call, asked.case).items():
            assert torch.equal(first[name], x), f"{name}: other bits in call {call + 2} of the same"
