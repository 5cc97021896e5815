"""The interface of a study, which turns the rows of a run into tables, plots and findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from flashattn.report.plot import Picture
from flashattn.report.rows import by, over_peer, values
from flashattn.report.runs import Row, Run
from flashattn.report.units import NOTES, Unit, or_mark, times, word

Cell = Callable[[Row], str]
Cells = Callable[[list[Row]], str]  # of the rows of a line
RATIO: dict[str, Cells] = {"ours / best peer": lambda own: times(over_peer(own))}


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of text, the first column aligned left and the others right."""

    caption: str  # contents and units
    header: list[str]  # a name for each column
    lines: list[list[str]]  # a cell for each column
    rows: list[Row] = field(default_factory=list)  # the rows shown, for their origin

    @property
    def notes(self) -> list[str]:
        """The meanings of the marks in the cells."""
        cells = [cell for line in self.lines for cell in line if cell[:1].isdigit()]
        return [note for mark, note in NOTES.items() if any(mark in cell for cell in cells)]

    @classmethod
    def of(
        cls,
        caption: str,
        rows: list[Row],
        columns: Mapping[str, Callable[[Any], str]],
        things: Iterable[Any] | None = None,
    ) -> Table:
        """Return a table with a line for each row, or for each of the things made from the rows."""
        lines = [
            [cell(thing) for cell in columns.values()]
            for thing in (rows if things is None else things)
        ]
        return cls(caption=caption, header=[*columns], lines=lines, rows=rows)


def facts(*names: str, **named: str) -> dict[str, Cell]:
    """Return a column for each fact of a row, under the fact's name or a given one."""

    def cell(fact: str, row: Row) -> str:
        return word(fact, row.get(fact))

    found = {name: name for name in names} | named
    return {name: partial(cell, fact) for name, fact in found.items()}


def shared(*names: str, **named: str) -> dict[str, Cells]:
    """Return a column for each fact that the rows of a line share; see ``facts``."""

    def cell(of: Cell, rows: list[Row]) -> str:
        return of(rows[0])

    return {name: partial(cell, of) for name, of in facts(*names, **named).items()}


def sides(rows: Iterable[Row], axis: str, unit: Unit) -> dict[str, Cells]:
    """Return a column for each value of a fact, with the time of the row that has it."""

    def cell(value: Any, own: list[Row]) -> str:
        return or_mark(by(own, axis).get(value), unit)

    return {word(axis, value): partial(cell, value) for value in values(rows, axis)}


def filled(*tables: Table) -> list[Table]:
    """Return the tables that are not empty."""
    return [table for table in tables if table.lines]


class Study(Protocol):
    """A question and its answer from the rows of a run; each module of ``studies`` is one.

    The functions accept any rows, and return nothing if there are none.
    """

    NAME: str  # the ``study`` of its rows
    TITLE: str
    QUESTION: str

    def tables(self, run: Run) -> list[Table]:
        """Return the tables."""

    def pictures(self, run: Run) -> dict[str, Picture]:
        """Return the plots by file name."""

    def findings(self, run: Run) -> list[str]:
        """Return sentences computed from the rows."""
