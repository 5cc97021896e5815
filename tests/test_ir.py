"""``flashattn.counts.ir``: a hash is of what is computed, whatever things are called."""

from __future__ import annotations

import subprocess
import sys

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
    "aa one\nbb two": "0 the same",
    "aa renamed\nbb two": "0 the same",
    "aa one\ncc two": "1 only before: two; only after: two",
    "aa one": "1 only before: two",
}
# In a process of its own: the module's import switches the interpreter off.
CODE = """
import io, sys
from contextlib import redirect_stdout
from flashattn.counts.ir import canonical, main
count = int(sys.argv[1])
one, *others = map(canonical, sys.argv[2 : 3 + count])
print(*(other == one for other in others))
for path in sys.argv[3 + count :]:
    sys.argv = ["ir", "--same", "before", path]
    with redirect_stdout(io.StringIO()) as said:
        status = main()
    print(int(status), "; ".join(said.getvalue().splitlines()))
"""


def test_what_is_computed_counts_and_nothing_else(tmp_path):
    """Names, lines and unused arguments do not show, and anything else does; so in lists."""
    texts = [MODULE]
    for changes in CHANGES.values():
        text = MODULE
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        texts.append(text)
    for name, text in zip(
        ("before", *map(str, range(len(LISTS)))), ("aa one\nbb two", *LISTS), strict=True
    ):
        (tmp_path / name).write_text(text + "\n")
    command = [sys.executable, "-c", CODE, str(len(CHANGES)), *texts, *map(str, range(len(LISTS)))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=True, text=True)
    equal, *lists = done.stdout.splitlines()
    found = dict(zip(CHANGES, equal.split(), strict=True))
    assert found == {change: str(change in SAME) for change in CHANGES}
    assert lists == list(LISTS.values())
