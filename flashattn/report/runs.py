"""Runs on disk: as they are made, one row at a time; as they are kept; and several as one.

A row is a dict of facts about one case: ``study`` and ``name`` (unique within the study),
``status`` (ok, unsupported, oom or failed), ``reason`` (a sentence where the status is not ok) and,
where it was timed, ``seconds`` (the median), ``mean``, ``std``, ``rounds``, ``q1`` and ``q3`` (the
quartiles) and ``clock`` (which seconds). Every study adds facts of its own.

A kept run is pytest-benchmark's JSON: the measured rows are its ``stats`` and ``extra_info``, the
others its ``unmeasured``. A run in the making is JSON lines: a header, then the rows with their
samples. One that will not be finished is kept by giving its file a name with a number.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from statistics import quantiles
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

Row = dict[str, Any]
CASE = ("study", "name", "status")  # what every row has
# What pytest-benchmark calls the runs that it saves, and how one that broke off is kept by hand.
KEPT = ("*/[0-9]*_*.json", "*/[0-9]*_*.jsonl")
# A row's names of pytest-benchmark's statistics.
STATS = {"seconds": "median", "mean": "mean", "std": "stddev", "rounds": "rounds"}
STATS |= {"q1": "q1", "q3": "q3"}
# A run's names of a file's or a header's entries.
ENTRIES = {"machine": "machine_info", "commit": "commit_info", "made": "datetime"}
ENTRIES |= {name: name for name in ("roofs", "clocks", "command", "sources")}


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one session measured, or several on one accelerator.

    Args:
        machine: what the numbers depend on; see ``flashattn.measure.device.machine_info``.
        commit: ``id`` and ``dirty`` of the code that was measured.
        roofs: flops per second by kind of product, and bytes per second under "copy".
        clocks: hertz of the GPU's multiprocessors ``before`` and ``after``.
        command: that made it.
        sources: a digest of the code, for where there is no commit.
        made: when, as an ISO date in UTC.
        name: of the file and of the folder that it is in.
        rows: of every case, measured or not.
    """

    machine: dict[str, Any]
    commit: dict[str, Any] = field(default_factory=dict)
    roofs: dict[str, float] = field(default_factory=dict)
    clocks: dict[str, float | None] = field(default_factory=dict)
    command: str | None = None
    sources: str | None = None
    made: str | None = None
    name: str | None = None
    rows: list[Row] = field(default_factory=list)

    @classmethod
    def of(cls, saved: dict[str, Any], rows: list[Row]) -> Run:
        """Pick out of a file's or a header's entries what describes a run."""
        found = {fact: saved[name] for fact, name in ENTRIES.items() if name in saved}
        return cls(**found, rows=rows)

    @property
    def accelerator(self) -> str:
        """The name of what was measured: nvidia-h200."""
        return str(self.machine.get("accelerator", "unknown"))

    def study(self, name: str) -> list[Row]:
        """Return the rows of one study."""
        return [row for row in self.rows if row.get("study") == name]

    def origin(self, row: Row) -> Run:
        """Return the run that a row was made in: not this one if this one was merged."""
        return row.get("run", self)

    def roof(self, row: Row, kind: str | None) -> float | None:
        """Return the roof of one kind that was measured beside a row, or else the merged run's."""
        return self.origin(row).roofs.get(kind or "") or self.roofs.get(kind or "")


class Journal:
    """The rows of a run in the making: each is on disk before the next case starts.

    Args:
        path: of the file; an older one is replaced when the first row comes.
    """

    def __init__(self, path: Path) -> None:
        """Begin with no rows; nothing is written yet."""
        self.path = path
        self.header: dict[str, Any] | None = None
        self.rows: list[Row] = []

    @classmethod
    def resume(cls, path: Path) -> Journal:
        """Go on after the last whole row of an unfinished journal; without one, begin.

        A process that is killed leaves its last line cut off in the middle: it is dropped. Rows
        that were read carry their ``samples``. Whether ``header`` fits is for the caller to say.

        Raises:
            ValueError: a line that is not the last is no row.
        """
        journal = cls(path)
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        lines = _whole(path, text)
        if not lines:
            return journal
        journal.header, *journal.rows = lines
        if not text.endswith("\n"):  # replaced in one step, or a second kill could lose it all
            beside = path.with_suffix(".tmp")
            beside.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
            beside.replace(path)
        return journal

    def add(self, row: Row, samples: list[float], *, header: dict[str, Any]) -> None:
        """Append a row and its raw samples.

        Args:
            row: the facts; ``samples`` among them stay what they are.
            samples: seconds of each call; empty where nothing was measured.
            header: what is known about the run; written ahead of the first row.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = [{"samples": samples} | row]
        if self.header is None:
            lines.insert(0, header)
        with self.path.open("w" if self.header is None else "a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        self.header = self.header or header
        self.rows.append(row)


def load(path: Path) -> Run:
    """Read a kept run (.json) or one in the making (.jsonl), whose last line may be cut off.

    Raises:
        ValueError: the file is neither, or is from before rows named their study.
    """
    text = path.read_text(encoding="utf-8")
    try:
        if path.suffix == ".jsonl":
            saved, *rows = _whole(path, text)
            rows = [_quartiles(row.get("samples") or []) | row for row in rows]
        else:
            saved = json.loads(text)
            rows = [_row(case) for case in saved["benchmarks"] if case["extra_info"]]
            rows += saved.get("unmeasured", [])
        run = Run.of(saved, rows)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: wanted a saved run, got {error!r}") from error
    missing = sorted({fact for row in rows for fact in CASE if fact not in row})
    if missing:
        raise ValueError(f"{path}: wanted rows with {', '.join(missing)}, got an older version's")
    return replace(run, name=f"{path.parent.name}/{path.name}")


def _row(case: dict[str, Any]) -> Row:
    """Return what pytest-benchmark saved of a case as a row."""
    stats = case.get("stats") or {}
    return {fact: stats[name] for fact, name in STATS.items() if name in stats} | case["extra_info"]


def _quartiles(samples: list[float]) -> dict[str, float]:
    if len(samples) < 2:  # noqa: PLR2004 - one sample has no spread
        return {}
    q1, _, q3 = quantiles(samples, n=4, method="inclusive")
    return {"q1": q1, "q3": q3}


def _whole(path: Path, text: str) -> list[Any]:
    """Return the lines of a journal without the last one if that was cut off."""
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
    """Return the runs that are kept of one accelerator, oldest first.

    Args:
        folder: of the runs, with a folder in it for each accelerator.
        accelerator: whose; None means the one that was measured last.

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
    """Return runs of one accelerator, as the parts of an array of jobs leave them, as one.

    Of each case the newest row that was measured is kept, or the newest where none was. Every row
    remembers under ``run`` where it comes from; the machine and the roofs are the newest's.

    Raises:
        ValueError: there is no run, or they are of different accelerators.
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
