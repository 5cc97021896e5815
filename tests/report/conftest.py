"""A made-up run with a few rows of every study, whose numbers are easy to check by hand."""

import json
import math
from itertools import product
from pathlib import Path

import pytest

from flashattn.report.runs import Run
from flashattn.report.studies import STUDIES

GIBI = 2**30
ROOFS = {"bfloat16": 8e14, "tf32": 4e14, "float32": 5e13, "copy": 4.2e12}
LONG = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, a*>"


def row(study, seconds=None, status="ok", **facts):
    """Return a row of one case, with a time if one is given."""
    if seconds is not None:
        facts = {"seconds": seconds, "mean": 1.1 * seconds, "std": 0.1 * seconds} | facts
        facts |= {"clock": "device time, cold L2", "sm_hertz": 1.755e9, "throttled": []}
    name = "-".join(str(value) for value in facts.values() if isinstance(value, (str, int)))
    reason = None if status == "ok" else f"{facts.get('impl')} gave a reason"
    return {"study": study, "name": name, "status": status, "reason": reason} | facts


def lm():
    """Return training steps of two sizes, of 4e13 flops each; each choice halves the time.

    In the long steps ours is 1.25 and 3 times as fast as the fastest peer.
    """
    case = {"context": 1024, "batch": 4, "step": "train", "flops": 4e13, "precision": "bf16"}
    settings = [("naive", False, 0.4), ("sdpa", False, 0.1), ("triton", False, 0.2)]
    for size, parameters in (("small", 128_625_408), ("2.7B", 3_406_809_600)):
        facts = {"size": size, "parameters": parameters, **case}
        for impl, compiled, seconds in [*settings, ("triton", True, 0.1)]:
            memory = {"peak_bytes": 3 * GIBI, "predicted_bytes": 3 * GIBI}
            yield row("lm", seconds, impl=impl, compiled=compiled, **facts, **memory)
        facts |= {"impl": "naive", "compiled": False, "predicted_bytes": 150 * GIBI}
        yield row("lm", 0.5, **facts | {"precision": "tf32", "peak_bytes": 153 * GIBI})
        small = size == "small"
        yield row(
            "lm", 1.0 if small else None, "ok" if small else "oom", **facts | {"precision": "fp32"}
        )
    case |= {"checkpoint": True, "context": 65536, "batch": 1, "compiled": False}
    for packed, impl, seconds in (
        *((False, "hopper", 0.4), (False, "sdpa", 0.5), (False, "flex", 0.8)),
        *((True, "hopper", 0.1), (True, "flex", 0.3), (True, "sdpa", None)),
    ):
        memory = {"peak_bytes": 3 * GIBI, "predicted_bytes": 3 * GIBI}
        facts = {"size": "2.7B", "parameters": 3_406_809_600, **case, "packed": packed}
        status = "ok" if seconds else "unsupported"
        yield row("lm", seconds, status, impl=impl, **facts, **memory)


def warmup():
    """Return ten steps of 10 ms, of which the first takes longer, cold or warm."""
    for warm, first in ((0, 0.1), (5, 0.01)):
        samples = [first, *[0.01] * 9]
        facts = {"size": "small", "context": 512, "warm_steps": warm, "in_order": samples}
        facts |= {"mean": sum(samples) / 10, "std": 0.0, "first": first, "second": 0.01}
        yield row("warmup", 0.01, **facts)


def profile():
    """Return two steps of 10 ms of kernels, and attention in parts."""
    kernels = [{"name": LONG, "category": "elementwise", "calls": 7, "seconds": 0.002}] * 9
    for step, shares in (
        ("forward", {"softmax": 2, "matmul": 8}),
        ("train", {"matmul": 5, "optimizer": 4, "mine": 1}),
    ):
        categories = {name: 1e-3 * share for name, share in shares.items()}
        facts = {"size": "xl", "compiled": False, "device_seconds": 0.01, "categories": categories}
        facts |= {"kernels": kernels, "phases": {"forward": 0.004, "backward": 0.005}}
        yield row("profile", 0.02, step=step, **facts)
    product_ = {"seconds": 1e-3, "flops": 4.95e11, "bytes": 1e9}
    parts = {"scores": product_, "softmax": {"seconds": 2e-3, "flops": 1e10}, "values": product_}
    yield row("profile", 4e-3, dtype="bfloat16", heads=4, head_dim=64, seq=4096, parts=parts)


def precision():
    """Return two sums, the dtypes under two autocasts, and a LayerNorm that overflows."""
    for accumulator, result in (("bfloat16", 4.0), ("float32", 10.000133514404297)):
        facts = {"accumulator": accumulator, "addend": accumulator, "cast": "none", "value": 0.01}
        curve = [[n, min(n * 0.01, result)] for n in range(0, 1000, 100)] + [[1000, result]]
        yield row("precision", part="accumulation", count=1000, result=result, curve=curve, **facts)
    for dtype, got, error in (("float16", math.inf, math.inf), ("bfloat16", 65280.0, 0.004)):
        tensors = {"logits": dtype, "loss": "float32"}
        yield row("precision", part="autocast", dtype=dtype, tensors=tensors)
        facts = {"quantity": "variance", "scale": 300.0, "exact": 65536.0}
        yield row("precision", part="layernorm", dtype=dtype, got=got, error=error, **facts)


def memory():
    """Return a step in fp32 and in bf16: 4 GiB predicted, 3 of them activations."""
    for kind, peak in (("fp32", 4), ("bf16", 3)):
        facts = {"size": "2.7B", "context": 512, "batch": 4, "step": "train", "impl": "naive"}
        facts |= {"predicted": {"parameters": GIBI, "activations": 3 * GIBI}}
        facts |= {"measured": {"activations": 3 * GIBI}, "before_bytes": GIBI}
        facts |= {"peak_bytes": peak * GIBI, "residual_bytes": 20 * 2**20}
        facts |= {"timeline": [[5.0, GIBI], [5.1, 4 * GIBI], [5.2, 2 * GIBI]]}
        facts |= {"phases": [["forward", 5.0, 5.1], ["backward", 5.1, 5.2]]}
        facts |= {"largest": [{"bytes": 2**29, "line": "lm.py:12 forward", "phase": None}]}
        yield row("memory", 0.2, precision=kind, **facts)


def attention():
    """Return both passes: naive attention's bytes grow with N² until OOM, ours grow with N."""
    for (impl, power), n, name in product(
        (("naive", 2), ("triton", 1)), (256, 1024, 4096), ("forward", "backward")
    ):
        facts = {"impl": impl, "seq": n, "pass": name, "head_dim": 64, "dtype": "float32"}
        facts |= {"causal": False, "predicted_bytes": 256 * n**power}
        if (impl, n) == ("naive", 4096):
            yield row("attention", None, "oom", **facts)
        else:
            held = {"held_bytes": 256 * n**power, "peak_bytes": 512 * n**power}
            yield row("attention", n * (1e-6 if impl == "triton" else 4e-6), **facts, **held)


def compiled():
    """Return attention and a model that took 9 seconds to compile; one gained nothing."""
    facts = {"impl": "naive", "eager_seconds": 1.0, "compile_seconds": 9.0, "graphs": 1}
    model = {"subject": "model", "size": "xl", "step": "train", "graph_breaks": 3}
    for n, seconds in ((1024, 0.5), (4096, 1.25)):
        attention = {"subject": "attention", "seq": n, "pass": "forward", "graph_breaks": 0}
        yield row("compile", seconds, **attention, **facts)
    yield row("compile", 0.25, **model, **facts)


def flash():
    """Return both protocols: 400 TFLOP/s of ours; a peer is missing, one ran out of memory."""
    seconds = {"triton": 0.01, "hopper": 0.008, "sdpa": 0.01, "naive": 0.05, "fa3": None}
    for impl, n, heads in product(seconds, (512, 4096), (16, 1)):
        facts = {"impl": impl, "problem": f"h{heads}-q{n}", "pass": "forward", "flops": 1e9 * n}
        facts |= {"protocol": "tokens" if heads > 1 else "one_head", "heads": heads}
        facts |= {"batch": 16384 // n if heads > 1 else 1, "seq_q": n, "seq_kv": n}
        facts |= {
            "head_dim": 128,
            "causal": "top_left" if heads == 1 else False,
            "dtype": "bfloat16",
        }
        status = "unsupported" if impl == "fa3" else "oom" if (impl, n) == ("naive", 4096) else "ok"
        yield row("flash", seconds[impl] * n / 4096 if status == "ok" else None, status, **facts)


def masks():
    """Return ours, which takes a tenth of the time for a tenth of the pairs, and a peer."""
    facts = {"dtype": "bfloat16", "batch": 1, "heads": 2, "kv_heads": 2, "seq_q": 100}
    facts |= {"head_dim": 64, "pass": "forward"}
    for pairs, impl, seconds in (
        *((100, "hopper", 1.0), (100, "flex", 2.0), (10, "hopper", 0.1), (10, "flex", 1.0)),
        (10, "sdpa", None),
    ):
        status = "ok" if seconds else "oom"
        more = {"impl": impl, "problem": f"p{pairs}", "pairs": pairs * 1_000_000}
        yield row("masks", seconds, status, **facts, **more)


def heads():
    """Return ours at half of the bandwidth of a copy in decoding, and a peer at a third of ours."""
    for seq_q, name, impl, seconds in (
        *((1, "forward", "triton", 2.0), (1, "forward", "sdpa", 6.0)),
        *((64, "backward", "hopper", 1.0), (64, "backward", "sdpa", 0.5)),
    ):
        facts = {"impl": impl, "problem": f"q{seq_q}", "seq_q": seq_q, "pass": name}
        yield row("heads", seconds, bytes=ROOFS["copy"], dtype="bfloat16", **facts)


def scores():
    """Return ours, which a softcap slows by half and a bias's gradient by 3, and a peer."""
    facts = {"pass": "backward", "dtype": "bfloat16"}
    for impl, problem, seconds, learned in (
        *(("hopper", "b1h2", 0.01, False), ("hopper", "b1h2-cap50", 0.015, False)),
        *(("triton", "b1h2-bias1hts", 0.02, False), ("triton", "b1h2-bias1hts", 0.03, True)),
        *(("sdpa", "b1h2", 0.02, False), ("sdpa", "b1h2-bias1hts", 0.01, False)),
        ("sdpa", "b1h2-bias1hts", None, True),
    ):
        more = {"impl": impl, "problem": problem, "learned": learned}
        yield row("scores", seconds, "ok" if seconds else "oom", **facts, **more)


def launch():
    """Return the host's microseconds per call, in both modes, and the floor for all of them."""
    for impl, micros in (("sdpa", 20), ("triton", 30), ("floor", 10)):
        for mode in ("eager", "graph"):
            if (impl, mode) != ("floor", "graph"):
                facts = {"impl": impl, "mode": mode, "pass": "forward+backward", "problem": "p"}
                scale = 1e-6 if mode == "eager" else 1e-7
                yield row("launch", micros * scale, dtype="bfloat16", **facts)


def integrations():
    """Return calls in which activating costs 2% or 10 µs, and steps twice as fast as SDPA's."""
    names = ("sdpa, activated", "attention", "sdpa")
    for part, bits, seconds in (
        ("device", True, (0.0102, 0.01, 0.02)),
        ("host", None, (3e-5, 2e-5, 1e-5)),
    ):
        facts = {"part": part, "problem": "p", "pass": "forward", "same_bits": bits}
        for name, each in zip(names, seconds, strict=True):
            yield row("integrations", each, attention=name, **facts)
    facts = {"model": "Llama", "inputs": "packed", "context": 8192, "dtype": "bfloat16"}
    for name, seconds, waits in (
        *(("fattn, cu_seq_lens", 0.1, 0), ("fattn", 0.125, 1), ("sdpa", 0.2, 1)),
        ("eager", None, None),
    ):
        more = {"attention": name, "waits": waits}
        yield row("integrations", seconds, "ok" if seconds else "oom", **facts, **more)


def parallel():
    """Return 1000 tokens on one GPU and two: ours 90% of linear, as predicted, a peer 50%."""
    facts = {"problem": "p", "pass": "forward", "tokens": 1000}
    for method, seconds in (("keys", 0.9), ("pytorch", 1.0)):
        yield row("parallel", seconds, world=1, method=method, **facts)
    more = {"predicted_seconds": 0.5, "peak_bytes": GIBI}
    yield row("parallel", 0.5, world=2, method="keys", **facts, **more)
    yield row("parallel", 1.0, world=2, method="pytorch", **facts)
    yield row("parallel", None, "oom", world=2, method="heads", **facts)


def accuracy():
    """Return the errors of two implementations, one above its budget, and their clauses."""
    for impl, largest, verdict in (("triton", 1.0, "keeps"), ("naive", 3.0, "breaks")):
        error = {"max": largest, "mean": 0.1, "bias": 0.01, "max_budget": 2.0, "mean_budget": 0.2}
        errors = {"normal": {"o": error, "dq": error}, "huge_v": {"o": error}}
        yield row("accuracy", impl=impl, dtype="bfloat16", head_dim=64, errors=errors)
        clauses = {"causal": {"verdict": "keeps"}, "empty": {"verdict": verdict, "said": "o: NaN"}}
        yield row("accuracy", part="contract", impl=impl, clauses=clauses)


@pytest.fixture(scope="session")
def expected():
    """Return the expected lines of each study, table and set of changed rows, by name.

    The lines are sentences, rows of tables with bars between cells, and points of pictures.
    """
    text = Path(__file__).with_name("expected.txt").read_text(encoding="utf-8")
    sections = dict(section.split("\n", 1) for section in text.removeprefix("# ").split("\n# "))
    return {name: lines.splitlines() for name, lines in sections.items()}


@pytest.fixture(scope="session")
def keep():
    """Return a function that writes a kept run of rows, or of other entries, to a path."""

    def write(path, *rows, machine="nvidia-h200", made="2026-01-01", **entries):
        path.parent.mkdir(parents=True, exist_ok=True)
        saved = {"machine_info": {"accelerator": machine, "gpu": machine}, "datetime": made}
        saved["benchmarks"] = [{"extra_info": row} for row in rows if row["status"] == "ok"]
        saved["unmeasured"] = [row for row in rows if row["status"] != "ok"]
        path.write_text(json.dumps(saved | entries))
        return path

    return write


@pytest.fixture(scope="session")
def made_run():
    """A run with rows of every study."""
    makers = (lm, warmup, profile, precision, memory, attention, compiled, flash, heads, masks)
    makers += (scores, launch, integrations, parallel, accuracy)
    return Run(
        machine={
            "accelerator": "nvidia-h200",
            "gpu": "NVIDIA H200",
            "power_limit_watts": 700.0,
            "driver": "580.1",
            "torch": "2.11",
        },
        commit={"id": "0123456789abcdef", "dirty": True},
        roofs=ROOFS,
        clocks={"before": 1.98e9, "after": 1.755e9},
        command="pytest benchmarks --sweep full",
        sources="fedcba9876543210",
        made="2026-11-21T04:14:00+00:00",
        name="nvidia-h200/0002_0123456789.json",
        rows=[row for maker in makers for row in maker()],
    )


@pytest.fixture(scope="session")
def made_pictures(made_run):
    """Return the pictures of the made-up run, by the study's name and the picture's."""
    return {study.NAME: study.pictures(made_run) for study in STUDIES}
