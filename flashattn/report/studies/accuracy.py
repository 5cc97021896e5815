"""Accuracy: errors against fp64 in ulps, and which clauses of the contract are kept."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from flashattn.report import plot
from flashattn.report.rows import by, groups, label, ok, ordered, values
from flashattn.report.runs import Row, Run
from flashattn.report.study import Table, filled, shared
from flashattn.report.units import digits

NAME = "accuracy"
TITLE = "Accuracy"
QUESTION = "How wrong is everybody against fp64, and who keeps which promise?"
OUTPUTS = ("o", "lse", "dq", "dk", "dv")
KINDS = {"max": [1, 0], "mean": [2, 3]}  # dashes of the budgets
MARKS = {"keeps": "yes", "breaks": "NO", "refuses": "-", "crashes": "CRASH", "not judged": "OOM"}
COLOURS = {"yes": "#3fa968", "NO": "#e4573d", "-": "#9aa4b1", "CRASH": "#b3261e", "OOM": "#d9a514"}


def _errors(rows: list[Row]) -> list[Row]:
    """Return a row for each error: maximum and mean, for each output and kind of values."""
    return [
        row
        | {"values": values, "output": name, "kind": kind, "bias": error.get("bias")}
        | {"error": error.get(kind), "budget": error.get(f"{kind}_budget")}
        for row in ok(rows, "impl", "dtype", "head_dim", "errors")
        for values, outputs in row["errors"].items()
        for name, error in outputs.items()
        for kind in KINDS
    ]


def judged(rows: list[Row]) -> list[Row]:
    """Return a row for each error that has a budget."""
    return [row for row in _errors(rows) if not math.isnan(share(row))]


def kept(rows: list[Row]) -> dict[str, tuple[int, int]]:
    """Return how many clauses each implementation keeps, of how many that were judged."""
    found = {}
    for impl, row in _contracts(rows).items():
        verdicts = [_verdict(row, name) for name in row["clauses"]]
        found[impl] = verdicts.count("keeps"), len(verdicts) - verdicts.count("not judged")
    return found


def broken(rows: list[Row]) -> dict[str, list[str]]:
    """Return the clauses that each implementation breaks: neither kept nor refused."""
    return {
        impl: [name for name in row["clauses"] if _verdict(row, name) in ("breaks", "crashes")]
        for impl, row in _contracts(rows).items()
    }


def _contracts(rows: list[Row]) -> dict[str, Row]:
    return by(ordered(ok(rows, "impl", "clauses"), "impl"), "impl")


def tables(run: Run) -> list[Table]:
    """Return the errors by dtype and head dimension, the clauses, and reasons for failures."""
    rows = run.study(NAME)
    contracts = _contracts(rows)
    errors = [_table(own) for own in groups(_errors(rows), "dtype", "head_dim").values()]
    return filled(*errors, _clauses(contracts), _reasons(contracts))


def _table(rows: list[Row]) -> Table:
    return Table.of(
        f"{label(rows[0], 'dtype', 'head_dim')}: max / mean / bias of the error against "
        "fp64, in ulps of the largest element; ! exceeds its budget",
        list({row["name"]: row for row in rows}.values()),
        shared("values", "impl") | {name: partial(_cell, name) for name in OUTPUTS},
        groups(rows, "values", "impl").values(),
    )


def _cell(output: str, rows: list[Row]) -> str:
    kinds = [row for row in rows if row["output"] == output]
    told = [digits(row["error"]) + "!" * (share(row) > 1) for row in kinds]
    return " / ".join([*told, *(digits(row["bias"]) for row in kinds[:1])])


def share(row: Row) -> float:
    """Return an error over its budget; infinite if only the budget is 0."""
    if row["error"] is None or row["budget"] is None:
        return math.nan
    return row["error"] / row["budget"] if row["budget"] else math.inf if row["error"] else 0.0


def _clauses(contracts: dict[str, Row]) -> Table:
    """Return a table with a line per clause and a column per implementation."""
    names = dict.fromkeys(clause for row in contracts.values() for clause in row["clauses"])
    return Table(
        caption="Clauses of the contract: kept, broken (NO), or refused with an error (-)",
        header=["clause", *contracts],
        lines=[
            [name, *(MARKS.get(_verdict(row, name), "") for row in contracts.values())]
            for name in names
        ],
        rows=list(contracts.values()),
    )


def _verdict(row: Row, clause: str) -> str:
    return str(row["clauses"].get(clause, {}).get("verdict"))


def _reasons(contracts: dict[str, Row]) -> Table:
    """Return the reason for each clause that is not kept."""
    return Table(
        caption="Clauses that are not kept, and why",
        header=["impl", "clause", "verdict", "because"],
        lines=[
            [impl, clause, found["verdict"], found.get("said") or ""]
            for impl, row in contracts.items()
            for clause, found in row["clauses"].items()
            if found["verdict"] != "keeps"
        ],
        rows=list(contracts.values()),
    )


def findings(run: Run) -> list[str]:
    """Return, for each implementation, how often it exceeds budgets and which clauses it breaks."""
    rows, said = run.study(NAME), []
    for (impl,), own in groups(judged(rows), "impl").items():
        worst = [max(errors, key=share) for errors in groups(own, "kind").values()]
        ends = [
            f"its {row['kind']} error reaches {digits(share(row))} of the budget "
            f"({label(row, 'output', 'dtype', 'head_dim', 'values')})"
            for row in worst
        ]
        above = f"{impl} exceeds its budget in {sum(share(row) > 1 for row in own)} of {len(own)}"
        said.append(f"{above} errors; {' and '.join(ends)}.")
    for (impl, (count, of)), names in zip(kept(rows).items(), broken(rows).values(), strict=True):
        said.append(
            f"{impl} keeps {count} of {of} clauses and breaks {'; '.join(names) or 'none'}."
        )
    return said


def pictures(run: Run) -> dict[str, plot.Picture]:
    """Plot the errors by output with their budgets, for each kind of values; and the clauses."""
    drawn, rows = {}, run.study(NAME)
    for (kind,), own in groups(_errors(rows), "values").items():
        drawn[f"{NAME}-{kind.replace('_', '-')}"] = _picture(kind.replace("_", " "), own)
    clauses = _clauses(_contracts(rows))
    return drawn | ({f"{NAME}-contract": _kept(clauses)} if clauses.lines else {})


def _kept(clauses: Table) -> plot.Picture:
    """Plot the table of clauses, with a coloured rectangle for each verdict."""
    records = [
        {"panel": "", "clause": name, "impl": impl, "name": verdict}
        for name, *verdicts in clauses.lines
        for impl, verdict in zip(clauses.header[1:], verdicts, strict=True)
    ]
    top = {"orient": "top", "labelAngle": -35, "ticks": False, "domain": False, "labelLimit": 0}
    common = {"type": "nominal", "sort": None, "title": None}
    place: Any = {"x": common | {"field": "impl", "axis": top}, "y": common | {"field": "clause"}}
    scale = {"domain": [*COLOURS], "range": [*COLOURS.values()]}
    hue = {"field": "name", "type": "nominal", "scale": scale, "legend": None}
    place["tooltip"] = plot.tips("clause", "impl", name="verdict")
    band = {"band": 0.96}
    box = {"type": "rect", "opacity": 0.45, "width": band, "height": band}
    layers = [plot.layer(box, **place, color=hue)]
    layers.append(plot.layer(plot.TEXT, **place, text={"field": "name"}))
    title = "The contract: kept (yes), broken (NO), refused with an error (-)"
    made = plot.picture(title, records, layers, height={"step": 20})
    return plot.beside(made, [record["clause"] for record in records])


def _picture(kind: str, rows: list[Row]) -> plot.Picture:
    """Plot a panel for each head dimension and dtype, all on one scale."""
    records, told = list[plot.Record](), set[tuple[Any, ...]]()
    for row in ordered(rows, "head_dim", "dtype", "impl"):
        record = {"panel": label(row, "dtype", "head_dim"), "name": row["impl"]}
        record |= {"kind": row["kind"], "output": row["output"]}
        # A logarithmic axis shows only positive, finite values.
        drawn = [fact for fact in ("error", "budget") if 0 < (row[fact] or 0) < math.inf]
        record |= {fact: plot.exact(row[fact]) for fact in drawn}
        limit = (record["panel"], row["kind"], row["output"])
        if "budget" in drawn and limit not in told:  # all implementations have the same
            told.add(limit)
            record["limit"] = record["budget"]
        records.append(record)
    x: plot.Channel = {"field": "output", "type": "nominal", "sort": [*OUTPUTS], "title": None}
    x["axis"] = {"labelAngle": 0}
    y, names = plot.quantity("error", "ulps", log=True), values(rows, "impl")
    tips = plot.tips("output", "kind", name="implementation", error="ulps", budget="budget, ulps")
    dot = {"x": x, "y": y, "xOffset": {"field": "name", "sort": names}, "tooltip": tips}
    ends = {"x": x | {"bandPosition": 0.02}, "x2": {"field": "output", "bandPosition": 0.98}}
    ends |= {"y": y | {"field": "limit"}} | plot.GREY
    layers = []
    for of, dash in KINDS.items():
        test, line = f"datum.kind == '{of}'", {"type": "rule", "strokeDash": dash}
        spot = plot.POINT | {"filled": of == "max"}
        layers.append(plot.layer(spot, f"{test} && datum.error", **dot))
        layers.append(plot.layer(line, f"{test} && datum.limit", **ends))
    title = f"Errors against fp64 in ulps, values: {kind}"
    note = "Dots: the largest error, its budget a line. Rings: the mean error, its budget dotted."
    columns = len(values(rows, "dtype"))
    made = plot.picture(title, records, layers, columns=columns, least=240, note=note)
    return plot.named(made, names)
