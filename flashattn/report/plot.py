"""A run as a picture: TFLOP/s against the number of queries, a panel for each pass and mask."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from flashattn.report.runs import Row, Run

OURS = "triton"
TERA = 1e12
SIZE = 3.4  # inches of a panel's side
COLUMNS = (False, "top_left")
MASKS = {False: "full", "top_left": "causal", "bottom_right": "causal, bottom-right"}


def plot(run: Run, path: Path) -> None:
    """Draw the run into a file, whose suffix says which kind (.svg, .png, .pdf).

    Args:
        run: what was measured.
        path: of the picture.

    Raises:
        ValueError: nothing in the run has more than one length, so there is no line to draw.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - a second to import, for pictures only

    rows = [row for row in run.rows if row["status"] == "ok"]
    found = sorted({(row["pass"], row["head_dim"]) for row in rows}, key=_forward_first)
    panels = [(name, d) for name, d in found if len(_lengths(rows, name, d)) > 1]
    if not panels:
        raise ValueError("wanted a run with several lengths of one head dimension, got none")
    figure = Figure(figsize=(SIZE * 2 + 1.6, SIZE * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 2, squeeze=False, sharex=True, sharey="row")
    colors = {impl: f"C{i}" for i, impl in enumerate(sorted({row["impl"] for row in rows}))}
    for (i, (name, d)), (j, causal) in product(enumerate(panels), enumerate(COLUMNS)):
        wanted = (name, d, causal)
        chosen = [row for row in rows if (row["pass"], row["head_dim"], row["causal"]) == wanted]
        _panel(axes[i][j], chosen, run.roofs, colors)
        axes[i][j].set_title(f"{name}, D = {d}, {MASKS[causal]}", fontsize=9)
        axes[i][j].set_ylabel("TFLOP/s" if j == 0 else "")
    for axis in axes[-1]:
        axis.set_xlabel("queries")
    handles = {line.get_label(): line for axis in axes.flat for line in axis.get_lines()}
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize=8)
    machine = run.machine
    figure.suptitle(f"{machine.get('gpu') or machine.get('cpu')}: attention", fontsize=10)
    figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)


def _forward_first(panel: tuple[str, int]) -> tuple[object, ...]:
    return (panel[0] != "forward", *panel)


def _lengths(rows: list[Row], name: str, head_dim: int) -> set[int]:
    return {row["seq_q"] for row in rows if (row["pass"], row["head_dim"]) == (name, head_dim)}


def _panel(axis: Axes, rows: list[Row], roofs: dict[str, float], colors: dict[str, str]) -> None:
    """Draw one line for each implementation, ours the thickest, under the measured roof."""
    for impl in sorted({row["impl"] for row in rows}):
        points = sorted((r["seq_q"], r["flops"] / r["seconds"]) for r in rows if r["impl"] == impl)
        lengths, speeds = zip(*points, strict=True)
        tera = [speed / TERA for speed in speeds]
        (line,) = axis.plot(lengths, tera, marker="o", markersize=3, color=colors[impl], label=impl)
        line.set_linewidth(2.6 if impl == OURS else 1.1)
    for kind in {row["dtype"] for row in rows} & set(roofs):
        axis.axhline(roofs[kind] / TERA, linestyle="--", color="0.4", label=f"{kind} product")
    axis.set_xscale("log", base=2)
    axis.set_ylim(bottom=0)
    axis.grid(visible=True, alpha=0.3)
