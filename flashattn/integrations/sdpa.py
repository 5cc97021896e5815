"""PyTorch's attention on our kernels: SDPA's fused operators and those of ``varlen_attn``.

Importing this module registers "flashattn" with ``torch.nn.attention``, beside "FA3" and "FA4", and
changes nothing else; ``activate`` does. Then ``F.scaled_dot_product_attention``, ``varlen_attn``
and all that is built on them (``torch.compile``, context parallelism, nested tensors) call us
wherever they would have called FlashAttention, cuDNN or the memory-efficient kernel.

What our kernels cannot solve goes on to PyTorch's own: dropout, values wider than keys, head
dimensions above 256, ALiBi, paged caches; mask tensors where cuDNN is asked first; and narrower
values in FlashAttention's operators, whose results PyTorch expects to be as wide as queries.
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
    """Let PyTorch's attention on ``device`` call our kernels until ``deactivate``.

    It replaces what ``torch.nn.attention.activate_flash_attention_impl`` activated before, and on
    CUDA is the same as ``activate_flash_attention_impl("flashattn")`` once this module is imported.

    Args:
        device: "cuda", or "cpu", where Triton interprets our kernels: for tests.

    Raises:
        ValueError: another device.
    """
    check_among("device", device, NAMES)
    activate_flash_attention_impl(NAMES[device])


def deactivate() -> None:
    """Give PyTorch's attention its own kernels back; do nothing if ours are not active."""
    if current_flash_attention_impl() in NAMES.values():
        restore_flash_attention_impl()


@contextmanager
def enabled(device: str = "cuda") -> Iterator[None]:
    """Activate, and restore at the end what was active before.

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
    """What ``torch.nn.attention`` keeps while ours are active: they go with the library."""

    def __init__(self, device: str) -> None:
        """Put ours before PyTorch's own, which they leave to what they cannot do."""
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
        """Give back what was there before."""
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
            pass  # so that an error of the previous kernel is not told as a consequence
        return previous(keys, *args, **options)

    return kernel


for _device, _name in NAMES.items():
    register_flash_attention_impl(_name, register_fn=partial(_Overrides, _device))
