"""Check in SASS whether products on Hopper read what was computed for them, on every path.

A product of the tensor cores reads tiles in shared memory at addresses in uniform registers, and
its left operand may be in vector registers. The assembler of Triton 3.6 has computed an address
along with a loop that may not run, and used it in a second loop behind. If the first loop does not
run, the register holds what something else left there. It has also kept an operand for a whole loop
and given its registers to another one that each step computes. Neither the source nor the PTX shows
that, only wrong numbers on a GPU. But such a register has two sources, whereas what is computed
once, or again in each step, has one. So the law is: for each register of an operand, one source
reaches the product, on whatever path. A source is an instruction that writes the register. One with
a predicate may not execute, so it hides no earlier one. If no instruction has written the register,
the kernel's start is a source, and breaks the law.

The law is too strict: a value that a loop carries on purpose, or that two branches each compute in
their own way, breaks it, too, as do left operands of the Gluon kernels. And it does not see

* what R2UR brings from a vector register, which is how spilled addresses come back: it counts as no
  source, and the writers of that vector register are not checked;
* what a source reads: an address may be computed in the right place from something stale;
* other registers, such as those of the addresses of copies;
* a single source that is the wrong one.

Nor does it check whether a path is ever taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

LINE = re.compile(r"\s*(?:/\*(?P<at>[0-9a-f]+)\*/\s+(?P<text>.*?)[\s;]*$|(?P<label>\.L\w+):)")
LABEL = re.compile(r"\.L\w+")
INSTRUCTION = re.compile(r"(?P<predicate>@!?U?P\w+ )?(?P<name>[A-Z]\w*)(?P<kind>\S*)(?P<rest>.*)")
PREDICATE = re.compile(r"!?U?P(?:\d|T)")
UNIFORM, VECTOR = re.compile(r"UR(\d+)"), re.compile(r"R(\d+)(?:\.reuse)?")
PRODUCT = re.compile(r"[A-Z]GMMA")
ADDRESSES = re.compile(r"gdesc\[UR(\d+)\]")
LEFT = 4  # registers of a left operand
# Instructions that write the uniform register that they name first: uniform ones and moves to them.
WRITERS = re.compile(r"U[A-Z]|(?:R2UR|S2UR|VOTEU|REDUX|ELECT)$")
# Instructions that name a uniform or a vector register first, and only read it.
READERS = re.compile(r"BRA$")
VECTOR_READERS = re.compile(r"ST|RED|BRX|SYNCS|DEPBAR|UTMA|R2UR")
RELOAD = "R2UR"
WIDTHS = {"64": 2, "128": 4, "WIDE": 2, "2": 2, "4": 4}  # of a result, by a word of the kind
BRANCHES = ("BRA", "BRX", "BRXU")
JUMPS = (*BRANCHES, "EXIT")  # and those whose target no label names, which no kernel here has:
UNKNOWN = re.compile(r"(?:CALL|RET|JMP|JMX|JMXU|RTT)$")


@dataclass(frozen=True)
class Instruction:
    """One line of SASS.

    Args:
        at: address in the kernel, hexadecimal.
        text: the whole instruction.
        name: name of the operation, up to the first dot.
        operands: operands, as they are written.
        conditional: whether it may not execute.
        uniform: uniform registers that it writes.
        vector: vector registers that it writes.
    """

    at: str
    text: str
    name: str
    operands: tuple[str, ...]
    conditional: bool
    uniform: range
    vector: range


def stale_addresses(sass: str) -> list[str]:
    """Return a sentence for each register of a product's addresses that breaks the law.

    Args:
        sass: output of ``nvdisasm -c`` for a kernel.

    Raises:
        ValueError: the code has no products, or something unknown in it.
    """
    return _broken(sass, "UR", lambda instruction: instruction.uniform, _addresses)


def stale_operands(sass: str) -> list[str]:
    """Do the same for left operands, which are read from vector registers."""
    return _broken(sass, "R", lambda instruction: instruction.vector, _left_operand)


def _broken(
    sass: str,
    file: str,
    writes: Callable[[Instruction], range],
    reads: Callable[[Instruction], range],
) -> list[str]:
    """Return what breaks the law in one register file."""
    instructions, before = read(sass)
    products = [i for i, instruction in enumerate(instructions) if PRODUCT.match(instruction.name)]
    if not products:
        raise ValueError("wanted products, got none")
    told = ["nothing", *(f"[{x.at} {x.text}]" for x in instructions)]
    written, said = list(map(writes, instructions)), []
    for product in products:
        for register in reads(instructions[product]):
            places = _sources(product, register, instructions, before, written)
            if len(places) > 1 or -1 in places:
                sources = " or ".join(told[i + 1] for i in sorted(places))
                said.append(f"{told[product + 1]} reads in {file}{register} what is of {sources}")
    return said


def _addresses(product: Instruction) -> range:
    """Return the registers of addresses: two of A, unless A is in registers, and two of B."""
    for i, operand in enumerate(product.operands):
        if found := ADDRESSES.match(operand):
            first = int(found[1])
            return range(first if i == 1 else first + 2, first + 4)
    raise ValueError(f"wanted a product with addresses, got {product.text!r}")


def _left_operand(product: Instruction) -> range:
    """Return the registers of A if A is in registers."""
    found = VECTOR.fullmatch(product.operands[1])
    return range(int(found[1]), int(found[1]) + LEFT) if found else range(0)


def _sources(
    product: int,
    register: int,
    instructions: list[Instruction],
    before: list[list[int]],
    written: list[range],
) -> set[int]:
    """Return the indices of possible last writers of a register, without reloads; -1 is none."""
    found, seen, left = set[int](), set[int](), [product]
    while left:
        at = left.pop()
        if at == 0:
            found.add(-1)
        for i in before[at]:
            if i in seen:
                continue
            seen.add(i)
            writes = register in written[i]
            if writes and instructions[i].name != RELOAD:
                found.add(i)
            if not writes or instructions[i].conditional:
                left.append(i)
    return found


def read(sass: str) -> tuple[list[Instruction], list[list[int]]]:
    """Read the output of nvdisasm for one kernel.

    Returns:
        The instructions, and for each the indices of those that may come right before it, of all
        that some path from the start reaches.

    Raises:
        ValueError: what an instruction writes, or where it jumps, is unknown.
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


def _instruction(at: str, text: str) -> Instruction:
    """Read one line."""
    found = INSTRUCTION.fullmatch(text)
    if found is None:
        raise ValueError(f"wanted an instruction of SASS, got {text!r}")
    name, operands = found["name"], tuple(map(str.strip, found["rest"].split(",")))
    # Results come first, or behind a predicate that is also a result.
    result = next(iter(operands[1:] if PREDICATE.fullmatch(operands[0]) else operands), "")
    words = found["kind"].split(".")
    width = max(WIDTHS.get(word, 1) for word in words)
    uniform = vector = range(0)
    if (number := UNIFORM.fullmatch(result)) and not READERS.match(name):
        if not WRITERS.match(name):
            raise ValueError(f"wanted to know whether it writes {result}: {text!r}")
        uniform = range(int(number[1]), int(number[1]) + width)
    if (number := VECTOR.fullmatch(result)) and not VECTOR_READERS.match(name):
        if PRODUCT.match(name):  # one register for two columns
            width = int(words[1].split("x")[1]) // 2
        vector = range(int(number[1]), int(number[1]) + width)
    return Instruction(at, text, name, operands, found["predicate"] is not None, uniform, vector)


def _after(i: int, instruction: Instruction, labels: dict[str, int]) -> list[int]:
    """Return the indices of the instructions that may follow."""
    name, text = instruction.name, instruction.text
    targets = [labels[label] for label in LABEL.findall(text)] if name in BRANCHES else []
    # BSYNC jumps to the target of its BSSY: right behind BSYNC, or else unknown.
    elsewhere = name == "BSYNC" and i + 1 not in labels.values()
    if UNKNOWN.match(name) or elsewhere or (name in BRANCHES and not targets):
        raise ValueError(f"wanted to know where it goes: {text!r}")
    # A branch may have its condition as an operand: BRA.U UP0, `(.L_x_1).
    if name not in JUMPS or instruction.conditional or (name == "BRA" and instruction.operands[1:]):
        return [*targets, i + 1]
    return targets
