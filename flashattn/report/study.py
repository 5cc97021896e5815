"""The contract of a study: from the rows of a run to tables, pictures and sentences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashattn.report.runs import Row, Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Table:
    """Cells as text, the first column's to the left and the others' to the right.

    Args:
        caption: what it shows and in which units.
        header: a name for each column.
        lines: of cells, one for each name; a cell without anything to say is empty.
        rows: what it tells of, which say where they were measured.
    """

    caption: str
    header: list[str]
    lines: list[list[str]]
    rows: list[Row]


@dataclass(frozen=True, kw_only=True)
class Study:
    """A question, and how the rows of a run answer it.

    All three work with whatever rows are there, and give nothing where there are none.

    Args:
        name: which rows are its own.
        title: of its section.
        question: that it answers.
        tables: of its rows.
        pictures: by the name of their file.
        findings: true sentences, each computed from the rows and left out where they are missing.
    """

    name: str
    title: str
    question: str
    tables: Callable[[Run], list[Table]]
    pictures: Callable[[Run], dict[str, Figure]]
    findings: Callable[[Run], list[str]]
