"""A table for the README or the docs, made from the rows of one study, and its cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import geometric_mean
from typing import Any

from flashattn.report.rows import KERNELS, gain, groups, ok, quickest, speed, steady
from flashattn.report.runs import Row, Run
from flashattn.report.studies import accuracy
from flashattn.report.study import Cells, Table, shared
from flashattn.report.units import Unit, gib, percent, spread, tera

PASSES = ("forward", "backward")


@dataclass(frozen=True, kw_only=True)
class Excerpt:
    """A table of some rows of a study."""

    study: str
    where: Mapping[str, Any]  # required facts of a row: a value, a tuple of values, or a predicate
    lines: Mapping[str, str]  # facts that identify a line, by column
    cells: Mapping[str, Cells]  # the other columns
    note: str  # what the numbers are, and their unit

    def table(self, run: Run) -> Table:
        """Return the table, without lines and columns that have no measurement."""
        rows = [row for row in ok(run.study(self.study)) if _matches(row, self.where)]
        columns = shared(**self.lines) | dict(self.cells)
        made = Table.of(self.note, rows, columns, groups(rows, *self.lines.values()).values())
        lines = [line for line in made.lines if any(line[len(self.lines) :])]
        kept = [i for i in range(len(columns)) if any(line[i] for line in lines)]
        header = [made.header[i] for i in kept]
        return replace(made, header=header, lines=[[line[i] for i in kept] for line in lines])


def _matches(row: Row, where: Mapping[str, Any]) -> bool:
    for fact, wanted in where.items():
        value = row.get(fact)
        if callable(wanted):
            if not wanted(value):
                return False
        elif value not in (wanted if isinstance(wanted, tuple) else (wanted,)):
            return False
    return True


def _fastest(rows: list[Row], **where: Any) -> Row | None:
    """Return the fastest row that has these facts."""
    return quickest(row for row in rows if _matches(row, where))


def fastest(say: Callable[[Row], str], **where: Any) -> Cells:
    """Return a cell that applies ``say`` to the fastest row that has these facts."""

    def cell(rows: list[Row]) -> str:
        row = _fastest(rows, **where)
        return "" if row is None else say(row)

    return cell


def number(unit: Unit, fact: str = "seconds", **where: Any) -> Cells:
    """Return a cell with one fact of the fastest row that has these facts."""
    return fastest(
        lambda row: unit(row.get(fact)) + (_unsteady(row) if fact == "seconds" else ""), **where
    )


def rate(**where: Any) -> Cells:
    """Return a cell with the TFLOP/s of the fastest row that has these facts."""
    return fastest(lambda row: tera(speed(row)) + _unsteady(row), **where)


def _unsteady(row: Row) -> str:
    return "" if steady(row) else " ~"


def ratio(slow: Mapping[str, Any], fast: Mapping[str, Any]) -> Cells:
    """Return a cell with the speed of one row over that of another."""

    def cell(rows: list[Row]) -> str:
        found = gain(_fastest(rows, **slow), _fastest(rows, **fast))
        return f"{found:.2f}" if found else ""

    return cell


def _over(peers: str | tuple[str, ...], rows: list[Row]) -> dict[str, float]:
    """Return our speed over that of the fastest of the peers, by problem."""
    return {
        problem: found
        for (problem,), own in groups(rows, "problem").items()
        if (found := gain(_fastest(own, impl=peers), _fastest(own, impl=KERNELS)))
    }


def mean_ratio(peer: str, **where: Any) -> Cells:
    """Return a cell with our speed over a peer's: its mean and range over the problems."""

    def cell(rows: list[Row]) -> str:
        found = _over(peer, [row for row in rows if _matches(row, where)]).values()
        if not found:
            return ""
        return f"{geometric_mean(found):.2f} ({min(found):.2f} to {max(found):.2f})"

    return cell


def worst(peers: tuple[str, ...], rows: list[Row]) -> str:
    """Return our lowest speed over the fastest peer's and its problem, or "" if none is below 1."""
    ratios = _over(peers, rows)
    problem = min(ratios, key=ratios.__getitem__, default="")
    return f"{ratios[problem]:.2f} ({problem})" if ratios and ratios[problem] < 1 else ""


def both_passes(peers: Mapping[str, str], one: Callable[..., Cells]) -> dict[str, Cells]:
    """Return, for each pass, a column for our kernels, one for each peer, and the ratio."""
    made: dict[str, Cells] = {}
    for name in PASSES:
        made[f"{name}: ours"] = one(impl=KERNELS, **{"pass": name})
        made |= {f"{name}: {x}": one(impl=y, **{"pass": name}) for x, y in peers.items()}
        slow = {"impl": tuple(peers.values()), "pass": name}
        made[f"{name}: ratio"] = ratio(slow, {"impl": KERNELS, "pass": name})
    return made


def category(name: str, rows: list[Row]) -> str:
    """Return the share of a step's device time that kernels of one category take."""
    parts = rows[-1]["categories"]
    return percent(parts[name] / sum(parts.values())) if parts.get(name) else ""


def unwarmed(rows: list[Row]) -> str:
    """Return mean ± standard deviation of the steps without a warm-up, in ms."""
    row = next((row for row in rows if row["warm_steps"] == 0), None)
    return "" if row is None else spread(row)


def held(names: tuple[str, ...], rows: list[Row]) -> str:
    """Return the measured size of these parts of the memory, in GiB."""
    return gib(sum(rows[-1]["measured"].get(name, 0) for name in names))


def over_budget(rows: list[Row]) -> str:
    """Return how many errors exceed their budget, out of how many."""
    found = accuracy.judged(rows)
    return f"{sum(accuracy.share(row) > 1 for row in found)} of {len(found)}" if found else ""


def kept_clauses(rows: list[Row]) -> str:
    """Return how many clauses of the contract are kept, out of how many."""
    return ", ".join(f"{count} of {of}" for count, of in accuracy.kept(rows).values())


def broken_clauses(rows: list[Row]) -> str:
    """Return the clauses that are broken: neither kept nor refused with an error."""
    return ", ".join(name for names in accuracy.broken(rows).values() for name in names)
