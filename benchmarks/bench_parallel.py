"""One sequence on several GPUs: attention and a training step, against PyTorch's context_parallel.

    pytest benchmarks/bench_parallel.py

measures on 1, 2, 4 and 8 GPUs, up to the number available. On a CPU it uses gloo with one and two
processes, which shows only that it runs. Every result is verified before it is timed.
"""

from functools import cache

import pytest
import torch

from flashattn.parallel.placement import Placement
from flashattn.problem import Problem
from flashattn.testing.parallel_case import METHODS
from flashattn.testing.ranks import Ranks
from flashattn.testing.scaling import Machine, predict
from flashattn.testing.sweep import grid

CUDA = torch.cuda.is_available()
WORLDS = [n for n in (1, 2, 4, 8) if n <= (torch.cuda.device_count() if CUDA else 2)]
LLAMA = {"heads": 32, "kv_heads": 8, "head_dim": 128, "causal": True, "dtype": "bfloat16"}
BOTH = ["forward", "forward+backward"]
ALONE = ("keys", "pytorch")  # on one GPU all our methods make the same call
SECONDS = 200  # most for a case, including the start of its processes


def cases(seq, passes, methods, **changes):
    """Return cases of attention to one sequence, by default with the heads of Llama 3."""
    problem = str(Problem(**LLAMA | {"seq_q": seq} | changes))
    found = grid(world=WORLDS, problem=[problem], method=methods, **{"pass": passes})
    return [case for case in found if case.world > 1 or case.method in ALONE]


def steps(size, context, *, precision="bf16", world=WORLDS, checkpoint=False):
    """Return training steps on one sequence."""
    case = {"size": [size], "context": [context], "precision": [precision]}
    return grid(world=world, **case, checkpoint=[checkpoint])


def rounds(tokens):
    """Return the number of samples for a case: few if one takes seconds."""
    return max(2, min(10, (5 << 17) // tokens))


MIXED = tuple((n, n) for n in (16384, 8192, 4096, 2048, 1024, 1024))  # 32k tokens
SMALL = {"heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": "float32"}
DEFAULT = [
    *cases(32768, BOTH, ["keys", "keys, kept", "heads", "pytorch"]),
    *cases(131072, BOTH, ["keys", "keys, kept", "heads", "pytorch"]),
    *cases(131072, BOTH, ["keys"], window=(4096, None)),
    *cases(131072, BOTH, ["keys", "keys, kept"], documents=4 * MIXED),
    # This window hides nothing, but reduces what is exchanged.
    *cases(131072, BOTH, ["keys", "keys, kept"], documents=4 * MIXED, window=(16384, None)),
]
STEPS = [*steps("small", 32768), *steps("2.7B", 65536, world=WORLDS[1:], checkpoint=True)]
SWEEPS = {
    "smoke": {
        "bench_attention": [
            *cases(256, BOTH, ["keys", "heads"], **SMALL),
            *cases(256, ["forward"], ["keys"], window=(20, None), **SMALL),
            *cases(256, BOTH, ["keys"], documents=((200, 200), (56, 56)), **SMALL),
        ],
        "bench_step": steps("tiny", 64, precision="fp32", checkpoint=True),
    },
    "default": {"bench_attention": DEFAULT, "bench_step": STEPS},
    "full": {
        "bench_attention": [
            *DEFAULT,
            *cases(1 << 20, ["forward"], ["keys"]),
            *cases(65536, BOTH, [*METHODS]),
            *cases(131072, BOTH, ["keys", "keys, contiguous"], causal=False),
            *cases(131072, BOTH, ["keys, contiguous"], window=(4096, None)),
        ],
        "bench_step": [*STEPS, *steps("small", 131072)],
    },
}
for _sweep in SWEEPS.values():  # so that processes are started only once per number of GPUs
    _sweep["bench_attention"].sort(key=lambda case: case.world)


@pytest.fixture(scope="module")
def ask(device):
    """Return a function that runs a job in some processes, which stay for the next job."""
    running = []

    def ask(world, **job):
        if not (running and running[0].world == world and running[0].alive):
            stop()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            running.append(Ranks(world, device.type))
        return running[0].ask(SECONDS, **job)

    def stop():
        while running:
            running.pop().close()

    yield ask
    stop()


@pytest.fixture(scope="module")
def links(ask):
    """Return a function that measures the links between ranks, once per number of ranks."""
    return cache(lambda world: ask(world, job="link", rounds=10))


@pytest.fixture(scope="module")
def alone():
    """Return the seconds on one GPU by problem, method and passes, filled in as measured."""
    return {}


def prediction(case, passes, alone, links):
    """Return the predicted seconds, or None if one GPU has not been timed."""
    problem, keep = Problem.parse(case.problem), case.method == "keys, kept"
    forward = alone.get((case.problem, "keys", "forward"))
    both = alone.get((case.problem, "keys", "forward+backward"))
    timed = forward if passes == "forward" else forward and both
    # The model covers only our own methods, without documents.
    known = case.method in ("keys", "keys, kept") and problem.documents is None
    if case.world == 1 or not (known and timed):
        return None
    machine = Machine(
        forward=problem.flops("forward") / forward,
        backward=problem.flops("backward") / (both - forward) if both else 0.0,
        **links(case.world),
    )
    placement = Placement("zigzag", case.world)
    return predict(problem, placement, machine, passes=passes, keep=keep)


def bench_attention(device_benchmark, case, facts, ask, links, alone, left_out):
    """Time attention on some GPUs, by the slowest rank."""
    passes, problem = facts["pass"], Problem.parse(case.problem)
    facts |= {"tokens": problem.batch * problem.seq_q, "flops": problem.flops(passes)}
    job = {"problem": case.problem, "method": case.method, "rounds": rounds(problem.seq_q)}
    found = ask(case.world, job="attention", passes=passes, **job)
    left_out(found.get("unsupported"))
    if case.method == "pytorch":
        left_out("; ".join(found["wrong"]) or None)
    elif found["wrong"] or found["other_bits"]:
        pytest.fail("; ".join([*found["wrong"], *found["other_bits"]]))
    facts["peak_bytes"] = found["peak_bytes"]
    facts["predicted_seconds"] = prediction(case, passes, alone, links)
    device_benchmark.replay(found["samples"], tells="time of the slowest rank")
    if case.world == 1:
        alone[case.problem, case.method, passes] = facts.get("seconds")


def bench_step(device_benchmark, case, facts, ask):
    """Time a training step whose tokens and parameters are sharded over GPUs."""
    axes = {x: getattr(case, x) for x in ("size", "context", "precision", "checkpoint")}
    found = ask(case.world, job="train", rounds=rounds(case.context), **axes)
    facts |= {"tokens": case.context, "method": "keys", "pass": "train", "problem": None}
    facts |= {"peak_bytes": found["peak_bytes"], "losses": found["losses"]}
    device_benchmark.replay(found["samples"], tells="time of the slowest rank")
