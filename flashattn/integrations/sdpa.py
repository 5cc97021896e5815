"""PyTorch's attention on our kernels: SDPA's fused operators and those of ``varlen_attn``.

Importing this module only registers "flashattn" with ``torch.nn.attention``, beside "FA3" and
"FA4". After ``activate``, ``F.scaled_dot_product_attention``, ``varlen_attn`` and all that is built
on them (``torch.compile``, context parallelism, nested tensors) use our kernels wherever they would
have used FlashAttention, cuDNN or the memory-efficient kernel.

PyTorch's own kernels still run what ours cannot: dropout, values wider than keys, head dimensions
above 256, ALiBi, paged caches; mask tensors where PyTorch asks cuDNN first; and narrower values in
FlashAttention's operators, whose results PyTorch expects to be as wide as queries.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    register_flash_attention_impl,
    restore_flash_attention_impl,
)

from flashattn.checks import check_among
from flashattn.integrations.binding import UnsupportedError
from flashattn.integrations.operators import KERNELS

NAMES = {"cuda": "flashattn", "cpu": "flashattn_cpu"}  # in torch.nn.attention, by device


def activate(device: str = "cuda") -> None:
    """Make PyTorch's attention on ``device`` use our kernels until ``deactivate``.

    This replaces what ``torch.nn.attention.activate_flash_attention_impl`` activated before. On
    CUDA it is the same as ``activate_flash_attention_impl("flashattn")`` after importing this
    module.

    Args:
        device: "cuda", or "cpu" for tests, where Triton interprets our kernels.

    Raises:
        ValueError: ``device`` is neither.
    """
    check_among("device", device, NAMES)
    activate_flash_attention_impl(NAMES[device])


def deactivate() -> None:
    """Restore the kernels of PyTorch's attention; do nothing if ours are not active."""
    if current_flash_attention_impl() in NAMES.values():
        restore_flash_attention_impl()


@contextmanager
def enabled(device: str = "cuda") -> Iterator[None]:
    """Activate our kernels in a ``with`` block, then restore what was active before.

    Args:
        device: see ``activate``.

    Raises:
        ValueError: see ``activate``.
    """
    before = current_flash_attention_impl()
    activate(device)
    try:
        yield
    finally:
        restore_flash_attention_impl()
        if before is not None:
            activate_flash_attention_impl(before)


class _Overrides:
    """The handle that ``torch.nn.attention`` keeps while ours are active; it holds the library."""

    def __init__(self, device: str) -> None:
        """Override PyTorch's kernels with ours, which call them for what ours cannot do."""
        key = device.upper()
        self._library: torch.library.Library | None = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for name, kernel in KERNELS.items():
                own = name.endswith(("_for_cpu", "_for_cpu_backward"))
                if hasattr(torch.ops.aten, name) and (device == "cpu" or not own):
                    both = _ours_or(_previous(name, key), kernel)
                    self._library.impl(name, both, key, with_keyset=True, allow_override=True)

    def remove(self) -> None:
        """Restore the kernels that were there before."""
        self._library = None


def _previous(name: str, key: str) -> Callable[..., Any]:
    """Return the kernel that PyTorch would call; on a CPU most operators have none."""
    try:
        kernel: Callable[..., Any] = torch.library.get_kernel(f"aten::{name}", key).call_boxed
    except RuntimeError:

        def kernel(*_: object, **__: object) -> None:
            raise NotImplementedError(f"aten::{name}: PyTorch has no kernel for {key}")

    return kernel


def _ours_or(previous: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(keys: Any, *args: Any, **options: Any) -> Any:
        try:
            return ours(*args, **options)
        except UnsupportedError:
            pass  # so that an error of the previous kernel is not chained to this one
        return previous(keys, *args, **options)

    return kernel


for _device, _name in NAMES.items():
    register_flash_attention_impl(_name, register_fn=partial(_Overrides, _device))
