"""Who works when in a program of the Hopper forward kernel, as a picture: docs/hopper.png.

    python -m flashattn.report.roles docs/hopper.png

A model, and no measurement: clocks that the work of a tile takes where nothing else is in its way,
at D = 128, and the order in which the kernel asks for it. What a warpgroup waits for, and what
overlaps what, follows from that.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashattn.report.plot import CYCLE, heading, panels, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Clocks of one warpgroup, 64 queries, and 128 keys: a product is 64 x 128 x 128 at 2048
# multiply-adds a clock; 64 x 128 exponentials at 16 a clock, and as many other instructions again.
PRODUCT, SOFTMAX = 512, 760
LOADED = 350  # clocks until a tile of 32 KiB is there
STEPS = 4
TENSOR, LOADS = "tensor cores", "loading warp"


@dataclass(frozen=True)
class Span:
    """Somebody's work.

    Args:
        who: the line of the picture.
        what: the label.
        group: the warpgroup that it is for.
        start: clock.
        end: clock.
    """

    who: str
    what: str
    group: int
    start: float
    end: float


def softmax_of(group: int) -> str:
    """Return the name of a warpgroup's line."""
    return f"warpgroup {group}: softmax"


def schedule(steps: int, groups: int = 2, *, overlapped: bool = True) -> list[Span]:
    """Return the work of a tile of queries, as the kernel asks for it.

    Args:
        steps: tiles of keys.
        groups: warpgroups, which share the tensor cores; these serve who asks first.
        overlapped: whether the scores of the next tile are asked for before P is multiplied with V;
            otherwise each product waits for the one before.
    """
    spans: list[Span] = []
    free = 0.0  # the tensor cores
    ready = {group: (0, "S", float(LOADED)) for group in range(groups)}  # step, product, asked at

    def multiply(group: int, what: str, asked: float) -> float:
        nonlocal free
        start = max(free, asked)
        free = start + PRODUCT
        spans.append(Span(TENSOR, what, group, start, free))
        return free

    def soften(group: int, step: int, start: float) -> float:
        end = start + SOFTMAX
        spans.append(Span(softmax_of(group), f"P{step}", group, start, end))
        return end

    while ready:
        group = min(ready, key=lambda one: (ready[one][2], one))
        step, what, asked = ready.pop(group)
        if what == "S":  # the first scores, under nothing
            scores = multiply(group, "S0", asked)
            ready[group] = (0, "PV", soften(group, 0, scores))
            continue
        if overlapped and step + 1 < steps:
            scores = multiply(group, f"S{step + 1}", asked)
            product = multiply(group, f"P{step}V", asked)
            weights = soften(group, step + 1, scores)
            ready[group] = (step + 1, "PV", max(product, weights))
            continue
        product = multiply(group, f"P{step}V", asked)
        if step + 1 < steps:
            scores = multiply(group, f"S{step + 1}", product)
            ready[group] = (step + 1, "PV", soften(group, step + 1, scores))
    return spans + _loads(spans, steps)


def _loads(spans: Sequence[Span], steps: int) -> list[Span]:
    """Return when tiles come: two of keys and of values fit, so others wait until they are read."""
    last = max(span.group for span in spans)
    done = {span.what: span.end for span in spans if span.who == TENSOR and span.group == last}
    found, now = [], 0.0
    for step in range(steps):
        for name, reader in (("K", f"S{step - 2}"), ("V", f"P{step - 2}V")):
            start = max(now, done.get(reader, 0.0))
            now = start + LOADED
            found.append(Span(LOADS, f"{name}{step}", -1, start, now))
    return found


def end(spans: Sequence[Span]) -> float:
    """Return the clock at which all is done."""
    return max(span.end for span in spans)


def draw() -> Figure:
    """Draw two warpgroups with the overlap, and one without, on one scale."""
    both = {
        "as it is, two that ask for the next scores before P V": schedule(STEPS),
        "one alone, which asks for one product at a time": schedule(STEPS, 1, overlapped=False),
    }
    title = "Who works when: warpgroups of 64 queries, 4 tiles of 128 keys, D = 128 (a model)"
    figure, axes = panels(title, 2, 1, height=2.3, sharex=True)
    lines = [LOADS, TENSOR, softmax_of(0), softmax_of(1)]
    for (axis,), (name, spans) in zip(axes, both.items(), strict=True):
        for span in spans:
            look: Any = {"facecolor": "#cfcfcf" if span.group < 0 else CYCLE[span.group]}
            y = lines.index(span.who)
            box = [(span.start, span.end - span.start)]
            axis.broken_barh(box, (y - 0.4, 0.8), edgecolor="white", alpha=0.75, **look)
            axis.text(
                (span.start + span.end) / 2, y, span.what, ha="center", va="center", fontsize=8
            )
        busy = sum(s.end - s.start for s in spans if s.who == TENSOR) / end(spans)
        axis.set_yticks(range(len(lines)), lines)
        axis.set_ylim(len(lines) - 0.5, -0.5)
        axis.grid(visible=False)
        heading(axis, f"{name}: {end(spans):.0f} clocks, tensor cores busy {busy:.0%}")
    axes[-1][0].set_xlabel("clock")
    return figure


def main(arguments: Sequence[str]) -> None:
    """Draw into the file that is named."""
    (path,) = arguments
    save(draw(), Path(path))


if __name__ == "__main__":
    main(sys.argv[1:])
