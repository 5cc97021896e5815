"""Which GPU a tensor is on, as plans want to know it."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.metadata import version

import torch

from flashattn.plan.gpu import CARDS, Gpu

_MAJOR, _MINOR = map(int, version("triton").split(".")[:2])
TRITON = _MAJOR, _MINOR


_KNOWN: dict[torch.device, Gpu] = {}  # functools.cache would make torch.compile warn


def gpu_of(device: torch.device) -> Gpu:
    """Return the GPU of a device; a CPU, which interprets kernels, has one of its own.

    Where CUDA is not available tensors are fake, and it is an A100.
    """
    if device not in _KNOWN:
        _KNOWN[device] = _look(device)
    return _KNOWN[device]


def _look(device: torch.device) -> Gpu:
    if device.type == "cpu":
        return Gpu.INTERPRETER
    if not torch.cuda.is_available():
        return CARDS["A100"]
    properties = torch.cuda.get_device_properties(device)
    gpu = Gpu((properties.major, properties.minor), properties.multi_processor_count, TRITON)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return replace(Gpu.INTERPRETER, num_sms=gpu.num_sms) if interpreted else gpu
