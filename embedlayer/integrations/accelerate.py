"""accelerate, to which a trainer of transformers leaves the preparation of its model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def sharding_by(trainer: Any) -> str:
    """Return by what the model of a trainer of transformers is sharded, FSDP or DeepSpeed; empty if by nothing."""
    return "FSDP" if trainer.is_fsdp_enabled else "DeepSpeed" if trainer.is_deepspeed_enabled else ""


def forward_of(model: nn.Module) -> Any:
    """Return the forward that was set on a model, without the autocast that accelerate has put around it since."""
    return vars(model).get("_original_forward", vars(model).get("forward"))


@contextmanager
def prepared_again(trainer: Any, model: Any) -> Iterator[None]:
    """Context manager: replace the forward of a model in its block, and prepare the model again if it was prepared."""
    is_prepared = vars(model).pop("_original_forward", None) is not None
    yield
    if is_prepared:
        prepared, model._is_accelerate_prepared = list(trainer.accelerator._models), False  # else it returns at once
        trainer.accelerator.prepare_model(model, evaluation_mode=True)
        trainer.accelerator._models[:] = prepared
