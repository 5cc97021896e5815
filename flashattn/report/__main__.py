"""Write reports of benchmark runs: a page, one study, a comparison, or the tables of the docs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from flashattn.report.answer import cards
from flashattn.report.compare import report
from flashattn.report.docs import update
from flashattn.report.html import write
from flashattn.report.keep import keep
from flashattn.report.plot import save
from flashattn.report.runs import Run, kept, load, merge
from flashattn.report.studies import STUDIES
from flashattn.report.table import tables

RUN = "a run: a saved .json file, or an unfinished .jsonl file"
NAMED = {study.NAME: study for study in STUDIES}


def main(arguments: list[str] | None = None) -> None:
    """Run the command named by the first argument; the default is ``write``."""
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m flashattn.report", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    helps = {"write": "write the page, its Markdown and its plots"}
    helps |= {name: f"print and plot one study: {study.QUESTION}" for name, study in NAMED.items()}
    for name, text in helps.items():
        made = commands.add_parser(name, help=text)
        made.add_argument("runs", nargs="*", type=Path, metavar="RUN", help=f"{RUN} (default: all)")
        made.add_argument("--folder", type=Path, default=".benchmarks", help="(%(default)s)")
        made.add_argument("--accelerator", help="(default: that of the newest run)")
        made.add_argument("--output", type=Path, default="report", help="(%(default)s)")
        made.set_defaults(run=_study if name in NAMED else _write)
    show = commands.add_parser("show", help="print the tables and findings of one run")
    show.add_argument("path", type=Path, metavar="RUN", help=RUN)
    show.set_defaults(run=lambda options: tables(load(options.path)))
    pair = commands.add_parser("compare", help="list faster, slower, same, new and gone cases")
    pair.add_argument("before", type=Path, metavar="A", help=RUN)
    pair.add_argument("after", type=Path, metavar="B", help=RUN)
    pair.set_defaults(run=lambda options: report(load(options.before), load(options.after)))
    kept_ = commands.add_parser("keep", help="write runs without samples, to be committed")
    kept_.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=f"{RUN}, of one commit")
    kept_.set_defaults(run=_keep)
    docs = commands.add_parser("docs", help="fill the tables of README and docs from kept runs")
    docs.add_argument("--check", action="store_true", help="change nothing; fail if one is stale")
    docs.add_argument("--root", type=Path, default=".", help="the checkout (%(default)s)")
    docs.add_argument("--accelerator", default="nvidia-h200", help="(%(default)s)")
    docs.set_defaults(run=_docs)
    if not given or given[0] not in {*commands.choices, "-h", "--help"}:
        given = ["write", *given]
    options = parser.parse_args(given)
    try:
        sys.stdout.write(options.run(options) + "\n")
    except (OSError, ValueError, ImportError) as error:
        parser.error(str(error))


def _runs(options: argparse.Namespace) -> list[Run]:
    return [load(path) for path in options.runs] or kept(options.folder, options.accelerator)


def _write(options: argparse.Namespace) -> str:
    """Write the page; return its path, its numbers and its findings."""
    runs = _runs(options)
    run = merge(runs)
    page = write(run, options.output)
    said = [f"{card.title}: {card.value}, {card.text} ({card.origin})" for card in cards(run)]
    said += [f"{study.TITLE}: {s}" for study in STUDIES for s in study.findings(run)]
    return "\n".join([f"Written: {page}, of {len(runs)} run{'s' * (len(runs) != 1)}", *said])


def _keep(options: argparse.Namespace) -> str:
    """Keep runs; return the paths written and the paths removed."""
    written, gone = keep(options.runs)
    told = {"Kept": written, "Removed, of another commit": gone}
    return "\n".join(f"{said}: {path}" for said, paths in told.items() for path in paths)


def _docs(options: argparse.Namespace) -> str:
    """Fill the tables of a checkout's pages; return the pages that changed."""
    run = merge(kept(options.root / ".benchmarks", options.accelerator))
    changed = [str(path) for path in update(options.root, run, check=options.check)]
    if changed and options.check:
        raise ValueError(f"stale: {', '.join(changed)}; run python -m flashattn.report docs")
    return f"Changed: {', '.join(changed) or 'nothing'}"


def _study(options: argparse.Namespace) -> str:
    """Plot one study; return its tables and the paths of its plots."""
    study, run = NAMED[options.command], merge(_runs(options))
    if not run.study(study.NAME):
        raise ValueError(
            f"{study.NAME}: wanted rows of this study, got none; make some: "
            f"pytest benchmarks/bench_{study.NAME}.py"
        )
    options.output.mkdir(parents=True, exist_ok=True)
    said = [tables(run, [study])]
    for name, figure in study.pictures(run).items():
        save(figure, options.output / f"{name}.png")
        said.append(f"Drawn: {options.output / name}.png")
    return "\n".join(said)


if __name__ == "__main__":
    main()
