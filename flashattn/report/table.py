"""A run as Markdown: a table for each pass, a row for each problem, a column for each impl."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flashattn.report.runs import Row, Run

OURS = "triton"
STUDIES = ("tiled",)  # ours too, and no peer
MARKS = {"unsupported": "-", "oom": "OOM", "failed": "FAILED"}
SHORT = {"bfloat16": "bf16", "float16": "fp16", "tf32": "tf32", "float32": "fp32"}  # the roofs
PASSES = ("forward", "backward")  # the order of the tables; any other comes after them
TERA = 1e12


def tables(run: Run, *, ours: str = OURS) -> str:
    """Return the run as Markdown.

    Args:
        run: what was measured.
        ours: the implementation that is compared with the best of the others.
    """
    parts = [_caption(run)]
    for name in sorted({row["pass"] for row in run.rows}, key=_pass_order):
        rows = [row for row in run.rows if row["pass"] == name]
        parts += [f"### {name}", _table(rows, run.roofs, ours)]
    reasons = _reasons(run.rows)
    if reasons:
        parts += ["Not timed:", reasons]
    return "\n\n".join(part for part in parts if part)


def _pass_order(name: str) -> tuple[int, str]:
    return (PASSES.index(name) if name in PASSES else len(PASSES), name)


def _table(rows: list[Row], roofs: dict[str, float], ours: str) -> str:
    """Return one pass; implementations without a single number are left to the reasons."""
    names = {row["impl"] for row in rows if row["status"] == "ok"}
    timed = sorted(names, key=lambda name: (name != ours, name))
    if not timed:
        return ""
    lines = [["problem", *timed, *([f"{ours} / best peer"] if ours in timed else [])]]
    cells = {(row["problem"], row["impl"]): row for row in rows}
    for problem in dict.fromkeys(row["problem"] for row in sorted(rows, key=_order)):
        found = {impl: cells[problem, impl] for impl in timed if (problem, impl) in cells}
        line = [problem, *(_cell(found.get(impl), roofs) for impl in timed)]
        lines.append(line + ([_ratio(found, ours)] if ours in timed else []))
    return _markdown(lines)


def _order(row: Row) -> tuple[object, ...]:
    shape = (row["head_dim"], str(row["causal"]), row["seq_q"], row["seq_kv"])
    return (row["dtype"], *shape, row["problem"])


def _cell(row: Row | None, roofs: dict[str, float]) -> str:
    """Return TFLOP/s and the share of the roof, or the mark that says why there is none."""
    if row is None:
        return ""
    if row["status"] != "ok":
        return MARKS[row["status"]]
    speed = row["flops"] / row["seconds"]
    share = f" ({speed / roofs[row['dtype']]:.0%})" if row["dtype"] in roofs else ""
    return _tera(speed) + share


def _ratio(found: dict[str, Row], ours: str) -> str:
    """Return our speed over the best peer's, and who that is."""
    seconds = {impl: row["seconds"] for impl, row in found.items() if row["status"] == "ok"}
    mine = seconds.pop(ours, None)
    peers = {impl: time for impl, time in seconds.items() if impl not in STUDIES}
    if mine is None or not peers:
        return ""
    best = min(peers, key=peers.__getitem__)
    return f"{peers[best] / mine:.2f} x {best}"


def _tera(per_second: float) -> str:
    value = per_second / TERA
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"  # noqa: PLR2004 - three digits either way


def _markdown(lines: list[list[str]]) -> str:
    """Align the columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(
        "| " + " | ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) + " |"
        for line in (lines[0], rule, *lines[1:])
    )


def _reasons(rows: Iterable[Row]) -> str:
    """Return every reason once, with the number of cases it holds for."""
    counts = Counter((row["status"], row["reason"]) for row in rows if row["status"] != "ok")
    return "\n".join(
        f"* {reason} ({MARKS[status]} in {count} {'case' if count == 1 else 'cases'})"
        for (status, reason), count in counts.items()
    )


def _caption(run: Run) -> str:
    """Return the units, the roofs, and what the numbers depend on."""
    share = " (% of its dtype's roof)" if run.roofs else ""
    clocks = sorted({row["clock"] for row in run.rows if "clock" in row})
    units = "; ".join([f"TFLOP/s{share}", "masked work not counted", *clocks])
    roofs = [f"{SHORT[kind]} {_tera(roof)}" for kind, roof in run.roofs.items() if kind in SHORT]
    if roofs:
        copied = f"copy {_tera(run.roofs['copy'])} TB/s (read + write)"
        units += f". Roofs, measured in this run: {', '.join(roofs)} TFLOP/s, {copied}"
    return f"{units}.\n\n{', '.join(_circumstances(run))}."


def _circumstances(run: Run) -> list[str]:
    machine, facts = run.machine, []
    facts.append(machine.get("gpu") or machine.get("cpu") or "unknown machine")
    if machine.get("power_limit_watts"):
        facts.append(f"{machine['power_limit_watts']:.0f} W")
    clocks = [f"{clock / 1e6:.0f}" for clock in run.clocks.values() if clock]
    if clocks:
        facts.append(f"{' → '.join(clocks)} MHz")
    named = ("driver", "cuda", "torch", "triton", "ptxas", "python")
    facts += [f"{name} {machine[name]}" for name in named if machine.get(name)]
    if run.commit.get("id"):
        dirty = " with changes" if run.commit.get("dirty") else ""
        facts.append(f"commit {run.commit['id'][:10]}{dirty}")
    return facts
