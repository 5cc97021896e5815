"""Run the kernels under NVIDIA's compute-sanitizer and Triton's sanitizer."""
