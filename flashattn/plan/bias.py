"""Plans with a bias: smaller tiles, copies of a relative bias, and the gradient of a bias."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from flashattn.plan.gpu import Gpu
from flashattn.plan.plan import Pass, Workspace
from flashattn.plan.rows import FP32, HEAD_DIMS
from flashattn.plan.spec import Options, TensorSpec, dense_strides
from flashattn.plan.splits import cdiv
from flashattn.plan.tile import VECTOR, Tile, block_d
from flashattn.problem import ALIGNMENT
from flashattn.score import is_relative

BEHIND = 256  # most keys that a tile has past the last one
MARGIN = 256  # most queries, and keys, that two of Hopper's tiles have past the last ones
FORWARD = Tile(128, 64, 8, 3, descriptors=True)  # with a bias; 4 warps would spill
FORWARD_D = HEAD_DIMS[2:4]  # BLOCK_D for which it was measured
LARGE_BIAS = 128 * 64  # most scores of a tile whose bias fits beside all stages


def shifted(bias: TensorSpec) -> TensorSpec:
    """Return the spec that kernels read: of a bias, or of the copies of a relative one."""
    if not is_relative(bias):
        return bias
    batch, heads, size = bias.shape
    length = cdiv(size + BEHIND, 2 * VECTOR) * 2 * VECTOR  # Triton recognizes multiples of 16
    shape = torch.Size((batch, heads, VECTOR, length))
    return bias._replace(shape=shape, strides=dense_strides(shape), offset=0)


def line(bias: TensorSpec) -> TensorSpec:
    """Return the spec of a relative bias for Hopper's kernels: dense fp32 between zeros."""
    batch, heads, size = bias.shape
    shape = torch.Size((batch, heads, 1, cdiv(size + 2 * MARGIN, 2 * VECTOR) * 2 * VECTOR))
    strides = dense_strides(shape)
    return bias._replace(shape=shape, strides=strides, dtype=torch.float32, offset=0)


def line_workspaces(options: Options) -> tuple[Workspace, ...]:
    """Return the workspace for the ``line`` of a relative bias, if there is one."""
    if options.bias is None or not is_relative(options.bias):
        return ()
    return (Workspace("bias_line", tuple(line(options.bias).shape)),)


def vector(bias: TensorSpec | None, seq_kv: int) -> int:
    """Return how many keys of a bias a thread can load at once: all or none are in bounds."""
    if bias is not None and is_relative(bias):
        return VECTOR
    if bias is None or bias.strides[-1] != 1:
        return 1
    return math.gcd(VECTOR, seq_kv, *bias.strides[:-1])


def bias_workspaces(options: Options) -> tuple[Workspace, ...]:
    """Return the workspace for the copies of a relative bias, if there is one."""
    if options.bias is None or not is_relative(options.bias):
        return ()
    return (Workspace("bias_copies", tuple(shifted(options.bias).shape), options.bias.dtype),)


def beside_bias(tile: Tile, q: TensorSpec, options: Options) -> Tile:
    """Return the tile, with one stage less where the pipelined tiles of a bias would not fit."""
    if options.bias is None or tile.stages == 1:
        return tile
    large = tile.block_q * tile.block_kv > LARGE_BIAS or block_d(q.shape[3]) >= HEAD_DIMS[-1]
    if not (large or q.dtype == torch.float32):
        return tile
    return replace(tile, stages=tile.stages - 1)


def forward_tile(tile: Tile, q: TensorSpec, options: Options) -> Tile:
    """Return the forward's tile for a full GPU: with a bias ``FORWARD``, where it was measured."""
    measured = tile.descriptors and not tile.decomposed and block_d(q.shape[3]) in FORWARD_D
    return FORWARD if options.bias is not None and measured else tile


def shares_bias(q: TensorSpec, k: TensorSpec, options: Options) -> bool:
    """Return whether scores share an element of a bias whose gradient is wanted."""
    if options.bias is None or not options.bias_grad:
        return False
    return tuple(options.bias.shape) != (*q.shape[:3], k.shape[2])


def tma_stores(q: TensorSpec, k: TensorSpec, options: Options) -> bool:
    """Return whether TMA can store dS, in q's dtype and aligned rows, as the gradient of a bias.

    With a softcap, that dS includes the slope of tanh, but the gradient of a bias does not.
    """
    bias = options.bias
    if bias is None or not options.bias_grad:
        return True
    if options.softcap is not None:
        return False
    return bias.dtype == q.dtype and k.shape[2] * bias.dtype.itemsize % ALIGNMENT == 0


def dbias_pass(
    q: TensorSpec, k: TensorSpec, gpu: Gpu, options: Options, *, tma: bool = False
) -> Pass | None:
    """Return the launch for the gradient of a bias, or None if a pass can store its dS instead.

    Args:
        q: its spec.
        k: its spec.
        gpu: the GPU to plan for.
        options: what the call asks for.
        tma: whether the pass stores by TMA.
    """
    bias, stored = options.bias, not tma or tma_stores(q, k, options)
    if bias is None or not options.bias_grad or (stored and not shares_bias(q, k, options)):
        return None
    tile = dbias_tile(q.shape[3], q.dtype.itemsize, gpu)
    batch, head, *rows = bias.shape
    seq_q, seq_kv = q.shape[2], k.shape[2]
    if is_relative(bias):
        blocks = cdiv(seq_q, tile.block_q) + cdiv(seq_kv, tile.block_kv) + 1
        batch, head = q.shape[:2]
    else:
        blocks = cdiv(rows[0], tile.block_q) * cdiv(rows[1], tile.block_kv)
    return Pass("bwd_dbias", tile, (batch * head * blocks,))


def dbias_workspaces(dbias: Pass | None, q: TensorSpec, options: Options) -> tuple[Workspace, ...]:
    """Return the workspace for that launch's parts of the gradient of a relative bias."""
    if dbias is None or options.bias is None or not is_relative(options.bias):
        return ()
    return (Workspace("dbias_partial", (2, *q.shape[:2], options.bias.shape[-1])),)


def dbias_tile(head_dim: int, size: int, gpu: Gpu) -> Tile:
    """Return a square tile, as sums by distance need, that spills little: 64 x 64 was measured.

    Three stages are the fastest on an H200 and take up to 192 KiB of shared memory. Two, not timed,
    fit in the 99 KiB of a small GPU.

    Args:
        head_dim: D.
        size: bytes of an element of q.
        gpu: the GPU to plan for.
    """
    if gpu.interpreted:
        return Tile(32, 32, 4, 1)
    d = block_d(head_dim)
    if size == FP32 and d > HEAD_DIMS[2]:
        return Tile(16, 16, 4, 1)
    stages = 3 if gpu.capability[0] in (9, 10) else 2  # compute capability 12 is that of small GPUs
    return Tile(32, 32, 8, stages) if d == HEAD_DIMS[-1] else Tile(64, 64, 2 * size, stages)
