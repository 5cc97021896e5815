"""The interface of a study: from the rows of a run to tables, plots and findings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from flashattn.report.plot import Picture
from flashattn.report.runs import Row, Run
from flashattn.report.units import notes, word

Cell = Callable[[Row], str]


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
        return notes(self.lines)

    @classmethod
    def of(
        cls,
        caption: str,
        rows: list[Row],
        columns: Mapping[str, Cell],
        parts: Callable[[Row], list[Row]] = lambda row: [row],
    ) -> Table:
        """Return a table with a line for each row, or for each of its ``parts``."""
        lines = [[cell(part) for cell in columns.values()] for row in rows for part in parts(row)]
        return cls(caption=caption, header=[*columns], lines=lines, rows=rows)


def facts(*names: str) -> dict[str, Cell]:
    """Return a column for each fact."""
    return {name: partial(_fact, name) for name in names}


def _fact(name: str, row: Row) -> str:
    return word(name, row.get(name))


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
