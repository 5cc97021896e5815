"""A run as Markdown: for every study what it found, its tables, and what has no time, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flashattn.report.origin import circumstances, origins, reasons, roofs
from flashattn.report.runs import Run
from flashattn.report.studies import STUDIES
from flashattn.report.study import Study, Table

ESCAPED = str.maketrans({sign: f"\\{sign}" for sign in "|<*"})


def tables(run: Run, studies: Sequence[Study] = STUDIES) -> str:
    """Return the run as Markdown to read in a terminal.

    Args:
        run: what was measured.
        studies: that are asked.
    """
    parts = [f"{circumstances(run)}. {roofs(run)}"]
    for study in studies:
        for table in study.tables(run):
            parts += [f"### {study.title}: {table.caption}", markdown(table)]
        parts += [_bullets(study.findings(run)), _untimed(study, run)]
    return "\n\n".join(part for part in parts if part)


def document(run: Run, pictures: Mapping[str, Sequence[str]]) -> str:
    """Return the run as a Markdown page, each table with where it comes from.

    Args:
        run: what was measured.
        pictures: by study, the names of files beside the page.
    """
    parts = [f"# {run.machine.get('gpu') or run.accelerator}", circumstances(run), roofs(run)]
    for study in STUDIES:
        if not run.study(study.name):
            continue
        parts += [f"## {study.title}", study.question, _bullets(study.findings(run))]
        parts += [f"![{study.title}]({name})" for name in pictures.get(study.name, ())]
        for table in study.tables(run):
            parts += [f"### {table.caption}", markdown(table)]
            parts += [f"*{line.translate(ESCAPED)}.*" for line in origins(run, table.rows)]
        parts.append(_untimed(study, run))
    return "\n\n".join(part for part in parts if part) + "\n"


def markdown(table: Table) -> str:
    """Align the columns: the first to the left, the others to the right."""
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
    found = reasons(run.study(study.name))
    return f"Not timed:\n\n{_bullets(found)}" if found else ""
