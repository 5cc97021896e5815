"""Context parallelism on ``torch.distributed``: attention with its rows sharded over ranks."""

from flashattn.parallel.api import attention
from flashattn.parallel.placement import positions, shard, unshard

__all__ = ["attention", "positions", "shard", "unshard"]
