"""Formats of stored rows: how bytes become numbers, and how the codes of a group are chosen."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
