"""Decisions equal the golden list: some are checked here, and all by its command."""

import random
from pathlib import Path

from flashattn.counts.decisions import BLOCK, COUNT, differences

GOLDEN = Path(__file__).with_name("decisions.json.xz")


def test_some_decisions_are_the_golden_ones():
    """Random blocks of the list are right, for every card; ``--check`` compares all blocks."""
    blocks = random.SystemRandom().sample(range(COUNT // BLOCK), 8)
    assert not differences(GOLDEN, blocks), f"blocks {blocks}"
