"""Live modules: which of their tensors, sizes and IDs belong to the vocabulary, and how an edit replaces them.

All new tensors are computed first; then they replace the old ones together, or none of them does. Parameters stay the
same objects, so tied heads and optimizers keep their references. Each rank moves its own rows of a sharded table.
"""

import dataclasses
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.optim import Optimizer

from embedlayer.census.configurations import (
    ROLE_KEYS,
    Part,
    check_readers,
    check_sizes,
    entries_of,
    id_keys,
    is_configuration,
    json_value,
    module_ids,
    new_value,
    other_models,
    parts_of,
    size_keys,
    text_part,
    value_of_json,
)
from embedlayer.census.files import FileRule
from embedlayer.census.tensors import linear_sizes, models_in, named_tensors, tensors_in
from embedlayer.checkpoints.embedding_layer import EmbeddingLayer
from embedlayer.checkpoints.patch import REPLACED
from embedlayer.collectives import SINGLE_PROCESS, Collectives, ProcessGroup
from embedlayer.data.tokenizer import fingerprint
from embedlayer.distributed.dtensors import (
    check_replaceable,
    is_dtensor,
    replace_dtensor,
    row_collectives,
)
from embedlayer.distributed.sharded import ShardedTable
from embedlayer.errors import CheckpointError, SizeError, TokenIdError, VocabularyError
from embedlayer.families import PER_LAYER_ROWS, VOCAB_SIZE_KEYS, family_of
from embedlayer.families.records import End
from embedlayer.held_parameters import held_parameters
from embedlayer.io.files import JsonObject
from embedlayer.layers.draft_head import DraftHead
from embedlayer.layers.ngram import NgramEmbedding, NgramHash
from embedlayer.layers.output import OWN_TABLE, OutputHead
from embedlayer.layers.per_layer import PerLayerInputs
from embedlayer.tables.dense import TokenEmbedding
from embedlayer.tables.factorized import FactorizedEmbedding
from embedlayer.tables.lookup import LookupTable
from embedlayer.tables.sparse_gradient import row_gradient, rows_and_values
from embedlayer.tables.table import TokenTable
from embedlayer.vocab.edit_request import ResolvedEdit, VocabularyEdit, round_up
from embedlayer.vocab.optimizer_rows import NewState, state_with_rows
from embedlayer.vocab.row_map import RowMap, RowResult, RowTensor, apply_row_map, row_fingerprint
from embedlayer.vocab.unmoved_state import require_moved, watch_unmoved

if TYPE_CHECKING:
    from embedlayer.distributed.fsdp import FsdpParameter

_HASHED_NGRAMS = re.compile(r"(?:^|[._])engram[._]|(?:^|\.)ngram_embedding\.|(?:^|\.)ngram_embeddings\.embedders\.")
"""Names of tensors of hashed n-grams in checkpoints: of Engram, Qwen4-Exp and LongCat-Flash."""

Step = tuple[Callable[[], object], Callable[[], object]]
"""An assignment, and the one that reverts it."""


class LocalTable(NamedTuple):
    """Describe the rows of a table that this process stores.

    Attributes:
        local: The stored rows as a table: `table` itself, or this rank's part of a sharded table.
        table: The whole table.
        collectives: The ranks over which the rows of a `ShardedTable` are sharded; a single process for other tables.
        of_head: Whether the table is the weight of a sharded untied head.
        per_layer: Whether it is a per-layer table, which is looked up beside the token table.
        missing_row: Row that is looked up for tokens which a per-layer table lacks; `None` if it must have all tokens.
    """

    local: TokenEmbedding | FactorizedEmbedding
    table: TokenTable
    collectives: Collectives = SINGLE_PROCESS
    of_head: bool = False
    per_layer: bool = False
    missing_row: int | None = None

    @property
    def stored(self) -> TokenEmbedding:
        """Return the dense table that stores the rows: the inner table of a factorised one, else `local`."""
        return self.local.inner if isinstance(self.local, FactorizedEmbedding) else self.local

    @property
    def shards(self) -> Collectives:
        """Return the ranks over which the rows are sharded, in a `ShardedTable` or as a DTensor, which FSDP2 uses."""
        return row_collectives(self.stored.weight) if self.local is self.table else self.collectives

    @property
    def may_lack_rows(self) -> bool:
        """Return whether this is a per-layer table that may have fewer rows than there are tokens."""
        return self.missing_row is not None and self.shards is SINGLE_PROCESS

    @property
    def padding_idx(self) -> int | None:
        """Return the row number, in the whole table, of the padding row; `None` if there is none."""
        return self.table.padding_idx


class VocabularyModules(NamedTuple):
    """List the parts of a live module that belong to the vocabulary, each in a dictionary by dotted name in the module.

    Attributes:
        tables: The tables with one row for each token, those of tied heads included.
        local: For each table, the rows that this process stores.
        heads: The output heads.
        layers: The layers, which may have a tokenizer.
        configs: Other modules, and configurations, with the same `vocab_size`.
        hashes: The n-gram hashes, which have a compressed ID for each token.
        parts: All configurations of the module, generation configurations included, each object once.
        module_ids: Token IDs that modules store, as `module_ids` of the census yields them.
        linear: Linear layers of models of transformers with a size that follows the vocabulary, as `linear_sizes` of
            the census yields them.
    """

    tables: dict[str, TokenTable]
    local: dict[str, LocalTable]
    heads: dict[str, OutputHead]
    layers: dict[str, EmbeddingLayer]
    configs: dict[str, Any]
    hashes: dict[str, NgramHash]
    parts: list[Part]
    module_ids: list[tuple[str, nn.Module, str]]
    linear: list[tuple[str, nn.Linear, str]]

    @property
    def collectives(self) -> Collectives:
        """Return the ranks that must edit together: those of the first sharded table or head, or a single process."""
        heads = [head.weight for head in self.heads.values() if not head.tied]
        shards = [part.shards for part in self.local.values()] + [row_collectives(weight) for weight in heads]
        return next((each for each in shards if each is not SINGLE_PROCESS), SINGLE_PROCESS)

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens, V, which all tables and heads share."""
        return next(iter(self.sizes.values()))

    @property
    def sizes(self) -> dict[str, int]:
        """Return a dictionary from the name of each table, head and n-gram hash to its number of tokens.

        If the module itself is one of them, its name is `the table`, `the head` or `the hash`. A per-layer table that
        may lack tokens is left out if it has fewer than another table.
        """
        most = max((table.vocab_size for table in self.tables.values()), default=0)
        may_be_short = {id(part.table) for part in self.local.values() if part.missing_row is not None}
        sizes = {
            name or "the table": table.vocab_size
            for name, table in self.tables.items()
            if table.vocab_size == most or id(table) not in may_be_short
        }
        sizes |= {name or "the head": head.out_features for name, head in self.heads.items()}
        return sizes | {name or "the hash": each.vocab_size for name, each in self.hashes.items()}

    @property
    def stored(self) -> dict[str, LocalTable]:
        """Return the values of `local` by the name of the dense table that stores the rows.

        For a factorised table that is the name of its inner table.
        """
        return {name if part.local is part.stored else _join(name, "inner"): part for name, part in self.local.items()}


def vocabulary_modules(module: nn.Module) -> VocabularyModules:
    """Return the tables, heads, layers and configurations of a live module; the table of a tied head is included.

    The rows of an `NgramEmbedding` belong to hashes, not to tokens, so its table is left out.

    Raises:
        SizeError: The module has no table and no head, the tables and heads have different numbers of tokens, or the
            rows of a table cannot be moved.
        VocabularyError: The module contains a `DraftHead`, or hashed n-grams of another library.
    """
    modules = dict(module.named_modules())
    if drafts := [name or "the module" for name, part in modules.items() if isinstance(part, DraftHead)]:
        raise VocabularyError(
            f"{drafts[0]} is a DraftHead, whose token IDs are those before the edit: remove it from the model, and "
            f"build it again after the edit with the new token IDs."
        )
    ngrams = {name: part for name, part in modules.items() if isinstance(part, NgramEmbedding)}
    hashes = {name: part for name, part in modules.items() if isinstance(part, NgramHash)}
    ours = tuple(_join(name, "") for name in ngrams)
    refuse_hashed_ngrams((name for name, _ in module.named_parameters() if not name.startswith(ours)), "This model")
    layers = {name: part for name, part in modules.items() if isinstance(part, EmbeddingLayer)}
    skipped = {id(part) for layer in layers.values() if layer.types is not None for part in layer.types.modules()}
    skipped |= {id(child) for part in modules.values() if isinstance(part, TokenTable) for child in part.children()}
    encoders = other_models(module)
    skipped |= _hashed_tables(modules) | encoders
    tables = {name: part for name, part in modules.items() if isinstance(part, TokenTable) and id(part) not in skipped}
    heads = {name: part for name, part in modules.items() if isinstance(part, OutputHead) and id(part) not in skipped}
    for name, head in heads.items():
        table = head.__dict__[OWN_TABLE]
        if table is not None and all(table is not other for other in tables.values()):
            tables[_join(name, "table")] = table
    of_heads = {id(child) for head in heads.values() for child in head.children()}
    local = dict(_local_table(name, table, id(table) in of_heads) for name, table in tables.items())
    for name, (table, missing_row) in _per_layer_tables(modules).items():
        stored, part = _local_table(name, table, False)
        local[stored] = part._replace(per_layer=True, missing_row=missing_row)
    linear = [each for each in linear_sizes(module) if not isinstance(each[1], OutputHead)]
    found = VocabularyModules(tables, local, heads, layers, {}, hashes, [], [], linear)
    if not found.sizes:
        raise SizeError(
            "There is no TokenTable and no OutputHead in this module: nothing here has a vocabulary. A "
            "torch.nn.Embedding is edited as TokenEmbedding.from_embedding(embedding), put in its place; a model "
            "of transformers after patch(model)."
        )
    if len({*found.sizes.values()}) > 1:
        shown = ", ".join(f"{name} {size:,}" for name, size in found.sizes.items())
        raise SizeError(
            f"These do not share a vocabulary ({shown}): edit each by itself, and then change the token IDs in the "
            f"configuration of the whole model with receipt.new_ids."
        )
    _refuse_other_rows(module, found)
    vocab_size = found.vocab_size
    for name, part in modules.items():
        is_ours = isinstance(part, LookupTable | OutputHead | EmbeddingLayer | NgramHash) or id(part) in skipped
        if not is_ours and any(getattr(part, key, None) == vocab_size for key in VOCAB_SIZE_KEYS):
            found.configs[name] = part
    found.parts.extend(_configurations(modules, found, encoders))
    found.configs.update(
        (each.name, each.owner) for each in found.parts if each.of_tokens and size_keys(each.owner, vocab_size)
    )
    others = {id(each.owner) for each in found.parts if not each.of_tokens}
    apart = tuple(_join(name, "") for name, part in modules.items() if id(part.__dict__.get("config")) in others)
    found.module_ids.extend(each for each in module_ids(module) if not f"{each[0]}.".startswith(apart))
    return found


def _configurations(
    modules: Mapping[str, nn.Module], found: VocabularyModules, apart: Collection[int]
) -> Iterator[Part]:
    """Yield all configurations and generation configurations of a live module, each object once.

    The token IDs in them are those of the edited vocabulary if a table or head is in the module that has the
    configuration.

    Args:
        modules: All modules of the edited module by name.
        found: Its tables and heads.
        apart: The `id` of each module in an encoder with a vocabulary of its own.
    """
    ours = {id(each) for each in (*found.tables.values(), *found.heads.values())}
    holders = [name for name, part in modules.items() if id(part) in ours]
    parts: dict[int, Part] = {}
    vocab_size = found.vocab_size
    for name, part in modules.items():
        is_around = any(f"{holder}.".startswith(_join(name, "")) for holder in holders) and id(part) not in apart
        for key in ("config", "generation_config"):
            config = part.__dict__.get(key)
            if is_configuration(config) or hasattr(config, "__dict__"):
                for each in parts_of(config, vocab_size, _join(name, key)):
                    known = parts.get(id(each.owner))
                    if known is None or (is_around and each.of_tokens and not known.of_tokens):
                        parts[id(each.owner)] = each._replace(of_tokens=is_around and each.of_tokens)
    yield from parts.values()


def _refuse_other_rows(module: nn.Module, found: VocabularyModules) -> None:
    """Raise an error if a module that is no model of transformers has values for each token that an edit does not know.

    What a model of transformers has is known by `tensors_in`.

    Raises:
        VocabularyError: The module has integers for each token, or a table or head of a user's class has other tensors
            of tokens.
    """
    known = {id(each) for part in found.hashes.values() for each in part.buffers()}
    known |= {id(each) for model in models_in(module).values() for _, each in named_tensors(model)}
    known |= {id(part.stored.weight) for part in found.local.values()}
    known |= {id(each) for head in found.heads.values() for each in (head._parameters.get("weight"), head.bias)}
    own = {
        id(tensor)
        for part in (*found.tables.values(), *found.heads.values())
        if not type(part).__module__.startswith("embedlayer.")
        for tensor in (*part.parameters(), *part.buffers())
    }
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        has_rows = len(tensor.shape) > 1 and tensor.shape[0] == found.vocab_size
        is_integer = not (tensor.is_floating_point() or tensor.is_complex())
        is_of_tokens = found.vocab_size in tensor.shape if id(tensor) in own else has_rows and is_integer
        if is_of_tokens and id(tensor) not in known:
            raise unknown_rows(name)


def unknown_rows(name: str, use: str = "") -> VocabularyError:
    """Return the error for a tensor whose size follows the vocabulary, and whose values for new tokens are not known.

    Args:
        name: Name of the tensor.
        use: What the model does with it, as a sentence without full stop; "" if that is not known.
    """
    return VocabularyError(
        f"{name} has values for each token beside the rows of tables and heads{f' ({use})' if use else ''}, and what "
        f"they are for a new token is not known, so the vocabulary of this model is not edited."
    )


def _refuse_adapters(module: nn.Module, modules: VocabularyModules) -> None:
    """Raise an error if PEFT has put an adapter on a table or head that has values for each token, or token IDs.

    PEFT is not imported; its modules are recognised by their attributes.

    Raises:
        VocabularyError: There is such an adapter: LoRA on a table or head, or trainable tokens.
    """
    heads = (model.get_output_embeddings() for model in models_in(module).values())  # also one that is not patched
    ends = {id(part) for part in (*modules.tables.values(), *modules.heads.values())}
    ends |= {id(_without_adapters(head)) for head in heads if head is not None}
    for name, wrapper in module.named_modules():
        base = _without_adapters(wrapper)
        if base is wrapper or id(base) not in ends:
            continue
        own = {id(tensor) for _, tensor in named_tensors(base)}
        of_tokens = [
            key
            for key, tensor in named_tensors(wrapper)
            if id(tensor) not in own and (modules.vocab_size in tensor.shape or hasattr(wrapper, "token_indices"))
        ]
        if of_tokens:
            raise VocabularyError(
                f"PEFT has put an adapter on {name}, whose {of_tokens[0]} belongs to tokens of the vocabulary before "
                f"the edit. Merge it first, model = model.merge_and_unload(), edit that model, and wrap it again with "
                f"get_peft_model. Nothing was changed."
            )


def _without_adapters(wrapper: nn.Module) -> nn.Module:
    """Return the module inside all adapters that PEFT has put on it; the module itself if there are none."""
    while (base := wrapper._modules.get("base_layer")) is not None:
        wrapper = base
    return wrapper


def refuse_hashed_ngrams(names: Iterable[str], what: str) -> None:
    """Raise an error if tensors of a model are rows of hashed n-grams of another library, by their names.

    Args:
        names: Names of the model's tensors.
        what: The model or folder, for the message.

    Raises:
        VocabularyError: There is such a tensor.
    """
    if hashed := next((name for name in names if _HASHED_NGRAMS.search(name)), None):
        raise VocabularyError(
            f"{what} has hashed n-grams ({hashed}), whose rows are found by hashes of token IDs or of the tokenizer's "
            f"compressed IDs. An edit of the tokenizer changes these IDs and with them every hash, so the vocabulary "
            f"is not edited. An NgramHash with a token_map keeps its hashes in an edit."
        )


def _per_layer_tables(modules: Mapping[str, nn.Module]) -> dict[str, tuple[LookupTable, int | None]]:
    """Return the per-layer tables by name, each with the row that is looked up for tokens which it lacks, or `None`.

    These are the tables of `PerLayerInputs`, and those of patched models of transformers.

    Args:
        modules: All modules of the edited module by name.
    """
    found: dict[str, tuple[LookupTable, int | None]] = {}
    for name, part in modules.items():
        family = family_of(getattr(part.__dict__.get("config"), "model_type", None))
        if isinstance(part, PerLayerInputs):
            found[_join(name, "table")] = part.table, part.missing_row
        elif family is not None and family.per_layer is not None:
            child = family.per_layer.table.partition(".")[0]
            table = part._modules.get(child)
            if isinstance(table, TokenTable):
                found[_join(name, child)] = table, family.per_layer.missing_row
    return found


def _join(name: str, child: str) -> str:
    """Return the dotted name of a submodule or attribute; `name` is "" for the root module."""
    return f"{name}.{child}".lstrip(".")


def _hashed_tables(modules: Mapping[str, nn.Module]) -> set[int]:
    """Return the `id` of each module in a table of hashed n-grams, whose rows belong to hashes and not to tokens."""
    ngrams = [part for part in modules.values() if isinstance(part, NgramEmbedding)]
    return {id(part) for each in ngrams for part in each.table.modules()}


def _check_movable(module: nn.Module) -> None:
    """Check that an edit can move each table that is only looked up, such as those of injections; of any size.

    An edit keeps the hashes of an `NgramEmbedding`, so its table may be of any kind.

    Raises:
        SizeError: The rows of a table cannot be moved.
    """
    modules = dict(module.named_modules())
    hashed = _hashed_tables(modules)
    for name, part in modules.items():
        if isinstance(part, LookupTable) and not isinstance(part, TokenTable) and id(part) not in hashed:
            raise _cannot_be_moved(name, part)


def _local_table(name: str, table: LookupTable, of_head: bool) -> tuple[str, LocalTable]:
    """Return the rows of a table that this process stores, after the dotted name of the module that stores them.

    Args:
        name: Dotted name of the table in the module.
        table: The whole table; may be sharded.
        of_head: Whether the table is the weight of a sharded untied head.

    Raises:
        SizeError: The rows of this kind of table cannot be moved.
    """
    if isinstance(table, TokenEmbedding | FactorizedEmbedding):
        return name, LocalTable(table, table)
    if isinstance(table, ShardedTable) and isinstance(table.local, TokenEmbedding | FactorizedEmbedding):
        ranks = ProcessGroup(table.mesh.get_group(), table.mesh.device_type)
        return _join(name, "local"), LocalTable(table.local, table, ranks, of_head)
    raise _cannot_be_moved(name, table)


def _cannot_be_moved(name: str, table: LookupTable) -> SizeError:
    """Return the error for a table of a kind that an edit cannot move, after its dotted name in the module."""
    return SizeError(
        f"The rows of {name or 'this table'}, a {type(table).__name__}, cannot be moved. After train_only_rows, call "
        f"embedlayer.vocab.merge_rows(model) first. Otherwise edit the table that it was built from (a "
        f"DeltaEmbedding's after merge(), a trained MappedEmbedding's in the folder of save_pretrained), and build it "
        f"again."
    )


# Tensors with one row for each token


def row_tensors(
    module: nn.Module,
    modules: VocabularyModules,
    optimizer: Optimizer | None = None,
    padding: Mapping[str, int] = {},
    fsdp: Mapping[int, "FsdpParameter"] = {},
) -> tuple[dict[str, RowTensor], dict[str, Callable[[Tensor], None]]]:
    """Return all tensors of a module and its optimizer with a row for each token, and functions that replace them.

    Args:
        module: The module.
        modules: The tables and heads of the module.
        optimizer: The optimizer of the module, or `None`.
        padding: From the name of each dense table that stores rows (`VocabularyModules.stored`) to the number of its
            padding rows after the edit.
        fsdp: The parameters that FSDP2 shards, by their `id`.

    Returns:
        The tensors by name: tables, then heads and their biases, then the optimizer's state as
        `optimizer.PARAMETER.KEY`. By the same names, functions that put a new tensor in the place of the old one: a
        DTensor in the place of a DTensor.

    Raises:
        SizeError: The optimizer trains none of these tensors, or its state has a shape that does not show which
            values belong to a row.
        StaleRowsError: The optimizer's state is that before an earlier edit.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found: dict[int, tuple[str, RowTensor]] = {}
    for name, part in modules.stored.items():
        weight = part.stored.weight
        end: End = "per_layer" if part.per_layer else "head" if part.of_head else "table"
        rows = RowTensor(weight, end, padding.get(name, 0), part.shards, missing_row=part.missing_row)
        found[id(weight)] = names.get(id(weight), _join(name, "weight")), rows
    for name, head in modules.heads.items():
        for key, parameter in (("weight", None if head.tied else head.weight), ("bias", head.bias)):
            if parameter is not None:
                rows = RowTensor(parameter, "head", collectives=row_collectives(parameter))
                found[id(parameter)] = names.get(id(parameter), _join(name, key)), rows
    for name, tensor, axes, rule in tensors_in(module, found.keys()):
        if id(tensor) not in found:
            is_known = rule.end is not None and len(axes) == 1 and tensor.is_floating_point()
            if not is_known or tensor.shape[axes[0]] != modules.vocab_size:
                raise unknown_rows(name, rule.use)
            if is_dtensor(tensor) and (axes[0] or fsdp):
                raise SizeError(
                    f"{name} is sharded, and is moved only whole: edit the vocabulary before it is sharded."
                )
            found[id(tensor)] = name, RowTensor(tensor, rule.end, collectives=row_collectives(tensor), axis=axes[0])
    # The values of a bias follow from the rows before it.
    tensors = dict(sorted(found.values(), key=lambda named: named[1].local.dim() == 1))
    replace: dict[str, Callable[[Tensor], None]] = {
        name: _replace_function(rows.tensor, fsdp.get(id(rows.tensor))) for name, rows in tensors.items()
    }
    for name, ngrams in modules.hashes.items():
        key = _join(name, "token_map")
        tensors[key] = RowTensor(ngrams.compressed_ids, new_values=partial(_new_compressed_ids, ngrams))
        replace[key] = partial(setattr, ngrams, "compressed_ids")
    if optimizer is not None:
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not trained & found.keys():
            raise SizeError(
                "This optimizer belongs to other parameters: it trains none of the tensors that have a row for each "
                "token. Pass the one that trains this module, or none."
            )
        for name, rows in [each for parameter_id, each in found.items() if parameter_id in trained]:
            require_moved(optimizer, rows.tensor)
            state = optimizer.state.get(rows.tensor, {})
            new = NewState(optimizer, name, rows.tensor)
            for key, value in state_with_rows(state, name, rows):
                tensors[f"optimizer.{name}.{key}"] = dataclasses.replace(
                    rows, tensor=value, end=None, parameter=name, state_of=new.of(key)
                )
                replace[f"optimizer.{name}.{key}"] = partial(state.__setitem__, key)
    return tensors, replace


def _new_compressed_ids(ngrams: NgramHash, count: int) -> Tensor:
    """Return the compressed IDs of so many new tokens: the next free ones, one for each token."""
    return torch.arange(count) + ngrams.next_id


def _replace_function(parameter: Tensor, fsdp: "FsdpParameter | None") -> Callable[[Tensor], None]:
    """Return a function that replaces the values of a parameter by those of a tensor with another number of rows.

    The parameter stays the same object, so that heads and optimizers keep their references to it.
    """
    if fsdp is not None:
        return fsdp.replace
    return partial(replace_dtensor if is_dtensor(parameter) else _replace_data, parameter)


def _replace_data(parameter: Tensor, tensor: Tensor) -> None:
    """Replace the values of a parameter in place; see `_replace_function`."""
    # A graph that still exists has stored the old shape for this parameter's gradient; torch discards that only when
    # the dtype changes.
    other = torch.float16 if tensor.dtype != torch.float16 else torch.float32
    parameter.data = torch.empty(0, dtype=other, device=tensor.device)
    parameter.data = tensor


def _moved_gradient(rows: RowTensor, row_map: RowMap) -> Tensor | None:
    """Return a parameter's gradient with its rows moved as a row map says; `None` if it has no gradient.

    The result is dense or sparse as before. The rows of new tokens get no gradient. If the rows are sharded, all ranks
    must call this.
    """
    grad, ranks = rows.tensor.grad, rows.collectives
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


# Sizes and IDs


class Setting(NamedTuple):
    """Refer to a size or an ID that an edit changes: an attribute of a module or configuration.

    Attributes:
        owner: The module or configuration.
        attribute: Name of the attribute.
        part: If the attribute describes only the rows that this process stores, these rows; `None` if it describes the
            whole table.
        names_ids: Whether it is an entry of a configuration, or an attribute of a model, that names token IDs.
    """

    owner: Any
    attribute: str
    part: LocalTable | None = None
    names_ids: bool = False

    @property
    def value(self) -> Any:
        """Return the present value."""
        return self.owner[self.attribute] if isinstance(self.owner, Mapping) else getattr(self.owner, self.attribute)

    def step(self, value: Any) -> Step:
        """Return a pair of functions: one sets the attribute to `value`, the other to its present value."""
        set_value = self.owner.__setitem__ if isinstance(self.owner, dict) else partial(setattr, self.owner)
        return partial(set_value, self.attribute, value), partial(set_value, self.attribute, self.value)


def settings_of(modules: VocabularyModules) -> dict[str, Setting]:
    """Return all sizes, padding IDs and token IDs of a live module that an edit may change.

    The keys are dotted names of module and attribute. Attributes that an object lacks are left out.
    """
    found: dict[str, Setting] = {}

    def note(name: str, owner: Any, attributes: str, part: LocalTable | None = None) -> None:
        present = [attribute for attribute in attributes.split() if hasattr(owner, attribute)]
        found.update({_join(name, attribute): Setting(owner, attribute, part) for attribute in present})

    for name, table in modules.tables.items():
        note(name, table, "vocab_size num_rows padding_idx")
    for name, part in modules.local.items():
        if isinstance(part.table, ShardedTable):
            note(f"{name}.sharded", part.table, "start stop", part)
            note(f"{name}.sharded.index_check", part.table.index_check, "size")
        note(name, part.local, "vocab_size num_rows padding_idx", part)
    for name, part in modules.stored.items():
        stored = part.stored
        note(name, stored, "vocab_size num_rows num_embeddings padding_idx pad_to_multiple_of", part)
        note(_join(name, "bounds"), stored.index_check, "size", part)
        note(name, stored, "first_row whole_rows" if stored.whole_rows is not None else "", part)
        note(_join(name, "pending_updates"), stored.pending_updates, "padding_idx", part)
    for name, head in modules.heads.items():
        note(name, head, "out_features padding_idx")
    for name, projection, attribute in modules.linear:
        note(name, projection, attribute if getattr(projection, attribute) == modules.vocab_size else "")
    for name, layer in modules.layers.items():
        note(name, layer, "padding_id is_edited")
    for name, ngrams in modules.hashes.items():
        note(name, ngrams, "vocab_size compressed_size hashes_token_ids")
        note(_join(name, "bounds"), ngrams.index_check, "size")
    for name, patched in {**modules.tables, **modules.heads}.items():
        note(_join(name, "original"), patched.__dict__.get(REPLACED), "num_embeddings out_features padding_idx")
    has_per_layer = any(part.per_layer for part in modules.local.values())
    for name, config in modules.configs.items():
        sizes = [key for key in VOCAB_SIZE_KEYS if getattr(config, key, None) == modules.vocab_size]
        if isinstance(config, dict):
            sizes = size_keys(config, modules.vocab_size)
        sizes += [key for key in PER_LAYER_ROWS if has_per_layer and hasattr(config, key) and key not in sizes]
        found.update({_join(name, key): Setting(config, key) for key in sizes})
    of_tokens = [each for each in modules.parts if each.of_tokens]
    of_roles = {id(text_part(each.owner)) for each in of_tokens if each.name.rpartition(".")[2] == "config"}
    for name, owner, _ in of_tokens:
        keys = id_keys(owner, modules.vocab_size, f"The model's {name}")
        keys += [key for key in ROLE_KEYS if id(owner) in of_roles and entries_of(owner).get(key, 0) is None]
        found.update({_join(name, key): Setting(owner, key, names_ids=True) for key in keys})
    for name, owner, key in modules.module_ids:
        found[_join(name, key)] = Setting(owner, key, names_ids=True)
    return found


def new_settings(modules: VocabularyModules, edit: ResolvedEdit) -> JsonObject:
    """Return the value after an edit of each setting that `settings_of` returns; nothing is changed.

    The keys are the same names.

    Raises:
        TokenIdError: The padding row would be dropped.
        SizeError: A rank would store no row.
        VocabularyError: A configuration names a token that is removed, or a new token has no compressed ID.
    """
    settings = settings_of(modules)
    assert edit.tokens is not None
    row_map = edit.rows.row_map
    ids = edit.tokens.new_token_ids(row_map)
    after: JsonObject = {}
    for name, setting in settings.items():
        (owner, attribute, part, names_ids), value = setting, setting.value
        local = (SINGLE_PROCESS if part is None else part.collectives).partition(row_map.size)
        bounds = {"start": local.start, "first_row": local.start, "stop": local.stop, "whole_rows": row_map.size}
        if names_ids and value is None:
            value = None if ids.role_ids is None else ids.role_ids.get(attribute.removesuffix("_id"))
        elif names_ids:
            value = new_value(
                attribute, value, ids, entries_of(owner), f"the model's {name.rpartition('.')[0] or name}"
            )
        elif attribute in bounds:
            value = bounds[attribute]
        elif attribute in ("padding_idx", "padding_id"):
            value = local.local_or_none(_moved_padding(value if part is None else part.padding_idx, row_map))
        elif attribute == "is_edited":
            value = True
        elif attribute == "compressed_size":
            value = _compressed_size(owner, len(row_map.initialised))
        elif attribute == "hashes_token_ids":
            new = row_map.sources.clone()
            new[row_map.initialised] = _new_compressed_ids(owner, len(row_map.initialised))
            value = value and torch.equal(new, torch.arange(row_map.size))
        elif attribute == "pad_to_multiple_of":
            value = value if edit.pad_to_multiple_of is None else edit.pad_to_multiple_of
        elif attribute in ("num_rows", "num_embeddings") and part is not None:
            value = round_up(len(local), edit.pad_to_multiple_of or part.stored.pad_to_multiple_of or 1)
        else:
            value = len(local)
        after[name] = value
    return after


def restored_settings(
    module: nn.Module, modules: VocabularyModules, settings: JsonObject
) -> tuple[dict[str, Setting], JsonObject]:
    """Return the settings that the undo of an edit changes, and their values before that edit; nothing is changed.

    Args:
        module: The module.
        modules: Its tables and heads.
        settings: The settings of the receipt. A receipt may have fewer token IDs than the module: those that an earlier
            release did not change.

    Raises:
        CheckpointError: The receipt has other settings than the module.
    """
    present = settings_of(modules)
    found = {name: present.get(name) or _setting_at(module, name) for name in settings}
    if None in found.values() or any(not each.names_ids for name, each in present.items() if name not in settings):
        raise CheckpointError(
            "This module is not what the receipt belongs to: it has other tables, heads or configurations. Nothing "
            "was changed."
        )
    known = {name: each for name, each in found.items() if each is not None}
    return known, {name: value_of_json(settings[name], each.value) for name, each in known.items()}


def _setting_at(module: nn.Module, name: str) -> Setting | None:
    """Return an entry of a configuration by the dotted name of an attribute of a module; `None` if there is none."""
    *path, attribute = name.split(".")
    if not {"config", "generation_config"} & {*path}:
        return None
    owner: Any = module
    for key in path:
        owner = owner.get(key) if isinstance(owner, Mapping) else getattr(owner, key, None)
    is_there = attribute in owner if isinstance(owner, Mapping) else hasattr(owner, attribute)
    return Setting(owner, attribute, names_ids=True) if is_there else None


def _compressed_size(ngrams: NgramHash, added: int) -> int:
    """Return the number of compressed IDs of an n-gram hash after an edit.

    Args:
        ngrams: The hash before the edit.
        added: Number of new tokens, each of which gets a compressed ID of its own.

    Raises:
        VocabularyError: The product of the largest new ID and the largest multiplier exceeds int64.
    """
    size = ngrams.next_id + added if added else ngrams.compressed_size
    try:
        ngrams.require_products(size)
    except SizeError as error:
        raise VocabularyError(f"The n-gram hash has no room for {added} new tokens. {error}") from error
    return size


def _moved_padding(padding: int | None, row_map: RowMap) -> int | None:
    """Return the new ID of the padding token, or `None` if there is no padding token.

    Args:
        padding: The old ID of the padding token, or `None`.
        row_map: The old row of each new row.

    Raises:
        TokenIdError: The padding token is removed.
    """
    new = None if padding is None else int(row_map.new_ids[padding])
    if new is not None and new < 0:
        raise TokenIdError(f"Token {padding} is the padding token, which the table needs: keep it.")
    return new


# Applying an edit


class ModuleResult(NamedTuple):
    """Store what an edit changed in one model, from which the receipt is built.

    Attributes:
        edit: The edit that was applied.
        rows: The new tensors, the dropped rows and the fingerprints.
        settings: Sizes and IDs of the modules before the edit, by name; empty for a checkpoint.
    """

    edit: ResolvedEdit
    rows: RowResult
    settings: JsonObject


class FolderResult(NamedTuple):
    """Store what an edit wrote into the copy of a folder.

    Attributes:
        models: The result for each model in the folder: the key is "" for a layer or checkpoint, and `"run/"` for the
            model of a run.
        changed: Names of the files that the edit changes, adds or removes, without weights.
        left_out: The files that hold values by token and cannot be edited, by path, each with its rule. They are not in
            the copy.
    """

    models: dict[str, ModuleResult]
    changed: list[str]
    left_out: dict[str, FileRule]


def apply_to_module(
    module: nn.Module,
    edit: VocabularyEdit,
    optimizer: Optimizer | None = None,
    *,
    part: str = "",
    tokenizer: Tokenizer | None = None,
) -> ModuleResult:
    """Apply an edit, or the undo of one, to a live module in place; if anything fails, nothing is changed.

    If tables are sharded, or parameters are DTensors, all ranks must call this. A module that FSDP2 has gathered is
    resharded.

    Args:
        module: The module.
        edit: The edit, or the undo of one.
        optimizer: The optimizer of the module, whose state is edited too, or `None`.
        part: Which model of a folder the module is: "" for a layer, `"run/"` for the model of a run.
        tokenizer: The tokenizer of a module whose layers have none, or `None`.

    Returns:
        What was changed; the new tensors are those that the module now has.

    Raises:
        VocabularyError: The tokenizer is that of another model, or the requested edit does not fit it. Or a tensor has
            values for each token and is not known, such as an adapter of PEFT on a table.
        SizeError: The module has no vocabulary or a table that cannot be moved, the optimizer trains other parameters,
            or a rank would store no row.
        TokenIdError: The padding row would be dropped.
        CheckpointError: For an undo: the module is not as the edit of the receipt left it. Or a model of transformers
            cannot be built from its configuration.
        StaleRowsError: The optimizer's state is that before an earlier edit, to which it was not passed.
        PeerError: Another rank raised an error, or applies another edit.
    """
    replaced = [part.__dict__[REPLACED] for part in module.modules() if REPLACED in part.__dict__]
    held = held_parameters(module, optimizer, replaced)
    _check_movable(module)
    modules = vocabulary_modules(module)
    _refuse_adapters(module, modules)
    fsdp = _fsdp_parameters(module, modules)
    ranks = modules.collectives
    stored = [part.stored for part in modules.local.values()]
    pending = [(updates, each.weight) for each in stored if (updates := each.pending_updates) is not None]
    with ranks.all_or_none() as facts:
        resolved = edit.resolve(
            [tokenizer, *(layer.tokenizer for layer in modules.layers.values())],
            modules.vocab_size,
            part=part,
            all_rows_have_ids=any(layer.tensor_names for layer in modules.layers.values()),
        )
        if resolved.pad_to_multiple_of is not None and any(p.local is not p.table for p in modules.local.values()):
            raise SizeError("Sharded tables have no padding rows: leave out pad_to_multiple_of.")
        if any(
            p.shards is not SINGLE_PROCESS and p.table.vocab_size < modules.vocab_size for p in modules.local.values()
        ):
            raise SizeError("A per-layer table that lacks tokens is sharded: edit the vocabulary before it is sharded.")
        row_map = resolved.rows.row_map
        if resolved.settings is None:
            configs = [part.owner for part in modules.parts]
            of_tokens = [part.owner for part in modules.parts if part.of_tokens]
            check_sizes(of_tokens, row_map.old_size, row_map.size)
            check_readers([*configs, *module.modules()], row_map.new_ids, row_map.size)
            old_settings, settings = settings_of(modules), new_settings(modules, resolved)
        else:
            old_settings, settings = restored_settings(module, modules, resolved.settings)
        before = {name: json_value(setting.value) for name, setting in old_settings.items()}
        for updates, weight in pending:  # rows and moments become those of dense AdamW
            updates.apply_all(weight, moments=True)
        padding = {
            name: settings[_join(name, "num_rows")]
            - (row_map.size if part.may_lack_rows else settings[_join(name, "vocab_size")])
            for name, part in modules.stored.items()
        }
        tensors, replace = row_tensors(module, modules, optimizer, padding, fsdp)
        parameters = {name: rows for name, rows in tensors.items() if isinstance(rows.tensor, nn.Parameter)}
        if resolved.rows.values is not None and len(row_map.initialised):
            for rows in tensors.values():
                if rows.state_of is not None:  # an error is raised before anything changes, and on all ranks
                    rows.state_of(tensors[rows.parameter].local[:1])
        for rows in parameters.values():
            _check_rows(rows, row_map, fsdp.get(id(rows.tensor)))
        if ranks is not SINGLE_PROCESS:
            grads = {name: rows.tensor.grad for name, rows in parameters.items()}
            facts["the tensors"] = [(name, str(r.tensor.dtype), r.local.shape[1:]) for name, r in tensors.items()]
            facts["the gradients"] = [(name, grad.is_sparse) for name, grad in grads.items() if grad is not None]
            facts["the requested edit"] = row_fingerprint(row_map.sources)
            facts["the tokenizer"] = None if resolved.tokenizer is None else fingerprint(resolved.tokenizer)
    result = apply_row_map(tensors, resolved.rows, ranks)
    gradients = {name: _moved_gradient(rows, row_map) for name, rows in parameters.items()}
    ranks.barrier()
    steps = [_assign(rows.tensor, "grad", None) for rows in parameters.values()]
    steps += [
        (partial(replace[name], rows.with_rows(result.tensors[name], row_map)), partial(replace[name], _saved(rows)))
        for name, rows in tensors.items()
    ]
    steps += [old_settings[name].step(value) for name, value in settings.items()]
    if resolved.tokenizer is not None:
        steps += [_assign(layer, "_tokenizer", resolved.tokenizer) for layer in modules.layers.values()]
    steps += [
        (partial(setattr, rows.tensor, "grad", gradients[name]), partial(setattr, rows.tensor, "grad", None))
        for name, rows in parameters.items()
    ]
    _do_all(steps)
    for updates, _ in pending:
        updates.detach()  # nothing is pending: the optimizer's next step begins a new one
    moved = {name: rows.tensor for name, rows in parameters.items() if id(rows.tensor) in held}
    watch_unmoved(moved, row_map, optimizer, is_undo=resolved.rows.after is not None)
    return ModuleResult(resolved, result, before)


def _fsdp_parameters(module: nn.Module, modules: VocabularyModules) -> Mapping[int, "FsdpParameter"]:
    """Reshard a module that FSDP2 shards, and return its sharded parameters by their `id`.

    Raises:
        SizeError: FSDP shards the tables or heads in a module that contains this one.
    """
    if "torch.distributed.fsdp" not in sys.modules:  # nobody has sharded anything with it, and the import takes 0.7 s
        return {}
    from embedlayer.distributed.fsdp import fsdp_parameters

    return fsdp_parameters(module, [*(part.stored for part in modules.local.values()), *modules.heads.values()])


def _check_rows(rows: RowTensor, row_map: RowMap, fsdp: "FsdpParameter | None") -> None:
    """Check that a parameter can get the number of rows that an edit gives it; nothing is changed.

    Args:
        rows: The parameter.
        row_map: The old row of each new row.
        fsdp: What FSDP2 stores of the parameter, or `None` if it does not shard it.

    Raises:
        SizeError: A rank would store no row, or torch cannot change the size of the parameter now.
    """
    old, new = (partition.num_rows for partition in rows.partitions(row_map))
    if fsdp is not None:
        fsdp.check(new)
    elif is_dtensor(rows.tensor) and new != old:
        check_replaceable(rows.tensor)


def _saved(rows: RowTensor) -> Tensor:
    """Return the values of a tensor before an edit: a copy if an edit may overwrite them, as in a DTensor parameter."""
    values = rows.tensor.detach()
    return values.clone() if is_dtensor(values) and isinstance(rows.tensor, nn.Parameter) else values


def _assign(owner: object, name: str, value: object) -> Step:
    """Return a pair of functions: one sets an attribute to `value`, the other sets it back to its present value."""
    return partial(setattr, owner, name, value), partial(setattr, owner, name, getattr(owner, name))


def _do_all(steps: Sequence[Step]) -> None:
    """Carry out steps in order, so that either all of them or none take effect.

    A step is a pair of functions: one makes a change, the other reverts it.

    If a change raises an error, that step and all steps before it are reverted, the last step first. The error is
    then raised.
    """
    with ExitStack() as stack:
        for do, revert in steps:
            stack.callback(revert)
            do()
        stack.pop_all()
