"""Attention whose rows several ranks share: context parallelism on ``torch.distributed``."""

from flashattn.parallel.api import attention
from flashattn.parallel.placement import positions, shard, unshard

__all__ = ["attention", "positions", "shard", "unshard"]
