"""Count what kernels do, without a GPU or a clock, and compare with expectations."""
