"""What is counted while torch compiles, with compilers that take no time themselves."""

from __future__ import annotations

import pytest
import torch

from flashattn.measure.compiling import compilation


def whole(x):
    """Return a number by a function that is one graph."""
    return (x.sin() * 2).sum()


def broken(x):
    """Return a number by a function that is two graphs."""
    y = x.sin()
    torch._dynamo.graph_break()
    return (y * 2).sum()


def inputs(size):
    """Return what the functions take."""
    return torch.ones(size)


@pytest.mark.parametrize(("function", "breaks"), [(whole, 0), (broken, 1)])
def test_graph_breaks_are_counted(function, breaks):
    """A function has one graph more than breaks, and its first call compiles nothing twice."""
    done, result = compilation(lambda: torch.compile(function, backend="eager")(inputs(4)))
    assert (done.graphs, done.graph_breaks, done.recompiles) == (breaks + 1, breaks, 0)
    assert done.seconds > 0
    assert result.item() == pytest.approx(function(inputs(4)).item())


def test_recompiles_are_counted():
    """Each further size of an input is a recompile where shapes are not to be dynamic."""
    compiled = torch.compile(broken, backend="eager", dynamic=False)
    done, _ = compilation(lambda: [compiled(inputs(size)) for size in (4, 5, 6)])
    functions, further = 2, 2  # the function is two by its break
    assert (done.recompiles, done.graphs) == (functions * further, functions * (1 + further))


def test_the_first_call_is_the_first_anew():
    """What was compiled before is neither reused nor counted: the second time is as the first."""
    compiled = torch.compile(whole, backend="eager", dynamic=False)
    first, _ = compilation(lambda: compiled(inputs(4)))
    again, _ = compilation(lambda: compiled(inputs(4)))
    other, _ = compilation(lambda: compiled(inputs(5)))
    assert (again.graphs, again.recompiles) == (other.graphs, other.recompiles) == (1, 0)
    assert (first.graphs, first.recompiles) == (1, 0)


def test_nothing_compiled_is_nothing():
    """A call that compiles nothing took no seconds and made no graph, whatever was done before."""
    torch.compile(broken, backend="eager")(inputs(4))
    done, result = compilation(lambda: 7)
    assert (done.seconds, done.graphs, done.graph_breaks, done.recompiles) == (0, 0, 0, 0)
    assert result == 7


def test_the_backward_is_compiled_in_its_seconds():
    """A backward is compiled when it first runs, in seconds that count, and is no further graph."""
    from torch._dynamo import utils  # noqa: PLC0415 - seconds to import

    compiled = torch.compile(whole, backend="aot_eager", dynamic=False)
    forward = []

    def step(sizes):
        for size in sizes:
            loss = compiled(inputs(size).requires_grad_())
            forward.append(utils.calculate_time_spent()["total_wall_time"])
            loss.backward()

    done, _ = compilation(lambda: step([4]))
    assert done.seconds > forward[0] > 0
    assert (done.graphs, done.recompiles) == (1, 0)
    done, _ = compilation(lambda: step([4, 5]))
    assert (done.graphs, done.recompiles) == (2, 1)


def test_more_versions_than_torch_remembers():
    """Recompiles are counted beyond the latest few that torch keeps, and it keeps as many after."""
    from torch._dynamo import utils  # noqa: PLC0415 - seconds to import

    compiled = torch.compile(whole, backend="eager", dynamic=False)
    utils.set_compilation_metrics_limit(2)
    done, _ = compilation(lambda: [compiled(inputs(size)) for size in (4, 5, 6, 7)])
    assert done.recompiles == 3
    assert utils._compilation_metrics.maxlen == utils.DEFAULT_COMPILATION_METRICS_LIMIT
