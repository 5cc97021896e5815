"""Points of a grid, and their names."""

import runpy
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from flashattn.testing.sweep import grid, group

BENCHMARKS = sorted((Path(__file__).parents[1] / "benchmarks").glob("bench_*.py"))


def test_a_grid_has_every_combination_in_order():
    """The last axis changes fastest, so that what is declared last is measured side by side."""
    points = grid(size=["a", "b"], context=[1, 2], impl=["x", "y"])
    assert [(p.size, p.context, p.impl) for p in points[:3]] == [
        ("a", 1, "x"),
        ("a", 1, "y"),
        ("a", 2, "x"),
    ]
    assert len(set(points)) == len(set(map(str, points))) == 8


def test_a_name_says_what_holds():
    """A name has numbers with their axis, and a flag by its axis alone, only where it is true."""
    eager, compiled = grid(size=["small"], context=[128], compiled=[False, True])
    assert str(eager) == "small-context128"
    assert str(compiled) == "small-context128-compiled"


def test_a_point_can_be_changed():
    """A changed point differs on the axes named and on no other."""
    (point,) = grid(size=["small"], impl=["triton"])
    assert dict(point.replace(impl="mine").facts) == {"size": "small", "impl": "mine"}
    with pytest.raises(AttributeError, match="context"):
        point.context  # noqa: B018 - asking is the point


def test_both_orders_of_sums_stay_together():
    """The backward in any order is measured in one group with its problem's other backwards."""

    def item(name, problem):
        callspec = SimpleNamespace(params={"problem": problem, "impl": "hopper"}, id=problem)
        return SimpleNamespace(path=Path("bench_flash.py"), originalname=name, callspec=callspec)

    names = ("bench_backward", "bench_backward_any_order", "bench_forward_backward")
    backward, any_order, both = (group(item(name, "one")) for name in names)
    assert backward == any_order != both
    assert backward != group(item("bench_backward", "two"))


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_no_case_is_swept_twice(path):
    """A benchmark's cases in one sweep differ by name, so that a row is one measurement."""
    for swept in runpy.run_path(str(path)).get("SWEEPS", {}).values():
        for cases in swept.values() if isinstance(swept, dict) else [swept]:
            assert max(Counter(map(str, cases)).values(), default=1) == 1
