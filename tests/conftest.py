"""Sound products; ``--every-tile``; a made-up run of every study, for who draws or compares."""

from __future__ import annotations

import math
import os
import random
from itertools import product

import pytest
import torch
from _pytest.pytester import SysModulesSnapshot

from flashattn.report.runs import Run
from flashattn.report.studies import STUDIES
from flashattn.testing.patching import patch_interpreter
from flashattn.testing.upstream import products_mix_rows

# Tests multiply small matrices. Threads that wait for one another, on cores that others use as
# well, made them six times slower.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start
if os.environ.get("TRITON_INTERPRET") == "1":
    patch_interpreter()
WITHOUT_ONEDNN = products_mix_rows()
if WITHOUT_ONEDNN:  # or laws about NaN fail that whoever is tested has kept
    torch.backends.mkldnn.enabled = False

GIBI = 2**30
SIZES = {  # width, layers, parameters
    "small": (768, 12, 128_625_408),
    "medium": (1024, 24, 423_183_360),
    "large": (1280, 36, 969_411_840),
    "xl": (1600, 48, 1_998_235_200),
    "2.7B": (2560, 32, 3_406_809_600),
}
STEPS = {"forward": 2, "backward": 4, "forward+backward": 6, "train": 6}  # flops per weight
ROOFS = {"bfloat16": 8e14, "float16": 8e14, "tf32": 4e14, "float32": 5e13, "copy": 4.2e12}
REACHED = {"fp32": 42e12, "tf32": 210e12, "bf16": 330e12}  # flops per second at the end
IMPLS = {
    "triton": 4.4e14,
    "sdpa_cudnn": 4.5e14,
    "sdpa_flash": 3.0e14,
    "flex": 3.6e14,
    "naive": 6e13,
}


def pytest_addoption(parser):
    """Declare the tests that take minutes on a GPU."""
    parser.addoption(
        "--every-tile",
        action="store_true",
        help="on a GPU: every tile with every dtype, width, mask, alignment and kind of length",
    )


def pytest_configure(config):
    """Refuse to skip what was asked for."""
    if config.getoption("--every-tile") and not torch.cuda.is_available():
        raise pytest.UsageError(
            "--every-tile: wanted a CUDA GPU, got none; without one all tiles are compiled by "
            "python -m flashattn.counts compiled"
        )


def pytest_report_header():
    """Say what is not tested as a user would run it."""
    said = "bf16 products of this CPU's oneDNN mix rows (its issue 5717): tests run without it"
    return [said] * WITHOUT_ONEDNN


@pytest.fixture
def pytester(pytester):
    """Keep what an inner run imports: torch's and Triton's modules cannot be imported twice."""

    def snapshot():
        return SysModulesSnapshot(lambda name: not name.startswith(("test_", "bench_", "conftest")))

    pytester._sys_modules_snapshot = snapshot()
    pytester._Pytester__take_sys_modules_snapshot = snapshot
    return pytester


def timed(random_, seconds, **facts):
    """Return a row with a time."""
    std = seconds * random_.uniform(0.002, 0.02)
    return facts | {
        "status": "ok",
        "reason": None,
        "seconds": seconds,
        "mean": seconds * 1.004,
        "std": std,
        "rounds": 10,
        "q1": seconds - std / 2,
        "q3": seconds + std / 2,
        "clock": "device time, cold L2",
        "sm_hertz": 1.755e9,
        "throttled": [],
    }


def lm(rng):
    """Return S2 and S7: some of it compiled, one case out of memory."""
    settings = [("fp32", "naive", False), ("tf32", "naive", False), ("bf16", "naive", False)]
    settings += [("bf16", "triton", False), ("bf16", "naive", True), ("bf16", "triton", True)]
    for (size, (width, layers, count)), context, step in product(SIZES.items(), (256, 1024), STEPS):
        for precision, impl, compiled in settings:
            tokens = 4 * context
            flops = STEPS[step] * count * tokens + 12 * layers * width * context * tokens
            slow = (1 if compiled else 1.5) * (1 if impl == "triton" else 1.3) * (1 + 3e8 / count)
            need = 16 * count + tokens * layers * width * (34 if impl == "naive" else 20)
            facts = {
                "study": "lm",
                "name": f"{step}[{size}-{context}-{precision}-{impl}-{compiled}]",
                "size": size,
                "context": context,
                "batch": 4,
                "step": step,
                "precision": precision,
                "impl": impl,
                "compiled": compiled,
                "parameters": count,
                "flops": flops,
                "tokens": tokens,
                "predicted_bytes": need,
            }
            if (size, context, step, precision) == ("2.7B", 1024, "train", "fp32"):
                said = "the train step ran out of memory"
                yield facts | {"status": "oom", "reason": said, "clock": "device time"}
                continue
            peak = {"peak_bytes": need * rng.uniform(0.98, 1.03)}
            seconds = rng.uniform(0.8, 1.2) * slow * flops / REACHED[precision]
            yield timed(rng, seconds, **facts, **peak)


def warmup(rng):
    """Return S3: the fewer warm-up steps, the more of the first step is in the samples."""
    for size, warm in product(("small", "2.7B"), (0, 1, 2, 5)):
        usual = 0.02 if size == "small" else 0.2
        samples = [usual * rng.uniform(0.99, 1.02) for _ in range(10)]
        if warm < 2:
            samples[0] = usual * (40 if warm == 0 else 1.6)
        mean = sum(samples) / 10
        yield timed(
            rng,
            sorted(samples)[5],
            study="warmup",
            name=f"warmup[{size}-{warm}]",
            size=size,
            context=512,
            batch=4,
            precision="bf16",
            warm_steps=warm,
            first=samples[0],
            second=samples[1],
            in_order=samples,
        ) | {"mean": mean, "std": math.sqrt(sum((s - mean) ** 2 for s in samples) / 9)}


SHARES = {
    "forward": {"matmul": 6, "softmax": 1.2, "elementwise": 2, "reduction": 0.6, "copy": 0.4},
    "forward+backward": {"matmul": 11, "softmax": 2.5, "elementwise": 5, "reduction": 1, "copy": 1},
    "train": {"matmul": 11, "softmax": 2.5, "elementwise": 5, "reduction": 1, "optimizer": 4},
}
LONG = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, a*>"


def profile(rng):
    """Return S4: kernels, categories, phases, and the parts of attention."""
    for (impl, compiled), (step, shares) in product(
        (("naive", False), ("triton", True)), SHARES.items()
    ):
        parts = dict(shares)
        if impl == "triton":
            parts["ours"] = parts.pop("softmax")
        categories = {name: 0.01 * part for name, part in parts.items()}
        names = ["nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", LONG, "flashattn_fwd", "a|b<c>*d*"]
        kernels = [
            {"name": name, "category": "matmul", "calls": 96 - i, "seconds": 0.02 / (i + 1)}
            for i, name in enumerate(names)
        ]
        total = sum(categories.values())
        yield timed(
            rng,
            total * 1.04,
            study="profile",
            name=f"profile[{step}-{impl}]",
            size="2.7B",
            context=1024,
            batch=4,
            precision="bf16",
            step=step,
            impl=impl,
            compiled=compiled,
            kernels=kernels,
            categories=categories,
            device_seconds=total,
            phases={"forward": total / 3, "backward": total / 2},
        )
    parts = {
        "scores": {"seconds": 1e-3, "flops": 4e11, "bytes": 1e9},
        "softmax": {"seconds": 4e-3, "flops": 1e10, "bytes": 8e9},
        "values": {"seconds": 1.2e-3, "flops": 4e11, "bytes": 1e9},
    }
    facts = {"seq": 4096, "head_dim": 64, "dtype": "bfloat16", "parts": parts}
    yield timed(rng, 6e-3, study="profile", name="attention_parts[4096]", **facts)


def precision(_):
    """Return S5 and S6."""
    sums = [
        ("float32", "float32", "none", 0.01, 1000, 10.000133514404297),
        ("float16", "float16", "none", 0.01, 1000, 9.953125),
        ("float32", "float16", "implicit", 0.01, 1000, 10.00213623046875),
        ("bfloat16", "bfloat16", "none", 0.01, 1000, 4.0),
        ("float16", "float16", "none", 0.001, 10000, 4.0),
        ("bfloat16", "bfloat16", "none", 0.001, 10000, 0.5),
    ]
    done = {"status": "ok", "reason": None, "study": "precision"}
    for accumulator, addend, cast, value, count, result in sums:
        curve = [[n, min(result, n * value)] for n in range(0, count + 1, count // 100)]
        yield done | {
            "name": f"sum[{accumulator}-{addend}-{count}]",
            "part": "accumulation",
            "accumulator": accumulator,
            "addend": addend,
            "cast": cast,
            "value": value,
            "count": count,
            "result": result,
            "curve": curve,
        }
    for dtype in ("float16", "bfloat16"):
        tensors = {"parameters": "float32", "first linear": dtype, "LayerNorm": "float32"}
        tensors |= {"logits": dtype, "loss": "float32", "gradients": "float32"}
        yield done | {
            "name": f"autocast[{dtype}]",
            "part": "autocast",
            "dtype": dtype,
            "tensors": tensors,
        }
        got, error = (math.inf, math.inf) if dtype == "float16" else (65280.0, 0.004)
        facts = {"quantity": "variance", "scale": 1e3, "exact": 1e6, "got": got, "error": error}
        yield done | {"name": f"layernorm[{dtype}]", "part": "layernorm", "dtype": dtype, **facts}


def memory(rng):
    """Return S8: parts, a timeline with phases, and the largest blocks."""
    count = SIZES["2.7B"][2]
    for context, step, kind in product(
        (128, 512), ("forward", "forward+backward", "train"), ("fp32", "bf16")
    ):
        parts = {
            "parameters": 4 * count,
            "activations": 5e7 * context * (1 if kind == "fp32" else 0.7),
        }
        parts |= {"gradients": 0 if step == "forward" else 4 * count}
        parts |= {"optimizer": 8 * count if step == "train" else 0}
        peak = sum(parts.values()) * rng.uniform(0.97, 1.02)
        base = parts["parameters"] + parts["optimizer"]
        points = [
            [0.4 * i / 400, base + (peak - base) * math.sin(math.pi * i / 400)] for i in range(401)
        ]
        largest = [
            {"bytes": 2**29 >> i, "line": f"lm.py:{100 + i} forward", "phase": "forward"}
            for i in range(5)
        ]
        phases = [["forward", 0, 0.12], ["backward", 0.12, 0.31], ["optimizer", 0.31, 0.4]]
        yield timed(
            rng,
            0.4,
            study="memory",
            name=f"memory[{context}-{step}-{kind}]",
            size="2.7B",
            context=context,
            batch=4,
            step=step,
            precision=kind,
            impl="naive",
            peak_bytes=peak,
            before_bytes=base,
            predicted=parts,
            measured={"parameters": 4 * count},
            residual_bytes=4 * context * 2560 * 4,
            timeline=points,
            phases=phases,
            largest=largest,
        )


def attention(rng):
    """Return S9: naive attention grows with N² and ends, ours grows with N."""
    for impl, n, d, name in product(
        ("naive", "triton"), (256, 1024, 4096, 8192, 16384), (16, 64), ("forward", "backward")
    ):
        need = 8 * n * (8 * n if impl == "naive" else 10 * d)
        facts = {
            "study": "attention",
            "name": f"{name}[{impl}-{n}-{d}]",
            "impl": impl,
            "batch": 8,
            "seq": n,
            "head_dim": d,
            "dtype": "float32",
            "causal": False,
            "pass": name,
            "flops": 32 * n * n * d,
            "predicted_bytes": need,
        }
        if impl == "naive" and n == 16384:
            yield facts | {"status": "oom", "reason": "naive ran out of memory"}
            continue
        speed = 3e13 if impl == "triton" else 6e12
        held = {"held_bytes": need, "peak_bytes": 2 * need}
        yield timed(rng, 2e-5 + facts["flops"] / speed, **facts, **held)


def compiled(rng):
    """Return S10: attention and models; one gains nothing."""
    cases = [
        {
            "subject": "attention",
            "impl": "naive",
            "seq": n,
            "head_dim": 64,
            "pass": name,
            "dtype": "float32",
        }
        for n, name in product((1024, 4096), ("forward", "backward"))
    ]
    cases += [
        {"subject": "model", "size": size, "context": 512, "precision": "bf16", "step": step}
        for size, step in product(SIZES, ("forward", "train"))
    ]
    for i, facts in enumerate(cases):
        eager = 1e-3 * (i + 1)
        name = "-".join(str(value) for value in facts.values())
        counts = {"graphs": 1, "graph_breaks": 0, "recompiles": i % 2}
        yield timed(
            rng,
            eager / (0.97 if i == 0 else 1.2 + 0.05 * i),
            study="compile",
            name=f"compile[{name}]",
            **{"eager_seconds": eager, "compile_seconds": 8.0 + i, **counts, **facts},
        )


def flash(rng):
    """Return S14: both protocols, a peer that is missing and one that runs out of memory."""
    shapes = [
        ("tokens", 16384 // n, 2048 // d, n, d, mask)
        for n, d, mask in product((512, 1024, 4096, 16384), (64, 128), (False, "top_left"))
    ]
    shapes += [("one_head", 1, 1, 2**e, d, "top_left") for e, d in product(range(7, 17), (64, 128))]
    for (protocol, batch, heads, n, d, mask), name, impl in product(
        shapes, ("forward", "backward", "forward+backward"), [*IMPLS, "flash_attn_3"]
    ):
        problem = f"bf16-b{batch}h{heads}-q{n}-d{d}-{'causal' if mask else 'full'}"
        products = {"forward": 4, "backward": 10, "forward+backward": 14}[name]
        flops = products * batch * heads * d * (n * (n + 1) // 2 if mask else n * n)
        facts = {
            "study": "flash",
            "name": f"{name}[{problem}-{impl}]",
            "impl": impl,
            "problem": problem,
            "protocol": protocol,
            "pass": name,
            "batch": batch,
            "heads": heads,
            "kv_heads": heads,
            "seq_q": n,
            "seq_kv": n,
            "head_dim": d,
            "causal": mask,
            "dtype": "bfloat16",
            "flops": flops,
            "bytes": 1,
        }
        if impl == "flash_attn_3":
            yield facts | {"status": "unsupported", "reason": "flash_attn_3 is not installed"}
        elif impl == "naive" and n == 65536:
            yield facts | {"status": "oom", "reason": "naive ran out of memory"}
        else:
            speed = IMPLS[impl] * (0.9 if mask else 1) * n / (n + 300) * rng.uniform(0.97, 1.03)
            yield timed(rng, 6e-6 + flops / speed, **facts)


def launch(rng):
    """Return the host's times."""
    costs = {"triton": 28e-6, "sdpa": 19e-6, "flex": 60e-6}
    modes = {"eager": 1, "compiled": 0.6, "graph": 0.25}
    for (impl, cost), (mode, part), name in product(
        costs.items(), modes.items(), ("forward", "forward+backward")
    ):
        facts = {"impl": impl, "mode": mode, "pass": name, "dtype": "bfloat16"}
        yield timed(
            rng,
            cost * part * (3 if "+" in name else 1),
            study="launch",
            name=f"{name}[{impl}-{mode}]",
            problem="bf16-b1h1-q128-d64-full",
            **facts,
        )


def accuracy(rng):
    """Return the errors of four, and which clauses of the contract they keep."""
    outputs = ("o", "lse", "dq", "dk", "dv")
    for dtype, head_dim, impl in product(
        ("bfloat16", "float32"), (64, 128), ("triton", "naive", "sdpa_flash", "flex")
    ):
        facts = {"part": "errors", "impl": impl, "dtype": dtype, "head_dim": head_dim}
        facts |= {"study": "accuracy", "name": f"errors[{dtype}-{head_dim}-{impl}]"}
        if impl == "sdpa_flash" and dtype == "float32":
            yield facts | {"status": "unsupported", "reason": "sdpa_flash takes fp16 and bf16 only"}
            continue
        errors = {
            values: {
                name: {"max": rng.uniform(0.3, 3), "mean": rng.uniform(0.01, 0.1), "bias": 1e-4}
                | {"max_budget": 2.5, "mean_budget": None if name == "lse" else 0.09}
                for name in outputs
                if name != "lse" or impl == "triton"
            }
            for values in ("normal", "huge_v")
        }
        yield timed(rng, 1e-3, **facts, errors=errors)
    verdicts = {"triton": "keeps", "sdpa_flash": "refuses", "naive": "breaks"}
    for impl, verdict in verdicts.items():
        said = None if verdict == "keeps" else "o: NaN"
        facts = {"part": "contract", "impl": impl, "study": "accuracy", "name": f"contract[{impl}]"}
        clauses = {"causal": {"verdict": "keeps", "said": None}}
        clauses |= {"zero lengths": {"verdict": verdict, "said": said}}
        yield timed(rng, 2.0, **facts, clauses=clauses)


@pytest.fixture(scope="session")
def made_run():
    """A run with rows of every study, the same every time; its numbers are made up."""
    rng = random.Random(0)  # noqa: S311 - noise for pictures
    makers = (lm, warmup, profile, precision, memory, attention, compiled, flash, launch)
    makers += (accuracy,)
    return Run(
        machine={
            "accelerator": "nvidia-h200",
            "gpu": "NVIDIA H200",
            "power_limit_watts": 700.0,
            "driver": "580.1",
            "cuda": "13.0",
            "torch": "2.11",
            "triton": "3.6",
        },
        commit={"id": "0123456789abcdef", "dirty": False},
        roofs=ROOFS,
        clocks={"before": 1.98e9, "after": 1.755e9},
        command="pytest benchmarks --sweep full",
        made="2026-11-21T04:14:00+00:00",
        name="nvidia-h200/0002_0123456789.json",
        rows=[row for maker in makers for row in maker(rng)],
    )


@pytest.fixture(scope="session")
def made_pictures(made_run):
    """What every study draws of the made-up run, by its name and the picture's."""
    return {study.name: study.pictures(made_run) for study in STUDIES}
