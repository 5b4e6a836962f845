"""Position schemes: added to the input, rotating queries and keys, or as an attention bias."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
