"""Products of a warpgroup, which read their operands at once or when waited for, as drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashattn.emulate.memory import Shared
from flashattn.emulate.schedule import here
from flashattn.kernels.constants import HIGH_BITS


@dataclass(eq=False)
class Product:
    """A product in flight: code can only wait for it, or add further products to it."""

    a: torch.Tensor | Shared  # [m, k], in registers or shared memory
    b: Shared  # [k, n]
    acc: Any  # the accumulator, or None
    value: torch.Tensor | None = None

    def finish(self) -> None:
        """Compute the product, unless that was done."""
        if self.value is not None:
            return
        a = self.a.outer if isinstance(self.a, Shared) else self.a
        x = a.float() @ self.b.outer.float()
        before = self.acc.value if isinstance(self.acc, Product) else self.acc
        if before is not None:
            x = x + before
        self.value = x


def warpgroup_mma(
    a: torch.Tensor | Shared, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool = False
) -> Any:
    """Start acc + a @ b; compute it if it is not asynchronous."""
    warps = here()
    product = Product(a, b, acc if use_acc else None)
    warps.products.append(product)
    if not is_async:
        return warpgroup_mma_wait(0, [product])
    if warps.schedule.random.random() < 0.5:  # noqa: PLR2004 - as often as not
        for each in warps.products:
            each.finish()
    return product


def warpgroup_mma_wait(pending: int, deps: Sequence[Any]) -> Any:
    """Wait until at most ``pending`` products of this warpgroup are in flight; return deps.

    A finished product is returned as a tensor, another as it is, so that using it fails.
    """
    warps = here()
    warps.pause()
    while len(warps.products) > pending:
        warps.products.pop(0).finish()
    results = [x.value if isinstance(x, Product) and x not in warps.products else x for x in deps]
    return results[0] if len(results) == 1 else tuple(results)


def leading_bits(x: torch.Tensor, add: int) -> torch.Tensor:
    """Return the first 8 bits of each number, truncated if ``add`` is 0, rounded if HALF_BIT."""
    bits = (x.contiguous().view(torch.int32) + add) & HIGH_BITS.value
    return bits.view(torch.float32)


pack, to_fp32 = torch.Tensor.to, torch.Tensor.float  # nothing is packed here


def unpack(packed: torch.Tensor, dtype: torch.dtype, layout: object) -> torch.Tensor:
    """Return what was packed."""
    del dtype, layout
    return packed


def bits_as(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Reinterpret 16-bit numbers as another 16-bit dtype."""
    return x.contiguous().view(dtype)


def any_changes(factors: torch.Tensor) -> torch.Tensor:
    """Return for each row whether its factor is other than 1: the emulator has no lanes."""
    return factors != 1


def scale_where(acc: torch.Tensor, factors: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    """Return an accumulator whose rows are multiplied where their flag is set."""
    return torch.where(flags[:, None], acc * factors[:, None], acc)
