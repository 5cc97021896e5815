"""Options, the ``impl`` matrix and the choice between a GPU and Triton's interpreter."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest
import torch

# Triton reads this when it is imported, so it is decided here, before anything imports Triton.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from flashattn import registry
from flashattn.testing import caught, drawn, examples, left_out, parallel, seed
from flashattn.testing.plugin_file import choose
from flashattn.testing.verdicts import Verdicts

pytest_plugins = ["pytester"]

ON_GPU = torch.cuda.is_available()

# The explain phase varies a failing example, which would compile for minutes on a GPU.
PHASES = [phase for phase in hypothesis.Phase if not ON_GPU or phase != hypothesis.Phase.explain]
# Examples per property. Interpreted kernels are slow, so a GPU runs more of them.
for _profile, _on_cpu, _on_gpu in (("quick", 5, 20), ("default", 20, 100), ("thorough", 200, 1000)):
    hypothesis.settings.register_profile(
        _profile,
        max_examples=_on_gpu if ON_GPU else _on_cpu,
        deadline=None,
        print_blob=True,
        phases=PHASES,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
hypothesis.settings.load_profile("default")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Register our plugins; add the option that chooses implementations."""
    for plugin in (caught, drawn, examples, left_out, parallel, seed):
        pluginmanager.register(plugin)
    parser.addoption(
        "--impl",
        action="append",
        metavar="NAME|FILE.py[:NAME]",
        help="run only what an implementation takes part in, on this one alone: a registered name,"
        " or a file that registers some or defines attention(q, k, v, *, causal, scale); may be"
        " repeated. Benchmarks time a file beside the usual peers, unless others are named, too",
    )


IMPLS = pytest.StashKey[list[str]]()
PEERS = ("triton", "naive", "sdpa_flash", "sdpa_cudnn", "flex")  # what a user would compare it with


def pytest_configure(config: pytest.Config) -> None:
    """Resolve --impl once."""
    chosen = list(dict.fromkeys(n for option in config.option.impl or () for n in _named(option)))
    config.stash[IMPLS] = chosen or list(registry.names())
    config.pluginmanager.register(Verdicts(), "verdicts")
    config.option.impl = chosen
    # Only implementations from outside are asked for: benchmarks also time the peers.
    own = all(registry.get(name).origin for name in chosen)
    config.option.impl_peers = PEERS if chosen and own else ()


def _named(option: str) -> list[str]:
    try:
        return choose(option)
    except ValueError as error:
        raise pytest.UsageError(f"--impl {option}: {error}") from error


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave benchmarks out unless they are named: their options must be known from the start."""
    unnamed = not hasattr(config.option, "gate_against")
    return True if unnamed and collection_path == config.rootpath / "benchmarks" else None


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say where implementations come from, and which installed ones cannot be loaded."""
    impls = [registry.get(name) for name in config.stash[IMPLS]]
    own = [f"{impl.name} ({impl.origin})" for impl in impls if impl.origin]
    lines = [f"implementations: {', '.join(own)}"] * bool(own) + list(registry.broken())
    only_benchmarks = all(Path(argument).name == "benchmarks" for argument in config.args)
    return lines if only_benchmarks else lines + left_out.header(config.stash[IMPLS])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test and benchmark that takes ``impl`` once for each implementation."""
    if "impl" not in metafunc.fixturenames:
        return
    names = metafunc.config.stash[IMPLS]
    if metafunc.function.__name__.startswith("bench_"):
        names = list(dict.fromkeys([*names, *metafunc.config.option.impl_peers]))
    metafunc.parametrize("impl", names, indirect=True)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep only the items that take an implementation if --impl is given."""
    if config.option.impl:
        config.hook.pytest_deselected(items=[item for item in items if not _has_impl(item)])
        items[:] = [item for item in items if _has_impl(item)]


def _has_impl(item: pytest.Item) -> bool:
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return "impl" in params or hasattr(params.get("case"), "impl")


@pytest.fixture(scope="session")
def impl(request: pytest.FixtureRequest) -> registry.Impl:
    """One implementation of attention."""
    return registry.get(request.param)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where tests and benchmarks run."""
    return torch.device("cuda" if ON_GPU else "cpu")
