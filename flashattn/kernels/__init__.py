"""Device code and its launchers. Only this package imports Triton."""
