"""Training of the rows of a few tokens and nothing else, in the tables and heads of a live module."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer

from embedlayer.core.errors import CheckpointError, SizeError, StaleRowsError
from embedlayer.core.formatting import a_or_an
from embedlayer.core.held_parameters import held_parameters, optimizers_of
from embedlayer.core.own_attributes import (
    ROW_HOOKS,
    TRAINED_BEFORE,
    own_attribute,
    remove_own_attribute,
    set_own_attribute,
)
from embedlayer.core.partitioned import is_sharded, refuse_partitioned
from embedlayer.families.vocabulary_tensors import models_in
from embedlayer.heads.output import NEW_ROWS, ROWS, OutputHead
from embedlayer.integrations.fsdp import PARALLELIZE, has_fsdp_modules
from embedlayer.integrations.peft import refuse_frozen_rows
from embedlayer.tables.delta import DeltaEmbedding
from embedlayer.tables.dense import TokenEmbedding
from embedlayer.tables.dense_table import DenseTable
from embedlayer.tables.packed_rows import PackedRows
from embedlayer.tables.table import TokenTable
from embedlayer.vocab.init.old_rows import DeadRows, LiveRows
from embedlayer.vocab.init.row_init import ComputedRows, Generator, RowInit, RowOrigin, Tokens, VectorsInit
from embedlayer.vocab.targets.module_parts import vocabulary_modules


@dataclass(frozen=True, eq=False)
class TrainedInit(RowInit):
    """Set new rows to rows that were trained before, in a live copy of the model whose folder is edited."""

    values: Float[Tensor, "k D"]
    init: RowInit

    @property
    def dead(self) -> DeadRows:  # type: ignore[override]
        """Return `init.dead`: the old rows that are not read because they were never trained; see `RowInit`."""
        return self.init.dead

    @property
    def of_other_widths(self) -> RowInit:  # type: ignore[override]
        """Return `init`, because rows of other tables were not trained."""
        return self.init

    def compute(self, live: LiveRows, tokens: Tokens, chunk: slice, generator: Generator) -> ComputedRows:
        """Return the trained rows of the chunk, with origins such as "trained from mean"; see `RowInit.compute`."""
        values = VectorsInit(self.values).compute(live, tokens, chunk, generator)[0]
        origins = self.init.compute(live, tokens, chunk, generator)[1]
        return values, [RowOrigin(f"trained from {origin.method}", origin.old_ids) for origin in origins]


def train_only_rows(module: nn.Module, token_ids: Iterable[int]) -> None:
    """Prepare a module, in place, so that only the rows of the given tokens are trained.

    Each table is replaced by a `DeltaEmbedding`, which reads the rows of these tokens from a small trainable tensor
    and all others from the frozen table. All other parameters are frozen. A tied head reads the rows of its table; an
    untied head gets trainable rows of its own. The outputs for all other tokens keep every bit. Build the optimizer
    afterwards. After training, `merge_rows` writes the trained rows into the tables and restores the module.

    Tables of stored codes, such as quantised ones, stay as they are, and the trained rows over them are float32. With
    gradients and AdamW's moments, N trained rows take 16 N D bytes; no floating-point copy of the table is made.

    Until then, `save_pretrained` of a model of transformers writes the trained rows into the weights that it saves.
    `state_dict()` has them separately, and `load_state_dict` takes both forms.

    Args:
        module: A layer or model with tables that store each row separately: dense ones, or stored codes.
        token_ids: The IDs of the tokens, each once.

    Raises:
        SizeError: A table does not store its rows separately, tables share one weight, the model reads rows itself
            (MobileBERT), or the rows are sharded. Nothing was changed.
        TokenIdError: A token is outside the table.
        VocabularyError: The module contains a `DraftHead`, hashed n-grams of another library, or other values of
            tokens.

    Example:
        >>> train_only_rows(model, [7, 9])
        >>> [(name, tuple(p.shape)) for name, p in model.named_parameters() if p.requires_grad]
        [('table.delta', (2, 16))]
        >>> merge_rows(model)
    """
    refuse_partitioned(module.named_parameters(), "is trained in part", gathered=False)
    held, ids = held_parameters(module), list(token_ids)
    if has_fsdp_modules(module) or any(is_sharded(parameter) for parameter in module.parameters()):
        raise SizeError(f"The rows are sharded: call train_only_rows before {PARALLELIZE}.")
    modules = vocabulary_modules(module)
    if isinstance(module, TokenTable):
        raise SizeError("This is the table itself: wrap it, DeltaEmbedding(table, token_ids).")
    weights = {id(part.tensors[0]) for part in modules.local.values()}
    if len(weights) < len(modules.local):
        raise SizeError(f"{', '.join(modules.tables)} share one weight: train the whole weight.")
    if partial_head := next((name for name, head in modules.heads.items() if head.is_partial), None):
        raise SizeError(f"The model reads the rows of {partial_head} itself (MobileBERT). Leave out train_only_new.")
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    try:
        deltas = {id(table): _trained(name, table, ids) for name, table in modules.tables.items()}
        own = {name: head for name, head in modules.heads.items() if head.has_weight}
        heads = {name: _trained(name, _rows_of(head), ids) for name, head in own.items()}
    except BaseException:
        for parameter in trained:
            parameter.requires_grad_(True)
        raise
    for optimizer in optimizers_of([each for each in trained if id(each) in held]):
        optimizer.register_step_pre_hook(_refuse_frozen)
    module.requires_grad_(False)
    _note(module, trained)
    for part in list(module.modules()):
        part._modules.update({name: deltas[id(child)] for name, child in part._modules.items() if id(child) in deltas})
    for name, head in modules.heads.items():
        if name in heads:
            head.set_table(heads[name])
            head.add_module(NEW_ROWS, heads[name])  # so that its rows are found among the parameters
        elif head.own_table is not None:  # a patched head reads the table that replaces its own
            head.set_table(deltas[id(head.own_table)])
    for rows in [*heads.values(), *deltas.values()]:
        rows.delta.requires_grad_(True)


def _note(module: nn.Module, trained: list[nn.Parameter]) -> None:
    """Note on a module what was trained before `train_only_rows`, and watch for PEFT, until `merge_rows`."""
    removals: list[Callable[[], object]] = [module.register_forward_pre_hook(refuse_frozen_rows).remove]
    for model in models_in(module).values():
        watch = partial(refuse_frozen_rows, module)  # PEFT 0.18 runs no hooks of the model, calling `forward`
        removals.append(model.base_model.register_forward_pre_hook(watch).remove)
        removals.append(model.register_load_state_dict_pre_hook(_split_rows).remove)
        if own_attribute(model, "save_pretrained") is None:
            set_own_attribute(model, "save_pretrained", partial(_save_merged, model))
            removals.append(partial(remove_own_attribute, model, "save_pretrained"))
    set_own_attribute(module, TRAINED_BEFORE, trained)
    set_own_attribute(module, ROW_HOOKS, removals)


def _save_merged(
    model: Any,
    save_directory: Path | str,
    is_main_process: bool = True,
    state_dict: Mapping[str, Tensor] | None = None,
    *arguments: Any,
    **options: Any,
) -> None:
    """Save a model of transformers with the trained rows in the weights, so that transformers and `load` read them."""
    # It replaces the model's `save_pretrained` until `merge_rows`; the model itself does not change.
    merged = dict(model.state_dict() if state_dict is None else state_dict)
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for rows_name, rows in _deltas(model).items():
        if isinstance(rows.base, PackedRows):
            raise CheckpointError(f"{rows_name} is {a_or_an(rows.base)}: use save_adapter(model, folder).")
        if f"{rows_name}.delta" in merged:
            weight, delta = merged.pop(f"{rows_name}.base.weight").clone(), merged.pop(f"{rows_name}.delta")
            weight[rows.token_tensor.to(weight.device)] = delta.to(weight)
            merged |= {name: weight for name in names[id(rows.base.weight)] if name in merged}
            merged[_weight_name(rows_name)] = weight
    type(model).save_pretrained(model, save_directory, is_main_process, merged, *arguments, **options)


def _split_rows(model: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Rename a state that `_save_merged` wrote for a model whose rows are trained separately, before it loads."""
    # A pre-hook of `load_state_dict`: renames keys of `state_dict` in place.
    for name, rows in _deltas(model).items():
        delta, weight_name = f"{prefix}{name}.delta", f"{prefix}{_weight_name(name)}"
        if delta not in state_dict and weight_name in state_dict:
            weight = state_dict[weight_name]
            state_dict[f"{prefix}{name}.base.weight"] = weight
            state_dict[delta] = weight[rows.token_tensor.to(weight.device)]
            if _weight_name(name) == f"{name}.weight":
                del state_dict[weight_name]


def _deltas(module: nn.Module) -> dict[str, DeltaEmbedding]:
    """Return the rows of a module that are trained separately, by their names as its children."""
    return {name: part for name, part in module.named_modules() if isinstance(part, DeltaEmbedding)}


def _weight_name(name: str) -> str:
    """Return the name of the weight whose rows are trained under a name: that of the table or the untied head."""
    return f"{name.removesuffix(f'.{NEW_ROWS}')}.weight"


def _refuse_frozen(optimizer: Optimizer, *_: object) -> None:
    """Raise a `StaleRowsError` before a step of an optimizer if `train_only_rows` froze all that it trains."""
    if not any(each.requires_grad for group in optimizer.param_groups for each in group["params"]):
        raise StaleRowsError(f"All parameters of this {type(optimizer).__name__} are frozen now: build it again.")


def merge_rows(module: nn.Module) -> None:
    """Write the rows that were trained after `train_only_rows` into the module's tables and heads, in place.

    The module then has its own tables again. The parameters that were trainable before `train_only_rows` are trainable
    again. Into a table of stored codes, the rows that training has changed are written as its format quantises them.

    Raises:
        SizeError: `train_only_rows` was not called on this module, or `merge_rows` was called already.
        CheckpointError: No function quantises rows to the format of a table, or it cannot represent a number of them.
            Nothing was changed: `save_adapter` saves the rows.
    """
    trained_rows(module)
    with _reverted_after_an_error(module):
        _merge(module)


def _merge(module: nn.Module) -> None:
    """Merge as `merge_rows` does; after an error some rows are merged, and others are not."""
    trained = remove_own_attribute(module, TRAINED_BEFORE)
    for remove in remove_own_attribute(module, ROW_HOOKS):
        remove()
    for head in [part for part in module.modules() if isinstance(part, OutputHead)]:
        if isinstance(rows := head.own_table, DeltaEmbedding):
            is_untied = head._modules.pop(NEW_ROWS, None) is not None
            head.set_table(None if is_untied else rows.base)
            if is_untied:
                rows.merge()
    for part in list(module.modules()):
        for name, child in part._modules.items():
            if isinstance(child, DeltaEmbedding):
                part._modules[name] = child.merge()
    for parameter in trained:
        parameter.requires_grad_(True)


@contextmanager
def merged_rows(module: nn.Module) -> Iterator[None]:
    """Context manager: call `merge_rows` if `train_only_rows` was called; after an error in the block, revert that."""
    if own_attribute(module, TRAINED_BEFORE) is None:
        yield
        return
    with _reverted_after_an_error(module):
        _merge(module)
        yield


@contextmanager
def _reverted_after_an_error(module: nn.Module) -> Iterator[None]:
    """Context manager: after an error in the block, in which rows may be merged, train them separately as before."""
    trained = own_attribute(module, TRAINED_BEFORE)
    children = [(part._modules, dict(part._modules)) for part in module.modules()]
    tables = [(part, part.own_table) for part in module.modules() if isinstance(part, OutputHead)]
    restorations = [_restoration(rows) for rows in trained_rows(module).values()]
    try:
        yield
    except BaseException:
        for restore in restorations:
            restore()
        for modules, before in children:
            modules.clear()
            modules.update(before)
        for head, table in tables:
            head.set_table(table)
        for parameter in trained:
            parameter.requires_grad_(False)
        _note(module, trained)
        raise


def _restoration(rows: DeltaEmbedding) -> Callable[[], object]:
    """Return a function that writes the present rows of the trained tokens back into their base, bit for bit."""
    base, ids = rows.base, rows.token_tensor
    if isinstance(base, PackedRows):
        return partial(base.store_rows, ids, base.stored_rows.take(ids))
    weight = cast(Tensor, base.weight).detach()
    return partial(weight.index_copy_, 0, ids, weight[ids])


def trained_rows(module: nn.Module) -> dict[str, DeltaEmbedding]:
    """Return the rows that `train_only_rows` made trainable, by the name of their table or untied head."""
    if own_attribute(module, TRAINED_BEFORE) is None:
        raise SizeError("This module has no rows that are trained separately: call train_only_rows first.")
    heads = [name for name, part in module.named_modules() if isinstance(part, OutputHead)]
    of_heads = {f"{name}.{child}": name for name in heads for child in (ROWS, NEW_ROWS)}
    return {of_heads.get(name, name): part for name, part in _deltas(module).items()}


def _trained(name: str, table: TokenTable, token_ids: list[int]) -> DeltaEmbedding:
    """Return a table with trained rows over `table`: in its dtype if it is dense, and float32 over stored codes."""
    if not isinstance(table, DenseTable | PackedRows):
        raise SizeError(f"Single rows of {name}, {a_or_an(table)}, cannot be trained: train the whole table.")
    is_packed = isinstance(table, PackedRows)
    dtype = torch.promote_types(table.dtype, torch.float32) if is_packed else None
    return DeltaEmbedding(table, token_ids, dtype=dtype)


def _rows_of(head: OutputHead) -> TokenEmbedding:
    """Return a dense table whose weight is the same parameter object as the weight of an untied head."""
    table = TokenEmbedding(head.out_features, head.in_features, padding_idx=head.padding_idx, device="meta")
    table.weight = head.weight
    table.index_check.move_record(head.weight.device)
    return table
