"""Tied heads of models that PEFT changes.

PEFT replaces the table inside its parent, `parent.table = lora.Embedding(base_layer=table)`. A reference to the table
would not see this. So a tied head refers to the parent and the name of the child, and reads the rows that the module
found there looks up. These are the rows of the table, of its trained copy, or of the table with LoRA or trained tokens.
Any other module raises a `CheckpointError`. PEFT is not imported; its modules are recognised by their attributes.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from embedlayer.core.errors import CheckpointError
from embedlayer.core.formatting import a_or_an
from embedlayer.core.shapes import Ids, Vectors
from embedlayer.losses.fixed_row import row_within, with_fixed_product
from embedlayer.tables.adapters import Adapter, LoraAdapter, TrainableTokens, adapt_products, adapt_rows, adapt_vectors
from embedlayer.tables.computed_weight import computed_weight
from embedlayer.tables.delta import DeltaEmbedding
from embedlayer.tables.table import TokenTable


class ChildReference:
    """Refer to a child of a module by its name, so that a module that later replaces the child is found.

    `copy.deepcopy` of the whole model refers to the copied parent. In a copy of the head alone, `parent` is `None`.

    Args:
        parent: The module that has the child, or `None`.
        name: Name of the child in the parent.
    """

    def __init__(self, parent: nn.Module | None, name: str) -> None:
        self.parent = parent
        self.name = name

    @property
    def module(self) -> nn.Module | None:
        """Return the module that is the child now; `None` if there is no parent or no child of this name."""
        return None if self.parent is None else self.parent._modules.get(self.name)

    @property
    def tensor(self) -> Tensor | None:
        """Return the parameter or buffer that has this name now; `None` if there is no parent or no such tensor."""
        value = None if self.parent is None else getattr(self.parent, self.name, None)
        return value if isinstance(value, Tensor) else None

    def __deepcopy__(self, memo: dict[int, Any]) -> "ChildReference":
        return ChildReference(memo.get(id(self.parent)), self.name)


class AdaptedTable(NamedTuple):
    """Hold a table, and the active PEFT adapters that change its rows, in the order in which they are applied."""

    table: nn.Module
    adapters: tuple[Adapter, ...] = ()
    padding_idx: int | None = None  # its adapted row gets no gradient from products


def weight_of(found: AdaptedTable) -> Tensor | None:
    table = found.table
    while isinstance(table, DeltaEmbedding):
        table = table.base
    return table._parameters.get("weight")


def resolve_table(module: nn.Module, name: str) -> AdaptedTable:
    """Return the table inside a module that looks up rows, and the active adapters that PEFT has put on it."""
    here: Any = module
    if isinstance(module, (TokenTable, nn.Embedding, nn.Linear)):  # graphs of torch 2.9 have no unions of classes
        return AdaptedTable(module)
    if hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
        active = [] if here.disable_adapters else here.active_adapters
        trained = [each for each in active if each in here.modules_to_save]
        return resolve_table(here.modules_to_save[trained[0]] if trained else here.original_module, name)
    if hasattr(module, "token_adapter"):
        return resolve_table(here.token_adapter, name)
    if not hasattr(module, "base_layer"):
        raise CheckpointError(
            f"{name!r}, which a tied head reads, is {a_or_an(module)} now. Use OutputHead(embed_dim, vocab_size)."
        )
    base = resolve_table(here.base_layer, name)
    if here.disable_adapters or here.merged:
        return base
    return AdaptedTable(base.table, (*base.adapters, *_active_adapters(here, name)))


def _active_adapters(wrapper: Any, name: str) -> Iterator[Adapter]:
    """Yield the active adapters of one PEFT module that wraps a table."""
    low_rank, replaced = (hasattr(wrapper, kind) for kind in ("lora_embedding_A", "trainable_tokens_delta"))
    if not low_rank and not replaced:
        raise CheckpointError(
            f"{type(wrapper).__name__} on {name!r} hides rows of a tied head: see docs/errors.md, PEFT on tied weights."
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


def without_adapters(wrapper: nn.Module) -> nn.Module:
    """Return the module inside all adapters that PEFT has put on it; the module itself if there are none."""
    while (base := wrapper._modules.get("base_layer")) is not None:
        wrapper = base
    return wrapper


def require_same_adapters(tables: list[AdaptedTable]) -> AdaptedTable:
    """Return the first of `tables`, which share one weight; raise a `CheckpointError` if their adapters differ."""
    tensors = ([each for adapter in table.adapters for each in adapter if isinstance(each, Tensor)] for table in tables)
    addresses = [[each.data_ptr() for each in found] for found in tensors]  # Dynamo of torch 2.11 hashes none
    if any(found != addresses[0] for found in addresses[1:]):
        raise CheckpointError(
            f"PEFT adapts some of the {len(tables)} tables of one weight. See docs/errors.md, PEFT on tied weights."
        )
    return tables[0]


def head_applies_adapters(head: nn.Linear, reference: ChildReference, adapters: tuple[Adapter, ...]) -> bool:
    """Return whether PEFT wraps a tied head and already adds the table's adapters to its logits."""
    # PEFT does so with `ensure_weight_tying=True`; the head must then not add them a second time.
    wrapper: Any = reference.module
    if wrapper is head or not hasattr(wrapper, "base_layer") or wrapper.disable_adapters or wrapper.merged:
        return False
    active = [each for each in wrapper.active_adapters if each in getattr(wrapper, "lora_A", ())]
    shared = {each.b.data_ptr() for each in adapters if isinstance(each, LoraAdapter)}
    if active and all(wrapper.lora_A[each].weight.data_ptr() in shared for each in active):
        return True
    raise CheckpointError(
        f"{type(wrapper).__name__} on the tied head {reference.name!r}: see docs/errors.md, PEFT on tied weights."
    )


def require_unwrapped(head: nn.Linear, reference: ChildReference | None) -> None:
    """Raise a `CheckpointError` if PEFT wraps an untied head in an active module: its rows are not its logits."""
    wrapper: Any = None if reference is None else reference.module
    if wrapper is None or wrapper is head or not hasattr(wrapper, "active_adapters"):
        return
    if not wrapper.disable_adapters and not getattr(wrapper, "merged", False):
        raise CheckpointError(
            f"{type(wrapper).__name__} of PEFT on the untied head {head!r} is active: call merge_and_unload() first."
        )


class AdaptedRows(TokenTable, checks_ids=True):
    """A table without parameters, for a tied head: the rows of another table with its active PEFT adapters applied.

    Args:
        adapted_table: Function that returns the other table and its adapters; it is called at each use.
    """

    scale = None

    def __init__(self, adapted_table: Callable[[], AdaptedTable]) -> None:
        super().__init__()
        self.adapted_table = adapted_table

    @property
    def weight(self) -> Tensor:
        """Return the rows as a tensor without memory; see `ComputedWeight`."""
        table, adapters, _ = self.adapted_table()
        tensors = (each for adapter in adapters for each in adapter if isinstance(each, Tensor))
        return computed_weight(self, (*table.parameters(), *tensors), cast(TokenTable, table))

    @property
    def padding_idx(self) -> int | None:  # type: ignore[override]
        """Return the padding token of the head, whose row and adapters get no gradient."""
        return self.adapted_table().padding_idx

    @property
    def table(self) -> TokenTable:
        """Return the table without its adapters."""
        return cast(TokenTable, self.adapted_table().table)

    @property
    def vocab_size(self) -> int:  # type: ignore[override]
        """Return the number of tokens, V."""
        return self.table.vocab_size

    @property
    def num_rows(self) -> int:  # type: ignore[override]
        """Return the number of rows of the table, spare rows included."""
        return self.table.num_rows

    @property
    def embed_dim(self) -> int:  # type: ignore[override]
        """Return the width of a row, D."""
        return self.table.embed_dim

    @property
    def dtype(self) -> torch.dtype:
        """Return the data type of the vectors of the table."""
        return self.table.dtype

    def look_up(self, ids: Ids) -> Vectors:
        """Return the rows of `ids` with adapters applied, `(...)` to `(..., D)`. No other row is computed."""
        return self._adapted_vectors(self.table.look_up(ids), ids)

    def vectors_as(self, ids: Ids, dtype: torch.dtype) -> Vectors:
        """Return vectors for products in `dtype`, to which adapters are applied in it; see `TokenTable.rows_as`."""
        return self._adapted_vectors(self.table.vectors_as(ids, dtype).to(dtype), ids)

    def rows(self, start: int, stop: int) -> Float[Tensor, "N D"]:
        """Return rows `start` to `stop - 1` with adapters applied."""
        return self._adapted(self.table.rows(start, stop), start, stop)

    def rows_as(self, start: int, stop: int, dtype: torch.dtype) -> Float[Tensor, "N D"]:
        """Return rows for products in `dtype`, to which adapters are applied in it; see `TokenTable.rows_as`."""
        return self._adapted(self.table.rows_as(start, stop, dtype).to(dtype), start, stop)

    def raw_logits(
        self, hidden: Float[Tensor, "*batch D"], start: int = 0, stop: int | None = None
    ) -> Float[Tensor, "*batch N"]:
        """Compute `hidden @ rows(start, stop).T` without computing the adapted rows; without `stop`, up to row V - 1.

        Neither the padding row nor its adapters get a gradient.
        """
        stop = self.vocab_size if stop is None else stop
        products = self.table.raw_logits(hidden, start, stop)
        for adapter in self.adapted_table().adapters:
            products = adapt_products(adapter, products, hidden, start, stop)
        fixed = row_within(self.padding_idx, start, stop)
        if fixed is not None:  # its adapters get no gradient either
            row = start + fixed
            products = with_fixed_product(products, hidden, self.rows_as(row, row + 1, hidden.dtype), fixed)
        return products

    def _adapted_vectors(self, vectors: Vectors, ids: Ids) -> Vectors:
        """Return looked-up vectors with adapters applied."""
        for adapter in self.adapted_table().adapters:
            vectors = adapt_vectors(adapter, vectors, ids)
        return vectors

    def _adapted(self, rows: Tensor, start: int, stop: int) -> Tensor:
        """Return rows `start` to `stop - 1` with adapters applied."""
        for adapter in self.adapted_table().adapters:
            rows = adapt_rows(adapter, rows, start, stop)
        return rows
