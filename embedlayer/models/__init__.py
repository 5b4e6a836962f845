"""A small decoder around the embedding layer, text generation, and LLaMA-type checkpoints."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
