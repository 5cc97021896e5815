"""The flash study: speeds, shares and who wins, all of it from the rows."""

from __future__ import annotations

import pytest

from flashattn.report.runs import Run
from flashattn.report.studies import flash

ROOFS = {"bfloat16": 8e14, "float32": 5e13}


def row(impl, seconds=None, n=4096, status="ok", **facts):
    """Return a case of 4e12 flops."""
    made = {"study": "flash", "name": f"{impl}-{n}", "impl": impl, "status": status}
    made |= {"problem": f"q{n}", "protocol": "tokens", "pass": "forward", "flops": 4e12}
    made |= {"batch": 16384 // n, "heads": 16, "seq_q": n, "seq_kv": n, "head_dim": 128}
    made |= {"causal": False, "dtype": "bfloat16", "seconds": seconds, "reason": None}
    return made | facts


def run(*rows):
    """Return a run of these rows."""
    return Run(machine={}, roofs=ROOFS, rows=list(rows))


def cells(table, problem):
    """Return a line by the names of its columns."""
    return dict(zip(table.header, next(x for x in table.lines if x[0] == problem), strict=True))


def test_speed_share_and_ratio():
    """A cell is flops over seconds with its share of the roof; the ratio is to the fastest peer."""
    (table,) = flash.tables(run(row("sdpa", 0.008), row("triton", 0.01), row("flex", 0.02)))
    assert cells(table, "q4096") == {
        "problem": "q4096",
        "triton": "400 (50%)",
        "flex": "200 (25%)",
        "sdpa": "500 (62%)",
        "triton / best peer": "0.80 x sdpa",
    }
    assert "16384 tokens, hidden 2048: TFLOP/s" in table.caption


def test_one_head_is_told_in_ms():
    """The protocol of one head, where launching counts, is in milliseconds."""
    (table,) = flash.tables(run(row("triton", 0.01, protocol="one_head", batch=1, heads=1)))
    assert cells(table, "q4096")["triton"] == "10"
    assert table.caption == "forward, one head: ms"


def test_a_study_of_ours_is_no_peer():
    """The tiled implementation is ours too, so a faster one does not count as the best peer."""
    (table,) = flash.tables(run(row("triton", 0.01), row("tiled", 0.001)))
    assert cells(table, "q4096")["triton / best peer"] == ""


def test_share_is_of_the_roof_of_the_dtype():
    """fp32 is compared with the fp32 roof; without one there is a speed and no share."""
    fp32, fp64 = row("triton", 0.1, dtype="float32"), row("triton", 0.01, dtype="float64", n=1)
    (table,) = flash.tables(run(fp32, fp64))
    assert cells(table, "q4096")["triton"] == "40 (80%)"
    assert cells(table, "q1")["triton"] == "400"


def test_what_has_no_number_has_a_mark_or_no_column():
    """A case without a time shows why; an implementation without any time has no column."""
    flex = row("flex", status="unsupported")
    (table,) = flash.tables(
        run(row("triton", 0.01), row("sdpa", 0.01, n=1), row("sdpa", status="oom"), flex)
    )
    assert cells(table, "q4096")["sdpa"] == "OOM"
    assert cells(table, "q1")["triton"] == ""
    assert "flex" not in table.header


def test_passes_are_tables_and_problems_are_sorted():
    """Forward comes before backward whatever ran first; problems are in order of size."""
    backward = row("triton", 1, **{"pass": "backward"})
    tables = flash.tables(run(backward, row("triton", 1, n=8192), row("triton", 1, n=512)))
    assert [table.caption.split(",")[0] for table in tables] == ["forward", "backward"]
    assert [line[0] for line in tables[0].lines] == ["q512", "q8192"]


@pytest.mark.parametrize(("ours", "wins", "speed"), [(0.01, 1, 400), (0.004, 2, 1000)])
def test_winner_follows_the_times(ours, wins, speed):
    """How often ours is the fastest, by how much, and its best speed change with the times."""
    rows = [row("sdpa", 0.008), row("sdpa", 0.04, n=512), row("flex", 0.02)]
    said = flash.findings(run(*rows, row("triton", ours), row("triton", 0.02, n=512)))
    assert f"triton is the fastest in {wins} of 2 problems" in said[0]
    assert f"from {0.008 / ours:.2f}x (q4096)" in said[0] or f"{0.008 / ours:.2f}x" in said[0]
    assert f"triton reaches {speed} TFLOP/s (q4096), {speed / 800:.0%} of the bf16 roof." in said[1]


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_growth_is_fitted_to_the_long_half(power):
    """For one head the exponent is that of the longer half of the lengths."""
    long = [row("triton", 1e-9 * n**power, n=n, protocol="one_head") for n in (4096, 8192, 16384)]
    short = [row("triton", 1e-5, n=n, protocol="one_head") for n in (128, 256)]
    said = flash.findings(run(*short, *long))
    assert any(f"grows as N^{power:.2f} (bf16 D = 128, from N = 4096)" in s for s in said)


def test_no_peer_no_ratio():
    """Nothing is said about winning where nobody else has a time."""
    said = flash.findings(run(row("triton", 0.01), row("sdpa", status="oom")))
    assert not any("fastest" in sentence for sentence in said)


def test_pictures_show_speed_roof_and_time():
    """Speed is in TFLOP/s under its roof where tokens are fixed, time in ms for one head."""
    rows = [row("triton", 0.01, n=n) for n in (512, 1024)]
    rows += [row("triton", 0.01, n=n, protocol="one_head") for n in (512, 1024)]
    drawn = flash.pictures(run(*rows))
    assert set(drawn) == {"flash-tokens-bfloat16-full", "flash-one-head-bfloat16-full"}
    speed, time = (drawn[name].axes[0] for name in sorted(drawn, reverse=True))
    heights = {line.get_label(): list(line.get_ydata()) for line in speed.get_lines()}
    assert heights == {"triton": [400, 400], "bf16 product, measured": [800, 800]}
    assert speed.get_ylim()[1] > 800
    assert [list(line.get_ydata()) for line in time.get_lines()] == [[10, 10]]
    assert time.get_yscale() == "log"


def test_one_length_is_no_line():
    """A run of one length has tables and no picture."""
    assert flash.pictures(run(row("triton", 0.01))) == {}
