"""What every package stands on: errors, shapes, masks of documents, checks of IDs, processes, buffers."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
