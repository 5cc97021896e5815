"""The roofs: what is multiplied and copied, and how it is counted."""

from __future__ import annotations

import pytest
import torch

from flashattn.measure import roofline
from flashattn.measure.roofline import Sizes, measure_roofs

SMALL = Sizes(side=64, copied=4096, kinds=("bfloat16", "tf32", "float32"))
CPU = torch.device("cpu")


class TwoSeconds:
    """A clock for which every call takes two seconds, and which notes the mode it ran in."""

    tells = "nothing"

    def __init__(self):
        """Start with no call made."""
        self.modes = []

    def samples(self, call, calls):
        """Note the mode and make one call."""
        self.modes.append(torch.backends.cuda.matmul.fp32_precision)
        return [2.0] * calls, call()


def test_roofs_are_work_over_time():
    """A product of n x n counts 2 n^3 flops, and a copy counts its bytes twice."""
    roofs = measure_roofs(CPU, sizes=SMALL, clock=TwoSeconds())
    assert roofs == {
        "bfloat16": 64**3,
        "tf32": 64**3,
        "float32": 64**3,
        "copy": 4096,
    }


@pytest.fixture
def setting():
    """PyTorch's own setting for fp32 products, put back after the test."""
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    yield settings
    settings.fp32_precision = before


def test_only_the_tf32_roof_uses_tf32(setting):
    """fp32 products are IEEE's unless TF32 is what is measured, and the setting is put back."""
    setting.fp32_precision, clock = "tf32", TwoSeconds()
    measure_roofs(CPU, sizes=Sizes(side=8, copied=64, kinds=("tf32", "float32")), clock=clock)
    warm_and_timed = 2
    assert clock.modes[:4] == ["tf32"] * warm_and_timed + ["ieee"] * warm_and_timed
    assert setting.fp32_precision == "tf32"


def test_roofs_are_measured_on_random_data(monkeypatch):
    """No operand of a product is constant: zeros need less power and run faster."""
    spreads = []
    monkeypatch.setattr(
        roofline.torch, "mm", lambda a, b: spreads.extend([a.float().std(), b.float().std()])
    )
    measure_roofs(CPU, sizes=SMALL, clock=TwoSeconds())
    assert spreads == pytest.approx([1.0] * len(spreads), rel=0.1)
    assert len(spreads) >= 2 * len(SMALL.kinds)


def test_cpu_roofs_are_plausible(monkeypatch):
    """The real clock on this machine's processor gives a number above 0 for each of its roofs."""
    monkeypatch.setitem(roofline.SIZES, "cpu", Sizes(side=128, copied=2**16, kinds=("float32",)))
    roofs = measure_roofs(CPU)
    assert set(roofs) == {"float32", "copy"}
    assert min(roofs.values()) > 1e6
