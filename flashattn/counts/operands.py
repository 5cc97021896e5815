"""Whether products on Hopper find in vector registers what was put there for them.

The left operand of a product may be numbers in registers. The assembler of Triton 3.6 has kept such
an operand for a whole loop and given its registers to another that each step computes: from the
second step on the product read that. As with addresses, neither the source nor the PTX shows it,
and the law is theirs: each register of such an operand has one source that reaches the product.

An operand that two places compute on purpose, ahead of a loop and in it, breaks the law too, as in
the kernels in Gluon. The portable ones have none.
"""

from __future__ import annotations

import re

from flashattn.counts.addresses import PREDICATE, PRODUCT, Instruction, read, sources_of

VECTOR = re.compile(r"R(\d+)(?:\.reuse)?")
LEFT = 4  # registers of a left operand
# What names a vector register first, and only reads it.
READERS = re.compile(r"ST|RED|BRX|SYNCS|DEPBAR|UTMA|R2UR")
WIDTHS = {"64": 2, "128": 4, "WIDE": 2, "2": 2, "4": 4}  # of a result, by a word of the kind


def _writes(instruction: Instruction) -> range:
    """Return the vector registers that an instruction writes."""
    operands, name = instruction.operands, instruction.name
    if PREDICATE.fullmatch(operands[0]):
        operands = operands[1:]
    found = VECTOR.fullmatch(operands[0]) if operands else None
    if found is None or READERS.match(name):
        return range(0)
    first, kind = int(found[1]), instruction.text.partition(name)[2].split()[0].split(".")
    if PRODUCT.match(name):
        _, columns, _ = kind[1].split("x")
        return range(first, first + int(columns) // 2)
    return range(first, first + max(WIDTHS.get(word, 1) for word in kind))


def findings(sass: str) -> list[str]:
    """Return a sentence for each register of a left operand that has several sources.

    Args:
        sass: what ``nvdisasm -c`` prints of a kernel.

    Raises:
        ValueError: something in it nobody knows.
    """
    instructions, before = read(sass)
    writes, said = list(map(_writes, instructions)), []
    for i, product in enumerate(instructions):
        left = VECTOR.fullmatch(product.operands[1]) if PRODUCT.match(product.name) else None
        for register in range(int(left[1]), int(left[1]) + LEFT) if left else ():
            places = sorted(sources_of(i, register, instructions, before, writes))
            if len(places) > 1:
                names = ("nothing" if x < 0 else f"[{instructions[x]}]" for x in places)
                said.append(f"[{product}] reads in R{register} what is of {' or '.join(names)}")
    return said
