"""All pictures: ours stands out, lengths are plain numbers, and each fits its width."""

import re
import runpy
import sys

import pytest

from flashattn.report import plot

X, Y = plot.lengths([1, 2, 4]), plot.quantity("y", "ms")
GROUNDS = ("#ffffff", "#14171c")  # of the page, light and dark
CONTRAST = 3  # of lines and fields with the background: WCAG 2.1, 1.4.11


def points(*names, panels=("",), **facts):
    """Return two points for each name in each panel."""
    return [
        {"panel": panel, "name": name, "x": x, "y": 10.0 * x} | facts
        for panel in panels
        for name in names
        for x in (1, 4)
    ]


def luminance(colour):
    """Return the relative luminance of a colour such as #14171c."""
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return sum(part * weight for part, weight in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))


def drawn(made, tmp_path):
    """Return a picture as SVG text."""
    plot.save(made, tmp_path / "a.svg")
    return (tmp_path / "a.svg").read_text()


def test_colours_can_be_seen_on_both_grounds():
    """Every colour has enough contrast with the page, whether that is light or dark."""
    for colour in {*plot.COLOURS.values(), *plot.CYCLE}:
        for ground in GROUNDS:
            low, high = sorted(map(luminance, (colour, ground)))
            assert (high + 0.05) / (low + 0.05) >= CONTRAST, (colour, ground)


def test_colour_stays_with_its_name():
    """A name has the same colour in every picture, even if the name is unknown."""
    assert plot.colour("sdpa") == plot.COLOURS["sdpa"]
    assert plot.colour("mine") == plot.CYCLE[1]  # in every process
    alone = [plot.COLOURS[name] for name in plot.COLOURS if name != plot.BEST]
    assert len(set(alone)) == len(alone)


def test_ours_stands_out(tmp_path):
    """Our line is thicker, is drawn last, and comes first in the legend."""
    made = plot.lines("title", points("hopper", "sdpa"), X, Y)
    assert [record["name"] for record in made["data"]["values"]] == ["sdpa"] * 2 + ["hopper"] * 2
    text = drawn(made, tmp_path)
    found = re.findall(r'stroke="(#\w+)" stroke-width="([\d.]+)"', text)
    thick, thin = (
        max(float(width) for colour, width in found if colour == plot.COLOURS[name])
        for name in ("hopper", "sdpa")
    )
    assert thick > 1.5 * thin
    assert made["spec"]["layer"][0]["encoding"]["color"]["scale"]["domain"] == ["hopper", "sdpa"]


def test_lengths_are_plain_numbers(tmp_path):
    """The axis of lengths is logarithmic in base two, and is labelled 128, 1k, 64k."""
    records = [{"panel": "", "name": "sdpa", "x": n, "y": 1.0} for n in (128, 1024, 65536)]
    text = drawn(plot.lines("title", records, plot.lengths([128, 1024, 65536]), Y), tmp_path)
    assert all(f">{label}</text>" in text for label in ("128", "1k", "64k"))
    few = plot.lengths([2**e for e in range(30)])["axis"]["values"]
    assert 5 <= len(few) <= plot.FEW  # few enough to be read


def test_a_picture_fits_its_width(tmp_path):
    """Panels are side by side where there is room, and otherwise below one another."""
    made = plot.lines("t", points("sdpa", panels="abcd"), X, Y, columns=4, least=150)
    found = {width: plot.fitted(made, width) for width in (900, 500, 358)}
    assert [fit["columns"] for fit in found.values()] == [4, 2, 1]
    for width, fit in found.items():
        across = fit["columns"] * (fit["spec"]["width"] + plot.GAP) - plot.GAP + plot.AXIS
        assert width - fit["columns"] < across <= width
    size = re.search(r'width="(\d+)" height="(\d+)"', drawn(made, tmp_path))
    assert 0.95 * plot.WIDTH < int(size[1]) <= 1.02 * plot.WIDTH


def test_names_beside_bars_have_room():
    """The longest name decides where bars begin, up to half of the picture."""
    bar = {"panel": "", "value": 1.0, "said": "1 ms", "ours": False}
    for name, room in (("ab", 900), ("a" * 200, 900 * (1 - plot.WIDEST))):
        made = plot.bars("title", [bar | {"place": name}])
        assert 0.9 * room < plot.fitted(made, 900)["spec"]["width"] <= room


def test_legend_names_each_colour_once(tmp_path):
    """A name that is in several panels is in the legend once, and a click singles it out."""
    made = plot.lines("title", points("sdpa", "flex", panels="ab"), X, Y)
    text = drawn(made, tmp_path)
    assert text.count(">sdpa</text>") == text.count(">flex</text>") == 1
    (pick,) = made["spec"]["layer"][0]["params"]
    assert pick["bind"] == "legend"
    long = plot.lines("title", points("x" * 200, "y"), X, Y)
    assert plot.fitted(long, 900)["config"]["legend"]["columns"] == 1


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"kind": "reference", "label": "roof"}, ">roof</text>"),
        ({"kind": "missing", "label": "OOM"}, ">OOM</text>"),
        ({"hollow": True}, "Hollow points"),
    ],
)
def test_special_records_are_told(tmp_path, facts, said):
    """A reference line and a missing point are named, a hollow point is explained."""
    made = plot.lines("title", [*points("sdpa"), *points("flex", **facts)], X, Y)
    assert said in drawn(made, tmp_path)
    assert said not in drawn(plot.lines("title", points("sdpa"), X, Y), tmp_path)


@pytest.mark.parametrize(("suffix", "begin"), [(".svg", b"<svg"), (".png", b"\x89PNG")])
def test_same_picture_makes_the_same_file(tmp_path, suffix, begin):
    """A picture has the format that its name asks for, and is the same in every run."""
    contents = []
    for name in ("a", "b"):
        plot.save(plot.lines("title", points("sdpa"), X, Y), tmp_path / f"{name}{suffix}")
        contents.append((tmp_path / f"{name}{suffix}").read_bytes())
    assert contents[0].startswith(begin)
    assert contents[0] == contents[1]


def test_only_drawing_needs_what_draws(monkeypatch, tmp_path):
    """Pictures are described without the plotting library, which takes a second to start."""
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    fresh = runpy.run_path(plot.__file__)
    made = fresh["lines"]("title", points("sdpa"), X, Y)
    with pytest.raises(ImportError, match="vl_convert"):
        fresh["save"](made, tmp_path / "a.svg")
