"""Roofs: which products and copies are measured, and how they are counted."""

from types import SimpleNamespace

import pytest
import torch

from flashattn.measure import roofline
from flashattn.measure.roofline import Sizes, measure_roofs

SMALL = Sizes(side=64, copied=4096, kinds=("bfloat16", "tf32", "float32"))


def test_roofs_are_work_over_time(matmul, monkeypatch):
    """A product of n x n counts 2 n^3 flops, and a copy its bytes twice; only tf32 is in TF32.

    No operand of a product is constant: zeros need less power and run faster.
    """
    matmul.fp32_precision, modes, spreads = "tf32", [], []

    def samples(call, calls):
        modes.append(matmul.fp32_precision)
        return [2.0] * calls, call()

    monkeypatch.setattr(roofline.torch, "mm", lambda a, b: spreads.extend([a.std(), b.std()]))
    monkeypatch.setitem(roofline.SIZES, "cpu", SMALL)
    monkeypatch.setattr(roofline, "clock_of", lambda _: SimpleNamespace(samples=samples))
    roofs = measure_roofs(torch.device("cpu"))
    assert roofs == {"bfloat16": 64**3, "tf32": 64**3, "float32": 64**3, "copy": 4096}
    assert modes[::2] == modes[1::2]  # warm-up and timing
    assert modes[::2] == ["ieee", "tf32", "ieee", "tf32"]  # the copy keeps the earlier mode
    assert matmul.fp32_precision == "tf32"
    assert [x.float() for x in spreads] == pytest.approx([1.0] * len(spreads), rel=0.1)
    assert len(spreads) >= 2 * len(SMALL.kinds)
