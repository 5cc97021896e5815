"""What every launcher prepares on the host: operands, tile, fp32 precision, the current device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from flashattn.kernels.primitives import INTERPRETED
from flashattn.kernels.tiles import Kernel, Tile, pick

PRECISIONS = ("auto", "tf32x3", "tf32", "ieee")
DESCRIPTOR_ALIGNMENT = 16  # bytes, of addresses and of strides
PROGRAMS = 2  # that a multiprocessor shall have, when few tiles of queries are to fill a GPU
# Tiles of keys that a part has at least: below, merging costs more than the split gains. Small in
# the interpreter, so that small problems are split; and it pretends to few multiprocessors.
SHORTEST = 1 if INTERPRETED.value else 4
PRETENDED = 4


def input_precision(asked: str, dtype: torch.dtype) -> str:
    """Return how the tensor cores multiply fp32.

    ``tf32x3`` adds three TF32 products and is as accurate as fp32; ``tf32`` keeps 10 bits of
    mantissa; ``ieee`` does without tensor cores. ``auto`` is ``tf32x3`` unless torch's own setting
    (``torch.backends.cuda.matmul``) allows ``tf32``. It means nothing for half precision.

    Raises:
        ValueError: ``asked`` is none of these.
    """
    if asked not in PRECISIONS:
        msg = f"precision: wanted one of {', '.join(PRECISIONS)}, got {asked!r}"
        raise ValueError(msg)
    if dtype != torch.float32:
        return "ieee"
    if asked != "auto":
        return asked
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


def _describable(x: torch.Tensor) -> bool:
    """Whether the bulk copy engine can address x: aligned, no stride 0, dense in the last."""
    size = x.element_size()
    return x.data_ptr() % DESCRIPTOR_ALIGNMENT == 0 and all(
        n == 1 or (stride > 0 and stride * size % DESCRIPTOR_ALIGNMENT == 0)
        for n, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)
    )


def pick_tile(kernel: Kernel, *inputs: torch.Tensor, causal: bool) -> Tile:
    """Return the table's tile for these inputs; one with descriptors only if all can have one."""
    x = inputs[0]
    capability = None if INTERPRETED.value else torch.cuda.get_device_capability(x.device)
    describable = all(_describable(x) for x in inputs)
    return pick(
        kernel, x.element_size(), x.shape[-1], capability, causal=causal, descriptors=describable
    )


def operand(x: torch.Tensor, tile: Tile, rows: int) -> torch.Tensor | TensorDescriptor:
    """Return what a kernel loads tiles [rows, BLOCK_D] of x [B, H, T, D] from."""
    if not tile.descriptors:
        return x
    # A dimension of size 1 may carry any stride; the engine wants one that is aligned.
    dense = x.shape[-1] * x.shape[-2]
    strides = [
        s if n > 1 else -(-dense // 16) * 16 for n, s in zip(x.shape, x.stride(), strict=True)
    ]
    return TensorDescriptor(
        x, list(x.shape), [*strides[:-1], 1], [1, 1, rows, tile.block_d(x.shape[-1])]
    )


def on_device(x: torch.Tensor) -> AbstractContextManager[object]:
    """Make x's GPU the current one; a CPU tensor needs the interpreter.

    Raises:
        ValueError: x is on a CPU and the kernels were compiled, not interpreted.
    """
    if x.is_cuda:
        return torch.cuda.device(x.device)
    if not INTERPRETED.value:
        msg = f"wanted a CUDA tensor, got {x.device}; TRITON_INTERPRET=1, set before, interprets"
        raise ValueError(msg)
    return nullcontext()


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":
        return PRETENDED
    return torch.cuda.get_device_properties(device).multi_processor_count


def split(
    programs: int, seq_kv: int, block_kv: int, device: torch.device, most: int | None = None
) -> tuple[int, int]:
    """Return (parts, keys of a part), so that few tiles of queries fill the GPU.

    It depends on sizes and on the GPU alone, so a repeated call gives the same bits.

    Args:
        programs: without a split.
        seq_kv: S, at least 1.
        block_kv: keys of a tile, of which a part has whole ones.
        device: of the launch.
        most: parts, instead of what fills the GPU.
    """
    tiles = -(-seq_kv // block_kv)
    if most is None:
        most = min(PROGRAMS * _multiprocessors(device) // programs, tiles // SHORTEST)
    chunk = -(-tiles // max(most, 1)) * block_kv
    return -(-seq_kv // chunk), chunk
