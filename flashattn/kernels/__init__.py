"""Device code and its launchers. Besides tools, only this package imports Triton."""
