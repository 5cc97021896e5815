"""TensorSpec and Options: all that a plan depends on, besides the GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import Literal, NamedTuple

import torch

from flashattn.problem import ALIGNMENT

OF_VALUES = ("v", "o", "grad_o", "dv")  # names of tensors that have Dv columns, not D
ROWS_AND_COLUMNS = 4  # dimensions of what is no statistic of rows
Family = Literal["auto", "triton", "hopper"]
Signature = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device, int]


class TensorSpec(NamedTuple):
    """Layout of a tensor; tensors with the same specs share a plan.

    Some answers are kept: tensors of one call often lie alike.

    Args:
        shape: its sizes.
        strides: its strides, in elements.
        dtype: its dtype.
        device: its device.
        offset: bytes from its address down to a multiple of 16.
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
        """Whether rows are dense, as every kernel wants them; so are those of an empty tensor."""
        return self.strides[-1] == 1 or self.shape[-1] == 1 or 0 in self.shape

    @property
    @lru_cache  # noqa: B019 - of specs, which are small
    def tma_compatible(self) -> bool:
        """Whether TMA can address it: aligned, no stride 0, dense in the last dimension."""
        size = self.dtype.itemsize
        lies = zip(self.shape, self.strides[:-1], strict=False)
        wrong = [s for n, s in lies if n != 1 and (s <= 0 or s * size % ALIGNMENT)]
        return self.offset == 0 and not wrong

    @property
    def meta(self) -> torch.Tensor:
        """A tensor without memory, to ask PyTorch what it would do with one like this."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")

    @property
    def contiguous(self) -> bool:
        """Whether ``Tensor.contiguous`` would return the tensor itself, which has dimensions."""
        lies = zip(self.shape, self.strides, dense_strides(self.shape), strict=True)
        return 0 in self.shape or not [n for n, s, dense in lies if n != 1 and s != dense]

    @property
    def non_overlapping_and_dense(self) -> bool:
        """PyTorch's word: its elements fill one piece of memory, dimensions in any order."""
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
        """Return the spec of ``torch.empty_like`` of its first columns, all if None.

        Of a dense tensor it keeps the strides.
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
        """Return the spec of a dense tensor of so many columns."""
        return self._replace(shape=torch.Size((*self.shape[:-1], columns))).copied()


def first_columns(x: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the first columns of x, or of a copy if they are not dense: a result lies like this.

    A compiler for symbolic sizes must decide each branch, too.
    """
    x = x.narrow(3, 0, columns)
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def rewrite(x: torch.Tensor) -> torch.Tensor:
    """Return a copy at an aligned address: dense rows lie as ``torch.empty_like`` lays them."""
    as_it_lies = x.ndim == ROWS_AND_COLUMNS and x.stride(-1) == 1
    return x.clone(memory_format=torch.preserve_format if as_it_lies else torch.contiguous_format)


def signature(*tensors: torch.Tensor) -> tuple[Signature, ...]:
    """Return the fields of each tensor's spec: a key that costs less than the specs."""
    return tuple(
        [(x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % ALIGNMENT) for x in tensors]
    )


@lru_cache  # as above
def dense_strides(shape: torch.Size) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor that has dimensions."""
    sizes = [max(n, 1) for n in shape[:0:-1]]
    return tuple(accumulate(sizes, mul, initial=1))[::-1]


class Extras(NamedTuple):
    """Tensors that kernels may be given besides q, k and v; None where there is none.

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
    """Return the tensors besides q, k and v that an operator was given, or nothing of none."""
    return () if all(x is None for x in given) else Extras(*given)


class Options(NamedTuple):
    """What is asked, besides tensors.

    Args:
        right: query t sees keys 0 ... t + right; None lets it see all.
        scale: factor on the scores.
        precision: as ``precision.input_precision`` returns it.
        family: the kernels of ``impl="triton"`` or of ``impl="hopper"``, or "auto", the faster
            ones. Whether the GPU runs those that are named is asked before, see ``support``.
        deterministic: whether a repeated call must give the same bits of dq.
        left: query t sees keys from t - left on; None lets it see all before.
        softcap: bound on the scores; None is none.
        bounds: batches for which there are ``Bounds``, which are all of the mask: 0, none; 1, those
            of all batches.
        alibi: batches for which there are slopes, likewise.
        query_offset: for ALiBi, query t stands at key t + query_offset.
        bias: its spec; None is none.
        bias_grad: whether its gradient is wanted.
        sink: batches for which there are sinks, as of bounds.
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
        """Return these options with what they say of extras, all or none."""
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
        """Whether there is each of ``Extras`` but the bounds."""
        return self.alibi > 0, self.bias is not None, self.sink > 0

    @property
    def added(self) -> bool:
        """Whether something is added to the scores."""
        return self.alibi > 0 or self.bias is not None

    @property
    def extras(self) -> bool:
        """Whether there are tensors besides q, k and v."""
        return self.bounds > 0 or self.alibi > 0 or self.bias is not None or self.sink > 0

    @property
    def window_keys(self) -> float:
        """The keys that a query sees at most, by both bounds; infinity if one is missing."""
        if self.left is None or self.right is None:
            return math.inf
        return self.left + self.right + 1

    def reach(self, rows: int) -> int:
        """Return about how many of so many rows one of the other side sees, or is seen by, at most.

        The host does not know bounds: the longest document is taken to have a third of all rows.
        """
        if self.bounds:
            return -(-rows // 3)
        return int(max(1, min(rows, self.window_keys)))

    @property
    def causal(self) -> bool:
        """Whether there is a mask."""
        return self.right is not None or self.left is not None or self.bounds > 0


def _batches(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.shape[0]
