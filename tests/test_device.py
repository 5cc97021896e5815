"""The machine's name and facts, with and without a GPU and its tools."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flashattn.measure import device as module
from flashattn.measure.device import (
    accelerator,
    gpu_facts,
    machine_info,
    out_of_memory,
    slug,
    sm_clock,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
TWO_GPUS = """GPU-aaaa-1111, 580.1, 300.00, 1200
GPU-bbbb-2222, 580.1, 700.00, 1980"""


@pytest.fixture
def nvidia(monkeypatch, tmp_path):
    """Return a function that makes a machine whose nvidia-smi prints what it is given."""

    def make(printed, *, uuid="bbbb-2222"):
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\ncat <<'END'\n{printed}\nEND\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
        properties = SimpleNamespace(
            name="NVIDIA H200",
            uuid=uuid,
            multi_processor_count=132,
            L2_cache_size=60 << 20,
            total_memory=139 << 30,
        )
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: properties.name)

    return make


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("NVIDIA H200", "nvidia-h200"),
        ("Intel(R) Xeon(R) CPU @ 2.20GHz", "intel-r-xeon-r-cpu-2-20ghz"),
    ],
)
def test_slug_is_a_folder_name(name, folder):
    """A name becomes lower-case letters and digits with single dashes between."""
    assert slug(name) == folder


def test_folder_is_named_by_the_accelerator(nvidia):
    """A GPU's runs are kept under the GPU's name, a CPU's under the processor's."""
    nvidia(TWO_GPUS)
    assert accelerator(CUDA) == "nvidia-h200"
    assert accelerator(CPU) == slug(f"cpu-{module.cpu_model()}")


def test_gpu_facts_are_those_of_the_device(nvidia):
    """Of several GPUs the facts are the visible one's, in watts, bytes and hertz."""
    nvidia(TWO_GPUS)
    info = machine_info(CUDA)
    assert (info["gpu"], info["driver"], info["power_limit_watts"]) == ("NVIDIA H200", "580.1", 700)
    assert (info["sm_count"], info["l2_bytes"], info["memory_bytes"]) == (132, 60 << 20, 139 << 30)
    assert sm_clock(CUDA) == 1.98e9


def test_one_gpu_needs_no_uuid(nvidia):
    """A driver that names no uuid still has its facts read when it has one GPU only."""
    nvidia(TWO_GPUS.splitlines()[0], uuid="unknown")
    assert gpu_facts(CUDA)["power.limit"] == "300.00"


@pytest.mark.parametrize("printed", ["", "Failed to initialize NVML", TWO_GPUS])
def test_missing_facts_are_none(nvidia, printed):
    """What nvidia-smi does not say of this device is None, and no error."""
    nvidia(printed, uuid="cccc-3333")
    info = machine_info(CUDA)
    assert info["driver"] is info["power_limit_watts"] is sm_clock(CUDA) is None


def test_not_available_is_none(nvidia):
    """A power limit that the card does not report is None."""
    nvidia("GPU-bbbb-2222, 580.1, [N/A], [N/A]")
    assert machine_info(CUDA)["power_limit_watts"] is None


def test_no_tool_no_facts(nvidia, monkeypatch, tmp_path):
    """Without nvidia-smi there are no facts, and no error."""
    nvidia(TWO_GPUS)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert gpu_facts(CUDA) == {}


def test_machine_info_names_versions_and_no_host():
    """What is saved says what was run, and neither where nor by whom."""
    info = machine_info(CPU)
    assert info["torch"] == torch.__version__
    assert info["memory_bytes"] > 2**28
    assert info["ptxas"] is None or info["ptxas"][0].isdigit()
    saved = json.dumps(info)
    assert platform.node() not in saved
    assert str(Path.home()) not in saved


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ..."), True),
        (RuntimeError("an illegal memory access was encountered"), False),
        (AssertionError("can't allocate memory"), False),
    ],
)
def test_out_of_memory_is_told_from_other_errors(error, expected):
    """Only an allocation that failed is out of memory."""
    assert out_of_memory(error) is expected
