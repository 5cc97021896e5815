"""Memory of a step: measured and predicted peaks, and the allocator's timeline."""

from dataclasses import asdict

from flashattn.measure.memory import held_bytes, peak_bytes, record
from flashattn.measure.profile import phase
from flashattn.testing.sweep import grid

STEPS = ["forward", "forward+backward", "train"]
ROUNDS = 5


def steps(size, context, precision, impl, step=STEPS):
    """Return a grid of eager steps."""
    axes = {"size": size, "context": context, "batch": [4], "precision": precision}
    return grid(**axes, compiled=[False], impl=impl, step=step)


SWEEPS = {
    # A CPU without 16-bit products emulates them slowly, so one step is enough.
    "smoke": [
        *steps(["tiny"], [32], ["fp32"], ["naive", "sdpa"]),
        *steps(["tiny"], [32], ["bf16"], ["naive"], ["train"]),
    ],
    "default": [
        *steps(["2.7B"], [512], ["fp32", "bf16"], ["naive"], ["train"]),
        *steps(["2.7B"], [512], ["bf16"], ["triton"]),
    ],
    "full": [
        *steps(["2.7B"], [128, 256, 512], ["fp32", "bf16"], ["naive"]),
        *steps(["2.7B"], [512], ["bf16"], ["triton"]),
        *steps(["small", "medium", "large", "xl"], [512], ["fp32", "bf16"], ["naive"], ["train"]),
    ],
}


def bench_step(device_benchmark, case, facts, device, trained, snapshots):
    """Record the peak, the activations and the timeline of a step, and time it."""
    model = trained(case, phase=phase)
    call, setup = model.timed(case.step)
    call()  # the first step allocates the optimizer state
    before, peak = peak_bytes(call, device, model.ground)
    costs, learns = model.costs, case.step != "forward"
    facts |= {
        "peak_bytes": peak,
        "before_bytes": before,
        "residual_bytes": 4 * costs.tokens * costs.config.width,
        "predicted": {
            "parameters": costs.parameter_bytes,
            "gradients": costs.gradient_bytes * learns,
            "optimizer": costs.optimizer_bytes * (case.step == "train"),
            # Each product saves its cast weight as well as its input.
            "activations": (costs.activation_bytes + costs.cast_bytes) * learns,
        },
        "measured": model.state_bytes(),
    }
    if learns:
        facts["measured"]["activations"] = held_bytes(
            model.trainer.loss, without=model.kept_anyway()
        )[0]
    if device.type == "cuda":
        found = record(call, device, snapshots / f"{facts['name']}.pickle")
        facts |= {
            "timeline": found.points,
            "phases": found.phases,
            "largest": [asdict(block) for block in found.largest],
        }
    device_benchmark.time(call, setup=setup, rounds=ROUNDS)
