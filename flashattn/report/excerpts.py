"""The tables in the README and the docs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from flashattn.report.excerpt import (
    PASSES,
    Excerpt,
    both_passes,
    broken_clauses,
    category,
    fastest,
    held,
    kept_clauses,
    mean_ratio,
    number,
    over_budget,
    rate,
    ratio,
    unwarmed,
    worst,
)
from flashattn.report.rows import ANY_ORDER, KERNELS, NAIVE, share
from flashattn.report.studies import compile as compiling
from flashattn.report.studies.integrations import ACTIVATED, DIRECT, FATTN, LENGTHS, UNITS
from flashattn.report.studies.integrations import PEERS as ATTENTIONS
from flashattn.report.units import MASKS, digits, gib, mib, microseconds, ms, of_roof, times

CUDNN, FA2, FA4, FLEX, SDPA = "sdpa_cudnn", "sdpa_flash", "flash_attn_4", "flex", "sdpa"
EFFICIENT = "sdpa_efficient"
PEERS = {"cuDNN": CUDNN, "FA-4": FA4, "FlexAttention": FLEX, "FA-2": FA2}
TOKENS = {"protocol": "tokens", "dtype": "bfloat16"}
SIZES = "bf16, 16 384 tokens, hidden size 2048 (1920 at D = 192)"  # of the rows in TOKENS
SPEED = (
    "TFLOP/s: operations of the pairs that the mask leaves, over the median device time with a"
    " cold L2 cache. Ratio: time of the fastest peer in the table over ours."
)


def _speeds(peers: Mapping[str, str], **where: Any) -> Excerpt:
    return Excerpt(
        study="flash",
        where={**TOKENS, **where},
        lines={"N": "seq_q", "D": "head_dim", "mask": "causal"},
        cells={
            **both_passes(peers, rate),
            "backward: ours, any order": rate(impl=ANY_ORDER, **{"pass": "backward"}),
        },
        note=f"{SIZES}. {SPEED} FA-4 adds in any order.",
    )


def _ratios(who: str, peer: str) -> Excerpt:
    return Excerpt(
        study="flash",
        where=TOKENS,
        lines={"D": "head_dim"},
        cells={
            f"{name}, {MASKS[mask]}": mean_ratio(peer, **{"pass": name}, causal=mask)
            for name in PASSES
            for mask in (False, "top_left")
        },
        note=f"Our speed over {who}'s, geometric mean (least to greatest) over the lengths,"
        f" {SIZES}.",
    )


def _problems(study: str, **where: Any) -> Excerpt:
    return Excerpt(
        study=study,
        where=where,
        lines={"problem": "problem"},
        cells=both_passes({"SDPA": SDPA, "FA-4": FA4, "FlexAttention": FLEX}, partial(number, ms)),
        note="Median device time in ms. Ratio: time of the fastest peer in the table over ours.",
    )


def _activated(part: str) -> Excerpt:
    what, name, unit = UNITS[part]
    cells = {x: number(unit, attention=x) for x in (ACTIVATED, DIRECT, SDPA)}
    return Excerpt(
        study="integrations",
        where={"part": part},
        lines={"problem": "problem", "pass": "pass"},
        cells=cells | {"ratio": ratio({"attention": ACTIVATED}, {"attention": DIRECT})},
        note=f"Median {what} of a call in {name}. Ratio: time of {ACTIVATED} over {DIRECT}.",
    )


def _model(**where: Any) -> dict[str, Any]:
    return {"size": "2.7B", "context": 1024, "batch": 4, **where}


EXCERPTS: dict[str, Excerpt] = {
    "speed": _speeds({"cuDNN": CUDNN, "FA-4": FA4}, seq_q=16384, head_dim=(64, 128, 256)),
    "speeds": _speeds(PEERS, seq_q=(4096, 16384), head_dim=(64, 128, 192, 256)),
    "gaps": Excerpt(
        study="flash",
        where={**TOKENS, "pass": PASSES},
        lines={"pass": "pass", "D": "head_dim"},
        cells={
            "least speed over the fastest peer's (problem)": partial(worst, tuple(PEERS.values()))
        },
        note=f"Where ours is the slower: {SIZES}, against cuDNN, FlashAttention and FlexAttention.",
    ),
    "ratios": _ratios("cuDNN", CUDNN),
    "ratios-fa4": _ratios("FlashAttention-4", FA4),
    "roofline": Excerpt(
        study="flash",
        where={**TOKENS, "causal": False, "seq_q": 4096, "impl": KERNELS, "pass": "forward"},
        lines={"D": "head_dim"},
        cells={
            "operations per byte": lambda rows: digits(rows[-1]["flops"] / rows[-1]["bytes"]),
            "TFLOP/s": rate(),
            "of the products' roof": fastest(
                lambda row: of_roof(share(row["run"], row, row["dtype"]))
            ),
        },
        note=f"Forward, no mask, N = 4096, {SIZES}; bytes: of q, k, v, o and the logsumexp, once.",
    ),
    "fp32": Excerpt(
        study="flash",
        where={"protocol": "batch", "dtype": "float32", "seq_q": 16384},
        lines={"D": "head_dim", "N": "seq_q", "mask": "causal"},
        cells=both_passes({"memory-efficient": EFFICIENT}, rate),
        note=f"fp32, eight sequences of one head. {SPEED}",
    ),
    "one-head": Excerpt(
        study="flash",
        where={
            "protocol": "one_head",
            "dtype": "bfloat16",
            "seq_q": (4096, 32768),
            "head_dim": (64, 128),
        },
        lines={"D": "head_dim", "N": "seq_q", "mask": "causal"},
        cells=both_passes(
            {"cuDNN": CUDNN, "FA-4": FA4, "FA-2": FA2, "naive": NAIVE},
            partial(number, microseconds),
        ),
        note="One head of one sequence, bf16: µs. Ratio: time of the fastest peer in the table over"
        " ours.",
    ),
    "grouped": _problems("heads", seq_q=lambda rows: rows > 1),
    "decoding": Excerpt(
        study="heads",
        where={"seq_q": 1},
        lines={"problem": "problem"},
        cells={
            "ours, µs": number(microseconds, impl=KERNELS),
            "SDPA, µs": number(microseconds, impl=(SDPA, FA2, EFFICIENT, CUDNN)),
            "FlexAttention, µs": number(microseconds, impl=FLEX),
            "ratio": ratio({"impl": (SDPA, FA2, EFFICIENT, CUDNN, FLEX)}, {"impl": KERNELS}),
        },
        note="One query, bf16. SDPA: its fastest backend. Ratio: time of the fastest peer in the"
        " table over ours.",
    ),
    "masks": _problems("masks"),
    "scores": _problems("scores", learned=(None, False)),
    "train": Excerpt(
        study="lm",
        where=_model(step="train"),
        lines={"precision": "precision", "attention": "impl"},
        cells={
            "eager, ms": number(ms, compiled=False),
            "compiled, ms": number(ms, compiled=True),
            "peak of eager, GiB": number(gib, "peak_bytes", compiled=False),
        },
        note="A train step of the 2.7B model, context 1024, batch 4.",
    ),
    "long": Excerpt(
        study="lm",
        where={"checkpoint": True, "step": "train", "precision": "bf16"},
        lines={"model": "size", "N": "context", "documents": "packed"},
        cells={
            "ours, ms": number(ms, impl=KERNELS),
            "SDPA, ms": number(ms, impl=SDPA),
            "FlexAttention, ms": number(ms, impl=FLEX),
            "ratio": ratio({"impl": (SDPA, FLEX)}, {"impl": KERNELS}),
            "ours, TFLOP/s": rate(impl=KERNELS),
            "ours: peak, GiB": number(gib, "peak_bytes", impl=KERNELS),
        },
        note="A train step of one sequence in bf16, eager, blocks checkpointed. TFLOP/s: operations"
        " of the model, without those recomputed. Ratio: time of the fastest peer in the"
        " table over ours. From N = 32 768 on medians of two steps, else of five.",
    ),
    "phases": Excerpt(
        study="lm",
        where={**_model(impl=NAIVE, compiled=False), "size": "large"},
        lines={"precision": "precision"},
        cells={
            **{f"{step}, ms": number(ms, step=step) for step in (*PASSES, "train")},
            "train, TFLOP/s": rate(step="train"),
        },
        note="The large model, context 1024, batch 4, naive attention, eager.",
    ),
    "host": Excerpt(
        study="launch",
        where={"dtype": "bfloat16"},
        lines={"attention": "impl"},
        cells={
            f"{'both' if '+' in name else name}, {mode}": number(
                microseconds, mode=mode, **{"pass": name}
            )
            for name in ("forward", "forward+backward")
            for mode in ("eager", "compiled", "graph")
        },
        note="Host time of a call in µs, by the wall clock: 2 heads of 64, D = 64, causal, bf16."
        " Floor: an autograd function that only allocates; launching: that launches an empty"
        " kernel, too.",
    ),
    "sdpa-device": _activated("device"),
    "sdpa-host": _activated("host"),
    "steps": Excerpt(
        study="integrations",
        where={"model": bool},
        lines={"model": "model", "tokens": "context", "inputs": "inputs"},
        cells={
            **{x: number(ms, attention=x) for x in (LENGTHS, FATTN, *ATTENTIONS)},
            **{
                f"speed / {x}": ratio({"attention": x}, {"attention": (LENGTHS, FATTN)})
                for x in ATTENTIONS
            },
            **{f"waits of {x}": number(digits, "waits", attention=x) for x in (LENGTHS, FATTN)},
        },
        note="Forward and backward in ms: bf16, batch 1, 8 layers of Llama, 4 of Gemma, random"
        " weights. Waits: how often the host waits for the GPU in a step.",
    ),
    "first-steps": Excerpt(
        study="warmup",
        where={},
        lines={"model": "size", "precision": "precision"},
        cells={
            "first step": number(ms, "first", warm_steps=0),
            "second": number(ms, "second", warm_steps=0),
            "after five": number(ms, warm_steps=5),
            "mean of ten without warm-up": unwarmed,
        },
        note="Train steps in ms, context 512, batch 4.",
    ),
    "kernels": Excerpt(
        study="profile",
        where=_model(step="train", categories=bool),
        lines={"precision": "precision", "attention": "impl", "mode": "compiled"},
        cells={
            name: partial(category, name)
            for name in ("matmul", "elementwise", "copy", "softmax", "optimizer", "ours")
        },
        note="Share of a train step's device time, 2.7B, context 1024, batch 4.",
    ),
    "sums": Excerpt(
        study="precision",
        where={"part": "accumulation", "count": 1000, "cast": ("none", "explicit")},
        lines={"sum in": "accumulator", "addend in": "addend"},
        cells={"result": lambda rows: f"{rows[-1]['result']:.6g}"},
        note="The sum of 1000 addends of 0.01, one after the other.",
    ),
    "memory": Excerpt(
        study="memory",
        where={"size": "2.7B", "context": 512, "step": "train"},
        lines={"precision": "precision", "attention": "impl"},
        cells={
            "parameters, gradients, moments": partial(
                held, ("parameters", "gradients", "optimizer")
            ),
            "activations": partial(held, ("activations",)),
            "peak": number(gib, "peak_bytes"),
            "predicted peak": number(gib, "predicted_bytes"),
        },
        note="GiB of a train step of 2.7B, context 512, batch 4.",
    ),
    "square": Excerpt(
        study="attention",
        where={"head_dim": 64, "dtype": "bfloat16", "impl": (NAIVE, *KERNELS)},
        lines={"N": "seq"},
        cells={
            "naive: held, MiB": number(mib, "held_bytes", impl=NAIVE),
            "ours: held, MiB": number(mib, "held_bytes", impl=KERNELS),
            **{
                f"{who}: {name}, ms": number(ms, impl=impl, **{"pass": name})
                for name in PASSES
                for who, impl in (("naive", NAIVE), ("ours", KERNELS))
            },
        },
        note="Causal, bf16, batch 8, one head, D = 64; held: kept for the backward pass, besides q,"
        " k and v.",
    ),
    "compiling": Excerpt(
        study="compile",
        where={"subject": "model", "step": "train"},
        lines={"model": "size", "precision": "precision", "attention": "impl"},
        cells={
            "eager, ms": number(ms, "eager_seconds"),
            "compiled, ms": number(ms),
            "speed-up": fastest(lambda row: times(compiling.gain(row))),
            "compiling, s": number(digits, "compile_seconds"),
            "pays off after steps": fastest(compiling.break_even),
        },
        note="Train steps, context 1024, batch 4. Compiling: with empty disk caches.",
    ),
    "parallel": Excerpt(
        study="parallel",
        where={"pass": ("forward", "forward+backward")},
        lines={"problem": "problem", "pass": "pass", "GPUs": "world"},
        cells={
            "ours, ms": number(ms, method="keys"),
            "predicted, ms": number(ms, "predicted_seconds", method="keys"),
            "PyTorch, ms": number(ms, method="pytorch"),
            "ratio": ratio({"method": "pytorch"}, {"method": "keys"}),
        },
        note="Time of the slowest rank. Ratio: time of PyTorch's context_parallel over ours.",
    ),
    "parallel-steps": Excerpt(
        study="parallel",
        where={"pass": "train"},
        lines={"model": "size", "N": "context", "GPUs": "world"},
        cells={
            "train step, ms": number(ms),
            "loss of the last step": number(lambda losses: digits(losses[-1]), "losses"),
        },
        note="A train step of one sequence in bf16, tokens and parameters (FSDP2) shared by the"
        " GPUs. Time of the slowest rank.",
    ),
    "accuracy": Excerpt(
        study="accuracy",
        where={},
        lines={"implementation": "impl"},
        cells={
            "errors above the budget": over_budget,
            "clauses kept": kept_clauses,
            "clauses broken": broken_clauses,
        },
        note="Errors: maximum and mean of five outputs for five kinds of values, three dtypes and"
        " D = 64, 128, 256. A clause that is neither kept nor broken is refused with an error.",
    ),
}
