"""Plots as Vega-Lite specifications: small multiples of lines, bars, dots and rectangles.

A picture is a dict. The page draws it in the browser; ``save`` draws it as SVG or PNG. Its data are
records: dicts with the ``panel`` they belong to and the fields that a mark shows.
"""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

from flashattn.report.rows import ANY_ORDER, KERNELS, NAIVE, OURS
from flashattn.report.units import UNSTEADY

Picture = dict[str, Any]
Record = dict[str, Any]
Channel = dict[str, Any]

WIDTH = 900  # pixels of a saved picture; a PNG has twice as many
AXIS, GAP, LETTER = 74, 24, 7  # pixels: y axis, gap between panels, a letter of a name
SWATCH = 4  # width of a legend's symbol and gap, in letters
WIDEST = 0.45  # largest share of a picture's width for the names left of its panels
FEW = 6  # labels that fit side by side on an axis
# Each colour has a contrast ratio of 3 with the page in the light and the dark theme.
CYCLE = (
    *("#2f7bea", "#c96a12", "#17917f", "#9a5ce0", "#a98208"),
    *("#e03c4b", "#857c76", "#0c8fbd", "#cf5c9f", "#5c9210"),
)
# Colour-blind readers can tell apart implementations that share a plot.
COLOURS = {OURS: CYCLE[0], "compiled": CYCLE[1], "sdpa_flash": CYCLE[2], "tiled": CYCLE[3]}
COLOURS |= {"flex": CYCLE[4], NAIVE: CYCLE[5], "reference": CYCLE[6], "flash_attn_2": CYCLE[7]}
COLOURS |= {"sdpa_efficient": CYCLE[8], "sdpa_cudnn": CYCLE[9], "hopper": "#f0267f"}
COLOURS |= {"sdpa": "#6b7a90", "sdpa_math": "#a9714b", "flash_attn_3": "#b0487d"}
COLOURS |= {"flash_attn_4": "#c4513f", ANY_ORDER: "#8a4fd0"}
BEST = "ours"  # the faster of our kernels
BOLD = (*KERNELS, BEST)
COLOURS[BEST] = COLOURS["hopper"]
HOLLOW = f"Hollow points: quartiles further apart than {UNSTEADY:.0%} of the median"
FADED: Channel = {"condition": {"param": "picked", "value": 1}, "value": 0.08}
GREY: Channel = {"color": {"value": "#808a97"}, "opacity": {"value": 1}}
TEXT: Picture = {"type": "text", "fontSize": 10.5, "baseline": "middle"}
CROSS: Picture = {"type": "point", "shape": "cross", "angle": 45, "size": 70, "filled": True}
POINT: Picture = {"type": "point", "size": 34, "filled": True}
MAJOR: Channel = {"condition": {"test": "datum.label", "value": 1}, "value": 0.35}
DASHED: Picture = {"type": "line", "strokeDash": [5, 4], "strokeWidth": 1.3}


def theme(ink: str, faint: str, line: str) -> Picture:
    """Return the Vega configuration for the colours of text, of axis labels and of grid lines."""
    axis = {"gridColor": line, "domainColor": faint, "tickColor": faint, "labelColor": faint}
    return {
        "background": None,
        "font": "sans-serif",
        "view": {"stroke": None},
        "axis": {**axis, "titleColor": faint, "titleFontWeight": "normal", "labelFontSize": 11},
        "axisY": {"domain": False, "ticks": False},
        "header": {"labelColor": ink, "labelFontWeight": "bold", "labelAnchor": "start"},
        "legend": {
            "labelColor": ink,
            "labelFontSize": 11.5,
            "orient": "bottom",
            "title": None,
            "symbolSize": 60,
        },
        "title": {"color": ink, "subtitleColor": faint, "anchor": "start", "offset": 12},
        "text": {"color": ink},
        "rule": {"color": faint},
    }


LIGHT = theme("#1c2026", "#5b6470", "#e3e7ec") | {"background": "#ffffff"}
# For the page's script: sizes, and the theme with CSS properties in place of colours.
SETUP: Picture = {"theme": json.dumps(theme("--ink", "--faint", "--line"))}
SETUP |= {"widest": WIDEST, "letter": LETTER, "swatch": SWATCH}


def colour(name: str) -> str:
    """Return the colour of an implementation; other names get a fixed colour from their hash."""
    return COLOURS.get(name) or CYCLE[crc32(name.encode()) % len(CYCLE)]


def exact(value: float) -> float:
    """Return a number rounded to five digits, as tooltips show it."""
    return float(f"{value:.5g}")


def picture(
    title: str,
    records: Sequence[Record],
    layers: Sequence[Picture],
    *,
    columns: int = 1,
    height: Any = 190,
    least: int = 150,
    note: str = "",
) -> Picture:
    """Return a grid of panels, one for each ``panel`` among the records.

    At most ``columns`` panels stand side by side; fewer if they would be narrower than ``least``
    pixels. The title is also the alternative text; ``note`` is a subtitle.
    """
    panels = list(dict.fromkeys(str(record["panel"]) for record in records))
    header: Picture = {} if any(panels) else {"labels": False, "labelPadding": 0}
    return {
        "title": {"text": title} | ({"subtitle": note} if note else {}),
        "description": title,
        "data": {"values": list(records)},
        "facet": {"field": "panel", "type": "nominal", "sort": panels, "title": None}
        | {"header": header},
        "columns": columns,
        "spacing": GAP,
        "spec": {"height": height, "layer": list(layers)},
        # Read by ``fitted``, here and in the page's script.
        "usermeta": {
            "columns": min(columns, len(panels)),
            "least": least,
            "left": AXIS,  # pixels left of the first panel
            "letters": 0,  # in the longest name in the legend
        },
    }


def fitted(made: Picture, width: int) -> Picture:
    """Return a picture that is ``width`` pixels wide, in light colours."""
    facts = made["usermeta"]
    left = min(facts["left"], int(WIDEST * width))

    def panel(columns: int) -> int:
        return int(width - left - GAP * (columns - 1)) // columns

    columns = facts["columns"]
    while columns > 1 and panel(columns) < facts["least"]:
        columns -= 1
    across = max(1, int(width / LETTER) // (facts["letters"] + SWATCH))
    config = LIGHT | {"legend": LIGHT["legend"] | {"columns": across}}
    config |= {"axisYBand": {"labelLimit": left - 8}}
    config |= {"header": LIGHT["header"] | {"labelLimit": panel(columns) + GAP // 2}}
    spec = made["spec"] | {"width": panel(columns)}
    return made | {"columns": columns, "spec": spec, "config": config}


def named(made: Picture, names: Sequence[str], colours: Sequence[str] = ()) -> Picture:
    """Add a legend of the records' names to a picture; a click on a name highlights it.

    The default colours are those of the implementations.
    """
    if not COLOURS.keys() & set(names):
        colours = colours or [CYCLE[i % len(CYCLE)] for i in range(len(names))]
    scale = {"domain": list(names), "range": list(colours) or [colour(name) for name in names]}
    hue = {"field": "name", "type": "nominal", "scale": scale, "legend": {"labelLimit": 0}}
    pick = {"type": "point", "fields": ["name"], "toggle": "true"}
    first, *rest = (
        layer | {"encoding": {"color": hue, "opacity": FADED} | layer["encoding"]}
        for layer in made["spec"]["layer"]
    )
    first["params"] = [{"name": "picked", "select": pick, "bind": "legend"}]
    spec = made["spec"] | {"layer": [first, *rest]}
    letters = max(map(len, names), default=0)
    return made | {"spec": spec, "usermeta": made["usermeta"] | {"letters": letters}}


def layer(mark: Any, test: str = "", **encoding: Any) -> Picture:
    """Return a mark, given by its type or its properties, with its channels.

    The mark shows the records that pass ``test``, a Vega expression of ``datum``; "" shows all.
    """
    kept = {"transform": [{"filter": test}]} if test else {}
    return kept | {"mark": mark, "encoding": encoding}


def tips(*fields: str, **titles: str) -> list[Channel]:
    """Return a tooltip that shows fields under their own names, and others under a title."""
    found = {field: field for field in fields} | titles
    return [{"field": field, "title": title} for field, title in found.items()]


def quantity(field: str, title: str, *, log: bool = False, zero: bool = False) -> Channel:
    """Return a numeric axis with decimal labels: logarithmic, or linear, with or without 0."""
    scale: Channel = {"type": "log"} if log else {"zero": zero}
    axis: Channel = {"format": ",~r", "tickCount": 5, "gridOpacity": MAJOR}
    common = {"field": field, "type": "quantitative", "title": title}
    return common | {"scale": scale, "axis": axis}


def lengths(counts: Iterable[int], title: str = "N", *, most: int = FEW) -> Channel:
    """Return a base-2 logarithmic x axis with at most ``most`` labels, such as 512, 1k, 64k."""
    few = sorted(set(counts))
    few = few[:: len(few) // most + 1]
    name = "datum.value % 1024 ? format(datum.value, 'd') : format(datum.value / 1024, 'd') + 'k'"
    axis = {"values": few, "labelExpr": name, "labelOverlap": True}
    scale = {"type": "log", "base": 2, "nice": False, "padding": 6}
    common = {"field": "x", "type": "quantitative", "title": title}
    return common | {"scale": scale, "axis": axis}


def lines(
    title: str,
    records: Sequence[Record],
    x: Channel,
    y: Channel,
    *,
    dots: bool = True,
    tell: Sequence[str] = (),
    **look: Any,
) -> Picture:
    """Return a picture with a line for each name; our lines are thicker and on top.

    A record has ``panel``, ``name``, ``x`` and ``y``. ``hollow`` marks an unreliable point. A
    ``kind`` is "reference" for a dashed line with a ``label`` at one point, or "missing" for a
    cross with a ``label``. The tooltip also shows the fields in ``tell``. ``look`` has options of
    ``picture``.
    """
    panels = [*dict.fromkeys(record["panel"] for record in records)]
    ranked = sorted(  # ours are drawn last
        records, key=lambda record: (panels.index(record["panel"]), record["name"] in BOLD)
    )
    shown = [record for record in ranked if record.get("kind") != "reference"]
    names = sorted(dict.fromkeys(r["name"] for r in shown), key=lambda name: name not in BOLD)
    told = {"x": x, "y": y, "tooltip": tips("name", x=x["title"], y=y["title"]) + tips(*tell)}
    wide = {"test": f"indexof({list(BOLD)}, datum.name) >= 0", "value": 3}
    label: Any = {"x": x, "y": y, "text": {"field": "label"}}
    layers = [layer("line", "!datum.kind", x=x, y=y, strokeWidth={"condition": wide, "value": 1.6})]
    kinds = {record.get("kind") for record in records}
    if "reference" in kinds:
        test = "datum.kind == 'reference'"
        layers += [
            layer(DASHED, test, x=x, y=y, **GREY, detail={"field": "name"}),
            layer(TEXT | {"align": "right", "dy": 9}, f"{test} && datum.label", **label, **GREY),
        ]
    if "missing" in kinds:
        test = "datum.kind == 'missing'"
        layers += [layer(CROSS, test, **told)]
        layers += [layer(TEXT | {"align": "right", "dx": -8}, test, **label)]
    if dots:
        layers.append(layer(POINT, "!datum.kind && !datum.hollow", **told))
    if any(record.get("hollow") for record in records):
        look.setdefault("note", HOLLOW)
        layers.append(layer(POINT | {"filled": False}, "!datum.kind && datum.hollow", **told))
    return named(picture(title, ranked, layers, **look), names)


def bars(title: str, records: Sequence[Record], **look: Any) -> Picture:
    """Return a picture with a bar for each place, its value at the end and ours in colour.

    A record has ``panel``, ``place``, ``value``, ``said`` (the value with its unit) and ``ours``.
    The longest bar of each panel has the same length. ``look`` has options of ``picture``.
    """
    most: dict[str, float] = {}
    for record in records:
        most[record["panel"]] = max(record["value"], most.get(record["panel"], 0))
    scaled = [r | {"part": exact(r["value"] / (most[r["panel"]] or 1))} for r in records]
    room = {"domain": [0, 1.25]}  # leaves room for the value
    x: Channel = {"field": "part", "type": "quantitative", "axis": None, "scale": room}
    y: Channel = {"field": "place", "type": "nominal", "sort": None, "title": None}
    hue = {"condition": {"test": "datum.ours", "value": COLOURS[OURS]}, "value": COLOURS["sdpa"]}
    layers = [
        layer("bar", x=x, y=y, color=hue, tooltip=tips(place="case", said="value")),
        layer(TEXT | {"align": "left", "dx": 4}, x=x, y=y, text={"field": "said"}),
    ]
    made = picture(title, scaled, layers, height={"step": 17}, **look)
    return beside(made, [record["place"] for record in records])


def shown(name: str, made: Picture) -> dict[str, Picture]:
    """Return a dict with a picture by its file name, empty if the picture shows nothing."""
    return {name: made} if made["data"]["values"] else {}


def beside(made: Picture, places: Iterable[str]) -> Picture:
    """Return a picture with room for the names left of its panels."""
    left = int(LETTER * max(map(len, places), default=0)) + 12
    return made | {"usermeta": made["usermeta"] | {"left": left}}


def drawer() -> Any:
    """Return the library that draws pictures, which nothing else needs."""
    import vl_convert  # noqa: PLC0415 - takes a second to start

    return vl_convert


@cache
def library() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script, compressed, in base64."""
    script = str(drawer().javascript_bundle()).encode()
    return b64encode(gzip.compress(script, mtime=0)).decode()


def save(made: Picture, path: Path) -> None:
    """Draw a picture reproducibly to a path that ends in ``.svg`` or ``.png``; see ``drawer``."""
    svg = drawer().vegalite_to_svg(fitted(made, WIDTH))
    data = svg.encode() if path.suffix == ".svg" else drawer().svg_to_png(svg, scale=2)
    path.write_bytes(data)
