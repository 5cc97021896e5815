"""``python -m flashattn.report``: a page; ``compare A B``; ``show RUN``; one study, by name."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from flashattn.report.compare import report
from flashattn.report.html import write
from flashattn.report.plot import save
from flashattn.report.runs import Run, kept, load, merge
from flashattn.report.studies import STUDIES
from flashattn.report.table import tables

FOLDER = Path(".benchmarks")
RUN = "a run: a .json file that was kept, or a .jsonl file in the making"


def main(arguments: list[str] | None = None) -> None:
    """Do what the first word says: ``write`` unless it is another command.

    Args:
        arguments: of the command line; None means the process's own.
    """
    given = sys.argv[1:] if arguments is None else arguments
    parser = _parser()
    if not given or given[0] not in {*COMMANDS, *NAMED, "-h", "--help"}:
        given = ["write", *given]
    options = parser.parse_args(given)
    try:
        sys.stdout.write(COMMANDS.get(options.command, _study)(options) + "\n")
    except (OSError, ValueError) as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m flashattn.report", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    page = commands.add_parser("write", help="write the page, its Markdown and its pictures")
    _add_runs(page)
    for name, study in NAMED.items():
        _add_runs(commands.add_parser(name, help=f"print and draw one study: {study.question}"))
    show = commands.add_parser("show", help="print one run as Markdown")
    show.add_argument("run", type=Path, metavar="RUN", help=RUN)
    pair = commands.add_parser("compare", help="say what is faster, slower, same, new and gone")
    pair.add_argument("before", type=Path, metavar="A", help=RUN)
    pair.add_argument("after", type=Path, metavar="B", help=RUN)
    return parser


def _add_runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="*", type=Path, metavar="RUN", help=f"{RUN} (default: all kept)"
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of kept runs (%(default)s)")
    parser.add_argument("--accelerator", help="whose runs (default: of the newest run)")
    parser.add_argument("--output", type=Path, default=Path("report"), help="(%(default)s)")


def _runs(options: argparse.Namespace) -> list[Run]:
    return [load(path) for path in options.runs] or kept(options.folder, options.accelerator)


def _write(options: argparse.Namespace) -> str:
    """Write the page; return where it is and what it says."""
    runs = _runs(options)
    run = merge(runs)
    page = write(run, options.output)
    said = [f"{study.title}: {s}" for study in STUDIES for s in study.findings(run)]
    return "\n".join([f"Written: {page}, of {len(runs)} run{'s' * (len(runs) != 1)}", *said])


def _show(options: argparse.Namespace) -> str:
    return tables(load(options.run))


def _compare(options: argparse.Namespace) -> str:
    return report(load(options.before), load(options.after))


def _study(options: argparse.Namespace) -> str:
    """Draw one study; return its tables and where the pictures are."""
    study, run = NAMED[options.command], merge(_runs(options))
    if not run.study(study.name):
        raise ValueError(
            f"{study.name}: wanted rows of this study, got none; make some: "
            f"pytest benchmarks/bench_{study.name}.py"
        )
    options.output.mkdir(parents=True, exist_ok=True)
    said = [tables(run, [study])]
    for name, figure in study.pictures(run).items():
        save(figure, options.output / f"{name}.png")
        said.append(f"Drawn: {options.output / name}.png")
    return "\n".join(said)


NAMED = {study.name: study for study in STUDIES}
COMMANDS = {"write": _write, "show": _show, "compare": _compare}

if __name__ == "__main__":
    main()
