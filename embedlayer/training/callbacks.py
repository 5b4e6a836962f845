"""Callbacks with an `EmbeddingMonitor` for transformers' `Trainer` and for Lightning.

Both report through the trainer's own `log`, so that TensorBoard, Weights & Biases and others get the numbers, and keep
the counts of tokens in the trainer's checkpoints.
"""

import base64
import binascii
import warnings
import zlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from embedlayer.core.documents import shifted_targets
from embedlayer.core.errors import CheckpointError, EmbedLayerWarning, SizeError, require
from embedlayer.core.formatting import a_or_an
from embedlayer.core.held_parameters import parameters_of
from embedlayer.core.shapes import Ids
from embedlayer.integrations.lightning import LIGHTNING
from embedlayer.io.files import JsonObject
from embedlayer.losses.linear import token_log_probs
from embedlayer.training.monitor import EmbeddingMonitor, input_table

SAME_LOSS = 1e-2
"""Largest relative difference between a model's loss and that of its logits, which a model may compute in bfloat16."""


def transformers_monitor(
    trainer: Any, *, every: int = 10, new_tokens: Iterable[int] = (), tokenizer: Any = None
) -> Any:
    """Return a callback for transformers' `Trainer` that logs `EmbeddingMonitor.scalars` every `every` optimizer steps.

    The losses are those of a patched model, or follow from the logits of another, whose loss must be the cross entropy
    of its labels, shifted or not. Counts are saved with the checkpoints of the trainer, in `trainer_state.json`, and
    restored where training resumes from one.

    Args:
        trainer: The trainer, whose `log` gets the numbers.
        every: Optimizer steps from one report to the next.
        new_tokens: IDs of the tokens that an edit added, which are reported as a group too.
        tokenizer: A tokenizer, by which tokens are named; `None` for that of the trainer, if it has one.

    Returns:
        A `transformers.TrainerCallback`, for `trainer.add_callback`. Its attribute `monitor` is the `EmbeddingMonitor`
        of the training.

    Raises:
        SizeError: The model is an encoder-decoder, whose table looks up tokens that its inputs do not have.
        CheckpointError: When training resumes, the counts in its checkpoint are damaged or belong to another table.
        MissingExtraError: transformers is not installed: `pip install 'embedlayer[hf]'`.

    Example:
        >>> trainer = transformers.Trainer(model, arguments, train_dataset=data)  # doctest: +SKIP
        >>> trainer.add_callback(transformers_monitor(trainer, every=10))  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """
    trainer_callback: Any = require("transformers", extra="hf").trainer_callback
    new_tokens = tuple(new_tokens)

    class EmbeddingMonitorCallback(trainer_callback.TrainerCallback, trainer_callback.ExportableState):  # type: ignore[misc]
        """Callback of one trainer; see `transformers_monitor`."""

        def __init__(self) -> None:
            self.monitor: EmbeddingMonitor | None = None
            self.saved: JsonObject = {}
            self.hooks: list[Any] = []
            self.block: AbstractContextManager[None] | None = None

        def state(self) -> JsonObject:
            """Return the counts, for `trainer_state.json`: int64, little-endian, compressed by zlib, in base64."""
            saved: JsonObject = {}
            if self.monitor is not None:
                saved = _state(self.monitor)
                numbers = saved["counts"].numpy().astype("<i8").tobytes()
                saved["counts"] = base64.b64encode(zlib.compress(numbers)).decode()
            return {"args": {}, "attributes": {"saved": saved}}

        def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            """Build the monitor, with the counts of the checkpoint from which training resumes."""
            model, name = objects["model"], type(self).__name__
            if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
                raise SizeError(f"{type(model).__name__} computes IDs of its decoder itself, which are not counted.")
            names = tokenizer if tokenizer is not None else objects.get("processing_class")
            if not (hasattr(names, "backend_tokenizer") or hasattr(names, "id_to_token")):
                names = None  # an image processor, or a slow tokenizer
            self.monitor = EmbeddingMonitor(
                model, objects["optimizer"], every=every, new_tokens=new_tokens, tokenizer=names
            )
            saved = state.stateful_callbacks.get(name, {})
            saved = (saved[0] if isinstance(saved, list) else saved).get("attributes", {}).get("saved")
            if state.global_step and saved:
                _load(self.monitor, saved)
            self.monitor.steps = state.global_step
            state.stateful_callbacks[name] = self.state()
            seen = _SeenByModel(self.monitor)
            self.hooks = [
                model.register_forward_pre_hook(seen.inputs, with_kwargs=True),
                model.register_forward_hook(seen.outputs, with_kwargs=True),
            ]

        def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            assert self.monitor is not None
            self.block = self.monitor.step()
            self.block.__enter__()

        def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            assert self.monitor is not None
            block, self.block = self.block, None
            if block is not None:
                block.__exit__(None, None, None)
            if self.monitor.report is not None:
                trainer.log(self.monitor.scalars())
            if control.should_save:
                self.monitor.counts()  # of all ranks; rank 0 alone writes the state

        def on_epoch_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            """Sum the counts of all ranks before a checkpoint."""
            if control.should_save and self.monitor is not None:
                self.monitor.counts()

        def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            """Remove the hooks from the model."""
            for hook in self.hooks:
                hook.remove()

    return EmbeddingMonitorCallback()


def lightning_monitor(
    ids_of: Callable[[Any], Ids],
    *,
    every: int = 10,
    new_tokens: Iterable[int] = (),
    tokenizer: Any = None,
    model_of: Callable[[Any], nn.Module] = lambda module: module,
) -> Any:
    """Return a callback for Lightning's `Trainer` that logs `EmbeddingMonitor.scalars` every `every` optimizer steps.

    Lightning logs numbers alone: tokens of rows that are not finite are in a warning. Counts are saved with Lightning's
    checkpoints. Losses are those that this package computes; see `EmbeddingMonitor`.

    Args:
        ids_of: Function from a batch to the token IDs that the table looks up.
        every: Optimizer steps from one report to the next.
        new_tokens: IDs of the tokens that an edit added, which are reported as a group too.
        tokenizer: A tokenizer, by which tokens are named; `None` for their IDs.
        model_of: Function from the `LightningModule` to the model with the table.

    Returns:
        A `lightning.pytorch.Callback`. Its attribute `monitor` is the `EmbeddingMonitor` of the training.

    Raises:
        CheckpointError: The counts in a checkpoint belong to another table.
        MissingExtraError: lightning is not installed: `pip install 'embedlayer[recipes]'`.

    Warns:
        EmbedLayerWarning: A row or a gradient that was read is not finite.

    Example:
        >>> trainer = lightning.Trainer(callbacks=[lightning_monitor(lambda batch: batch[0])])  # doctest: +SKIP
    """
    pytorch: Any = require(LIGHTNING, extra="recipes")
    new_tokens = tuple(new_tokens)

    class EmbeddingMonitorCallback(pytorch.Callback):  # type: ignore[misc]
        """Callback of one training; see `lightning_monitor`."""

        def __init__(self) -> None:
            self.monitor: EmbeddingMonitor | None = None
            self.saved: JsonObject = {}
            self.block: AbstractContextManager[None] | None = None
            self.step = 0

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            """Build the monitor, with the counts of the checkpoint from which training resumes."""
            model = model_of(pl_module)
            parameters = set(input_table(model).parameters())
            steps_table = (each for each in trainer.optimizers if parameters & set(parameters_of(each)))
            self.monitor = EmbeddingMonitor(
                model,
                next(steps_table, trainer.optimizers[0]),
                every=every,
                new_tokens=new_tokens,
                tokenizer=tokenizer,
            )
            if self.saved:
                self.monitor.load_counts(self.saved["counts"], self.saved["steps"])
            self.step = trainer.global_step

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            """Begin a step, unless the batch is accumulated to others, and count its IDs."""
            assert self.monitor is not None
            if self.block is None:
                self.block = self.monitor.step()
                self.block.__enter__()
            self.monitor.count(ids_of(batch))

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            """End the step if the optimizer took it, and log what was read."""
            assert self.monitor is not None
            if trainer.global_step == self.step or self.block is None:
                return
            self.step, block, self.block = trainer.global_step, self.block, None
            block.__exit__(None, None, None)
            scalars = self.monitor.scalars()
            pl_module.log_dict({name: value for name, value in scalars.items() if not isinstance(value, str)})
            if texts := [f"{name}: {value}" for name, value in scalars.items() if isinstance(value, str)]:
                warnings.warn(f"Step {self.monitor.steps}: {'; '.join(texts)}.", EmbedLayerWarning, stacklevel=2)

        def state_dict(self) -> JsonObject:
            """Return the counts, for Lightning's checkpoint."""
            return self.saved if self.monitor is None else _state(self.monitor)

        def load_state_dict(self, state_dict: JsonObject) -> None:
            """Take the counts of a checkpoint."""
            self.saved = state_dict

    return EmbeddingMonitorCallback()


class _SeenByModel:
    """Hooks on a model of transformers: its token IDs are counted, and the loss of its logits is recorded."""

    def __init__(self, monitor: EmbeddingMonitor) -> None:
        self.monitor, self.records = monitor, 0

    def inputs(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count the IDs that the model is called with."""
        ids = kwargs.get("input_ids", args[0] if args else None)
        if model.training and isinstance(ids, Tensor) and not ids.is_floating_point():
            self.monitor.count(ids)
        self.records = len(self.monitor.records or ())

    @torch.no_grad()
    def outputs(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Record the loss of the logits, unless the model's loss was recorded: it is one of this package then."""
        records, labels = self.monitor.records, kwargs.get("labels")
        loss, logits = getattr(output, "loss", None), getattr(output, "logits", None)
        if records is None or len(records) > self.records or labels is None or loss is None or logits is None:
            return
        of_next = shifted_targets(labels)
        for z, targets in ((logits[..., :-1, :], of_next), (logits, labels)):
            if z.shape[:-1] != targets.shape:
                continue
            total, number = -token_log_probs(z, targets).sum(), kwargs.get("num_items_in_batch")
            number = (targets != -100).sum() if number is None else number
            are_nan = not bool(loss.isfinite()) and not bool(total.isfinite())
            if are_nan or bool((total / number - loss).abs() <= SAME_LOSS * loss.abs()):
                return
            records.pop()
        warnings.warn(
            f"The loss of {a_or_an(type(model).__name__)} is not the cross entropy of its logits and labels, so the "
            "monitor reports no losses and logits: patch the model, embedlayer.patch(model), or use a loss of "
            "embedlayer.",
            EmbedLayerWarning,
            stacklevel=2,
        )


def _state(monitor: EmbeddingMonitor) -> JsonObject:
    """Return the counts of all ranks and the number of steps."""
    return {"counts": monitor.counts().cpu().clone(), "steps": monitor.steps}


def _load(monitor: EmbeddingMonitor, saved: JsonObject) -> None:
    """Continue with the counts that `state` of the callback for transformers returned."""
    try:
        packed, most = base64.b64decode(saved["counts"], validate=True), 8 * len(monitor.counts()) + 1
        content = bytearray(zlib.decompressobj().decompress(packed, most))  # one byte more shows that it is too long
        counts = torch.from_numpy(np.frombuffer(content, "<i8").astype(np.int64))
        monitor.load_counts(counts, int(saved["steps"]))
    except (KeyError, TypeError, ValueError, binascii.Error, zlib.error) as error:
        raise CheckpointError(f"The counts of the EmbeddingMonitor in the checkpoint are damaged: {error}.") from error
