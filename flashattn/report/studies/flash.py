"""FlashAttention compared with the alternatives."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from flashattn.report import plot
from flashattn.report.fit import exponent, in_words
from flashattn.report.rows import (
    KERNELS,
    NAIVE,
    OURS,
    by,
    groups,
    known,
    reached,
    share,
    speed,
    steady,
    timed,
    values,
)
from flashattn.report.runs import Row, Run
from flashattn.report.study import Table, filled
from flashattn.report.units import MARKS, TERA, ms, notes, of_roof, tera, word

NAME = "flash"
TITLE = "FlashAttention"
QUESTION = "How fast are forward and backward, compared with the alternatives and with the roof?"
OWN = (*KERNELS, "tiled")  # not peers
ONE_HEAD = "one_head"
FACTS = ("impl", "problem", "pass", "dtype", "head_dim", "seq_q", "flops")
SHAPE = ("dtype", "head_dim", "causal", "seq_q", "seq_kv", "problem")
WIDEST = 5  # columns of panels that stay readable


def _rows(run: Run) -> list[Row]:
    return known(run.study(NAME), *FACTS)


def tables(run: Run) -> list[Table]:
    """Return a table for each protocol and pass: a line per problem, a column per implementation.

    The protocol with one head has many lengths, so it gets a table for each head dimension.
    """
    made = []
    for (protocol, name), rows in groups(_rows(run), "protocol", "pass").items():
        parts = groups(rows, "head_dim").values() if protocol == ONE_HEAD else [rows]
        made += [_table(run, protocol, name, part) for part in parts if timed(part)]
    return filled(*made)


def _table(run: Run, protocol: str | None, name: str, rows: list[Row]) -> Table:
    where, unit = f"{name}, {_sizes(rows)}", "TFLOP/s (share of the dtype's roof), no masked work"
    if protocol == ONE_HEAD:
        where, unit = f"{where}, D = {rows[0]['head_dim']}", "ms"
    impls, lines = values(timed(rows), "impl"), []
    for (*_, problem), cases in groups(rows, *SHAPE).items():
        sides = by(cases, "impl")
        cells = [_cell(run, protocol, sides.get(impl)) for impl in impls]
        lines.append([problem, *cells, _ratio(cases)])
    header = ["problem", *impls, "ours / best peer"]
    caption = f"{where}: {unit}"
    return Table(caption=caption, header=header, lines=lines, rows=rows, notes=notes(lines))


def _sizes(rows: list[Row]) -> str:
    """Return what all problems share: one head, or the number of tokens and the hidden size."""
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
    unsteady = "" if steady(row) else " ~"
    if protocol == ONE_HEAD:
        return ms(row["seconds"]) + unsteady
    part = of_roof(share(run, row, row["dtype"]))
    return tera(speed(row)) + (f" ({part})" if part else "") + unsteady


def _best_pair(cases: list[Row]) -> tuple[Row, Row] | None:
    """Return the rows of the fastest peer and of ours for one problem, if both have a time.

    Peers measured in the same run as ours take precedence over others.
    """
    ours = _ours(cases)
    peers = [row for row in by(timed(cases), "impl").values() if row["impl"] not in OWN]
    if ours is None or not peers:
        return None
    beside = [row for row in peers if _beside(row, ours)]
    return min(beside or peers, key=_seconds), ours


def _ours(cases: list[Row]) -> Row | None:
    """Return the row of our fastest kernel."""
    return min((row for row in timed(cases) if row["impl"] in KERNELS), key=_seconds, default=None)


def _seconds(row: Row) -> float:
    return float(row["seconds"])


def _beside(a: Row, b: Row) -> bool:
    """Return whether two rows were measured in one run."""
    return a.get("run") is b.get("run")


def _ratio(cases: list[Row]) -> str:
    duel = _best_pair(cases)
    if duel is None:
        return ""
    peer, ours = duel
    mark = "" if _beside(peer, ours) else " +"
    return f"{peer['seconds'] / ours['seconds']:.2f} x {peer['impl']}{mark}"


def findings(run: Run) -> list[str]:
    """Return, for each protocol and pass, how often ours wins, its best speed and its growth."""
    said = []
    for (protocol, name), rows in groups(_rows(run), "protocol", "pass").items():
        found = [*_wins(rows), *_best(run, rows)]
        if protocol == ONE_HEAD:
            found += [*_slower(rows), *_growth(rows)]
        said += [f"{name}, {_sizes(rows)}: {sentence}." for sentence in found]
    return said


def _problems(rows: list[Row]) -> Iterable[list[Row]]:
    return groups(rows, *SHAPE).values()


def _wins(rows: list[Row]) -> list[str]:
    duels = [duel for duel in map(_best_pair, _problems(rows)) if duel]
    quiet = [duel for duel in duels if all(map(steady, duel))]
    said = [_wins_of(duels)] if duels else []
    if quiet and len(quiet) < len(duels):
        said.append(f"where both medians are steady, {_wins_of(quiet)}")
    apart = sum(not _beside(*duel) for duel in duels)
    if apart:
        said.append(f"in {apart} of {len(duels)} problems the peer was measured in another run")
    return said


def _wins_of(duels: list[tuple[Row, Row]]) -> str:
    """Return how often and by how much ours is faster than the best peer."""
    ratios = {ours["problem"]: peer["seconds"] / ours["seconds"] for peer, ours in duels}
    won = sum(ratio > 1 for ratio in ratios.values())
    first = f"ours is the fastest in {won} of {len(ratios)} problems"
    return f"{first}; its speed over the best peer's is {in_words(ratios)}"


def _slower(rows: list[Row]) -> list[str]:
    """Return how often, and up to which length, ours is slower than naive attention."""
    sides = [(by(timed(cases), "impl").get(NAIVE), _ours(cases)) for cases in _problems(rows)]
    both = [(naive, ours) for naive, ours in sides if naive and ours]
    slower = [ours for naive, ours in both if ours["seconds"] > naive["seconds"]]
    if not both:
        return []
    longest = f", at most {max(slower, key=lambda row: row['seq_q'])['problem']}" if slower else ""
    return [f"ours is slower than {NAIVE} in {len(slower)} of {len(both)} problems{longest}"]


def _best(run: Run, rows: list[Row]) -> list[str]:
    ours = [row for row in timed(rows) if row["impl"] in KERNELS]
    if not ours:
        return []
    best = max(ours, key=lambda row: speed(row) or 0)
    roof = reached(run, best, best["dtype"])
    return [f"ours reaches {tera(speed(best))} TFLOP/s ({best['problem']}){roof}"]


def _growth(rows: list[Row]) -> list[str]:
    """Return the growth of our time over the longer half of the lengths, beyond launch overhead."""
    said = []
    ours = (row for row in timed(rows) if row["impl"] == OURS)
    for (dtype, head_dim), cases in groups(ours, "dtype", "head_dim").items():
        counts = values(cases, "seq_q")
        half = counts[len(counts) // 2]
        long = [row for row in cases if row["seq_q"] >= half and steady(row)]
        e = exponent((row["seq_q"], row["seconds"]) for row in long)
        if e is not None:
            case = f"{word('dtype', dtype)} D = {head_dim}, from N = {values(long, 'seq_q')[0]}"
            said.append(f"N^{e:.2f} ({case})")
    return [f"{OURS}'s time grows as {', '.join(said)}"] if said else []


def pictures(run: Run) -> dict[str, plot.Figure]:
    """Plot speed over length for a fixed number of tokens, and time over length for one head."""
    drawn, facts = {}, ("protocol", "dtype", "causal")
    for (protocol, dtype, causal), rows in groups(timed(_rows(run)), *facts).items():
        if len(values(rows, "seq_q")) > 1:
            mask, slow = word("causal", causal), protocol == ONE_HEAD
            what = "time" if slow else "speed"
            title = f"{word('dtype', dtype)}, {mask}, {_sizes(rows)}: {what}"
            stem = f"{NAME}-{protocol}-{dtype}-{mask}".replace("_", "-").replace(", ", "-")
            drawn[stem] = _picture(run, title, rows, slow=slow)
    return drawn


def _picture(run: Run, title: str, rows: list[Row], *, slow: bool) -> plot.Figure:
    """Plot a row of panels for each pass, a column for each of the largest head dimensions."""
    passes, dims = values(rows, "pass"), values(rows, "head_dim")[-WIDEST:]
    figure, axes = plot.panels(title, len(passes), len(dims), height=2.9, sharex=True, sharey="row")
    for (i, name), (j, head_dim) in product(enumerate(passes), enumerate(dims)):
        axis = axes[i][j]
        cases = [row for row in rows if (row["pass"], row["head_dim"]) == (name, head_dim)]
        if cases:
            _panel(run, axis, cases, slow=slow)
        else:
            axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center", color="0.5")
        axis.set(title=f"{'both' if '+' in name else name}, D = {head_dim}")
        axis.set(ylabel="" if j else "ms" if slow else "TFLOP/s")
        plot.lengths(axis, values(rows, "seq_q"), "N" if i == len(passes) - 1 else "")
    for line in [] if slow else axes:  # a row shares its scale, so set it last
        line[0].set_ylim(bottom=0)
    plot.legend(figure, axes)
    return figure


def _panel(run: Run, axis: plot.Axes, cases: list[Row], *, slow: bool) -> None:
    def point(row: Row) -> tuple[float, float]:
        return row["seq_q"], row["seconds"] * 1e3 if slow else (speed(row) or 0) / TERA

    found = groups(cases, "impl").items()
    plot.curves(axis, {impl: [point(row) for row in own] for (impl,), own in found})
    plot.hollow(axis, [point(row) for row in cases if not steady(row)], "quartiles far apart")
    roof = run.roof(cases[0], cases[0]["dtype"])
    if slow:
        plot.logarithmic(axis)
    elif roof:
        name = f"{word('dtype', cases[0]['dtype'])} product, measured"
        axis.axhline(roof / TERA, linestyle="--", color="0.4", linewidth=1, label=name)
