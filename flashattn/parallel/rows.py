"""Documents and masks by rows, for a rank that has some of the rows."""

from __future__ import annotations

import torch

from flashattn.bounds import Bounds, of_rows
from flashattn.mask import FULL
from flashattn.masks import RowMask
from flashattn.parallel.plan import Plan, Task, placed, plan
from flashattn.resolve import Documents, bounds_of, kept


def local_bounds(
    q: torch.Tensor, task: Task, rank: int, documents: Documents | None, mask: RowMask | None
) -> tuple[Task, list[torch.Tensor]]:
    """Return the task to plan for, and the bounds of this rank's rows.

    Args:
        q: this rank's rows [B, H, rows, D].
        task: the whole problem, without documents and mask.
        rank: this rank.
        documents: those of the whole sequences, see ``attention``.
        mask: likewise.

    Returns:
        The task, and the tensors of two ``Bounds``: over this rank's own keys, and over its buffer.

    Raises:
        ValueError: the documents or the mask do not fit.
    """
    of_q, of_k = (q.new_empty(()).expand(q.shape[0], 1, n, 1) for n in (task.seq_q, task.seq_kv))
    whole = bounds_of(of_q, of_k, task.mask, documents, mask)
    # The mask counts from the start of a document, which may differ between queries and keys.
    aligned = isinstance(documents, torch.Tensor) and task.seq_q == task.seq_kv
    limit = task.mask if documents is None or aligned else FULL
    task = task._replace(mask=limit, by_rows=True)

    def make() -> list[torch.Tensor]:
        return _local(whole, task, plan(task, rank), rank)

    # The layers of a model share the bounds of the whole.
    return task, kept(q, whole.keys, (), (task, rank), make)


def _local(whole: Bounds, task: Task, ours: Plan, rank: int) -> list[torch.Tensor]:
    chunks = [x for x in task.placement.chunks(task.seq_q) if x.rank == rank]
    ends = torch.cat([whole.keys[:, x.start : x.stop] for x in chunks], 1)
    found: list[torch.Tensor] = []
    for pieces, keys in ((ours.own_pieces, ours.rows), (ours.pieces, ours.keys)):
        low, high = placed(ends, pieces).unbind(-1)
        found += [*of_rows(low, high, keys)]  # as a list: dynamo of torch 2.11 cannot add the tuple
    return found
