"""``flashattn.counts.compiled`` recounts the cases whose source has changed, and no others."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from flashattn.counts import compiled
from flashattn.counts.expect import SOURCE

MADE_OF = {
    "module": "tt.return",
    "options": {"num_warps": 4},
    "arch": "sm_90",
    "launch": "64x64",
    "triton": "3.9.0",
    "ptxas": "12.9",
    "counters": "a function",
}


@pytest.fixture
def source(monkeypatch):
    """Return a function that hashes the source of a made-up row."""

    def run(libraries="/here", **others):
        given = SimpleNamespace(**MADE_OF | others)
        front = SimpleNamespace(
            options=SimpleNamespace(extern_libs=libraries, **given.options),
            module=SimpleNamespace(str_nodebug=lambda: given.module),
        )
        monkeypatch.setattr(compiled, "front_end", lambda _: front)
        monkeypatch.setattr(compiled, "triton", SimpleNamespace(__version__=given.triton))
        monkeypatch.setattr(compiled, "_assemblers", lambda: {given.arch: given.ptxas})
        monkeypatch.setattr(compiled, "COUNTERS", given.counters)
        return compiled.source_hash(given)

    return run


def test_all_that_makes_a_row_is_in_its_source(source):
    """The hash covers the module, options, launch, versions and counters, but no paths."""
    assert source("/elsewhere") == source()
    others = MADE_OF | dict.fromkeys(MADE_OF, "other") | {"options": {"num_warps": 8}}
    changed = {source(**{name: other}) for name, other in others.items()}
    assert len(changed - {source()}) == len(MADE_OF)


@pytest.fixture
def collected(monkeypatch):
    """Return a function that collects cases of made-up sources, and what it compiles for them."""
    monkeypatch.setattr(compiled, "ProcessPoolExecutor", ThreadPoolExecutor)

    def run(sources, known, complaint=None):
        seen = []

        def compile_one(case):
            seen.append(case)
            return {"stack": 0}, complaint

        monkeypatch.setattr(compiled, "variants", lambda: list(sources))
        monkeypatch.setattr(compiled, "source_hash", sources.get)
        monkeypatch.setattr(compiled, "_compile", compile_one)
        return (*compiled.collect(sources, known), seen)

    return run


def test_only_what_changed_is_compiled(collected):
    """A row is kept while its source is the same, and counted again when it changes."""
    before = {"same": "1", "changed": "2", "gone": "3"}
    rows, _, seen = collected(before, {})
    assert seen == list(before)
    assert rows == {case: {"stack": 0, SOURCE: source} for case, source in before.items()}
    after = {"same": "1", "changed": "4", "new": "3"}
    again, _, seen = collected(after, rows | {"same": {"stack": 5, SOURCE: "1"}})
    assert seen == ["changed", "new"]
    assert again["same"] == {"stack": 5, SOURCE: "1"}
    assert again["changed"][SOURCE] == "4"


def test_a_complaint_is_never_hidden(collected):
    """A case with a complaint is compiled each time, until it has none."""
    sources, rows = {"case": "1"}, {}
    for complaint in ("spills", "spills", None):
        rows, complaints, seen = collected(sources, rows, complaint)
        assert complaints == [f"case: {complaint}"] * bool(complaint)
        assert seen == ["case"]
    assert collected(sources, rows, "spills") == (rows, [], [])
