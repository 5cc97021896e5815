"""Accuracy: errors against fp64 in ulps, and the clauses of the contract that are kept."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

from flashattn.report import plot
from flashattn.report.rows import OURS, by, groups, label, ok, ordered, values
from flashattn.report.runs import Row, Run
from flashattn.report.study import Table, filled
from flashattn.report.units import digits

NAME = "accuracy"
TITLE = "Accuracy"
QUESTION = "How wrong is everybody against fp64, and who keeps which promise?"
OUTPUTS = ("o", "lse", "dq", "dk", "dv")
KINDS = {"max": "-", "mean": ":"}  # line styles of the budgets
MARKS = {"keeps": "yes", "breaks": "NO", "refuses": "-", "crashes": "CRASH"}
COLOURS = {"yes": "#cfe8d5", "NO": "#f4b6a6", "-": "#ececec", "CRASH": "#e0705c"}  # by mark


def _errors(run: Run) -> list[Row]:
    """Return a row for each error: maximum and mean of each output, for each kind of values."""
    return [
        row
        | {"values": values, "output": name, "kind": kind, "bias": error.get("bias")}
        | {"error": error.get(kind), "budget": error.get(f"{kind}_budget")}
        for row in ok(run.study(NAME), "impl", "dtype", "head_dim", "errors")
        for values, outputs in row["errors"].items()
        for name, error in outputs.items()
        for kind in KINDS
    ]


def _contracts(run: Run) -> dict[str, Row]:
    return by(ordered(ok(run.study(NAME), "impl", "clauses"), "impl"), "impl")


def tables(run: Run) -> list[Table]:
    """Return the errors by dtype and head dimension, the clauses, and reasons for failures."""
    found, contracts = groups(_errors(run), "dtype", "head_dim"), _contracts(run)
    errors = [_table(own) for own in found.values()]
    return filled(*errors, _clauses(contracts), _reasons(contracts))


def _table(rows: list[Row]) -> Table:
    lines = []
    for (kind, impl), own in groups(rows, "values", "impl").items():
        outputs = {name: parts for (name,), parts in groups(own, "output").items()}
        lines.append([kind, impl, *(_cell(outputs.get(name, [])) for name in OUTPUTS)])
    return Table(
        caption=f"{label(rows[0], 'dtype', 'head_dim')}: max / mean / bias of the error against "
        "fp64, in ulps of the largest element; ! exceeds its budget",
        header=["values", "impl", *OUTPUTS],
        lines=lines,
        rows=list({row["name"]: row for row in rows}.values()),
    )


def _cell(kinds: list[Row]) -> str:
    told = [digits(row["error"]) + "!" * (_share(row) > 1) for row in kinds]
    return " / ".join([*told, *(digits(row["bias"]) for row in kinds[:1])])


def _share(row: Row) -> float:
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
    said = []
    judged = [row for row in _errors(run) if not math.isnan(_share(row))]
    for (impl,), own in groups(judged, "impl").items():
        worst = [max(errors, key=_share) for errors in groups(own, "kind").values()]
        ends = [
            f"its {row['kind']} error reaches {digits(_share(row))} of the budget "
            f"({label(row, 'output', 'dtype', 'head_dim', 'values')})"
            for row in worst
        ]
        above = f"{impl} exceeds its budget in {sum(_share(row) > 1 for row in own)} of {len(own)}"
        said.append(f"{above} errors; {' and '.join(ends)}.")
    for impl, row in _contracts(run).items():
        verdicts = {clause: _verdict(row, clause) for clause in row["clauses"]}
        kept = list(verdicts.values()).count("keeps")
        broken = [name for name, verdict in verdicts.items() if verdict in ("breaks", "crashes")]
        end = "; ".join(broken) or "none"
        said.append(f"{impl} keeps {kept} of {len(verdicts)} clauses and breaks {end}.")
    return said


def pictures(run: Run) -> dict[str, plot.Figure]:
    """Plot the errors by output with their budgets, for each kind of values; and the clauses."""
    drawn = {}
    for (kind,), rows in groups(_errors(run), "values").items():
        drawn[f"{NAME}-{kind.replace('_', '-')}"] = _picture(kind.replace("_", " "), rows)
    clauses = _clauses(_contracts(run))
    return drawn | ({f"{NAME}-contract": _kept(clauses)} if clauses.lines else {})


def _kept(clauses: Table) -> plot.Figure:
    """Plot the table of clauses, a coloured field for each verdict."""
    impls, names = clauses.header[1:], [name for name, *_ in clauses.lines]
    title = "The contract: kept (yes), broken (NO), refused with an error (-)"
    figure, ((axis,),) = plot.panels(title, 1, 1, height=0.8 + 0.27 * len(names))
    for y, (_, *verdicts) in enumerate(clauses.lines):
        for x, verdict in enumerate(verdicts):
            axis.barh(y, 0.96, 0.92, x - 0.48, color=COLOURS.get(verdict, "white"))
            axis.text(x, y, verdict, ha="center", va="center", fontsize=8)
    axis.set_xticks(range(len(impls)), impls, rotation=30, ha="left", fontsize=8.5)
    axis.set_yticks(range(len(names)), names, fontsize=8.5)
    axis.tick_params(length=0, top=False, labeltop=True, labelbottom=False)
    axis.set(xlim=(-0.5, len(impls) - 0.5), ylim=(len(names) - 0.5, -0.5))
    axis.spines[:].set_visible(False)
    axis.grid(visible=False)
    return figure


def _picture(kind: str, rows: list[Row]) -> plot.Figure:
    """Plot a panel for each head dimension and dtype, on one scale."""
    dims, dtypes, impls = (values(rows, fact) for fact in ("head_dim", "dtype", "impl"))
    title = f"Errors against fp64 in ulps, values: {kind}; dots are the largest, rings the mean"
    figure, axes = plot.panels(title, len(dims), len(dtypes), height=2.9, sharex=True, sharey=True)
    for i, j in product(range(len(dims)), range(len(dtypes))):
        shape = {"dtype": dtypes[j], "head_dim": dims[i]}
        _panel(axes[i][j], [row for row in rows if shape.items() <= row.items()], impls)
        axes[i][j].set(title=label(shape, *shape), ylabel="" if j else "ulps")
        axes[i][j].set_xticks(range(len(OUTPUTS)), OUTPUTS)
        plot.logarithmic(axes[i][j])
    plot.legend(figure, axes)
    return figure


def _panel(axis: plot.Axes, rows: list[Row], impls: list[str]) -> None:
    """Plot each output: budgets as lines, maxima as dots, means as rings."""
    for (impl, kind), own in groups(_drawable(rows, "error"), "impl", "kind").items():
        shift = (impls.index(impl) - (len(impls) - 1) / 2) * 0.8 / len(impls)
        places = [OUTPUTS.index(row["output"]) + shift for row in own]
        ours, colour = impl == OURS, plot.colour(impl)
        look: Any = {"facecolors": "white"} if kind == "mean" else {"label": impl}
        look = {"s": 36 if ours else 16, "color": colour, "zorder": 3 + ours} | look
        axis.scatter(places, [row["error"] for row in own], **look, edgecolors=colour)
    for (kind, output), own in groups(_drawable(rows, "budget"), "kind", "output").items():
        x, heights = OUTPUTS.index(output), [own[0]["budget"]] * 2
        name = f"budget of the {kind}"
        axis.plot([x - 0.45, x + 0.45], heights, KINDS[kind], color="0.35", label=name)


def _drawable(rows: list[Row], fact: str) -> list[Row]:
    """Return the rows whose fact is positive and finite, as a logarithmic axis needs."""
    return [row for row in rows if row[fact] is not None and 0 < row[fact] < math.inf]
