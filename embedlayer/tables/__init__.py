"""Token tables: dense, factorised, quantised, and a frozen table with a few trained rows."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
