"""Tied heads of models that PEFT changes.

PEFT replaces the table inside its parent, `parent.table = lora.Embedding(base_layer=table)`. A reference to the table
would not see this. So a tied head refers to the parent and the name of the child, and reads the rows that the module
found there looks up: the table, its trained copy, or the table with LoRA or trained tokens. Any other module is an
error. PEFT is not imported; its modules are recognised by their attributes.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from embedlayer.errors import CheckpointError
from embedlayer.shapes import Ids, Vectors
from embedlayer.tables.delta import DeltaEmbedding
from embedlayer.tables.table import TokenTable


class ChildReference:
    """Refer to a child of a module by name, so that a module that later replaces the child is found.

    `copy.deepcopy` of the whole model refers to the copied parent; a copy of the head alone has no parent.

    Args:
        parent: The module that has the child, or `None`.
        name: Name of the child in the parent.
    """

    def __init__(self, parent: nn.Module | None, name: str) -> None:
        self.parent = parent
        self.name = name

    @property
    def module(self) -> nn.Module | None:
        """The child; `None` if there is no parent or no child of this name."""
        return None if self.parent is None else self.parent._modules.get(self.name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ChildReference":
        return ChildReference(memo.get(id(self.parent)), self.name)


class LoraAdapter(NamedTuple):
    """Hold LoRA on a table, with A `(r, V)` and B `(D, r)`: the rows become `rows + Aᵀ Bᵀ * scaling`."""

    a: Float[Tensor, "R V"]
    b: Float[Tensor, "D R"]
    scaling: float


class TrainableTokens(NamedTuple):
    """Hold the trained rows of the tokens `token_ids`, which replace those rows of the table."""

    token_ids: list[int]
    values: Float[Tensor, "N D"]


Adapter = LoraAdapter | TrainableTokens


class AdaptedTable(NamedTuple):
    """Pair a table with the adapters that change its rows, in the order of their application."""

    table: nn.Module
    adapters: tuple[Adapter, ...] = ()


def weight_of(found: AdaptedTable) -> Tensor | None:
    """Return the weight of the table in `found`; for a `DeltaEmbedding` that of its base; `None` without a weight."""
    table: Any = found.table
    while isinstance(table, DeltaEmbedding):
        table = table.base
    weight: Tensor | None = getattr(table, "weight", None)
    return weight


def resolve_table(module: nn.Module, name: str) -> AdaptedTable:
    """Return the table and the active adapters of a module that looks up rows.

    Args:
        module: A table, or the module by which PEFT replaced it.
        name: Name of the module in its parent, for the error.

    Raises:
        CheckpointError: The module is of an unknown class.
    """
    here: Any = module
    if isinstance(module, TokenTable | nn.Embedding | nn.Linear):
        return AdaptedTable(module)
    if hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
        active = [] if here.disable_adapters else here.active_adapters
        trained = [each for each in active if each in here.modules_to_save]
        return resolve_table(here.modules_to_save[trained[0]] if trained else here.original_module, name)
    if hasattr(module, "token_adapter"):
        return resolve_table(here.token_adapter, name)
    if not hasattr(module, "base_layer"):
        raise CheckpointError(
            f"A tied head reads the table through the module {name!r} of its model, and there is a "
            f"{type(module).__name__} now, which is no table. Use an untied head: OutputHead(embed_dim, vocab_size)."
        )
    base = resolve_table(here.base_layer, name)
    if here.disable_adapters or here.merged:
        return base
    return AdaptedTable(base.table, (*base.adapters, *_active_adapters(here, name)))


def _active_adapters(wrapper: Any, name: str) -> Iterator[Adapter]:
    """Yield the active adapters of one PEFT module.

    Raises:
        CheckpointError: An adapter is neither LoRA nor trainable tokens, or is a variant of LoRA (DoRA).
    """
    low_rank, replaced = (hasattr(wrapper, kind) for kind in ("lora_embedding_A", "trainable_tokens_delta"))
    if not low_rank and not replaced:
        raise CheckpointError(
            f"{type(wrapper).__module__}.{type(wrapper).__name__} on {name!r} is unknown, so the tied head cannot read "
            f"its rows. Use LoRA, trainable_token_indices or modules_to_save, leave {name!r} out, or use an untied "
            f"head."
        )
    for adapter in wrapper.active_adapters:
        if low_rank and adapter in getattr(wrapper, "lora_variant", ()):
            raise CheckpointError(
                f"The adapter {adapter} is a variant of LoRA on {name!r} that a tied head cannot read."
            )
        if low_rank and adapter in wrapper.lora_embedding_A:
            yield LoraAdapter(
                wrapper.lora_embedding_A[adapter], wrapper.lora_embedding_B[adapter], float(wrapper.scaling[adapter])
            )
        if replaced and adapter in wrapper.trainable_tokens_delta:
            yield TrainableTokens(list(wrapper.token_indices[adapter]), wrapper.trainable_tokens_delta[adapter])


def require_same_adapters(tables: list[AdaptedTable]) -> AdaptedTable:
    """Check that tables that share one weight have the same adapters, and return the first table.

    Raises:
        CheckpointError: The adapters differ.
    """
    tensors = ([each for adapter in table.adapters for each in adapter if isinstance(each, Tensor)] for table in tables)
    if len({tuple(each.data_ptr() for each in found) for found in tensors}) > 1:
        raise CheckpointError(
            f"{len(tables)} tables and the head of this model share one weight, and PEFT has put adapters on some of "
            f"the tables: merging would change all. Leave the tables out of PEFT's configuration, or give each its own "
            f"weight."
        )
    return tables[0]


def head_applies_adapters(head: nn.Linear, reference: ChildReference, adapters: tuple[Adapter, ...]) -> bool:
    """Return whether PEFT wraps a tied head and adds the table's adapters to its logits already.

    PEFT does so with `ensure_weight_tying=True`; the head must then not add them again.

    Raises:
        CheckpointError: The wrapper adds other adapters, which merging would write into the table.
    """
    wrapper: Any = reference.module
    if wrapper is None or wrapper is head or not hasattr(wrapper, "base_layer"):
        return False
    if wrapper.disable_adapters or wrapper.merged:
        return False
    active = [each for each in wrapper.active_adapters if each in getattr(wrapper, "lora_A", ())]
    shared = {each.b.data_ptr() for each in adapters if isinstance(each, LoraAdapter)}
    if active and all(wrapper.lora_A[each].weight.data_ptr() in shared for each in active):
        return True
    raise CheckpointError(
        f"PEFT has put {type(wrapper).__module__}.{type(wrapper).__name__} on the head {reference.name!r}, which "
        f"is tied to the table: active it changes only the logits, merged it changes the look-ups too. Leave the head "
        f"out with exclude_modules=[{reference.name!r}] and target the table, which adapts both; or use an untied head."
    )


def adapt_rows(adapter: Adapter, rows: Tensor, start: int, stop: int) -> Tensor:
    """Return `rows`, which are rows `start .. stop - 1` of the table, with an adapter applied; no in-place change."""
    if isinstance(adapter, LoraAdapter):
        return rows + (adapter.a[:, start:stop].T @ adapter.b.T * adapter.scaling).to(rows.dtype)
    index, values = _trained_between(adapter, start, stop)
    return rows.index_copy(0, index, values.to(rows.dtype))


def adapt_products(adapter: Adapter, products: Tensor, hidden: Tensor, start: int, stop: int) -> Tensor:
    """Return `products = hidden @ rows.T` of rows `start .. stop - 1`, changed as if the rows were adapted.

    LoRA adds two narrow products; trained tokens replace columns.
    """
    if isinstance(adapter, LoraAdapter):
        narrow = hidden.to(adapter.b.dtype) @ adapter.b * adapter.scaling
        return products + (narrow @ adapter.a[:, start:stop]).to(products.dtype)
    index, values = _trained_between(adapter, start, stop)
    return products.index_copy(-1, index, F.linear(hidden, values.to(hidden.dtype)).to(products.dtype))


def _trained_between(adapter: TrainableTokens, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Return (indices, rows) of the trained tokens among `start .. stop - 1`; indices are relative to `start`."""
    chosen = [number for number, token in enumerate(adapter.token_ids) if start <= token < stop]
    index = [adapter.token_ids[number] - start for number in chosen]
    return torch.tensor(index, dtype=torch.long, device=adapter.values.device), adapter.values[chosen]


class AdaptedRows(TokenTable):
    """The rows of a table with the adapters that are active now, for a tied head. It has no parameters.

    Args:
        adapted_table: Function that returns the table and its adapters.
    """

    padding_idx = None
    scale = None

    def __init__(self, adapted_table: Callable[[], AdaptedTable]) -> None:
        super().__init__()
        self.adapted_table = adapted_table

    @property
    def table(self) -> TokenTable:
        """The table without adapters."""
        return cast(TokenTable, self.adapted_table().table)

    @property
    def vocab_size(self) -> int:  # type: ignore[override]
        """Number of tokens, V."""
        return self.table.vocab_size

    @property
    def num_rows(self) -> int:  # type: ignore[override]
        """Number of rows of the table, spare rows included."""
        return self.table.num_rows

    @property
    def embed_dim(self) -> int:  # type: ignore[override]
        """Width of a row, D."""
        return self.table.embed_dim

    def look_up(self, ids: Ids) -> Vectors:
        """Return the rows of `ids` with adapters applied."""
        return F.embedding(ids, self.rows(0, self.num_rows))

    def rows(self, start: int, stop: int) -> Float[Tensor, "N D"]:
        """Return rows `start .. stop - 1` with adapters applied."""
        rows = self.table.rows(start, stop)
        for adapter in self.adapted_table().adapters:
            rows = adapt_rows(adapter, rows, start, stop)
        return rows

    def raw_logits(
        self, hidden: Float[Tensor, "*batch D"], start: int = 0, stop: int | None = None
    ) -> Float[Tensor, "*batch N"]:
        """Compute `hidden @ rows(start, stop).T` without building the rows."""
        stop = self.vocab_size if stop is None else stop
        products = self.table.raw_logits(hidden, start, stop)
        for adapter in self.adapted_table().adapters:
            products = adapt_products(adapter, products, hidden, start, stop)
        return products
