"""Describe the machine: the accelerator's name, and all properties that affect measurements.

The description is saved with the measurements and shared, so it names no host, user or path.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def accelerator(device: torch.device) -> str:
    """Return the folder name of runs on ``device``, such as nvidia-h200 or cpu-amd-epyc."""
    if device.type == "cuda":
        return slug(torch.cuda.get_device_name(device))
    return slug(f"cpu-{cpu_model()}")


def slug(name: str) -> str:
    """Return ``name`` in lower case, each run of characters outside a-z and 0-9 as one dash."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


@cache
def cpu_model() -> str:
    """Return the model name of the processor."""
    listing = Path("/proc/cpuinfo")
    text = listing.read_text(encoding="utf-8") if listing.exists() else ""
    found = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def machine_info(device: torch.device) -> dict[str, Any]:
    """Return the properties that a measurement on ``device`` depends on.

    Returns:
        Names and versions as strings, sizes in bytes, power in watts; None where unknown.
    """
    info: dict[str, Any] = {
        "accelerator": accelerator(device),
        "cpu": cpu_model(),
        "cpu_cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _installed("triton"),
        "ptxas": ptxas_version(),
        "cuda": torch.version.cuda,
        "memory_bytes": memory_bytes(device),
    }
    if device.type != "cuda":
        return info
    properties = torch.cuda.get_device_properties(device)
    return info | {
        "gpu": properties.name,
        "sm_count": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "driver": nvml(device, lambda ask, _: ask.nvmlSystemGetDriverVersion()),
        "power_limit_watts": nvml(
            device, lambda ask, gpu: ask.nvmlDeviceGetPowerManagementLimit(gpu) / 1e3
        ),
    }


def memory_bytes(device: torch.device) -> int:
    """Return the total memory of the device, or of the host for a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def sm_clock(device: torch.device) -> float | None:
    """Return the current SM clock in hertz, or None if unknown."""
    return nvml(device, lambda ask, gpu: ask.nvmlDeviceGetClockInfo(gpu, ask.NVML_CLOCK_SM) * 1e6)


def nvml(device: torch.device, query: Callable[[Any, Any], T]) -> T | None:
    """Query NVML about a GPU.

    Args:
        device: any device.
        query: called with the module ``pynvml`` and the NVML handle of ``device``.

    Returns:
        The result of ``query``; None on a CPU, without a driver, or for an unsupported query.
    """
    if device.type != "cuda":
        return None
    import pynvml  # type: ignore[import-untyped]  # noqa: PLC0415 - only where there is a GPU

    try:
        return query(pynvml, _handle(device))
    except pynvml.NVMLError:
        return None


@cache
def _handle(device: torch.device) -> Any:
    import pynvml  # noqa: PLC0415

    pynvml.nvmlInit()
    if pynvml.nvmlDeviceGetCount() == 1:
        return pynvml.nvmlDeviceGetHandleByIndex(0)
    # CUDA_VISIBLE_DEVICES renumbers devices for torch but not for NVML; UUIDs agree.
    uuid = torch.cuda.get_device_properties(device).uuid
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")


def ptxas_version() -> str | None:
    """Return the version of Triton's ptxas, without importing Triton."""
    spec = find_spec("triton")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        ptxas = str(Path(folder, "backends", "nvidia", "bin", "ptxas"))
        with suppress(OSError):
            done = subprocess.run([ptxas, "--version"], capture_output=True, text=True, check=False)  # noqa: S603
            found = re.search(r"V(\d[\d.]*)", done.stdout)
            return found[1] if found else None
    return None


def out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` means that the device or the host is out of memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    said = ("can't allocate memory", "CUDA error: out of memory")  # the CPU's; CUDA's own
    return isinstance(error, RuntimeError) and any(text in str(error) for text in said)


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
