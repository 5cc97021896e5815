"""attention(q, k, v, mesh=...): attention with its rows sharded over several ranks."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from operator import index
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.functional import pad

from flashattn import api, registry
from flashattn.arguments import autocast_dtype, cast
from flashattn.checks import check_among, check_scale
from flashattn.dispatch import has_tangents
from flashattn.gpus import why_not
from flashattn.mask import UNBOUNDED, Causal, Mask, Window
from flashattn.masks import RowMask
from flashattn.parallel import keys
from flashattn.parallel.heads import to_heads, to_rows
from flashattn.parallel.placement import Placement
from flashattn.parallel.plan import Task
from flashattn.parallel.rows import local_bounds
from flashattn.plan.precision import PRECISIONS
from flashattn.plan.spec import dense_strides
from flashattn.problem import Problem
from flashattn.resolve import Documents
from flashattn.score import check_sink, with_sink

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

IMPLS = ("auto", "triton", "hopper", "tiled")
Output = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mesh: DeviceMesh,
    placement: str = "zigzag",
    length: int | tuple[int, int] | None = None,
    exchange: Literal["keys", "heads"] = "keys",
    keep: bool = False,
    causal: Causal = False,
    window: Window = UNBOUNDED,
    documents: Documents | None = None,
    mask: RowMask | None = None,
    softcap: float | None = None,
    sink: torch.Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    impl: str = "auto",
    precision: str = "auto",
    deterministic: bool = True,
) -> Output:
    """Compute ``flashattn.attention`` of sequences whose rows are sharded over the ranks of a mesh.

    Every rank calls it with its own rows, in the order of ``shard``, and gets its rows of the
    result. Masks apply to the whole sequences.

    Args:
        q: [B, H, rows, D], this rank's rows, or [B, rows, D]; or a DTensor, see Returns.
        k: [B, G, rows, D], likewise.
        v: [B, G, rows, Dv], likewise.
        mesh: a mesh of one dimension, such as ``mesh["context"]`` of a larger one.
        placement: "zigzag" or "contiguous", see ``shard``.
        length: T, or (T, S), of the whole sequences; None if each rank has the same number of rows.
        exchange: "keys" fetches the keys and values of other ranks that this rank's rows see.
            "heads" gives each rank all rows of some heads; the number of ranks must divide H and G.
        keep: keep fetched keys for the backward, instead of fetching them again.
        causal: see ``flashattn.attention``, as for all arguments that follow.
        window: likewise; with bounds on both sides, only keys inside some window are exchanged.
        documents: likewise, for the whole sequences and the same on all ranks. If queries and keys
            have the same documents, keys that ``window`` hides are not exchanged: pass the length
            of the longest possible document as ``window=(longest, None)``.
        mask: see ``flashattn.attention``; its batches are this rank's.
        softcap: likewise.
        sink: likewise, the same on all ranks. Its gradient is that of this rank's rows (with
            "heads", of its heads): sum it over all ranks.
        scale: see ``flashattn.attention``.
        return_lse: likewise.
        impl: "auto", "triton", "hopper" or "tiled"; any with ``exchange="heads"``.
        precision: see ``flashattn.attention``.
        deterministic: likewise.

    Returns:
        o [B, H, rows, Dv], and with ``return_lse`` also lse [B, H, rows]. DTensors may be sharded
        over rows along ``mesh``, and over batches or heads along other dimensions of their mesh;
        the results are then DTensors placed like q.

    Raises:
        ValueError: an argument does not fit; the message names it.
        NotImplementedError: a second or forward-mode derivative is asked for.

    Source: Dubey et al., 2024, "The Llama 3 Herd of Models", section 3.3.2.
    """
    asked: dict[str, Any] = {"causal": causal, "window": window, "softcap": softcap, "scale": scale}
    asked |= {"documents": documents, "mask": mask}
    asked |= {"impl": impl, "precision": precision, "deterministic": deterministic}
    how: dict[str, Any] = {"mesh": mesh, "placement": placement, "length": length, **asked}
    how |= {"exchange": exchange, "keep": keep, "sink": sink, "return_lse": return_lse}
    if any(isinstance(x, DTensor) for x in (q, k, v)):
        return _of_dtensors(q, k, v, **how)
    if isinstance(sink, DTensor):
        msg = "sink: wanted a plain tensor, as q, k and v are none of DTensor's"
        raise ValueError(msg)  # noqa: TRY004 - as for any argument that does not fit
    if has_tangents(q, k, v, *(() if sink is None else (sink,))):
        raise NotImplementedError("parallel attention has no forward-mode derivative")
    if q.ndim == 3:  # noqa: PLR2004 - [B, rows, D]
        return _each(lambda x: x[:, 0], attention(*(x[:, None] for x in (q, k, v)), **how))
    check_among("exchange", exchange, ("keys", "heads"))
    where = Where.of(q, k, v, mesh, placement, length)
    if where.placement.world == 1:
        return api.attention(q, k, v, sink=sink, return_lse=return_lse, **asked)
    dtype = autocast_dtype(q)
    if dtype is not None:
        q, k, v = cast(dtype, q, k, v)
    with torch.autocast(q.device.type, enabled=False):
        if exchange == "heads":
            o, lse = _by_heads(q, k, v, where, sink, asked)
        else:
            o, lse = _by_keys(q, k, v, where, keep=keep, **asked)
            if sink is not None:
                o, lse = with_sink(o, lse, check_sink(sink, q.shape[1], q))
    return (o, lse) if return_lse else o


class Where(NamedTuple):
    """Which rank has which rows."""

    group: GroupName  # name of the process group
    rank: int  # this rank
    placement: Placement  # of queries and keys
    seq_q: int  # T, of the whole sequence
    seq_kv: int  # S, likewise

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mesh: DeviceMesh,
        kind: str,
        length: int | tuple[int, int] | None,
    ) -> Where:
        """Check that this rank has the right number of rows, and that k is as wide as q.

        Raises:
            ValueError: one of these does not hold, or the mesh or the placement is wrong.
        """
        placement, rank = Placement.over(mesh, kind), mesh.get_local_rank()
        if length is None:
            length = placement.world * q.shape[2], placement.world * k.shape[2]
        # Plans need numbers: a trace is made again for other lengths.
        seq_q, seq_kv = map(index, length if isinstance(length, tuple) else (length, length))
        if k.shape[-1] != q.shape[-1]:
            raise ValueError(f"k: wanted D = {q.shape[-1]}, as q has, got {k.shape[-1]}")
        for name, x, whole in (("q", q, seq_q), ("k", k, seq_kv), ("v", v, seq_kv)):
            wanted = placement.lengths(whole)[rank]
            if x.shape[2] != wanted:
                raise ValueError(
                    f"{name}: wanted {wanted} rows, as rank {rank} has of {whole}"
                    f" ({kind}, see length), got {x.shape[2]}"
                )
        return cls(mesh.get_group().group_name, rank, placement, seq_q, seq_kv)


def _each(change: Callable[[torch.Tensor], torch.Tensor], result: Output) -> Output:
    """Apply a function to o, or to o and lse."""
    return (change(result[0]), change(result[1])) if isinstance(result, tuple) else change(result)


def _by_keys(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    where: Where,
    *,
    keep: bool,
    impl: str,
    precision: str,
    deterministic: bool,
    scale: float | None,
    documents: Documents | None,
    mask: RowMask | None,
    causal: Causal,
    window: Window,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o and lse of this rank's rows, without the sink."""
    check_among("precision", precision, PRECISIONS)
    scale, columns = check_scale(scale, q.shape[-1]), v.shape[-1]
    wide = max(q.shape[-1], columns)
    q, k, v = (pad(x, (0, wide - x.shape[-1])) if x.shape[-1] < wide else x for x in (q, k, v))
    by_rows = documents is not None or mask is not None
    unknown: Any = "unknown" if by_rows else None
    problem = Problem.of(q, k, v, softcap=softcap, documents=unknown)
    task = Task(Mask.of(causal, window), where.seq_q, where.seq_kv, where.placement)
    bounds: list[torch.Tensor] = []
    if by_rows:
        task, bounds = local_bounds(q, task, where.rank, documents, mask)
    family = _family(impl, problem, q.device)
    o, lse, _ = torch.ops.flashattn.parallel_forward(
        q if q.stride(-1) == 1 else q.contiguous(),
        k,
        v,
        bounds,
        *(where.group, where.rank, where.placement.world, where.placement.kind),
        *(task.seq_q, task.seq_kv, task.mask.left, task.mask.right, task.mask.corner),
        *(family, scale, problem.softcap, precision, deterministic, keep),
    )
    return o[..., :columns], lse


def _family(impl: str, problem: Problem, device: torch.device) -> str:
    """Return the kernels that compute the parts.

    Raises:
        ValueError: they cannot solve the problem, or have no backward from o and lse of whole rows.
    """
    if impl == "auto":
        ours = device.type == "cuda" and why_not(problem, device) is None
        return "auto" if ours else keys.TILED
    check_among("impl", impl, IMPLS)
    reason = registry.get(impl).why_not(problem, device, grad=True, lse=True)
    if reason is not None:
        raise ValueError(f"impl: {reason}")
    return impl


def _by_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    where: Where,
    sink: torch.Tensor | None,
    asked: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o and lse of this rank's rows.

    Raises:
        ValueError: the number of ranks does not divide the numbers of heads.
    """
    group, rank, placement, world = *where[:3], where.placement.world
    for name, x in {"q": q, "k": k, "v": v}.items():
        if x.shape[1] % world:
            wanted = f"wanted a number of heads that {world} ranks divide, or exchange='keys'"
            raise ValueError(f"{name}: {wanted}, got {x.shape[1]}")
    if sink is not None:
        sink = check_sink(sink, q.shape[1], q)[0].chunk(world)[rank]
    lengths = [where.seq_q, where.seq_kv, where.seq_kv]
    q, k, v = (to_heads(x, n, placement, group) for x, n in zip((q, k, v), lengths, strict=True))
    o, lse = api.attention(q, k, v, sink=sink, return_lse=True, **asked)
    o, lse = (to_rows(x, placement, rank, group) for x in (o, lse[..., None]))
    return o, lse[..., 0]


def _of_dtensors(
    *tensors: torch.Tensor, mesh: DeviceMesh, length: Any, sink: Any, **how: Any
) -> Output:
    """Attend with the local shards of q, k and v; the results are placed like these.

    Raises:
        ValueError: their placements differ, or shard more than batches, heads and the rows along
            ``mesh``.
    """
    shared = [x for x in tensors if isinstance(x, DTensor)]
    placed = {(x.device_mesh, x.placements) for x in shared}
    if len(shared) < len(tensors) or len(placed) > 1:
        raise ValueError(f"q, k, v: wanted DTensors placed alike, got {placed}")
    q, k, _ = shared
    names = q.device_mesh.mesh_dim_names or ()
    ways = prod(q.device_mesh.size(i) for i, kind in enumerate(q.placements) if kind == Shard(1))
    for i, kind in enumerate(q.placements):
        along = names[i : i + 1] == (mesh.mesh_dim_names or ())
        length = (q.shape[-2], k.shape[-2]) if along and length is None else length
        by_heads = kind == Shard(1) and q.ndim == 4 and not k.shape[1] % ways  # noqa: PLR2004
        fits = by_heads or kind in (Replicate(), Shard(0))
        if not (kind == Shard(q.ndim - 2) if along else fits):
            raise ValueError(
                f"q, k, v: wanted batches or heads sharded evenly, or rows along mesh, got {kind}"
            )
    if isinstance(sink, DTensor):
        if sink.device_mesh != q.device_mesh:
            raise ValueError(f"sink: wanted q's mesh, {q.device_mesh}, got {sink.device_mesh}")
        kinds = zip(sink.placements, q.placements, strict=True)
        # A rank's gradient is that of its own batches and rows.
        parts = [Partial() if by in (Shard(0), Shard(q.ndim - 2)) else kind for kind, by in kinds]
        sink = sink.to_local(grad_placements=parts)
    own = (x.to_local() for x in shared)

    def wrap(x: torch.Tensor) -> torch.Tensor:
        shape = torch.Size((*q.shape[:-1], *x.shape[q.ndim - 1 :]))
        options: Any = {"run_check": False, "shape": shape, "stride": dense_strides(shape)}
        return DTensor.from_local(x, q.device_mesh, q.placements, **options)

    return _each(wrap, attention(*own, mesh=mesh, length=length, sink=sink, **how))
