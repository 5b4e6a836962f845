"""Compiled CPU kernels: one pass over memory where torch operators need several. They need the extra `fast` (numba)."""
