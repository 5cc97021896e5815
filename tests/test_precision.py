"""Low-precision sums to the last digit, dtypes under autocast, and LayerNorm by hand."""

import math

import pytest
import torch

from flashattn.measure.precision import QUANTITIES, autocast_dtypes, layernorm, partial_sums

HALVES = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize(
    ("count", "value", "accumulator", "addend", "cast", "result"),
    [
        (1000, 0.01, torch.float32, torch.float32, "none", 10.000133514404297),
        (1000, 0.01, torch.float16, torch.float16, "none", 9.953125),
        (1000, 0.01, torch.float32, torch.float16, "implicit", 10.00213623046875),
        (1000, 0.01, torch.float32, torch.float16, "explicit", 10.00213623046875),
        (1000, 0.01, torch.bfloat16, torch.bfloat16, "none", 4.0),
        (1000, 0.01, torch.float32, torch.bfloat16, "implicit", 10.009765625),
        (10_000, 0.001, torch.float32, torch.float32, "none", 10.000411033630371),
        (10_000, 0.001, torch.float16, torch.float16, "none", 4.0),
        (10_000, 0.001, torch.bfloat16, torch.bfloat16, "none", 0.5),
    ],
)
def test_sums(count, value, accumulator, addend, cast, result):
    """Every sum is IEEE 754's to the last digit, on any machine."""
    curve = partial_sums(value, count, accumulator=accumulator, addend=addend, cast=cast)
    assert curve[-1] == (count, result)
    assert len(curve) <= 101
    assert [sums for _, sums in curve] == sorted(sums for _, sums in curve)


def test_two_dtypes_must_be_cast():
    """Two dtypes without a choice of who casts, and an unknown cast, are refused by name."""
    for addend, cast in ((torch.float16, "none"), (torch.float32, "perhaps")):
        with pytest.raises(ValueError, match="cast: wanted implicit or explicit"):
            partial_sums(0.1, 1, accumulator=torch.float32, addend=addend, cast=cast)


@pytest.mark.parametrize("dtype", HALVES)
def test_autocast(device, dtype):
    """Parameters and gradients stay fp32, products are cast; on CUDA loss and norm stay fp32."""
    name = str(dtype).removeprefix("torch.")
    found = autocast_dtypes(dtype, device)
    wide = {part for part, got in found.items() if got == "float32"}
    assert {part for part, got in found.items() if got == name} >= {"first linear", "logits"}
    assert wide >= {"parameters", "gradients"}
    if device.type == "cuda":
        assert wide == {"parameters", "LayerNorm", "loss", "gradients"}


@pytest.mark.parametrize("dtype", HALVES)
def test_layernorm_as_such_is_right(dtype):
    """At scale 1 each quantity is that of fp64, except for the dtype's own roundings."""
    exact, got = layernorm(dtype, 1.0)
    assert tuple(exact) == tuple(got) == QUANTITIES
    for name in QUANTITIES:
        assert got[name] == pytest.approx(exact[name], rel=16 * torch.finfo(dtype).eps)
    assert exact["variance"] == pytest.approx(1.0, rel=0.1)


def test_fp16_overflows_and_underflows_and_bf16_does_not():
    """In fp16 the sum overflows at scale 300, and the variance underflows at 1 / 10 000."""
    _, got = layernorm(torch.float16, 300.0)
    assert got["mean"] == got["largest square"] == got["variance"] == math.inf
    assert math.isnan(got["largest output"])
    assert all(map(math.isfinite, layernorm(torch.bfloat16, 300.0)[1].values()))
    assert layernorm(torch.float16, 1e-4)[1]["variance"] == 0
    exact, got = layernorm(torch.bfloat16, 1e-4)
    assert got["variance"] == pytest.approx(exact["variance"], rel=0.02) != 0
