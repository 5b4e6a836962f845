"""Losses, statistics and divergences of LM heads, over the whole vocabulary and without a tensor of all logits."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
