"""Options, the ``impl`` matrix and the choice between a GPU and Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import hypothesis
import pytest
import torch

# Triton reads this when it is imported, so it is decided here, before anything imports Triton.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from flashattn import registry
from flashattn.testing.examples import Count

pytest_plugins = ["pytester"]

ON_GPU = torch.cuda.is_available()

# Examples per property. Interpreted kernels are slow, so a GPU runs more of them.
for _profile, _on_cpu, _on_gpu in (("quick", 5, 20), ("default", 20, 100), ("thorough", 200, 1000)):
    hypothesis.settings.register_profile(
        _profile,
        max_examples=_on_gpu if ON_GPU else _on_cpu,
        deadline=None,
        print_blob=True,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
hypothesis.settings.load_profile("default")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare which implementations take part."""
    parser.addoption(
        "--impl",
        action="append",
        metavar="NAME|FILE.py",
        help="run on this implementation only: a registered name, or a file that registers some"
        " (may be repeated)",
    )


def _selected(options: list[str] | None) -> list[str]:
    """Return the names asked for, after importing the files among them."""
    if not options:
        return list(registry.names())
    chosen: list[str] = []
    for option in options:
        if not option.endswith(".py"):
            chosen.append(registry.get(option).name)
            continue
        before = set(registry.names())
        path = Path(option).resolve()
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        added = [name for name in registry.names() if name not in before]
        if not added:
            raise pytest.UsageError(f"--impl {option}: the file registers no implementation")
        chosen += added
    return chosen


def pytest_configure(config: pytest.Config) -> None:
    """Resolve --impl once."""
    try:
        config.stash[IMPLS] = _selected(config.getoption("--impl"))
        if config.getoption("--impl"):
            config.option.impl = config.stash[IMPLS]  # names, also of what files registered
    except ValueError as error:
        raise pytest.UsageError(f"--impl: {error}") from None


IMPLS = pytest.StashKey[list[str]]()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test and benchmark that takes ``impl`` once for each implementation."""
    if "impl" in metafunc.fixturenames:
        metafunc.parametrize("impl", metafunc.config.stash[IMPLS], indirect=True)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move what changes its process to the end."""
    items.sort(key=lambda item: item.get_closest_marker("last") is not None)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Count the examples of every property."""
    property_ = getattr(getattr(item, "obj", None), "hypothesis", None)
    if property_ is not None:
        property_.inner_test = Count.of(property_.inner_test)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many examples were drawn and held."""
    if Count.passed:
        terminalreporter.write_line(f"hypothesis: {Count.passed} examples passed")


@pytest.fixture(scope="session")
def impl(request: pytest.FixtureRequest) -> registry.Impl:
    """One implementation of attention."""
    return registry.get(request.param)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where tests and benchmarks run."""
    return torch.device("cuda" if ON_GPU else "cpu")
