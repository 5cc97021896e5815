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
        "ours / best peer": "0.80 x sdpa",
    }
    assert "16384 tokens, hidden 2048: TFLOP/s" in table.caption


def test_one_head_is_told_in_ms():
    """One head, where launching counts, is in milliseconds: a table for each head dimension."""
    one = {"protocol": "one_head", "batch": 1, "heads": 1}
    rows = [row("triton", 0.01, **one), row("triton", 0.02, **one | {"head_dim": 64})]
    narrow, wide = flash.tables(run(*rows))
    assert (narrow.caption, wide.caption) == (
        "forward, one head, D = 64: ms",
        "forward, one head, D = 128: ms",
    )
    assert [cells(table, "q4096")["triton"] for table in (narrow, wide)] == ["20", "10"]


def test_an_unsteady_median_is_marked():
    """Quartiles further apart than a quarter of the median put a mark behind it, and explain it."""
    apart, close = {"q1": 0.009, "q3": 0.012}, {"q1": 0.009, "q3": 0.0114}
    (table,) = flash.tables(run(row("triton", 0.01, **apart), row("sdpa", 0.01, **close)))
    assert cells(table, "q4096")["triton"] == "400 (50%) ~"
    assert cells(table, "q4096")["sdpa"] == "400 (50%)"
    assert table.caption.endswith("~ where the quartiles are further apart than 25% of the median")
    (table,) = flash.tables(run(row("triton", 0.01, **close)))
    assert "~" not in table.caption


def test_the_best_peer_is_of_the_same_run_where_there_is_one():
    """A peer of our row's run is preferred to a faster one of another; if there is none, marked."""
    old, new = Run(machine={}), Run(machine={})
    ours = [row("triton", 0.01, run=new), row("triton", 0.01, n=512, run=new)]
    peers = [row("sdpa", 0.005, run=old), row("flex", 0.02, run=new)]
    merged = run(*ours, *peers, row("sdpa", 0.005, n=512, run=old))
    (table,) = flash.tables(merged)
    assert cells(table, "q4096")["ours / best peer"] == "2.00 x flex"
    assert cells(table, "q512")["ours / best peer"] == "0.50 x sdpa +"
    assert table.caption.endswith("; + peer of another run")
    assert any("in 1 of 2 problems the peer is of another run" in f for f in flash.findings(merged))
    assert "another run" not in str(flash.tables(run(row("triton", 0.01), row("sdpa", 0.01))))


def test_wins_are_counted_again_where_medians_are_steady():
    """An unsteady median of either side takes its problem out of a second count."""
    apart = {"q1": 0.01, "q3": 0.04}
    rows = [row("sdpa", 0.02), row("triton", 0.01), row("sdpa", 0.02, n=512)]
    said = flash.findings(run(*rows, row("triton", 0.03, n=512, **apart)))
    assert "ours is the fastest in 1 of 2 problems" in said[0]
    assert "where both medians are steady: ours is the fastest in 1 of 1 problems" in said[1]
    assert "steady" not in flash.findings(run(*rows, row("triton", 0.03, n=512)))[1]


@pytest.mark.parametrize(
    ("ours", "said"),
    [(0.01, "in 0 of 2 problems."), (0.03, "in 1 of 2 problems, the longest of them q512.")],
)
def test_one_head_is_held_against_naive(ours, said):
    """How often the definition is faster is told, and up to which length."""
    one = {"protocol": "one_head", "batch": 1, "heads": 1}
    rows = [row("naive", 0.02, n=n, **one) for n in (512, 4096)]
    rows += [row("triton", ours, n=512, **one), row("triton", 0.01, **one)]
    assert f"forward, one head: ours is slower than naive {said}" in flash.findings(run(*rows))


def test_a_study_of_ours_is_no_peer():
    """The tiled implementation is ours too, so a faster one does not count as the best peer."""
    (table,) = flash.tables(run(row("triton", 0.01), row("tiled", 0.001)))
    assert cells(table, "q4096")["ours / best peer"] == ""


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
    assert f"ours is the fastest in {wins} of 2 problems" in said[0]
    assert f"from {0.008 / ours:.2f}x (q4096)" in said[0] or f"{0.008 / ours:.2f}x" in said[0]
    assert f"ours reaches {speed} TFLOP/s (q4096), {speed / 800:.0%} of the bf16 roof." in said[1]


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_growth_is_fitted_to_the_long_half(power):
    """For one head the exponent is that of the longer half of the lengths that are steady."""
    apart = {"q1": 0.1, "q3": 9.0}
    unsteady = row("triton", 5.0, n=8192, protocol="one_head", **apart)
    long = [row("triton", 1e-9 * n**power, n=n, protocol="one_head") for n in (32768, 4096, 16384)]
    short = [row("triton", 1e-5, n=n, protocol="one_head") for n in (128, 256, 512)]
    said = flash.findings(run(*short, *long, unsteady))
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


def test_what_exceeds_the_roof_is_seen():
    """Panels of a line share a scale that holds the fastest of all, from 0 on, above any roof."""
    slow = [row("triton", 0.02, n=n, head_dim=64) for n in (512, 1024)]
    rows = [*slow, *(row("triton", 0.004, n=n) for n in (512, 1024))]
    (figure,) = flash.pictures(run(*rows)).values()
    assert {axis.get_ylim()[0] for axis in figure.axes} == {0}
    assert all(axis.get_ylim()[1] > 1000 for axis in figure.axes)


def test_pictures_tell_what_is_unsteady_and_what_is_missing():
    """An unsteady point is hollow; a pass that was not measured at a head dimension says so."""
    apart = {"q1": 0.01, "q3": 0.04}
    rows = [row("triton", 0.02, n=512, **apart), row("triton", 0.01, n=1024)]
    rows += [row("triton", 0.01, n=n, head_dim=64, **{"pass": "backward"}) for n in (512, 1024)]
    (figure,) = flash.pictures(run(*rows)).values()
    missing, measured, *_ = figure.axes
    assert [text.get_text() for text in missing.texts] == ["not measured"]
    assert not measured.texts
    hollow = [line for line in measured.get_lines() if line.get_label() == "quartiles far apart"]
    assert [line.get_xydata().tolist() for line in hollow] == [[[512, 200]]]


def test_one_length_is_no_line():
    """A run of one length has tables and no picture."""
    assert flash.pictures(run(row("triton", 0.01))) == {}
