"""Run one sample again: ``python -m flashattn.testing.repro --impl my_kernel.py --problem ...``.

Failing tests print such a command, with the smallest problem found for which a kernel fails.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import sys
from functools import partial

import torch

# Triton reads this when it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import flashattn.impls  # noqa: F401 - registers everyone
from flashattn import registry
from flashattn.checks import check_scale
from flashattn.problem import Problem
from flashattn.testing.accuracy import InaccurateError, assert_accurate
from flashattn.testing.layouts import GRAD_LAYOUTS, LAYOUTS
from flashattn.testing.plugin_file import asked, choose
from flashattn.testing.sample import Sample
from flashattn.testing.shrink import shrink
from flashattn.testing.values import VALUES


def ask(impl: registry.Impl, sample: Sample) -> str | None:
    """Return the failure of an implementation on a sample, or None.

    Raises:
        Exception: any error that the implementation itself raises.
    """
    scale = check_scale(sample.scale, sample.problem.head_dim)
    if impl.compiles:
        torch.compiler.reset()  # else it gives up compiling after some shapes
    try:
        assert_accurate(partial(impl, **sample.problem.keywords, scale=scale), sample)
    except InaccurateError as error:
        return str(error)
    return None


def smallest(impl: registry.Impl, sample: Sample) -> tuple[str, str] | None:
    """Return the failure on the smallest sample that fails, and the command that repeats it.

    None if ``sample`` itself does not fail: then a test did more than run it.
    """

    def fails(other: Sample) -> bool:
        try:
            reason = impl.why_not(other.problem, other.device, grad=other.grad)
            solved = reason is None and impl.takes_scale(other.scale)
            return solved and ask(impl, other) is not None
        except Exception:  # noqa: BLE001 - falling over is another bug than being wrong
            return False

    if not fails(sample):
        return None
    sample = shrink(sample, fails)
    return ask(impl, sample) or "", line(impl, sample)


def line(impl: registry.Impl, sample: Sample) -> str:
    """Return the command that runs ``impl`` on the sample."""
    words = ["python", "-m", "flashattn.testing.repro", "--impl", asked(impl)]
    words += ["--problem", str(sample.problem)]
    usual = Sample(problem=sample.problem)
    words += [
        f"--{name.replace('_', '-')}={getattr(sample, name)}"  # one word: a scale may be negative
        for name in ("values", "layout", "grad_layout", "scale", "seed")
        if getattr(sample, name) != getattr(usual, name)
    ]
    return shlex.join(words)


def main(arguments: list[str] | None = None) -> int:
    """Run the sample on the chosen implementations; return 1 if one of them is wrong, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m flashattn.testing.repro", description="Run one sample again."
    )
    parser.add_argument("--impl", required=True, help="NAME, FILE.py or FILE.py:NAME")
    parser.add_argument("--problem", required=True, help="as bf16-b2h8kv2-q1-kv70-d64-causal_br")
    parser.add_argument("--values", choices=VALUES, default="normal")
    parser.add_argument("--layout", choices=LAYOUTS, default="contiguous")
    parser.add_argument("--grad-layout", choices=GRAD_LAYOUTS, default="contiguous")
    parser.add_argument("--scale", type=float)
    parser.add_argument("--seed", type=int, default=0)
    asked_for = vars(parser.parse_args(arguments))
    option, device = asked_for.pop("impl"), "cuda" if torch.cuda.is_available() else "cpu"
    try:
        names, problem = choose(option), Problem.parse(asked_for.pop("problem"))
        check_scale(asked_for["scale"], problem.head_dim)
    except ValueError as error:
        parser.error(str(error))
    if os.environ.get("TRITON_INTERPRET") == "1":
        importlib.import_module("flashattn.testing.patching").patch_interpreter()
    wrong = False
    for impl in map(registry.get, names):
        sample = Sample(
            problem=problem,
            device=device,
            grad=impl.grad,
            lse=impl.lse,
            denormals=impl.denormals,
            **asked_for,
        )
        reason = impl.why_not(problem, device, grad=impl.grad)
        failure = ask(impl, sample) if reason is None else None
        print(f"{impl.name}: {reason or failure or f'{problem}: within its budgets'}")
        wrong |= failure is not None
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
