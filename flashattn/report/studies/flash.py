"""FlashAttention against everything that a user would pick instead."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import TYPE_CHECKING

from flashattn.report.fit import exponent, in_words
from flashattn.report.plot import (
    curves,
    empty,
    heading,
    hollow,
    legend,
    lengths,
    logarithmic,
    panels,
)
from flashattn.report.rows import KERNELS, OURS, UNSTEADY, by, groups, known, steady, timed, values
from flashattn.report.runs import Row, Run
from flashattn.report.study import Study, Table
from flashattn.report.units import MARKS, TERA, ms, percent, tera, word

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "flash"
NAIVE = "naive"
OWN = (*KERNELS, "tiled")  # no peers
ONE_HEAD = "one_head"
FACTS = ("impl", "problem", "pass", "dtype", "head_dim", "seq_q", "flops")
SHAPE = ("dtype", "head_dim", "causal", "seq_q", "seq_kv")
WIDEST = 5  # panels beside one another that can still be read
MARK = "~"  # behind a median that is not steady
OTHER = "+"  # behind a ratio of times of two runs


def _rows(run: Run) -> list[Row]:
    return known(run.study(NAME), *FACTS)


def tables(run: Run) -> list[Table]:
    """Return a table for each protocol and pass: a line per problem, a column per impl.

    One head has many lengths: it has a table for each head dimension.
    """
    made = []
    for (protocol, name), rows in groups(_rows(run), "protocol", "pass").items():
        parts = groups(rows, "head_dim").values() if protocol == ONE_HEAD else [rows]
        made += [_table(run, protocol, name, part) for part in parts]
    return [table for table in made if table.lines]


def _table(run: Run, protocol: str | None, name: str, rows: list[Row]) -> Table:
    """Return one pass; an implementation without a single number is left to the reasons."""
    where = f"{name}, {_sizes(rows)}"
    where += f", D = {rows[0]['head_dim']}" if protocol == ONE_HEAD else ""
    impls = values(timed(rows), "impl")
    ratio = bool(set(KERNELS) & set(impls))
    unit = "ms" if protocol == ONE_HEAD else "TFLOP/s (share of its dtype's roof), no masked work"
    lines = []
    for (*_, problem), cases in groups(rows, *SHAPE, "problem").items() if impls else ():
        sides = by(cases, "impl")
        cells = [_cell(run, protocol, sides.get(impl)) for impl in impls]
        lines.append([problem, *cells, *([_ratio(cases)] if ratio else [])])
    other = any(line[-1].endswith(OTHER) for line in lines)
    marks = f"{_legend(rows)}; {OTHER} peer of another run" if other else _legend(rows)
    return Table(
        caption=f"{where}: {unit}{marks}",
        header=["problem", *impls, *(["ours / best peer"] if ratio else [])],
        lines=lines,
        rows=rows,
    )


def _legend(rows: list[Row]) -> str:
    """Return what the mark means, if a row has it."""
    if all(map(steady, timed(rows))):
        return ""
    return f"; {MARK} where the quartiles are further apart than {UNSTEADY:.0%} of the median"


def _sizes(rows: list[Row]) -> str:
    """Return what all problems share: one head, or how many tokens of which width."""
    rows = known(rows, "batch", "heads")
    batches = {row["batch"] for row in rows}
    if len(batches) == 1 and all(row["heads"] == 1 for row in rows):
        return "one head" if batches == {1} else f"one head, batch {batches.pop()}"
    tokens = {row["batch"] * row["seq_q"] for row in rows}
    hidden = {row["heads"] * row["head_dim"] for row in rows}
    if len(tokens) == len(hidden) == 1:
        return f"{tokens.pop()} tokens, hidden {hidden.pop()}"
    return "many heads"


def _cell(run: Run, protocol: str | None, row: Row | None) -> str:
    if row is None:
        return ""
    if row["status"] != "ok":
        return MARKS[row["status"]]
    if protocol == ONE_HEAD:
        return ms(row["seconds"]) + _mark(row)
    roof = run.roof(row, row["dtype"])
    return tera(_speed(row)) + (f" ({percent(_speed(row) / roof)})" if roof else "") + _mark(row)


def _mark(row: Row) -> str:
    return "" if steady(row) else f" {MARK}"


def _speed(row: Row) -> float:
    return float(row["flops"] / row["seconds"])


def best_peer(cases: list[Row]) -> tuple[Row, Row] | None:
    """Return the fastest peer's row and ours, of one problem and pass, if both have a time.

    Peers of our row's own run come first; where it has none, those of other runs count.
    """
    sides = by(timed(cases), "impl")
    peers = [row for impl, row in sides.items() if impl not in OWN]
    ours = _fastest(sides)
    if ours is None or not peers:
        return None
    beside = [row for row in peers if _beside(row, ours)]
    return min(beside or peers, key=lambda row: row["seconds"]), ours


def _fastest(sides: dict[str, Row]) -> Row | None:
    """Return ours: of our kernels that were timed, the faster."""
    timed_kernels = [sides[impl] for impl in KERNELS if impl in sides]
    return min(timed_kernels, key=lambda row: row["seconds"], default=None)


def _beside(a: Row, b: Row) -> bool:
    """Return whether two rows are of one run."""
    return a.get("run") is b.get("run")


def _ratio(cases: list[Row]) -> str:
    pair = best_peer(cases)
    if pair is None:
        return ""
    peer, ours = pair
    mark = "" if _beside(peer, ours) else f" {OTHER}"
    return f"{peer['seconds'] / ours['seconds']:.2f} x {peer['impl']}{mark}"


def findings(run: Run) -> list[str]:
    """Say for each protocol and pass who wins how often, the best speed, and how time grows."""
    said = []
    for (protocol, name), rows in groups(_rows(run), "protocol", "pass").items():
        where = f"{name}, {_sizes(rows)}"
        said += [*_wins(where, rows), *_best(run, where, rows)]
        if protocol == ONE_HEAD:
            said += [*_slower(where, rows), *_growth(where, rows)]
    return said


def _problems(rows: list[Row]) -> Iterable[list[Row]]:
    return groups(rows, *SHAPE, "problem").values()


def _wins(where: str, rows: list[Row]) -> list[str]:
    found = [pair for pair in map(best_peer, _problems(rows)) if pair]
    quiet = [pair for pair in found if all(map(steady, pair))]
    said = [f"{where}: {sentence}" for sentence in _won(found)]
    if len(quiet) < len(found):
        said += [f"{where}, where both medians are steady: {text}" for text in _won(quiet)]
    apart = sum(not _beside(*pair) for pair in found)
    if apart:
        said.append(f"{where}: in {apart} of {len(found)} problems the peer is of another run.")
    return said


def _won(pairs: list[tuple[Row, Row]]) -> list[str]:
    """Say of pairs of the best peer's row and ours how often ours is faster, and how much."""
    ratios = {ours["problem"]: peer["seconds"] / ours["seconds"] for peer, ours in pairs}
    if not ratios:
        return []
    won = sum(ratio > 1 for ratio in ratios.values())
    first = f"ours is the fastest in {won} of {len(ratios)} problems"
    return [f"{first}, and its speed over the best peer's is {in_words(ratios)}."]


def _slower(where: str, rows: list[Row]) -> list[str]:
    """Say how often, and up to which length, ours is slower than the definition."""
    found = (by(timed(cases), "impl") for cases in _problems(rows))
    both = [(ours, sides[NAIVE]) for sides in found if NAIVE in sides and (ours := _fastest(sides))]
    slower = [ours for ours, naive in both if ours["seconds"] > naive["seconds"]]
    if not both:
        return []
    end = f", the longest of them {_longest(slower)}" if slower else ""
    return [f"{where}: ours is slower than {NAIVE} in {len(slower)} of {len(both)} problems{end}."]


def _longest(rows: list[Row]) -> str:
    return str(max(rows, key=lambda row: row["seq_q"])["problem"])


def _best(run: Run, where: str, rows: list[Row]) -> list[str]:
    ours = [row for row in timed(rows) if row["impl"] in KERNELS]
    if not ours:
        return []
    best = max(ours, key=_speed)
    roof = run.roof(best, best["dtype"])
    share = (
        f", {percent(_speed(best) / roof)} of the {word('dtype', best['dtype'])} roof"
        if roof
        else ""
    )
    return [f"{where}: ours reaches {tera(_speed(best))} TFLOP/s ({best['problem']}){share}."]


def _growth(where: str, rows: list[Row]) -> list[str]:
    """Say how our steady time grows over the upper half of the lengths, past the launching."""
    found = {}
    ours = (row for row in timed(rows) if row["impl"] == OURS)
    for (dtype, head_dim), cases in groups(ours, "dtype", "head_dim").items():
        counts = values(cases, "seq_q")
        half = counts[len(counts) // 2]
        long = [row for row in cases if row["seq_q"] >= half and steady(row)]
        e = exponent((row["seq_q"], row["seconds"]) for row in long)
        if e is not None:
            found[f"{word('dtype', dtype)} D = {head_dim}"] = (e, values(long, "seq_q")[0])
    if not found:
        return []
    said = [f"N^{e:.2f} ({case}, from N = {start})" for case, (e, start) in found.items()]
    return [f"{where}: {OURS}'s time grows as {', '.join(said)}."]


def pictures(run: Run) -> dict[str, Figure]:
    """Draw speed against length where tokens are fixed, and time against length for one head."""
    drawn = {}
    facts = ("protocol", "dtype", "causal")
    for (protocol, dtype, causal), rows in groups(timed(_rows(run)), *facts).items():
        if len(values(rows, "seq_q")) > 1:
            mask = word("causal", causal)
            what = "time" if protocol == ONE_HEAD else "speed"
            title = f"{word('dtype', dtype)}, {mask}, {_sizes(rows)}: {what}"
            stem = "-".join(str(part).replace("_", "-") for part in (NAME, protocol, dtype, mask))
            drawn[stem.replace(", ", "-")] = _picture(run, title, rows, slow=protocol == ONE_HEAD)
    return drawn


def _picture(run: Run, title: str, rows: list[Row], *, slow: bool) -> Figure:
    """Draw a row of panels for each pass and a column for each of the largest head dimensions."""
    passes, dims = values(rows, "pass"), values(rows, "head_dim")[-WIDEST:]
    figure, axes = panels(title, len(passes), len(dims), height=2.9, sharex=True, sharey="row")
    for (i, name), (j, head_dim) in product(enumerate(passes), enumerate(dims)):
        axis = axes[i][j]
        cases = [row for row in rows if (row["pass"], row["head_dim"]) == (name, head_dim)]
        if cases:
            _panel(run, axis, cases, slow=slow)
        else:
            empty(axis)
        heading(axis, f"{'both' if '+' in name else name}, D = {head_dim}")
        axis.set_ylabel("" if j else "ms" if slow else "TFLOP/s")
        lengths(axis, values(rows, "seq_q"), "N" if i == len(passes) - 1 else "")
    if not slow:
        for line in axes:  # panels of a line share their scale: it is known when all are drawn
            line[0].set_ylim(bottom=0)
    legend(figure, axes)
    return figure


def _panel(run: Run, axis: Axes, cases: list[Row], *, slow: bool) -> None:
    def point(row: Row) -> tuple[float, float]:
        return row["seq_q"], row["seconds"] * 1e3 if slow else _speed(row) / TERA

    found = groups(cases, "impl").items()
    curves(axis, {impl: [point(row) for row in own] for (impl,), own in found})
    hollow(axis, [point(row) for row in cases if not steady(row)], "quartiles far apart")
    if slow:
        logarithmic(axis)
        return
    roof = run.roof(cases[0], cases[0]["dtype"])
    if roof:
        name = f"{word('dtype', cases[0]['dtype'])} product, measured"
        axis.axhline(roof / TERA, linestyle="--", color="0.4", linewidth=1, label=name)


STUDY = Study(
    name=NAME,
    title="FlashAttention",
    question="How fast is attention forward and backward, beside what else there is and the roof?",
    tables=tables,
    pictures=pictures,
    findings=findings,
)
