"""Resources of a compiled kernel: registers, spills, shared memory, matrix instructions."""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

# The most bytes that a CTA can have on every GPU of a family: sm_80 stands for all of 8.x and 12.x,
# where consumer cards have 99 KiB.
SHARED_LIMIT = {"sm_80": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
EXECUTABLE = 4  # flag of a section of an ELF file
# PTX's matrix instructions with the numbers in their names: mma.sync.aligned.m16n8k16 ... .bf16,
# wgmma.mma_async.sync.aligned.m64n64k16 ... .bf16, tcgen05.mma.cta_group::1.kind::f16.
MATRIX = re.compile(
    r"\b(?:(wgmma|mma)\.[\w.]*?\.(m\d+n\d+k\d+)[\w.]*?\.f32\.(\w+)|(tcgen05)\.mma\.\S*?kind::(\w+))"
)


@dataclass(frozen=True)
class Resources:
    """The resources of one program.

    Args:
        registers: registers of a thread.
        stack: bytes of stack of a thread, which are spills.
        shared: bytes of shared memory.
        code: bytes of code.
        matrix: number of tensor core instructions in the code, by kind.
    """

    registers: int
    stack: int
    shared: int
    code: int
    matrix: dict[str, int]

    def complaint(self, arch: str) -> str | None:
        """Return what is wrong with the resources, or None."""
        if self.stack:
            return f"spills: {self.stack} bytes of stack"
        if self.shared > SHARED_LIMIT[arch]:
            return f"takes {self.shared} bytes of shared memory, {SHARED_LIMIT[arch]} is the most"
        return None


def _said(tool: str, option: str, compiled: Any) -> str:
    """Return what a tool of Triton's wheel prints about a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return subprocess.run(  # noqa: S603 - a tool of Triton's
            [TOOLS / tool, option, file.name], check=True, capture_output=True, text=True
        ).stdout


def matrix_instructions(ptx: str) -> dict[str, int]:
    """Count the tensor core instructions by generation, shape and type of the operands.

    tcgen05 names no shape, and its kind f16 is all of half precision.
    """
    kinds = Counter(" ".join(filter(None, found.groups())) for found in MATRIX.finditer(ptx))
    return dict(sorted(kinds.items()))


def code_bytes(cubin: bytes) -> int:
    """Return the size of the executable sections of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count = struct.unpack_from("<HH", cubin, 58)
    sections = (struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count))
    return sum(length for _, _, flags, _, _, length in sections if flags & EXECUTABLE)


def resources_of(compiled: Any) -> Resources:
    """Return the resources of a compiled kernel, from its PTX and its cubin."""
    usage = _said("cuobjdump", "-res-usage", compiled)
    registers, stack = (int(re.findall(rf"{field}:(\d+)", usage)[0]) for field in ("REG", "STACK"))
    return Resources(
        registers=registers,
        stack=stack,
        shared=compiled.metadata.shared,
        code=code_bytes(compiled.asm["cubin"]),
        matrix=matrix_instructions(compiled.asm["ptx"]),
    )


def sass_of(compiled: Any) -> str:
    """Return the SASS of a compiled kernel, as nvdisasm prints it in half a second."""
    return _said("nvdisasm", "-c", compiled)
