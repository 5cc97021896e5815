"""Which clauses of the contract an implementation keeps, found by trying each on small problems.

An implementation keeps a clause if its results are within the budgets (or bit-identical, where the
clause requires it). It refuses a clause if it raises an error, which is fair, and breaks a clause
if its results are wrong. Clauses are tried even if the implementation declares them unsupported.
If there is too little memory, which other processes may hold, a clause is not judged.

Try all clauses, or some, and print a JSON line for each::

    python -m flashattn.testing.contract cuda sdpa_flash
    python -m flashattn.testing.contract cuda sdpa_flash "zero lengths" "any strides"

A kernel that gets a problem it does not support may access memory illegally and end the process,
which is a result, too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import flashattn.impls  # noqa: F401 - registers everyone
from flashattn.measure.device import out_of_memory
from flashattn.problem import Problem
from flashattn.registry import Impl, get
from flashattn.testing.accuracy import Expected
from flashattn.testing.form import FormError, check_form
from flashattn.testing.inputs import GRAD_LAYOUTS, LAYOUTS, make_grads, make_inputs
from flashattn.testing.sample import Case, Outputs, Sample, run
from flashattn.testing.state import TraceError, unchanged
from flashattn.testing.values import sunken

KEEPS, BREAKS, REFUSES, CRASHES = "keeps", "breaks", "refuses", "crashes"
UNJUDGED = "not judged"
LONGEST = 150  # at most so many characters of an error are reported
SEQ_Q, SEQ_KV = 40, 70
ROWS, MANY = 4096, 40  # rows; batches, or heads
DTYPES = ("bfloat16", "float16", "float32")
NEAR = 4096  # elements from one head to the next: this, or more than 2^31
FAR = 2**31 + NEAR
Trial = Callable[[Impl, torch.device], None]
Outcome = dict[str, str | None]


class ClauseError(AssertionError):
    """A wrong result. Any other AssertionError is the implementation's own: a refusal."""


def usual(impl: Impl, device: torch.device) -> Problem:
    """Return a small, ordinary problem in the first dtype that ``impl`` takes."""
    problems = [Problem(heads=2, seq_q=SEQ_Q, head_dim=64, dtype=dtype) for dtype in DTYPES]
    taken = (x for x in problems if impl.why_not(x, device, grad=impl.grad) is None)
    return next(taken, problems[-1])


def _asked(*each: Mapping[str, Any], **facts: Any) -> Trial:
    """Return a trial of the usual problem with other fields of it, or of its ``Sample``."""
    return partial(_within, each=each or (facts,))


def _within(
    impl: Impl,
    device: torch.device,
    each: Sequence[Mapping[str, Any]] = ({},),
    *,
    grad_lse: bool = False,
    change: Callable[[Case], Case] = lambda case: case,
) -> None:
    """Check the usual problem, with other fields, against its budgets."""
    for facts in each:
        how = {name: x for name, x in facts.items() if name in Sample.__dataclass_fields__}
        sizes = {name: x for name, x in facts.items() if name not in how}
        problem = replace(usual(impl, device), **sizes)
        sample = Sample(problem=problem, device=device, lse=impl.lse, **how)
        case, enlarged = (
            replace(change(drawn), grad_lse=drawn.grad_lse if grad_lse else None)  # its own clause
            for drawn in (sample.draw(), sample.enlarged().draw())
        )
        got = run(partial(impl, **problem.keywords, scale=case.scale), case)
        failures = Expected.of(case, enlarged).failures(got)
        if failures:
            raise ClauseError(f"{problem}: {'; '.join(failures)}")


def _low_scores(impl: Impl, device: torch.device) -> None:
    low = {"values": "zeros", "scale": 1.0, "causal": True}
    _within(impl, device, [low], change=lambda case: replace(case, inputs=sunken(*case.inputs)))


def _lse(impl: Impl, device: torch.device, *, grad: bool) -> None:
    problem = usual(impl, device)
    _, lse = impl(*make_inputs(problem, device=device), causal=False, scale=0.125)
    if lse is None:
        raise NotImplementedError("it returns none")
    _within(impl, device, grad_lse=grad)


def _outputs(impl: Impl, problem: Problem, inputs: tuple[torch.Tensor, ...]) -> Outputs:
    """Return all outputs, and the gradients of o."""
    q, k, v = inputs
    grad_o, _ = make_grads(problem, device=q.device)
    scale = problem.head_dim**-0.5
    case = Case(problem=problem, inputs=(q, k, v), scale=scale, grad_o=grad_o)
    return run(partial(impl, **problem.keywords, scale=scale), case)


def _same(got: Outputs, wanted: Outputs, what: str) -> None:
    differ = [name for name, x in got.items() if not torch.equal(x, wanted[name])]
    if differ:
        raise ClauseError(f"{', '.join(differ)}: {what}")


def _form(impl: Impl, device: torch.device) -> None:
    for dtype in DTYPES:
        problem = replace(usual(impl, device), dtype=dtype, causal=True, seq_kv=SEQ_KV)
        if impl.why_not(problem, device, grad=impl.grad) is None:
            inputs = make_inputs(problem, device=device)
            check_form(inputs, _outputs(impl, problem, inputs))


def _no_trace(impl: Impl, device: torch.device) -> None:
    problem = usual(impl, device)
    inputs = make_inputs(problem, device=device)
    _outputs(impl, problem, inputs)  # imports at first use do not count
    for turn in range(2):
        with unchanged(device, inputs, turn):
            _outputs(impl, problem, inputs)


def _repeats(impl: Impl, device: torch.device) -> None:
    on_gpu, problem = device.type == "cuda", replace(usual(impl, device), causal=True)
    if on_gpu:  # enough programs to run in a varying order
        problem = replace(problem, batch=2, heads=8, kv_heads=8, seq_q=1000, seq_kv=1000)
    inputs = make_inputs(problem, device=device)
    first = _outputs(impl, problem, inputs)
    for _ in range(49 if on_gpu else 2):
        _same(_outputs(impl, problem, inputs), first, "other bits in another run")


def _future(impl: Impl, device: torch.device, poisoned: str) -> None:
    problem = replace(usual(impl, device), causal=True)
    q, k, v = make_inputs(problem, device=device)
    scale = problem.head_dim**-0.5
    call: Callable[..., Any] = partial(impl, **problem.keywords, scale=scale)
    clean = call(q, k, v)[0][:, :, :13]
    for poison in (torch.nan, torch.inf):
        {"keys": k, "values": v}[poisoned][:, :, 13:] = poison
        o = call(q, k, v)[0][:, :, :13]
        how = "shows" if o.isfinite().all() else "shows as NaN or inf"
        _same({"o": o}, {"o": clean}, f"{poison} behind the mask {how}")


def _unseen(impl: Impl, device: torch.device) -> None:
    problem = replace(usual(impl, device), causal="top_left", seq_kv=SEQ_KV)
    q, k, v = make_inputs(problem, device=device)
    clean = _outputs(impl, problem, (q, k, v))
    for poison in (torch.nan, torch.inf):
        for x in (k, v):
            x[:, :, SEQ_Q:] = poison
        got = _outputs(impl, problem, (q, k, v))
        _same(got, clean, f"{poison} in keys and values that no query sees shows")


def _far(impl: Impl, device: torch.device) -> None:
    problem = replace(usual(impl, device), dtype="float16", head_dim=64)
    inputs = make_inputs(problem, device=device)
    if impl.why_not(problem, device) is not None:
        raise NotImplementedError("it does not take fp16, in which this is tried")

    def apart(x: torch.Tensor, elements: int) -> torch.Tensor:
        """Return a copy in two heads of one buffer; the memory between them is not touched."""
        rows = problem.seq_q * problem.head_dim
        buffer = torch.empty(elements + rows, dtype=x.dtype, device=device)
        return buffer.as_strided(x.shape, (0, elements, problem.head_dim, 1)).copy_(x)

    # Both have the same kind of strides, by which PyTorch chooses its matrix product.
    far, near = (
        _outputs(impl, problem, tuple(apart(x, elements) for x in inputs))
        for elements in (FAR, NEAR)
    )
    _same(far, near, "wrong when far")


def _twice(impl: Impl, device: torch.device) -> None:
    problem = usual(impl, device)
    inputs = make_inputs(problem, device=device)
    grad_o, _ = make_grads(problem, device=device)

    def second(call: Callable[..., Any]) -> torch.Tensor:
        q, k, v = (x.detach().requires_grad_() for x in inputs)
        (dq,) = torch.autograd.grad(call(q, k, v)[0], q, grad_o, create_graph=True)
        return torch.autograd.grad(dq.square().sum(), k)[0]

    wanted = second(partial(get("reference"), causal=False, scale=0.125)).float()
    got = second(partial(impl, causal=False, scale=0.125)).float()
    if not (got - wanted).norm() <= 0.1 * wanted.norm():
        raise ClauseError("a wrong second derivative in place of an error")


# An error keeps this clause as well; a silent zero breaks it.
ERRORS_KEEP = "second derivative or an error"
LONGER: dict[str, Any] = {"seq_kv": SEQ_KV}  # T < S
CLAUSES: dict[str, Trial] = {
    **{dtype: _asked(dtype=dtype) for dtype in ("float32", "float16", "bfloat16")},
    "head dims 8, 80, 256, 7": _asked(*({"head_dim": n} for n in (8, 80, 256, 7))),
    "T != S": _asked(LONGER, LONGER | {"seq_q": 1}),
    "grouped heads": _asked({"heads": 4, "kv_heads": 2}, {"heads": 3, "kv_heads": 1}),
    "causal": _asked(causal="top_left"),
    "causal top-left, T < S": _asked(causal="top_left", **LONGER),
    "causal bottom-right, T < S": _asked(causal="bottom_right", **LONGER),
    "causal window": _asked(causal="top_left", window=(9, None)),
    "two-sided window": _asked(window=(9, 5)),
    "softcap": _asked(softcap=0.7),
    "ALiBi, T < S": _asked(alibi=True, **LONGER),
    "bias of each score": _asked(bias="bhts"),
    "bias of all batches, causal": _asked(bias="1hts", causal="top_left"),
    "relative bias, T < S": _asked(bias="1hr", **LONGER),
    "sink, causal": _asked(sink=True, causal="top_left"),
    "no visible key: 0 and -inf": _asked(causal="bottom_right", seq_q=SEQ_KV, seq_kv=SEQ_Q),
    "NaN and inf in keys behind the mask": partial(_future, poisoned="keys"),
    "NaN and inf in values behind the mask": partial(_future, poisoned="values"),
    "NaN and inf where no query looks": _unseen,
    "scores of -131072, causal": _low_scores,
    "zero lengths": _asked({"batch": 0}, {"heads": 0, "kv_heads": 0}, {"seq_q": 0}, {"seq_kv": 0}),
    "scales 0.3, 0, -0.2": _asked(*({"causal": True, "scale": x} for x in (0.3, 0.0, -0.2))),
    "4096 rows, 40 batches, 40 heads": _asked(
        {"seq_q": ROWS},
        {"seq_kv": ROWS},
        {"seq_q": 513, "seq_kv": 777},
        {"causal": True, "seq_q": 777, "seq_kv": 777},
        {"batch": MANY},
        {"heads": MANY, "kv_heads": MANY},
    ),
    "any strides": _asked(*({"layout": layout} for layout in LAYOUTS)),
    "any strides of gradients": _asked(*({"grad_layout": layout} for layout in GRAD_LAYOUTS)),
    "offsets above 2^31": _far,
    "lse returned": partial(_lse, grad=False),
    "gradient of lse": partial(_lse, grad=True),
    ERRORS_KEEP: _twice,
    "dtype, shape and memory of results": _form,
    "no trace left behind": _no_trace,
    "same bits every run": _repeats,
}


def try_clause(impl: Impl, device: torch.device, clause: str) -> Outcome:
    """Try one of ``CLAUSES``.

    Returns:
        ``verdict``, one of the five words above, and ``said``, the error's first line, or None.
    """
    if impl.compiles:
        torch.compiler.reset()  # else it gives up compiling after some shapes
    try:
        CLAUSES[clause](impl, device)
    except (ClauseError, FormError, TraceError) as error:
        return {"verdict": BREAKS, "said": _line(error)}
    except Exception as error:  # noqa: BLE001 - whatever an implementation raises is its refusal
        if out_of_memory(error):
            return {"verdict": UNJUDGED, "said": _line(error)}
        crashed = isinstance(error, torch.AcceleratorError)
        kept = KEEPS if clause == ERRORS_KEEP else REFUSES
        return {"verdict": CRASHES if crashed else kept, "said": _line(error)}
    return {"verdict": KEEPS, "said": None}


def _line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[0] if lines else type(error).__name__
    return said if len(said) <= LONGEST else said[: LONGEST - 3] + "..."


def try_contract(impl: Impl, device: torch.device) -> dict[str, Outcome]:
    """Try every clause: on a CPU in this process, on a GPU in new ones, another after each crash.

    On a GPU the new process looks the implementation up by name.

    Raises:
        RuntimeError: the process failed before it tried a clause; the message has the end of its
            stderr.
    """
    if device.type != "cuda":
        return {clause: try_clause(impl, device, clause) for clause in CLAUSES}
    found: dict[str, Outcome] = {}
    while len(found) < len(CLAUSES):
        left = [clause for clause in CLAUSES if clause not in found]
        command = [sys.executable, "-m", "flashattn.testing.contract", str(device), impl.name]
        done = subprocess.run([*command, *left], capture_output=True, text=True, check=False)  # noqa: S603
        told = dict(_told(done.stdout))
        if not told and done.returncode == 2:  # noqa: PLR2004 - argparse's and ours for a wrong name
            raise RuntimeError(f"a new process for the contract failed: {done.stderr[-2000:]}")
        found |= told
        crashed = done.returncode != 0 and CRASHES not in {x["verdict"] for x in told.values()}
        if crashed and len(found) < len(CLAUSES):
            clause = next(clause for clause in left if clause not in told)
            found[clause] = {"verdict": CRASHES, "said": f"exit status {done.returncode}"}
    return found


def _told(text: str) -> Iterator[tuple[str, Outcome]]:
    for line in text.splitlines():
        if line.startswith('{"clause"'):
            said = json.loads(line)
            yield said.pop("clause"), said


def main(arguments: list[str]) -> int:
    """Print the verdicts; return 0, or 1 after a crash; wrong arguments exit with 2."""
    parser = ArgumentParser(prog="python -m flashattn.testing.contract", description=__doc__)
    parser.add_argument("device", help="cpu or cuda")
    parser.add_argument("impl", help="a name in flashattn.names()")
    parser.add_argument("clauses", nargs="*", help="(default: all)")
    options = parser.parse_args(arguments)
    try:
        impl, device = get(options.impl), torch.empty(0, device=options.device).device
    except (AssertionError, RuntimeError, ValueError) as error:  # no such name, or no such device
        parser.error(str(error))
    for clause in options.clauses or CLAUSES:
        said = try_clause(impl, device, clause)
        sys.stdout.write(json.dumps({"clause": clause} | said) + "\n")
        sys.stdout.flush()
        if said["verdict"] == CRASHES:
            return 1  # the CUDA context is lost, so no further clause can run
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
