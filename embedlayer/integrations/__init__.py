"""Other libraries, one file each: what the package knows of them, and trainers in one line."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
