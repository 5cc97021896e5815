"""What every benchmark shares: the sweep, the clock, resuming, and what is kept of a run."""

from __future__ import annotations

import gc
import os
import time
from datetime import datetime, timezone
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from pytest_benchmark.utils import get_commit_info

from flashattn.gate.plugin import Gate
from flashattn.measure.device import accelerator, machine_info, out_of_memory, sm_clock
from flashattn.measure.monitor import Monitor
from flashattn.measure.roofline import measure_roofs
from flashattn.measure.timing import Clock, DeviceBenchmark, clock_of, interprets
from flashattn.problem import Problem
from flashattn.registry import get
from flashattn.report.gate import ROUNDS
from flashattn.report.runs import Journal, Run, load
from flashattn.report.table import tables
from flashattn.testing.inputs import make_inputs
from flashattn.testing.judge import Judge
from flashattn.testing.progress import Progress
from flashattn.testing.train_case import Trained, costs, problem_of
from flashattn.testing.trend import Trend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_benchmark.fixture import BenchmarkFixture
    from pytest_benchmark.session import BenchmarkSession

    from flashattn.registry import Impl
    from flashattn.testing.sweep import Point

HERE = Path(__file__).parent
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SWEEPS = ("smoke", "default", "full")
JOURNAL = pytest.StashKey[Journal]()
HEADER = pytest.StashKey[dict[str, Any]]()
MONITOR = pytest.StashKey[Monitor]()
MADE_BEFORE = pytest.StashKey[dict[str, dict[str, Any]]]()
COMPARE = pytest.StashKey[tuple[str | bool, list[Any]]]()
TREND = pytest.StashKey[Trend | None]()
MODELS: dict[tuple[Any, ...], Trained] = {}  # one at most: the last case's
STARTED = pytest.StashKey[float]()
STOCK_STORAGE = "file://./.benchmarks"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare what is swept, and going on after a stop."""
    parser.addoption(
        "--sweep",
        choices=SWEEPS,
        help="how much to measure (default: smoke on a CPU, else default)",
    )
    parser.addoption(
        "--resume", action="store_true", help="go on with the last run that was not finished"
    )
    parser.addoption(
        "--gate-against",
        metavar="REVISION",
        help="time nothing but the gate's cases, here and in another revision, in turns; fail what"
        " is slower (exit status 10: something is ambiguous; 11: this machine proves nothing)",
    )
    parser.addoption(
        "--gate-selftest",
        action="store_true",
        help="slow some of the gate's cases by 5%% and 10%%, which it must see (else status 12)",
    )
    parser.addoption(
        "--gate-rounds", type=int, default=ROUNDS, help="samples of each revision (%(default)s)"
    )


def sweep_name(config: pytest.Config) -> str:
    """Return the sweep that was asked for, or the one that suits the machine."""
    return config.getoption("--sweep") or ("smoke" if DEVICE.type == "cpu" else "default")


def pytest_configure(config: pytest.Config) -> None:
    """Keep runs in a folder named by the accelerator, under the commit's name, with raw samples."""
    option = config.option
    if option.gate_against is not None or option.gate_selftest:
        revision, rounds, selftest = option.gate_against, option.gate_rounds, option.gate_selftest
        gate = Gate(config.rootpath, revision, DEVICE, rounds=rounds, selftest=selftest)
        config.pluginmanager.register(gate, "gate")
    folder = config.rootpath / ".benchmarks" / accelerator(DEVICE)
    commit = _commit(get_commit_info())
    facts = {"machine_info": _machine(), "commit_info": commit, "sources": _sources(config)}
    said = " ".join(config.invocation_params.args).replace(str(config.rootpath), ".")
    facts |= {"datetime": datetime.now(timezone.utc).isoformat(), "command": f"pytest {said}"}
    config.stash[HEADER] = facts | {"roofs": {}, "clocks": {}}
    config.stash[JOURNAL] = _journal(config, folder)
    made = config.stash[JOURNAL].rows
    config.stash[MADE_BEFORE] = {r["fullname"]: r for r in made if r["status"] != "failed"}
    if option.benchmark_storage == STOCK_STORAGE:
        option.benchmark_storage = f"file://{folder}"
    if not (option.benchmark_save or option.benchmark_autosave):
        versioned = commit["id"] != "unknown"  # as where only the files were copied
        name = commit["id"][:10] if versioned else f"sources-{facts['sources'][:10]}"
        option.benchmark_autosave = name + "-dirty" * commit["dirty"] + _part_suffix(config)
    option.benchmark_save_data = True
    option.benchmark_quiet = True  # our tables have a column for each implementation
    # Comparing is ours: the plugin's has no verdicts, and says "regression" in a traceback.
    config.stash[COMPARE] = option.benchmark_compare, option.benchmark_compare_fail or []
    option.benchmark_compare, option.benchmark_compare_fail = [], []
    # Peers compile inside torch; what torch says to itself there is no failure of theirs.
    config.addinivalue_line("filterwarnings", r"default:::torch\..*")
    config.addinivalue_line("filterwarnings", r"ignore::DeprecationWarning:torch\..*")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collect either the gate's cases or all others."""
    gated = collection_path.name == "bench_gate.py"
    module = collection_path.parent == HERE and collection_path.suffix == ".py"
    return True if module and gated != config.pluginmanager.has_plugin("gate") else None


def _part_suffix(config: pytest.Config) -> str:
    part = config.getoption("--part")
    return "-part{}of{}".format(*part) if part else ""


def _journal(config: pytest.Config, folder: Path) -> Journal:
    """Return a new journal, or with --resume the last one of this part, checked to be ours.

    Raises:
        pytest.UsageError: what was left unfinished was measured by other code, or elsewhere.
    """
    name = f"unfinished{_part_suffix(config)}-"
    left = max(folder.glob(f"{name}[0-9]*.jsonl"), default=None)
    if not config.getoption("--resume") or left is None:
        stamp = time.strftime("%Y%m%dT%H%M%S")
        return Journal(folder / f"{name}{stamp}-{os.getpid()}.jsonl")
    journal, ours = Journal.resume(left), config.stash[HEADER]
    if journal.header is None:  # killed before the first row was whole
        return journal
    for what in ("machine_info", "sources"):
        if journal.header[what] != ours[what]:
            raise pytest.UsageError(
                f"--resume: {left.name} has another {what} than this session; start a new run,"
                " or go on from the same commit on the same machine"
            )
    ours["roofs"] = journal.header["roofs"]
    return journal


def pytest_sessionstart(session: pytest.Session) -> None:
    """Leave out the folder named by the Python version; watch the GPU's clock."""
    session.config._benchmarksession.storage.default_machine_id = None  # noqa: SLF001
    session.config.stash[MONITOR] = Monitor(DEVICE)
    session.config.stash[MONITOR].__enter__()
    session.config.stash[TREND] = _trend(session.config)
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter and not session.config.getoption("benchmark_disable"):
        known = session.config.stash[MADE_BEFORE]
        session.config.pluginmanager.register(Progress(reporter, known), "progress")


def _trend(config: pytest.Config) -> Trend | None:
    """Return what --benchmark-compare compares with, None if nothing was kept.

    Raises:
        pytest.UsageError: no run has the name that was asked for, a run is another accelerator's,
            or there is none to hold --benchmark-compare-fail against.
    """
    compare, checks = config.stash[COMPARE]
    named = isinstance(compare, str) and compare
    storage = config._benchmarksession.storage  # noqa: SLF001
    found = list(storage.load(*[compare] if named else [])) if compare else []
    if named and not found:
        raise pytest.UsageError(f"--benchmark-compare: no kept run is called {compare}")
    if checks and not found:
        raise pytest.UsageError("--benchmark-compare-fail: wanted --benchmark-compare and a run")
    ours = config.stash[HEADER]["machine_info"]["accelerator"]
    for _, saved in found:
        theirs = saved["machine_info"].get("accelerator", "a machine it does not name")
        if theirs != ours:
            raise pytest.UsageError(
                f"--benchmark-compare: wanted a run made on {ours}, got {theirs}"
            )
    if not found:
        return None
    stats = {case["fullname"]: case["stats"] for _, saved in found for case in saved["benchmarks"]}
    runs = [load(storage.path / path) for path, _ in found]
    trend = Trend(runs, stats, checks, sweep_name(config))
    config.pluginmanager.register(trend, "trend")
    return trend


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each benchmark on every case of its module's sweep."""
    name = next((name for name in ("case", "problem") if name in metafunc.fixturenames), None)
    if name is None:
        return
    swept = metafunc.module.SWEEPS[sweep_name(metafunc.config)]
    if isinstance(swept, dict):  # by benchmark
        swept = swept[metafunc.function.__name__]
    metafunc.parametrize(name, _for_impls(swept, metafunc.config), ids=str)


def _for_impls(swept: list[Any], config: pytest.Config) -> list[Any]:
    """With --impl, put those asked for in the place of a sweep's own implementations.

    Somebody's own stands beside them, as everywhere that benchmarks compare.
    """
    chosen = config.getoption("--impl")
    if not chosen or not all(hasattr(case, "impl") for case in swept):
        return swept
    asked = [case.replace(impl=name) for case in swept for name in chosen]
    return list(dict.fromkeys([*asked, *(swept if config.option.impl_peers else ())]))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put implementations of one case side by side: a clock that drifts hits them alike."""
    ours = [item for item in items if item.path.parent == HERE and hasattr(item, "callspec")]
    place: dict[tuple[str, ...], int] = {}
    for item in ours:
        place.setdefault(_group(item), len(place))
    ours.sort(key=lambda item: place[_group(item)])
    part = config.getoption("--part")
    if part:
        kept, parts = part
        others = {item for item in ours if place[_group(item)] % parts != kept - 1}
        config.hook.pytest_deselected(items=list(others))
        ours = [item for item in ours if item not in others]
    items[:] = [item for item in items if item.path.parent != HERE] + ours


def _group(item: pytest.Item) -> tuple[str, ...]:
    """Return what the items have in common that are measured side by side."""
    params = item.callspec.params
    case = params.get("case", params.get("problem", ""))
    facts = getattr(case, "facts", ())
    shared = [
        f"{name}={value}" for name, value in facts if name not in ("impl", "step", "compiled")
    ]
    return (str(item.path), item.originalname, *(shared or [str(case)]))


@pytest.fixture(scope="session")
def clock(device: torch.device) -> Clock:
    """Tell the seconds of the device."""
    return clock_of(device)


@pytest.fixture(scope="session")
def roofs(pytestconfig: pytest.Config, device: torch.device) -> dict[str, float]:
    """Measure what the machine can do, and note its clock while it is warm."""
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
    """pytest-benchmark's fixture on the device's clock, with the facts of the case filled in."""
    del roofs  # measured first, so that the journal can name them
    ours, item = DeviceBenchmark.adopt(benchmark, clock), request.node
    ours.extra_info |= {
        "study": item.path.stem.removeprefix("bench_"),
        "name": item.name.removeprefix("bench_"),
        "fullname": item.nodeid,
        "sweep": sweep_name(item.config),
    }
    case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
    ours.extra_info |= dict(getattr(case, "facts", ()))
    yield ours
    benchmark.skipped = True  # a failed check leaves it unused: one failure, and no warning besides


@pytest.fixture
def facts(device_benchmark: DeviceBenchmark) -> dict[str, Any]:
    """What is known about the case; all of it is kept in its row."""
    return device_benchmark.extra_info


@pytest.fixture
def left_out(facts: dict[str, Any]) -> Callable[[str | None], None]:
    """Return what ends a case that cannot or shall not be timed: a row with a reason."""

    def skip(reason: str | None) -> None:
        if reason is not None:
            facts.update(status="unsupported", reason=reason)
            pytest.skip(reason)

    return skip


@pytest.fixture(scope="session")
def interpreted(device: torch.device) -> Callable[[Impl], bool]:
    """Return what tells whether Triton's interpreter would imitate an implementation's kernels."""

    @cache
    def tell(impl: Impl) -> bool:
        problem = Problem(seq_q=16, head_dim=16)
        if os.environ.get("TRITON_INTERPRET") != "1" or impl.compiles:
            return False
        if impl.why_not(problem, device) is not None:
            return False
        return interprets(
            partial(impl, *make_inputs(problem, device=device), causal=False, scale=1.0)
        )

    return tell


@pytest.fixture
def trained(
    facts: dict[str, Any],
    left_out: Callable[[str | None], None],
    interpreted: Callable[[Impl], bool],
    device: torch.device,
) -> Callable[..., Trained]:
    """Return what makes a case's model, or keeps the last case's, and notes its costs."""

    def make(case: Point, *, compiled: bool = False, **how: Any) -> Trained:
        named = {axis: getattr(case, axis) for axis in ("size", "context", "batch", "precision")}
        compiled = compiled or getattr(case, "compiled", False)
        of_case, impl = costs(**named, impl=case.impl, device=device), get(case.impl)
        facts.update(
            parameters=of_case.parameters,
            tokens=of_case.tokens,
            flops=of_case.flops(case.step),
            # The compiler decides what it holds; only what is written is predicted.
            predicted_bytes=None if compiled else of_case.bytes(case.step),
        )
        left_out(impl.why_not(problem_of(of_case), device, grad=True))
        if interpreted(impl):
            left_out(f"{impl.name} is interpreted: not a speed")
        key = (*named.values(), case.impl, compiled, *how)
        if key not in MODELS:
            forget_models()
            made = Trained(**named, impl=case.impl, device=device, compiled=compiled, **how)
            MODELS[key] = made
        return MODELS[key]

    return make


def forget_models() -> None:
    """Drop the model that is kept, and what was compiled for it."""
    MODELS.clear()
    gc.collect()
    torch.compiler.reset()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def snapshots(pytestconfig: pytest.Config) -> Path:
    """Return the folder of the allocator's snapshots, for torch.cuda's memory_viz."""
    folder = pytestconfig.stash[JOURNAL].path.parent / "snapshots"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def judge(
    device_benchmark: DeviceBenchmark, impl: Impl, problem: Problem, device: torch.device
) -> Iterator[Judge]:
    """Say what is right."""
    yield Judge(impl, problem, device, device_benchmark.extra_info)
    if impl.compiles:
        torch.compiler.reset()  # else the eighth shape meets torch's limit and runs uncompiled


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[object]:
    """Repeat what was measured before a stop; turn running out of memory into a row."""
    benchmark = pyfuncitem.funcargs.get("device_benchmark")
    if benchmark is None:
        return (yield)
    before = pyfuncitem.config.stash[MADE_BEFORE].get(pyfuncitem.nodeid)
    if before is not None:
        pyfuncitem.obj = partial(_again, pyfuncitem.funcargs["device_benchmark"], before)
    pyfuncitem.stash[STARTED] = time.perf_counter()
    try:
        return (yield)
    except Exception as error:
        if not out_of_memory(error):
            raise
    # Past the except clause the traceback is gone, and with it the tensors it held.
    forget_models()
    facts = pyfuncitem.funcargs["device_benchmark"].extra_info
    facts |= {"status": "oom", "reason": _ran_out(facts)}
    pytest.skip(facts["reason"])


def _ran_out(facts: dict[str, Any]) -> str:
    who = facts.get("impl", facts["name"])
    predicted = facts.get("predicted_bytes")
    return f"{who} ran out of memory" + (f" (predicted: {predicted} bytes)" if predicted else "")


def _again(benchmark: DeviceBenchmark, row: dict[str, Any], **_: object) -> None:
    """Hand a row of the journal to the plugin as if it were measured now."""
    facts = {name: fact for name, fact in row.items() if name != "samples"}
    benchmark.extra_info |= facts
    if row["status"] != "ok":
        pytest.skip(row["reason"])
    benchmark.replay(row["samples"])
    benchmark.extra_info |= facts  # to the last digit what they were


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Journal the row before the next case starts."""
    report = yield
    benchmark = getattr(item, "funcargs", {}).get("device_benchmark")
    if call.when != "call" or benchmark is None or item.nodeid in item.config.stash[MADE_BEFORE]:
        return report
    facts, samples = benchmark.extra_info, []
    if benchmark.stats:
        samples = _rounded(benchmark.stats.stats.data)
    if report.failed or (call.excinfo and call.excinfo.errisinstance(pytest.xfail.Exception)):
        said = call.excinfo.exconly().splitlines()[0]
        facts |= {"status": "failed", "reason": f"{item.name}: {said}"}
    trend = item.config.stash[TREND]
    if trend and report.passed and benchmark.stats:
        complaint = trend.complaint(item.nodeid, benchmark.stats.stats)
        if complaint:
            report.outcome, report.longrepr = "failed", f"{item.name}: {complaint}"
    if "status" in facts:
        reading = item.config.stash[MONITOR].between(item.stash[STARTED], time.perf_counter())
        facts |= {"sm_hertz": reading.sm_hertz, "throttled": reading.throttled}
        item.config.stash[JOURNAL].add(dict(facts), samples, header=item.config.stash[HEADER])
    return report


def pytest_benchmark_generate_machine_info() -> dict[str, Any]:
    """Replace the plugin's own, which names the host."""
    return _machine()


@cache
def _machine() -> dict[str, Any]:
    return machine_info(DEVICE)


def _commit(info: dict[str, Any]) -> dict[str, Any]:
    kept = {name: info[name] for name in ("id", "dirty", "time")}
    return kept | ({"id": "unknown"} if kept["id"] == "unversioned" else {})


def _sources(config: pytest.Config) -> str:
    """Return a digest of all code that is measured or measures, also where git is not."""
    digest = sha256()
    for folder in ("flashattn", "benchmarks"):
        for path in sorted((config.rootpath / folder).rglob("*.py")):
            digest.update(path.relative_to(config.rootpath).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _rounded(samples: list[float]) -> list[float]:
    return [round(sample, 9) for sample in samples]  # no clock here tells less than a nanosecond


def pytest_benchmark_update_commit_info(commit_info: dict[str, Any]) -> None:
    """Keep what says which code was measured; names of folders and branches do not."""
    kept = _commit(commit_info)
    commit_info.clear()
    commit_info |= kept


def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    """Add what describes the run, and the rows that were not measured."""
    header = config.stash[HEADER]
    output_json |= {name: header[name] for name in ("roofs", "clocks", "command", "sources")}
    rows = config.stash[JOURNAL].rows
    output_json["unmeasured"] = [row for row in rows if row["status"] != "ok"]
    for case in output_json["benchmarks"]:
        case["params"] = {name: str(value) for name, value in (case["params"] or {}).items()}
        case["stats"]["data"] = _rounded(case["stats"]["data"])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Iterator[None]:
    """Keep a run only when all of it is right."""
    session.config.stash[HEADER]["clocks"]["after"] = sm_clock(DEVICE)
    session.config.stash[MONITOR].__exit__(None, None, None)
    plugin: BenchmarkSession = session.config._benchmarksession  # noqa: SLF001
    if exitstatus != pytest.ExitCode.OK or not plugin.benchmarks:
        plugin.save = plugin.autosave = plugin.json = None
    return (yield)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the tables, and where the run is."""
    journal, plugin = config.stash[JOURNAL], config._benchmarksession  # noqa: SLF001
    if not journal.rows:
        return
    terminalreporter.section("measured")
    terminalreporter.write_line(tables(Run.of(config.stash[HEADER], journal.rows)))
    name = plugin.save or plugin.autosave
    kept = max(plugin.storage.path.glob(f"*_{name}.json"), default=None) if name else None
    if kept:
        journal.path.unlink()  # all of it is in the kept run
    verdict = "Kept in" if kept else "Not kept; every row is in"
    path = os.path.relpath(kept or journal.path, config.rootpath)
    trend = config.stash[TREND]
    if trend:
        terminalreporter.section("compared with the runs kept before")
        terminalreporter.write_line(trend.table(Run.of(config.stash[HEADER], journal.rows)))
    elif config.stash[COMPARE][0]:
        terminalreporter.write_line(
            "\nCompared with nothing: no run of this accelerator was kept before"
        )
    terminalreporter.write_line(f"\n{verdict} {path}")
