"""Drop-ins: SDPA on our kernels beside attention, and training steps of transformers' models."""

from __future__ import annotations

from collections.abc import Mapping

from flashattn.report import plot
from flashattn.report.rows import attempted, by, groups, known, label, ordered, timed, values
from flashattn.report.runs import Row, Run
from flashattn.report.study import Table, filled
from flashattn.report.units import microseconds, ms, or_mark, times

NAME = "integrations"
TITLE = "Drop-ins"
QUESTION = "What do drop-ins gain, and what do they cost beside a direct call?"
# SDPA while ours is activated; our ``attn_implementation``, and with the lengths of documents.
ACTIVATED, FATTN, LENGTHS = "sdpa, activated", "fattn", "fattn, cu_seq_lens"
DIRECT = "attention"
PEERS = ("sdpa", "eager", "flex_attention")
CALL, STEP = ("pass", "problem"), ("model", "inputs", "context", "dtype")
UNITS = {"device": ("device time", "ms", ms), "host": ("host time", "µs", microseconds)}


def _calls(run: Run, part: str) -> list[Row]:
    rows = known(run.study(NAME), "attention", *CALL)
    return [row for row in rows if row.get("part") == part]


def _steps(run: Run) -> list[Row]:
    return attempted(known(run.study(NAME), "attention", *STEP))


def _seconds(rows: list[Row], *names: str) -> float | None:
    """Return the least seconds of these kinds of attention."""
    found = [float(row["seconds"]) for row in timed(rows) if row["attention"] in names]
    return min(found, default=None)


def _gains(rows: list[Row]) -> Mapping[str, float]:
    """Return the speed of a step with ours over that with each peer."""
    ours, peers = _seconds(rows, FATTN, LENGTHS), {x: _seconds(rows, x) for x in PEERS}
    return {x: peer / ours for x, peer in peers.items() if peer and ours}


def _cost(rows: list[Row]) -> tuple[float, float] | None:
    """Return the seconds of SDPA on our kernels, and of the direct call."""
    ours, direct = _seconds(rows, ACTIVATED), _seconds(rows, DIRECT)
    return (ours, direct) if ours and direct else None


def tables(run: Run) -> list[Table]:
    """Return tables of the device's and the host's time for a call, and of steps."""
    found = []
    for part, (what, unit, cell) in UNITS.items():
        rows = attempted(_calls(run, part))
        names, lines = values(rows, "attention"), []
        for case, own in groups(rows, *CALL).items():
            sides, cost = by(own, "attention"), _cost(own)
            ratio = times(cost[0] / cost[1] if cost else None)
            lines.append([*case, *(or_mark(sides.get(x), cell) for x in names), ratio])
        header = [*CALL, *names, f"{ACTIVATED} / {DIRECT}"]
        caption = f"A call: {what} in {unit}"
        found.append(Table(caption=caption, header=header, lines=lines, rows=rows))
    return filled(*found, _of_steps(_steps(run)))


def _of_steps(rows: list[Row]) -> Table:
    names, lines = values(rows, "attention"), []
    peers = [x for x in PEERS if x in names]
    for own in groups(rows, *STEP).values():
        sides, gains = by(own, "attention"), _gains(own)
        cells = [or_mark(sides.get(x), ms) for x in names]
        told = [f"{row['waits']} ({x})" for x, row in sides.items() if row.get("waits") is not None]
        ratios = [times(gains.get(x)) for x in peers]
        lines.append([label(own[0], *STEP), *cells, *ratios, ", ".join(told)])
    header = ["step", *names, *(f"speed / {x}" for x in peers), "waits"]
    caption = "Forward and backward of a model: ms, and how often the host waits for the device"
    return Table(caption=caption, header=header, lines=lines, rows=rows)


def findings(run: Run) -> list[str]:
    """Return what SDPA on our kernels costs beside a direct call, and what a step gains."""
    said = []
    for part, (what, name, unit) in UNITS.items():
        for own in groups(_calls(run, part), *CALL).values():
            if cost := _cost(own):
                ours, direct = cost
                bits = by(own, "attention")[ACTIVATED].get("same_bits")
                end = {None: "", True: ", with the same bits", False: ", with other bits"}[bits]
                said.append(
                    f"{label(own[0], *CALL)}: SDPA on our kernels takes {unit(ours)} {name} of"
                    f" {what}, {times(ours / direct)} that of attention{end}."
                )
    for own in groups(_steps(run), *STEP).values():
        if gains := _gains(own):
            each = ", ".join(f"{times(gain)} that of {peer}" for peer, gain in gains.items())
            said.append(f"{label(own[0], *STEP)}: the speed of a step with fattn is {each}.")
    return said


def pictures(run: Run) -> dict[str, plot.Picture]:
    """Plot a bar for each kind of attention, a panel for each model and its inputs."""
    records = [
        {"panel": label(row, *STEP), "place": row["attention"], "said": f"{ms(row['seconds'])} ms"}
        | {"value": 1e3 * row["seconds"], "ours": row["attention"] not in PEERS}
        for row in ordered(timed(_steps(run)), *STEP, "attention")
    ]
    made = plot.bars("Forward and backward of a model", records, columns=2) if records else None
    return {"integrations-steps": made} if made else {}
