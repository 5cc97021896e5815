"""The attention grid: what the scores cost in time and memory, and what is left without them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashattn.report.fit import exponent
from flashattn.report.plot import colour, curves, heading, legend, lengths, logarithmic, panels
from flashattn.report.rows import OURS, by, groups, known, label, timed, values
from flashattn.report.runs import Row, Run
from flashattn.report.study import Study, Table
from flashattn.report.units import (
    MEBI,
    binary,
    digits,
    mib,
    percent,
    seconds_or_mark,
    times,
    word,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "attention"
NAIVE = "naive"
FACTS = ("impl", "pass", "seq", "head_dim")
QUADRATIC = 1.5  # the exponent from which bytes are said per N² and not per N
HELD = "held_bytes"  # for the backward pass
PEAK = "peak_bytes"
MEMORY = {HELD: "held for backward", PEAK: "peak"}


def _rows(run: Run) -> list[Row]:
    return known(run.study(NAME), *FACTS)


def tables(run: Run) -> list[Table]:
    """Return a table for each implementation: both passes, and bytes over what they grow with."""
    found = groups(_rows(run), "impl")
    return [_table(impl, rows) for (impl,), rows in found.items() if _told(rows)]


def _told(rows: list[Row]) -> bool:
    """Whether a row has a time or bytes to show; interpreted kernels have bytes and no time."""
    return any(row["status"] != "unsupported" or _bytes(row) for row in rows)


def _bytes(row: Row) -> bool:
    return any(row.get(fact) is not None for fact in MEMORY)


def _table(impl: str, rows: list[Row]) -> Table:
    power = _power(rows)
    lines = []
    for (dtype, dim, causal, n), cases in groups(
        rows, "dtype", "head_dim", "causal", "seq"
    ).items():
        passes = by(cases, "pass")
        held = _fact(cases, HELD)
        cells = [word("dtype", dtype), str(dim), word("causal", causal), str(n)]
        cells += [seconds_or_mark(passes.get(name)) for name in ("forward", "backward")]
        cells += [mib(held), mib(_fact(cases, PEAK)), mib(_fact(cases, "predicted_bytes"))]
        lines.append([*cells, digits(None if held is None else held / n**power)])
    return Table(
        caption=f"{impl}: times in ms, memory in MiB",
        header=[
            *("dtype", "D", "mask", "N", "forward", "backward", "held", "peak", "predicted"),
            f"held bytes / {'N²' if power == 2 else 'N'}",  # noqa: PLR2004 - squared
        ],
        lines=lines,
        rows=rows,
    )


def _fact(cases: list[Row], fact: str) -> float | None:
    """Return the most that any pass of one case says."""
    return max((row[fact] for row in cases if row.get(fact) is not None), default=None)


def _points(rows: list[Row], fact: str) -> list[tuple[int, float]]:
    """Return a fact at each length; both passes of one length are one case."""
    found = ((n, _fact(cases, fact)) for (n,), cases in groups(rows, "seq").items())
    return [(n, value) for n, value in found if value]


def _power(rows: list[Row]) -> int:
    """Return 2 if the bytes held grow with the scores, 1 if with the inputs."""
    grown = [
        e
        for cases in groups(rows, "dtype", "head_dim", "causal").values()
        if (e := exponent(_points(cases, HELD))) is not None
    ]
    return 2 if grown and max(grown) > QUADRATIC else 1


def findings(run: Run) -> list[str]:
    """Say how bytes grow, how far ours is from naive attention, and where memory ends."""
    rows = _rows(run)
    return [*_growth(rows), *_against_naive(rows), *_ends(rows)]


def _chosen(rows: list[Row]) -> list[Row]:
    """Return the rows of the shape (head dimension, mask, dtype) with the most, the largest one."""
    told = (row for row in rows if timed([row]) or _bytes(row))
    found = groups(told, "head_dim", "causal", "dtype")
    return max(reversed(found.values()), key=len, default=[])


def _growth(rows: list[Row]) -> list[str]:
    chosen, said = _chosen(rows), []
    for fact, verb in ((HELD, "held for the backward pass"), (PEAK, "in use at the peak")):
        grown = {
            impl: exponent(_points(own, fact)) for (impl,), own in groups(chosen, "impl").items()
        }
        known = [f"N^{e:.2f} in {impl}" for impl, e in grown.items() if e is not None]
        if known:
            where = f"D = {chosen[0]['head_dim']}"
            said.append(f"Bytes {verb} grow as {', '.join(known)} ({where}).")
    return said


def _against_naive(rows: list[Row]) -> list[str]:
    """Compare with naive attention at the greatest length that both have, pass by pass."""
    said = []
    for (name,), cases in groups(timed(rows), "pass").items():
        shared = [
            (sides[NAIVE], sides[OURS])
            for own in groups(cases, "seq", "head_dim", "causal", "dtype").values()
            if {NAIVE, OURS} <= set(sides := by(own, "impl"))
        ]
        if not shared:
            continue
        naive, ours = shared[-1]
        ratio = times(naive["seconds"] / ours["seconds"])
        fact = next((fact for fact in MEMORY if naive.get(fact) and ours.get(fact)), None)
        memory = f" with {percent(ours[fact] / naive[fact])} of the bytes" if fact else ""
        kind = f" ({MEMORY[fact]})" if fact else ""
        where = f"N = {naive['seq']}, D = {naive['head_dim']}"
        said.append(f"{name}: {OURS} is {ratio} as fast as {NAIVE} at {where}{memory}{kind}.")
    return said


def _ends(rows: list[Row]) -> list[str]:
    said = []
    for (impl,), cases in groups((r for r in rows if r["status"] == "oom"), "impl").items():
        least = min(cases, key=lambda row: row.get("predicted_bytes") or 0)
        need = least.get("predicted_bytes")
        where = f"from N = {min(row['seq'] for row in cases)}"
        said.append(
            f"{impl} runs out of memory {where}" + (f": {binary(need)} predicted." if need else ".")
        )
    return said


def pictures(run: Run) -> dict[str, Figure]:
    """Draw bytes against N on logarithmic axes, with lines that grow as N and N²."""
    rows = _rows(run)
    chosen = _chosen([row for row in rows if _bytes(row)])
    facts = [fact for fact in MEMORY if any(row.get(fact) for row in chosen)]
    if len(values(chosen, "seq")) < 2 or not facts:  # noqa: PLR2004 - a line has two points
        return {}
    case = {fact: chosen[0].get(fact) for fact in ("head_dim", "causal", "dtype")}
    same = [row for row in rows if all(row.get(fact) == v for fact, v in case.items())]
    title = f"Memory of attention, {label(case, *case)}"
    figure, axes = panels(title, 1, len(facts), height=3.6, sharey=True)
    for axis, fact in zip(axes[0], facts, strict=True):
        _panel(axis, same, fact)
        heading(axis, MEMORY[fact])
    axes[0][0].set_ylabel("MiB")
    legend(figure, axes)
    return {"attention-memory": figure}


def _panel(axis: Axes, rows: list[Row], fact: str) -> None:
    series = {impl: _points(own, fact) for (impl,), own in groups(rows, "impl").items()}
    scaled = {
        impl: [(n, count / MEBI) for n, count in points]
        for impl, points in series.items()
        if points
    }
    curves(axis, scaled)
    for row in rows:
        if row["status"] == "oom" and row.get("predicted_bytes"):
            mark: dict[str, Any] = {"marker": "x", "s": 45, "color": colour(row["impl"])}
            axis.scatter(row["seq"], row["predicted_bytes"] / MEBI, **mark)
            where = (row["seq"], row["predicted_bytes"] / MEBI)
            away: dict[str, Any] = {"xytext": (-7, 2), "textcoords": "offset points"}
            axis.annotate("OOM", where, fontsize=8, ha="right", **away)
    logarithmic(axis)
    lengths(axis, values(rows, "seq"))
    for power, points in _guides(scaled).items():
        x, y = zip(*points, strict=True)
        axis.plot(x, y, linestyle=":", color="0.45", linewidth=1.2, zorder=1)
        axis.annotate(
            ("N", "N²")[power - 1],
            points[-1],
            color="0.35",
            xytext=(3, 0),
            textcoords="offset points",
            fontsize=9,
        )


def _guides(series: dict[str, list[tuple[int, float]]]) -> dict[int, list[tuple[int, float]]]:
    """Return lines that grow as N from the lowest curve's start and as N² from the highest's."""
    curved = [points for points in series.values() if len(points) > 1]
    if not curved:
        return {}
    low = min(curved, key=lambda points: points[-1][1])
    high = max(curved, key=lambda points: points[-1][1])
    made = {}
    for power, points in ((1, low), (2, high)):
        (start, value), (last, _) = points[0], points[-1]
        made[power] = [(n, 0.6 * value * (n / start) ** power) for n in (start, last)]
    return made


STUDY = Study(
    name=NAME,
    title="Attention alone",
    question="What do the N x N scores cost in time and memory, and what is left without them?",
    tables=tables,
    pictures=pictures,
    findings=findings,
)
