"""``python -m flashattn.report [RUN]``: print a saved run as Markdown."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from flashattn.report.runs import latest, load
from flashattn.report.table import tables

FOLDER = Path(".benchmarks")


def main(arguments: list[str] | None = None) -> None:
    """Print the run that is named, or the one that was made last."""
    parser = argparse.ArgumentParser(prog="python -m flashattn.report", description=__doc__)
    parser.add_argument(
        "run", nargs="?", type=Path, help="a .json or .jsonl file (default: the last one kept)"
    )
    path = parser.parse_args(arguments).run or latest(FOLDER)
    if path is None:
        parser.error(f"no run is kept in {FOLDER}/; make one: pytest benchmarks")
    try:
        sys.stdout.write(tables(load(path)) + "\n")
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
