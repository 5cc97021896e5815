"""Masks: the bounds are exactly the visible pairs, for every window, corner and length."""

from itertools import pairwise

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from flashattn.mask import CAUSAL, FULL, Mask

LENGTHS = st.integers(0, 33)
BOUNDS = st.none() | st.sampled_from((0, 1, 7, 8, 9, 40)) | st.integers(0, 12)
MASKS = st.builds(Mask, BOUNDS, BOUNDS, st.sampled_from(("top_left", "bottom_right")))
BANDS = st.builds(Mask.over, MASKS, LENGTHS, LENGTHS)


def matrix(band):
    """Return which keys each query sees [T, S], pair by pair."""
    rows = [[band.sees(t, s) for s in range(band.seq_kv)] for t in range(band.seq_q)]
    return torch.tensor(rows, dtype=torch.bool).reshape(band.seq_q, band.seq_kv)


@hypothesis.given(mask=MASKS, seq_q=LENGTHS, seq_kv=LENGTHS)
def test_definition(mask, seq_q, seq_kv):
    """A query sees keys from ``left`` before to ``right`` after its position from the corner."""
    t, s = torch.arange(seq_q)[:, None], torch.arange(seq_kv)[None, :]
    distance = s - t - (seq_kv - seq_q if mask.corner == "bottom_right" else 0)
    wanted = torch.ones(seq_q, seq_kv, dtype=torch.bool)
    if mask.left is not None:
        wanted &= distance >= -mask.left
    if mask.right is not None:
        wanted &= distance <= mask.right
    assert torch.equal(matrix(mask.over(seq_q, seq_kv)), wanted)
    assert torch.equal(mask.over(seq_q, seq_kv).sees(t, s).expand(seq_q, seq_kv), wanted)


@hypothesis.given(band=BANDS)
def test_bounds_are_the_support(band):
    """The key bounds of a query and the query bounds of a key hold exactly the visible pairs."""
    seen = matrix(band)
    for t in range(band.seq_q):
        low, high = band.keys_of(t)
        assert seen[t].nonzero().flatten().tolist() == list(range(low, high))
    for s in range(band.seq_kv):
        low, high = band.queries_of(s)
        assert seen[:, s].nonzero().flatten().tolist() == list(range(low, high))


@hypothesis.given(band=BANDS)
def test_bounds_are_monotone(band):
    """Bounds lie within the sequence and never decrease; bounds of a tensor are elementwise."""
    for bounds, count, size in (
        (band.keys_of, band.seq_q, band.seq_kv),
        (band.queries_of, band.seq_kv, band.seq_q),
    ):
        found = [bounds(i) for i in range(count)]
        for one, other in pairwise(found):
            assert one[0] <= other[0]
            assert one[1] <= other[1]
        assert all(0 <= low <= high <= size for low, high in found)
        of_all = (torch.as_tensor(x).expand(count) for x in bounds(torch.arange(count)))
        assert list(zip(*(x.tolist() for x in of_all), strict=True)) == found


@hypothesis.given(band=BANDS, blocks=st.tuples(st.integers(1, 9), st.integers(1, 9)))
def test_tiles(band, blocks):
    """A tile range holds just the tiles with a visible pair, its full part those with no hidden."""
    seen = matrix(band)
    for matrix_, ranges, own, other in (
        (seen, band.key_tiles, *blocks),
        (seen.mT, band.query_tiles, *blocks),
    ):
        rows, columns = matrix_.shape
        for start in range(0, rows, own):
            tiles = matrix_[start : start + own].split(other, dim=1) if columns else ()
            first, full, full_end, end = ranges(start, min(start + own, rows), other)
            assert 0 <= first <= full <= full_end <= end <= len(tiles)
            visible = [i for i, tile in enumerate(tiles) if tile.any()]
            assert visible == list(range(first, end))
            whole = [i for i, tile in enumerate(tiles) if tile.all()]
            assert whole == list(range(full, full_end))


@hypothesis.given(band=BANDS)
def test_counts(band):
    """The closed forms of visible pairs and fully masked rows equal their counts."""
    seen = matrix(band)
    assert band.pairs == int(seen.sum())
    assert band.fully_masked_rows == int((~seen.any(-1)).sum())


@hypothesis.given(mask=MASKS)
def test_names_are_read_back(mask):
    """Parsing the name of a mask gives the same mask."""
    assert Mask.parse(str(mask)) == mask


def test_names():
    """Masks have short names, and those of causal masks never change."""
    names = [str(x) for x in (FULL, CAUSAL, Mask.of("bottom_right"))]
    assert names == ["full", "causal", "causal_br"]
    assert str(Mask.of(window=(70, 5))) == "window70+5"
    assert str(Mask.of("bottom_right", (70, None))) == "window70+0_br"
    assert str(Mask.of(window=(None, 5))) == "windowall+5"


def test_what_is_asked():
    """A causal mask hides every later key, whatever the window; otherwise both bounds hold."""
    assert Mask.of(causal=True) == Mask.of("top_left") == CAUSAL == Mask.of(window=(None, 0))
    assert Mask.of("bottom_right", (3, 9)) == Mask(3, 0, "bottom_right")
    assert Mask.of(window=(3, 9)) == Mask(3, 9)
    for mask in (FULL, CAUSAL, Mask(3, 9), Mask(3, 0, "bottom_right")):
        assert Mask.of(mask.causal, mask.window) == mask


@pytest.mark.parametrize("window", [(-1, 0), (0, -1), (1,), (1, 2, 3), (True, 0), (0, 1.0), 8, "8"])
def test_impossible_windows(window):
    """A window is two bounds, each None or a non-negative int."""
    with pytest.raises(ValueError, match=r"window: wanted \(left, right\), each an int .* got"):
        Mask.of(window=window)
