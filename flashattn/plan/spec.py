"""TensorSpec and Options: everything that a plan depends on besides the GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import Literal, NamedTuple

import torch

from flashattn.problem import ALIGNMENT

OF_VALUES = ("v", "o", "grad_o", "dv")  # tensors with Dv columns instead of D
ROWS_AND_COLUMNS = 4  # dimensions of all tensors but row statistics
Family = Literal["auto", "triton", "hopper"]
Signature = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device, int]


class TensorSpec(NamedTuple):
    """Layout of a tensor; tensors with equal specs share a plan.

    Some results are cached, because the tensors of one call often have the same layout.

    Args:
        shape: its sizes.
        strides: its strides, in elements.
        dtype: its dtype.
        device: its device.
        offset: its address modulo 16, in bytes.
    """

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int

    @classmethod
    def of(cls, x: torch.Tensor) -> TensorSpec:
        """Return the spec of a tensor."""
        return cls(*signature(x)[0])

    @property
    def dense(self) -> bool:
        """Return whether rows are dense, as every kernel requires; empty tensors count as dense."""
        return self.strides[-1] == 1 or self.shape[-1] == 1 or 0 in self.shape

    @property
    @lru_cache  # noqa: B019 - of specs, which are small
    def tma_compatible(self) -> bool:
        """Return whether TMA can address it, given dense rows: aligned, with positive strides."""
        size = self.dtype.itemsize
        lies = zip(self.shape, self.strides[:-1], strict=False)
        wrong = [s for n, s in lies if n != 1 and (s <= 0 or s * size % ALIGNMENT)]
        return self.offset == 0 and not wrong

    @property
    def meta(self) -> torch.Tensor:
        """Return a meta tensor of this layout, to ask PyTorch how it would treat such a tensor."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")

    @property
    def contiguous(self) -> bool:
        """Return whether ``Tensor.contiguous`` would return the tensor itself; not for 0-d."""
        lies = zip(self.shape, self.strides, dense_strides(self.shape), strict=True)
        return 0 in self.shape or not [n for n, s, dense in lies if n != 1 and s != dense]

    @property
    def non_overlapping_and_dense(self) -> bool:
        """Return whether elements fill one block of memory, with the dimensions in any order."""
        dense = 1
        for stride, size in sorted(zip(self.strides, self.shape, strict=True)):
            if size != 1 and stride != dense:
                return False
            dense *= size
        return True

    def copied(self) -> TensorSpec:
        """Return the spec of a contiguous copy."""
        return self._replace(strides=dense_strides(self.shape), offset=0)

    @lru_cache  # noqa: B019 - likewise
    def like(self, columns: int | None = None) -> TensorSpec:
        """Return the spec of ``torch.empty_like`` of the first columns, or of all if None.

        A non-overlapping and dense tensor keeps its strides.
        """
        if columns not in (None, self.shape[-1]):
            shape = torch.Size((*self.shape[:-1], columns))
            return self._replace(shape=shape).like()
        keeps = self.strides == dense_strides(self.shape) or self.non_overlapping_and_dense
        strides = self.strides if keeps else torch.empty_like(self.meta).stride()
        return TensorSpec(self.shape, strides, self.dtype, self.device, 0)

    def rewritten(self) -> TensorSpec:
        """Return the spec of what ``rewrite`` returns."""
        return self.like() if len(self.shape) == ROWS_AND_COLUMNS and self.dense else self.copied()

    def widened(self, columns: int) -> TensorSpec:
        """Return the spec of a contiguous tensor with the given number of columns."""
        return self._replace(shape=torch.Size((*self.shape[:-1], columns))).copied()


def first_columns(x: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the first columns of x, or of a copy if they are not dense: a result has their layout.

    With symbolic sizes, a compiler must be able to decide each branch, too.
    """
    x = x.narrow(3, 0, columns)
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def rewrite(x: torch.Tensor) -> torch.Tensor:
    """Return a copy at an aligned address, in the layout of ``empty_like`` if rows are dense."""
    as_it_lies = x.ndim == ROWS_AND_COLUMNS and x.stride(-1) == 1
    return x.clone(memory_format=torch.preserve_format if as_it_lies else torch.contiguous_format)


def signature(*tensors: torch.Tensor) -> tuple[Signature, ...]:
    """Return the fields of each tensor's spec, a cache key that is cheaper than the specs."""
    return tuple(
        [(x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % ALIGNMENT) for x in tensors]
    )


@lru_cache
def dense_strides(shape: torch.Size) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of at least one dimension."""
    sizes = [max(n, 1) for n in shape[:0:-1]]
    return tuple(accumulate(sizes, mul, initial=1))[::-1]


class Extras(NamedTuple):
    """Optional tensors of the kernels besides q, k and v; an absent one is None.

    Args:
        key_bounds: see ``bounds.Bounds``.
        query_bounds: likewise.
        alibi_slopes: fp32 [B or 1, H], dense.
        bias: [B or 1, H or 1, T or 1, S or 1], or [B or 1, H or 1, T + S - 1], see ``score``.
        sink: fp32 [B or 1, H], dense.
    """

    key_bounds: torch.Tensor | None = None
    query_bounds: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    sink: torch.Tensor | None = None


def given_extras(given: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
    """Return an operator's optional tensors as ``Extras``, or nothing if all are None."""
    return () if all(x is None for x in given) else Extras(*given)


class Options(NamedTuple):
    """What a call asks for, besides its tensors.

    Args:
        right: query t sees keys up to t + right; None is no right bound.
        scale: factor on the scores.
        precision: as ``precision.input_precision`` returns it.
        family: "triton" or "hopper", the kernels of that ``impl``, or "auto", the faster ones.
            ``support`` has checked that the GPU runs those that are named.
        deterministic: whether a repeated call must give the same bits of dq.
        left: query t sees keys from t - left on; None is no left bound.
        softcap: bound on the scores, or None.
        bounds: batch size of the ``Bounds``, which then are the whole mask: 0 if there are none, 1
            if all batches share them.
        alibi: batch size of the ALiBi slopes, likewise.
        query_offset: for ALiBi, query t is at the position of key t + query_offset.
        bias: spec of the bias, or None.
        bias_grad: whether the gradient of the bias is wanted.
        sink: batch size of the sinks, as for bounds.
    """

    right: int | None
    scale: float
    precision: str = "ieee"
    family: Family = "triton"
    deterministic: bool = True
    left: int | None = None
    softcap: float | None = None
    bounds: int = 0
    alibi: int = 0
    query_offset: int = 0
    bias: TensorSpec | None = None
    bias_grad: bool = False
    sink: int = 0

    def given(self, extras: Sequence[torch.Tensor | None]) -> Options:
        """Return these options, updated from extras: all of ``Extras``, or nothing."""
        if not extras:
            return self
        bounds, _, alibi_slopes, bias, sink = extras
        return self._replace(
            bounds=_batches(bounds),
            alibi=_batches(alibi_slopes),
            bias=None if bias is None else TensorSpec.of(bias),
            sink=_batches(sink),
        )

    @property
    def scored(self) -> tuple[bool, ...]:
        """Return whether each of ``Extras``, except the bounds, is there."""
        return self.alibi > 0, self.bias is not None, self.sink > 0

    @property
    def added(self) -> bool:
        """Return whether something is added to the scores: ALiBi or a bias."""
        return self.alibi > 0 or self.bias is not None

    @property
    def extras(self) -> bool:
        """Return whether there are tensors besides q, k and v."""
        return self.bounds > 0 or self.alibi > 0 or self.bias is not None or self.sink > 0

    @property
    def window_keys(self) -> float:
        """Return the most keys that a query sees by both bounds; infinity if one is missing."""
        if self.left is None or self.right is None:
            return math.inf
        return self.left + self.right + 1

    def reach(self, rows: int) -> int:
        """Estimate the most of ``rows`` keys that a query sees, or queries that see a key.

        The host cannot read bounds. It assumes that the longest document has a third of all rows.
        """
        if self.bounds:
            return -(-rows // 3)
        return int(max(1, min(rows, self.window_keys)))

    @property
    def causal(self) -> bool:
        """Return whether there is a mask of any kind."""
        return self.right is not None or self.left is not None or self.bounds > 0


def _batches(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.shape[0]
