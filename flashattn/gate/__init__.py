"""The gate on time: two revisions side by side, in turns, until the difference has a name."""
