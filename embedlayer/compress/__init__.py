"""Compress a table into a smaller kind of table, and measure the cost."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
