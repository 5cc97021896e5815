"""Count what the kernels do, without a GPU, and compare with what is expected in ``tests/counts``.

    python -m flashattn.counts              # both kinds
    python -m flashattn.counts interpreter  # products and bytes, a few seconds
    python -m flashattn.counts compiled     # kernels and tiles whose source has changed
    python -m flashattn.counts --all        # every kernel and tile, some minutes on two cores
    python -m flashattn.counts --rewrite    # expect what is counted now

A row of a compiled kernel has a hash of its source: the inlined output of Triton's front end,
options, versions, and how it is counted. While the hash is the same, the row stands and nothing is
compiled. So a refactoring that leaves all rows unchanged has changed no machine code.

Exit status: 0 as expected; 1 something differs, spills, does not compile or, on Hopper, may read
stale operands (``counts.stale``); 2 a wrong argument; 11 UNPROVEN, there are no expectations for
this version of Triton, or its interpreter fails here.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

from flashattn.counts.expect import SOURCE, Rows, differences, read, unchanged, write
from flashattn.gpus import INTERPRETER_FAILS

KINDS = ("interpreter", "compiled")
COMMAND = "python -m flashattn.counts"
FOLDER = Path(__file__).parents[2] / "tests" / "counts"
FAILED, UNPROVEN = 1, 11


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", nargs="?", choices=KINDS, help="what to count (default: both)")
    parser.add_argument(
        "--only", default="", type=_pattern, metavar="REGEX", help="cases whose names it matches"
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of what is expected")
    parser.add_argument("--all", action="store_true", help="compile what has not changed, too")
    parser.add_argument("--rewrite", action="store_true", help="expect what is counted now")
    return parser


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error


def _check(kind: str, options: argparse.Namespace) -> int:
    """Count one kind, compare or rewrite; return the exit status."""
    # Triton reads this on import, which is below. A process interprets or compiles, never both.
    os.environ["TRITON_INTERPRET"] = str(int(kind == "interpreter"))
    module = import_module(f"flashattn.counts.{kind}")
    asked = options.only.search
    wanted = set(filter(asked, module.names()))
    if not wanted:
        print(f"--only {options.only.pattern!r}: no case of {kind} has such a name")
        return 2
    if kind == "interpreter" and INTERPRETER_FAILS:
        print(f"UNPROVEN: {INTERPRETER_FAILS}")
        return UNPROVEN
    path = options.folder / module.FILE
    before = read(path) if path.exists() else {}
    known = {} if options.all else before
    got, complaints = module.collect(wanted, known)
    spared = len(unchanged(known, got))
    how = f"{len(got) - spared} counted, {spared} unchanged"
    for complaint in complaints:
        print(f"FAILED {complaint}")
    if options.rewrite:
        write(path, {case: row for case, row in before.items() if not asked(case)} | got)
        print(f"{len(got)} cases written to {path}: {how}")
        return FAILED if complaints else 0
    if not path.exists():
        print(f"UNPROVEN: there is no {path}; {COMMAND} --rewrite makes it of what is counted now")
        return FAILED if complaints else UNPROVEN
    expected = {case: row for case, row in before.items() if asked(case)}
    found = differences(expected, got)
    for sentence in found:
        print(f"FAILED {sentence}")
    if found:
        print(f"{len(found)} cases differ from {path}: {how}; if they should: {COMMAND} --rewrite")
    elif not complaints:
        print(f"{len(got)} cases are as {path} expects: {how}{_hint(expected, got)}")
    return FAILED if found or complaints else 0


def _hint(expected: Rows, got: Rows) -> str:
    """Return a hint: how many sources differ from the expected ones, though counts do not."""
    changed = sum(SOURCE in row for row in got.values()) - len(unchanged(expected, got))
    return f"; --rewrite would spare the next check {changed}" if changed else ""


def main(arguments: list[str] | None = None) -> int:
    """Count and compare; return the exit status, the lower one that is not 0 of both kinds.

    Args:
        arguments: the command line; None means that of the process.
    """
    given = sys.argv[1:] if arguments is None else arguments
    parser = _parser()
    options = parser.parse_args(given)
    if options.only.pattern and not options.kind:
        parser.error("--only: wanted a kind before it, for each names its cases in its own way")
    if options.kind:
        return _check(options.kind, options)
    # One process for each kind.
    command = [sys.executable, "-m", "flashattn.counts"]
    statuses = [subprocess.run([*command, kind, *given], check=False).returncode for kind in KINDS]  # noqa: S603
    return min(filter(None, statuses), default=0)


if __name__ == "__main__":
    sys.exit(main())
