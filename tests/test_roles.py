"""The picture of the Hopper kernel's roles: nothing is used before it is there."""

from __future__ import annotations

from itertools import pairwise

import pytest

from flashattn.report.roles import LOADED, PRODUCT, TENSOR, end, main, schedule, softmax_of


@pytest.mark.parametrize("overlapped", [True, False])
@pytest.mark.parametrize(("steps", "groups"), [(1, 2), (4, 2), (3, 3)])
def test_order(steps, groups, overlapped):
    """Scores come before their softmax, that before its product; one product at a time."""
    spans = schedule(steps, groups, overlapped=overlapped)
    products = sorted((s for s in spans if s.who == TENSOR), key=lambda s: s.start)
    assert len(products) == 2 * steps * groups
    assert all(a.end <= b.start for a, b in pairwise(products))
    for group in range(groups):
        of = {s.what: s for s in products if s.group == group}
        for span in (s for s in spans if s.who == softmax_of(group)):
            step = span.what[1:]
            assert of[f"S{step}"].end <= span.start
            assert span.end <= of[f"P{step}V"].start


def test_overlap_pays():
    """Asked for ahead, the tensor cores wait less; never can it be faster than what they do."""
    for groups in (1, 2):
        fast, slow = (end(schedule(8, groups, overlapped=ahead)) for ahead in (True, False))
        assert 2 * 8 * groups * PRODUCT + LOADED <= fast < slow


def test_it_is_drawn(tmp_path):
    """The command writes the file that it is given."""
    main([str(tmp_path / "hopper.png")])
    assert (tmp_path / "hopper.png").stat().st_size > 10_000
