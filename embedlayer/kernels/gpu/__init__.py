"""Triton kernels for CUDA. `launch` launches them as the launch table of their module says."""
