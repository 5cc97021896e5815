"""The sanitizers: how each is started on the cases, and what its answer means."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flashattn.sanitize.cases import OURS, cases
from flashattn.sanitize.parse import Finding, parse

CASES = (sys.executable, "-m", "flashattn.sanitize.cases")
PROGRAM = "compute-sanitizer"
FOUND = 33  # its exit status for findings, no program's own
# Its API errors are left out: a library that asks whether something is there is no error. Only
# the process with the GPU is watched, not the assembler that Triton starts.
OPTIONS = (
    *("--target-processes", "application-only"),
    *("--report-api-errors", "no"),
    *("--print-limit", "1000"),
    *("--error-exitcode", str(FOUND)),
)
CLEAN, FINDINGS, OTHERS, FAILED, MISSING = "clean", "findings", "others'", "failed", "missing"


@dataclass(frozen=True)
class Tool:
    """A sanitizer.

    Args:
        name: of it.
        checks: what it looks for.
        command: ahead of the cases'.
        environment: added to this process's own.
    """

    name: str
    checks: str
    command: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def missing(self) -> str | None:
        """Why it cannot be started here, as a sentence, or None."""
        if self.command and shutil.which(self.command[0]) is None:
            return f"{PROGRAM} is not on the PATH; it comes with the CUDA toolkit"
        mode = self.environment.get("TRITON_INSTRUMENTATION_MODE")
        if mode and mode not in instrumentation_modes():
            return f"the installed Triton has no instrumentation mode {mode}"
        return None


def _nvidia(name: str, checks: str) -> Tool:
    # PyTorch hands out memory again that it has handed out before, which hides what is read
    # beyond an end, and what is read before it was written.
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return Tool(name, checks, (PROGRAM, "--tool", name, *OPTIONS), environment)


TOOLS = (
    Tool("plain", "whether the cases run at all"),
    _nvidia("memcheck", "reads and writes outside of what was allocated"),
    _nvidia("initcheck", "reads of global memory that nobody has written"),
    _nvidia("racecheck", "shared memory read or written by two threads in no order"),
    Tool(
        "consan",
        "shared memory used while an asynchronous copy or product may still use it",
        environment={"TRITON_INSTRUMENTATION_MODE": "consan"},
    ),
)


def instrumentation_modes() -> list[str]:
    """Return which of Triton's sanitizers its NVIDIA compiler knows, without importing it."""
    spec = find_spec("triton")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        compiler = Path(folder, "backends", "nvidia", "compiler.py")
        if compiler.exists() and '"consan"' in compiler.read_text(encoding="utf-8"):
            return ["consan"]
    return []


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a tool found.

    Args:
        tool: its name.
        checks: what it looks for.
        verdict: clean; findings, some of ours; others', findings of other kernels only; failed, it
            did not get to its end; or missing.
        said: the sentence for a verdict that is neither clean nor a finding.
        cases: how many ran to their end.
        total: findings that its summary counts.
        findings: each kind of them.
        seconds: that it took.
    """

    tool: str
    checks: str
    verdict: str
    said: str | None = None
    cases: int = 0
    total: int | None = None
    findings: Sequence[Finding] = ()
    seconds: float = 0.0

    def row(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self) | {"findings": [asdict(finding) for finding in self.findings]}


def ask(tool: Tool, text: str, limit: float, impl: str = OURS) -> Answer:
    """Run the cases under a tool.

    Args:
        tool: which.
        text: only cases with this in their names.
        limit: seconds that it may take.
        impl: whose cases.
    """
    if tool.missing:
        return Answer(tool=tool.name, checks=tool.checks, verdict=MISSING, said=tool.missing)
    start = time.perf_counter()
    try:
        done = subprocess.run(  # noqa: S603 - the programs are named above
            [*tool.command, *CASES, text, impl],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # in the order in which they come
            text=True,
            errors="replace",
            env=os.environ | tool.environment,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        why = f"it took longer than {limit:.0f} s"
        return Answer(tool=tool.name, checks=tool.checks, verdict=FAILED, said=why, seconds=limit)
    took = time.perf_counter() - start
    return judge(tool, list(cases(text, impl)), done.stdout, done.returncode, took)


def judge(tool: Tool, wanted: Sequence[str], output: str, status: int, seconds: float) -> Answer:
    """Say what an output and an exit status mean: silence is not clean unless all wanted cases ran.

    Args:
        tool: that wrote it.
        wanted: names of cases.
        output: of it.
        status: its exit status.
        seconds: that it took.
    """
    said = parse(output)
    verdict, why = CLEAN, None
    unexplained = (said.total or 0) > 0 and not said.findings
    if any(finding.ours for finding in said.findings) or unexplained:
        verdict = FINDINGS
    elif (
        set(said.done) != set(wanted)
        or (tool.command and said.total is None)
        or status not in (0, FOUND)
    ):
        verdict, why = FAILED, _last(output, status)
    elif said.findings:
        verdict = OTHERS
    return Answer(
        tool=tool.name,
        checks=tool.checks,
        verdict=verdict,
        said=why,
        cases=len(said.done),
        total=said.total,
        findings=said.findings,
        seconds=seconds,
    )


def _last(output: str, status: int) -> str:
    lines = [line.removeprefix("=========").strip() for line in output.splitlines()]
    told = [line for line in lines if line and "SUMMARY" not in line]
    return f"exit status {status}: {told[-1] if told else 'without a word'}"
