"""Samples of a GPU's clock, from programs that print what nvidia-smi would."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flashattn.measure import monitor as module
from flashattn.measure.monitor import Monitor, Reading, Sample, commands_for, parse

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
LONGEST = 20.0  # seconds to wait for another process on a busy machine


def printing(*lines, then="time.sleep(100)", before=""):
    """Return the command of a program that prints lines and goes on."""
    code = f"import signal, subprocess, sys, time\n{before}\n"
    code += "".join(f"print({line!r}, flush=True)\n" for line in lines) + then
    return (sys.executable, "-c", code)


def sampled(monitor, number=1):
    """Wait until there are samples."""
    limit = time.perf_counter() + LONGEST
    while len(monitor._samples) < number:
        assert time.perf_counter() < limit, "no sample came"
        time.sleep(0.01)


def ended(pid, limit=LONGEST):
    """Whether a process is gone within seconds, or dead and waiting for its parent."""
    limit += time.perf_counter()
    while time.perf_counter() < limit:
        stat = Path(f"/proc/{pid}/stat")
        try:
            if stat.read_text().rpartition(") ")[2][0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("1980, 512.25, 0x0000000000000004\r\n", Sample(1.0, 1.98e9, 512.25, 4)),
        ("345, [N/A], 0x0000000000000001", Sample(1.0, 345e6, None, 1)),
        ("[N/A], 71.00, [Not Supported]", Sample(1.0, None, 71.0, 0)),
        ('Field "clocks_event_reasons.active" is not a valid field to query.', None),
        ("No devices were found", None),
        ("a, b, c of d", None),
        ("", None),
    ],
)
def test_a_line_is_a_sample(line, expected):
    """A line tells hertz, watts and bits, each if it can; another line tells nothing."""
    assert parse(line, 1.0) == expected


def test_reading_is_of_its_span():
    """A reading is the median of the samples in its span, its ends included, and of no others."""
    monitor = Monitor(CPU)
    samples = [(1, 1e9, 100.0), (2, 1.2e9, 300.0), (3, 1.3e9, None), (4, 2e9, 700.0)]
    monitor._samples += [Sample(at, hertz, watts, 0) for at, hertz, watts in samples]
    assert monitor.between(2, 3) == Reading(1.25e9, 300.0, [])
    assert monitor.between(0, 9) == Reading(1.25e9, 300.0, [])
    assert monitor.between(5, 9) == Reading(None, None, [])


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        ((0x1, 0x2, 0x10, 0x100), []),  # idle, set by the owner, synchronised, a display
        ((0x0, 0x4, 0x5), ["power cap"]),
        ((0x8, 0x20), ["hardware slowdown", "thermal slowdown"]),
        ((0xC8,), ["hardware slowdown", "hardware thermal slowdown", "power brake"]),
    ],
)
def test_throttling_is_named(bits, words):
    """What held the clock down at any moment is named once; an idle or a set clock is not held."""
    monitor = Monitor(CPU)
    monitor._samples += [Sample(1.0, 1e9, 100.0, each) for each in bits]
    assert monitor.between(0, 2).throttled == words


def test_samples_come_as_they_are_printed():
    """A program's lines are read while it runs, stamped with the time at which they came."""
    lines = ["1980, 500.00, 0x0000000000000004"]
    late = "time.sleep(0.5); print('990, 100.00, 0x0', flush=True); time.sleep(100)"
    with Monitor(CPU, commands=[printing(*lines, then=late)]) as monitor:
        start = time.perf_counter()
        sampled(monitor)
        middle = time.perf_counter()
        assert monitor.between(start, middle) == Reading(1.98e9, 500.0, ["power cap"])
        sampled(monitor, 2)
        assert monitor.between(middle, time.perf_counter()) == Reading(990e6, 100.0, [])


def test_an_older_driver_is_asked_in_its_words():
    """Where a command ends without a sample the next is tried, and none after one that had some."""
    refusing = printing("Field is not a valid field to query.", then="sys.exit(2)")
    good, unwanted = printing("1000, 90.00, 0x0", then=""), printing("2000, 90.00, 0x0", then="")
    with Monitor(CPU, commands=[("no-such-program",), refusing, good, unwanted]) as monitor:
        monitor._thread.join(LONGEST)
        assert [sample.hertz for sample in monitor._samples] == [1e9]


@pytest.mark.parametrize(
    "before",
    [
        "",
        # a program that will not end when it is asked
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        # one whose child would keep its output open
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])",
    ],
    ids=["plain", "stubborn", "parent"],
)
def test_the_program_is_stopped(before, monkeypatch):
    """After the block neither the program nor the thread is there, whatever happened in it."""
    monkeypatch.setattr(module, "PATIENCE", 1.0)
    threads = threading.active_count()
    monitor = Monitor(CPU, commands=[printing("1000, 90.00, 0x0", before=before)])

    def fail():
        with monitor:
            sampled(monitor)
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    assert monitor._process.returncode is not None
    assert ended(monitor._process.pid)
    assert threading.active_count() == threads


def test_a_short_block_stops_what_it_started():
    """A block that ends at once leaves no program behind, started already or not yet."""
    threads = threading.active_count()
    for _ in range(5):
        with Monitor(CPU, commands=[printing()] * 3) as monitor:
            pass
        assert threading.active_count() == threads
        assert monitor._process is None or ended(monitor._process.pid)


def test_a_killed_run_leaves_no_program():
    """A process that is killed and cannot stop its program takes it along."""
    forever = printing(then="while True: print('1, 1, 0x0', flush=True); time.sleep(0.05)")
    code = (
        "import time, torch; from flashattn.measure.monitor import Monitor\n"
        f"with Monitor(torch.device('cpu'), commands=[{forever!r}]) as monitor:\n"
        "    while not monitor._samples: time.sleep(0.01)\n"
        "    print(monitor._process.pid, flush=True)\n"
        "    time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as run:
        pid = int(run.stdout.readline())
        assert not ended(pid, limit=0.2)
        run.kill()
    assert ended(pid)


def test_no_descriptor_is_left():
    """A monitor closes what it opened, also for a program that is missing."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    with Monitor(CPU, commands=[("no-such-program",), printing("1, 1, 0x0")]) as monitor:
        sampled(monitor)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_without_a_gpu_there_is_no_thread():
    """For a CPU readings are empty and nothing is started."""
    threads = threading.active_count()
    with Monitor(CPU) as monitor:
        assert threading.active_count() == threads
        assert monitor.between(0, time.perf_counter()) == Reading()


def test_commands_name_the_device(monkeypatch):
    """A GPU is sampled by its uuid, under the new name of the reasons and then under the old."""
    monkeypatch.setattr(module, "gpu_facts", lambda _: {"uuid": "GPU-bbbb-2222"})
    new, old = commands_for(CUDA)
    for command in (new, old):
        assert command[:4] == ("stdbuf", "-oL", "nvidia-smi", "--id=GPU-bbbb-2222")
        assert {"--format=csv,noheader,nounits", "--loop-ms=100"} < set(command)
    assert "--query-gpu=clocks.sm,power.draw,clocks_event_reasons.active" in new
    assert "--query-gpu=clocks.sm,power.draw,clocks_throttle_reasons.active" in old


def test_without_nvidia_smi_nothing_is_started(monkeypatch):
    """A GPU of which nvidia-smi says nothing is not sampled, and that is no error."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="bbbb-2222")
    )
    with Monitor(CUDA) as monitor:
        assert monitor._thread is None
        assert monitor.between(0, time.perf_counter()) == Reading()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_sampled():
    """A working GPU's clock and power are sampled while it works, within seconds."""
    device = torch.device("cuda")
    if not commands_for(device):
        pytest.skip("nvidia-smi says nothing of this GPU")
    a = torch.randn(4096, 4096, device=device)
    with Monitor(device) as monitor:
        sampled(monitor)
        start = time.perf_counter()
        while time.perf_counter() < start + 1.0:
            torch.mm(a, a)
            torch.cuda.synchronize()
        reading = monitor.between(start, time.perf_counter())
    assert 1e8 < reading.sm_hertz < 4e9
    assert reading.watts > 10
