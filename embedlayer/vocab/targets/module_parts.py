"""The tables, heads and configurations of a live module that belong to its vocabulary, and why it is not edited."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from tokenizers import Tokenizer
from torch import Tensor, nn

from embedlayer.checkpoints.layer import EmbeddingLayer
from embedlayer.core.collectives import SINGLE_PROCESS, Collectives
from embedlayer.core.errors import SizeError, VocabularyError
from embedlayer.core.formatting import a_or_an
from embedlayer.core.own_attributes import own_attribute
from embedlayer.distributed.sharded import ShardedTable
from embedlayer.families import VOCAB_SIZE_KEYS, family_of
from embedlayer.families.configurations import Part, is_configuration, module_ids, other_models, parts_of, size_keys
from embedlayer.families.vocabulary_tensors import linear_sizes
from embedlayer.heads.draft import DraftHead
from embedlayer.heads.output import OutputHead
from embedlayer.heads.streams import StreamHead
from embedlayer.inputs.ngram import NgramEmbedding, NgramHash
from embedlayer.inputs.per_layer import PerLayerInputs
from embedlayer.integrations.dtensor import mesh_collectives, row_collectives
from embedlayer.integrations.peft import plain_name
from embedlayer.saving import Pretrained
from embedlayer.tables.bag import Bag
from embedlayer.tables.dense_table import DenseTable
from embedlayer.tables.factorized import FactorizedEmbedding
from embedlayer.tables.lookup import LookupTable
from embedlayer.tables.packed_rows import PackedRows
from embedlayer.tables.streams import StreamTable
from embedlayer.tables.table import TokenTable

_HASHED_NGRAMS = re.compile(r"(?:^|[._])engram[._]|(?:^|\.)ngram_embedding\.|(?:^|\.)ngram_embeddings\.embedders\.")
"""Names of tensors of hashed n-grams in checkpoints: of Engram, Qwen4-Exp and LongCat-Flash."""


class LocalTable(NamedTuple):
    """Describe the rows of a table that this process stores."""

    local: DenseTable | FactorizedEmbedding | PackedRows
    table: TokenTable
    collectives: Collectives = SINGLE_PROCESS
    of_head: bool = False
    per_layer: bool = False
    missing_row: int | None = None

    @property
    def stored(self) -> DenseTable | PackedRows:
        """Return the table that stores the rows: the inner table of a factorised one, else `local`."""
        return self.local.inner if isinstance(self.local, FactorizedEmbedding) else self.local

    @property
    def tensors(self) -> list[Tensor]:
        """Return the tensors that store the rows: the weight, or those of a table of stored codes, the codes first."""
        stored = self.stored
        return [stored.weight] if isinstance(stored, DenseTable) else [*stored.stored_rows.rows.values()]

    @property
    def shards(self) -> Collectives:
        """Return the ranks over which the rows are sharded, in a `ShardedTable` or as a DTensor, which FSDP2 uses."""
        return row_collectives(self.tensors[0]) if self.local is self.table else self.collectives


class VocabularyModules(NamedTuple):
    """The parts of a live module that belong to the vocabulary, by dotted name in the module."""

    tables: dict[str, TokenTable]
    local: dict[str, LocalTable]
    heads: dict[str, OutputHead]
    layers: dict[str, EmbeddingLayer]
    configs: dict[str, Any]
    hashes: dict[str, NgramHash]
    parts: list[Part]
    module_ids: list[tuple[str, nn.Module, str]]
    linear: list[tuple[str, nn.Linear, str]]
    bags: dict[str, Bag]
    bag_owners: dict[str, nn.Module]

    @property
    def tokenizers(self) -> dict[str, tuple[Any, str]]:
        """Return the modules that have a tokenizer, each with the name of its attribute, by dotted name."""
        owners = {name: part for name, part in self.bag_owners.items() if own_attribute(part, "tokenizer") is not None}
        owned = {name: (part, "tokenizer") for name, part in owners.items() if isinstance(part.tokenizer, Tokenizer)}
        layers: dict[str, tuple[Any, str]] = {name: (layer, "_tokenizer") for name, layer in self.layers.items()}
        return layers | owned

    @property
    def collectives(self) -> Collectives:
        """Return the ranks that must edit together: those of all tables and heads, or a single process."""
        heads = [mesh_collectives(head.weight) for head in self.heads.values() if head.has_weight]
        tables = [
            mesh_collectives(part.tensors[0]) if part.local is part.table else part.collectives
            for part in self.local.values()
        ]
        groups = sorted([*tables, *heads], key=lambda each: each.size)
        groups = [each for each in groups if each is not SINGLE_PROCESS]
        if not groups:
            return SINGLE_PROCESS
        union = {rank for each in groups for rank in each.global_ranks}
        return groups[-1] if len(union) == groups[-1].size else Collectives(device=groups[-1].device)

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens, V, which all tables and heads share."""
        return next(iter(self.sizes.values()))

    @property
    def sizes(self) -> dict[str, int]:
        """Return a dictionary from the name of each table, head and n-gram hash to its number of tokens."""
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
        return {name if part.local is part.stored else dotted(name, "inner"): part for name, part in self.local.items()}


def vocabulary_modules(module: nn.Module) -> VocabularyModules:
    """Return the tables, heads, layers and configurations of a live module; the table of a tied head is included."""
    # The rows of an `NgramEmbedding` belong to hashes, so its table is left out.
    modules = dict(module.named_modules())
    if drafts := [name or "the module" for name, part in modules.items() if isinstance(part, DraftHead)]:
        raise VocabularyError(f"{drafts[0]} is a DraftHead of the old token IDs: build it after the edit.")
    ngrams = {name: part for name, part in modules.items() if isinstance(part, NgramEmbedding)}
    hashes = {name: part for name, part in modules.items() if isinstance(part, NgramHash)}
    ours = tuple(dotted(name, "") for name in ngrams)
    refuse_hashed_ngrams((name for name, _ in module.named_parameters() if not name.startswith(ours)), "This model")
    layers = {name: part for name, part in modules.items() if isinstance(part, EmbeddingLayer)}
    skipped = {id(part) for layer in layers.values() if layer.types is not None for part in layer.types.modules()}
    skipped |= {id(child) for part in modules.values() if isinstance(part, TokenTable) for child in part.children()}
    encoders = other_models(module)
    skipped |= _without_token_ids(modules) | encoders
    tables = {name: part for name, part in modules.items() if isinstance(part, TokenTable) and id(part) not in skipped}
    heads = {name: part for name, part in modules.items() if isinstance(part, OutputHead) and id(part) not in skipped}
    for name, head in heads.items():
        if head.own_table is not None and all(head.own_table is not other for other in tables.values()):
            tables[dotted(name, "table")] = head.own_table
    of_heads = {id(child) for head in heads.values() for child in head.children()}
    local = dict(_local_table(name, table, id(table) in of_heads) for name, table in tables.items())
    for name, (table, missing_row) in _per_layer_tables(modules).items():
        stored, part = _local_table(name, table, False)
        local[stored] = part._replace(per_layer=True, missing_row=missing_row)
    linear = [each for each in linear_sizes(module, plain_name) if not isinstance(each[1], OutputHead)]
    bags = {name: part for name, part in modules.items() if isinstance(part, Bag)}
    inside = {id(part) for part in bags.values()}
    owners = {
        name: part
        for name, part in modules.items()
        if not isinstance(part, Pretrained) and any(id(child) in inside for child in part.children())
    }
    vocabulary = VocabularyModules(tables, local, heads, layers, {}, hashes, [], [], linear, bags, owners)
    if not vocabulary.sizes:
        if streams := next((part.num_streams for part in modules.values() if isinstance(part, StreamTable)), None):
            raise SizeError(f"The {streams} streams of codes of this module are not edited.")
        raise SizeError("There is no TokenTable or OutputHead: docs/errors.md, Modules without a vocabulary.")
    if len({*vocabulary.sizes.values()}) > 1:
        shown = ", ".join(f"{name} {size:,}" for name, size in vocabulary.sizes.items())
        raise SizeError(f"These do not share a vocabulary ({shown}): edit each by itself; receipt.new_ids has IDs.")
    _refuse_other_rows(module, vocabulary)
    vocab_size = vocabulary.vocab_size
    for name, part in modules.items():
        is_ours = isinstance(part, LookupTable | OutputHead | EmbeddingLayer | NgramHash) or id(part) in skipped
        if not is_ours and any(getattr(part, key, None) == vocab_size for key in VOCAB_SIZE_KEYS):
            vocabulary.configs[name] = part
    vocabulary.parts.extend(_configurations(modules, vocabulary, encoders))
    vocabulary.configs.update(
        (each.name, each.owner) for each in vocabulary.parts if each.of_tokens and size_keys(each.owner, vocab_size)
    )
    others = {id(each.owner) for each in vocabulary.parts if not each.of_tokens}
    apart = tuple(dotted(name, "") for name, part in modules.items() if id(own_attribute(part, "config")) in others)
    vocabulary.module_ids.extend(each for each in module_ids(module) if not f"{each[0]}.".startswith(apart))
    return vocabulary


def _configurations(
    modules: Mapping[str, nn.Module], vocabulary: VocabularyModules, apart: Collection[int]
) -> Iterator[Part]:
    """Yield all configurations and generation configurations of a live module, each object once."""
    ours = {id(each) for each in (*vocabulary.tables.values(), *vocabulary.heads.values())}
    holders = [name for name, part in modules.items() if id(part) in ours]
    parts: dict[int, Part] = {}
    vocab_size = vocabulary.vocab_size
    for name, part in modules.items():
        is_around = any(f"{holder}.".startswith(dotted(name, "")) for holder in holders) and id(part) not in apart
        for key in ("config", "generation_config"):
            config = own_attribute(part, key)
            if is_configuration(config) or hasattr(config, "__dict__"):
                for each in parts_of(config, vocab_size, dotted(name, key)):
                    known = parts.get(id(each.owner))
                    if known is None or (is_around and each.of_tokens and not known.of_tokens):
                        parts[id(each.owner)] = each._replace(of_tokens=is_around and each.of_tokens)
    yield from parts.values()


def _refuse_other_rows(module: nn.Module, vocabulary: VocabularyModules) -> None:
    """Raise a `VocabularyError` if a module has a tensor with values for each token that an edit does not move."""
    known = {id(each) for part in vocabulary.hashes.values() for each in part.buffers()}
    known |= {id(each) for part in vocabulary.local.values() for each in part.tensors}
    known |= {id(each) for head in vocabulary.heads.values() for each in (head._parameters.get("weight"), head.bias)}
    own = {
        id(tensor)
        for part in (*vocabulary.tables.values(), *vocabulary.heads.values())
        if not type(part).__module__.startswith("embedlayer.")
        for tensor in (*part.parameters(), *part.buffers())
    }
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        has_rows = len(tensor.shape) > 1 and tensor.shape[0] == vocabulary.vocab_size
        is_integer = not (tensor.is_floating_point() or tensor.is_complex())
        is_of_tokens = vocabulary.vocab_size in tensor.shape if id(tensor) in own else has_rows and is_integer
        if is_of_tokens and id(tensor) not in known:
            raise unknown_rows(name)


def unknown_rows(name: str, use: str = "") -> VocabularyError:
    """Return the error for a tensor that follows the vocabulary and has no known values for new tokens."""
    return VocabularyError(
        f"{name} has values for each token beside the rows of tables and heads{f' ({use})' if use else ''}, and what "
        f"they are for a new token is not known, so the vocabulary of this model is not edited."
    )


def refuse_hashed_ngrams(names: Iterable[str], what: str) -> None:
    """Raise a `VocabularyError` if tensors of a model are rows of hashed n-grams of another library, by their names."""
    if hashed := next((name for name in names if _HASHED_NGRAMS.search(name)), None):
        raise VocabularyError(f"{what} has hashed n-grams ({hashed}): docs/errors.md, Hashed n-grams.")


def _per_layer_tables(modules: Mapping[str, nn.Module]) -> dict[str, tuple[LookupTable, int | None]]:
    """Return the per-layer tables by name, each with the row that is looked up for tokens which it lacks, or `None`."""
    tables: dict[str, tuple[LookupTable, int | None]] = {}
    for name, part in modules.items():
        family = family_of(getattr(own_attribute(part, "config"), "model_type", None))
        if isinstance(part, PerLayerInputs):
            tables[dotted(name, "table")] = part.table, part.missing_row
        elif family is not None and family.per_layer is not None:
            child = family.per_layer.table.partition(".")[0]
            table = part._modules.get(child)
            if isinstance(table, TokenTable):
                tables[dotted(name, child)] = table, family.per_layer.missing_row
    return tables


def dotted(name: str, child: str) -> str:
    """Return the dotted name of a submodule or attribute; `name` is "" for the root module."""
    return f"{name}.{child}".lstrip(".")


def _without_token_ids(modules: Mapping[str, nn.Module]) -> set[int]:
    """Return the `id` of each part of a table whose rows are no tokens: hashed n-grams, and streams of codes."""
    owners: list[nn.Module] = [part.table for part in modules.values() if isinstance(part, NgramEmbedding)]
    owners += [part for part in modules.values() if isinstance(part, StreamTable | StreamHead)]
    return {id(part) for each in owners for part in each.modules()}


def check_movable(module: nn.Module) -> None:
    """Raise a `SizeError` if a module has a table that is only looked up: a `LookupTable` that is no `TokenTable`."""
    modules = dict(module.named_modules())
    hashed = _without_token_ids(modules)
    for name, part in modules.items():
        if isinstance(part, LookupTable) and not isinstance(part, TokenTable) and id(part) not in hashed:
            raise _cannot_be_moved(name, part)


def _local_table(name: str, table: LookupTable, of_head: bool) -> tuple[str, LocalTable]:
    """Return the rows of a table that this process stores, after the dotted name of the module that stores them."""
    if isinstance(table, DenseTable | FactorizedEmbedding | PackedRows):
        return name, LocalTable(table, table, of_head=of_head)
    if isinstance(table, ShardedTable) and isinstance(table.local, DenseTable | FactorizedEmbedding):
        ranks = Collectives(table.mesh.get_group(), table.mesh.device_type)
        return dotted(name, "local"), LocalTable(table.local, table, ranks, of_head)
    raise _cannot_be_moved(name, table)


def _cannot_be_moved(name: str, table: LookupTable) -> SizeError:
    """Return the error for a table of a kind that an edit cannot move, after its dotted name in the module."""
    return SizeError(
        f"The rows of {name or 'this table'}, {a_or_an(table)}, cannot be moved. After train_only_rows, call "
        f"embedlayer.vocab.merge_rows(model) first. Otherwise edit the table that it was built from (a "
        f"DeltaEmbedding's after merge(), a trained MappedEmbedding's in the folder of save_pretrained), and build it "
        f"again."
    )
