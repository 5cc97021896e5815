"""Fill the tables of README and docs from the kept runs: ``python -m flashattn.report docs``.

A table is between ``<!-- table: NAME -->`` and ``<!-- end -->``, where NAME is a key of
``excerpts.EXCERPTS``. Text outside such tables contains no measured number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from flashattn.report.excerpts import EXCERPTS
from flashattn.report.runs import Run
from flashattn.report.table import markdown

TABLE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
VERSIONS = ("torch", "triton")
UNTIMED = ("memory", "profile")  # studies whose tables have bytes, and shares of the device's time


def pages(root: Path) -> list[Path]:
    """Return the Markdown files of a checkout that may hold tables."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def render(text: str, run: Run) -> str:
    """Return a page with its tables regenerated.

    Raises:
        ValueError: the page asks for a table that does not exist.
    """

    def filled(found: re.Match[str]) -> str:
        begin, name, end = found.groups()
        if name not in EXCERPTS:
            raise ValueError(f"table: wanted one of {', '.join(EXCERPTS)}, got {name}")
        table = EXCERPTS[name].table(run)
        command = f"pytest benchmarks/bench_{EXCERPTS[name].study}.py"
        made = f"*No kept run has this table yet; `{command}` measures it.*"
        if table.lines:
            notes = "".join(note.replace("*", r"\*") + ".\n\n" for note in table.notes)
            timed = EXCERPTS[name].study not in UNTIMED
            late = " Samples began before the host had queued the step." * (
                timed and _all_late(table.rows)
            )
            made = (
                f"{markdown(table)}\n\n{notes}*{table.caption}{late} {_origin(run, table.rows)}.*"
            )
        return f"{begin}\n{made} {end}"

    return TABLE.sub(filled, text)


def _all_late(rows: list[dict[str, object]]) -> bool:
    """Return whether every sample of every row was late, so that the host's gaps count."""
    return bool(rows) and all(row.get("late") and row["late"] == row["rounds"] for row in rows)


def _origin(run: Run, rows: Iterable[dict[str, object]]) -> str:
    """Return accelerator, versions and dates of the runs that measured rows."""
    runs = [origin for origin, _ in run.origins(rows)]
    machine = run.machine
    facts = [f"{machine.get('gpu') or machine.get('cpu') or run.accelerator}"]
    for name in VERSIONS:
        found = sorted({str(own.machine[name]) for own in runs if own.machine.get(name)})
        facts += [f"{name} {' and '.join(found)}"] if found else []
    dates = sorted({own.made[:10] for own in runs if own.made})
    return ", ".join([*facts, " to ".join(sorted({dates[0], dates[-1]}))] if dates else facts)


def update(root: Path, run: Run, *, check: bool) -> list[Path]:
    """Fill the tables of a checkout's pages, unless ``check``; return the pages that change."""
    changed = []
    for path in pages(root):
        text = path.read_text(encoding="utf-8")
        if (made := render(text, run)) != text:
            changed.append(path)
            if not check:
                path.write_text(made, encoding="utf-8")
    return changed
