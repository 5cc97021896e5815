"""Run the kernels under every available sanitizer, print a table and save the findings.

    python -m flashattn.sanitize                  # all tools, some minutes on a GPU
    python -m flashattn.sanitize --tool memcheck  # one tool
    python -m flashattn.sanitize --only d64       # cases with this in their names
    python -m flashattn.sanitize --impl hopper    # the kernels of another implementation

Exit status: 0 clean; 1 a finding in our kernels; 2 a wrong argument, or no GPU; 11 UNPROVEN: no
findings, but a tool is missing or did not finish.

racecheck does not follow the barriers of TMA copies and may report false hazards there; compare
with consan. Source: NVIDIA, "Compute Sanitizer".
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from flashattn.measure.device import accelerator, machine_info
from flashattn.sanitize.cases import cases

TOOLS = {
    "plain": "the cases run without errors",
    "memcheck": "out-of-bounds accesses to memory",
    "initcheck": "reads of uninitialized global memory",
    "racecheck": "data races in shared memory",
    "consan": "shared memory used while an asynchronous copy or product may still use it",
}
OWN_ENV = {"plain": {}, "consan": {"TRITON_INSTRUMENTATION_MODE": "consan"}}
# PyTorch's caching allocator would hide accesses out of bounds and uninitialized reads.
NVIDIA_ENV = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
FOUND = 33  # exit status of compute-sanitizer for findings
# Ignore failed CUDA API calls of libraries, and ptxas, which Triton starts.
OPTIONS = "--report-api-errors no --target-processes application-only --print-limit 1000"
# The start of a case, a finding, a summary, or an assertion of consan in the output.
PIECE = re.compile(
    r"""^(?:(?P<edge>case|done)\ (?P<name>.*)
    |=========\s?(?P<what>(?:Invalid|Uninitialized|Misaligned|Program\ hit|Barrier\ error|Leaked
        |Internal|(?:Error|Warning):\ (?:Race\ reported|Potential\ \w+\ hazard)).*)
    |=========\s?(?:ERROR|RACECHECK|INITCHECK)\ SUMMARY:\ (?P<total>\d+)\ \w+\b(?!\ were)
    |.*(?:Assertion\ `(?P<asserted>.*?)`\ failed|(?P<deadlock>Deadlock\ detected\ .*)))""",
    re.VERBOSE | re.MULTILINE,
)
OURS = re.compile(r"\bflashattn_\w+")
NAMED = re.compile(r"\bat (?:0x[0-9a-f]+ in )?(?:void )?([A-Za-z_][\w:]*)")
# Thread indices and addresses, removed so that equal findings compare equal.
PARTICULARS = re.compile(r"\+0x[0-9a-f]+|0x[0-9a-f]+|\(\d+,\d+,\d+\)|\[\d+ hazards\]")


def judge(tool: str, wanted: Iterable[str], output: str, status: int) -> dict[str, Any]:
    """Evaluate the output and the exit status of a tool.

    Returns:
        ``verdict``: "clean"; "findings" in our kernels or in unnamed ones; "others'" if all are in
        other kernels; "failed" if not all wanted cases finished, with the error in ``said``.
        ``cases``: number of finished cases. ``total``: count of the tool's summary, or None.
        ``findings``: the distinct findings.
    """
    found: Counter[str] = Counter()
    done, case, total, ours = set[str](), "between cases", None, False
    pieces = list(PIECE.finditer(output))
    ends = [piece.start() for piece in pieces[1:]] + [len(output)]
    for piece, end in zip(pieces, ends, strict=False):
        if piece["edge"] == "case":
            case = piece["name"]
        elif piece["edge"] == "done":
            done, case = done | {piece["name"]}, "between cases"
        elif piece["total"]:
            total = int(piece["total"])
        else:
            first, *rest = output[piece.start() : end].splitlines()
            block = "\n".join([first, *(line for line in rest if line.startswith("====="))])
            our, other = OURS.search(block), NAMED.search(block)
            ours |= our is not None or other is None
            kernel = our[0] if our else other[1] if other else "an unnamed kernel"
            what = PARTICULARS.sub("", piece["what"] or piece["asserted"] or piece["deadlock"])
            found[f"{' '.join(what.split())} in {kernel}, {case}"] += 1
    findings = [f"{finding}, printed {count} times" for finding, count in found.items()]
    verdict, said = "others'" if found else "clean", None
    ended = done == set(wanted) and status in (0, FOUND) and (tool in OWN_ENV or total is not None)
    if ours or (total and not found):
        verdict = "findings"
    elif not ended:
        lines = [line.removeprefix("=========").strip() for line in output.splitlines()]
        told = [line for line in lines if line and "SUMMARY" not in line] or ["without a word"]
        verdict, said = "failed", f"exit status {status}: {told[-1]}"
    facts = {"cases": len(done), "total": total, "findings": findings}
    return {"verdict": verdict, "said": said} | facts


def ask(tool: str, text: str, limit: float, impl: str) -> dict[str, Any]:
    """Run a tool on the cases of ``impl`` with ``text`` in their names, at most ``limit`` s."""
    command = [sys.executable, "-m", "flashattn.sanitize.cases", text, impl]
    if tool not in OWN_ENV:
        options = f"--tool {tool} {OPTIONS} --error-exitcode {FOUND}".split()
        command = ["compute-sanitizer", *options, *command]
    start = time.perf_counter()
    row = {"tool": tool, "checks": TOOLS[tool], "cases": 0, "total": None, "findings": []}
    try:
        done = subprocess.run(  # noqa: S603 - the programs are named above
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # keeps the order of both streams
            text=True,
            errors="replace",
            env=os.environ | OWN_ENV.get(tool, NVIDIA_ENV),
            timeout=limit,
            check=False,
        )
        row |= judge(tool, cases(text, impl), done.stdout, done.returncode)
    except FileNotFoundError:
        said = f"{command[0]} is not on the PATH; it comes with the CUDA toolkit"
        row |= {"verdict": "missing", "said": said}
    except subprocess.TimeoutExpired:
        row |= {"verdict": "failed", "said": f"it took longer than {limit:.0f} s"}
    return row | {"seconds": time.perf_counter() - start}


def main(arguments: list[str] | None = None) -> int:
    """Run the tools; return the exit status.

    Args:
        arguments: command line (default: ``sys.argv``).
    """
    parser = argparse.ArgumentParser(
        prog="python -m flashattn.sanitize",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--tool", action="append", choices=TOOLS, help="(default: all; repeat it)")
    add("--only", default="", metavar="TEXT", help="cases with this in their names")
    add("--impl", default="triton", choices=("triton", "hopper"), help="(default: %(default)s)")
    add("--limit", type=float, default=300.0, metavar="SECONDS", help="for one tool")
    default = ".benchmarks/{gpu}/sanitizers-{impl}.json"
    add("--output", default=default, metavar="FILE", help="JSON (default: %(default)s)")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("wanted a CUDA GPU, got none: sanitizers watch a GPU's memory")
    wanted = list(cases(options.only, options.impl))
    if not wanted:
        parser.error(f"--only: no case of {options.impl} has {options.only!r} in its name")
    rows = []
    print(f"{'tool':<10} {'verdict':<9} {'cases':>5} {'findings':>8} {'seconds':>7}  checks")
    for tool in [tool for tool in TOOLS if tool in (options.tool or TOOLS)]:
        row = ask(tool, options.only, options.limit, options.impl)
        line = "{tool:<10} {verdict:<9} {cases:>5} {total!s:>8} {seconds:>7.0f}  {checks}"
        said = [row["said"]] if row["said"] else row["findings"]
        print("\n".join([line.format(**row), *(f"{tool}: {each}" for each in said)]), flush=True)
        rows.append(row)
    device = torch.device("cuda")
    path = Path(options.output.format(gpu=accelerator(device), impl=options.impl))
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {"machine": machine_info(device), "impl": options.impl, "only": options.only}
    facts |= {"cases": wanted, "tools": rows}
    path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(f"Written: {path}")
    verdicts = {row["verdict"] for row in rows}
    return 1 if "findings" in verdicts else 11 if verdicts & {"failed", "missing"} else 0


if __name__ == "__main__":
    sys.exit(main())
