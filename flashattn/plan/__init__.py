"""Plan: problem, layouts and GPU in, what to launch out. No Triton, no device, no tensor's data."""
