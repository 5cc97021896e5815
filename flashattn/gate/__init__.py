"""The performance gate: time two revisions alternately until the verdict is settled."""
