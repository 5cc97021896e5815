"""Which machine is this: its accelerator's name, and all that a number made on it depends on.

Nothing here names the host, a user or a path: it is saved beside the numbers and shared.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

GPU_FACTS = ("uuid", "driver_version", "power.limit", "clocks.sm")


def accelerator(device: torch.device) -> str:
    """Return the name of the folder for ``device``'s runs: nvidia-h200, cpu-amd-epyc."""
    if device.type == "cuda":
        return slug(torch.cuda.get_device_name(device))
    return slug(f"cpu-{cpu_model()}")


def slug(name: str) -> str:
    """Return ``name`` in lower case with single dashes for everything but letters and digits."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


@cache
def cpu_model() -> str:
    """Return what the processor calls itself."""
    listing = Path("/proc/cpuinfo")
    text = listing.read_text(encoding="utf-8") if listing.exists() else ""
    found = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def machine_info(device: torch.device) -> dict[str, Any]:
    """Return what a number made on ``device`` depends on; None where it cannot be found out.

    Args:
        device: the one that is measured.

    Returns:
        Names and versions as strings, sizes in bytes, power in watts.
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
    facts = gpu_facts(device)
    return info | {
        "gpu": properties.name,
        "sm_count": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "driver": facts.get("driver_version"),
        "power_limit_watts": _number(facts.get("power.limit")),
    }


def memory_bytes(device: torch.device) -> int:
    """Return the memory of the device, or of the host for a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def sm_clock(device: torch.device) -> float | None:
    """Return the clock of the GPU's multiprocessors at this moment in hertz, None if unknown."""
    if device.type != "cuda":
        return None
    megahertz = _number(gpu_facts(device).get("clocks.sm"))
    return None if megahertz is None else megahertz * 1e6


def gpu_facts(device: torch.device) -> dict[str, str]:
    """Return what nvidia-smi says of ``device``, by the names in ``GPU_FACTS``; {} if nothing."""
    query = ("nvidia-smi", f"--query-gpu={','.join(GPU_FACTS)}", "--format=csv,noheader,nounits")
    lines = [line.split(", ") for line in _output(*query).splitlines()]
    whole = [line for line in lines if len(line) == len(GPU_FACTS)]
    gpus = [dict(zip(GPU_FACTS, line, strict=True)) for line in whole]
    # CUDA_VISIBLE_DEVICES renumbers what torch sees, not what nvidia-smi sees; the uuid holds.
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", "unknown"))
    ours = [gpu for gpu in gpus if uuid in gpu["uuid"]] or (gpus if len(gpus) == 1 else [])
    return ours[0] if ours else {}


def ptxas_version() -> str | None:
    """Return the version of the assembler that Triton ships, found without importing Triton."""
    spec = find_spec("triton")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        ptxas = Path(folder, "backends", "nvidia", "bin", "ptxas")
        found = re.search(r"V(\d[\d.]*)", _output(str(ptxas), "--version"))
        if found:
            return found[1]
    return None


def out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that the device or the host has no memory left."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _output(*command: str) -> str:
    """Run a command; what it prints, or nothing where it is missing or fails."""
    try:
        done = subprocess.run(  # noqa: S603 - the programs are named above
            command, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:  # nvidia-smi's [N/A]
        return None


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
