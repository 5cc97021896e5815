"""Shared by all benchmarks: options, the device's clock, models, and passes to time."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from flashattn.gate.plugin import Gate
from flashattn.measure.device import sm_clock
from flashattn.measure.roofline import measure_roofs
from flashattn.measure.timing import Clock, DeviceBenchmark, clock_of
from flashattn.problem import Problem
from flashattn.registry import Impl, get
from flashattn.report.gate import ROUNDS
from flashattn.report.rows import ANY_ORDER
from flashattn.report.runs import Run
from flashattn.report.table import tables
from flashattn.testing import comparison, journal, kept, law, sweep
from flashattn.testing.graph import Call, prepared
from flashattn.testing.journal import STARTED
from flashattn.testing.kept import HEADER, JOURNAL, MADE_BEFORE
from flashattn.testing.sweep import DEVICE, IN_ANY_ORDER, Point, study_and_name, sweep_name
from flashattn.testing.train_case import MODELS, Trained, costs, forget_models, problem_of
from flashattn.testing.turns import Prepare, turn_of
from flashattn.testing.verifier import Verifier

HERE = Path(__file__).parent
# These loop in Python, hold all scores or compile every shape. Only bench_flash times them, one by
# one; all other implementations are timed in turns.
SLOW = ("reference", "tiled", "naive", "compiled", "sdpa_math")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Register our plugins; add the options of the gate."""
    for plugin in (sweep, kept, journal, comparison):
        pluginmanager.register(plugin)
    parser.addoption(
        "--gate-against",
        metavar="REVISION",
        help="time nothing but the gate's cases, here and in another revision, in turns; fail what"
        " is slower (exit status 10: something is ambiguous; 11: nothing is proven)",
    )
    parser.addoption(
        "--gate-selftest",
        action="store_true",
        help="slow one case by 5%% and one by 10%%, which the gate must see (else status 12)",
    )
    parser.addoption(
        "--gate-rounds", type=int, default=ROUNDS, help="samples of each revision (%(default)s)"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Refuse pytest-xdist; register the gate; do not fail on warnings from torch."""
    option = config.option
    if getattr(option, "numprocesses", None) or getattr(option, "dist", "no") != "no":
        raise pytest.UsageError(
            "pytest benchmarks runs in one process, or cases would slow each other down; wanted no"
            " -n and no --dist (of pytest-xdist)"
        )
    if option.gate_against is not None or option.gate_selftest:
        revision, rounds, selftest = option.gate_against, option.gate_rounds, option.gate_selftest
        gate = Gate(config.rootpath, revision, DEVICE, rounds=rounds, selftest=selftest)
        config.pluginmanager.register(gate, "gate")
    # Peers compile inside torch, whose warnings about its own modules are not their failures.
    config.addinivalue_line("filterwarnings", r"default:::torch\..*")
    config.addinivalue_line("filterwarnings", r"ignore::DeprecationWarning:torch\..*")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collect either the gate's cases or all others."""
    gated = collection_path.name == "bench_gate.py"
    module = collection_path.parent == HERE and collection_path.suffix == ".py"
    return True if module and gated != config.pluginmanager.has_plugin("gate") else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse files that are named although they do not fit: pytest collects them anyway."""
    gated = config.pluginmanager.has_plugin("gate")
    if any(
        gated != (item.path.name == "bench_gate.py") for item in items if item.path.parent == HERE
    ):
        raise pytest.UsageError(
            "--gate-against, --gate-selftest: wanted bench_gate.py, which holds the gate's cases"
            " (-k selects some), or all of benchmarks/"
            if gated
            else "bench_gate.py: wanted --gate-against=REVISION or --gate-selftest"
        )


def pytest_sessionstart(session: pytest.Session) -> None:
    """Show times as progress."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter and reporter._show_progress_info:  # noqa: SLF001
        # Most cases are skipped immediately, so a percentage says nothing about the time left.
        reporter._show_progress_info = "times"  # noqa: SLF001


@pytest.hookimpl(tryfirst=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the tables."""
    rows = config.stash[JOURNAL].rows
    if rows:
        terminalreporter.section("measured")
        terminalreporter.write_line(tables(Run.of(config.stash[HEADER], rows)))


@pytest.fixture(scope="session")
def clock(device: torch.device) -> Clock:
    """Return the clock of the device."""
    return clock_of(device)


@pytest.fixture(scope="session")
def roofs(pytestconfig: pytest.Config, device: torch.device) -> dict[str, float]:
    """Measure the roofs, and record the SM clock while the machine is warm."""
    header = pytestconfig.stash[HEADER]
    if not (pytestconfig.getoption("benchmark_disable") or header["roofs"]):
        header["roofs"] = measure_roofs(device)
    header["clocks"]["before"] = sm_clock(device)
    return header["roofs"]


@pytest.fixture
def device_benchmark(
    request: pytest.FixtureRequest,
    benchmark: BenchmarkFixture,
    clock: Clock,
    roofs: dict[str, float],
) -> Iterator[DeviceBenchmark]:
    """Return pytest-benchmark's fixture with the device's clock and the facts of the case."""
    del roofs  # measured first, so that the journal contains them
    ours, item = DeviceBenchmark.adopt(benchmark, clock), request.node
    ours.extra_info |= {
        **dict(zip(("study", "name"), study_and_name(item), strict=True)),
        "fullname": item.nodeid,
        "sweep": sweep_name(item.config),
    }
    case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
    ours.extra_info |= dict(getattr(case, "facts", ()))
    yield ours
    benchmark.skipped = True  # no warning that a failed check left it unused


@pytest.fixture
def facts(device_benchmark: DeviceBenchmark) -> dict[str, Any]:
    """Return the facts about the case, all of which go into its row."""
    return device_benchmark.extra_info


@pytest.fixture
def left_out(facts: dict[str, Any]) -> Callable[[str | None], None]:
    """Return a function that skips a case if there is a reason, and records the reason."""
    return partial(_leave_out, facts)


def _leave_out(facts: dict[str, Any], reason: str | None) -> None:
    if reason is not None:
        facts.update(status="unsupported", reason=reason)
        pytest.skip(reason)


@pytest.fixture(scope="session")
def interpreted(device: torch.device) -> Callable[[Impl], str | None]:
    """Return a function that says why an interpreted implementation is not timed, or None."""
    said = "{} is interpreted: not a speed"
    return lambda impl: said.format(impl.name) if law.interpreted(impl, device) else None


@pytest.fixture
def trained(
    facts: dict[str, Any],
    left_out: Callable[[str | None], None],
    interpreted: Callable[[Impl], str | None],
    device: torch.device,
) -> Callable[..., Trained]:
    """Return a function that makes a case's model, or reuses it, and records its costs."""

    def make(case: Point, *, compiled: bool = False, **how: Any) -> Trained:
        named = {axis: getattr(case, axis) for axis in ("size", "context", "batch", "precision")}
        named |= {axis: getattr(case, axis, False) for axis in ("packed", "checkpoint")}
        compiled = compiled or getattr(case, "compiled", False)
        of_case, impl = costs(**named, impl=case.impl, device=device), get(case.impl)
        facts.update(
            parameters=of_case.parameters,
            tokens=of_case.tokens,
            flops=of_case.flops(case.step),
            # The compiler decides which tensors it keeps, so only eager code has a prediction.
            predicted_bytes=None if compiled else of_case.bytes(case.step),
        )
        left_out(impl.why_not(problem_of(of_case), device, grad=True) or interpreted(impl))
        key = (*named.values(), case.impl, compiled, *how)
        if key not in MODELS:
            forget_models()
            named |= {"impl": case.impl, "device": device, "compiled": compiled}
            MODELS[key] = Trained(**named, **how)
        return MODELS[key]

    return make


@pytest.fixture(scope="session")
def snapshots(pytestconfig: pytest.Config) -> Path:
    """Return the folder for the allocator's snapshots, which memory_viz can show."""
    folder = pytestconfig.stash[JOURNAL].path.parent / "snapshots"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def time_call(
    request: pytest.FixtureRequest, device_benchmark: DeviceBenchmark, clock: Clock
) -> Callable[..., None]:
    """Return a function that checks and times the call that ``prepare`` returns for a case.

    On a GPU it takes turns with those cases of its group that ``takes`` says can.
    """
    item, made_before = request.node, request.config.stash[MADE_BEFORE]

    def time(prepare: Prepare, takes: Callable[[pytest.Item], bool] = lambda _: True) -> None:
        def takes_turns(item: pytest.Item) -> bool:
            return item.nodeid not in made_before and takes(item)

        facts, turn = device_benchmark.extra_info, None
        if device_benchmark.enabled and clock.takes_turns and takes_turns(item):
            turn = turn_of(item, prepare, clock, takes=takes_turns)
        if turn is None:
            call, setup = prepare(item, facts)
            device_benchmark.time(call, setup=setup)
            return
        facts.update(turn.facts)
        item.stash[STARTED] = turn.began
        device_benchmark.replay(turn.samples, tells=f"{clock.tells}, in turns")

    return time


@pytest.fixture
def time_pass(
    time_call: Callable[..., None],
    impl: Impl,
    problem: Problem,
    device: torch.device,
    reason: Callable[[Impl, str], str | None],
    interpreted: Callable[[Impl], str | None],
) -> Iterator[Callable[..., None]]:
    """Return a function that checks and times a pass, or skips it with a reason.

    The backward pass is timed alone, not as a difference of two times; both passes together get a
    new graph for each call. On a GPU the fast implementations of a problem are timed in turns.
    Errors of peers are expected failures.
    """

    def why_not(impl: Impl, passes: str) -> str | None:
        return reason(impl, passes) or interpreted(impl)

    def time(passes: str, *, learned: bool = False) -> None:
        prepare = partial(_prepare, passes, problem, device, learned=learned, why_not=why_not)
        time_call(prepare, takes=_is_fast)

    yield time
    if impl.compiles:
        torch.compiler.reset()  # else the eighth shape hits torch's limit and runs uncompiled


def _prepare(
    passes: str,
    problem: Problem,
    device: torch.device,
    item: pytest.Item,
    facts: dict[str, Any],
    *,
    learned: bool,
    why_not: Callable[[Impl, str], str | None],
) -> Call:
    """Return the call of a case after checking its results; fill in the facts."""
    impl = get(item.callspec.params["impl"])  # type: ignore[attr-defined]
    any_order = item.originalname.endswith(IN_ANY_ORDER)  # type: ignore[attr-defined]
    verifier = Verifier(impl, problem, device, facts)
    facts["learned"] = learned
    _leave_out(facts, verifier.admit(passes))
    if any_order and impl.name != "hopper":
        _leave_out(facts, f"{impl.name} has one order")
    _leave_out(facts, why_not(impl, passes))
    facts["impl"] = ANY_ORDER if any_order else impl.name
    options = {"deterministic": False} if any_order else {}
    call, results = prepared(passes, impl, problem, device, learned=learned, **options)
    try:
        verifier.check(**results)
    except AssertionError as error:
        if impl.strict:
            raise
        pytest.xfail(str(error))
    return call


def _is_fast(item: pytest.Item) -> bool:
    """Return whether a case's implementation is none of ``SLOW``."""
    return item.callspec.params["impl"] not in SLOW  # type: ignore[attr-defined]


@pytest.fixture
def reason(facts: dict[str, Any]) -> Callable[[Impl, str], str | None]:
    """Return a function that says why a study does not time an implementation, or None."""
    said = f"{{}} is timed without such {facts['study']}"
    return lambda impl, _: said.format(impl.name) if impl.name in SLOW else None
