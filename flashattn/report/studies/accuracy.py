"""Accuracy: how wrong everybody is against fp64, in ulps, and who keeps which clause."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from flashattn.report.plot import colour, heading, legend, logarithmic, panels
from flashattn.report.rows import OURS, groups, known, ordered, values
from flashattn.report.runs import Row, Run
from flashattn.report.study import Study, Table
from flashattn.report.units import digits, word

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "accuracy"
OUTPUTS = ("o", "lse", "dq", "dk", "dv")
KINDS = ("max", "mean")
STYLES = {"max": "-", "mean": ":"}
ABOVE = "!"  # behind an error that is above its budget
FIELDS = {"yes": "#cfe8d5", "NO": "#f4b6a6", "-": "#ececec", "CRASH": "#e0705c"}  # by mark
MARKS = {"keeps": "yes", "breaks": "NO", "refuses": "-", "crashes": "CRASH"}


def _errors(run: Run) -> list[Row]:
    rows = known(run.study(NAME), "impl", "dtype", "head_dim", "errors")
    return [row for row in rows if row["status"] == "ok"]


def _contracts(run: Run) -> list[Row]:
    return [row for row in known(run.study(NAME), "impl", "clauses") if row["status"] == "ok"]


class Verdict(NamedTuple):
    """One error beside its budget.

    Args:
        case: in words: the output, the dtype, the head dimension and the values.
        kind: max or mean.
        share: of its budget that the error is.
    """

    case: str
    kind: str
    share: float


def _verdicts(rows: list[Row]) -> Iterator[Verdict]:
    """Return every error of some rows that has a budget; where that is 0, so must the error be."""
    for row in rows:
        for kind_of_values, outputs in row["errors"].items():
            for name, error in outputs.items():
                case = (
                    f"{name}, {word('dtype', row['dtype'])}, D = {row['head_dim']}, "
                    f"{kind_of_values}"
                )
                for kind in KINDS:
                    budget, got = error.get(f"{kind}_budget"), error.get(kind)
                    if budget is None or got is None:
                        continue
                    share = got / budget if budget else math.inf if got else 0.0
                    yield Verdict(case, kind, share)


def tables(run: Run) -> list[Table]:
    """Return the errors by dtype and head dimension, the clauses, and what was said of them."""
    made = [
        _table(dtype, head_dim, rows)
        for (dtype, head_dim), rows in groups(_errors(run), "dtype", "head_dim").items()
    ]
    made += [_clauses(_contracts(run)), _reasons(_contracts(run))]
    return [table for table in made if table.lines]


def _table(dtype: str, head_dim: int, rows: list[Row]) -> Table:
    """Return a line for each kind of values and implementation, a column for each output."""
    kinds = list(dict.fromkeys(kind for row in rows for kind in row["errors"]))
    lines = []
    for kind in kinds:
        asked = [row for row in groups(rows, "impl").values() if kind in row[-1]["errors"]]
        for row in (own[-1] for own in asked):
            errors = row["errors"][kind]
            lines.append([kind, row["impl"], *(_cell(errors.get(name)) for name in OUTPUTS)])
    caption = (
        f"{word('dtype', dtype)}, D = {head_dim}: max / mean / bias in ulps of the largest element "
        f"against fp64; {ABOVE} is above its budget"
    )
    return Table(caption=caption, header=["values", "impl", *OUTPUTS], lines=lines, rows=rows)


def _cell(error: dict[str, float | None] | None) -> str:
    if error is None:
        return ""
    return " / ".join([*(_marked(error, kind) for kind in KINDS), digits(error.get("bias"))])


def _marked(error: dict[str, float | None], kind: str) -> str:
    got, budget = error.get(kind), error.get(f"{kind}_budget")
    above = got is not None and budget is not None and got > budget
    return digits(got) + ABOVE * above


def _clauses(rows: list[Row]) -> Table:
    """Return a line for each clause, a column for each implementation."""
    sides = {
        row["impl"]: row["clauses"] for (_,), own in groups(rows, "impl").items() for row in own
    }
    clauses = list(dict.fromkeys(clause for found in sides.values() for clause in found))
    lines = [
        [clause, *(MARKS.get(_verdict(found, clause), "") for found in sides.values())]
        for clause in clauses
    ]
    caption = "Clauses of the contract: kept, broken (NO), or refused with an error (-)"
    return Table(caption=caption, header=["clause", *sides], lines=lines, rows=rows)


def _verdict(found: dict[str, Any], clause: str) -> str:
    return str(found.get(clause, {}).get("verdict"))


def _reasons(rows: list[Row]) -> Table:
    """Return what was said of every clause that is not kept."""
    lines = [
        [row["impl"], clause, found["verdict"], found.get("said") or ""]
        for row in ordered(rows, "impl")
        for clause, found in row["clauses"].items()
        if found["verdict"] != "keeps"
    ]
    header = ["impl", "clause", "verdict", "because"]
    return Table(
        caption="Clauses that are not kept, and why", header=header, lines=lines, rows=rows
    )


def findings(run: Run) -> list[str]:
    """Say of each implementation how often it is above a budget, and which clauses it keeps."""
    rows = _errors(run)
    said = [_judged(impl, list(_verdicts(own))) for (impl,), own in groups(rows, "impl").items()]
    for (impl,), own in groups(_contracts(run), "impl").items():
        found = own[-1]["clauses"]
        broken = [clause for clause in found if _verdict(found, clause) in ("breaks", "crashes")]
        kept = sum(_verdict(found, clause) == "keeps" for clause in found)
        end = f" and breaks {'; '.join(broken)}" if broken else " and breaks none"
        said.append(f"{impl} keeps {kept} of {len(found)} clauses of the contract{end}.")
    return [sentence for sentence in said if sentence]


def _judged(impl: str, found: list[Verdict]) -> str | None:
    if not found:
        return None
    above = sum(verdict.share > 1 for verdict in found)
    start = f"{impl} is above its budget in {above} of {len(found)} errors"
    worst = {
        kind: max(sides, key=lambda verdict: verdict.share)
        for kind in KINDS
        if (sides := [verdict for verdict in found if verdict.kind == kind])
    }
    ends = [
        f"its {kind} errors reach {digits(verdict.share)} of the budget ({verdict.case})"
        for kind, verdict in worst.items()
    ]
    return f"{start}; {' and '.join(ends)}."


def pictures(run: Run) -> dict[str, Figure]:
    """Draw the errors by output with both budgets, by kind of values; and who keeps what."""
    rows = _errors(run)
    kinds = list(dict.fromkeys(kind for row in rows for kind in row["errors"]))
    drawn = {f"{NAME}-{kind.replace('_', '-')}": _picture(kind, rows) for kind in kinds}
    clauses = _clauses(_contracts(run))
    return drawn | ({f"{NAME}-contract": _kept(clauses)} if clauses.lines else {})


def _kept(clauses: Table) -> Figure:
    """Draw the table of clauses: a field for each verdict, in its word and its colour."""
    _, *impls = clauses.header
    names = [name for name, *_ in clauses.lines]
    title = "The contract: kept (yes), broken (NO), refused with an error (-)"
    figure, ((axis,),) = panels(title, 1, 1, height=0.8 + 0.27 * len(names))
    for y, (_, *verdicts) in enumerate(clauses.lines):
        for x, verdict in enumerate(verdicts):
            axis.barh(y, 0.96, 0.92, x - 0.48, color=FIELDS.get(verdict, "white"))
            axis.text(x, y, verdict, ha="center", va="center", fontsize=8)
    axis.set_xticks(range(len(impls)), impls, rotation=30, ha="left", fontsize=8.5)
    axis.set_yticks(range(len(names)), names, fontsize=8.5)
    axis.tick_params(length=0, top=False, labeltop=True, labelbottom=False)
    axis.set_xlim(-0.5, len(impls) - 0.5)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.spines[:].set_visible(False)
    axis.grid(visible=False)
    return figure


def _picture(kind: str, rows: list[Row]) -> Figure:
    """Draw a panel for each head dimension and dtype; one scale, so that panels can be compared."""
    asked = [row for row in rows if kind in row["errors"]]
    dims, dtypes = values(asked, "head_dim"), values(asked, "dtype")
    said = kind.replace("_", " ")
    title = f"Errors against fp64 in ulps, values: {said}; dots are the largest, rings the mean"
    figure, axes = panels(title, len(dims), len(dtypes), height=2.9, sharex=True, sharey=True)
    order = values(asked, "impl")
    for (i, head_dim), (j, dtype) in (
        (row, column) for row in enumerate(dims) for column in enumerate(dtypes)
    ):
        own = [row for row in asked if (row["head_dim"], row["dtype"]) == (head_dim, dtype)]
        axis = axes[i][j]
        _panel(axis, {row["impl"]: row["errors"][kind] for row in own}, order)
        heading(axis, f"{word('dtype', dtype)}, D = {head_dim}")
        axis.set_xticks(range(len(OUTPUTS)), OUTPUTS)
        axis.set_ylabel("" if j else "ulps")
        logarithmic(axis)
    legend(figure, axes)
    return figure


def _panel(axis: Axes, sides: dict[str, Any], order: list[str]) -> None:
    """Draw a place for each output: budgets across it, in it a dot (max) and a ring (mean) each."""
    width = 0.8 / max(1, len(order))
    for impl, errors in sides.items():
        offset = (order.index(impl) - (len(order) - 1) / 2) * width
        for kind in KINDS:
            points = [
                (x + offset, errors[name][kind])
                for x, name in enumerate(OUTPUTS)
                if _drawable(errors.get(name), kind)
            ]
            if points:
                axis.scatter(
                    [x for x, _ in points],
                    [y for _, y in points],
                    s=36 if impl == OURS else 16,
                    edgecolors=colour(impl),
                    facecolors=colour(impl) if kind == "max" else "white",
                    label=impl if kind == "max" else None,
                    zorder=4 if impl == OURS else 3,
                )
    for kind, style in STYLES.items():
        for x, name in enumerate(OUTPUTS):
            found = [side[name] for side in sides.values() if name in side]
            budget = next((error for error in found if _drawable(error, f"{kind}_budget")), None)
            if budget:
                heights = [budget[f"{kind}_budget"]] * 2
                label = f"budget of the {kind}"
                axis.plot([x - 0.45, x + 0.45], heights, style, color="0.35", label=label)


def _drawable(error: dict[str, float | None] | None, fact: str) -> bool:
    value = None if error is None else error.get(fact)
    return value is not None and 0 < value < math.inf


STUDY = Study(
    name=NAME,
    title="Accuracy",
    question="How wrong is everybody against fp64, and who keeps which promise?",
    tables=tables,
    pictures=pictures,
    findings=findings,
)
