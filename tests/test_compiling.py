"""``compilation`` counts what torch compiles, here with backends that take no time."""

import os

import pytest
import torch

from flashattn.measure.compiling import Compilation, compilation


def whole(x):
    """Return a number, computed in one graph."""
    return (x.sin() * 2).sum()


def broken(x):
    """Return a number, computed in two graphs."""
    y = x.sin()
    torch._dynamo.graph_break()
    return (y * 2).sum()


@pytest.mark.parametrize(("function", "breaks"), [(whole, 0), (broken, 1)])
def test_graphs_breaks_and_recompiles_are_counted(function, breaks):
    """A function has one more graph than breaks; each further input size recompiles all graphs.

    Earlier compilations are neither reused nor counted: a second run counts like the first.
    """
    compiled = torch.compile(function, backend="eager", dynamic=False)
    for sizes in ([4], [4], [5, 6, 7]):
        done = compilation(lambda at=sizes: [compiled(torch.ones(n)) for n in at])
        assert done.graph_breaks == breaks * len(sizes)
        assert done.graphs == (breaks + 1) * len(sizes)
        assert done.recompiles == done.graphs - (breaks + 1)
        assert done.compile_seconds > 0


def test_nothing_compiled_is_nothing():
    """A call that compiles nothing counts no seconds and no graphs, whatever came before."""
    torch.compile(broken, backend="eager")(torch.ones(4))
    assert compilation(lambda: None) == Compilation(0, 0, 0, 0)


def test_the_backward_is_compiled_in_its_seconds():
    """A backward compiles when it first runs; its seconds count, and it is no further graph."""
    from torch._dynamo import utils  # noqa: PLC0415 - seconds to import

    compiled = torch.compile(whole, backend="aot_eager", dynamic=False)

    forward = []

    def step():
        loss = compiled(torch.ones(4, requires_grad=True))
        forward.append(utils.calculate_time_spent()["total_wall_time"])
        loss.backward()

    done = compilation(step)
    assert done.compile_seconds > forward[0] > 0
    assert (done.graphs, done.recompiles) == (1, 0)


def test_more_versions_than_torch_remembers():
    """Recompiles beyond torch's limit on metrics are counted; the limit is put back after."""
    from torch._dynamo import utils  # noqa: PLC0415 - seconds to import

    compiled = torch.compile(whole, backend="eager", dynamic=False)
    utils.set_compilation_metrics_limit(2)
    done = compilation(lambda: [compiled(torch.ones(size)) for size in (4, 5, 6, 7)])
    assert done.recompiles == 3
    assert utils._compilation_metrics.maxlen == utils.DEFAULT_COMPILATION_METRICS_LIMIT


def test_disk_caches_are_empty():
    """Each compilation has cache folders of its own, so that earlier cases do not speed it up."""
    folders = []
    for _ in range(2):
        compilation(lambda: folders.append(os.environ["TORCHINDUCTOR_CACHE_DIR"]))
    assert len({*folders, os.environ.get("TORCHINDUCTOR_CACHE_DIR")}) == 3
