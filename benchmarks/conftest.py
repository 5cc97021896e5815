"""What every benchmark shares: the sweep, the device's clock, the judge, what is kept of a run."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from functools import cache, lru_cache, partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from pytest_benchmark.utils import get_commit_info, parse_columns

from flashattn.measure.device import (
    accelerator,
    machine_info,
    memory_bytes,
    out_of_memory,
    sm_clock,
)
from flashattn.measure.roofline import measure_roofs
from flashattn.measure.timing import Clock, DeviceBenchmark, clock_of, interprets
from flashattn.problem import DTYPES, Problem
from flashattn.report.runs import Journal, Run
from flashattn.report.table import tables
from flashattn.testing.accuracy import Case, Truth
from flashattn.testing.inputs import make_grads, make_inputs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_benchmark.fixture import BenchmarkFixture
    from pytest_benchmark.session import BenchmarkSession

    from flashattn.registry import Impl

HERE = Path(__file__).parent
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
JOURNAL = pytest.StashKey[Journal]()
HEADER = pytest.StashKey[dict[str, Any]]()
NO_BASELINE = pytest.StashKey[bool]()
STOCK_STORAGE = "file://./.benchmarks"


def sweep(
    *, tokens: int, hidden: int, seq_q: list[int], head_dim: list[int], dtype: list[str]
) -> list[Problem]:
    """Return square problems, full and causal, each of ``tokens`` tokens ``hidden`` wide."""
    return [
        Problem(batch=tokens // n, heads=hidden // d, seq_q=n, head_dim=d, causal=mask, dtype=name)
        for name, d, mask, n in product(dtype, head_dim, (False, True), seq_q)
    ]


# The community's protocol is 16384 tokens, 2048 wide; ``default`` is what of it fits into minutes.
PROTOCOL = {"tokens": 16384, "hidden": 2048}
SWEEPS = {
    "smoke": sweep(tokens=512, hidden=256, seq_q=[128, 512], head_dim=[64], dtype=["float32"]),
    "default": [
        *sweep(**PROTOCOL, seq_q=[1024, 4096, 16384], head_dim=[64, 128], dtype=["bfloat16"]),
        *sweep(**PROTOCOL, seq_q=[4096], head_dim=[256], dtype=["bfloat16"]),
    ],
    "full": sweep(
        **PROTOCOL,
        seq_q=[512, 1024, 2048, 4096, 8192, 16384],
        head_dim=[64, 128, 256],
        dtype=["bfloat16", "float16", "float32"],
    ),
}
# Compiling a shape costs 10 s and more, so the short sweeps ask for few: (queries, head dimension).
COMPILED = {"smoke": {(512, 64)}, "default": {(4096, 64), (4096, 128)}}
STUDIES = {"tiled": 1024}  # launched tile by tile from Python: the most queries it is timed at
HOLDS_SCORES = ("reference", "compiled", "sdpa_math")
SCORE_MATRICES = 3  # held at once by these, at the least
SCORES_JUDGED = 1 << 26  # in fp64, several copies at once: a few GiB


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare which problems are swept."""
    parser.addoption(
        "--sweep",
        choices=list(SWEEPS),
        help="problems to time (default: smoke on a CPU, else default)",
    )


def sweep_name(config: pytest.Config) -> str:
    """Return the sweep that was asked for, or the one that suits the machine."""
    return config.getoption("--sweep") or ("smoke" if DEVICE.type == "cpu" else "default")


def pytest_configure(config: pytest.Config) -> None:
    """Keep runs in a folder named by the accelerator, under the commit's name, with raw samples."""
    option = config.option
    folder = config.rootpath / ".benchmarks" / accelerator(DEVICE)
    config.stash[JOURNAL] = Journal(folder / "partial.jsonl")
    commit = _commit(get_commit_info())
    facts = {"machine_info": _machine(), "commit_info": commit}
    config.stash[HEADER] = facts | {"roofs": {}, "clocks": {}}
    if option.benchmark_storage == STOCK_STORAGE:
        option.benchmark_storage = f"file://{folder}"
    if not (option.benchmark_save or option.benchmark_autosave):
        option.benchmark_autosave = commit["id"][:10] + ("-dirty" if commit["dirty"] else "")
    option.benchmark_save_data = True
    config.stash[NO_BASELINE] = option.benchmark_compare is True and not any(
        folder.glob("[0-9]*_*.json")
    )
    if config.stash[NO_BASELINE]:
        option.benchmark_compare = []
    if not option.benchmark_compare:
        option.benchmark_quiet = True  # our table has a column for each implementation
    elif option.benchmark_columns is None:
        option.benchmark_columns = parse_columns("median,iqr,rounds")
    # Peers compile inside torch; what torch says to itself there is no failure of theirs.
    config.addinivalue_line("filterwarnings", r"default:::torch\..*")
    config.addinivalue_line("filterwarnings", r"ignore::DeprecationWarning:torch\..*")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Leave out the folder named by the Python version that the plugin would add."""
    session.config._benchmarksession.storage.default_machine_id = None  # noqa: SLF001


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each benchmark of attention on every problem of the sweep."""
    if "problem" in metafunc.fixturenames:
        metafunc.parametrize("problem", SWEEPS[sweep_name(metafunc.config)], ids=str)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put implementations of one problem side by side: a clock that drifts hits them alike."""
    swept = SWEEPS[sweep_name(config)]

    def place(item: pytest.Item) -> tuple[str, str, int]:
        problem = item.callspec.params.get("problem")
        return str(item.path), item.originalname, swept.index(problem) if problem else 0

    ours = [item for item in items if item.path.parent == HERE and hasattr(item, "callspec")]
    rest = [item for item in items if item not in ours]
    items[:] = rest + sorted(ours, key=place)


@pytest.fixture(scope="session")
def clock(device: torch.device) -> Clock:
    """Tell the seconds of the device."""
    return clock_of(device)


@pytest.fixture(scope="session")
def roofs(pytestconfig: pytest.Config, device: torch.device) -> dict[str, float]:
    """Measure what the machine can do, and note its clock while it is warm."""
    header = pytestconfig.stash[HEADER]
    if not pytestconfig.getoption("benchmark_disable"):
        header["roofs"] = measure_roofs(device)
    header["clocks"]["before"] = sm_clock(device)
    return header["roofs"]


@pytest.fixture
def device_benchmark(
    benchmark: BenchmarkFixture, clock: Clock, roofs: dict[str, float]
) -> Iterator[DeviceBenchmark]:
    """pytest-benchmark's fixture on the device's clock."""
    del roofs  # measured first, so that the journal can name them
    yield DeviceBenchmark.adopt(benchmark, clock)
    benchmark.skipped = True  # a failed check leaves it unused: one failure, and no warning besides


class Judge:
    """Admits an implementation to a problem, and its results to the clock.

    Args:
        impl: who is timed.
        problem: on what.
        config: of the session, which names the sweep.
        facts: of the case, filled in here.
    """

    def __init__(
        self, impl: Impl, problem: Problem, config: pytest.Config, facts: dict[str, Any]
    ) -> None:
        """Hold on to the case; ``admit`` comes next."""
        self.impl, self.problem, self.config, self.facts = impl, problem, config, facts

    def admit(self, passes: str) -> None:
        """Note the facts; skip the case, with a reason, if it cannot or shall not be timed."""
        self.facts |= {
            "impl": self.impl.name,
            "problem": str(self.problem),
            **asdict(self.problem),
            "pass": passes,
            "flops": self.problem.flops(passes),
            "bytes": self.problem.bytes(passes),
        }
        reason = self.impl.why_not(self.problem, DEVICE, grad=passes == "backward")
        reason = reason or self._left_out() or self._interpreted()
        if reason:
            self.facts |= {"status": "unsupported", "reason": reason}
            pytest.skip(reason)

    def _left_out(self) -> str | None:
        impl, problem, name = self.impl, self.problem, sweep_name(self.config)
        rows = problem.batch * problem.heads * problem.seq_q
        scores = DTYPES[problem.dtype] * rows * problem.seq_kv
        shape, longest = (problem.seq_q, problem.head_dim), STUDIES.get(impl.name, problem.seq_q)
        reasons = {
            f"is for study: timed up to {longest} queries": problem.seq_q > longest,
            "would hold more scores than there is memory": impl.name in HOLDS_SCORES
            and SCORE_MATRICES * scores > memory_bytes(DEVICE),
            "compiles every shape for seconds: timed at few, --sweep full has all": impl.compiles
            and shape not in COMPILED.get(name, {shape}),
        }
        return next((f"{impl.name} {reason}" for reason, holds in reasons.items() if holds), None)

    def _interpreted(self) -> str | None:
        if os.environ.get("TRITON_INTERPRET") != "1" or self.impl.compiles:
            return None
        q, k, v = make_inputs(self.problem, device=DEVICE)
        call = partial(self.impl, q, k, v, causal=self.problem.causal, scale=1.0)
        return f"{self.impl.name} is interpreted: not a speed" if interprets(call) else None

    def check(self, **outputs: torch.Tensor | None) -> None:
        """Hold the outputs, o and lse or dq, dk and dv, to their budgets against fp64.

        Heads do not depend on one another: the first and the last group of heads are compared.

        Raises:
            AssertionError: which outputs are off, by how much, and what was allowed.
        """
        for (batch, queries, keys), truth in _truth(self.problem, self.facts["pass"]):
            got = {
                name: x.detach()[batch, keys if name in ("dk", "dv") else queries][None]
                for name, x in outputs.items()
                if x is not None
            }
            broken = truth.complaints(got)
            assert not broken, f"{self.impl.name}: " + "; ".join(broken)


@lru_cache(maxsize=1)  # implementations of one problem run next to one another
def _truth(problem: Problem, passes: str) -> list[tuple[tuple[int, slice, slice], Truth]]:
    """Return what the first and the last group of heads are held against, and where they are."""
    inputs, group = make_inputs(problem, device=DEVICE), problem.heads // problem.kv_heads
    grad_o = make_grads(problem, device=DEVICE)[0] if passes == "backward" else None
    scale, scores = problem.head_dim**-0.5, problem.batch * problem.heads * problem.seq_q
    whole = None  # so few heads say little about how wrong naive is: hear all, if there is room
    if scores * problem.seq_kv <= SCORES_JUDGED:
        whole = Case(problem=problem, inputs=inputs, scale=scale, grad_o=grad_o)
    truths = []
    for batch, g in sorted({(0, 0), (problem.batch - 1, problem.kv_heads - 1)}):
        queries, keys = slice(g * group, (g + 1) * group), slice(g, g + 1)
        heads = (queries, keys, keys)
        case = Case(
            problem=replace(problem, batch=1, heads=group, kv_heads=1),
            inputs=tuple(x[batch, part][None] for x, part in zip(inputs, heads, strict=True)),
            scale=scale,
            grad_o=None if grad_o is None else grad_o[batch, queries][None],
        )
        truths.append(((batch, queries, keys), Truth.of(case, whole)))
    return truths


@pytest.fixture
def judge(
    request: pytest.FixtureRequest, device_benchmark: DeviceBenchmark, impl: Impl, problem: Problem
) -> Iterator[Judge]:
    """Say what is timed and what is right."""
    yield Judge(impl, problem, request.config, device_benchmark.extra_info)
    if impl.compiles:
        torch.compiler.reset()  # else the eighth shape meets torch's limit and runs uncompiled


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Turn running out of memory into a row with a reason."""
    try:
        return (yield)
    except Exception as error:
        if not out_of_memory(error):
            raise
    # Past the except clause the traceback is gone, and with it the tensors it held.
    impl = pyfuncitem.funcargs["impl"]
    facts = pyfuncitem.funcargs["device_benchmark"].extra_info
    facts |= {"status": "oom", "reason": f"{impl.name} ran out of memory"}
    pytest.skip(facts["reason"])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Journal the row before the next case starts."""
    report = yield
    benchmark = getattr(item, "funcargs", {}).get("device_benchmark")
    if call.when == "call" and benchmark is not None:
        row, samples = dict(benchmark.extra_info), []
        if benchmark.stats:
            samples = _rounded(benchmark.stats.stats.data)
        if report.failed:
            said = call.excinfo.exconly().splitlines()[0]
            row |= {"status": "failed", "reason": f"{item.name}: {said}"}
        if "status" in row:
            item.config.stash[JOURNAL].add(row, samples, header=item.config.stash[HEADER])
    return report


def pytest_benchmark_generate_machine_info() -> dict[str, Any]:
    """Replace the plugin's own, which names the host."""
    return _machine()


@cache
def _machine() -> dict[str, Any]:
    return machine_info(DEVICE)


def _commit(info: dict[str, Any]) -> dict[str, Any]:
    return {name: info[name] for name in ("id", "dirty", "time")}


def _rounded(samples: list[float]) -> list[float]:
    return [round(sample, 9) for sample in samples]  # no clock here tells less than a nanosecond


def pytest_benchmark_update_commit_info(commit_info: dict[str, Any]) -> None:
    """Keep what says which code was measured; names of folders and branches do not."""
    kept = _commit(commit_info)
    commit_info.clear()
    commit_info |= kept


def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    """Add the roofs, the clocks and the rows that were not measured."""
    output_json |= {name: config.stash[HEADER][name] for name in ("roofs", "clocks")}
    rows = config.stash[JOURNAL].rows
    output_json["unmeasured"] = [row for row in rows if row["status"] != "ok"]
    for case in output_json["benchmarks"]:
        case["params"] = {name: str(value) for name, value in (case["params"] or {}).items()}
        case["stats"]["data"] = _rounded(case["stats"]["data"])


def pytest_benchmark_compare_machine_info(
    machine_info: dict[str, Any], compared_benchmark: dict[str, Any]
) -> None:
    """Refuse the run of another accelerator: its seconds are no baseline for this one's."""
    theirs = compared_benchmark["machine_info"].get("accelerator", "a machine it does not name")
    if theirs != machine_info["accelerator"]:
        raise pytest.UsageError(
            f"--benchmark-compare: wanted a run made on {machine_info['accelerator']}, got {theirs}"
        )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Iterator[None]:
    """Keep a run only when all of it is right."""
    session.config.stash[HEADER]["clocks"]["after"] = sm_clock(DEVICE)
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
    terminalreporter.section("attention")
    terminalreporter.write_line(tables(Run.of(config.stash[HEADER], journal.rows)))
    name = plugin.save or plugin.autosave
    kept = max(plugin.storage.path.glob(f"*_{name}.json"), default=None) if name else None
    verdict = "Kept in" if kept else "Not kept; every row is in"
    path = os.path.relpath(kept or journal.path, config.rootpath)
    terminalreporter.write_line(f"\n{verdict} {path}")
    if config.stash[NO_BASELINE]:
        terminalreporter.write_line(
            "Compared with nothing: no run of this accelerator was kept before"
        )
