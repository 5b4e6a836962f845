from .lightning import lightning_patch as lightning_patch

__all__ = ["lightning_patch"]
