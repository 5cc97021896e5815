"""Run every kernel under every sanitizer that is here, print a table, and write the findings.

    python -m flashattn.sanitize                  # all of them, some minutes on a GPU
    python -m flashattn.sanitize --tool memcheck  # one of them
    python -m flashattn.sanitize --only d64       # cases with this in their names
    python -m flashattn.sanitize --impl hopper    # another implementation's kernels

Exit status: 0 clean; 1 a finding in one of our kernels; 2 a wrong argument, or no GPU; 11 UNPROVEN:
nothing was found, but a tool is missing or did not get to its end.

Sources: NVIDIA, "Compute Sanitizer", for the tools; racecheck is known to raise false alarms where
tiles come by bulk copies, whose barriers it does not follow: hold a finding of it against consan.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from flashattn.measure.device import accelerator, machine_info
from flashattn.sanitize.cases import OURS, cases
from flashattn.sanitize.tools import FAILED, FINDINGS, MISSING, TOOLS, Answer, ask

COMMAND = "python -m flashattn.sanitize"
LIMIT = 300.0  # seconds for one tool
FOUND, UNPROVEN = 1, 11


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [tool.name for tool in TOOLS]
    parser.add_argument("--tool", action="append", choices=known, help="(default: all; repeat it)")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with this in their names")
    parser.add_argument(
        "--impl", default=OURS, choices=("triton", "hopper"), help="(default: %(default)s)"
    )
    parser.add_argument(
        "--limit", type=float, default=LIMIT, metavar="SECONDS", help="for one tool"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="JSON (default: sanitizers-IMPL.json beside the runs of this GPU in .benchmarks)",
    )
    return parser


def table(answers: Sequence[Answer]) -> str:
    """Return a line for each tool, and below them each finding and each reason."""
    lines = [f"{'tool':<10} {'verdict':<9} {'cases':>5} {'findings':>8} {'seconds':>7}  checks"]
    for answer in answers:
        count = "" if answer.total is None else str(answer.total)
        lines.append(
            f"{answer.tool:<10} {answer.verdict:<9} {answer.cases:>5} {count:>8} "
            f"{answer.seconds:>7.0f}  {answer.checks}"
        )
    for answer in answers:
        if answer.said:
            lines.append(f"{answer.tool} {answer.verdict}: {answer.said}")
        lines += [
            f"{answer.tool}: {found.what} in {found.kernel or 'an unnamed kernel'}, "
            f"{found.case or 'between cases'}, printed {found.count} times"
            for found in answer.findings
        ]
    return "\n".join(lines)


def status(answers: Sequence[Answer]) -> int:
    """Return the exit status."""
    verdicts = {answer.verdict for answer in answers}
    if FINDINGS in verdicts:
        return FOUND
    return UNPROVEN if verdicts & {FAILED, MISSING} else 0


def main(arguments: list[str] | None = None) -> int:
    """Ask the tools; return the exit status.

    Args:
        arguments: of the command line; None means the process's own.
    """
    parser = _parser()
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    if not torch.cuda.is_available():
        parser.error("wanted a CUDA GPU, got none: sanitizers watch a GPU's memory")
    wanted = list(cases(options.only, options.impl))
    if not wanted:
        parser.error(f"--only: no case of {options.impl} has {options.only!r} in its name")
    asked = [tool for tool in TOOLS if options.tool is None or tool.name in options.tool]
    answers = []
    for tool in asked:
        print(f"{tool.name}: {tool.checks} ...", flush=True)
        answers.append(ask(tool, options.only, options.limit, options.impl))
    print(table(answers))
    device = torch.device("cuda")
    path = options.output or Path(
        ".benchmarks", accelerator(device), f"sanitizers-{options.impl}.json"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    said = {"machine": machine_info(device), "impl": options.impl, "only": options.only}
    rows = {"cases": wanted, "tools": [answer.row() for answer in answers]}
    path.write_text(json.dumps(said | rows, indent=1) + "\n", encoding="utf-8")
    print(f"Written: {path}")
    return status(answers)


if __name__ == "__main__":
    sys.exit(main())
