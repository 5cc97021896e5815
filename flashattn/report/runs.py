"""Runs on disk: unfinished journals, saved runs, and several runs merged.

A row is a dict of facts about one case: ``study`` and ``name`` (unique within the study),
``status`` (ok, unsupported, oom or failed) and ``reason`` (a sentence, unless the status is ok). A
timed row adds ``seconds`` (the median), ``mean``, ``std``, ``rounds``, the quartiles ``q1`` and
``q3``, and ``clock`` (the kind of time). Each study adds its own facts.

A saved run is the JSON of pytest-benchmark: measured rows are ``stats`` and ``extra_info`` of its
benchmarks, the others are in ``unmeasured``. An unfinished run is JSON lines: a header, then rows
with their samples. ``keep`` rewrites either as JSON lines without samples, in files
whose names begin with a number.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import quantiles
from typing import Any

Row = dict[str, Any]
CASE = ("study", "name", "status")  # facts of every row
# Files of saved runs, written by pytest-benchmark and by ``keep``.
KEPT = ("*/[0-9]*_*.json", "*/[0-9]*_*.jsonl")
# pytest-benchmark's names of statistics, by fact of a row.
STATS = {"seconds": "median", "mean": "mean", "std": "stddev", "rounds": "rounds"}
STATS |= {"q1": "q1", "q3": "q3"}
# Names of entries in a file or header, by field of a run.
ENTRIES = {"machine": "machine_info", "commit": "commit_info", "made": "datetime"}
ENTRIES |= {name: name for name in ("roofs", "clocks", "command", "sources")}


@dataclass(frozen=True, kw_only=True)
class Run:
    """The measurements of one session, or of several on one accelerator."""

    machine: dict[str, Any]  # see ``flashattn.measure.device.machine_info``
    commit: dict[str, Any] = field(default_factory=dict)  # ``id`` and ``dirty`` of the code
    # FLOP/s by kind of product, and bytes per second under "copy".
    roofs: dict[str, float] = field(default_factory=dict)
    clocks: dict[str, float | None] = field(default_factory=dict)  # hertz ``before`` and ``after``
    command: str | None = None  # command line of the session
    sources: str | None = None  # digest of the measured code
    made: str | None = None  # date in ISO format, UTC
    name: str | None = None  # folder and name of the file
    rows: list[Row] = field(default_factory=list)  # one per case, measured or not

    @classmethod
    def of(cls, saved: dict[str, Any], rows: list[Row]) -> Run:
        """Make a run from the entries of a file or header."""
        found = {fact: saved[name] for fact, name in ENTRIES.items() if name in saved}
        return cls(**found, rows=rows)

    @classmethod
    def saved(cls, saved: dict[str, Any]) -> Run:
        """Make a run from pytest-benchmark's JSON."""
        measured = [case for case in saved["benchmarks"] if case["extra_info"]]
        rows = [with_stats(case["extra_info"], case.get("stats") or {}) for case in measured]
        return cls.of(saved, rows + saved.get("unmeasured", []))

    @property
    def accelerator(self) -> str:
        """The name of the accelerator, such as nvidia-h200."""
        return str(self.machine.get("accelerator", "unknown"))

    def study(self, name: str) -> list[Row]:
        """Return the rows of one study."""
        return [row for row in self.rows if row.get("study") == name]

    def origin(self, row: Row) -> Run:
        """Return the run that measured a row; it differs from this run if this run is merged."""
        return row.get("run", self)

    def origins(self, rows: Iterable[Row]) -> list[tuple[Run, list[Row]]]:
        """Return the runs that measured rows, each with its rows."""
        found: dict[int, tuple[Run, list[Row]]] = {}
        for row in rows:
            origin = self.origin(row)
            found.setdefault(id(origin), (origin, []))[1].append(row)
        return list(found.values())

    def roof(self, row: Row, kind: str | None) -> float | None:
        """Return a roof of the run that measured the row, or else of this run."""
        return self.origin(row).roofs.get(kind or "") or self.roofs.get(kind or "")


@dataclass
class Journal:
    """The rows of an unfinished run; each is on disk before the next case starts.

    A new journal has no rows; its first row replaces an older file. If a case failed and was
    measured again, only its newest row counts.
    """

    path: Path
    header: dict[str, Any] | None = None
    rows: list[Row] = field(default_factory=list)

    @classmethod
    def resume(cls, path: Path) -> Journal:
        """Continue an unfinished journal, or start one if there is no file.

        An incomplete last line, left by a killed process, is dropped. Rows that were read have
        ``samples``. The caller must check ``header``.

        Raises:
            ValueError: a line other than the last is invalid.
        """
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        lines = _whole(path, text)
        if lines and not text.endswith("\n"):  # atomic: a second kill must not lose the file
            beside = path.with_suffix(".tmp")
            beside.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
            beside.replace(path)
        return cls(path, lines[0] if lines else None, _newest(lines[1:]))

    def add(self, row: Row, samples: list[float], *, header: dict[str, Any]) -> None:
        """Append a row, with ``samples`` unless it has some; a new file starts with the header."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = [{"samples": samples} | row]
        if self.header is None:
            lines.insert(0, header)
        with self.path.open("w" if self.header is None else "a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        self.header = self.header or header
        self.rows = _newest([*self.rows, row])


def load(path: Path) -> Run:
    """Read a run from .json, or from .jsonl, whose last line may be incomplete.

    Raises:
        ValueError: the file is neither, or has rows of an older version.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            header, *rows = _whole(path, text)
            rows = [_quartiles(row.get("samples") or []) | row for row in _newest(rows)]
            run = Run.of(header, rows)
        else:
            run = Run.saved(json.loads(text))
    except (AttributeError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: wanted a saved run, got {error!r}") from error
    missing = sorted({fact for row in run.rows for fact in CASE if fact not in row})
    if missing:
        raise ValueError(f"{path}: wanted rows with {', '.join(missing)}, got an older version's")
    return replace(run, name=f"{path.parent.name}/{path.name}")


def with_stats(row: Row, stats: dict[str, Any]) -> Row:
    """Return a row with pytest-benchmark's statistics: some as facts, all under ``stats``."""
    known = {fact: stats[name] for fact, name in STATS.items() if name in stats}
    return known | ({"stats": stats} if stats else {}) | row


def _newest(rows: list[Row]) -> list[Row]:
    return list({(row.get("study"), row.get("name")): row for row in rows}.values())


def _quartiles(samples: list[float]) -> dict[str, float]:
    if len(samples) < 2:  # noqa: PLR2004 - one sample has no spread
        return {}
    q1, _, q3 = quantiles(samples, n=4, method="inclusive")
    return {"q1": q1, "q3": q3}


def _whole(path: Path, text: str) -> list[Any]:
    """Return the lines of a journal, without an incomplete last one."""
    *lines, last = text.splitlines() or [""]
    try:
        rows = [json.loads(line) for line in lines]
    except ValueError as error:
        raise ValueError(f"{path}: wanted a row on every line but the last, got {error}") from error
    try:
        return [*rows, json.loads(last)]
    except ValueError:
        return rows


def kept(folder: Path, accelerator: str | None = None) -> list[Run]:
    """Return the saved runs of one accelerator (default: the newest run's), oldest first.

    Raises:
        ValueError: there are none.
    """
    paths = sorted(path for names in KEPT for path in folder.glob(names))
    runs = sorted(map(load, paths), key=_made)
    if not runs:
        raise ValueError(f"no run is kept in {folder}{os.sep}; make one: pytest benchmarks")
    wanted = accelerator or runs[-1].accelerator
    found = [run for run in runs if run.accelerator == wanted]
    if not found:
        names = ", ".join(sorted({run.accelerator for run in runs}))
        raise ValueError(f"accelerator: wanted one of {names}, got {wanted}")
    return found


def merge(runs: Iterable[Run]) -> Run:
    """Merge runs of one accelerator, such as the parts of a job array.

    For each case the newest measured row wins, or the newest row if none was measured. Every row
    names its run under ``run``. Machine and roofs are those of the newest run.

    Raises:
        ValueError: there is no run, or the runs are of different accelerators.
    """
    ordered = sorted(runs, key=_made)
    names = sorted({run.accelerator for run in ordered})
    if len(names) != 1:
        raise ValueError(f"runs: wanted runs of one accelerator, got {', '.join(names) or 'none'}")
    rows: dict[tuple[str, str], Row] = {}
    for run in ordered:
        for row in run.rows:
            case = row["study"], row["name"]
            if row["status"] == "ok" or rows.get(case, row)["status"] != "ok":
                rows[case] = row | {"run": run.origin(row)}
    roofs = next((run.roofs for run in reversed(ordered) if run.roofs), {})
    return replace(ordered[-1], roofs=roofs, rows=list(rows.values()))


def _made(run: Run) -> str:
    return run.made or ""
