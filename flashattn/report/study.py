"""The contract of a study: from the rows of a run to tables, pictures and sentences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

from flashattn.report.runs import Row, Run
from flashattn.report.units import notes, word

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Cell = Callable[[Row], str]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Cells as text, the first column aligned to the left and the others to the right.

    Args:
        caption: what it shows and in which units.
        header: a name for each column.
        lines: of cells, one for each name; a cell without anything to say is empty.
        rows: what it tells of, which say where they were measured.
        notes: what the marks in its cells mean.
    """

    caption: str
    header: list[str]
    lines: list[list[str]]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        caption: str,
        rows: list[Row],
        columns: Mapping[str, Cell],
        parts: Callable[[Row], list[Row]] = lambda row: [row],
    ) -> Table:
        """Return a table with a line for each row, its cells made by the columns.

        Args:
            caption: what it shows.
            rows: what it tells of.
            columns: how to make the cells, by the names of the columns.
            parts: of a row: what gets a line instead, where it is not the row as a whole.
        """
        lines = [[cell(part) for cell in columns.values()] for row in rows for part in parts(row)]
        return cls(caption=caption, header=[*columns], lines=lines, rows=rows, notes=notes(lines))


def facts(*names: str) -> dict[str, Cell]:
    """Return a column for each fact, in words."""
    return {name: partial(_fact, name) for name in names}


def _fact(name: str, row: Row) -> str:
    return word(name, row.get(name))


def filled(*tables: Table) -> list[Table]:
    """Return the tables that have a line."""
    return [table for table in tables if table.lines]


class Study(Protocol):
    """A question, and how the rows of a run answer it; each module of ``studies`` is one.

    All three functions work with whatever rows are there, and give nothing where there are none.
    """

    NAME: str  # which rows are its own
    TITLE: str
    QUESTION: str

    def tables(self, run: Run) -> list[Table]:
        """Return the tables."""

    def pictures(self, run: Run) -> dict[str, Figure]:
        """Draw; return the pictures by the names of their files."""

    def findings(self, run: Run) -> list[str]:
        """Return true sentences, each computed from the rows, left out where they are missing."""
