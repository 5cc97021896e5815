"""Shared parts of the plots: size, colours of implementations, axes and legend."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from flashattn.report.rows import KERNELS, NAIVE, OURS
from flashattn.report.units import digits

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 9.0  # inches: 900 pixels of a PNG
DPI = 100
LETTERS = 12  # characters of a legend per inch; the line sample counts as six
FAR = 300  # axes that span more have ticks at powers of ten only
CYCLE = (
    *("#0a58ca", "#e07a1f", "#17917f", "#7b2cbf", "#d4a017"),
    *("#c1121f", "#8a817c", "#00a6d6", "#d16ba5", "#5b8c00"),
)
# Implementations that share a plot have colours that colour-blind readers can tell apart.
COLOURS = {OURS: CYCLE[0], "compiled": CYCLE[1], "sdpa_flash": CYCLE[2], "tiled": CYCLE[3]}
COLOURS |= {"flex": CYCLE[4], NAIVE: CYCLE[5], "reference": CYCLE[6], "flash_attn_2": CYCLE[7]}
COLOURS |= {"sdpa_efficient": CYCLE[8], "sdpa_cudnn": CYCLE[9], "hopper": "#f72585"}
COLOURS |= {"sdpa": "#222222", "sdpa_math": "#a47148"}
COLOURS |= {"flash_attn_3": "#5f0f40", "flash_attn_4": "#9a031e"}
STYLE: Any = {  # matplotlib's type lists every key
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "lines.markersize": 3.5,
    "legend.frameon": False,
    "svg.hashsalt": "flashattn",  # reproducible files
}


def colour(name: str) -> str:
    """Return the colour of an implementation; any other name gets a stable colour by its hash."""
    return COLOURS.get(name) or CYCLE[crc32(name.encode()) % len(CYCLE)]


def panels(
    title: str, rows: int, columns: int, *, height: float, **shared: Any
) -> tuple[Figure, list[list[Axes]]]:
    """Return a figure and its axes, by row and column.

    Args:
        title: title of the figure, also the alternative text on the page.
        rows: rows of panels.
        columns: columns of panels.
        height: height of a row in inches.
        **shared: ``sharex`` and ``sharey`` of the panels.
    """
    import matplotlib as mpl  # noqa: PLC0415 - takes a second to import
    from matplotlib.figure import Figure  # noqa: PLC0415

    mpl.rcParams.update(STYLE)
    figure = Figure(figsize=(WIDTH, height * rows + 0.8), dpi=DPI, layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes = figure.subplots(rows, columns, squeeze=False, **shared)
    return figure, [list(line) for line in axes]


def curves(axis: Axes, series: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """Draw a line for each implementation, ours thicker and on top."""
    for name, points in series.items():
        ours = name.split(",")[0] in KERNELS
        axis.plot(
            *zip(*sorted(points), strict=True),
            marker="o",
            color=colour(name),
            label=name,
            linewidth=2.8 if ours else 1.3,
            zorder=3 if ours else 2,
        )


def hollow(axis: Axes, points: Iterable[tuple[float, float]], name: str) -> None:
    """Draw hollow markers over unreliable points."""
    look: Any = {"markersize": 2.8, "markerfacecolor": "white", "markeredgecolor": "0.3"}
    for x, y in points:
        axis.plot(x, y, "o", **look, markeredgewidth=0.5, zorder=4, label=name)


def lengths(axis: Axes, counts: Sequence[int], name: str = "N") -> None:
    """Make x a base-2 logarithmic axis labelled with plain numbers."""
    few = sorted(set(counts))
    few = few[:: len(few) // 8 + 1]
    axis.set_xscale("log", base=2)
    names = [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in few]
    axis.set_xticks([], minor=True)
    axis.set_xticks(few, names)
    axis.set_xlabel(name)


def logarithmic(axis: Axes) -> None:
    """Make y a base-10 logarithmic axis labelled with plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter  # noqa: PLC0415

    axis.set_yscale("log")
    low, high = axis.get_ylim()
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high / low > FAR else (1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())


def bars(axis: Axes, places: Sequence[str], series: Mapping[str, Sequence[float | None]]) -> None:
    """Draw a labelled group of bars at each place; None leaves a gap."""
    width = 0.8 / max(1, len(series))
    for i, (name, heights) in enumerate(series.items()):
        known = [(x, height) for x, height in enumerate(heights) if height is not None]
        offset = (i - (len(series) - 1) / 2) * width
        drawn = axis.bar(
            [x + offset for x, _ in known],
            [height for _, height in known],
            width * 0.94,
            label=name,
            color=colour(name) if name in COLOURS else CYCLE[i % len(CYCLE)],
        )
        axis.bar_label(drawn, fmt=digits, fontsize=7.5, padding=1)
    axis.set_xticks(range(len(places)), places)
    axis.grid(visible=False, axis="x")
    axis.margins(y=0.12)


def ranked(axis: Axes, places: Sequence[str], sizes: Sequence[float]) -> None:
    """Draw one labelled horizontal bar for each place."""
    drawn = axis.barh(range(len(places)), sizes, color=CYCLE[0], height=0.75)
    clear: Any = {
        "facecolor": "white",
        "edgecolor": "none",
        "pad": 0.5,
    }  # hides lines behind the label
    axis.bar_label(drawn, fmt=digits, fontsize=7, padding=2, bbox=clear)
    axis.set_yticks(range(len(places)), places, fontsize=7)
    axis.invert_yaxis()
    axis.grid(visible=False, axis="y")
    axis.margins(x=0.12, y=0.01)


def legend(figure: Figure, axes: Sequence[Sequence[Axes]]) -> None:
    """Draw one legend below all panels."""
    handles: dict[str, Any] = {}
    for axis in (axis for line in axes for axis in line):
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    if handles:
        most = max(1, int(WIDTH * LETTERS) // (max(map(len, handles)) + 6))
        named = {"ncols": min(len(handles), most), "fontsize": 9}
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", **named)


def save(figure: Figure, path: Path) -> None:
    """Write a figure to a PNG or SVG file, reproducibly."""
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
