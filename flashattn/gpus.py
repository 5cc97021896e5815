"""Describe the GPU of a device for plans, and say which of our kernels run there."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.metadata import version

import torch

from flashattn.plan import support
from flashattn.plan.gpu import CARDS, Gpu
from flashattn.problem import Problem

_MAJOR, _MINOR = map(int, version("triton").split(".")[:2])
TRITON = _MAJOR, _MINOR


_KNOWN: dict[torch.device, Gpu] = {}  # functools.cache would make torch.compile warn


def gpu_of(device: torch.device) -> Gpu:
    """Return the GPU of a device; for a CPU, one that stands for Triton's interpreter.

    Without CUDA, tensors on other devices are fake, and the GPU is taken to be an A100.
    """
    if device not in _KNOWN:
        _KNOWN[device] = _look(device)
    return _KNOWN[device]


def _look(device: torch.device) -> Gpu:
    if device.type == "cpu":
        return Gpu.INTERPRETER
    if not torch.cuda.is_available():
        return CARDS["A100"]
    properties = torch.cuda.get_device_properties(device if device.type == "cuda" else None)
    gpu = Gpu((properties.major, properties.minor), properties.multi_processor_count, TRITON)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return replace(Gpu.INTERPRETER, num_sms=gpu.num_sms) if interpreted else gpu


def why_not_interpreted(triton: str, numpy: str) -> str | None:
    """Return why the interpreter of this Triton version fails with this numpy version, or None.

    The interpreter of Triton 3.6 converts one-element arrays to numbers; numpy 2.4 refuses that.
    """
    older, newer = (tuple(map(int, text.split(".")[:2])) for text in (triton, numpy))
    if older > (3, 6) or newer < (2, 4):
        return None
    return "triton 3.6's interpreter needs an older numpy: pip install 'numpy<2.4'"


INTERPRETER_FAILS = why_not_interpreted(version("triton"), version("numpy"))


def why_not(problem: Problem, device: torch.device) -> str | None:
    """Return why the Triton kernels cannot solve ``problem`` on ``device``, or None."""
    reason = support.why_not_portable(problem.torch_dtype, problem.head_dim)
    if reason is not None:
        return reason
    if device.type == "cpu":
        if os.environ.get("TRITON_INTERPRET") == "1":
            return INTERPRETER_FAILS
        return "triton runs on a CPU only interpreted: set TRITON_INTERPRET=1 before the first call"
    if device.type != "cuda":
        return f"triton runs on CUDA GPUs here, not on {device.type}"
    return support.why_not_gpu(gpu_of(device))


def why_not_hopper(problem: Problem, device: torch.device, *, backward: bool = False) -> str | None:
    """Return why the Hopper kernels of a pass cannot solve ``problem`` on ``device``, or None."""
    gpu = gpu_of(device) if device.type == "cuda" else None
    return support.why_not_hopper_pass(problem, gpu, backward=backward)
