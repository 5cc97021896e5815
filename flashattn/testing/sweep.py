"""Sweeps of ``pytest benchmarks``: grids of points, and a plugin that selects and orders them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SWEEPS = ("smoke", "default", "full")
UNEQUAL = (64, 500, 3000, 1200, 2500, 900, 1800, 300, 2600, 1120, 2400)  # documents, 16384 tokens
IN_ANY_ORDER = "_any_order"  # suffix of benchmarks whose sums have no fixed order
COLLECTED = pytest.StashKey[set[str]]()  # names of all cases of this session


@dataclass(frozen=True)
class Point:
    """A point of a grid: its coordinates are attributes, and its string is a test id."""

    facts: tuple[tuple[str, Any], ...]  # coordinate by axis, in the order of the axes

    def __getattr__(self, axis: str) -> Any:
        """Return the coordinate on ``axis``."""
        for name, value in object.__getattribute__(self, "facts"):
            if name == axis:
                return value
        raise AttributeError(axis)

    def __str__(self) -> str:
        """Return the words for each coordinate; one that is False has none."""
        return "-".join(word for name, value in self.facts if (word := _word(name, value)))

    def replace(self, **changed: Any) -> Point:
        """Return the point with other coordinates on some of its axes."""
        return Point(tuple((name, changed.get(name, value)) for name, value in self.facts))


def _word(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name if value else ""
    return value if isinstance(value, str) else f"{name}{value}"


def grid(**axes: list[Any]) -> list[Point]:
    """Return every combination of the axes' values; the last axis changes fastest."""
    names = tuple(axes)
    return [Point(tuple(zip(names, values, strict=True))) for values in product(*axes.values())]


def _part(text: str) -> tuple[int, int]:
    """Return I and N of ``"I/N"``.

    Raises:
        argparse.ArgumentTypeError: the text has another form, or I is not one of 1 ... N.
    """
    index, slash, parts = text.partition("/")
    if not (slash and index.isdecimal() and parts.isdecimal() and 1 <= int(index) <= int(parts)):
        raise argparse.ArgumentTypeError(f"wanted I/N with I from 1 to N, as in 1/8, got {text!r}")
    return int(index), int(parts)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options that select what is measured."""
    parser.addoption(
        "--part",
        type=_part,
        metavar="I/N",
        help="the I-th of N parts of the sweep, as for an array of jobs",
    )
    parser.addoption(
        "--sweep",
        choices=SWEEPS,
        help="how much to measure (default: smoke on a CPU, else default)",
    )


def sweep_name(config: pytest.Config) -> str:
    """Return the requested sweep, or the default of this machine."""
    return config.getoption("--sweep") or ("smoke" if DEVICE.type == "cpu" else "default")


def part_suffix(config: pytest.Config) -> str:
    """Return the suffix for the files of a part."""
    part = config.getoption("--part")
    return "-part{}of{}".format(*part) if part else ""


def study_and_name(item: pytest.Item) -> tuple[str, str]:
    """Return the study of a case and its name in it."""
    return item.path.stem.removeprefix("bench_"), item.name.removeprefix("bench_")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each benchmark on every case of its module's sweep."""
    name = next((name for name in ("case", "problem") if name in metafunc.fixturenames), None)
    if name is None or not metafunc.module.__name__.rpartition(".")[2].startswith("bench_"):
        return
    swept = metafunc.module.SWEEPS[sweep_name(metafunc.config)]
    if isinstance(swept, dict):  # by benchmark
        swept = swept[metafunc.function.__name__]
    metafunc.parametrize(name, _for_impls(swept, metafunc.config), ids=str)


def _for_impls(swept: list[Any], config: pytest.Config) -> list[Any]:
    """With --impl, replace the implementations of a sweep by the chosen ones.

    If all of these are a user's own, those of the sweep stay for comparison.
    """
    chosen = config.getoption("--impl")
    if not chosen or not all(hasattr(case, "impl") for case in swept):
        return swept
    asked = [case.replace(impl=name) for case in swept for name in chosen]
    return list(dict.fromkeys([*asked, *(swept if config.option.impl_peers else ())]))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put implementations of one case side by side, so that a clock drift hits them alike."""
    config.stash[COLLECTED] = {item.nodeid for item in items}
    ours = [item for item in items if _is_bench(item) and hasattr(item, "callspec")]
    place: dict[tuple[str, ...], int] = {}
    for item in ours:
        place.setdefault(group(item), len(place))
    ours.sort(key=lambda item: place[group(item)])
    part = config.getoption("--part")
    if part:
        kept, parts = part
        others = {item for item in ours if place[group(item)] % parts != kept - 1}
        config.hook.pytest_deselected(items=list(others))
        ours = [item for item in ours if item not in others]
    items[:] = [item for item in items if not _is_bench(item)] + ours


def _is_bench(item: pytest.Item) -> bool:
    return item.path.name.startswith("bench_")


def group(item: pytest.Item) -> tuple[str, ...]:
    """Return the key that items measured side by side have in common."""
    params = item.callspec.params  # type: ignore[attr-defined]
    case = params.get("case", params.get("problem", item.callspec.id))  # type: ignore[attr-defined]
    facts = getattr(case, "facts", ())
    beside = ("impl", "attention", "step", "compiled")
    shared = [f"{name}={value}" for name, value in facts if name not in beside]
    name = item.originalname.removesuffix(IN_ANY_ORDER)  # type: ignore[attr-defined]
    return (str(item.path), name, *(shared or [str(case)]))
