"""Decisions are those of the golden list: all by its command, some of them here."""

from __future__ import annotations

import random
from pathlib import Path

from flashattn.counts.decisions import BLOCK, COUNT, differences

GOLDEN = Path(__file__).with_name("decisions.json.xz")


def test_some_decisions_are_the_golden_ones():
    """Other blocks of the list on each run, of every card; ``--check`` compares them all."""
    blocks = random.SystemRandom().sample(range(COUNT // BLOCK), 8)
    assert not differences(GOLDEN, blocks), f"blocks {blocks}"
