"""Device code and its launchers: the only place that imports Triton."""
