"""Compiled CPU kernels of the operations, by numba."""
