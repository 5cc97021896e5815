"""Measure a callable: time, memory, compilation, kernels; and describe the machine."""
