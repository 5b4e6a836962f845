"""Lightning: a callback that patches the models of a `LightningModule` and gives untied tables `RowAdamW`."""

from functools import partial
from typing import Any

import torch
from torch import nn

from embedlayer.checkpoints.patching import name_of_tied_module, patch, unpatch
from embedlayer.core.errors import CheckpointError, SizeError, require
from embedlayer.core.held_parameters import parameters_of
from embedlayer.heads.output import OutputHead
from embedlayer.optim.row_adamw import RowAdamW
from embedlayer.row_sparse.pending_updates import pending_updates_of
from embedlayer.tables.dense_table import DenseTable
from embedlayer.tables.row_sparse import RowSparseEmbedding

LIGHTNING = "lightning.pytorch"
"""The module with `Trainer` and `Callback`."""


def lightning_patch(*, row_sparse: bool | None = None) -> Any:
    """Return a callback for Lightning's `Trainer` that patches the models of transformers in a `LightningModule`.

    Each model is patched, see `patch`: its loss needs no logits, and neither does `F.cross_entropy` of its logits.
    Where its table is untied and trained by `torch.optim.AdamW` on one device, gradients are row-sparse, and a
    `RowAdamW` with the same groups replaces the AdamW before the first step, in the trainer and in its schedulers. The
    weights become those of AdamW, and a checkpoint of either optimizer resumes with the other.

    The model stays patched after training. Names in checkpoints do not change.

    Args:
        row_sparse: Whether the gradients of the tables are row-sparse, with `RowAdamW`; `None` where it is possible.

    Returns:
        A `lightning.pytorch.Callback`.

    Raises:
        CheckpointError: When training begins, the `LightningModule` has no model of transformers and no module of
            embedlayer; or `patch` cannot patch its model.
        MissingExtraError: lightning is not installed: `pip install 'embedlayer[recipes]'`.

    Example:
        >>> trainer = lightning.Trainer(callbacks=[lightning_patch()])  # doctest: +SKIP
    """
    pytorch: Any = require(LIGHTNING, extra="recipes")

    class PatchCallback(pytorch.Callback):  # type: ignore[misc]
        """Callback of one training; see `lightning_patch`."""

        def __init__(self) -> None:
            self.models: list[Any] = []

        def __reduce__(self) -> tuple[Any, ...]:  # strategies that spawn processes pickle the callbacks
            return partial(lightning_patch, row_sparse=row_sparse), ()

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            """Patch the models that `LightningModule.__init__` has built, before a strategy wraps them."""
            for model in _models(pl_module):
                if not any(isinstance(each, DenseTable | OutputHead) for each in model.modules()):
                    self.models.append(patch(model))

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            """Patch models that were built since `setup`, then replace the optimizers of row-sparse tables."""
            self.setup(trainer, pl_module, "fit")
            if not any(isinstance(each, DenseTable | OutputHead) for each in pl_module.modules()):
                raise CheckpointError(
                    f"{type(pl_module).__name__} has no model of transformers that could be patched: build a "
                    f"TokenEmbedding and an OutputHead in it, or leave lightning_patch out."
                )
            for model in () if row_sparse is False else self.models:
                obstacle = _obstacle(trainer, pl_module, model)
                if row_sparse and obstacle:
                    raise SizeError(f"row_sparse=True is impossible here: {obstacle}.")
                if not obstacle:
                    patch(unpatch(model), row_sparse=True)
            trainer.optimizers = [_with_rows(each, trainer) for each in trainer.optimizers]

    return PatchCallback()


def _models(module: nn.Module) -> list[nn.Module]:
    """Return the outermost models of transformers inside a module; inside PEFT's wrapper, which is none itself."""
    if hasattr(type(module), "get_input_embeddings"):
        return [module]
    return [model for child in module.children() for model in _models(child)]


def _obstacle(trainer: Any, pl_module: nn.Module, model: Any) -> str:
    """Return why the gradients of a model's table cannot become row-sparse now, as a clause; empty if they can."""
    table = model.get_input_embeddings()
    weight = table.weight
    if table.row_sparse:
        return ""
    if not weight.requires_grad:
        return "the table is not trained"
    if name := name_of_tied_module(pl_module, [weight]):
        return f"{name} is tied to the table"
    if type(trainer.strategy).__name__ != "SingleDeviceStrategy":
        return f"{type(trainer.strategy).__name__} may share the model with other processes"
    optimizers = [
        each for each in trainer.optimizers if any(weight is p for g in each.param_groups for p in g["params"])
    ]
    if [type(each) for each in optimizers] != [torch.optim.AdamW]:
        names = ", ".join(type(each).__name__ for each in optimizers) or "no optimizer"
        return f"RowAdamW replaces one torch.optim.AdamW, and the table is trained by {names}"
    try:  # all options are checked by the optimizer itself, on another table
        for group in optimizers[0].param_groups:
            RowAdamW([{**group, "params": [*RowSparseEmbedding(1, 1).parameters()]}])
    except SizeError as error:
        return str(error).rstrip(".")
    return ""


def _with_rows(optimizer: Any, trainer: Any) -> Any:
    """Return a `RowAdamW` in the place of an AdamW of row-sparse tables; any other optimizer itself."""
    parameters = parameters_of(optimizer)
    if type(optimizer) is not torch.optim.AdamW or all(pending_updates_of(each) is None for each in parameters):
        return optimizer
    rows = RowAdamW(optimizer.param_groups)
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    if schedulers:  # the constructor of a scheduler makes `step` say that it was called
        torch.optim.lr_scheduler.ConstantLR(rows, factor=1.0)
    while schedulers:
        scheduler = schedulers.pop()
        if scheduler.optimizer is optimizer:
            scheduler.optimizer = rows
        schedulers += getattr(scheduler, "_schedulers", ())  # of a `SequentialLR` or a `ChainedScheduler`
    return rows
