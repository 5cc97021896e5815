"""Names that Gluon gives in one of Triton's versions 3.6 to 3.9 and not in another."""

from __future__ import annotations

import triton
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language import core

# 3.9 still has the old names, and raises when they are called.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
aggregate = getattr(triton, "aggregate", None) or core._aggregate  # noqa: SLF001
