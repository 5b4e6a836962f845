"""Trainers of other libraries in one line each: one file per library, which no other package imports."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
