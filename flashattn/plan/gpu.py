"""Gpu: the properties of a device and its compiler on which a plan depends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Gpu:
    """A GPU, and the version of Triton that compiles for it.

    Args:
        capability: CUDA compute capability; (0, 0) is Triton's interpreter.
        num_sms: streaming multiprocessors.
        triton: version of Triton.
    """

    INTERPRETER: ClassVar[Gpu]

    capability: tuple[int, int]
    num_sms: int
    triton: tuple[int, int] = (3, 6)

    @property
    def interpreted(self) -> bool:
        """Return whether it is Triton's interpreter."""
        return self.capability == (0, 0)


Gpu.INTERPRETER = Gpu((0, 0), 1)  # one SM: small problems have more programs
CARDS = {
    "A100": Gpu((8, 0), 108),
    "H100": Gpu((9, 0), 132),
    "H200": Gpu((9, 0), 132),
    "B200": Gpu((10, 0), 148),
    "interpreter": Gpu.INTERPRETER,
}
