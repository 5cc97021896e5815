"""The picture of the kernels' schedule shows what the mask says."""

from __future__ import annotations

import pytest

from flashattn.report.schedule import by_keys, by_queries, main


def seen(tiles):
    """Return the tiles of scores, as (query, key), in which some query sees some key."""
    return sorted((query, key) for query in range(tiles) for key in range(tiles) if key <= query)


@pytest.mark.parametrize("tiles", [1, 5, 8])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_every_tile_that_is_seen_is_walked_once(tiles, parts):
    """Rows, split or not, and columns each cover what the mask leaves, once."""
    rows = [(p.owned, key) for p in by_queries(tiles, parts) for key in p.walked]
    columns = [(query, p.owned) for p in by_keys(tiles) for query in p.walked]
    assert sorted(rows) == sorted(columns) == seen(tiles)


@pytest.mark.parametrize("programs", [by_queries(8), by_keys(8)])
def test_the_longest_walk_starts_first(programs):
    """Programs are numbered by their place in the grid, and walk ever less."""
    assert [p.number for p in programs] == list(range(8))
    assert [len(p.walked) for p in programs] == list(range(8, 0, -1))


def test_a_part_is_a_chunk_of_the_keys():
    """The second half of the programs has the second half of the keys; some have none."""
    first, second = by_queries(8, 2)[:8], by_queries(8, 2)[8:]
    assert {key for p in first for key in p.walked} == {0, 1, 2, 3}
    assert {key for p in second for key in p.walked} == {4, 5, 6, 7}
    assert sum(not p.walked for p in second) == 4


def test_it_is_drawn(tmp_path):
    """The command writes the file that it is given."""
    main([str(tmp_path / "kernels.png")])
    assert (tmp_path / "kernels.png").stat().st_size > 10_000
