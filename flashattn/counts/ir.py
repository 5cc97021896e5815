"""Hash what each kernel is lowered to, to prove that a refactoring changed no machine code.

    python -m flashattn.counts.ir > before.txt
    python -m flashattn.counts.ir > after.txt
    python -m flashattn.counts.ir --same before.txt after.txt

Each variant of every kernel is compiled as far as Triton's GPU dialect (TTGIR) and hashed without
the names of functions, values and source lines, and without unused arguments, so that only what is
computed counts. The names of variants may change, too: the hashes of two lists are compared as
multisets.

Exit status: 0 the same; 1 different, or a variant does not compile; 2 a wrong argument.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # read when Triton is imported, which is next

from flashattn.counts.offline import Variant, digest, front_end
from flashattn.counts.variants import variants

SOURCE_LINE = re.compile(r"(^#loc.*$)|\s*loc\((?:[^()]|\([^()]*\))*\)", re.MULTILINE)
SIGNATURE = re.compile(r"tt\.func public @[\w$.]+\((.*?)\) attributes", re.DOTALL)
NAME = re.compile(r"[%@][\w$.-]+")
DEFINITION = re.compile(
    r"([%@][\w$.-]+)(?=(?P<new>(?::\d+)? = |: )?)"
)  # or a use, which has no new
CONSTANT = re.compile(r"^ *(%[\w$.-]+) = arith\.constant (.*)\n", re.MULTILINE)
ALIAS = re.compile(r"^(#\w+) = (.*)\n", re.MULTILINE)
USED_ALIAS = re.compile(r"#\w+\b(?!\.)")


def canonical(module: str) -> str:
    """Return a module's text without source lines and names.

    Functions and values are numbered in the order of the body; constants and layouts stand where
    they are used; arguments that the body does not use are left out, the others in that order.
    """
    numbers: dict[str, str] = {}
    fresh = count()

    def number(found: re.Match[str]) -> str:
        name = found[1]
        if found["new"] or name not in numbers:  # regions side by side use a name twice
            numbers[name] = f"{name[0]}{next(fresh)}"
        return numbers[name]

    text = SOURCE_LINE.sub("", module)
    for definition, used in ((ALIAS, USED_ALIAS), (CONSTANT, NAME)):
        known = {name: f"({value})" for name, value in definition.findall(text)}
        text = used.sub(partial(_inline, known), definition.sub("", text))
    signature = SIGNATURE.search(text)
    arguments = re.split(r", (?=%)", signature[1]) if signature else []
    body = DEFINITION.sub(number, SIGNATURE.sub("", text))
    names = [NAME.match(one)[0] for one in arguments]  # type: ignore[index]
    taken = [
        one.replace(x, numbers[x], 1)
        for x, one in zip(names, arguments, strict=True)
        if x in numbers
    ]
    lines = (line for line in body.splitlines() if line)  # a source line leaves an empty one
    return "\n".join([*sorted(taken), *lines])


def lowered(variant: Any) -> str:
    """Return the TTGIR of a variant as Triton prints it."""
    front = front_end(variant)
    stages: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    front.backend.add_stages(stages, front.options, front.source.language)
    module = front.module
    for name in list(stages)[list(stages).index(front.source.ext) :]:
        module = stages[name](module, metadata)
        if name == "ttgir":
            break
    return str(module)


def _inline(known: dict[str, str], found: re.Match[str]) -> str:
    """Return what a name stands for."""
    return known.get(found[0], found[0])


def _hash(variant: Variant) -> str:
    try:
        return digest(canonical(lowered(variant)))
    except Exception as error:  # noqa: BLE001 - one that does not compile must not hide the others
        return f"FAILED {type(error).__name__}"


def _rows(path: Path) -> dict[str, str]:
    """Return the hash of each variant in a list."""
    rows = (line.split(" ", 1) for line in path.read_text("utf-8").splitlines())
    return {name: value for value, name in rows}


def differences(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Return a sentence for each variant whose hash the other list lacks."""
    had, have = Counter(before.values()), Counter(after.values())
    gone = [f"only before: {name}" for name, value in before.items() if had[value] > have[value]]
    return gone + [
        f"only after: {name}" for name, value in after.items() if have[value] > had[value]
    ]


def main() -> int:
    """Print the list, or compare two; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m flashattn.counts.ir", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", default="", metavar="TEXT", help="variants with this in a name")
    parser.add_argument("--same", nargs=2, type=Path, metavar="LIST", help="compare two lists")
    options = parser.parse_args()
    if options.same:
        found = differences(*map(_rows, options.same))
        print("\n".join(found) or "the same")
        return bool(found)
    wanted = [variant for variant in variants() if options.only in str(variant)]
    with ProcessPoolExecutor() as pool:
        hashes = list(pool.map(_hash, wanted, chunksize=4))
    for variant, value in zip(wanted, hashes, strict=True):
        print(value, variant)
    return any(value.startswith("FAILED") for value in hashes)


if __name__ == "__main__":
    sys.exit(main())
