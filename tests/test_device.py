"""The machine's name and facts, and a GPU's clock over time, with and without a driver."""

import json
import platform
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flashattn.measure import device as module
from flashattn.measure import monitor
from flashattn.measure.device import accelerator, machine_info, out_of_memory, slug, sm_clock
from flashattn.measure.monitor import Monitor, Reading, Sample

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
UNKNOWN = {"driver": None, "power_limit_watts": None}
VISIBLE = {"gpu": "NVIDIA H200", "driver": "580.1", "power_limit_watts": 700}
VISIBLE |= {"sm_count": 132, "l2_bytes": 60 << 20, "memory_bytes": 139 << 30}


class FakeNvml:
    """NVML of a machine with two GPUs, or of one without a driver."""

    class NVMLError(Exception):
        """What NVML raises."""

    NVML_CLOCK_SM = 1

    def __init__(self):
        """Start with a driver and all facts of both GPUs."""
        self.driver, self.gpus = True, ["GPU-aaaa-1111", "GPU-bbbb-2222"]
        self.facts = {
            "PowerManagementLimit": [300_000, 700_000],
            "ClockInfo": [1200, 1980],
            "CurrentClocksThrottleReasons": [None, 0x5],
        }

    def given(self, fact):
        """Return a fact, or raise NVML's error for None."""
        if fact is None:
            raise self.NVMLError
        return fact

    def __getattr__(self, name):
        """Return a fake ``nvmlX``; a handle is the index of a GPU."""
        found = self.facts.get(name.removeprefix("nvmlDeviceGet"), [None, None])
        others = {
            "nvmlInit": lambda: self.given(self.driver or None),
            "nvmlSystemGetDriverVersion": lambda: "580.1",
            "nvmlDeviceGetCount": lambda: len(self.gpus),
            "nvmlDeviceGetHandleByIndex": lambda i: i,
            "nvmlDeviceGetHandleByUUID": lambda uuid: self.given(
                self.gpus.index(uuid) if uuid in self.gpus else None
            ),
        }
        return others.get(name, lambda gpu, *_: self.given(found[gpu]))


@pytest.fixture
def nvidia(monkeypatch):
    """Return a fake NVML; torch sees its second GPU."""
    properties = SimpleNamespace(
        name="NVIDIA H200",
        uuid="bbbb-2222",
        multi_processor_count=132,
        L2_cache_size=60 << 20,
        total_memory=139 << 30,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: properties.name)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    module._handle.cache_clear()
    yield sys.modules["pynvml"]
    module._handle.cache_clear()


@pytest.mark.usefixtures("nvidia")
def test_folder_is_named_by_the_accelerator():
    """A GPU's runs are kept under the GPU's name, a CPU's under the processor's."""
    assert accelerator(CUDA) == "nvidia-h200"
    assert accelerator(CPU) == slug(f"cpu-{module.cpu_model()}")
    assert slug("Intel(R) Xeon(R) CPU @ 2.20GHz") == "intel-r-xeon-r-cpu-2-20ghz"


@pytest.mark.parametrize(
    ("change", "clock", "known"),
    [
        ({}, 1.98e9, VISIBLE),
        ({"gpus": ["GPU-aaaa-1111"]}, 1.2e9, {"driver": "580.1", "power_limit_watts": 300}),
        ({"gpus": ["GPU-aaaa-1111", "GPU-cccc-3333"]}, None, UNKNOWN),
        ({"facts": {}}, None, {"driver": "580.1", "power_limit_watts": None}),
        ({"driver": False}, None, UNKNOWN),
    ],
    ids=["of two", "the only GPU needs no UUID", "hidden", "not supported", "no driver"],
)
def test_facts_are_those_of_the_visible_gpu(nvidia, change, clock, known):
    """Facts are in watts, bytes and hertz; what the driver does not report is None.

    Without a clock nothing is sampled.
    """
    vars(nvidia).update(change)
    info, threads = machine_info(CUDA), threading.active_count()
    assert {name: info[name] for name in known} == known
    assert sm_clock(CUDA) == clock
    with Monitor(CUDA) as monitored:
        assert threading.active_count() == threads + (clock is not None)
    assert threading.active_count() == threads
    assert monitored.between(0, 0) == Reading()


def test_a_cpu_needs_no_nvml(monkeypatch):
    """On a CPU, NVML is not imported and nothing is sampled; facts name no host and no home."""
    monkeypatch.setitem(sys.modules, "pynvml", None)  # an import would raise
    threads, info = threading.active_count(), machine_info(CPU)
    with Monitor(CPU) as monitored:
        assert threading.active_count() == threads
    assert sm_clock(CPU) is None
    assert monitored.between(0, time.perf_counter()) == Reading()
    assert info["torch"] == torch.__version__
    assert info["memory_bytes"] > 2**28
    assert info["ptxas"] is None or info["ptxas"][0].isdigit()
    assert platform.node() not in json.dumps(info)
    assert str(Path.home()) not in json.dumps(info)


@pytest.mark.usefixtures("nvidia")
def test_a_gpu_is_sampled_until_the_block_ends(monkeypatch):
    """A thread samples the GPU, with timestamps, until the block ends or raises an error."""
    monkeypatch.setattr(monitor, "PERIOD", 0.001)
    threads, start, sampled = threading.active_count(), time.perf_counter(), Monitor(CUDA)

    def fail():
        with sampled:
            while not sampled._samples:
                time.sleep(0.001)
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    assert threading.active_count() == threads
    assert sampled.between(start, time.perf_counter()) == Reading(1.98e9, ["power cap"])
    assert sampled.between(0, start) == Reading()


def test_reading_is_of_its_span():
    """A reading is the median of the samples in its span, both ends included.

    Each reason that held the clock down is named once; an idle or a set clock is no such reason.
    """
    sampled, free = Monitor(CPU), 0x1 | 0x2 | 0x10 | 0x100  # idle, set, synchronised, a display
    sampled._samples += [Sample(1, 1e9, free), Sample(2, 1.2e9, 0x5)]
    sampled._samples += [Sample(3, None, 0x2C), Sample(4, 2e9, 0xC0)]
    slow = ["power cap", "hardware slowdown", "thermal slowdown"]
    assert sampled.between(1, 1) == Reading(1e9, [])
    assert sampled.between(2, 3) == Reading(1.2e9, slow)
    slow += ["hardware thermal slowdown", "power brake"]
    assert sampled.between(0, 9) == Reading(1.2e9, slow)
    assert sampled.between(5, 9) == Reading(None, [])


@pytest.mark.gpu
def test_a_working_gpu_is_sampled():
    """A working GPU's clock is sampled while it works."""
    device = torch.device("cuda")
    if sm_clock(device) is None:
        pytest.skip("NVML says nothing of this GPU")
    a = torch.randn(4096, 4096, device=device)
    with Monitor(device) as sampled:
        start = time.perf_counter()
        while time.perf_counter() < start + 1.0:
            torch.mm(a, a)
            torch.cuda.synchronize()
        reading = sampled.between(start, time.perf_counter())
    assert 1e8 < reading.sm_hertz < 4e9


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ..."), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("an illegal memory access was encountered"), False),
        (AssertionError("can't allocate memory"), False),
    ],
)
def test_out_of_memory_is_told_from_other_errors(error, expected):
    """Only a failed allocation counts as out of memory."""
    assert out_of_memory(error) is expected
