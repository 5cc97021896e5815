"""pytest plugin: write a benchmark session to disk row by row, and keep it if nothing failed."""

from __future__ import annotations

import glob
import os
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryFile, mkdtemp
from typing import Any

import pytest
from pytest_benchmark.utils import get_commit_info

from flashattn.measure.device import accelerator, machine_info
from flashattn.report.runs import Journal
from flashattn.testing.plugin_file import loaded_by
from flashattn.testing.sweep import DEVICE, part_suffix

JOURNAL = pytest.StashKey[Journal]()
HEADER = pytest.StashKey[dict[str, Any]]()
MADE_BEFORE = pytest.StashKey[dict[str, dict[str, Any]]]()
TOLD = pytest.StashKey[list[str]]()  # sentences for the summary
_machine = cache(partial(machine_info, DEVICE))
STOCK_STORAGE = "file://./.benchmarks"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the option to resume a run."""
    parser.addoption(
        "--resume", action="store_true", help="go on with the last run that was not finished"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Keep runs in a folder named after the accelerator, in files named after the commit."""
    if not config.pluginmanager.has_plugin("benchmark"):
        raise pytest.UsageError(
            "pytest benchmarks needs pytest-benchmark; wanted no -p no:benchmark"
        )
    option = config.option
    folder = config.rootpath / ".benchmarks" / accelerator(DEVICE)
    commit = _commit(get_commit_info())
    sources = _sources(config)
    facts = {"machine_info": _machine(), "commit_info": commit, "sources": sources}
    said = " ".join(config.invocation_params.args).replace(str(config.rootpath), ".")
    facts |= {"datetime": datetime.now(timezone.utc).isoformat(), "command": f"pytest {said}"}
    config.stash[HEADER] = facts | {"roofs": {}, "clocks": {}}
    config.stash[TOLD] = []
    config.stash[JOURNAL] = _journal(config, _writable(folder, config))
    made = config.stash[JOURNAL].rows
    config.stash[MADE_BEFORE] = {r["fullname"]: r for r in made if r["status"] != "failed"}
    if option.benchmark_storage == STOCK_STORAGE:
        option.benchmark_storage = f"file://{folder}"
    if not (option.benchmark_save or option.benchmark_autosave):
        versioned = commit["id"] != "unknown"  # unknown if only the files were copied
        name = commit["id"][:10] if versioned else f"sources-{sources[:10]}"
        option.benchmark_autosave = name + "-dirty" * commit["dirty"] + part_suffix(config)
    option.benchmark_quiet = True  # our tables have a column for each implementation


@cache
def _writable(folder: Path, config: pytest.Config) -> Path:
    """Return a folder or, if it is read-only, a temporary one, which the summary then names."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        scratch = Path(mkdtemp(prefix="flashattn-benchmarks-"))
        config.stash[TOLD].append(f"{folder} cannot be written ({error.strerror}): see {scratch}")
        return scratch


def _journal(config: pytest.Config, folder: Path) -> Journal:
    """Return a new journal or, with --resume, the last unfinished one of this part.

    Raises:
        pytest.UsageError: the unfinished run was measured with other code, or on another machine,
            or its file is damaged.
    """
    name = f"unfinished{part_suffix(config)}-"
    left = max(folder.glob(f"{name}[0-9]*.jsonl"), default=None)
    if not config.getoption("--resume") or left is None:
        stamp = time.strftime("%Y%m%dT%H%M%S")
        return Journal(folder / f"{name}{stamp}-{os.getpid()}.jsonl")
    ours = config.stash[HEADER]
    try:
        journal = Journal.resume(left)
        if journal.header is None:  # killed before the first row was complete
            return journal
        before = {name: journal.header[name] for name in ("machine_info", "sources", "roofs")}
        _ = [row["fullname"] for row in journal.rows]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        said = f"--resume: {left.name} is damaged ({error!r}); remove it to start a new run"
        raise pytest.UsageError(said) from error
    for what in ("machine_info", "sources"):
        if before[what] != ours[what]:
            raise pytest.UsageError(
                f"--resume: {left.name} has another {what} than this session; start a new run,"
                " or go on from the same commit on the same machine"
            )
    ours["roofs"] = before["roofs"]
    return journal


@pytest.hookimpl(wrapper=True)
def pytest_sessionstart(session: pytest.Session) -> Iterator[None]:
    """Drop the folder named after the Python version, and replace one that is read-only."""
    storage = session.config._benchmarksession.storage  # type: ignore[attr-defined] # noqa: SLF001
    storage.default_machine_id = None
    yield
    storage.path = _writable(storage.path, session.config)


def pytest_benchmark_generate_machine_info() -> dict[str, Any]:
    """Replace the information of pytest-benchmark, which names the host."""
    return _machine()


def _commit(info: dict[str, Any]) -> dict[str, Any]:
    kept = {name: info[name] for name in ("id", "dirty", "time")}
    return kept | ({"id": "unknown"} if kept["id"] == "unversioned" else {})


def _sources(config: pytest.Config) -> str:
    """Return a digest of all code that is measured or measures; it does not need git."""
    digest = sha256()
    for folder in ("flashattn", "benchmarks"):
        for path in sorted((config.rootpath / folder).rglob("*.py")):
            digest.update(path.relative_to(config.rootpath).as_posix().encode())
            digest.update(path.read_bytes())
    for option in config.option.impl or ():
        for path in loaded_by(option):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def rounded(samples: list[float]) -> list[float]:
    """Return samples rounded as they are kept."""
    return [round(sample, 9) for sample in samples]  # no clock here resolves less than a nanosecond


def pytest_benchmark_update_commit_info(commit_info: dict[str, Any]) -> None:
    """Keep only what identifies the measured code, not names of folders and branches."""
    kept = _commit(commit_info)
    commit_info.clear()
    commit_info |= kept


def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    """Add the description of the run, and the rows that were not measured in this session."""
    header = config.stash[HEADER]
    output_json |= {name: header[name] for name in ("roofs", "clocks", "command", "sources")}
    rows = config.stash[JOURNAL].rows
    here = {case["fullname"] for case in output_json["benchmarks"]}
    output_json["unmeasured"] = [
        {name: fact for name, fact in row.items() if name != "samples"}
        for row in rows
        if row["status"] != "ok" or row["fullname"] not in here
    ]
    for case in output_json["benchmarks"]:
        case["params"] = {name: str(value) for name, value in (case["params"] or {}).items()}
        if "data" in case["stats"]:  # with --benchmark-save-data or --benchmark-json
            case["stats"]["data"] = rounded(case["stats"]["data"])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Iterator[None]:
    """Keep a run only if nothing failed."""
    plugin = session.config._benchmarksession  # type: ignore[attr-defined] # noqa: SLF001
    if exitstatus != pytest.ExitCode.OK or not plugin.benchmarks:
        plugin.save = plugin.autosave = plugin.json = None
    return (yield)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print where the run was written."""
    journal, plugin = config.stash[JOURNAL], config._benchmarksession  # type: ignore[attr-defined] # noqa: SLF001
    if not journal.rows:
        return
    name = plugin.save or plugin.autosave
    saved = f"*_{glob.escape(name)}.json" if name else ""
    kept = max(plugin.storage.path.glob(saved), default=None) if name else None
    if kept:
        journal.path.unlink()  # all of it is in the kept run
    path = os.path.relpath(kept or journal.path, config.rootpath)
    verdict = "Kept in" if kept else "Not kept; every row is in"
    dirty = ", of uncommitted code: no baseline" if kept and name.endswith("-dirty") else ""
    told = [*config.stash[TOLD], f"{verdict} {path}{dirty}"]
    terminalreporter.write_line("\n".join(["", *told]))
