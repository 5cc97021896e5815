"""The same inputs give the same bits: o, lse and every gradient, whatever else the GPU does.

Processes share a GPU in time slices of a few milliseconds, so a kernel that takes as long is
interrupted, and its registers and shared memory are saved and restored.
"""

import subprocess
import sys
from functools import partial
from itertools import chain, product

import pytest
import torch

from flashattn.problem import Problem
from flashattn.registry import get
from flashattn.testing.accuracy import Sample, run

RUNS = {"cuda": 50, "cpu": 2}


def disturb(device, stream):
    """Keep some SMs busy, so that programs start in another order every time."""
    if stream is None:
        return
    with torch.cuda.stream(stream):
        noise = torch.empty(2048, 2048, device=device, dtype=torch.bfloat16).fill_(1)
        for _ in range(int(torch.randint(1, 4, ()))):
            noise = noise @ noise


def why_not(name, dtype, head_dim, causal):
    """Return why a case is left out."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and head_dim > 64:
        return "the interpreter runs one program after the other, at any width"
    problem = Problem(seq_q=70, head_dim=head_dim, causal=causal, dtype=dtype)
    return get(name).why_not(problem, device, grad=True)


@pytest.mark.why_not.with_args(why_not)
@pytest.mark.parametrize("causal", [False, "top_left"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("name", "dtype"), [("triton", "bfloat16"), ("triton", "float32"), ("hopper", "bfloat16")]
)
def test_runs_are_alike_bit_by_bit(device, name, dtype, head_dim, causal):
    """Fifty runs beside other work on the GPU differ in no bit of o, lse, dq, dk and dv."""
    on_gpu = device.type == "cuda"
    sizes = {"batch": 2, "heads": 16, "kv_heads": 4} if on_gpu else {"heads": 2, "kv_heads": 1}
    length = 1000 if on_gpu else 70
    problem = Problem(**sizes, seq_q=length, head_dim=head_dim, causal=causal, dtype=dtype)
    case = Sample(problem=problem, device=device).draw()
    call = partial(get(name), **problem.keywords, scale=case.scale)
    stream = torch.cuda.Stream(device) if on_gpu else None
    first = run(call, case)
    assert set(first) == {"o", "lse", "dq", "dk", "dv"}
    for _ in range(RUNS[device.type] - 1):
        disturb(device, stream)
        again = run(call, case)
        differ = [output for output, x in first.items() if not torch.equal(x, again[output])]
        assert not differ


ROWS = {"bfloat16": {"triton": 8192, "hopper": 32768}, "float32": {"hopper": 8192}}
OTHER = """
import sys, torch
x = torch.ones(8192, 8192, device=sys.argv[1], dtype=torch.bfloat16)
for turn in range(1 << 30):
    for _ in range(10):
        x @ x
    torch.cuda.synchronize()
    if turn == 0:
        print("took a turn", flush=True)
"""


def why_never(name, dtype):
    """Return why an implementation is left out."""
    return why_not(name, dtype, 64, causal=False)


@pytest.fixture
def another_process(device):
    """Let another process multiply matrices on the same GPU."""
    command = [sys.executable, "-c", OTHER, str(device)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == "took a turn\n"
            yield other
        finally:
            other.kill()


def long_rows(device, name, dtype):
    """Yield problems whose kernels take 1 to 20 ms, each with a call and its sample."""
    for head_dim, causal in product((64, 128, 256), (False, True)):
        sizes = {"heads": 8, "kv_heads": 2, "seq_q": ROWS[dtype][name], "head_dim": head_dim}
        problem = Problem(**sizes, causal=causal, dtype=dtype)
        if get(name).why_not(problem, device, grad=True) is None:
            case = Sample(problem=problem, device=device).draw()
            yield problem, partial(get(name), **problem.keywords, scale=case.scale), case


LONG = (("triton", "bfloat16"), ("hopper", "bfloat16"), ("hopper", "float32"))


@pytest.mark.gpu
@pytest.mark.why_not.with_args(why_never)
@pytest.mark.parametrize(("name", "dtype"), LONG)
def test_long_rows_are_alike(device, name, dtype):
    """Two runs of 1 to 20 ms differ in no bit; this compiles what is interrupted below."""
    for problem, call, case in long_rows(device, name, dtype):
        one, other = run(call, case), run(call, case)
        assert all(torch.equal(x, other[output]) for output, x in one.items()), problem


@pytest.mark.gpu
@pytest.mark.alone  # with more than two processes a time slice is rare
def test_another_process_takes_turns(device, another_process):
    """Thirty interrupted runs of 1 to 20 ms differ in no bit, and no output is NaN."""
    wrong = []
    here = [long_rows(device, *of) for of in LONG if why_never(*of) is None]
    for problem, call, case in chain.from_iterable(here):
        first = run(call, case)
        again = [run(call, case) for _ in range(30)]
        wrong += [
            f"{problem}: {output}: {sum(not torch.equal(x, one[output]) for one in again)} of 30"
            for output, x in first.items()
            if not (x.isfinite().all() and all(torch.equal(x, one[output]) for one in again))
        ]
    assert not wrong
    assert another_process.poll() is None
