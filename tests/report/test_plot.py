"""What pictures share: ours stands out, lengths are plain numbers, and a file can be reproduced."""

from __future__ import annotations

import pytest

from flashattn.report import plot


@pytest.fixture
def axis():
    """One panel of a picture."""
    return plot.panels("title", 1, 1, height=3)[1][0][0]


def test_ours_stands_out(axis):
    """Our lines are thickest and on top; each has a colour, and points from left to right."""
    plot.curves(axis, {name: [(2, 2.0), (1, 1.0)] for name in plot.COLOURS})
    lines = {line.get_label(): line for line in axis.get_lines()}
    assert list(lines["sdpa"].get_xdata()) == list(lines["sdpa"].get_ydata()) == [1, 2]
    for ours in [lines.pop(name) for name in plot.KERNELS]:
        assert all(ours.get_linewidth() > line.get_linewidth() for line in lines.values())
        assert all(ours.get_zorder() > line.get_zorder() for line in lines.values())
    assert len(set(plot.COLOURS.values())) == len(plot.COLOURS)


def test_colour_stays_with_its_name():
    """A name has the same colour in every picture, also one that nobody knew."""
    assert plot.colour("sdpa") == plot.COLOURS["sdpa"]
    assert plot.colour("mine") == plot.colour("mine")
    assert plot.colour("mine") in plot.CYCLE


def test_lengths_are_plain_numbers(axis):
    """The axis of lengths is a logarithm of base two and is labelled 128, 1k, 64k."""
    plot.lengths(axis, [128, 1024, 65536, 1500])
    assert (axis.get_xscale(), axis.xaxis.get_transform().base) == ("log", 2)
    assert [text.get_text() for text in axis.get_xticklabels()] == ["128", "1k", "1500", "64k"]
    plot.lengths(axis, [2**e for e in range(30)])
    assert 5 <= len(axis.get_xticks()) <= 9  # so few that they can be read


def test_logarithmic_heights_are_plain_numbers(axis):
    """Powers of ten are written out."""
    axis.plot([1, 2], [0.01, 5000])
    plot.logarithmic(axis)
    axis.figure.draw_without_rendering()
    assert {"0.01", "1", "1000"} <= {text.get_text() for text in axis.get_yticklabels()}


@pytest.mark.parametrize(("suffix", "begin"), [(".svg", b"<?xml"), (".png", b"\x89PNG")])
def test_same_figure_makes_the_same_file(tmp_path, suffix, begin):
    """A picture is of the kind that its name asks for, and has neither date nor chance in it."""
    contents = []
    for name in ("a", "b"):
        figure, axes = plot.panels("title", 1, 1, height=3)
        plot.curves(axes[0][0], {"sdpa": [(1, 1.0), (2, 2.0)]})
        plot.legend(figure, axes)
        plot.save(figure, tmp_path / f"{name}{suffix}")
        contents.append((tmp_path / f"{name}{suffix}").read_bytes())
    assert contents[0].startswith(begin)
    assert contents[0] == contents[1]


def test_legend_names_each_colour_once():
    """A name that is in several panels is in the legend once."""
    figure, axes = plot.panels("title", 1, 2, height=3)
    for axis in axes[0]:
        plot.curves(axis, {"sdpa": [(1, 1.0)], "flex": [(1, 2.0)]})
    plot.legend(figure, axes)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["sdpa", "flex"]


def test_ranked_bars_go_down_from_the_first(axis):
    """Each place has one bar of its size, its name at the left, the first one on top."""
    plot.ranked(axis, ["one", "two"], [1.5, 1024.0])
    assert [bar.get_width() for bar in axis.patches] == [1.5, 1024.0]
    assert [text.get_text() for text in axis.get_yticklabels()] == ["one", "two"]
    assert axis.yaxis_inverted()
    assert [text.get_text() for text in axis.texts] == ["1.5", "1024"]


def test_a_legend_of_long_names_takes_fewer_columns(axis):
    """No name of a legend leaves the picture."""
    axis.plot([0, 1], [0, 1])
    for count, letters, columns in ((8, 4, 8), (8, 22, 3), (2, 200, 1)):
        for line in axis.get_lines():
            line.remove()
        for i in range(count):
            axis.plot([0, 1], [0, i], label=str(i) * letters)
        axis.figure.legends.clear()
        plot.legend(axis.figure, [[axis]])
        assert axis.figure.legends[0]._ncols == columns
