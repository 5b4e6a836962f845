"""Load the embedding layer of real checkpoints, write it back, and read and write files of word vectors."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
