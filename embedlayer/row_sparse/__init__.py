"""What a row-sparse table and its optimizer share: gradients by rows, and steps that rows have not taken yet."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
