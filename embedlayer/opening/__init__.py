"""Open whatever the user names: a run, a checkpoint, a saved layer, a file of vectors, or a name on the hub."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
