"""``python -m flashattn.report [RUN]``: print a saved run as Markdown, and draw it if asked."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from flashattn.report.plot import plot
from flashattn.report.runs import latest, load
from flashattn.report.table import tables

FOLDER = Path(".benchmarks")


def main(arguments: list[str] | None = None) -> None:
    """Print the run that is named, or the one that was made last."""
    parser = argparse.ArgumentParser(prog="python -m flashattn.report", description=__doc__)
    parser.add_argument(
        "run", nargs="?", type=Path, help="a .json or .jsonl file (default: the last one kept)"
    )
    parser.add_argument("--plot", type=Path, help="a picture to draw: .svg, .png or .pdf")
    options = parser.parse_args(arguments)
    path = options.run or latest(FOLDER)
    if path is None:
        parser.error(f"no run is kept in {FOLDER}/; make one: pytest benchmarks")
    try:
        run = load(path)
        sys.stdout.write(tables(run) + "\n")
        if options.plot:
            plot(run, options.plot)
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
