"""Runs on disk: as they are made, one row at a time, and as they are kept.

A row is a dict of facts about one case: ``impl``, ``problem`` (its name), every field of the
problem, ``pass``, ``flops``, ``bytes``, ``status`` (ok, unsupported, oom or failed), ``reason`` (a
sentence where the status is not ok), ``seconds`` (the median) and ``clock`` (which seconds).

A kept run is pytest-benchmark's JSON: the measured rows are its ``extra_info``, the others its
``unmeasured``. A run in the making is JSON lines: a header, then the rows with their samples.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one session measured.

    Args:
        machine: what the numbers depend on; see ``flashattn.measure.device.machine_info``.
        commit: ``id`` and ``dirty`` of the code that was measured.
        roofs: flops per second by kind of product, and bytes per second under "copy".
        clocks: hertz of the GPU's multiprocessors ``before`` and ``after``.
        rows: of every case, measured or not.
    """

    machine: dict[str, Any]
    commit: dict[str, Any] = field(default_factory=dict)
    roofs: dict[str, float] = field(default_factory=dict)
    clocks: dict[str, float | None] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    @classmethod
    def of(cls, saved: dict[str, Any], rows: list[Row]) -> Run:
        """Pick out of a file's or a header's entries what describes a run."""
        return cls(
            machine=saved["machine_info"],
            commit=saved.get("commit_info", {}),
            roofs=saved.get("roofs", {}),
            clocks=saved.get("clocks", {}),
            rows=rows,
        )


class Journal:
    """The rows of a run in the making: each is on disk before the next case starts.

    Args:
        path: of the file; an older one is replaced when the first row comes.
    """

    def __init__(self, path: Path) -> None:
        """Begin with no rows; nothing is written yet."""
        self.path = path
        self.rows: list[Row] = []

    def add(self, row: Row, samples: list[float], *, header: dict[str, Any]) -> None:
        """Append a row and its raw samples.

        Args:
            row: the facts.
            samples: seconds of each call; empty where nothing was measured.
            header: what is known about the run; written ahead of the first row.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = [row | {"samples": samples}] if self.rows else [header, row | {"samples": samples}]
        with self.path.open("a" if self.rows else "w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        self.rows.append(row)


def load(path: Path) -> Run:
    """Read a kept run (.json) or one in the making (.jsonl).

    Raises:
        ValueError: the file is neither.
    """
    text = path.read_text(encoding="utf-8")
    try:
        if path.suffix == ".jsonl":
            saved, *rows = [json.loads(line) for line in text.splitlines()]
        else:
            saved = json.loads(text)
            measured = [case["extra_info"] for case in saved["benchmarks"] if case["extra_info"]]
            rows = measured + saved.get("unmeasured", [])
        return Run.of(saved, rows)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: wanted a saved run, got {error!r}") from error


def latest(folder: Path) -> Path | None:
    """Return the kept run in ``folder`` that was made last, None if there is none."""
    runs = list(folder.glob("*/[0-9]*_*.json"))
    made = {path: json.loads(path.read_text(encoding="utf-8"))["datetime"] for path in runs}
    return max(made, key=made.__getitem__, default=None)
