"""All implementations, one file per family; importing this package registers them."""

from flashattn.impls import own  # ours come first in names()

# isort: split
from flashattn.impls import flash_attn, flex, naive, sdpa

__all__ = ["flash_attn", "flex", "naive", "own", "sdpa"]
