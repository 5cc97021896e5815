"""``python -m flashattn.report``: a page of what was measured; ``compare A B``; ``show RUN``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from flashattn.report.compare import report
from flashattn.report.html import write
from flashattn.report.runs import kept, load, merge
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
    if not given or given[0] not in {*COMMANDS, "-h", "--help"}:
        given = ["write", *given]
    options = parser.parse_args(given)
    try:
        sys.stdout.write(COMMANDS[options.command](options) + "\n")
    except (OSError, ValueError) as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m flashattn.report", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    page = commands.add_parser("write", help="write the page, its Markdown and its pictures")
    page.add_argument(
        "runs", nargs="*", type=Path, metavar="RUN", help=f"{RUN} (default: all kept)"
    )
    page.add_argument("--folder", type=Path, default=FOLDER, help="of kept runs (%(default)s)")
    page.add_argument("--accelerator", help="whose runs (default: of the newest run)")
    page.add_argument("--output", type=Path, default=Path("report"), help="(%(default)s)")
    show = commands.add_parser("show", help="print one run as Markdown")
    show.add_argument("run", type=Path, metavar="RUN", help=RUN)
    pair = commands.add_parser("compare", help="say what is faster, slower, same, new and gone")
    pair.add_argument("before", type=Path, metavar="A", help=RUN)
    pair.add_argument("after", type=Path, metavar="B", help=RUN)
    return parser


def _write(options: argparse.Namespace) -> str:
    """Write the page; return where it is and what it says."""
    runs = [load(path) for path in options.runs] or kept(options.folder, options.accelerator)
    run = merge(runs)
    page = write(run, options.output)
    said = [f"{study.title}: {s}" for study in STUDIES for s in study.findings(run)]
    return "\n".join([f"Written: {page}, of {len(runs)} run{'s' * (len(runs) != 1)}", *said])


def _show(options: argparse.Namespace) -> str:
    return tables(load(options.run))


def _compare(options: argparse.Namespace) -> str:
    return report(load(options.before), load(options.after))


COMMANDS = {"write": _write, "show": _show, "compare": _compare}

if __name__ == "__main__":
    main()
