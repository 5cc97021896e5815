"""Plan: choose what to launch from problem, layouts and GPU, without Triton, device or data."""
