"""The input embedding: token IDs to the input of the first block, and tables whose vectors enter a decoder later."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
