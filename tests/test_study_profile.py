"""The profile study: shares are of the device's time, and add up."""

from __future__ import annotations

import pytest

from flashattn.report.runs import Run
from flashattn.report.studies import profile


def step(categories, name="forward", **facts):
    """Return the profile of a step."""
    kernels = [{"name": "nvjet", "category": "matmul", "calls": 7, "seconds": 0.002}] * 10
    row = {"study": "profile", "name": name, "status": "ok", "reason": None, "size": "xl"}
    row |= {"step": name, "compiled": False, "categories": categories, "kernels": kernels}
    return row | {"device_seconds": sum(categories.values()), "seconds": 0.02} | facts


def parts(softmax, seq=1024):
    """Return attention whose products take 1 ms and 100 flops each, softmax a flop."""
    product = {"seconds": 0.001, "flops": 100, "bytes": 10}
    divided = {"scores": product, "softmax": {"seconds": softmax, "flops": 1}, "values": product}
    row = {"study": "profile", "name": f"attention_parts[{seq}]", "status": "ok", "reason": None}
    return row | {"parts": divided, "seq": seq, "head_dim": 64, "heads": 4, "dtype": "bfloat16"}


def run(*rows):
    """Return a run of these rows."""
    return Run(machine={}, rows=list(rows))


def test_categories_are_shares_of_device_time():
    """Each category has its share, the largest first, and the profile stands by the benchmark."""
    table = profile.tables(run(step({"softmax": 0.004, "matmul": 0.006})))[0]
    assert table.header[2:] == ["profile", "benchmark", "profile / benchmark", "matmul", "softmax"]
    assert table.lines == [["xl, eager", "forward", "10", "20", "50%", "60%", "40%"]]


def test_phases_are_shares_of_device_time():
    """What is in no phase leaves the shares short of one."""
    row = step({"matmul": 0.01}, phases={"forward": 0.004, "backward": 0.005})
    table = profile.tables(run(row))[1]
    assert table.header == ["case", "step", "profile", "backward", "forward"]
    assert table.lines == [["xl, eager", "forward", "10", "50%", "40%"]]


def test_longest_kernels_are_told():
    """Of a step's kernels the longest eight are told, with their calls and share."""
    table = profile.tables(run(step({"matmul": 0.02})))[-1]
    assert table.lines == [["nvjet", "forward", "matmul", "7", "2", "10%"]] * 8


def test_parts_of_attention_have_time_and_flops():
    """Softmax's share of time stands beside its share of flops."""
    (table,) = profile.tables(run(parts(0.002)))
    assert table.lines[1][:8] == ["softmax", "bf16", "4", "64", "1024", "2", "50%", "0.5%"]


@pytest.mark.parametrize(("softmax", "share"), [(0.002, "50%"), (0.006, "75%")])
def test_softmax_follows_its_time(softmax, share):
    """The sentence about attention is of the longest sequence, and has its shares."""
    (said,) = profile.findings(run(parts(9.0, seq=256), parts(softmax)))
    assert said == (
        "Inside naive attention (bf16, D = 64, N = 1024) softmax has "
        f"{share} of the time for 0.5% of the flops."
    )


@pytest.mark.parametrize("rest", ["softmax", "optimizer"])
def test_share_of_products_and_who_comes_next(rest):
    """The share of matrix products is said of every step, and what has most of the rest."""
    forward = step({"matmul": 0.008, "copy": 0.002})
    train = step({"matmul": 0.005, "copy": 0.001, rest: 0.004}, "train")
    (said,) = profile.findings(run(train, forward))
    assert "matrix products are 80% of forward, 50% of train" in said
    assert said.endswith(f"most of the rest of train is {rest}, 40%.")


def test_bars_add_up_to_all_of_it():
    """Every step is one bar of its categories, which end at 100%."""
    rows = [step({"matmul": 0.006, "softmax": 0.004}), step({"mine": 1.0}, "train")]
    (figure,) = profile.pictures(run(*rows)).values()
    bars = [bar for group in figure.axes[0].containers for bar in group]
    ends = [max(bar.get_x() + bar.get_width() for bar in bars if bar.get_y() < y) for y in (0, 1)]
    assert ends == pytest.approx([100, 100])
    assert {group.get_label() for group in figure.axes[0].containers} == {
        "matmul",
        "softmax",
        "mine",
    }
