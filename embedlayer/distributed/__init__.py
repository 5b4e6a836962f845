"""Tables whose rows are sharded over processes, with DDP, FSDP and distributed checkpoints; shares of sequences."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
