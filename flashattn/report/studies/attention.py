"""The attention grid: the cost of the score matrix in time and memory."""

from __future__ import annotations

from flashattn.report import plot
from flashattn.report.rows import NAIVE, OURS, by, exponent, groups, known, label, timed, values
from flashattn.report.runs import Row, Run
from flashattn.report.study import Table, filled
from flashattn.report.units import MEBI, binary, digits, mib, ms, or_mark, percent, times, word

NAME = "attention"
TITLE = "Attention alone"
QUESTION = "What do the N x N scores cost in time and memory, and what is left without them?"
SHAPE = ("dtype", "head_dim", "causal")
QUADRATIC = 1.5  # above this exponent, the table has bytes per N², else per N
HELD, PEAK = "held_bytes", "peak_bytes"
MEMORY = {HELD: "held for backward", PEAK: "peak"}


def _rows(run: Run) -> list[Row]:
    return known(run.study(NAME), "impl", "pass", "seq", "head_dim")


def _has_bytes(row: Row) -> bool:
    return any(row.get(fact) is not None for fact in MEMORY)


def tables(run: Run) -> list[Table]:
    """Return a table for each implementation: both passes, and bytes per N or N²."""
    found = groups(_rows(run), "impl").items()
    return filled(*(_table(impl, rows) for (impl,), rows in found))


def _table(impl: str, rows: list[Row]) -> Table:
    """Return a table with a line for each shape and length; interpreted kernels have no times."""
    fits = (exponent(_points(own, HELD)) for own in groups(rows, *SHAPE).values())
    power = 2 if max((e for e in fits if e is not None), default=0) > QUADRATIC else 1
    lines = []
    if any(row["status"] != "unsupported" or _has_bytes(row) for row in rows):
        for (dtype, dim, causal, n), cases in groups(rows, *SHAPE, "seq").items():
            passes, held = by(cases, "pass"), _most(cases, HELD)
            cells = [word("dtype", dtype), str(dim), word("causal", causal), str(n)]
            cells += [or_mark(passes.get(name), ms) for name in ("forward", "backward")]
            cells += [mib(_most(cases, fact)) for fact in (*MEMORY, "predicted_bytes")]
            lines.append([*cells, digits(None if held is None else held / n**power)])
    header = ["dtype", "D", "mask", "N", "forward", "backward", "held", "peak", "predicted"]
    header.append(f"held bytes / {('N', 'N²')[power - 1]}")
    caption = f"{impl}: times in ms, memory in MiB"
    return Table(caption=caption, header=header, lines=lines, rows=rows)


def _most(cases: list[Row], fact: str) -> float | None:
    """Return the maximum of a fact over the passes of one case."""
    return max((row[fact] for row in known(cases, fact)), default=None)


def _points(rows: list[Row], fact: str) -> list[tuple[int, float]]:
    """Return a fact at each length, the maximum of both passes."""
    found = ((n, _most(cases, fact)) for (n,), cases in groups(rows, "seq").items())
    return [(n, value) for n, value in found if value]


def findings(run: Run) -> list[str]:
    """Return the growth of memory, our speed over naive attention, and where memory runs out."""
    rows = _rows(run)
    return [*_growth(rows), *_compared(run), *_ends(rows)]


def _chosen(rows: list[Row]) -> list[Row]:
    """Return the rows of the shape that has the most rows; of several, the largest shape."""
    told = (row for row in rows if timed([row]) or _has_bytes(row))
    found = groups(told, "head_dim", "causal", "dtype")
    return max(reversed(found.values()), key=len, default=[])


def _growth(rows: list[Row]) -> list[str]:
    chosen, said = _chosen(rows), []
    for fact, verb in ((HELD, "held for the backward pass"), (PEAK, "in use at the peak")):
        fits = {i: exponent(_points(own, fact)) for (i,), own in groups(chosen, "impl").items()}
        grown = [f"N^{e:.2f} in {impl}" for impl, e in fits.items() if e is not None]
        if grown:
            where = f"D = {chosen[0]['head_dim']}"
            said.append(f"Bytes {verb} grow as {', '.join(grown)} ({where}).")
    return said


def against_naive(run: Run) -> dict[str, tuple[Row, Row]]:
    """Return naive attention and ours at the longest common length, for each pass."""
    found = dict[str, tuple[Row, Row]]()
    for (name,), cases in groups(timed(_rows(run)), "pass").items():
        sides = [by(own, "impl") for own in groups(cases, "seq", *SHAPE).values()]
        both = [(side[NAIVE], side[OURS]) for side in sides if {NAIVE, OURS} <= set(side)]
        if both:
            found[name] = both[-1]
    return found


def _compared(run: Run) -> list[str]:
    said = []
    for name, (naive, ours) in against_naive(run).items():
        fact = next((fact for fact in MEMORY if naive.get(fact) and ours.get(fact)), None)
        memory = ""
        if fact:
            memory = f" with {percent(ours[fact] / naive[fact])} of the bytes ({MEMORY[fact]})"
        said.append(
            f"{name}: {OURS} is {times(naive['seconds'] / ours['seconds'])} as fast as {NAIVE} "
            f"at {label(naive, 'seq', 'head_dim')}{memory}."
        )
    return said


def _ends(rows: list[Row]) -> list[str]:
    said = []
    for (impl,), cases in groups((r for r in rows if r["status"] == "oom"), "impl").items():
        need = min((row["predicted_bytes"] for row in known(cases, "predicted_bytes")), default=0)
        end = f": {binary(need)} predicted" if need else ""
        least = min(row["seq"] for row in cases)
        said.append(f"{impl} runs out of memory from N = {least}{end}.")
    return said


def pictures(run: Run) -> dict[str, plot.Picture]:
    """Plot bytes over N on logarithmic axes, with reference lines for N and N²."""
    rows = _rows(run)
    chosen = _chosen([row for row in rows if _has_bytes(row)])
    shown = [fact for fact in MEMORY if any(row.get(fact) for row in chosen)]
    if len(values(chosen, "seq")) < 2 or not shown:  # noqa: PLR2004 - a line has two points
        return {}
    shape = {fact: chosen[0].get(fact) for fact in SHAPE}
    same = [row for row in rows if all(row.get(fact) == v for fact, v in shape.items())]
    records = [record for fact in shown for record in _records(same, fact)]
    x, y = plot.lengths(values(same, "seq")), plot.quantity("y", "MiB", log=True)
    title = f"Memory of attention, {label(shape, *SHAPE)}"
    made = plot.lines(title, records, x, y, columns=2, least=280, height=250)
    return {"attention-memory": made}


def _records(rows: list[Row], fact: str) -> list[plot.Record]:
    """Return a point for each length, a cross where memory ran out, and lines for N and N²."""
    panel = {"panel": MEMORY[fact]}
    found = {impl: _points(own, fact) for (impl,), own in groups(rows, "impl").items()}
    made = [
        panel | {"name": impl, "x": n, "y": plot.exact(count / MEBI)}
        for impl, own in found.items()
        for n, count in own
    ]
    ended = known((row for row in rows if row["status"] == "oom"), "predicted_bytes")
    missing = {(row["impl"], row["seq"]): row["predicted_bytes"] / MEBI for row in ended}
    for (impl, n), size in missing.items():
        cross = {"kind": "missing", "label": "OOM, predicted"}
        made.append(panel | cross | {"name": impl, "x": n, "y": plot.exact(size)})
    curved = sorted((own for own in found.values() if len(own) > 1), key=lambda own: own[-1][1])
    for power, own in ((1, curved[:1]), (2, curved[-1:])):  # lowest and highest curve
        for (start, value), *_, (end, _) in own:
            name = ("N", "N²")[power - 1]
            for n, said in ((start, ""), (end, name)):
                line = {"name": name, "kind": "reference", "label": said}
                height = 0.6 * value * (n / start) ** power / MEBI
                made.append(panel | line | {"x": n, "y": plot.exact(height)})
    return made
