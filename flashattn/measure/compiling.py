"""The cost of ``torch.compile``: seconds, graphs, graph breaks and recompiles."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Compilation:
    """What torch.compile did during a call."""

    compile_seconds: float  # wall time in all compilers, forward and backward
    graphs: int  # captured graphs
    graph_breaks: int  # points where capture stopped and restarted
    recompiles: int  # functions compiled again because no compiled version fit


def compilation(call: Callable[[], object]) -> Compilation:
    """Count what ``call`` compiles, starting with nothing compiled.

    This first drops everything compiled in this process, so a version for another shape is
    neither reused nor counted as a recompile. Disk caches are empty, or what an earlier case has
    compiled would cost nothing here.
    """
    from torch._dynamo import utils  # noqa: PLC0415 - seconds to import
    from torch._inductor.utils import fresh_cache  # noqa: PLC0415

    torch.compiler.reset()
    utils.counters.clear()
    utils.clear_compilation_metrics()
    utils.set_compilation_metrics_limit(sys.maxsize)  # the default keeps 64
    try:
        with fresh_cache():
            call()
        compiled = {each.compile_id or "" for each in utils.get_compilation_metrics()}
    finally:
        utils.set_compilation_metrics_limit(utils.DEFAULT_COMPILATION_METRICS_LIMIT)
    # An id is "frame/version" or "frame/version_attempt".
    versions = [name.rpartition("/")[2].partition("_")[0] for name in compiled]
    return Compilation(
        compile_seconds=utils.calculate_time_spent()["total_wall_time"],
        graphs=utils.counters["stats"]["unique_graphs"],
        graph_breaks=sum(utils.counters["graph_break"].values()),
        recompiles=sum(version not in {"", "0"} for version in versions),
    )
