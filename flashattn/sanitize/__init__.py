"""The kernels under sanitizers: NVIDIA's compute-sanitizer, and Triton's own."""
