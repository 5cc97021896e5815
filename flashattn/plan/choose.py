"""Choose: every decision between a problem and its launches, in the order in which it is made.

Plans depend on the arguments alone, and with precision "auto" on PyTorch's setting for TF32: no
device and no data are read. Each branch adds a sentence to the plan's ``why``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from flashattn.checks import check_scale
from flashattn.plan import hopper, portable
from flashattn.plan.gpu import Gpu
from flashattn.plan.plan import BackwardPlan, ForwardPlan, Plan
from flashattn.plan.precision import input_precision
from flashattn.plan.rows import Kernel
from flashattn.plan.spec import OF_VALUES, Family, Options, TensorSpec
from flashattn.plan.support import hopper_lacks, why_not_hopper_pass, why_not_portable, why_not_tma
from flashattn.plan.tile import HopperBackward, HopperTile, Tile
from flashattn.problem import Problem

NAMES = ("q", "k", "v", "grad_o", "o", "lse", "grad_lse")
ROW_STATISTICS = ("lse", "grad_lse")
LOADED = ("q", "k", "v", "grad_o")  # by TMA, where kernels use it
NOTHING = "there is no query, or no key"
PADDED = (
    "values are padded to the width of keys: only Hopper's kernels take narrower ones, up to 128"
    " columns, a multiple of 8, beside keys of 129 to 192, in half precision, without GQA splits"
)
COPIED = "copies: rows are not dense, or TMA cannot address them"


def choose(
    problem: Problem,
    specs: Sequence[TensorSpec],
    gpu: Gpu,
    *,
    scale: float | None = None,
    precision: str = "auto",
    deterministic: bool = True,
    family: Family = "auto",
    bias: TensorSpec | None = None,
) -> Plan:
    """Return how o, lse and the gradients of q, k and v are computed.

    Args:
        problem: the attention to plan.
        specs: of q [B, H, T, D], k [B, G, S, D] and v [B, G, S, Dv]; the other tensors are assumed
            to have the layout that PyTorch would give them.
        gpu: the GPU to plan for.
        scale: factor on the scores; None is D ** -0.5.
        precision: of fp32 products, see ``precision.input_precision``.
        deterministic: see ``Options``.
        family: see ``Options``.
        bias: spec of the problem's bias; None assumes a dense one in q's dtype.

    Raises:
        ValueError: the kernels cannot solve the problem, or precision or scale is invalid.
    """
    dtype = problem.torch_dtype
    reason = why_not_portable(dtype, problem.head_dim)
    if family == "hopper":
        reason = why_not_hopper_pass(problem, gpu)
    if reason is not None:
        raise ValueError(reason)
    scale = check_scale(scale, problem.head_dim)
    precision = input_precision(precision, dtype)
    band = problem.band
    rows = int(problem.by_rows)
    left, right = (None, None) if rows else (band.left, band.right)
    options = Options(right, scale, precision, family, deterministic, left, problem.softcap, rows)
    options = options._replace(
        alibi=int(problem.alibi),
        bias=bias or _bias(problem, specs[0]),
        bias_grad=True,
        sink=int(problem.sink),
    )
    forward = choose_forward(specs, gpu, options)
    o = (specs[0].copied() if "q" in forward.copies else specs[0]).like(specs[2].shape[3])
    lse = o._replace(shape=o.shape[:3], dtype=torch.float32).copied()
    reason = why_not_hopper_pass(problem, gpu, backward=True) if family == "hopper" else None
    if reason is not None:
        return Plan(forward, BackwardPlan(kernel="none", why=(reason,)))
    return Plan(forward, choose_backward((*specs, o, o, lse), gpu, options))


def choose_forward(
    specs: Sequence[TensorSpec],
    gpu: Gpu,
    options: Options,
    *,
    tile: Tile | HopperTile | None = None,
    row: Kernel | None = None,
    num_splits: int | None = None,
) -> ForwardPlan:
    """Return how o and lse are computed.

    Args:
        specs: of q, k and v.
        gpu: the GPU to plan for.
        options: what the call asks for.
        tile: a tile to use instead of the table's.
        row: the table's row whose rule for splitting keys applies to this tile.
        num_splits: the most splits of the keys, instead of as many as fill the GPU.

    Raises:
        ValueError: Hopper's kernels were asked for, and cannot run it.
    """
    q, k, v = specs
    if 0 in q.shape or k.shape[2] == 0:
        return ForwardPlan(kernel="none", why=(NOTHING,))
    copies = _not_read(specs, options)
    if copies:
        q, k, v = copied(specs, copies)
        plan = choose_forward((q, k, v), gpu, options, tile=tile, row=row, num_splits=num_splits)
        return plan._replace(copies=copies, why=(COPIED, *plan.why))
    faster = partial(hopper.forward_pays, q, k, gpu, options)
    pays, why = _hopper_first(q, options, faster, backward=False)
    if pays and hopper.takes_values(q, v):
        found = hopper.forward(q, k, v, gpu, options, tile)
        if not isinstance(found, str):
            return found.after(why)
        why.append(_portable_instead(found, options))
    if v.shape[3] != q.shape[3]:
        plan = choose_forward(
            padded_specs(specs), gpu, options, tile=tile, row=row, num_splits=num_splits
        )
        return plan._replace(padded=True, why=(PADDED, *plan.why))
    keys = 0
    one = q.shape[2] == 1 and q.shape[1] != k.shape[1]
    if one and options.left is None and not options.extras:
        keys = k.shape[2] if options.right is None else min(k.shape[2], options.right + 1)
        if keys <= 0:
            return ForwardPlan(kernel="none", why=(*why, "the only query sees no key"))
        why.append("pack_gqa: the heads that share keys are rows of one tile, and read them once")
        q, k, v = portable.packed(q, k, v, keys)
        options = options._replace(right=None)
    plan = portable.forward(q, k, v, gpu, options, tile=tile, row=row, most=num_splits)
    return (plan._replace(pack_gqa=True, keys=keys) if keys else plan).after(why)


def choose_backward(
    specs: Sequence[TensorSpec], gpu: Gpu, options: Options, *, tile: HopperBackward | None = None
) -> BackwardPlan:
    """Return how dq, dk and dv are computed.

    Args:
        specs: of q, k, v, grad_o, o, lse, and grad_lse where there is one.
        gpu: the GPU to plan for.
        options: what the call asks for.
        tile: a tile for Hopper's kernels to use instead of the table's.

    Raises:
        ValueError: Hopper's kernels were asked for, and cannot run it.
    """
    q, k, v, grad_o, *_ = specs
    if 0 in q.shape or 0 in k.shape:
        return BackwardPlan(kernel="none", why=(NOTHING,))
    copies = _not_read(specs, options)
    faster = partial(hopper.backward_pays, q, k, gpu, options)
    pays, why = _hopper_first(q, options, faster, backward=True)
    pays = pays and hopper.takes_values(q, v) and hopper.sums_values(q, k, v, gpu, options)
    if pays and q.dtype != torch.float32:
        tile = tile or hopper.backward_tile(q, k, gpu, options)
        loaded = copied(specs, copies)[:3]
        reason = why_not_tma(*loaded, scale=options.scale) if tile else hopper.NO_TILE
        pays = reason is None
        if reason is not None:
            why.append(_portable_instead(reason, options))
        elif not (grad_o.dense and grad_o.tma_compatible):
            copies = tuple(sorted({*copies, "grad_o"}, key=NAMES.index))
    if v.shape[3] != q.shape[3] and not pays:
        plan = choose_backward(padded_specs(specs), gpu, options)
        return plan._replace(padded=True, why=(PADDED, *plan.why))
    if copies:
        plan = choose_backward(copied(specs, copies), gpu, options, tile=tile)
        return plan._replace(copies=copies, why=(COPIED, *plan.why))
    if pays:
        found = hopper.backward(q, k, gpu, options, tile)
        if not isinstance(found, str):
            return found._replace(precision=options.precision, why=(*why, *found.why))
        why.append(_portable_instead(found, options))
    plan = portable.backward(q, k, v, grad_o, gpu, options)
    return plan._replace(precision=options.precision, why=(*why, *plan.why))


def _hopper_first(
    q: TensorSpec, options: Options, faster: Callable[[], tuple[bool, str]], *, backward: bool
) -> tuple[bool, list[str]]:
    """Return whether to try Hopper's kernels, and why; "auto" tries them if they are faster."""
    pays, *why = faster() if options.family == "auto" else (options.family == "hopper",)
    if not pays:
        return False, why
    lack = hopper_lacks(
        q.dtype,
        q.shape[3],
        softcap=options.softcap is not None,
        alibi=options.alibi > 0,
        bias=options.bias is not None,
        bounds=options.bounds > 0,
        backward=backward,
    )
    return (False, [_portable_instead(lack, options)]) if lack else (True, why)


def _portable_instead(reason: str, options: Options) -> str:
    """Return the sentence that says why the portable kernels run a pass.

    Raises:
        ValueError: Hopper's kernels were asked for.
    """
    if options.family == "hopper":
        raise ValueError(f"hopper: {reason}")
    return f"the portable kernels, not Hopper's: {reason}"


def padded_specs(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Return specs, with the tensors of ``OF_VALUES`` widened to q's columns."""
    return [
        x.widened(specs[0].shape[3]) if name in OF_VALUES else x
        for name, x in zip(NAMES, specs, strict=False)
    ]


def _bias(problem: Problem, q: TensorSpec) -> TensorSpec | None:
    """Return the spec of the problem's bias, dense and in q's dtype, or None."""
    if problem.bias_shape is None:
        return None
    return q._replace(shape=torch.Size(problem.bias_shape)).copied()


def _not_read(specs: Sequence[TensorSpec], options: Options) -> tuple[str, ...]:
    """Return the names of tensors to copy, because the kernels cannot read their layout."""
    tma = options.family == "hopper" and specs[0].dtype != torch.float32
    names = [
        name
        for name, x in zip(NAMES, specs, strict=False)
        if not (x.contiguous if name in ROW_STATISTICS else x.dense)
        or (tma and name in LOADED and not x.tma_compatible and x.rewritten().tma_compatible)
    ]
    return tuple(names)


def copied(specs: Sequence[TensorSpec], names: Sequence[str]) -> list[TensorSpec]:
    """Return specs, with the named tensors replaced by their copies."""
    found = list(specs)
    for i in map(NAMES.index, names):
        found[i] = found[i].rewritten()
    return found
