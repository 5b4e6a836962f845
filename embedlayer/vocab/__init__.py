"""Edits of a vocabulary: tokens added, removed, merged or reordered in tokenizers, live models and folders."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
