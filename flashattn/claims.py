"""What an implementation claims to support, as flags, and a reason for each missing claim."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from flashattn.checks import TINY_SCALE
from flashattn.mask import UNBOUNDED
from flashattn.problem import Problem

# Claims that many implementations share: every mask, softcap, ALiBi and bias.
MASKS_AND_SCORES: dict[str, Any] = dict.fromkeys(
    ("windows", "intervals", "softcap", "alibi", "bias"), True
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Claims:
    """What an implementation supports, one flag for each feature.

    By default these are all but lse, windows, intervals, softcap, alibi, bias, sink, narrow_values.

    Args:
        lse: it returns (o, lse), both differentiable.
        grad: it is differentiable.
        strict: it also takes unusual values, strides and scales.
        bottom_right: it aligns causal masks at the bottom right.
        windows: it takes ``window=(left, right)``, as ``attention`` does.
        intervals: it takes ``bounds=``, a ``bounds.Bounds``, which is then the whole mask: packed
            documents, padding, prefixes, any mask with one run of keys for each query.
        softcap: it takes ``softcap=``, as ``attention`` does.
        alibi: it takes ``alibi_slopes=``, fp32 [B or 1, H], dense.
        bias: it takes ``bias=``, in q's dtype or fp32: [B or 1, H or 1, T or 1, S or 1], or, if
            relative, [B or 1, H or 1, T + S - 1] (see ``score``); differentiable.
        sink: it takes ``sink=``, fp32 [B or 1, H], differentiable. If it takes none but returns
            lse, the sink is applied to o and lse afterwards.
        any_scale: it takes scales that are zero, negative or below 2^-64.
        narrow_values: it takes v with fewer columns than k; for others ``attention`` pads v.
        grouped: it takes fewer key/value heads than query heads.
        empty: it takes problems with no batch, heads, queries or keys.
        fully_masked_rows: a query that sees no key gets o = 0 and passes no gradient.
        repeats: the same inputs give the same bits every time; without it, within the budgets.
        denormals: on a CPU, fp32 below 2^-126 is not flushed to 0; on a GPU it may always be.
        dtypes: names of the dtypes that it takes; None means all.
        head_dims: values of D, such as ``(64, 128)`` or ``range(8, 257, 8)``; None means all.
        devices: types of devices that it runs on, such as ``("cuda",)``; None means all.
    """

    lse: bool = False
    grad: bool = True
    strict: bool = True
    bottom_right: bool = True
    windows: bool = False
    intervals: bool = False
    softcap: bool = False
    alibi: bool = False
    bias: bool = False
    sink: bool = False
    any_scale: bool = True
    narrow_values: bool = False
    grouped: bool = True
    empty: bool = True
    fully_masked_rows: bool = True
    repeats: bool = True
    denormals: bool = True
    dtypes: Collection[str] | None = None
    head_dims: Collection[int] | None = None
    devices: Collection[str] | None = None

    def unclaimed(self, problem: Problem, device: torch.device) -> str | None:
        """Return the first reason why ``problem`` is not claimed, in words, or None."""
        reasons = {
            "claims no bottom-right mask": problem.causal == "bottom_right"
            and not self.bottom_right,
            "takes no sliding windows": problem.window != UNBOUNDED and not self.windows,
            "takes no documents and no mask but a window": problem.by_rows and not self.intervals,
            "takes no softcap": problem.softcap is not None and not self.softcap,
            "takes no ALiBi": problem.alibi and not self.alibi,
            "takes no bias": problem.bias != "" and not self.bias,
            "takes no sink, and returns no logsumexp": problem.sink and not (self.sink or self.lse),
            "takes no values narrower than keys": problem.value_dim is not None
            and not self.narrow_values,
            "claims no grouped heads": problem.heads != problem.kv_heads and not self.grouped,
            "claims no empty problems": not self.empty and problem.is_empty,
            "claims nothing for queries that see no key": not self.fully_masked_rows
            and problem.fully_masked_rows > 0,
        }
        among: tuple[tuple[str, object, Collection[object] | None], ...] = (
            ("takes dtypes", problem.dtype, self.dtypes),
            ("takes head dimensions", problem.head_dim, self.head_dims),
            ("runs on", device.type, self.devices),
        )
        found = [reason for reason, holds in reasons.items() if holds]
        found += [f"{what} {_listed(x)}" for what, value, x in among if not _among(value, x)]
        return found[0] if found else None

    def takes_scale(self, scale: float | None) -> bool:
        """Return whether it takes a scale; None means D ** -0.5."""
        return self.any_scale or scale is None or scale >= TINY_SCALE

    def fit(self, problem: Problem) -> Problem:
        """Return the problem, or a similar one whose shape, mask and dtype are claimed.

        Tests of other properties use it, so that a kernel with few shapes is tested, too.
        """
        claimed = {
            "causal": self.bottom_right or problem.causal != "bottom_right" or "top_left",
            "window": self.windows or UNBOUNDED,
            "documents": self.intervals or None,
            "prefix": self.intervals or None,
            "softcap": self.softcap or None,
            "alibi": self.alibi or False,
            "bias": self.bias or "",
            "sink": self.sink or self.lse or False,
            "value_dim": self.narrow_values or None,
            "kv_heads": self.grouped or problem.heads,
        }
        changes: dict[str, Any] = {name: x for name, x in claimed.items() if x is not True}
        if not self.empty:
            sizes = ("batch", "seq_q", "seq_kv")
            changes |= {name: 1 for name in sizes if getattr(problem, name) == 0}
            changes |= {} if problem.heads else {"heads": 1, "kv_heads": 1}
        if not _among(problem.dtype, self.dtypes):
            changes["dtype"] = next(iter(self.dtypes or ()))
        if not _among(problem.head_dim, self.head_dims):
            larger = [d for d in self.head_dims or () if d > problem.head_dim]
            changes |= {"head_dim": min(larger or self.head_dims or ()), "value_dim": None}
        fitted = replace(problem, **changes)
        if not self.fully_masked_rows and fitted.fully_masked_rows > 0:
            seq_kv = max(fitted.seq_q, fitted.seq_kv)
            fitted = replace(fitted, seq_kv=seq_kv, documents=None)
        return fitted


def _among(value: object, claimed: Collection[object] | None) -> bool:
    return claimed is None or value in claimed


def _listed(claimed: Collection[object] | None) -> str:
    return str(claimed) if isinstance(claimed, range) else ", ".join(map(str, claimed or ()))
