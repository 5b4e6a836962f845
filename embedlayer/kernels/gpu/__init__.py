"""Triton kernels for CUDA. `launch` runs them from the data that stands beside each."""
