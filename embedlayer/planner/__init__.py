"""Plan the embedding table and the LM head of a model before anything is built."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
