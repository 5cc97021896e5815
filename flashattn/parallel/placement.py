"""Which rows of a sequence each rank has, and how to shard and unshard tensors accordingly.

"contiguous" splits a sequence into one chunk for each of W ranks. "zigzag" splits it into 2 W and
gives rank r chunks r and 2 W - 1 - r, so that all ranks have the same work under a causal mask
(Dubey et al., 2024, "The Llama 3 Herd of Models", section 3.3.2). Chunks are as long as
``torch.chunk`` makes them, so the last may be shorter or empty, and "contiguous" is DTensor's
``Shard``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from flashattn.checks import check_among

KINDS = {"contiguous": 1, "zigzag": 2}  # chunks of a rank


class Chunk(NamedTuple):
    """Rows start ... stop - 1 of a sequence, which a rank has as its rows from ``at`` on."""

    rank: int
    start: int
    stop: int
    at: int

    @property
    def rows(self) -> slice:
        """The rows of the chunk among those of its rank."""
        return slice(self.at, self.at + self.stop - self.start)


class Placement(NamedTuple):
    """How a sequence is split over W ranks."""

    kind: str  # "contiguous" or "zigzag"
    world: int  # W

    @classmethod
    def over(cls, mesh: DeviceMesh, kind: str) -> Placement:
        """Return the placement over the ranks of a mesh.

        Raises:
            ValueError: the mesh has several dimensions, or there is no such kind.
        """
        if mesh.ndim != 1:
            names = mesh.mesh_dim_names or ("name",)
            msg = f'mesh: wanted one dimension, as in mesh["{names[0]}"], got {mesh.ndim}'
            raise ValueError(msg)
        check_among("placement", kind, KINDS)
        return cls(kind, mesh.size())

    def chunks(self, length: int) -> list[Chunk]:
        """Return all chunks in the order of the sequence; some may be empty."""
        count = self.world * KINDS[self.kind]
        size, found, taken = -(-length // count), [], [0] * self.world
        for i in range(count):
            rank = min(i, count - 1 - i) if self.kind == "zigzag" else i
            start, stop = min(i * size, length), min((i + 1) * size, length)
            found.append(Chunk(rank, start, stop, taken[rank]))
            taken[rank] += stop - start
        return found

    def lengths(self, length: int) -> list[int]:
        """Return how many rows of a sequence each rank has."""
        rows = [0] * self.world
        for chunk in self.chunks(length):
            rows[chunk.rank] += chunk.stop - chunk.start
        return rows


def shard(
    x: torch.Tensor, mesh: DeviceMesh, *, dim: int, placement: str = "zigzag"
) -> torch.Tensor:
    """Return this rank's rows of a whole tensor; differentiable.

    Args:
        x: any tensor.
        mesh: a mesh of one dimension.
        dim: the dimension of the sequence.
        placement: "zigzag" or "contiguous".
    """
    chunks = Placement.over(mesh, placement).chunks(x.shape[dim])
    rank = mesh.get_local_rank()
    own = [x.narrow(dim, y.start, y.stop - y.start) for y in chunks if y.rank == rank]
    return torch.cat(own, dim)


def unshard(
    x: torch.Tensor, mesh: DeviceMesh, *, dim: int, length: int, placement: str = "zigzag"
) -> torch.Tensor:
    """Gather the whole tensor from all ranks' rows; not differentiable.

    Args:
        x: this rank's rows, as ``shard`` returns them.
        mesh: a mesh of one dimension.
        dim: the dimension of the sequence.
        length: the length of the whole sequence.
        placement: "zigzag" or "contiguous".

    Raises:
        ValueError: this rank has other rows than ``shard`` gives it.
    """
    cut = Placement.over(mesh, placement)
    wanted, most = cut.lengths(length)[mesh.get_local_rank()], max(cut.lengths(length))
    rows = x.detach().movedim(dim, 0)
    if len(rows) != wanted:
        raise ValueError(f"x: wanted {wanted} rows of {length} ({placement}), got {len(rows)}")
    padded = rows.new_zeros(most, *rows.shape[1:])
    padded[: len(rows)] = rows
    collectives = torch.ops._c10d_functional  # noqa: SLF001 - compiles, and keeps its name
    group = mesh.get_group().group_name
    gathered = collectives.all_gather_into_tensor(padded, cut.world, group)
    every = collectives.wait_tensor(gathered).unflatten(0, (cut.world, most))
    return torch.cat([every[y.rank, y.rows] for y in cut.chunks(length)]).movedim(0, dim)


def positions(length: int, mesh: DeviceMesh, *, placement: str = "zigzag") -> torch.Tensor:
    """Return the positions of this rank's rows in the sequence, for RoPE: [rows], int64.

    Args:
        length: the length of the whole sequence.
        mesh: a mesh of one dimension.
        placement: "zigzag" or "contiguous".
    """
    where = torch.arange(length, device=mesh.device_type)
    return shard(where, mesh, dim=0, placement=placement)
