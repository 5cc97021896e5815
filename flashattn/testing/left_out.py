"""pytest plugin: leave out tests that can never run on this machine; the header says which and why.

A test declares its needs by markers: ``gpu``, ``interpreter``, or ``why_not(function)``, whose
function takes some of the test's parameters and returns a reason or None.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from inspect import signature

import pytest

from flashattn import registry
from flashattn.testing.law import DEVICE, unasked

MARKERS = (
    "gpu: needs a CUDA GPU",
    "interpreter: needs kernels to be interpreted",
    "why_not(function): left out where the function of the test's parameters returns a reason",
)
LIMITS = {
    "strict": "ordinary inputs only",
    "grad": "no gradients",
    "lse": "no logsumexp",
    "repeats": "other bits every time",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the option."""
    parser.addoption(
        "--left-out",
        action="store_true",
        help="collect also what cannot run on this machine, as skipped tests with their reasons",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)


def header(names: Iterable[str]) -> list[str]:
    """Return a line for each implementation that is left out of some or all tests here."""
    lines = [] if DEVICE.type == "cuda" else ["left out: tests marked gpu: there is no CUDA GPU"]
    for impl in map(registry.get, names):
        limits = [said for need, said in LIMITS.items() if not getattr(impl, need)]
        why_not = never(impl.name)
        if why_not:
            lines.append(f"left out: {impl.name}: {why_not.removeprefix(f'{impl.name} ')}")
        elif limits or impl.compiles:
            limits += ["few shapes, as each is compiled"] * impl.compiles
            lines.append(f"asked less: {impl.name}: {', '.join(limits)}")
    return lines


@cache
def never(name: str) -> str | None:
    """Return why an implementation cannot run on this machine at all, or None."""
    return unasked(registry.get(name), DEVICE)


def _reason(item: pytest.Item) -> str | None:
    """Return why a test cannot run here, or None."""
    if item.get_closest_marker("gpu") and DEVICE.type != "cuda":
        return "needs a CUDA GPU"
    if item.get_closest_marker("interpreter") and DEVICE.type == "cuda":
        return "kernels are compiled here"
    params = dict(item.callspec.params) if hasattr(item, "callspec") else {}
    if "impl" in params and not item.name.startswith("bench_"):
        if never(params["impl"]):
            return never(params["impl"])
        params["impl"] = registry.get(params["impl"])
    for marker in item.iter_markers("why_not"):
        wanted = signature(marker.args[0]).parameters
        reason = marker.args[0](**{name: params[name] for name in wanted})
        if reason is not None:
            return reason
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that cannot run here."""
    if not config.option.left_out:
        items[:] = [item for item in items if _reason(item) is None]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """With ``--left-out``, skip a test that cannot run here."""
    if item.config.option.left_out and _reason(item) is not None:
        pytest.skip(_reason(item) or "")
