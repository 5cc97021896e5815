"""Expectations: files of rows, one line per case, that counts must equal in both directions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Rows = dict[str, dict[str, Any]]  # case: counts by name
SOURCE = "source"  # the name in a row of the hash of its source, which is no count


def read(path: Path) -> Rows:
    """Return the rows of an expectation."""
    return json.loads(path.read_text(encoding="utf-8"))


def write(path: Path, rows: Rows) -> None:
    """Write an expectation, sorted, one line per case, so that a difference is one line."""
    lines = (f"{json.dumps(case)}: {json.dumps(rows[case])}" for case in sorted(rows))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def unchanged(known: Rows, got: Rows) -> list[str]:
    """Return the cases whose source is the same as in the known row."""
    sources = {case: row[SOURCE] for case, row in known.items() if SOURCE in row}
    return [case for case in sources if sources[case] == got.get(case, {}).get(SOURCE)]


def differences(expected: Rows, got: Rows) -> list[str]:
    """Return a sentence for each case that differs, is missing or is not expected.

    Sources are not compared: counts may be the same when the source is not.
    """
    expected, got = _counts(expected), _counts(got)
    sentences = []
    for case in sorted(expected.keys() | got.keys()):
        if case not in got:
            sentences.append(f"{case}: missing; expected {expected[case]}")
        elif case not in expected:
            sentences.append(f"{case}: not expected; got {got[case]}")
        elif expected[case] != got[case]:
            sentences.append(f"{case}: {_changes(expected[case], got[case])}")
    return sentences


def _counts(rows: Rows) -> Rows:
    """Return rows without their sources."""
    return {
        case: {name: value for name, value in row.items() if name != SOURCE}
        for case, row in rows.items()
    }


def _changes(expected: dict[str, Any], got: dict[str, Any]) -> str:
    """Say which numbers of one case changed."""
    return "; ".join(
        f"{name}: expected {expected.get(name)}, got {got.get(name)}"
        for name in [*got, *(name for name in expected if name not in got)]
        if expected.get(name) != got.get(name)
    )
