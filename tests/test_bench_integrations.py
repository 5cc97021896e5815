"""``bench_integrations`` times steps with right gradients and gives reasons for others."""

import sys

import pytest

from flashattn.measure import timing
from flashattn.report.runs import load

pytest.importorskip("transformers", reason="the extra integrations is not installed")
from transformers import AttentionInterface

from flashattn.integrations import transformers as drop_in

PLAIN = "bench_step and Llama and plain"


@pytest.fixture
def bench(pytester, monkeypatch, laid_out):
    """Return a function that runs the smoke sweep in its own folder and returns rows by name."""
    laid_out("benchmarks/bench_integrations.py")
    monkeypatch.setattr(timing.HostTime, "BATCH", 1)
    for interface in (AttentionInterface, drop_in.AttentionMaskInterface):  # put back later
        monkeypatch.setattr(interface, "_global_mapping", dict(interface._global_mapping))

    def run(which, *arguments):
        pytester.runpytest_inprocess("benchmarks", "--sweep", "smoke", "-k", which, *arguments)
        folder = pytester.path / ".benchmarks"
        runs = sorted(folder.glob("*/*.json")) or sorted(folder.glob("*/*.jsonl"))
        return {
            (row["name"].partition("[")[0], row["attention"]): row for row in load(runs[-1]).rows
        }

    return run


def test_every_kind_is_timed(bench, device):
    """Calls and steps are rows; interpreted kernels are not timed."""
    rows = bench("plain and Llama or forward and not backward")
    assert len(rows) == 9
    timed = {case: row["status"] for case, row in rows.items()}
    for part in ("device", "host"):
        activated = timed.pop((part, "sdpa, activated"))
        assert activated == ("ok" if device.type == "cuda" else "unsupported")
        assert rows[part, "attention"]["part"] == part
    timed.pop(("device", "sdpa"))  # it may miss the budget
    assert set(timed.values()) == {"ok"}
    assert rows["device", "attention"]["same_bits"]
    assert rows["host", "attention"]["clock"] == timing.HostTime.tells
    assert 0 <= rows["step", "fattn"]["gradient_error"] < 1e-4


def test_calls_on_a_device_take_turns(bench, monkeypatch):
    """SDPA and a direct call are timed in turns."""
    monkeypatch.setattr(timing.HostClock, "takes_turns", True)
    monkeypatch.setattr(timing, "clock_of", lambda _: timing.HostClock())  # on a GPU, too
    monkeypatch.setattr(timing, "MOST_ROUNDS", 5)
    rows = bench("bench_device and forward")
    assert rows["device", "attention"]["status"] == "ok"
    for row in (row for row in rows.values() if row["status"] == "ok"):
        assert row["clock"].endswith("in turns")
        assert row["part"] == "device"
        assert row["rounds"] == 5


def test_wrong_gradients_and_broken_peers(bench, monkeypatch):
    """Ours with wrong gradients fails; a peer that raises is an expected failure; rows say why."""

    def broken(*_, **__):
        raise RuntimeError("no luck")

    right = drop_in.attention
    monkeypatch.setattr(drop_in, "attention", lambda *x, **how: right(*x, **how) * 1.01)
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", broken)
    rows = bench(PLAIN)
    told = {name: (row["status"], row["reason"]) for (_, name), row in rows.items()}
    assert told["eager"] == ("ok", None)
    assert told["fattn"][0] == told["sdpa"][0] == "failed"
    assert "fattn: gradients are off by" in told["fattn"][1]
    assert "sdpa: RuntimeError: no luck" in told["sdpa"][1]
    assert "seconds" not in rows["step", "fattn"]


def test_without_transformers(bench, monkeypatch):
    """Without transformers, steps are unsupported rows and calls are timed."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    rows = bench("bench_step and Llama and plain or bench_host and attention")
    assert rows["step", "fattn"]["status"] == "unsupported"
    assert rows["step", "fattn"]["reason"] == "transformers is not installed"
    assert rows["host", "attention"]["status"] == "ok"


@pytest.mark.gpu
def test_a_wait_of_ours_fails(bench, monkeypatch):
    """A step in which our attention reads a value from the device is not timed."""

    def waiting(*inputs, **how):
        inputs[0].sum().item()
        return right(*inputs, **how)

    right = drop_in.attention
    monkeypatch.setattr(drop_in, "attention", waiting)
    row = bench(f"{PLAIN} and fattn")["step", "fattn"]
    assert row["status"] == "failed"
    assert "fattn: the host waits in" in row["reason"]
