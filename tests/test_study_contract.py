"""What holds for every study: it answers with whatever rows there are, and only from its rows."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from flashattn.report.runs import Run
from flashattn.report.studies import STUDIES

EACH = pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
OWN = ("study", "name", "status")  # what every row has
BARE = {"name": "x", "reason": "no luck"}


def answers(study, run):
    """Return all that a study makes of a run but its pictures."""
    return study.tables(run), study.findings(run)


def test_studies_are_known_by_their_names():
    """Each study has a name of its own, and there is one for each of the ten."""
    names = "lm warmup profile precision memory attention compile flash launch accuracy"
    assert [study.name for study in STUDIES] == names.split()


@EACH
def test_tables_are_whole(study, made_run):
    """Every table has lines, a cell for each column, and the rows that it tells of."""
    tables = study.tables(made_run)
    assert tables
    assert len({table.caption for table in tables}) == len(tables)
    for table in tables:
        assert table.lines
        assert table.rows
        assert {len(line) for line in table.lines} == {len(table.header)}
        assert all(isinstance(cell, str) for line in table.lines for cell in line)


@EACH
def test_findings_are_sentences(study, made_run):
    """What a study says ends in a full stop and has a number in it, none of them None or nan."""
    found = study.findings(made_run)
    assert found
    for sentence in found:
        assert sentence.endswith(".")
        assert re.search(r"\d", sentence)
        assert not re.search(r"\b(None|nan)\b", sentence)


@EACH
def test_pictures_are_named_after_their_study(study, made_pictures):
    """A study draws at least one picture, each with a title and a name that a file can have."""
    pictures = made_pictures[study.name]
    assert pictures
    for name, figure in pictures.items():
        assert re.fullmatch(rf"{study.name}[-\w]*", name)
        assert figure.get_suptitle()


@EACH
def test_another_study_s_rows_say_nothing(study, made_run):
    """Without rows of its own a study gives nothing."""
    others = replace(made_run, rows=[r for r in made_run.rows if r["study"] != study.name])
    assert answers(study, others) == ([], [])
    assert study.pictures(others) == {}


@EACH
@pytest.mark.parametrize("status", ["unsupported", "oom", "failed", "ok"])
def test_rows_that_say_only_why_are_no_harm(study, made_run, status):
    """A case that ended before it had any facts spoils neither itself nor the other cases."""
    bare = BARE | {"study": study.name, "status": status}
    rows = made_run.study(study.name)
    for run in (Run(machine={}, rows=[bare]), replace(made_run, rows=[*rows, bare])):
        tables, findings = answers(study, run)
        assert all(len(line) == len(t.header) for t in tables for line in t.lines)
        assert not any("None" in sentence for sentence in findings)


@EACH
@pytest.mark.parametrize("status", ["unsupported", "oom", "failed"])
def test_only_reasons_are_no_picture(study, status):
    """A study of which nothing was measured draws nothing."""
    bare = BARE | {"study": study.name, "status": status}
    assert study.pictures(Run(machine={}, rows=[bare])) == {}


@EACH
def test_any_fact_may_be_missing(study, made_run):
    """A fact that is None or not there, as bytes are on a CPU, costs what it says and no more."""
    rows = made_run.study(study.name)
    for fact in sorted({fact for row in rows for fact in row} - set(OWN)):
        without = [{name: row[name] for name in row if name != fact} for row in rows]
        empty = [row | {fact: None} for row in rows]
        for changed in (without, empty):
            tables, _ = answers(study, replace(made_run, rows=changed))
            assert not any("None" in cell for t in tables for line in t.lines for cell in line)


@EACH
def test_no_roofs_no_shares(study, made_run):
    """A run whose roofs were not measured has tables, and in them no share of a roof."""
    said = " ".join(study.findings(replace(made_run, roofs={})))
    assert study.tables(replace(made_run, roofs={}))
    assert " roof" not in said
