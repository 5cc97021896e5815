"""Several GPUs on one sequence: tokens per second, against one GPU, a prediction and PyTorch."""

from __future__ import annotations

from flashattn.report import plot
from flashattn.report.rows import attempted, by, groups, known, label, timed, values
from flashattn.report.runs import Row, Run
from flashattn.report.study import Table, filled
from flashattn.report.units import binary, digits, ms, or_mark, percent, times

NAME = "parallel"
TITLE = "Several GPUs"
QUESTION = "How much faster is one sequence on several GPUs?"
CASE = ("problem", "size", "context", "pass")
OURS, PEER = "keys", "pytorch"
MOST = 6  # panels in the plot


def _rows(run: Run) -> list[Row]:
    return attempted(known(run.study(NAME), "world", "method", "pass"))


def _alone(rows: list[Row], method: str) -> float | None:
    """Return the seconds of one GPU, by a method or, for the others of ours, by the same call."""
    found = {row["method"]: row["seconds"] for row in timed(rows) if row["world"] == 1}
    return found.get(method, None if method == PEER else found.get(OURS))


def _share(rows: list[Row], row: Row) -> float | None:
    """Return how many of its GPUs' speeds a row reaches; one is linear scaling."""
    alone = _alone(rows, row["method"])
    return alone / row["seconds"] / row["world"] if alone and timed([row]) else None


def _against_peer(rows: list[Row], row: Row) -> float | None:
    """Return a row's speed over that of PyTorch's on as many GPUs."""
    peers = by(timed(x for x in rows if x["world"] == row["world"]), "method")
    peer = peers.get(PEER)
    return peer["seconds"] / row["seconds"] if peer and timed([row]) else None


def tables(run: Run) -> list[Table]:
    """Return a table for each problem and pass, with a line for each method and number of GPUs."""
    found = []
    for own in groups(_rows(run), *CASE).values():
        lines = []
        for (world, method), (row, *_) in groups(own, "world", "method").items():
            seconds, tokens = row.get("seconds"), row.get("tokens")
            peak = row.get("peak_bytes")
            lines.append(
                [
                    str(world),
                    method,
                    or_mark(row, ms),
                    digits(tokens / seconds / 1e3 if tokens and seconds else None),
                    percent(_share(own, row)),
                    ms(row.get("predicted_seconds")),
                    times(_against_peer(own, row)) if method != PEER else "",
                    binary(peak) if peak else "",
                ]
            )
        header = ["GPUs", "method", "ms", "1000 tokens/s", "of linear", "predicted ms"]
        header += [f"speed / {PEER}", "peak memory"]
        caption = f"{label(own[0], *CASE)}: time of the slowest GPU"
        found.append(Table(caption=caption, header=header, lines=lines, rows=own))
    return filled(*found)


def findings(run: Run) -> list[str]:
    """Return, for each problem and pass, what the most GPUs reach."""
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


def pictures(run: Run) -> dict[str, plot.Figure]:
    """Plot tokens per second over the number of GPUs, a panel for each problem and pass."""
    rows = known(timed(_rows(run)), "tokens")
    found = [own for own in groups(rows, *CASE).values() if len(values(own, "world")) > 1][:MOST]
    if not found:
        return {}
    columns = min(2, len(found))
    lines = -(-len(found) // columns)
    figure, axes = plot.panels("Tokens per second on several GPUs", lines, columns, height=3.2)
    places = [axis for line in axes for axis in line]
    for axis, own in zip(places, found, strict=False):
        series = {
            method: [(x["world"], x["tokens"] / x["seconds"] / 1e3) for x in each]
            for (method,), each in groups(own, "method").items()
        }
        plot.curves(axis, series)
        worlds = values(own, "world")
        for first, value in series.get(OURS, [])[:1]:
            linear = [value * n / first for n in worlds]
            axis.plot(worlds, linear, linestyle=":", color="0.45", label="linear")
        plot.logarithmic(axis)
        plot.lengths(axis, worlds, "GPUs")
        axis.set(title=label(own[0], *CASE), ylabel="1000 tokens/s")
    for axis in places[len(found) :]:
        axis.set_visible(False)
    plot.legend(figure, axes)
    return {"parallel-tokens": figure}
