"""Check that a call changes none of torch's switches, generators and modes, nor its inputs."""

from __future__ import annotations

import gc
import os
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional

MODULES = (torch, functional, torch.Tensor)
KINDS = ("cpu", "cuda")


@dataclass(frozen=True)
class Switch:
    """One part of the process state."""

    name: str  # its name in a failure
    get: Callable[[], Any]
    put: Callable[[Any], object] | None = None  # None if it cannot be set
    values: tuple[Any, ...] = ()  # values to try; nothing that is promised may depend on them


def _attribute(holder: Any, name: str, values: tuple[object, ...] = ()) -> Switch:
    said = f"{holder.__name__ if hasattr(holder, '__name__') else type(holder).__name__}.{name}"
    return Switch(said, lambda: getattr(holder, name), lambda x: setattr(holder, name, x), values)


def _pair(name: str, *values: object) -> Switch:
    """Return the switch for a setting that torch has a getter and a setter for."""
    return Switch(
        f"the {name}", getattr(torch, f"get_{name}"), getattr(torch, f"set_{name}"), values
    )


def _sdp(name: str) -> Switch:
    cuda = torch.backends.cuda
    return Switch(
        f"torch.backends.cuda.{name}_sdp_enabled",
        getattr(cuda, f"{name}_sdp_enabled"),
        getattr(cuda, f"enable_{name}_sdp"),
        (True,) if name == "math" else (True, False),
    )


def _functions() -> dict[str, int]:
    """Return the identity of each of torch's functions, by name."""
    return {
        f"{module.__name__}.{name}": id(x)
        for module in MODULES
        for name, x in vars(module).items()
        if callable(x)
    }


def _flushes() -> bool:
    return (torch.tensor(1e-40) * 1).item() == 0.0


def _set_environment(wanted: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(wanted)


def _numpy_generator() -> object:
    state: Any = np.random.get_state()  # noqa: NPY002 - the global one
    return state[0], state[1].tobytes(), *state[2:]


def switches(device: torch.device) -> list[Switch]:
    """Return the switches that are watched on a device."""
    matmul = torch.backends.cuda.matmul
    found = [
        Switch(
            "torch's generator",
            lambda: torch.get_rng_state().numpy().tobytes(),
            lambda x: torch.set_rng_state(torch.frombuffer(bytearray(x), dtype=torch.uint8)),
        ),
        Switch("Python's generator", random.getstate, random.setstate),
        Switch("numpy's generator", _numpy_generator),
        _pair("default_dtype", torch.float32, torch.float64),
        _pair("default_device"),
        _pair("deterministic_debug_mode", *((0, 2) if device.type == "cpu" else (0,))),
        _pair("num_threads", 1, 2),
        Switch("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
        Switch("anomaly detection", torch.is_anomaly_enabled, torch.set_anomaly_enabled),
        _attribute(matmul, "fp32_precision", ("ieee", "tf32")),
        _attribute(matmul, "allow_fp16_reduced_precision_reduction", (True, False)),
        _attribute(matmul, "allow_bf16_reduced_precision_reduction", (True, False)),
        _attribute(torch.backends.cudnn, "enabled", (True,)),
        _attribute(torch.backends.cudnn, "deterministic", (True, False)),
        _attribute(torch.backends.mkldnn, "enabled"),
        *map(_sdp, ("flash", "mem_efficient", "math", "cudnn")),
        Switch("flushing of denormals", _flushes, torch.set_flush_denormal),
        Switch(
            "hooks of saved tensors",
            lambda: torch._C._autograd._top_saved_tensors_default_hooks(True),  # noqa: FBT003, SLF001
            lambda _: torch._C._autograd._pop_saved_tensors_default_hooks(),  # noqa: SLF001
        ),
        Switch("function modes", torch._C._len_torch_function_stack),  # noqa: SLF001
        Switch("dispatch modes", torch._C._len_torch_dispatch_stack),  # noqa: SLF001
        Switch("torch's functions", _functions),
        Switch("environment variables", lambda: dict(os.environ), _set_environment),
        Switch("warning filters", lambda: list(warnings.filters)),
        Switch("garbage collection", gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
        *(
            Switch(
                f"autocast on {kind}",
                partial(torch.is_autocast_enabled, kind),
                partial(torch.set_autocast_enabled, kind),
            )
            for kind in KINDS
        ),
    ]
    if device.type == "cuda":
        cuda = torch.cuda
        found += [
            Switch("CUDA's generator", lambda: cuda.get_rng_state(device).numpy().tobytes()),
            Switch("the current stream", cuda.current_stream, cuda.set_stream),
            Switch("the current device", cuda.current_device, cuda.set_device),
        ]
    return found


class TraceError(AssertionError):
    """A call left a trace: something has changed."""


@contextmanager
def unchanged(device: torch.device, inputs: Sequence[torch.Tensor], turn: int) -> Iterator[None]:
    """Watch a call on leaf tensors, with every switch at its value of a turn; restore all after it.

    Raises:
        TraceError: the call changed a switch or an input; the message says which.
    """
    watched = switches(device)
    kept = [(switch, switch.get()) for switch in watched]
    try:
        for switch in watched:
            if switch.put is not None and switch.values:
                switch.put(switch.values[turn % len(switch.values)])
        before, facts = [switch.get() for switch in watched], [*map(_facts, inputs)]
        yield
        after = [switch.get() for switch in watched]
    finally:
        for switch, value in kept:
            if switch.put is not None and switch.get() != value:
                switch.put(value)
    changed = [
        f"{switch.name} changed{_told(was, now)}"
        for switch, was, now in zip(watched, before, after, strict=True)
        if was != now
    ]
    for name, was, x in zip("qkv", facts, inputs, strict=False):
        now = _facts(x)
        changed += [f"{name}: {fact} changed" for fact in was if was[fact] != now[fact]]
    if changed:
        raise TraceError("; ".join(changed))


def _told(was: object, now: object) -> str:
    short = (bool, int, str, torch.dtype, torch.device)
    if isinstance(was, dict) and isinstance(now, dict):
        names = [name for name in was if now.get(name, was[name]) != was[name]]
        return f": {', '.join(sorted(names or now.keys() - was.keys()))}"
    return f" from {was} to {now}" if isinstance(was, short) else ""


def _facts(x: torch.Tensor) -> dict[str, object]:
    """Return what a call must not change of an input; its values are checked elsewhere."""
    return {
        "shape": x.shape,
        "strides": x.stride(),
        "address": x.data_ptr(),
        "dtype": x.dtype,
        "version": x._version,  # noqa: SLF001 - autograd's count of writes
        "requires_grad": x.requires_grad,
        "gradient": x.grad is None,
        "hooks": len(x._backward_hooks or ()),  # noqa: SLF001
        "hooks after accumulation": len(x._post_accumulate_grad_hooks or ()),  # type: ignore[attr-defined]  # noqa: SLF001
        "history": x.grad_fn,
    }
