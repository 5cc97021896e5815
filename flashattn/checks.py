"""Checks of single arguments; errors name what was wanted and what was given."""

from __future__ import annotations

import sys
from collections.abc import Collection

import torch

TINY_SCALE = 2.0**-64  # below it lse / scale may overflow, and some implementations refuse it


def check_among(name: str, value: object, wanted: Collection[object]) -> None:
    """Check that an argument has one of the wanted values.

    Raises:
        ValueError: it has another; the message names the argument, what was wanted and given.
    """
    try:
        known = value in frozenset(wanted)  # by hash: a tensor has no truth value
    except TypeError:
        known = False
    if not known:
        raise ValueError(f"{name}: wanted one of {', '.join(map(str, wanted))}, got {value!r}")


def dense(name: str, x: object) -> torch.Tensor:
    """Return x if it is a dense tensor.

    Raises:
        ValueError: it is no tensor, or nested or sparse; the message names the argument.
    """
    if not isinstance(x, torch.Tensor):
        msg = f"{name}: wanted a tensor, got {type(x).__name__}"
        raise ValueError(msg)  # noqa: TRY004 - one kind of error for one kind of mistake
    if x.layout != torch.strided or x.is_nested:
        got = "nested" if x.is_nested else x.layout
        raise ValueError(f"{name}: wanted a dense (strided) tensor, got {got}")
    return x


def check_scale(scale: float | None, head_dim: int, name: str = "scale") -> float:
    """Return the factor on the scores: ``head_dim ** -0.5`` unless given.

    Raises:
        ValueError: ``scale``, called ``name``, is not a finite number.
    """
    if scale is None:
        return head_dim**-0.5
    number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    if not (number and abs(scale) <= sys.float_info.max):
        raise ValueError(f"{name}: wanted a finite number or None, got {scale!r}")
    return float(scale)
