"""What every benchmark shares: the sweep, the clock, resuming, keeping and comparing a run."""

from __future__ import annotations

import argparse
import gc
import os
import time
from dataclasses import replace
from datetime import datetime, timezone
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryFile, mkdtemp
from typing import TYPE_CHECKING, Any

import pytest
import torch
from _pytest.runner import runtestprotocol
from pytest_benchmark.utils import get_commit_info

from flashattn.gate.plugin import Gate
from flashattn.measure.device import accelerator, machine_info, out_of_memory, sm_clock
from flashattn.measure.monitor import Monitor
from flashattn.measure.roofline import measure_roofs
from flashattn.measure.timing import Clock, DeviceBenchmark, clock_of, interprets
from flashattn.problem import Problem
from flashattn.registry import get
from flashattn.report.compare import EXIT_INSIDE_NOISE, hold, report
from flashattn.report.gate import ROUNDS
from flashattn.report.runs import Journal, Run, merge
from flashattn.report.table import tables
from flashattn.testing.inputs import make_inputs
from flashattn.testing.train_case import Trained, costs, problem_of
from flashattn.testing.verifier import Verifier

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
COMPARE = pytest.StashKey[str | bool]()
LIMITS = pytest.StashKey[list[Any]]()
BASELINE = pytest.StashKey[Run | None]()
COLLECTED = pytest.StashKey[set[str]]()
HELD_BACK = pytest.StashKey[list[tuple[pytest.Item, list[pytest.TestReport]]]]()
INSIDE = pytest.StashKey[list[str]]()  # which limits prove nothing
TOLD = pytest.StashKey[list[str]]()  # sentences for the end
MODELS: dict[tuple[Any, ...], Trained] = {}  # one at most: the last case's
STARTED = pytest.StashKey[float]()
STOCK_STORAGE = "file://./.benchmarks"


def _part(text: str) -> tuple[int, int]:
    """Return I and N of ``"I/N"``.

    Raises:
        argparse.ArgumentTypeError: it is not that, or I is not one of 1 ... N.
    """
    index, slash, parts = text.partition("/")
    if not (slash and index.isdecimal() and parts.isdecimal() and 1 <= int(index) <= int(parts)):
        msg = f"wanted I/N with I from 1 to N, as in 1/8, got {text!r}"
        raise argparse.ArgumentTypeError(msg)
    return int(index), int(parts)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare what is swept, going on after a stop, and the gate."""
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
    parser.addoption(
        "--resume", action="store_true", help="go on with the last run that was not finished"
    )
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


def sweep_name(config: pytest.Config) -> str:
    """Return the sweep that was asked for, or the one that suits the machine."""
    return config.getoption("--sweep") or ("smoke" if DEVICE.type == "cpu" else "default")


def pytest_configure(config: pytest.Config) -> None:
    """Keep runs in a folder named by the accelerator, under the commit's name."""
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
    folder = config.rootpath / ".benchmarks" / accelerator(DEVICE)
    commit = _commit(get_commit_info())
    facts = {"machine_info": _machine(), "commit_info": commit, "sources": _sources(config)}
    said = " ".join(config.invocation_params.args).replace(str(config.rootpath), ".")
    facts |= {"datetime": datetime.now(timezone.utc).isoformat(), "command": f"pytest {said}"}
    config.stash[HEADER] = facts | {"roofs": {}, "clocks": {}}
    config.stash[TOLD], config.stash[INSIDE], config.stash[HELD_BACK] = [], [], []
    config.stash[JOURNAL] = _journal(config, _writable(folder, config))
    made = config.stash[JOURNAL].rows
    config.stash[MADE_BEFORE] = {r["fullname"]: r for r in made if r["status"] != "failed"}
    if option.benchmark_storage == STOCK_STORAGE:
        option.benchmark_storage = f"file://{folder}"
    if not (option.benchmark_save or option.benchmark_autosave):
        versioned = commit["id"] != "unknown"  # as where only the files were copied
        name = commit["id"][:10] if versioned else f"sources-{facts['sources'][:10]}"
        option.benchmark_autosave = name + "-dirty" * commit["dirty"] + _part_suffix(config)
    option.benchmark_quiet = True  # our tables have a column for each implementation
    # Comparing is ours: the plugin's has no verdicts, and says "regression" in a traceback.
    config.stash[COMPARE] = option.benchmark_compare
    config.stash[LIMITS] = option.benchmark_compare_fail or []
    option.benchmark_compare, option.benchmark_compare_fail = [], []
    # Peers compile inside torch; what torch says to itself there is no failure of theirs.
    config.addinivalue_line("filterwarnings", r"default:::torch\..*")
    config.addinivalue_line("filterwarnings", r"ignore::DeprecationWarning:torch\..*")
    config.addinivalue_line("filterwarnings", "ignore::pytest.PytestCacheWarning")  # read-only


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collect either the gate's cases or all others."""
    gated = collection_path.name == "bench_gate.py"
    module = collection_path.parent == HERE and collection_path.suffix == ".py"
    return True if module and gated != config.pluginmanager.has_plugin("gate") else None


@cache
def _writable(folder: Path, config: pytest.Config) -> Path:
    """Return a folder, or a temporary one in its place, with a sentence, if it is read-only."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        scratch = Path(mkdtemp(prefix="flashattn-benchmarks-"))
        config.stash[TOLD].append(f"{folder} cannot be written ({error.strerror}): see {scratch}")
        return scratch


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
    """Leave out the folder named by the Python version; load the baseline; watch the clock."""
    config, storage = session.config, session.config._benchmarksession.storage  # noqa: SLF001
    storage.default_machine_id = None
    config.stash[MONITOR] = Monitor(DEVICE)
    config.stash[MONITOR].__enter__()
    config.stash[BASELINE] = _baseline(config)
    storage.path = _writable(storage.path, config)
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter and reporter._show_progress_info:  # noqa: SLF001
        # Most cases are skipped at once: a share of all cases says nothing about the time left.
        reporter._show_progress_info = "times"  # noqa: SLF001


def _baseline(config: pytest.Config) -> Run | None:
    """Return the clean runs that --benchmark-compare compares with as one, None if there is none.

    Raises:
        pytest.UsageError: no clean run has the name that was asked for, a run is another
            accelerator's, or there is none to hold --benchmark-compare-fail against.
    """
    compare = config.stash[COMPARE]
    named = isinstance(compare, str) and compare
    storage = config._benchmarksession.storage  # noqa: SLF001
    found = [saved for _, saved in storage.load(*[compare] if named else [])] if compare else []
    clean = [saved for saved in found if not saved.get("commit_info", {}).get("dirty")]
    if named and not clean:
        why = "has a clean commit, and others are no baseline" if found else f"is called {compare}"
        raise pytest.UsageError(f"--benchmark-compare: no kept run {why}")
    if config.stash[LIMITS] and not clean:
        raise pytest.UsageError("--benchmark-compare-fail: wanted --benchmark-compare and a run")
    ours = config.stash[HEADER]["machine_info"]["accelerator"]
    for saved in clean:
        theirs = saved["machine_info"].get("accelerator", "a machine it does not name")
        if theirs != ours:
            raise pytest.UsageError(
                f"--benchmark-compare: wanted a run made on {ours}, got {theirs}"
            )
    if compare and not clean:
        why = "every kept run has uncommitted changes" if found else "no run was kept before"
        config.stash[TOLD].append(f"Compared with nothing: {why} on {ours}")
    runs = []
    for saved in clean:
        rows = [
            _with_stats(case["extra_info"], case["stats"])
            for case in saved["benchmarks"]
            if "study" in case["extra_info"]
        ]
        runs.append(Run.of(saved, rows + saved.get("unmeasured", [])))
    return merge(runs) if runs else None


def _with_stats(row: dict[str, Any], stats: dict[str, Any]) -> dict[str, Any]:
    return {"q1": stats["q1"], "q3": stats["q3"], "stats": stats} | row


def _compared(config: pytest.Config) -> tuple[Run, Run]:
    """Return what the kept runs have of this session's cases, or should have; and this session."""
    journal, before = config.stash[JOURNAL], config.stash[BASELINE]
    assert before is not None
    stats = {
        case.fullname: case.stats.as_dict()
        for case in config._benchmarksession.benchmarks  # noqa: SLF001
        if case
    }
    rows = [
        _with_stats(row, stats[row["fullname"]])
        if row["status"] == "ok" and row["fullname"] in stats
        else row
        for row in journal.rows
    ]
    measured, collected = {row["fullname"] for row in rows}, config.stash[COLLECTED]
    whole = {name.partition("::")[0] for name in collected if "::" not in "".join(config.args)}

    def gone(row: dict[str, Any]) -> bool:
        ours = row.get("sweep") == sweep_name(config) and row["fullname"] not in collected
        return ours and row["fullname"].partition("::")[0] in whole

    belong = [row for row in before.rows if row["fullname"] in measured or gone(row)]
    return replace(before, rows=belong), Run.of(config.stash[HEADER], rows)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """With a limit, hold back what passed: the noise is known once all controls are timed."""
    if not item.config.stash[LIMITS]:
        return None
    item.config.get_terminal_writer().line(item.name)
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    item.config.stash[HELD_BACK].append((item, reports))
    if any(report.failed for report in reports):
        _let_go(item.config, {})
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[object]:
    """Fail the cases that break a limit, now that the noise is known."""
    try:
        return (yield)
    finally:
        config, broken = session.config, {}
        if config.stash[LIMITS] and config.stash[HELD_BACK]:
            broken, config.stash[INSIDE] = hold(*_compared(config), config.stash[LIMITS])
        _let_go(config, broken)


def _let_go(config: pytest.Config, broken: dict[tuple[str, str], str]) -> None:
    """Report what was held back; a case in ``broken`` has failed."""
    for item, reports in config.stash[HELD_BACK]:
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        complaint = broken.get(_case(item))
        for made in reports:
            told = made
            if complaint and made.when == "call":
                fail = partial(pytest.fail, complaint, pytrace=False)
                call = pytest.CallInfo.from_call(fail, "call")
                told = pytest.TestReport.from_item_and_call(item, call)
                told.longrepr.reprcrash.message = complaint  # without "Failed: "
            item.ihook.pytest_runtest_logreport(report=told)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    config.stash[HELD_BACK].clear()


def _case(item: pytest.Item) -> tuple[str, str]:
    """Return the study of a case and its name in it."""
    return item.path.stem.removeprefix("bench_"), item.name.removeprefix("bench_")


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
    config.stash[COLLECTED] = {item.nodeid for item in items}
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
        **dict(zip(("study", "name"), _case(item), strict=True)),
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
def verifier(
    device_benchmark: DeviceBenchmark, impl: Impl, problem: Problem, device: torch.device
) -> Iterator[Verifier]:
    """Say what is right."""
    yield Verifier(impl, problem, device, device_benchmark.extra_info)
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
    for name in config.option.impl or ():
        path = config.invocation_params.dir / f"{name.partition('.py')[0]}.py"
        digest.update(path.read_bytes() if path.is_file() else name.encode())
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
        if "data" in case["stats"]:  # with --benchmark-save-data or --benchmark-json
            case["stats"]["data"] = _rounded(case["stats"]["data"])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Iterator[None]:
    """Keep a run only when all of it is right."""
    session.config.stash[HEADER]["clocks"]["after"] = sm_clock(DEVICE)
    session.config.stash[MONITOR].__exit__(None, None, None)
    plugin: BenchmarkSession = session.config._benchmarksession  # noqa: SLF001
    green = exitstatus == pytest.ExitCode.OK
    if not (green and plugin.benchmarks):
        plugin.save = plugin.autosave = plugin.json = None
    result = yield
    if green and session.config.stash[INSIDE]:
        session.exitstatus = EXIT_INSIDE_NOISE
    return result


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the tables, the comparison, and where the run is."""
    journal, plugin = config.stash[JOURNAL], config._benchmarksession  # noqa: SLF001
    if not journal.rows:
        return
    terminalreporter.section("measured")
    terminalreporter.write_line(tables(Run.of(config.stash[HEADER], journal.rows)))
    name = plugin.save or plugin.autosave
    kept = max(plugin.storage.path.glob(f"*_{name}.json"), default=None) if name else None
    if config.stash[BASELINE]:
        terminalreporter.section("compared with the runs kept before")
        terminalreporter.write_line(report(*_compared(config), every=True))
    if kept:
        journal.path.unlink()  # all of it is in the kept run
    path = os.path.relpath(kept or journal.path, config.rootpath)
    verdict = "Kept in" if kept else "Not kept; every row is in"
    dirty = ", of uncommitted code: no baseline" if kept and name.endswith("-dirty") else ""
    told = [*config.stash[INSIDE], *config.stash[TOLD], f"{verdict} {path}{dirty}"]
    terminalreporter.write_line("\n".join(["", *told]))
