"""pytest plugin: mark mutants that were caught before, and whose files have not changed since.

A test with the marker ``mutants`` names the files that it depends on by the marker ``concerns``.
When it has passed, ``--record-caught`` writes a digest of these files to
``tests/mutants/caught.json``. While the digest is the same, the test is marked ``caught``, and
``-m "mutants and not caught"`` leaves it out. One test in eight is not marked; the commit decides
which.
"""

from __future__ import annotations

import json
import subprocess
from functools import cache
from hashlib import sha256
from pathlib import Path
from zlib import crc32

import pytest

RECORD = Path("tests", "mutants", "caught.json")
JUDGES = ("flashattn/testing/accuracy.py", "flashattn/testing/stored.py")  # used by every test
TURNS = 8


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the option that writes the record."""
    said = f"note in {RECORD} which proofs that the suite can fail have passed"
    parser.addoption("--record-caught", action="store_true", help=said)


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers."""
    config.addinivalue_line("markers", "concerns(*paths, of): files, folders and text of a proof")
    config.addinivalue_line("markers", "caught: a proof that concerns nothing that has changed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that need not run again."""
    if "mutants" not in config.option.markexpr:
        return
    known, now = _known(config.rootpath), _turn(config.rootpath)
    for item in items:
        marks = list(item.iter_markers("concerns"))
        if not marks:
            continue
        paths = {path for mark in marks for path in mark.args} | {*JUDGES}
        paths.add(item.path.relative_to(config.rootpath).as_posix())
        of = "\0".join(mark.kwargs.get("of", "") for mark in marks)
        texts = (item.name, of, *(_text(config.rootpath, path) for path in sorted(paths)))
        digest = sha256("\0".join(texts).encode()).hexdigest()[:16]
        item.user_properties.append(("caught", (item.nodeid, digest)))
        turn = crc32(item.nodeid.encode()) % TURNS
        if known.get(item.nodeid) == digest and turn != now:
            item.add_marker("caught")


def _known(root: Path) -> dict[str, str]:
    """Return the digests of the tests that have passed, by test."""
    path = root / RECORD
    return json.loads(path.read_text()) if path.is_file() else {}


def _turn(root: Path) -> int:
    """Return which eighth of the tests is not marked; it depends on the commit."""
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    return int(found.stdout or "0", 16) % TURNS


@cache
def _text(root: Path, path: str) -> str:
    """Return the text of a file, or of all Python files in a folder."""
    found = root / path
    files = sorted(found.rglob("*.py")) if found.is_dir() else [found]
    return "\0".join(file.read_text() for file in files)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Write the record, in the process that receives the reports of all workers."""
    if not config.getoption("--record-caught"):
        return
    passed = terminalreporter.stats.get("passed", [])
    found = dict(dict(x.user_properties).get("caught", ("", "")) for x in passed)
    found.pop("", None)
    # If only some tests were run, the digests of the others stay.
    whole = config.option.markexpr == "mutants" and not config.option.keyword
    known = found if whole else _known(config.rootpath) | found
    (config.rootpath / RECORD).write_text(json.dumps(known, indent=0, sort_keys=True) + "\n")
