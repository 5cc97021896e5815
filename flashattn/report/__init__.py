"""Saved runs as tables; imports neither torch nor Triton, so a laptop can read a cluster's run."""
