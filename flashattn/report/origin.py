"""Where numbers come from: machine, versions, code, command, date; and why some are missing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from statistics import median

from flashattn.report.runs import Row, Run
from flashattn.report.study import Table
from flashattn.report.units import MARKS, SHORT, tera

# Parts of a reason that are useful only for debugging.
DETAILS = re.compile(r"(?:_pytest\.outcomes\.XFailed|AssertionError): | \(naive=Error\([^)]*\)\)")
VERSIONS = ("driver", "cuda", "torch", "triton", "ptxas", "python")


def circumstances(run: Run) -> str:
    """Return the machine, versions, code and date of a run in one line."""
    machine = run.machine
    facts = [machine.get("gpu") or machine.get("cpu") or "unknown machine"]
    if machine.get("power_limit_watts"):
        facts.append(f"{machine['power_limit_watts']:.0f} W")
    clocks = [f"{clock / 1e6:.0f}" for clock in run.clocks.values() if clock]
    if clocks:
        facts.append(f"{' → '.join(clocks)} MHz")
    facts += [f"{name} {machine[name]}" for name in VERSIONS if machine.get(name)]
    if run.commit.get("id") not in (None, "unknown"):
        dirty = " with changes" if run.commit.get("dirty") else ""
        facts.append(f"commit {run.commit['id'][:10]}{dirty}")
    if run.sources:
        facts.append(f"code {run.sources[:10]}")
    if run.made:
        facts.append(run.made[:10])
    return ", ".join(facts)


def footnotes(run: Run, table: Table) -> list[str]:
    """Return one line for each run that the rows of a table come from."""
    said = []
    for origin, own in run.origins(table.rows):
        made_by = ", ".join(filter(None, (origin.command, origin.name)))
        said.append(". ".join(filter(None, (circumstances(origin), made_by, _clocked(own)))))
    return said


def _clocked(rows: list[Row]) -> str:
    """Return the kind of time, the SM clock, and how many rows were throttled or late."""
    facts = sorted({row["clock"] for row in rows if row.get("clock")})
    hertz = [row["sm_hertz"] for row in rows if row.get("sm_hertz")]
    if hertz:
        facts.append(f"at {median(hertz) / 1e6:.0f} MHz")
    held = Counter(reason for row in rows for reason in row.get("throttled") or ())
    facts += [f"{count} of {len(rows)} rows held back by {why}" for why, count in held.items()]
    late = sum(bool(row.get("late")) for row in rows)
    if late:
        facts.append(f"{late} of {len(rows)} rows with samples that began before all was queued")
    return "; ".join(facts)


def roofs(run: Run) -> str:
    """Return the roofs in a sentence, or "" if none was measured."""
    products = [f"{SHORT[kind]} {tera(roof)}" for kind, roof in run.roofs.items() if kind in SHORT]
    facts = [f"{', '.join(products)} TFLOP/s"] if products else []
    if run.roofs.get("copy"):
        facts.append(f"copy {tera(run.roofs['copy'])} TB/s (read + write)")
    return f"Roofs, measured in this run: {', '.join(facts)}." if facts else ""


def reasons(rows: Iterable[Row]) -> list[str]:
    """Return each reason for a missing time, with the number of cases."""
    counts = Counter(
        (row["status"], DETAILS.sub("", row.get("reason") or ""))
        for row in rows
        if row["status"] != "ok"
    )
    return [
        f"{reason or 'no reason was given'} "
        f"({MARKS[status]} in {count} {'case' if count == 1 else 'cases'})"
        for (status, reason), count in counts.items()
    ]
