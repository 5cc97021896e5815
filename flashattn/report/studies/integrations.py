"""Drop-ins: SDPA on our kernels against a direct call, and steps of transformers models."""

from __future__ import annotations

from functools import partial

from flashattn.report import plot
from flashattn.report.rows import attempted, gain, groups, known, label, ordered, quickest, timed
from flashattn.report.runs import Row, Run
from flashattn.report.study import Table, filled, shared, sides
from flashattn.report.units import microseconds, ms, times

NAME = "integrations"
TITLE = "Drop-ins"
QUESTION = "What do drop-ins gain, and what do they cost beside a direct call?"
# SDPA on our kernels; our ``attn_implementation``, without and with document lengths.
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


def _fastest(rows: list[Row], *names: str) -> Row | None:
    """Return the fastest row of these kinds of attention."""
    return quickest(row for row in rows if row["attention"] in names)


def _speed(peer: str, rows: list[Row]) -> str:
    """Return the speed of a step with ours over that with a peer, or ""."""
    return times(gain(_fastest(rows, peer), _fastest(rows, FATTN, LENGTHS)))


def _cost(rows: list[Row]) -> float | None:
    """Return the time of SDPA on our kernels over that of the direct call."""
    return gain(_fastest(rows, ACTIVATED), _fastest(rows, DIRECT))


def tables(run: Run) -> list[Table]:
    """Return tables of a call's device and host time, and of steps."""
    found = []
    for part, (what, unit, cell) in UNITS.items():
        rows = attempted(_calls(run, part))
        columns = shared(*CALL) | sides(rows, "attention", cell)
        columns[f"{ACTIVATED} / {DIRECT}"] = lambda own: times(_cost(own))
        caption = f"A call: {what} in {unit}"
        found.append(Table.of(caption, rows, columns, groups(rows, *CALL).values()))
    rows = _steps(run)
    columns = {"step": lambda own: label(own[0], *STEP)} | sides(rows, "attention", ms)
    columns |= {f"speed / {x}": partial(_speed, x) for x in PEERS if x in columns}
    columns["waits"] = lambda own: ", ".join(
        f"{row['waits']} ({row['attention']})" for row in known(own, "waits")
    )
    caption = "Forward and backward of a model: ms, and how often the host waits for the device"
    return filled(*found, Table.of(caption, rows, columns, groups(rows, *STEP).values()))


def findings(run: Run) -> list[str]:
    """Return the cost of SDPA on our kernels relative to a direct call, and the gain of a step."""
    said = []
    for part, (what, name, unit) in UNITS.items():
        for own in groups(_calls(run, part), *CALL).values():
            ours, cost = _fastest(own, ACTIVATED), _cost(own)
            if ours and cost:
                bits = ours.get("same_bits")
                end = {None: "", True: ", with the same bits", False: ", with other bits"}[bits]
                said.append(
                    f"{label(own[0], *CALL)}: SDPA on our kernels takes {unit(ours['seconds'])} "
                    f"{name} of {what}, {times(cost)} that of attention{end}."
                )
    for own in groups(_steps(run), *STEP).values():
        each = [f"{found} that of {x}" for x in PEERS if (found := _speed(x, own))]
        ours = _fastest(own, FATTN, LENGTHS)
        if each and ours:
            where, name = label(own[0], *STEP), ours["attention"]
            said.append(f"{where}: the speed of a step with {name} is {', '.join(each)}.")
    return said


def pictures(run: Run) -> dict[str, plot.Picture]:
    """Plot a bar for each kind of attention, with a panel for each model and its inputs."""
    records = [
        {"panel": label(row, *STEP), "place": row["attention"], "said": f"{ms(row['seconds'])} ms"}
        | {"value": 1e3 * row["seconds"], "ours": row["attention"] not in PEERS}
        for row in ordered(timed(_steps(run)), *STEP, "attention")
    ]
    made = plot.bars("Forward and backward of a model", records, columns=2)
    return plot.shown("integrations-steps", made)
