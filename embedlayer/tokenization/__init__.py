"""Text to token IDs: train a tokenizer, read one from the files of a model, and find the bytes that a token encodes."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
