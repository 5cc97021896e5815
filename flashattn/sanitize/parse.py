"""What a sanitizer said, as findings: of which case, of which kernel, how often."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flashattn.sanitize.cases import BEGIN, END

OURS = re.compile(r"\bflashattn_\w+")
NAMED = re.compile(r"\bat (?:0x[0-9a-f]+ in )?(?:void )?([A-Za-z_][\w:]*)")
SAID = re.compile(r"^=========\s?(.*)$")
SUMMARY = re.compile(r"^(?:ERROR|RACECHECK|INITCHECK) SUMMARY: (\d+) (?:error|hazard)s?\b(?! were)")
# A line of the tool that begins a finding; those that follow it say where and by whom.
HEADLINE = re.compile(
    r"^(?:Invalid|Uninitialized|Misaligned|Program hit|Barrier error|Leaked|Internal"
    r"|(?:Error|Warning): (?:Race reported|Potential \w+ hazard))"
)
# What Triton's own instrumentation asserts: file:line: f: block: ..., thread: ... Assertion `x` ...
ASSERTION = re.compile(r"Assertion `(.*?)` failed|^(Deadlock detected .*)$")
# Numbers of a thread or an address: they make many findings of one.
PARTICULARS = re.compile(r"\+0x[0-9a-f]+|0x[0-9a-f]+|\(\d+,\d+,\d+\)|\[\d+ hazards\]")


@dataclass(frozen=True)
class Finding:
    """One kind of thing that a sanitizer found.

    Args:
        what: in its words, without addresses.
        kernel: in which; None where it does not say.
        case: the one that was running; None between cases.
        count: how often it was printed.
    """

    what: str
    kernel: str | None
    case: str | None
    count: int = 1

    @property
    def ours(self) -> bool:
        """Whether it is of one of our kernels, or of nobody's: what is not named is not excused."""
        return self.kernel is None or OURS.match(self.kernel) is not None


@dataclass(frozen=True)
class Said:
    """All that a tool printed, read.

    Args:
        findings: each kind once.
        done: names of the cases that ran to their end.
        total: what its summary counts, printed or not; None without a summary.
    """

    findings: Sequence[Finding]
    done: Sequence[str]
    total: int | None


def parse(text: str) -> Said:
    """Read what a tool and the cases under it printed, in the order in which they did."""
    found: Counter[tuple[str, str | None, str | None]] = Counter()
    done, case, total = [], None, None
    block: list[str] = []  # the finding that is being read

    def close() -> None:
        if block:
            what = " ".join(PARTICULARS.sub("", block[0]).split())
            found[what, kernel_of(block), case] += 1
        block.clear()

    for line in text.splitlines():
        said, asserted = SAID.match(line), ASSERTION.search(line)
        if said and HEADLINE.match(said[1]):
            close()
            block.append(said[1])
        elif said:
            summary = SUMMARY.match(said[1])
            total = int(summary[1]) if summary else total
            if summary or not block:
                close()
            else:
                block.append(said[1].strip())
        elif asserted:
            close()
            found[asserted[1] or asserted[2], kernel_of([line]), case] += 1
        elif line.startswith((f"{BEGIN} ", f"{END} ")):
            close()
            word, _, name = line.partition(" ")
            done += [name] if word == END else []
            case = name if word == BEGIN else None
    close()
    return Said([Finding(*key, count) for key, count in found.items()], done, total)


def kernel_of(lines: Iterable[str]) -> str | None:
    """Return the kernel that a finding's lines name: ours if one of them does, else the first."""
    text = "\n".join(lines)
    ours, named = OURS.search(text), NAMED.search(text)
    return ours[0] if ours else named[1] if named else None
