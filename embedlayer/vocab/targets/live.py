"""Live modules: how an edit replaces the tensors, sizes and IDs of their vocabulary.

All new tensors are computed first; then they replace the old ones together, or none of them does. Parameters stay the
same objects, so tied heads and optimizers keep their references. Each rank moves its own rows of a sharded table.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.optim import Optimizer

from embedlayer.core.collectives import SINGLE_PROCESS
from embedlayer.core.errors import SizeError
from embedlayer.core.held_parameters import held_parameters, parameters_of
from embedlayer.core.own_attributes import REPLACED, modules_with, own_attribute
from embedlayer.core.partitioned import is_sharded, refuse_partitioned
from embedlayer.distributed.stages import stage_copies
from embedlayer.families.configurations import check_readers, check_sizes
from embedlayer.families.field_types import End
from embedlayer.families.vocabulary_tensors import models_in, tensors_in
from embedlayer.integrations.dtensor import (
    check_replaceable,
    create_groups,
    placed_like,
    replace_dtensor,
    row_collectives,
)
from embedlayer.integrations.fsdp import FsdpParameter, fsdp_parameters
from embedlayer.integrations.peft import plain_name, refuse_token_adapters
from embedlayer.row_sparse.gradient import row_gradient, rows_and_values
from embedlayer.tables.packed_rows import PackedRows
from embedlayer.tables.row_sparse import RowSparseEmbedding
from embedlayer.tokenization.tokenizer_calls import fingerprint
from embedlayer.vocab.edit import ModelResult, ResolveEdit
from embedlayer.vocab.map import RowMap, RowTensor, row_fingerprint
from embedlayer.vocab.targets.apply_rows import apply_row_map
from embedlayer.vocab.targets.module_parts import (
    VocabularyModules,
    check_movable,
    dotted,
    unknown_rows,
    vocabulary_modules,
)
from embedlayer.vocab.targets.module_settings import (
    Assignment,
    new_compressed_ids,
    new_settings,
    restored_settings,
    settings_of,
)
from embedlayer.vocab.targets.optimizer_rows import NewState, require_moved, state_with_rows, watch_unmoved


def row_tensors(
    module: nn.Module,
    modules: VocabularyModules,
    optimizer: Optimizer | None = None,
    padding: Mapping[str, int] = {},
    gathered: Mapping[int, FsdpParameter] = {},
) -> tuple[dict[str, RowTensor], dict[str, Callable[[Tensor], None]]]:
    """Return all tensors of a module and its optimizer with a row for each token, and functions that replace them."""
    # The order matters to `apply_row_map`: tables and heads, biases, compressed IDs of n-gram hashes, optimizer state.
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    by_id: dict[int, tuple[str, RowTensor]] = {}
    packed: dict[str, list[PackedRows]] = {}  # by the name of their rows, which several tables may share
    for name, part in modules.stored.items():
        stored, weight = part.stored, part.tensors[0]
        end: End = "per_layer" if part.per_layer else "head" if part.of_head else "table"
        rows = RowTensor(weight, end, padding.get(name, 0), part.shards, missing_row=part.missing_row)
        if not isinstance(stored, PackedRows):
            by_id[id(weight)] = names.get(id(weight), dotted(name, "weight")), rows
            continue
        key, _ = by_id.setdefault(id(weight), (dotted(name, "stored_rows"), _with_bytes(rows, stored, name)))
        packed.setdefault(key, []).append(stored)
    for name, head in modules.heads.items():
        for key, parameter in (("weight", head.weight if head.has_weight else None), ("bias", head.bias)):
            if parameter is not None:
                rows = RowTensor(parameter, "head", collectives=row_collectives(parameter))
                by_id[id(parameter)] = names.get(id(parameter), dotted(name, key)), rows
    ends = by_id.keys() | {id(part.stored) for part in modules.stored.values()}
    for name, tensor, axes, rule in tensors_in(module, ends, plain_name):
        if id(tensor) not in by_id:
            is_known = rule.end is not None and len(axes) == 1 and tensor.is_floating_point()
            if not is_known or tensor.shape[axes[0]] != modules.vocab_size:
                raise unknown_rows(name, rule.use)
            if is_sharded(tensor) and (axes[0] or gathered):
                raise SizeError(f"{name} is sharded: edit the vocabulary before.")
            by_id[id(tensor)] = name, RowTensor(tensor, rule.end, collectives=row_collectives(tensor), axis=axes[0])
    # The values of a bias follow from the rows before it.
    tensors = dict(sorted(by_id.values(), key=lambda named: named[1].local.dim() == 1))
    replace: dict[str, Callable[[Tensor], None]] = {}
    for name, rows in tensors.items():  # a parameter stays the same object, to which heads and optimizers refer
        if name in packed:
            replace[name] = partial(_replace_stored, packed[name])
        elif (sharded := gathered.get(id(rows.tensor))) is not None:
            replace[name] = sharded.replace
        else:
            replace[name] = partial(replace_dtensor if is_sharded(rows.tensor) else replace_data, rows.tensor)
    for name, ngrams in modules.hashes.items():
        key = dotted(name, "token_map")
        tensors[key] = RowTensor(ngrams.compressed_ids, new_values=partial(new_compressed_ids, ngrams))
        replace[key] = partial(setattr, ngrams, "compressed_ids")
    if optimizer is not None:
        trained = {id(parameter) for parameter in parameters_of(optimizer)}
        if not trained & by_id.keys():
            raise SizeError("This optimizer trains no rows of tokens: pass the one of this module, or none.")
        for name, rows in [each for parameter_id, each in by_id.items() if parameter_id in trained]:
            require_moved(optimizer, rows.tensor)
            state = optimizer.state.get(rows.tensor, {})
            new = NewState(optimizer, name, rows.tensor)
            for key, value in state_with_rows(state, name, rows):
                tensors[f"optimizer.{name}.{key}"] = dataclasses.replace(
                    rows, tensor=value, end=None, parameter=name, state_of=new.of(key)
                )
                replace[f"optimizer.{name}.{key}"] = partial(state.__setitem__, key)
    return tensors, replace


def _with_bytes(rows: RowTensor, table: PackedRows, name: str) -> RowTensor:
    own = RowTensor.of_stored(table.stored_rows, rows.end)

    def encode(values: Tensor) -> Tensor:
        """Return the bytes of rows with these numbers, as the format quantises them."""
        if own.encode is None or not table.stored_rows.format.can_quantise:
            raise SizeError(f"New rows of {name or 'it'} cannot be {table.stored_type}: docs/errors.md, Stored types.")
        return own.encode(values)

    return dataclasses.replace(rows, tensor=own.tensor, encode=encode, decode=own.decode)


def _replace_stored(tables: Sequence[PackedRows], row_bytes: Tensor) -> None:
    stored = tables[0].stored_rows.of_bytes(row_bytes)
    for table in tables:
        table.replace_rows(stored)


def replace_data(parameter: Tensor, tensor: Tensor) -> None:
    """Replace the values of a parameter by those of a tensor with another number of rows."""
    # A graph that still exists has stored the old shape for this parameter's gradient; torch discards that only when
    # the dtype changes.
    other = torch.float16 if tensor.dtype != torch.float16 else torch.float32
    parameter.data = torch.empty(0, dtype=other, device=tensor.device)
    parameter.data = tensor


def _moved_gradient(rows: RowTensor, row_map: RowMap) -> Tensor | None:
    """Return a parameter's gradient with its rows moved as a row map says; `None` if it has no gradient."""
    # If the rows are sharded, all ranks must call this.
    grad, ranks = rows.tensor.grad, rows.collectives
    if grad is not None and is_sharded(grad):  # tensor parallelism leaves that of a table on every rank
        grad = placed_like(grad, rows.tensor)
    if grad is not None and not grad.is_sparse and rows.missing_row is not None:  # tokens without a row share one
        grad = F.pad(grad, (0, 0) * (grad.dim() - 1) + (0, max(row_map.old_size - len(grad), 0)))
    if grad is None or not grad.is_sparse:
        moved = None if grad is None else row_map.apply(rows.to_rows(grad), padding=rows.padding, collectives=ranks)
        return None if moved is None else rows.with_rows(moved, row_map)
    old, new = rows.partitions(row_map)
    rows_of_grad, values_of_grad = rows_and_values(grad)
    places = row_map.new_ids.to(grad.device)[rows_of_grad + old.start]
    order = torch.argsort(places, stable=True)[(places < 0).sum() :]  # dropped rows, which are -1, come first
    counts = torch.bincount(new.rank_of(places[order]), minlength=ranks.size).tolist()
    received = ranks.exchange_counts(counts)
    places = ranks.all_to_all(places[order], counts, received) - new.start
    values = ranks.all_to_all(values_of_grad.index_select(0, order), counts, received)
    order = torch.argsort(places, stable=True)
    shape = (len(new), *grad.shape[1:])
    moved = torch.sparse_coo_tensor(places[order].unsqueeze(0), values[order], shape, check_invariants=False)
    return row_gradient(rows.tensor, moved)


def apply_to_module(
    module: nn.Module,
    resolve: ResolveEdit,
    optimizer: Optimizer | None = None,
    *,
    tokenizer: Tokenizer | None = None,
) -> ModelResult:
    """Apply an edit, or the undo of one, to a live module in place; if anything fails, nothing is changed."""
    # All ranks, and all pipeline stages with copies of a table, must call this. Pending updates are applied first, and
    # stay applied if the edit fails.
    refuse_partitioned(module.named_parameters(), "is edited", gathered=False)
    fsdp_parameters(module)  # resharded, so that the parameters are those of tie_stages
    copies = list(stage_copies(module.parameters()))
    with ExitStack() as stages:
        of_stages = [stages.enter_context(ranks.all_or_none()) for ranks in {copy.ranks: None for copy in copies}]
        result, tied, assignments, finish = _change_of(module, resolve, optimizer, tokenizer)
        for facts in of_stages:
            facts["the edited rows (if new rows are drawn, call torch.manual_seed with one number on all)"] = tied
    do_all(assignments)
    finish()
    return result


def _change_of(
    module: nn.Module, resolve: ResolveEdit, optimizer: Optimizer | None, tokenizer: Tokenizer | None
) -> tuple[ModelResult, dict[str, str], list[Assignment], Callable[[], None]]:
    """Compute what an edit will change, with the arguments and errors of `apply_to_module`; nothing is changed yet."""
    replaced = [own_attribute(part, REPLACED) for part in modules_with(module, REPLACED)]
    held = held_parameters(module, optimizer, replaced)
    check_movable(module)
    modules = vocabulary_modules(module)
    outputs = [model.get_output_embeddings() for model in models_in(module).values()]  # also those not patched
    refuse_token_adapters(module, [*modules.tables.values(), *modules.heads.values(), *outputs], modules.vocab_size)
    gathered = fsdp_parameters(module, [*(each.stored for each in modules.local.values()), *modules.heads.values()])
    create_groups(module)
    ranks = modules.collectives
    row_sparse = [part.stored for part in modules.local.values() if isinstance(part.stored, RowSparseEmbedding)]
    pending = [(updates, each.weight) for each in row_sparse if (updates := each.pending_updates) is not None]
    with ranks.all_or_none() as facts:
        edit = resolve(
            [tokenizer, *(owner.tokenizer for owner, _ in modules.tokenizers.values())],
            modules.vocab_size,
            any(layer.tensor_names for layer in modules.layers.values())
            or any(isinstance(part.stored, PackedRows) for part in modules.local.values()),
        )
        if edit.pad_to_multiple_of is not None and any(p.local is not p.table for p in modules.local.values()):
            raise SizeError("Sharded tables have no padding rows: leave out pad_to_multiple_of.")
        if any(
            p.shards is not SINGLE_PROCESS and p.table.vocab_size < modules.vocab_size for p in modules.local.values()
        ):
            raise SizeError("A per-layer table that lacks tokens is sharded: edit the vocabulary before it is sharded.")
        row_map = edit.row_map
        if edit.undoes is None:
            configs = [part.owner for part in modules.parts]
            of_tokens = [part.owner for part in modules.parts if part.of_tokens]
            check_sizes(of_tokens, row_map.old_size, row_map.size)
            check_readers([*configs, *module.modules()], row_map.new_ids, row_map.size)
            old_settings, settings = settings_of(modules), new_settings(modules, edit)
        else:
            settings = edit.undoes.settings
            old_settings = restored_settings(module, modules, settings)
        before = {name: setting.value for name, setting in old_settings.items()}
        for updates, weight in pending:  # rows and moments become those of dense AdamW
            updates.apply_all(weight, moments=True)
        padding = {
            name: settings[dotted(name, "num_rows")]
            - (
                row_map.size
                if part.missing_row is not None and part.shards is SINGLE_PROCESS
                else settings[dotted(name, "vocab_size")]
            )
            for name, part in modules.stored.items()
        }
        tensors, replace = row_tensors(module, modules, optimizer, padding, gathered)
        parameters = {name: rows for name, rows in tensors.items() if isinstance(rows.tensor, nn.Parameter)}
        if edit.values is not None and len(row_map.initialised):
            for rows in tensors.values():
                if rows.state_of is not None:  # an error is raised before anything changes, and on all ranks
                    rows.state_of(tensors[rows.parameter].local[:1])
        for rows in parameters.values():
            _check_rows(rows, row_map, gathered.get(id(rows.tensor)))
        if ranks is not SINGLE_PROCESS:
            grads = {name: rows.tensor.grad for name, rows in parameters.items()}
            facts["the tensors"] = [(name, str(r.tensor.dtype), r.row_shape) for name, r in tensors.items()]
            facts["the gradients"] = [(name, grad.is_sparse) for name, grad in grads.items() if grad is not None]
            facts["the requested edit"] = row_fingerprint(row_map.sources)
            facts["the tokenizer"] = None if edit.tokenizer is None else fingerprint(edit.tokenizer)
    new = apply_row_map(tensors, edit, ranks)
    result = ModelResult.of(edit, tensors, before)
    gradients = {name: _moved_gradient(rows, row_map) for name, rows in parameters.items()}
    ranks.barrier()
    assignments = [assignment(rows.tensor, "grad", None) for rows in parameters.values()]
    assignments += [
        (partial(replace[name], rows.with_rows(new[name], row_map)), partial(replace[name], _saved(rows)))
        for name, rows in tensors.items()
    ]
    assignments += [old_settings[name].assignment(value) for name, value in settings.items()]
    if edit.tokenizer is not None:
        assignments += [assignment(owner, name, edit.tokenizer) for owner, name in modules.tokenizers.values()]
    assignments += [
        (partial(setattr, rows.tensor, "grad", gradients[name]), partial(setattr, rows.tensor, "grad", None))
        for name, rows in parameters.items()
    ]

    def finish() -> None:
        """Forget pending updates, which were applied, and watch optimizers that were not passed."""
        for updates, _ in pending:
            updates.detach()  # nothing is pending: the optimizer's next step begins a new one
        moved = {name: rows.tensor for name, rows in parameters.items() if id(rows.tensor) in held}
        watch_unmoved(moved, row_map, optimizer, is_undo=edit.undoes is not None)

    copies = {name for name, rows in parameters.items() if hasattr(rows.tensor, "stage_copy")}
    tied = {name: row_fingerprint(new[name]) for name, rows in tensors.items() if {name, rows.parameter} & copies}
    return result, tied, assignments, finish


def _check_rows(rows: RowTensor, row_map: RowMap, sharded: FsdpParameter | None) -> None:
    """Check that a parameter can get the number of rows that an edit gives it; nothing is changed."""
    old, new = (partition.num_rows for partition in rows.partitions(row_map))
    if sharded is not None:
        sharded.check(new)
    elif is_sharded(rows.tensor) and new != old:
        check_replaceable(rows.tensor)


def _saved(rows: RowTensor) -> Tensor:
    """Return the values of a tensor before an edit: a copy if an edit may overwrite them, as in a DTensor parameter."""
    values = rows.tensor.detach()
    return values.clone() if is_sharded(values) and isinstance(rows.tensor, nn.Parameter) else values


def assignment(owner: object, name: str, value: object) -> Assignment:
    """Return a pair of functions: one sets an attribute to `value`, the other sets it back to its present value."""
    return partial(setattr, owner, name, value), partial(setattr, owner, name, getattr(owner, name))


def do_all(assignments: Sequence[Assignment]) -> None:
    """Carry out assignments in order, so that either all of them or none take effect."""
    with ExitStack() as stack:
        for do, revert in assignments:
            stack.callback(revert)
            do()
        stack.pop_all()
