"""Run the kernels under every available sanitizer; print a line for each, and the findings.

    python -m flashattn.sanitize                  # all tools, some minutes on a GPU
    python -m flashattn.sanitize --tool memcheck  # one tool
    python -m flashattn.sanitize --only d64       # cases with this text in their names
    python -m flashattn.sanitize --impl hopper    # the kernels of another implementation

Exit status: 0 clean; 1 a finding in our kernels; 2 a wrong argument, or no GPU; 11 UNPROVEN: no
findings, but a tool is missing or did not finish, or none ran.

racecheck does not follow the barriers of TMA copies and may report false hazards there; compare
with consan. initcheck does not see what TMA stores and calls it uninitialized, so Hopper's kernels
do not run under it; tests fill their outputs with NaN instead. Source: NVIDIA, "Compute Sanitizer".
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable

import torch

from flashattn.sanitize.cases import cases

TOOLS = {
    "memcheck": "out-of-bounds accesses to memory",
    "initcheck": "reads of uninitialized global memory",
    "racecheck": "data races in shared memory",
    "consan": "shared memory used while an asynchronous copy or product may still use it",
}
BLIND = "initcheck", "hopper"  # a tool, and an implementation whose stores it does not see
FOUND = 33  # exit status of compute-sanitizer for findings
# Ignore failed CUDA API calls of libraries, and ptxas, which Triton starts.
OPTIONS = "--report-api-errors no --target-processes application-only --print-limit 1000"
SUMMARY = r"=========\s?\w+ SUMMARY: (\d+) \w+\b(?! were)"
KIND = r"=========\s?(?:Invalid|Uninitialized|Misaligned|Program hit|Barrier error|Leaked|Internal"
KIND += r"|(?:Error|Warning): (?:Race reported|Potential \w+ hazard))"
# The start or end of a case, a finding with all of its lines, or what consan prints.
PIECE = re.compile(
    rf"^(?:case (.*)|done (.*)|({KIND}.*(?:\n(?!{KIND}|=.* SUMMARY)=====.*)*"
    r"|.*(?:Assertion `.*` failed|Deadlock detected).*))",
    re.MULTILINE,
)
OURS = re.compile(r"\b(flashattn_\w+)")
NAMED = re.compile(r"\bat (?:0x[0-9a-f]+ in )?(?:void )?([A-Za-z_][\w:]*)")
# Thread indices and addresses, removed so that equal findings compare equal.
PARTICULARS = re.compile(
    r"=========|\+?0x[0-9a-f]+|\(\d+,\d+,\d+\)|\[\d+ hazards\]|\w+: \[\d+,\d+,\d+\],?"
)


def judge(tool: str, wanted: Iterable[str], output: str, status: int) -> tuple[str, list[str]]:
    """Evaluate the output and the exit status of a tool.

    Returns:
        A verdict: "clean"; "findings" in our kernels or in unnamed ones; "others'" if all are in
        other kernels; "failed" if not all wanted cases finished. And the distinct findings, or the
        error.
    """
    found, done, case, ours = Counter[str](), set[str](), "between cases", False
    for began, ended, finding in PIECE.findall(output):
        if finding:
            our, other = OURS.search(finding), NAMED.search(finding)
            ours |= our is not None or other is None
            kernel = (our or other or ("", "an unnamed kernel"))[1]
            what = PARTICULARS.sub("", finding.partition("\n")[0])
            found[f"{' '.join(what.split())} in {kernel}, {case}"] += 1
        else:
            done, case = done | {ended}, began or "between cases"
    told = [f"{finding}, printed {count} times" for finding, count in found.items()]
    totals = re.findall(SUMMARY, output)
    unprinted = not found and any(map(int, totals))
    if ours or unprinted:
        return "findings", told or [f"{totals[0]} findings, which were not understood"]
    if status in (0, FOUND) and (totals or tool == "consan") and done - {""} == set(wanted):
        return ("others'" if found else "clean"), told
    lines = re.sub("=.* SUMMARY.*|=========", "", output).strip().splitlines()
    return "failed", [f"exit status {status}: {(lines or ['without a word'])[-1].strip()}"]


def ask(tool: str, text: str, limit: float, impl: str) -> tuple[str, list[str]]:
    """Run a tool on the cases of ``impl`` with ``text`` in their names, at most ``limit`` s."""
    command = [sys.executable, "-m", "flashattn.sanitize.cases", text, impl]
    settings = {"TRITON_INSTRUMENTATION_MODE": "consan"}
    if tool != "consan":
        # PyTorch's caching allocator would hide accesses out of bounds and uninitialized reads.
        settings = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        options = f"--tool {tool} {OPTIONS} --error-exitcode {FOUND}".split()
        command = ["compute-sanitizer", *options, *command]
    try:
        done = subprocess.run(  # noqa: S603 - the programs are named above
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # keeps the order of both streams
            text=True,
            errors="replace",
            env=os.environ | settings,
            timeout=limit,
            check=False,
        )
    except FileNotFoundError:
        return "missing", [f"{command[0]} is not on the PATH; it comes with the CUDA toolkit"]
    except subprocess.TimeoutExpired:
        return "failed", [f"it took longer than {limit:.0f} s"]
    return judge(tool, cases(text, impl), done.stdout, done.returncode)


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
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("wanted a CUDA GPU, got none: sanitizers watch a GPU's memory")
    if not (wanted := cases(options.only, options.impl)):
        parser.error(f"--only: no case of {options.impl} has {options.only!r} in its name")
    print(f"{len(wanted)} cases of {options.impl}")
    verdicts = set()
    for tool in options.tool or TOOLS:
        if (tool, options.impl) == BLIND:
            print(f"{tool:<9} left out: it calls uninitialized what TMA stores")
            continue
        verdict, told = ask(tool, options.only, options.limit, options.impl)
        print("\n  ".join([f"{tool:<9} {verdict:<8} {TOOLS[tool]}", *told]), flush=True)
        verdicts.add(verdict)
    unproven = not verdicts or verdicts & {"failed", "missing"}
    return 1 if "findings" in verdicts else 11 if unproven else 0


if __name__ == "__main__":
    sys.exit(main())
