"""Optimizers at the cost of the rows of a batch, their state by rows, parameter groups, and gradient clipping."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
