"""Analysis of a table: nearest neighbours, geometry, table health, under-trained tokens, and position schemes."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
