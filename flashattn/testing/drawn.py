"""pytest plugin: on a GPU, a run in workers draws by its seed what it tests, to compile less.

It tests half of the largest grids, and one family of our kernels for each law. A few runs with
different seeds test everything, and so does one run with ``--every-tile``. Nothing is left out in
one process or with ``--impl``.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from flashattn.testing.seed import chance

ON_GPU = torch.cuda.is_available()
FAMILIES = ("triton", "hopper")  # of our kernels
Value = tuple[str, ...] | None


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the option for tests that take minutes on a GPU."""
    parser.addoption(
        "--every-tile",
        action="store_true",
        help="on a GPU: all that other runs draw from, and every tile with every dtype, width, "
        "mask, alignment and kind of length",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker; refuse ``--every-tile`` without a GPU, where its tests are skipped."""
    config.addinivalue_line(
        "markers", "drawn(*names): a run draws half of the values of these parameters on a GPU"
    )
    if config.getoption("--every-tile") and not ON_GPU:
        raise pytest.UsageError(
            "--every-tile: wanted a CUDA GPU, got none; without one all tiles are compiled by "
            "python -m flashattn.counts compiled"
        )


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Report that tests are left out."""
    said = "half of the largest grids are tested, drawn by the seed; --every-tile tests all"
    return [said] * bool(_draws(config) and config.getoption("numprocesses", None))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep half of the values of ``drawn`` parameters, and one of our families for each law."""
    if not _draws(config) or not hasattr(config, "workerinput"):
        return
    drawn = [(item, item.nodeid.partition("[")[0], _value(item)) for item in items]
    values = defaultdict[str, set[Value]](set)
    for _, test, value in drawn:
        values[test].add(value)
    kept: dict[str, set[Value]] = {}
    for test, found in values.items():
        options = sorted(value for value in found if value is not None)
        kept[test] = {None, *chance("drawn", test).sample(options, -(-len(options) // 2))}
    items[:] = [item for item, test, value in drawn if value in kept[test]]


def _draws(config: pytest.Config) -> bool:
    return ON_GPU and not config.getoption("--every-tile") and not config.option.impl


def _value(item: pytest.Item) -> Value:
    """Return the value that a draw keeps or leaves out, or None if it always keeps the test."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    names = [name for mark in item.iter_markers("drawn") for name in mark.args]
    if names:
        return tuple(str(params[name]) for name in names)
    is_law = hasattr(getattr(item, "obj", None), "is_law")
    return (params["impl"],) if is_law and params["impl"] in FAMILIES else None
