"""Which program of a kernel walks over which tiles, as a picture: docs/kernels.png.

    python -m flashattn.report.schedule docs/kernels.png

It repeats in plain Python what the kernels compute of a causal mask (T = S, square tiles); its test
holds it against the mask itself.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashattn.report.plot import CYCLE, heading, panels, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TILES = 8  # of queries and of keys in the picture
UNSEEN, EDGE = "#f3f3f3", "#ffffff"


@dataclass(frozen=True, kw_only=True)
class Program:
    """What one program does.

    Args:
        number: its place in the grid; a GPU starts the lower ones first.
        owned: the tile that it computes: of queries, or for dK and dV of keys.
        walked: the tiles of the other side that it loads, in their order.
        part: of the keys, where they are split.
    """

    number: int
    owned: int
    walked: Sequence[int]
    part: int = 0


def by_queries(tiles: int, parts: int = 1) -> list[Program]:
    """Return the programs of forward, and without parts those of dQ: the longest row first.

    Args:
        tiles: of queries and of keys.
        parts: to split the keys into, each of whole tiles.
    """
    chunk = -(-tiles // parts)
    return [
        Program(
            number=part * tiles + place,
            owned=(row := tiles - 1 - place),
            walked=range(part * chunk, min(row + 1, (part + 1) * chunk)),
            part=part,
        )
        for part in range(parts)
        for place in range(tiles)
    ]


def by_keys(tiles: int) -> list[Program]:
    """Return the programs of dK and dV: the first keys are seen by most queries."""
    return [Program(number=key, owned=key, walked=range(key, tiles)) for key in range(tiles)]


def draw() -> Figure:
    """Draw the four schedules, a square for each tile of scores."""
    title = "Which program computes which tiles of the scores, under a causal mask"
    figure, axes = panels(title, 2, 2, height=4.1)
    (forward, split), (dkdv, dq) = axes
    _panel(forward, "forward: o and lse", by_queries(TILES))
    _panel(split, "forward, keys split into 2 parts, then merged", by_queries(TILES, 2))
    _panel(dkdv, "backward: dK and dV", by_keys(TILES), columns=True)
    _panel(dq, "backward: dQ", by_queries(TILES))
    note = (
        "Numbers: programs, in the order in which they start; arrows: how each walks. "
        "Hatched: tiles on the diagonal,\nthe only ones that are masked. "
        "Grey: never loaded. P and dS of a tile are computed twice, for dK and dV and for dQ."
    )
    figure.supxlabel(note, fontsize=9)
    return figure


def _panel(axis: Axes, title: str, programs: Sequence[Program], *, columns: bool = False) -> None:
    """Draw the tiles that are computed, each program's walk and its number."""
    from matplotlib.patches import Rectangle  # noqa: PLC0415 - a second to import, to draw only

    axis.add_patch(Rectangle((0, 0), TILES, TILES, color=UNSEEN))
    for program in programs:
        colour = CYCLE[program.part]
        for other in program.walked:
            x, y = (program.owned, other) if columns else (other, program.owned)
            hatch = "////" if x == y else None
            look: Any = {"facecolor": colour, "alpha": 0.35, "edgecolor": EDGE, "hatch": hatch}
            axis.add_patch(Rectangle((x, y), 1, 1, linewidth=1.5, **look))
        if program.walked:
            _walk(axis, program, colour, columns=columns)
    axis.set(xlim=(0, TILES), ylim=(TILES, 0), aspect="equal")
    ticks = [i + 0.5 for i in range(TILES)]
    axis.set_xticks(ticks, [str(i) for i in range(TILES)])
    axis.set_yticks(ticks, [str(i) for i in range(TILES)])
    axis.tick_params(length=0)
    axis.grid(visible=False)
    axis.set_xlabel("tile of keys")
    axis.set_ylabel("tile of queries")
    heading(axis, title)


def _walk(axis: Axes, program: Program, colour: str, *, columns: bool) -> None:
    """Draw an arrow from the first tile to the last one, and the number of the program."""
    start, end = program.walked[0] + 0.62, program.walked[-1] + 0.88
    owned = program.owned + 0.5
    first, last = ((owned, start), (owned, end)) if columns else ((start, owned), (end, owned))
    arrow = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
    axis.annotate("", xy=last, xytext=first, arrowprops=arrow)
    place = program.walked[0] + 0.3
    x, y = (owned, place) if columns else (place, owned)
    axis.text(x, y, str(program.number), ha="center", va="center", fontsize=9, weight="bold")


def main(arguments: Sequence[str]) -> None:
    """Draw into the file that is named."""
    (path,) = arguments
    save(draw(), Path(path))


if __name__ == "__main__":
    main(sys.argv[1:])
