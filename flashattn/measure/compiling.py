"""What compiling costs: the seconds, the graphs and what split or repeated them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


@dataclass(frozen=True)
class Compilation:
    """What torch.compile did during a call.

    Args:
        seconds: spent compiling, forward and backward, by all compilers together.
        graphs: that were captured.
        graph_breaks: where the capture of a function stopped and began anew.
        recompiles: of functions that had a compiled version that did not fit.
    """

    seconds: float
    graphs: int
    graph_breaks: int
    recompiles: int


def compilation(call: Callable[[], T]) -> tuple[Compilation, T]:
    """Run ``call`` with nothing compiled yet and count what gets compiled.

    All that this process has compiled is forgotten, so that another shape's version of the same
    function is neither reused nor counted as its recompile. Compilers' caches on the disk are left
    alone: what they hold takes fewer seconds.

    Args:
        call: the first call of a compiled function, with its backward if that is to be compiled.

    Returns:
        What was done, and what ``call`` returned.
    """
    from torch._dynamo import utils  # noqa: PLC0415 - seconds to import

    torch.compiler.reset()
    utils.counters.clear()
    utils.clear_compilation_metrics()
    utils.set_compilation_metrics_limit(sys.maxsize)  # by default the latest 64
    try:
        result = call()
        compiled = [each.compile_id or "" for each in utils.get_compilation_metrics()]
    finally:
        utils.set_compilation_metrics_limit(utils.DEFAULT_COMPILATION_METRICS_LIMIT)
    done = Compilation(
        seconds=utils.calculate_time_spent()["total_wall_time"],
        graphs=utils.counters["stats"]["unique_graphs"],
        graph_breaks=sum(utils.counters["graph_break"].values()),
        recompiles=sum(_is_repeated(name) for name in set(compiled)),
    )
    return done, result


def _is_repeated(compile_id: str) -> bool:
    """Whether the id, "frame/version" with the attempt behind it if not the first, is a repeat."""
    version = compile_id.rpartition("/")[2].partition("_")[0]
    return version not in {"", "0"}
