"""Support: the sentence that says why a kernel family cannot solve a problem."""

from __future__ import annotations

import torch

from flashattn.checks import TINY_SCALE
from flashattn.plan.gpu import Gpu
from flashattn.plan.spec import TensorSpec
from flashattn.plan.tables import hopper
from flashattn.problem import ALIGNMENT, Problem

LARGEST_HEAD_DIM = 256
OLDEST = (8, 0)
HOPPER = (9, 0)
SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # below it, -inf * scale is NaN on the GPU


def why_not_portable(dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why the portable kernels cannot solve such problems on any GPU, or None."""
    if dtype == torch.float64:
        return "triton takes fp32, fp16 and bf16; tiled and reference take fp64"
    if head_dim > LARGEST_HEAD_DIM:
        return (
            f"triton takes head dimensions up to {LARGEST_HEAD_DIM}; tiled and reference take any"
        )
    return None


def why_not_gpu(gpu: Gpu) -> str | None:
    """Return why the portable kernels cannot run on a GPU, or None."""
    if gpu.capability < OLDEST and not gpu.interpreted:
        return "triton needs a GPU of compute capability 8.0 or newer"
    return None


def why_not_hopper(dtype: torch.dtype, head_dim: int, gpu: Gpu | None) -> str | None:
    """Return why the Hopper kernels cannot solve such problems on a GPU, or None if they can."""
    if gpu is None or gpu.capability != HOPPER:
        return "hopper needs a GPU of compute capability 9.0, an H100 or H200"
    if dtype == torch.float64:
        return "hopper takes fp16, bf16 and fp32; tiled and reference take fp64"
    if dtype == torch.float32 and not _within(head_dim, hopper.FP32_HEAD_DIMS):
        return "hopper takes fp32 with head dimensions 33 to 128; triton takes others, too"
    if not _within(head_dim, hopper.HEAD_DIMS):
        least, most = hopper.HEAD_DIMS[0], hopper.HEAD_DIMS[-1]
        return f"hopper takes head dimensions {least} to {most}; triton takes smaller ones"
    if dtype != torch.float32 and head_dim * dtype.itemsize % ALIGNMENT:
        return f"hopper takes rows of a multiple of {ALIGNMENT} bytes; triton takes any"
    return None


def hopper_lacks(
    dtype: torch.dtype,
    head_dim: int,
    *,
    softcap: bool,
    alibi: bool,
    bias: bool,
    bounds: bool,
    backward: bool,
) -> str | None:
    """Return which requested feature the Hopper kernels of a pass lack, or None."""
    fp32, two_passes = dtype == torch.float32, backward and head_dim > hopper.ONE_PASS
    lacks = {
        "Hopper's kernels in fp32 have no softcap": fp32 and softcap,
        "Hopper's backward beyond 128 columns adds no bias to scores": two_passes and bias,
        "Hopper's kernels in fp32 add no bias to scores": fp32 and bias,
        "Hopper's kernels in fp32 have no ALiBi": fp32 and alibi,
        "Hopper's kernels in fp32 take no bounds of rows": fp32 and bounds,
    }
    return next((sentence for sentence, holds in lacks.items() if holds), None)


def why_not_hopper_pass(problem: Problem, gpu: Gpu | None, *, backward: bool = False) -> str | None:
    """Return why the Hopper kernels of a pass cannot solve a problem on a GPU, or None."""
    dtype = problem.torch_dtype
    lack = hopper_lacks(
        dtype,
        problem.head_dim,
        softcap=problem.softcap is not None,
        alibi=problem.alibi,
        bias=problem.bias_shape is not None,
        bounds=problem.by_rows,
        backward=backward,
    )
    return why_not_hopper(dtype, problem.head_dim, gpu) or (lack and f"{lack}; triton's do")


def _within(head_dim: int, allowed: range) -> bool:
    """Return whether a head dimension is allowed; ``in`` does not take a symbolic size."""
    return allowed[0] <= head_dim <= allowed[-1]


def why_not_scale(scale: float) -> str | None:
    """Return why Hopper's kernels cannot take a scale, or None."""
    if scale < TINY_SCALE:
        return f"the scale is {scale:g}, not positive or so small that lse / scale may overflow"
    return None


def why_not_tma(*inputs: TensorSpec, scale: float) -> str | None:
    """Return why Hopper's half-precision kernels cannot take these inputs, or None.

    Results have as many columns as the inputs, and contiguous rows.
    """
    reason = why_not_scale(scale)
    if reason is not None:
        return reason
    for x in dict.fromkeys(inputs):  # their specs are often equal
        if 0 in x.shape:
            return "there is nothing to do"
        if not x.tma_compatible:
            return "TMA cannot address an input: an unaligned address or stride, or a stride of 0"
        if x.shape[-1] * x.dtype.itemsize % ALIGNMENT:
            return f"TMA cannot store a result: its rows are no multiple of {ALIGNMENT} bytes"
    return None
