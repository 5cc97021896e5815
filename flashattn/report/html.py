"""A run as one self-contained HTML page, with Markdown and plots next to it."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from flashattn.report.origin import circumstances, footnotes, reasons, roofs
from flashattn.report.plot import save
from flashattn.report.runs import Run
from flashattn.report.studies import STUDIES
from flashattn.report.table import document

PAGE = Path(__file__).with_name("page")  # template, style and script


def write(run: Run, folder: Path) -> Path:
    """Write ``index.html``, ``report.md`` and every plot as PNG and SVG.

    Args:
        run: a run, or several merged.
        folder: where to write; created if missing.

    Returns:
        The path of ``index.html``.

    Raises:
        ValueError: the run has no row of any study.
    """
    studies = [study for study in STUDIES if run.study(study.NAME)]
    if not studies:
        raise ValueError("run: wanted rows of at least one study, got none")
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {study.NAME: study.pictures(run) for study in studies}
    images: dict[str, list[tuple[str, str]]] = {study: [] for study in drawn}  # titles and data
    for study, figures in drawn.items():
        for name, figure in figures.items():
            for suffix in (".svg", ".png"):
                save(figure, folder / f"{name}{suffix}")
            data = b64encode((folder / f"{name}.svg").read_bytes()).decode()
            images[study].append((figure.get_suptitle(), data))
    names = {study: [f"{name}.png" for name in figures] for study, figures in drawn.items()}
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
        studies=studies,
        images=images,
        circumstances=circumstances,
        roofs=roofs,
        footnotes=footnotes,
        reasons=reasons,
    )
    page = folder / "index.html"
    page.write_text(text, encoding="utf-8")
    return page
