"""Compiled kernels: one pass over memory where torch operators need several.

Those for the CPU need the extra `fast` (numba), and those for CUDA Triton, which comes with torch for CUDA.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
