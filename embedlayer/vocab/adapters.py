"""Adapters of PEFT that change token tables and LM heads: saved and loaded as trained rows, or merged into the weights.

For a model of transformers, `patch(model)` first: its tables and heads then are those of this library, under the same
names, which are the names in the adapter's files.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from embedlayer.core.block_sizes import TABLE_ROWS, block_size
from embedlayer.core.devices import device_kind
from embedlayer.core.errors import CheckpointError, SizeError, TokenIdError
from embedlayer.core.formatting import a_or_an
from embedlayer.formats.adapters import (
    AdapterFolder,
    ModuleAdapter,
    ReplacedRows,
    adapt_rows,
    read_adapter,
    write_token_rows,
)
from embedlayer.heads.output import OutputHead
from embedlayer.integrations.peft import MERGE
from embedlayer.tables.dense_table import DenseTable
from embedlayer.tables.packed_rows import PackedRows
from embedlayer.tables.table import TokenTable
from embedlayer.vocab.row_training import train_only_rows, trained_rows
from embedlayer.vocab.targets.module_parts import vocabulary_modules

Weight = DenseTable | OutputHead | PackedRows
"""What an adapter is merged into: a dense table, an untied head, or stored codes."""

Changes = dict[str, tuple[Weight, ModuleAdapter]]
"""Weights that an adapter changes, with the change of each, by name."""


def save_adapter(module: nn.Module, directory: Path | str) -> None:
    """Save the rows that were trained after `train_only_rows` as an adapter of PEFT's method trainable tokens.

    The adapter has the rows of each table and of each untied head, under their names in the module.
    `peft.PeftModel.from_pretrained(model, directory)` loads it onto the model of transformers.

    Args:
        module: Model on which `train_only_rows` was called; `merge_rows` must not have been called yet.
        directory: Folder, created if missing.

    Raises:
        FileError: The folder cannot be written.
        CheckpointError: The rows are sharded.
    """
    rows_by_name = trained_rows(module)
    token_ids = next(iter(rows_by_name.values())).token_tensor
    write_token_rows(directory, {name: rows.delta for name, rows in rows_by_name.items()}, token_ids)


def load_adapter(module: nn.Module, directory: Path | str) -> None:
    """Read the trainable tokens of an adapter into a live module, in place, to use them or to train them further.

    It calls `train_only_rows` with the tokens of the adapter, and copies their rows bit for bit. The rows of an untied
    head that the adapter does not contain start as they are. If an error is raised, nothing changes.

    Args:
        module: Model with dense tables or stored codes. Its rows must not be trained separately yet.
        directory: Folder that PEFT or `save_adapter` wrote.

    Raises:
        SizeError: As in `train_only_rows`.
        FileError: The folder or a file in it is missing.
        CheckpointError: A file is damaged; or the adapter changes another module than a table or a head, other tokens
            in each of them, or more than the rows of some tokens.
        TokenIdError: A token of the adapter is outside the tables.
        VocabularyError: The module contains a `DraftHead`, hashed n-grams of another library, or other values of
            tokens.
    """
    changes = _changes(module, read_adapter(directory))
    trained = {name: change.tokens_alone for name, (_, change) in changes.items()}
    first, *others = trained.values()
    if first is None or any(each is None or each.token_ids != first.token_ids for each in others):
        raise CheckpointError(f"{directory} changes more than rows: merge_adapter(model, {str(directory)!r}).")
    train_only_rows(module, first.token_ids)
    order = torch.tensor(first.token_ids, dtype=torch.long).argsort()
    for name, rows in trained_rows(module).items():
        if (tokens := trained.get(name)) is not None:
            rows.delta = nn.Parameter(tokens.values[order].to(rows.delta.device, copy=True))


def merge_adapter(target: nn.Module, directory: Path | str, *, module: str | None = None) -> None:
    """Write the changes of a PEFT adapter into a dense table, an untied head, or all of these in a model, in place.

    The new weight is `W + scaling * B @ A` for LoRA, with `scaling = lora_alpha / r` (`/ sqrt(r)` for rsLoRA); the
    whole weight for `modules_to_save`; and for trainable tokens W with their rows replaced. Sums are rounded to the
    dtype of W. A tied head reads the merged table, as after `PeftModel.merge_and_unload`. Into stored codes, such as
    those of a quantised table, only trainable tokens are merged: their rows are quantised, and all other bytes stay. If
    an error is raised, nothing changes.

    Args:
        target: Table, untied head, or a model that contains these.
        directory: Folder that PEFT, `save_adapter` or `DeltaEmbedding.save_adapter` wrote.
        module: If `target` is a table or a head: its name in the adapter. `None` if the adapter changes only one module
            of its sizes. It is ignored for a model, whose tables and heads are found by their names in it.

    Raises:
        SizeError: A table does not store each row separately; or it has stored codes, and the adapter changes more than
            single tokens.
        FileError: The folder or a file in it is missing.
        CheckpointError: A file is damaged; the adapter is of a kind whose changes are not known here, such as DoRA; it
            does not change the target; or, for a model, it also changes another module than a table or a head. Or
            rows cannot be quantised to the format of stored codes.
        TokenIdError: A token of the adapter is outside the target.
        VocabularyError: `target` contains a `DraftHead`, hashed n-grams of another library, or other values of tokens.

    Reference: PEFT, `tuners/lora/layer.py` and `tuners/trainable_tokens/layer.py`.
    """
    adapter = read_adapter(directory)
    if isinstance(target, TokenTable | OutputHead):
        weight = _weight(target)
        changes = {module or "weight": (weight, adapter.choose(weight.vocab_size, weight.embed_dim, module))}
        _check_fit(changes, directory)
    else:
        changes = _changes(target, adapter)
    merges: list[Callable[[], None]] = []
    for weight, change in changes.values():  # errors are raised here
        if not isinstance(weight, PackedRows):
            merges.append(partial(_merge, weight, change))
        elif (tokens := change.tokens_alone) is None:
            raise SizeError(f"All rows of {a_or_an(weight)} cannot be changed: use the dense table.")
        else:
            ids = torch.tensor(tokens.token_ids, device=weight.device)
            rows = weight.stored_rows.quantised(tokens.values.to(weight.device))
            merges.append(partial(weight.store_rows, ids, rows))
    for merge in merges:
        merge()


def _changes(module: nn.Module, adapter: AdapterFolder) -> Changes:
    """Return each table and untied head of a module that an adapter changes, with the change, by name."""
    vocabulary = vocabulary_modules(module)
    others = sorted({*adapter.others, *adapter.modules} - {*vocabulary.tables, *vocabulary.heads})
    if others:
        shown = ", ".join(others[:3]) + (f", and {len(others) - 3} more" if len(others) > 3 else "")
        raise CheckpointError(f"The adapter in {adapter.directory} changes other modules: {shown}. Call {MERGE}.")
    changes: Changes = {}
    for name, part in (*vocabulary.tables.items(), *vocabulary.heads.items()):
        if (change := adapter.modules.get(name)) is None:
            continue
        weight = _weight(part)
        same = next((other for owner, other in changes.values() if _first(owner) is _first(weight)), None)
        if same is None:
            changes[name] = weight, change
        elif not same.equals(change):
            raise CheckpointError(f"{adapter.directory} changes {name} otherwise than its tied table.")
    if not changes:
        raise CheckpointError(f"The adapter in {adapter.directory} changes no module that has weights.")
    _check_fit(changes, adapter.directory)
    return changes


def _first(weight: Weight) -> Tensor:
    """Return the first tensor that stores the rows, which those with the same rows share."""
    return next(iter(weight.stored_rows.rows.values())) if isinstance(weight, PackedRows) else weight.weight


def _weight(part: nn.Module) -> Weight:
    """Return what stores the rows of a table or a head: a dense table, an untied head, or stored codes."""
    if isinstance(part, OutputHead) and part.own_table is not None:
        part = part.own_table
    if not isinstance(part, Weight):
        raise SizeError(f"An adapter cannot be merged into {a_or_an(part)}: use the dense table.")
    return part


def _check_fit(changes: Changes, directory: Path | str) -> None:
    """Check that each change can be merged into its weight."""
    for name, (weight, change) in changes.items():
        vocab_size, embed_dim = weight.vocab_size, weight.embed_dim
        if change.sizes not in ((vocab_size, embed_dim), (None, embed_dim)):
            raise CheckpointError(
                f"{directory} is for a {name} of {change.sizes[0] or vocab_size} x {change.sizes[1]} numbers, and this "
                f"one has {vocab_size} x {embed_dim}: edit the vocabulary first."
            )
        ids = [row for each in change.adapters if isinstance(each, ReplacedRows) for row in each.token_ids]
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise TokenIdError(f"{directory} has tokens up to {max(ids)}: add them to the {vocab_size} rows of {name}.")


@torch.no_grad()
def _merge(owner: DenseTable | OutputHead, change: ModuleAdapter) -> None:
    """Write a change into a weight, in place, a block of rows at a time."""
    weight, size = owner.weight, block_size(TABLE_ROWS, device_kind(owner.weight))
    for start in range(0, owner.vocab_size, size):
        stop = min(start + size, owner.vocab_size)
        rows = weight[start:stop] if change.weight is None else change.weight[start:stop].to(weight)
        weight[start:stop] = adapt_rows(change.adapters, rows, start, stop)
