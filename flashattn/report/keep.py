"""Keep runs of one clean commit, without samples, in place of the kept runs of other commits."""

from __future__ import annotations

import json
import re
from pathlib import Path

from flashattn.report.runs import ENTRIES, Run, load

NAME = re.compile(r"\d+_\w+-(.+)|unfinished-(.+)-\d{8}T\d{6}-\d+")  # groups: a run's label
SAMPLES = ("stats", "samples")  # facts of a row that are not kept


def keep(paths: list[Path]) -> tuple[list[Path], list[Path]]:
    """Rewrite runs of one machine as kept runs (.jsonl), and remove those that they replace.

    Args:
        paths: saved runs (.json), or unfinished ones (.jsonl).

    Returns:
        The files written, and the removed files of other commits.

    Raises:
        ValueError: the runs are not of one clean commit, or not in one folder.
    """
    paths = list({path.resolve(): path for path in paths}.values())
    runs = {path: load(path) for path in paths}
    commits = {run.commit.get("id", "unknown") for run in runs.values()}
    folders = {path.parent for path in paths}
    changed = [run.name for run in runs.values() if run.commit.get("dirty")]
    if len(commits) != 1 or commits == {"unknown"} or changed:
        said = f"{', '.join(sorted(commits))}{' with changes' * bool(changed)}"
        raise ValueError(f"runs: wanted those of one clean commit, got {said}")
    if len(folders) != 1:
        raise ValueError(f"runs: wanted one folder, got {', '.join(sorted(map(str, folders)))}")
    (folder,), (commit,) = folders, commits
    kept_before = set(folder.glob("[0-9]*_*.jsonl"))
    gone = sorted(path for path in kept_before if load(path).commit.get("id") != commit)
    numbered = set(folder.glob("[0-9]*_*.json*")) - {*gone, *paths}
    numbers = [path.name.partition("_")[0] for path in numbered]
    last = max((int(number) for number in numbers if number.isdecimal()), default=0)
    kept = {}
    for number, (path, run) in enumerate(runs.items(), last + 1):
        found = NAME.fullmatch(path.stem)
        words = [f"{number:04}_{commit[:7]}", *filter(None, found.groups() if found else ())]
        kept[folder / f"{'-'.join(words)}.jsonl"] = _lines(run)
    for path, text in kept.items():
        path.with_suffix(".tmp").write_text(text, encoding="utf-8")
    written = [path.with_suffix(".tmp").replace(path) for path in kept]
    for path in {*paths, *gone}.difference(written):
        path.unlink()
    return written, gone


def _lines(run: Run) -> str:
    """Return a header, and a line for each row."""
    header = {name: getattr(run, fact) for fact, name in ENTRIES.items()}
    rows = [{x: row[x] for x in row if x not in SAMPLES} for row in run.rows]
    return "".join(f"{json.dumps(line)}\n" for line in (header, *rows))
