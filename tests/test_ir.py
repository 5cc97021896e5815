"""``flashattn.counts.ir``: a hash is of what is computed, whatever things are called."""

from __future__ import annotations

import os
import sys
from importlib import import_module

import pytest

# Before the interpreter is switched off, or kernels that are imported then would be compiled.
import flashattn.counts.offline
import flashattn.counts.variants  # noqa: F401

MODULE = """#layout = #ttg.blocked<{sizePerThread = [1]}>
module {
  tt.func public @kernel(%q: !tt.ptr<f16> loc("q"), %unused: i32) attributes {noinline = false} {
    %c = arith.constant 16 : i32
    %x = tt.addptr %q, %c : tensor<!tt.ptr<f16>, #layout> loc(#loc1)
    tt.store %x, %q : !tt.ptr<f16>
    tt.return
  }
}
#loc1 = loc("kernel.py":7:3)
"""
CHANGES = {
    "names": (("%q", "%query"), ("@kernel", "@other"), ("%x", "%at"), ("#layout", "#blocked")),
    "lines": (("7:3", "9:1"),),
    "an argument that nobody uses": ((", %unused: i32", ""),),
    "a number": (("constant 16", "constant 32"),),
    "an operation": (("tt.addptr", "arith.addi"),),
    "the order of operands": (("%x, %q", "%q, %x"),),
    "a layout": (("[1]", "[2]"),),
    "the type of an argument": (("f16> loc", "f32> loc"),),
}
SAME = ("names", "lines", "an argument that nobody uses")
LISTS = {
    "aa one\nbb two": (0, "the same"),
    "aa renamed\nbb two": (0, "the same"),
    "aa one\ncc two": (1, "only before: two\nonly after: two"),
    "aa one": (1, "only before: two"),
}


@pytest.fixture
def ir(monkeypatch):
    """Return the module, whose import switches the interpreter off, with that as it was."""
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "0"))
    return import_module("flashattn.counts.ir")


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_computed_counts_and_nothing_else(ir, change):
    """Names, lines and unused arguments do not show, and anything else does."""
    text = MODULE
    for old, new in CHANGES[change]:
        assert old in text
        text = text.replace(old, new)
    assert (ir.canonical(text) == ir.canonical(MODULE)) == (change in SAME)


@pytest.mark.parametrize("after", LISTS)
def test_lists_are_compared_by_their_hashes(ir, after, tmp_path, monkeypatch, capsys):
    """A variant may have another name; one that the other list lacks is told, and is status 1."""
    (tmp_path / "before").write_text("aa one\nbb two\n")
    (tmp_path / "after").write_text(f"{after}\n")
    lists = [str(tmp_path / name) for name in ("before", "after")]
    monkeypatch.setattr(sys, "argv", ["ir", "--same", *lists])
    status, said = LISTS[after]
    assert ir.main() == status
    assert capsys.readouterr().out == f"{said}\n"
