"""The kernels for any GPU: one tile of queries or of keys per program, in plain Triton."""
