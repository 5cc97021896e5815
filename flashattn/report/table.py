"""A run as terminal text and as Markdown: findings, tables, and reasons for missing times."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table as Grid

from flashattn.report.answer import ANSWER, cards
from flashattn.report.origin import circumstances, footnotes, reasons, roofs
from flashattn.report.runs import Run
from flashattn.report.studies import STUDIES
from flashattn.report.study import Study, Table

ESCAPED = str.maketrans({sign: f"\\{sign}" for sign in "|<*"})
UNBROKEN = 10_000  # width in columns if the output is not a terminal


def tables(run: Run, studies: Sequence[Study] = STUDIES) -> str:
    """Return the run as text, as wide as the terminal."""
    parts = [f"{circumstances(run)}. {roofs(run)}"]
    for study in studies:
        for table in study.tables(run):
            parts += [f"{study.TITLE}: {table.caption}\n{_grid(table)}", *table.notes]
        parts += [_bullets(study.findings(run)), _untimed(study, run)]
    return "\n\n".join(part for part in parts if part)


def _grid(table: Table) -> str:
    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(table.header):
        grid.add_column(name, justify="right" if i else "left", overflow="fold")
    for line in table.lines:
        grid.add_row(*line)
    width = shutil.get_terminal_size((UNBROKEN, 0)).columns
    console = Console(width=width, markup=False, emoji=False, highlight=False, no_color=True)
    with console.capture() as drawn:
        console.print(grid)
    return "\n".join(map(str.rstrip, drawn.get().splitlines())).strip("\n")


def document(run: Run, pictures: Mapping[str, Sequence[str]]) -> str:
    """Return the run as a Markdown page, with the origin of each table.

    ``pictures`` has file names by study, and under ``ANSWER`` those at the top of the page.
    """
    parts = [f"# {run.machine.get('gpu') or run.accelerator}"]
    parts.append(_bullets([f"{c.title}: {c.value}. {c.text} ({c.origin})" for c in cards(run)]))
    parts += [f"![Speed of attention]({name})" for name in pictures.get(ANSWER, ())]
    parts += [circumstances(run), roofs(run)]
    for study in STUDIES:
        if not run.study(study.NAME):
            continue
        parts += [f"## {study.TITLE}", study.QUESTION, _bullets(study.findings(run))]
        parts += [f"![{study.TITLE}]({name})" for name in pictures.get(study.NAME, ())]
        for table in study.tables(run):
            parts += [f"### {table.caption}", markdown(table)]
            below = [*table.notes, *footnotes(run, table)]
            parts += [f"*{line.translate(ESCAPED)}.*" for line in below]
        parts.append(_untimed(study, run))
    return "\n\n".join(part for part in parts if part) + "\n"


def markdown(table: Table) -> str:
    """Return a Markdown table, the first column aligned left and the others right."""
    lines = [[cell.translate(ESCAPED) for cell in line] for line in (table.header, *table.lines)]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(
        "| " + " | ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) + " |"
        for line in (lines[0], rule, *lines[1:])
    )


def _bullets(sentences: Sequence[str]) -> str:
    return "\n".join(f"* {sentence.translate(ESCAPED)}" for sentence in sentences)


def _untimed(study: Study, run: Run) -> str:
    found = reasons(run.study(study.NAME))
    return f"Not timed:\n\n{_bullets(found)}" if found else ""
