"""Additional tables whose vectors enter a decoder at its input, in the residual stream, or in attention."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
