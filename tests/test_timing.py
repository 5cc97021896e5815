"""The device's clock, on a simulated device that runs behind its host, and its fixture."""

import itertools
import time
from types import SimpleNamespace

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from flashattn.measure import timing
from flashattn.measure.timing import (
    DeviceBenchmark,
    DeviceClock,
    HostClock,
    HostTime,
    ProcessorClock,
    interprets,
    warm_up,
)
from flashattn.registry import get

MICRO = 1e-6


class SimulatedDevice:
    """A host that queues work and a device that does it, each with its own time."""

    def __init__(self):
        """Start both at 0 with nothing queued."""
        self.host = self.done = 0.0
        self.log = []

    def queue(self, name, *, host, device):
        """Spend the host's time, then the device's, after the work that it already has."""
        self.log.append(name)
        self.host += host
        self.done = max(self.done, self.host) + device

    def flush(self):
        """Queue work that takes the device ten times as long as the host."""
        self.queue("flush", host=4 * MICRO, device=40 * MICRO)

    def synchronize(self):
        """Let the host wait for the device."""
        self.log.append("wait")
        self.host = self.done = max(self.host, self.done)

    def event(self):
        """Return a moment on the device's timeline."""
        device = self

        class Moment:
            def record(self):
                device.log.append("event")
                self.at = max(device.done, device.host)

            def query(self):
                return device.host >= self.at

            def elapsed_time(self, end):
                return (end.at - self.at) * 1e3

        return Moment()

    def clock(self):
        """Return the clock under test on this device."""
        return DeviceClock(self.event, self.flush, self.synchronize)


@pytest.fixture
def simulated(monkeypatch):
    """Return a simulated device whose host time is the time that the tested module sees."""
    simulated = SimulatedDevice()
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: simulated.host))
    return simulated


@pytest.fixture
def ours(simulated):
    """Return our fixture on the simulated device, as pytest-benchmark's plugin would make it."""
    unset = ("precision", "confidence", "logger", "warner", "cprofile", "cprofile_loops")
    unset += ("disable_gc", "warmup", "warmup_iterations", "disabled", "cprofile_dump")
    stats = []
    stock = BenchmarkFixture(
        SimpleNamespace(name="case", nodeid="case"),
        timer=SimpleNamespace(target=timing.time.perf_counter),
        min_rounds=5,
        min_time=5e-6,
        max_time=1.0,
        calibration_precision=10,
        add_stats=stats.append,
        **dict.fromkeys(unset),
    )
    ours = DeviceBenchmark.adopt(stock, simulated.clock())
    ours.kept = stats
    return ours


def test_launch_gaps_are_not_measured(simulated):
    """Three kernels of 5 us, 60 us apart on the host, take 15 us once the clock covers them.

    The lead of writes is bounded, even for a call that takes the host a second to queue.
    """

    def call():
        for _ in range(3):
            simulated.queue("kernel", host=60 * MICRO, device=5 * MICRO)

    clock = simulated.clock()
    (bare,), _ = clock.samples(call, 1)
    assert bare > 100 * MICRO  # without a lead: mostly gaps
    lead = clock.cover(warm_up(call, clock=clock).launch)
    samples, _ = clock.samples(call, 4)
    assert samples == pytest.approx([15 * MICRO] * 4)
    assert lead >= 180 * MICRO
    assert clock.cover(1.0) < 1.1 * timing.LONGEST_LEAD


def disturbed(device, delays):
    """Return a call of two kernels, 10 us in all, in which the host is held up by each delay."""
    coming = itertools.cycle(delays)

    def call():
        device.queue("kernel", host=20 * MICRO + next(coming), device=5 * MICRO)
        device.queue("kernel", host=20 * MICRO, device=5 * MICRO)

    return call


def test_late_samples_are_counted(simulated):
    """A sample is late if, and only if, the device began it before the host had queued it."""
    clock, call = simulated.clock(), disturbed(simulated, [0.0, 300 * MICRO])
    clock.cover(40 * MICRO)
    assert (clock.samples(call, 1), clock.late) == (([pytest.approx(10 * MICRO)], None), 0)
    (gap,), _ = clock.samples(call, 1)
    assert gap > 200 * MICRO
    assert clock.late == 1
    assert (clock.samples(call, 1), clock.late) == (([pytest.approx(10 * MICRO)], None), 0)


def test_late_samples_are_made_again(simulated, ours):
    """With every third call disturbed, all samples are device time, and retakes are reported."""
    call = disturbed(simulated, [0.0, 0.0, 300 * MICRO])
    made = []
    ours.time(lambda _: call(), setup=lambda: (made.append(None),), rounds=20)
    assert ours.kept[0].stats.data == pytest.approx([10 * MICRO] * 20)
    assert ours.extra_info["late"] == 0
    # The flushes double after each late sample, so a third such delay is covered.
    assert 1 <= ours.extra_info["retaken"] <= 4
    assert 2 * len(made) == simulated.log.count("kernel")


@pytest.mark.parametrize(
    ("delays", "retaken"),
    [
        ([0.0] * 3, 0),
        ([0.0] * 3 + [0.1] * 100, 3 * timing.RETAKES),
        ([0.1] * 100, 0),  # what takes longer to queue than any lead is never covered
    ],
    ids=["quiet", "disturbed once warm", "long"],
)
def test_what_stays_late_is_kept_and_told(simulated, ours, monkeypatch, delays, retaken):
    """Samples that are late every time are kept, and their row says how many there are."""
    monkeypatch.setattr(timing, "WARM_UP", 0.0)  # three calls
    ours.time(disturbed(simulated, delays), rounds=3)
    late = [sample > 0.09 for sample in ours.kept[0].stats.data]
    assert len(late) == 3
    assert ours.extra_info["late"] == sum(late) == (3 if any(delays) else 0)
    assert ours.extra_info["retaken"] == retaken


def test_cache_is_cold_and_one_wait_ends_the_samples(simulated):
    """Each call follows a flush outside its events, and the host waits once, at the end.

    The result of the last call is returned beside the seconds.
    """
    samples, result = simulated.clock().samples(lambda: simulated.log.append("call") or "o", 2)
    assert simulated.log == ["flush", "event", "call", "event"] * 2 + ["wait"]
    assert (len(samples), result) == (2, "o")


def test_warm_up_absorbs_the_cold_call(simulated):
    """Three seconds of compilation in the first call, and a slow second one, are not counted."""
    costs = iter([3.0, 0.01])

    def call():
        simulated.queue("kernel", host=next(costs, 0.0) + 10 * MICRO, device=1e-3)

    pace = warm_up(call, clock=simulated.clock())
    assert pace.wall == pytest.approx(1e-3 + 10 * MICRO)
    assert pace.launch == pytest.approx(10 * MICRO)


@pytest.mark.parametrize(
    ("device", "rounds"),
    [
        (1e-6, timing.MOST_ROUNDS),
        (12.48e-3, 19),  # 20 if flushes cost nothing
        (2.0, timing.FEWEST_ROUNDS),
    ],
)
def test_every_sample_is_kept_within_the_budget(simulated, ours, device, rounds):
    """As many calls as fit in the budget are made, and each is one sample of device seconds.

    The setup of a call's arguments runs anew for every call, and is not timed.
    """
    made, seen = [], []

    def setup():
        simulated.queue("graph", host=10 * MICRO, device=5e-6)
        made.append(len(made))
        return (made[-1],)

    def call(argument):
        seen.append(argument)
        simulated.queue("kernel", host=7 * MICRO, device=device)

    ours.time(call, setup=setup)
    assert seen == made
    assert ours.kept[0].stats.data == pytest.approx([device] * rounds)
    assert ours.extra_info["seconds"] == pytest.approx(device)
    assert ours.extra_info["status"] == "ok"


def test_a_warm_call_is_only_measured(simulated, ours):
    """A warm call is made for the rounds alone, and late samples are not repeated."""

    def call():
        simulated.log.append("call")
        simulated.queue("kernel", host=1.0, device=2.0)

    ours.time(call, rounds=2, warm=True)
    assert simulated.log.count("call") == 2
    assert ours.kept[0].stats.data == pytest.approx([2.0, 2.0], rel=0.5)
    assert (ours.extra_info["late"], ours.extra_info["retaken"]) == (2, 0)


def test_times_measured_before_are_rounds(ours):
    """Replayed seconds are the samples, unchanged, under the name of the given clock."""
    ours.replay([1.0, 3.0], tells="another clock")
    assert ours.kept[0].stats.data == [1.0, 3.0]
    assert (ours.extra_info["mean"], ours.extra_info["clock"]) == (2.0, "another clock")


def test_looped_rounds_are_device_time(simulated, ours):
    """The plugin's own calibrated rounds, of several calls each, report device time."""
    cost = {"host": 7 * MICRO, "device": 1e-3}
    runner = ours._make_runner(simulated.queue, ("kernel",), cost)
    assert runner(range(4)) == pytest.approx(4e-3)


def test_disabled_benchmark_calls_once(simulated, ours):
    """--benchmark-disable makes one call and records nothing."""
    ours.disabled = True
    assert ours.time(lambda: simulated.log.append("call") or "o") == "o"
    assert simulated.log.count("call") == 1
    assert (ours.kept, ours.extra_info) == ([], {})


@pytest.mark.interpreter
def test_interpreted_kernels_are_recognised():
    """A Triton kernel that the interpreter would run is recognised, without running it."""
    q = torch.randn(1, 1, 16, 16)
    done = []

    def call(impl):
        get(impl)(q, q, q, causal=False, scale=1.0)
        done.append(impl)

    assert interprets(lambda: call("triton"))
    assert not interprets(lambda: call("tiled"))
    imported = compile("import math", f"site-packages/{timing.INTERPRETER}", "exec")
    assert not interprets(lambda: exec(imported))  # noqa: S102
    assert done == ["tiled"]


@pytest.mark.gpu
def test_cuda_clock_tells_device_time():
    """On a real device ten products take ten times as long as one, although they queue at once."""
    clock = timing.clock_of(torch.device("cuda"))
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def product(times):
        for _ in range(times):
            torch.mm(a, a)

    product(10)
    one, ten = (min(clock.samples(lambda n=n: product(n), 10)[0]) for n in (1, 10))
    assert 7 < ten / one < 13
    clock.samples(lambda: time.sleep(0.05), 1)
    assert clock.late == 1


def test_waiting_is_no_work():
    """The processor's clock stands while a process waits; the host's does not."""
    (waited,), result = HostClock().samples(lambda: time.sleep(0.05) or "o", 1)
    (rested,), _ = ProcessorClock().samples(lambda: time.sleep(0.05), 1)
    assert result == "o"
    assert rested < 0.05 <= waited
    start = time.process_time()
    (worked,), _ = ProcessorClock().samples(lambda: sum(range(300_000)), 1)
    assert 0 < worked <= time.process_time() - start


def test_host_time_is_a_mean_on_an_idle_device():
    """Each sample is the mean of a batch of calls that begins when the device is idle."""
    done = []
    clock = HostTime(lambda: done.append("idle"))
    clock.now = iter((0.0, 2.0, 2.0, 6.0)).__next__
    seconds, _ = clock.samples(lambda: done.append("call"), 2)
    assert seconds == [2 / clock.BATCH, 4 / clock.BATCH]
    assert done == ["idle", *["call"] * clock.BATCH] * 2 + ["idle"]
