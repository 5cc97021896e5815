"""Whether products on Hopper read addresses that were computed for them, on every way to them.

A product of the tensor cores reads tiles in shared memory at addresses in uniform registers. The
assembler of Triton 3.6 has put what computes one before a loop that may be left out, and used it
in a second loop behind: where the first is left out, the register holds what something else left
there. Neither the source nor the PTX shows that, only numbers on a GPU. But such a register has
two sources, and an address that is computed once, or anew in each step, has one. So the law is:
each register of an operand has one source that reaches the product, on whatever way. A source is
an instruction that writes the register; one with a predicate may not happen, and hides no earlier
one. Where none has written it, the kernel's start is a source, and breaks the law.

The law asks for more than it must: an address that a loop carries on purpose, or that two branches
compute each in its way, breaks it too. And it does not see

* what R2UR brings from a vector register, which is how addresses come back that were put aside:
  it counts as no source, and who wrote that vector register is not asked;
* what a source reads: an address may be computed where it should be, from something stale;
* other registers: numbers that a product takes from vector registers, and addresses of copies;
* a single source that is the wrong one.

Nor does it ask whether a way is ever taken.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

LINE = re.compile(r"\s*(?:/\*(?P<at>[0-9a-f]+)\*/\s+(?P<text>.*?)[\s;]*$|(?P<label>\.L\w+):)")
LABEL = re.compile(r"\.L\w+")
INSTRUCTION = re.compile(r"(?P<predicate>@!?U?P\w+ )?(?P<name>[A-Z]\w*)(?P<kind>\S*)(?P<rest>.*)")
PREDICATE = re.compile(r"!?U?P(?:\d|T)")
UNIFORM = re.compile(r"UR(\d+)")
PRODUCT = re.compile(r"[A-Z]GMMA")
ADDRESSES = re.compile(r"gdesc\[UR(\d+)\]")
# Who writes a uniform register that it names first: the uniform unit, and who hands it something.
WRITERS = re.compile(r"U[A-Z]|(?:R2UR|S2UR|VOTEU|REDUX|ELECT)$")
READERS = ("BRA",)
RELOAD = "R2UR"
WIDTHS = {"64": 2, "WIDE": 2}  # registers of a result, by a word of the kind
JUMPS = ("BRA", "BRX", "EXIT")  # and what goes where no label says, which no kernel here does:
UNKNOWN = re.compile(r"(?:CALL|RET|JMP|JMX|BRXU|JMXU|RTT)$")


@dataclass(frozen=True)
class Instruction:
    """One line of SASS.

    Args:
        at: its address in the kernel, hexadecimal.
        text: all of it.
        name: of the operation, to the first dot.
        operands: as they are written.
        conditional: whether it may not happen.
        writes: uniform registers.
    """

    at: str
    text: str
    name: str
    operands: tuple[str, ...]
    conditional: bool
    writes: range

    def __str__(self) -> str:
        """Return it as it stands in the code."""
        return f"{self.at} {self.text}"

    @property
    def reads(self) -> range:
        """Registers of a product's addresses: two of A, unless that is numbers, and two of B.

        Raises:
            ValueError: it names them in another way.
        """
        for i, operand in enumerate(self.operands):
            if found := ADDRESSES.match(operand):
                first = int(found[1])
                return range(first if i == 1 else first + 2, first + 4)
        raise ValueError(f"wanted a product with addresses, got {self.text!r}")


@dataclass(frozen=True)
class Finding:
    """A register of a product's addresses with several sources.

    Args:
        product: the instruction.
        register: number of the register.
        sources: who may have written it last, reloads left out; None where nobody has.
    """

    product: Instruction
    register: int
    sources: tuple[Instruction | None, ...]

    def __str__(self) -> str:
        """Say what is read and whose it may be."""
        sources = " or ".join("nothing" if x is None else f"[{x}]" for x in self.sources)
        return f"[{self.product}] reads in UR{self.register} what is of {sources}"


def _instruction(at: str, text: str) -> Instruction:
    """Read one line.

    Raises:
        ValueError: nobody knows what it is, or what it writes.
    """
    found = INSTRUCTION.fullmatch(text)
    if found is None:
        raise ValueError(f"wanted an instruction of SASS, got {text!r}")
    name, operands = found["name"], tuple(map(str.strip, found["rest"].split(",")))
    # Results stand first, or behind a predicate that is one too.
    result = next(iter(operands[1:] if PREDICATE.fullmatch(operands[0]) else operands), "")
    number, writes = UNIFORM.fullmatch(result), range(0)
    if number and name not in READERS:
        if not WRITERS.match(name):
            raise ValueError(f"wanted to know whether it writes {result}: {text!r}")
        first = int(number[1])
        writes = range(first, first + max(WIDTHS.get(x, 1) for x in found["kind"].split(".")))
    return Instruction(at, text, name, operands, found["predicate"] is not None, writes)


def read(sass: str) -> tuple[list[Instruction], list[list[int]]]:
    """Read what nvdisasm prints of one kernel.

    Returns:
        The instructions, and for each the places of those that may come right before it, of all
        that some way from the start reaches.

    Raises:
        ValueError: an instruction writes, or goes, nobody knows where.
    """
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in filter(None, map(LINE.match, sass.splitlines())):
        if line["label"]:
            labels[line["label"]] = len(instructions)
        else:
            instructions.append(_instruction(line["at"], " ".join(line["text"].split())))
    before: list[list[int]] = [[] for _ in instructions]
    left, seen = [0], set[int]()
    while left:
        i = left.pop()
        if i < len(instructions) and i not in seen:
            seen.add(i)
            for after in _after(i, instructions[i], labels):
                left.append(after)
                if after < len(instructions):
                    before[after].append(i)
    return instructions, before


def _after(i: int, instruction: Instruction, labels: dict[str, int]) -> list[int]:
    """Return where an instruction may go."""
    name, text = instruction.name, instruction.text
    targets = [labels[label] for label in LABEL.findall(text)] if name in ("BRA", "BRX") else []
    # BSYNC goes to where its BSSY says, which is behind it or, if not, somewhere else.
    elsewhere = name == "BSYNC" and i + 1 not in labels.values()
    if UNKNOWN.match(name) or elsewhere or (name in ("BRA", "BRX") and not targets):
        raise ValueError(f"wanted to know where it goes: {text!r}")
    # A branch may have its condition as an operand: BRA.U UP0, `(.L_x_1).
    if name not in JUMPS or instruction.conditional or (name == "BRA" and instruction.operands[1:]):
        return [*targets, i + 1]
    return targets


def sources_of(
    product: int,
    register: int,
    instructions: list[Instruction],
    before: list[list[int]],
    writes: list[range],
) -> set[int]:
    """Return who may have written what a product reads, reloads left out; -1 is nobody.

    Args:
        product: its place.
        register: that it reads.
        instructions: see ``read``.
        before: likewise.
        writes: registers that each instruction writes.
    """
    found, seen, left = set[int](), set[int](), [product]
    while left:
        at = left.pop()
        if at == 0:
            found.add(-1)
        for i in before[at]:
            if i in seen:
                continue
            seen.add(i)
            written = register in writes[i]
            if written and instructions[i].name != RELOAD:
                found.add(i)
            if not written or instructions[i].conditional:
                left.append(i)
    return found


def findings(sass: str) -> list[Finding]:
    """Return where a kernel breaks the law.

    Args:
        sass: what ``nvdisasm -c`` prints of it.

    Raises:
        ValueError: it has no products, or something in it nobody knows.
    """
    instructions, before = read(sass)
    products = [i for i, instruction in enumerate(instructions) if PRODUCT.match(instruction.name)]
    if not products:
        raise ValueError("wanted products, got none")
    found, writes = [], [instruction.writes for instruction in instructions]
    for product in products:
        for register in instructions[product].reads:
            places = sorted(sources_of(product, register, instructions, before, writes))
            if len(places) > 1 or -1 in places:
                sources = tuple(None if i < 0 else instructions[i] for i in places)
                found.append(Finding(instructions[product], register, sources))
    return found
