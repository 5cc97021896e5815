"""One sequence on several GPUs: tokens per second against one GPU, a prediction and PyTorch."""

from __future__ import annotations

from functools import partial

from flashattn.report import plot
from flashattn.report.rows import attempted, by, gain, groups, known, label, ordered, timed, values
from flashattn.report.runs import Row, Run
from flashattn.report.study import Cell, Table, facts, filled
from flashattn.report.units import binary, digits, ms, or_mark, percent, times

NAME = "parallel"
TITLE = "Several GPUs"
QUESTION = "How much faster is one sequence on several GPUs?"
CASE = ("problem", "size", "context", "pass")
OURS, PEER = "keys", "pytorch"
UNIT = "1000 tokens/s"


def _rows(run: Run) -> list[Row]:
    return attempted(known(run.study(NAME), "world", "method", "pass"))


def _share(rows: list[Row], row: Row) -> float | None:
    """Return the scaling efficiency of a row: its speed-up over one GPU, per GPU.

    Methods of ours that have no row on one GPU are compared with that of ``OURS``.
    """
    alone = by(timed(x for x in rows if x["world"] == 1), "method")
    other = None if row["method"] == PEER else alone.get(OURS)
    found = gain(alone.get(row["method"], other), row)
    return found / row["world"] if found else None


def _against_peer(rows: list[Row], row: Row) -> float | None:
    """Return the speed of our row over that of PyTorch's on the same number of GPUs."""
    peers = by(timed(x for x in rows if x["world"] == row["world"]), "method")
    return None if row["method"] == PEER else gain(peers.get(PEER), row)


def tables(run: Run) -> list[Table]:
    """Return a table for each problem and pass, with a line for each method and number of GPUs."""
    return filled(*(_table(own) for own in groups(_rows(run), *CASE).values()))


def _table(rows: list[Row]) -> Table:
    columns: dict[str, Cell] = {
        **facts(GPUs="world", method="method"),
        "ms": partial(or_mark, unit=ms),
        UNIT: lambda row: digits(_thousands(row) if known(timed([row]), "tokens") else None),
        "of linear": lambda row: percent(_share(rows, row)),
        "predicted ms": lambda row: ms(row.get("predicted_seconds")),
        f"speed / {PEER}": lambda row: times(_against_peer(rows, row)),
        "peak memory": lambda row: binary(row["peak_bytes"]) if row.get("peak_bytes") else "",
    }
    caption = f"{label(rows[0], *CASE)}: time of the slowest GPU"
    return Table.of(caption, ordered(rows, "world", "method"), columns)


def findings(run: Run) -> list[str]:
    """Return, for each problem and pass, the scaling efficiency on the most GPUs."""
    said = []
    for own in groups(_rows(run), *CASE).values():
        ours = [row for row in timed(own) if row["method"] == OURS and row["world"] > 1]
        last = max(ours, key=lambda row: row["world"], default=None)
        share = None if last is None else _share(own, last)
        if last is None or share is None:
            continue
        predicted, peer = last.get("predicted_seconds"), _against_peer(own, last)
        ends = (
            [f"{percent(predicted / last['seconds'])} of the predicted speed"] if predicted else []
        )
        ends += [f"{times(peer)} the speed of {PEER}"] if peer else []
        beside = f" ({', '.join(ends)})" if ends else ""
        said.append(
            f"{label(last, *CASE)}: {last['world']} GPUs reach {percent(share)} of linear"
            f" scaling{beside}."
        )
    return said


def pictures(run: Run) -> dict[str, plot.Picture]:
    """Plot the scaling efficiency on the most GPUs, ours and PyTorch's."""
    records = []
    for own in groups(timed(_rows(run)), *CASE).values():
        most = max(values(own, "world"))
        records += [
            {"panel": f"{most} GPUs", "place": f"{label(row, *CASE)}: {row['method']}"}
            | {"value": plot.exact(share), "said": percent(share), "ours": row["method"] == OURS}
            for row in ordered(own, "method")
            if row["method"] in (OURS, PEER) and row["world"] == most > 1
            if (share := _share(own, row))
        ]
    return plot.shown("parallel-scaling", plot.bars("Share of linear scaling", records))


def _thousands(row: Row) -> float:
    return float(row["tokens"] / row["seconds"] / 1e3)
