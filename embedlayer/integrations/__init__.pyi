from .transformers_trainer import patch_trainer as patch_trainer

__all__ = ["patch_trainer"]
