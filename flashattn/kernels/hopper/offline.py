"""The Hopper kernels as launches on aligned tensors compile them, for ``kernels.offline``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, ClassVar

from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from flashattn.kernels.hopper import forward
from flashattn.kernels.hopper.config import FORWARD, ROWS, Config


@dataclass(frozen=True)
class HopperVariant:
    """flashattn_hopper_fwd as one launch compiles it, in bf16.

    Args:
        head_dim: D.
        config: of the launch.
        causal: whether scores are masked.
        drawn: whether programs draw their tiles, as there are more of these.
    """

    head_dim: int
    config: Config
    causal: bool
    drawn: bool

    arch: ClassVar[str] = "sm_90"
    kernel: ClassVar[str] = "hopper_fwd"
    size: ClassVar[int] = 2

    def __str__(self) -> str:
        """Return what picks the config."""
        mask = "causal" if self.causal else "full"
        rows = f"{self.config.groups * ROWS} rows"
        return (
            f"{self.arch} {self.kernel} bf16 d{self.head_dim} {mask} {rows}{' drawn' * self.drawn}"
        )

    @property
    def launch(self) -> str:
        """The config in short: queries x keys, warpgroups, slots, registers."""
        numbers = "{block_kv} g{groups} s{slots} r{registers}".format(**vars(self.config))
        return f"{self.config.groups * ROWS}x{numbers}{' staged' * self.config.staged}"

    @property
    def options(self) -> dict[str, int]:
        """The compiler's options."""
        return {"num_warps": forward.WARPS}

    @cached_property
    def source(self) -> GluonASTSource:
        """The kernel with the types of its arguments."""
        function = forward.flashattn_hopper_fwd
        constants: dict[str, Any] = {
            **forward.constants(self.config, self.head_dim, causal=self.causal, drawn=self.drawn),
            **({} if self.drawn else {"counter": None}),
        }
        layout = gl.NVMMASharedLayout(forward.SWIZZLE, 8 * self.size, 4)
        rows = {"q": ROWS, "k": self.config.block_kv, "v": self.config.block_kv, "o": ROWS}
        types = {
            name: f"tensordesc<bf16[1, 1, {n}, {self.head_dim}],{layout!r}>"
            for name, n in rows.items()
        }
        types |= {"lse": "*fp32", "counter": "*i32", "scale_log2": "fp32"}
        types |= dict.fromkeys(constants, "constexpr")
        names = function.arg_names
        aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in ("lse", "counter")}
        signature = {name: types.get(name, "i32") for name in names}
        return GluonASTSource(
            function,
            signature,
            constants,
            {where: fact for where, fact in aligned.items() if names[where[0]] not in constants},
        )


def variants() -> list[HopperVariant]:
    """Return the kernel with every config of the table."""
    found = [
        HopperVariant(head_dim, config, causal, drawn)
        for head_dim, masks in FORWARD.items()
        for causal, configs in masks.items()
        for config, drawn in product(configs, (False, True))
        if causal or not drawn
    ]
    return list(dict.fromkeys(found))
