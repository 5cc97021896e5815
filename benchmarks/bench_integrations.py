"""Drop-ins: PyTorch's SDPA on our kernels, and training steps of transformers models.

The models have the shapes of real ones, but few layers and random weights; a step is forward and
backward. The rows of a model differ only in ``attn_implementation``.
"""

import warnings
from collections import Counter
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from flashattn import attention
from flashattn.integrations import sdpa
from flashattn.measure.device import out_of_memory
from flashattn.measure.timing import HostTime
from flashattn.problem import Problem
from flashattn.registry import Impl
from flashattn.report.studies.integrations import ACTIVATED, FATTN, LENGTHS
from flashattn.testing.graph import Call, prepared
from flashattn.testing.inputs import make_grads, make_inputs
from flashattn.testing.sweep import grid
from flashattn.testing.verifier import Verifier

CALLS = [ACTIVATED, "attention", "sdpa"]
SHARES = (1, 2, 6, 3, 4)  # relative lengths of the packed documents
# Largest relative error of a parameter's gradient, in the Frobenius norm.
TOLERANCE = {"bfloat16": 0.1, "float32": 1e-4}
LLAMA = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336}
LLAMA |= {"num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 8}
GEMMA: dict[str, float] = {"vocab_size": 32000, "hidden_size": 3584, "head_dim": 256}
GEMMA |= {"intermediate_size": 14336}
GEMMA |= {"num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 8}
GEMMA |= {"query_pre_attn_scalar": 256, "sliding_window": 4096, "attn_logit_softcapping": 50.0}
TINY = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
TINY |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
MODELS = {  # family, sizes, and the implementation that gives the expected gradients
    "Llama-3-8B": ("llama", LLAMA, "sdpa"),
    "Gemma-2-9B": ("gemma2", GEMMA, "eager"),
    "tiny Llama": ("llama", TINY, "eager"),
    "tiny Gemma 2": ("gemma2", TINY | {"sliding_window": 24}, "eager"),
}


def sweep(device, host, *, context, dtype, **steps):
    """Return the cases of each benchmark: problems of calls, and models and inputs of steps."""
    axes = {"context": [context], "dtype": [dtype]}
    return {
        "bench_device": grid(problem=device, **{"pass": ["forward", "backward"]}, attention=CALLS),
        "bench_host": grid(
            problem=host, **{"pass": ["forward", "forward+backward"]}, attention=CALLS
        ),
        "bench_step": [
            case
            for inputs, models in steps.items()
            for model, attentions in models.items()
            for case in grid(model=[model], inputs=[inputs], **axes, attention=attentions)
        ],
    }


DEFAULT = sweep(
    ["bf16-b1h16-q16384-d128-causal", "bf16-b1h32kv8-q16384-d128-causal"],
    ["bf16-b1h2-q64-d64-causal"],
    context=8192,
    dtype="bfloat16",
    packed={"Llama-3-8B": [LENGTHS, FATTN, "sdpa", "flex_attention"]},
    plain={
        "Llama-3-8B": [FATTN, "sdpa", "eager", "flex_attention"],
        "Gemma-2-9B": [FATTN, "eager", "flex_attention"],  # SDPA has no softcap
    },
)
DEFAULT["bench_step"] += grid(  # attention is a larger part of this step
    model=["Llama-3-8B"],
    inputs=["plain"],
    context=[32768],
    dtype=["bfloat16"],
    attention=[FATTN, "sdpa"],
)
SMOKE = sweep(
    ["fp32-b1h4-q64-d16-causal"],
    ["fp32-b1h2-q64-d64-causal"],
    context=64,
    dtype="float32",
    packed={"tiny Llama": [LENGTHS, FATTN, "sdpa"]},
    plain={"tiny Llama": [FATTN, "sdpa", "eager"], "tiny Gemma 2": [FATTN, "eager"]},
)
SWEEPS = {"smoke": SMOKE, "default": DEFAULT, "full": DEFAULT}


def plain(q, k, v, *, causal, scale=None):
    """Call PyTorch's SDPA as a model does."""
    grouped = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(
        q, k, v, is_causal=bool(causal), scale=scale, enable_gqa=grouped
    )


ENTRIES = {
    name: Impl(name=name, call=call, limits=lambda *_: None)
    for name, call in {ACTIVATED: plain, "attention": attention, "sdpa": plain}.items()
}


def why_not_timed(case, device):
    """Return why a case is not timed, or None: our kernels may be interpreted."""
    ours = case.attention == ACTIVATED and device.type != "cuda"
    return "our kernels are interpreted: not a speed" if ours else None


def context_of(case):
    """Return a new context in which SDPA is what the case asks for."""
    return sdpa.enabled() if case.attention == ACTIVATED else nullcontext()


def in_context(case, call, *args):
    """Return what a call returns in the context of a case."""
    with context_of(case):
        return call(*args)


def prepare(device, item, facts):
    """Return the call of a case after checking its results and comparing their bits."""
    case = item.callspec.params["case"]
    problem, passes = Problem.parse(case.problem), dict(case.facts)["pass"]
    with context_of(case):
        verifier = Verifier(ENTRIES[case.attention], problem, device, facts)
        verifier.admit(passes)
        (call, setup), got = prepared(passes, ENTRIES[case.attention], problem, device)
        try:
            verifier.check(**got)
        except AssertionError as error:
            if case.attention != "sdpa":
                raise
            pytest.xfail(str(error))
    _, ours = prepared(passes, ENTRIES["attention"], problem, device)
    facts["same_bits"] = all(torch.equal(x, ours[n]) for n, x in got.items() if x is not None)
    return Call(partial(in_context, case, call), setup)


def bench_device(time_call, case, facts, device, left_out):
    """Verify a pass, compare its bits with those of ``attention``, and time it on the device."""
    facts["part"] = "device"
    left_out(why_not_timed(case, device))
    time_call(partial(prepare, device))


def bench_host(device_benchmark, case, facts, device, left_out):
    """Time the host in a call so small that the device finishes first."""
    facts["part"] = "host"
    left_out(why_not_timed(case, device))
    problem, run = Problem.parse(case.problem), partial(ENTRIES[case.attention].call, causal=True)
    inputs, (grad_o, _) = make_inputs(problem, device=device), make_grads(problem, device=device)
    call = partial(run, *inputs)
    if facts["pass"] != "forward":
        inputs = [x.requires_grad_() for x in inputs]
        call = lambda: torch.autograd.grad(run(*inputs), inputs, grad_o)  # noqa: E731
    with context_of(case):
        device_benchmark.clock = HostTime(device_benchmark.clock.synchronize)
        device_benchmark.time(call, rounds=10)


@pytest.fixture(scope="module")
def trained_by(device):
    """Return a function that makes a model, or reuses the last, with its expected gradients."""
    kept = {}

    def make(case):
        key = case.model, case.dtype
        if key not in kept:
            kept.clear()
            from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 - optional

            family, sizes, _ = MODELS[case.model]
            config, dtype = AutoConfig.for_model(family, **sizes), getattr(torch, case.dtype)
            torch.manual_seed(0)
            with device:
                model = AutoModelForCausalLM.from_config(config, dtype=dtype)
            kept[key] = model.train(), {}
        return kept[key]

    yield make
    kept.clear()


def inputs_of(case, device):
    """Return the arguments of a model's call: tokens, labels, and the documents if packed."""
    generator = torch.Generator(device).manual_seed(1)
    size = {"size": (1, case.context), "generator": generator, "device": device}
    ids = torch.randint(1, MODELS[case.model][1]["vocab_size"], **size)
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    if case.inputs == "packed":
        lengths = [share * case.context // sum(SHARES) for share in SHARES]
        inputs["position_ids"] = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
        if case.attention == LENGTHS:
            cu = pad(torch.tensor(lengths, device=device).cumsum(0, dtype=torch.int32), (1, 0))
            inputs |= {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu}
            inputs["attention_mask"] = torch.ones_like(ids)  # else transformers reads positions
    return inputs


def step(model, inputs):
    """Run forward and backward."""
    model(**inputs).loss.backward()


def gradients(model, case, device):
    """Return the parameters' gradients, computed with the attention of a case."""
    model.set_attn_implementation(case.attention.partition(",")[0])
    model.zero_grad()
    step(model, inputs_of(case, device))
    return [x.grad for x in model.parameters()]


def ready(case, facts, device, trained_by):
    """Return a model with the attention of a case, after checking the gradients of a step.

    Raises:
        AssertionError: the gradients are wrong.
    """
    from flashattn.integrations.transformers import register  # noqa: PLC0415 - optional

    register()
    if case.attention == "flex_attention":
        torch.compiler.reset()  # else it is recompiled for dynamic shapes
    model, expected = trained_by(case)
    asked = case.inputs, case.context
    if asked not in expected:
        expected.clear()
        reference = case.replace(attention=MODELS[case.model][2])
        expected[asked] = gradients(model, reference, device)
    both = zip(gradients(model, case, device), expected[asked], strict=True)
    errors = [(x - y).float().norm() / y.float().norm() for x, y in both]
    facts["gradient_error"] = error = torch.stack(errors).max().item()
    allowed = TOLERANCE[case.dtype]
    if not error <= allowed:
        raise AssertionError(f"{case.attention}: gradients are off by {error:.2g} of {allowed}")
    return model


def waits(call):
    """Return the line of code of each wait of the host for the device in a call."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    told = [x for x in said if "called a synchronizing CUDA operation" in str(x.message)]
    return [f"{x.filename}:{x.lineno}" for x in told]


@pytest.mark.filterwarnings("default")  # of transformers and its compiler
def bench_step(device_benchmark, case, facts, device, left_out, trained_by):
    """Verify the gradients of a step, count how often the host waits, and time it."""
    left_out(None if find_spec("transformers") else "transformers is not installed")
    ours, reason = case.attention in (FATTN, LENGTHS), None
    try:
        model = ready(case, facts, device, trained_by)
    except Exception as error:
        if ours or out_of_memory(error):
            raise
        reason = f"{case.attention}: {type(error).__name__}: {error}"
    if reason is not None:  # after the except clause, no traceback holds tensors
        pytest.xfail(reason)

    def setup():
        model.zero_grad()
        return model, inputs

    inputs = inputs_of(case, device)  # new tensors, about which nothing is cached
    if device.type == "cuda":
        found = waits(partial(step, *setup()))
        theirs = f"{Path(find_spec('transformers').origin).parent}/"
        facts["waits"] = len(found)
        facts["waits_at"] = Counter("/".join(Path(place).parts[-2:]) for place in found)
        if ours and not all(place.startswith(theirs) for place in found):
            pytest.fail(f"{case.attention}: the host waits in {', '.join(found)}")
    device_benchmark.time(step, setup=setup, rounds=10)
