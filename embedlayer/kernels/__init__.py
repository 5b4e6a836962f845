"""Compiled CPU kernels: one pass over memory where torch operators need several. They need the extra `fast` (numba)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
