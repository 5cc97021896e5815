"""Write a run as one HTML page that needs no network, with Markdown and plots next to it."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from flashattn.report import plot
from flashattn.report.answer import ANSWER, FILTERS, cards, explorer
from flashattn.report.origin import circumstances, footnotes, reasons, roofs
from flashattn.report.runs import Run
from flashattn.report.studies import STUDIES
from flashattn.report.table import document

PAGE = Path(__file__).with_name("page")  # template, style and script
FIRST = 4  # findings of a study that are shown unfolded


def write(run: Run, folder: Path) -> Path:
    """Write ``report.md``, all pictures as SVG, and ``index.html``; return the path of the page.

    Raises:
        ValueError: the run has no row of any study.
    """
    studies = [study for study in STUDIES if run.study(study.NAME)]
    if not studies:
        raise ValueError("run: wanted rows of at least one study, got none")
    folder.mkdir(parents=True, exist_ok=True)
    picture, choices = explorer(run) or (None, {})
    drawn = {ANSWER: {ANSWER: picture} if picture else {}}
    drawn |= {study.NAME: study.pictures(run) for study in studies}
    for name, made in [pair for own in drawn.values() for pair in own.items()]:
        plot.save(made, folder / f"{name}.svg")
    names = {study: [f"{name}.svg" for name in own] for study, own in drawn.items()}
    (folder / "report.md").write_text(document(run, names), encoding="utf-8")
    templates = Environment(
        loader=FileSystemLoader(PAGE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = templates.get_template("page.html").render(
        run=run,
        cards=cards(run),
        answer=picture,
        choices=choices,
        chosen={param["name"]: param["value"] for param in (picture or {}).get("params", ())},
        filters=FILTERS | {"peer": "Compared with"},
        studies=studies,
        pictures={study: [*own.values()] for study, own in drawn.items()},
        packed=packed,
        library=plot.library(),
        first=FIRST,
        setup=json.dumps(plot.SETUP),
        circumstances=circumstances,
        roofs=roofs,
        footnotes=footnotes,
        reasons=reasons,
    )
    page = folder / "index.html"
    page.write_text(text, encoding="utf-8")
    return page


def packed(made: plot.Picture) -> str:
    """Return a picture as JSON that is safe inside HTML; its data are CSV, half the length."""
    records = made["data"]["values"]
    text = io.StringIO()
    fields = list(dict.fromkeys(name for record in records for name in record))
    lines = csv.DictWriter(text, fields, lineterminator="\n")
    lines.writeheader()
    lines.writerows({k: v for k, v in record.items() if v is not False} for record in records)
    data = {"name": "records", "values": text.getvalue(), "format": {"type": "csv"}}
    said = json.dumps(made | {"data": data}, separators=(",", ":"), ensure_ascii=False)
    return said.replace("<", "\\u003c")
