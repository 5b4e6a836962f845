from .lightning import lightning_patch as lightning_patch
from .transformers_trainer import patch_trainer as patch_trainer

__all__ = ["lightning_patch", "patch_trainer"]
