"""A run as one page that needs nothing beside it, and as Markdown and pictures next to it."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from flashattn.report.origin import circumstances, origins, reasons, roofs
from flashattn.report.plot import save
from flashattn.report.runs import Run
from flashattn.report.studies import STUDIES
from flashattn.report.study import Study, Table
from flashattn.report.table import document

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE = Path(__file__).with_name("page")  # what the page looks like and how it is sorted
LONG = 60  # characters from which a cell is broken into lines


def write(run: Run, folder: Path) -> Path:
    """Write ``index.html``, ``report.md`` and every picture as PNG and SVG; return the page.

    Args:
        run: what was measured, in one session or in several that were merged.
        folder: to write into; made if it is not there.

    Raises:
        ValueError: no study knows what to do with any row.
    """
    studies = [study for study in STUDIES if run.study(study.name)]
    if not studies:
        raise ValueError("run: wanted rows of at least one study, got none")
    folder.mkdir(parents=True, exist_ok=True)
    drawn: dict[str, dict[str, Figure]] = {}
    for study in studies:
        drawn[study.name] = study.pictures(run)
        for name, figure in drawn[study.name].items():
            for suffix in (".svg", ".png"):
                save(figure, folder / f"{name}{suffix}")
    names = {study: [f"{name}.png" for name in figures] for study, figures in drawn.items()}
    (folder / "report.md").write_text(document(run, names), encoding="utf-8")
    sections = [_section(study, run, _images(drawn[study.name], folder)) for study in studies]
    page = folder / "index.html"
    page.write_text(_page(run, studies, sections), encoding="utf-8")
    return page


def _page(run: Run, studies: Iterable[Study], sections: Iterable[str]) -> str:
    title = escape(f"{run.machine.get('gpu') or run.accelerator}: transformer and attention")
    style, script = (
        (PAGE / name).read_text(encoding="utf-8") for name in ("style.css", "script.js")
    )
    contents = "".join(
        f'<li><a href="#{escape(study.name)}">{escape(study.title)}</a></li>' for study in studies
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
</head>
<body>
<header><h1>{title}</h1><button id="theme" type="button">Light / dark</button></header>
<p>{escape(circumstances(run))}. {escape(roofs(run))}</p>
<nav aria-label="Studies"><ol>{contents}</ol></nav>
<main>
{"".join(sections)}</main>
<script>
{script}</script>
</body>
</html>
"""


def _section(study: Study, run: Run, images: str) -> str:
    """Return a study: its question, what it found, its pictures, its tables, what has no time."""
    tables = "".join(_table(table, run) for table in study.tables(run))
    untimed = _list(reasons(run.study(study.name)), "untimed")
    return (
        f'<section id="{escape(study.name)}">\n<h2>{escape(study.title)}</h2>\n'
        f'<p class="question">{escape(study.question)}</p>\n'
        f"{_list(study.findings(run), 'findings')}{images}{tables}"
        f"{'<h3>Not timed</h3>' if untimed else ''}{untimed}</section>\n"
    )


def _list(sentences: Iterable[str], kind: str) -> str:
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f'<ul class="{kind}">{items}</ul>\n' if items else ""


def _images(figures: Mapping[str, Figure], folder: Path) -> str:
    """Return the pictures, each within the page, on a light card whatever the theme."""
    made = []
    for name, figure in figures.items():
        data = b64encode((folder / f"{name}.svg").read_bytes()).decode()
        said = escape(figure.get_suptitle())
        made.append(
            f'<figure tabindex="0" aria-label="{said}">'
            f'<img alt="{said}" src="data:image/svg+xml;base64,{data}"></figure>\n'
        )
    return "".join(made)


def _table(table: Table, run: Run) -> str:
    """Return a table that scrolls in a box of its own, with where its numbers come from."""
    words = [_of_words(column) for column in zip(*table.lines, strict=True)]
    head = "".join(
        f'<th scope="col"{_kind(name, word)}><button type="button">{escape(name)}</button></th>'
        for name, word in zip(table.header, words, strict=True)
    )
    body = "".join(f"<tr>{''.join(map(_cell, line, words))}</tr>\n" for line in table.lines)
    said = escape(table.caption)
    origin = "".join(f'<p class="origin">{escape(s)}.</p>\n' for s in origins(run, table.rows))
    return (
        f'<h3>{said}</h3>\n<div class="wide" tabindex="0" role="region" aria-label="{said}">'
        f"<table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n{origin}"
    )


def _cell(text: str, word: bool) -> str:  # noqa: FBT001 - one of two looks
    return f"<td{_kind(text, word)}>{escape(text)}</td>"


def _of_words(column: Iterable[str]) -> bool:
    """Whether no cell of a column begins with a number, so that it reads from the left."""
    return not any(text[:1].isdigit() or text[:1] in ("-", ".") for text in column if text != "-")


def _kind(text: str, word: bool) -> str:  # noqa: FBT001 - one of two looks
    kinds = ["words"] * word + ["long"] * (len(text) > LONG)
    return f' class="{" ".join(kinds)}"' if kinds else ""
