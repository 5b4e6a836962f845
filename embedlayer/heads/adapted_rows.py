"""The rows that a tied head reads through references: those of a table, with the adapters that are active on it.

Other libraries replace a table or a head inside its parent. So a tied head refers to the parent and the name of the
child. What the modules that are found there look up is known to an integration, which implements `ChildReference`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from embedlayer.core.errors import CheckpointError
from embedlayer.core.shapes import Ids, Vectors
from embedlayer.formats.adapters import Adapter, adapt_products, adapt_rows, adapt_vectors
from embedlayer.losses.rows import row_within, with_fixed_product
from embedlayer.tables.computed_weight import computed_weight
from embedlayer.tables.table import TokenTable


class ChildReference(ABC):
    """Refer to a child of a module by its name, so that a module that later replaces the child is found.

    `copy.deepcopy` of the whole model refers to the copied parent. In a copy of the head alone, `parent` is `None`.

    Args:
        module: The module that has the child, or `None`.
        name: Name of the child in the module. With dots, the parent of the child is a submodule.
    """

    def __init__(self, module: nn.Module | None, name: str) -> None:
        path, _, self.name = name.rpartition(".")
        self.parent = None if module is None else module.get_submodule(path)

    @property
    def module(self) -> nn.Module | None:
        """Return the module that is the child now; `None` if there is no parent or no child of this name."""
        return None if self.parent is None else self.parent._modules.get(self.name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ChildReference":
        return type(self)(memo.get(id(self.parent)), self.name)

    @abstractmethod
    def adapted_table(self) -> "AdaptedTable":
        """Return the table inside the child that looks up rows, and the active adapters on it."""

    @abstractmethod
    def adds_adapters(self, head: nn.Linear, adapters: tuple[Adapter, ...]) -> bool:
        """Return whether the child, in the place of a tied head, adds the table's adapters to the logits itself."""

    @abstractmethod
    def require_unadapted(self, head: nn.Linear) -> None:
        """Raise a `CheckpointError` if the child, in the place of an untied head, changes its logits."""


class AdaptedTable(NamedTuple):
    """Hold a table, and the active adapters that change its rows, in the order in which they are applied."""

    table: nn.Module
    adapters: tuple[Adapter, ...] = ()
    padding_idx: int | None = None  # its adapted row gets no gradient from products


def require_same_adapters(tables: list[AdaptedTable]) -> AdaptedTable:
    """Return the first of `tables`, which share one weight; raise a `CheckpointError` if their adapters differ."""
    tensors = ([each for adapter in table.adapters for each in adapter if isinstance(each, Tensor)] for table in tables)
    addresses = [[each.data_ptr() for each in found] for found in tensors]  # Dynamo of torch 2.11 hashes none
    if any(found != addresses[0] for found in addresses[1:]):
        raise CheckpointError(f"Adapters are on some of the {len(tables)} tables of one weight: leave the tables out.")
    return tables[0]


class AdaptedRows(TokenTable, checks_ids=True):
    """A table without parameters, for a tied head: the rows of another table with its active adapters applied.

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
        return adapt_vectors(self.adapted_table().adapters, self.table.look_up(ids), ids)

    def vectors_as(self, ids: Ids, dtype: torch.dtype) -> Vectors:
        """Return vectors for products in `dtype`, to which adapters are applied in it; see `TokenTable.rows_as`."""
        return adapt_vectors(self.adapted_table().adapters, self.table.vectors_as(ids, dtype).to(dtype), ids)

    def rows(self, start: int, stop: int) -> Float[Tensor, "N D"]:
        """Return rows `start` to `stop - 1` with adapters applied."""
        return adapt_rows(self.adapted_table().adapters, self.table.rows(start, stop), start, stop)

    def rows_as(self, start: int, stop: int, dtype: torch.dtype) -> Float[Tensor, "N D"]:
        """Return rows for products in `dtype`, to which adapters are applied in it; see `TokenTable.rows_as`."""
        rows = self.table.rows_as(start, stop, dtype).to(dtype)
        return adapt_rows(self.adapted_table().adapters, rows, start, stop)

    def raw_logits(
        self, hidden: Float[Tensor, "*batch D"], start: int = 0, stop: int | None = None
    ) -> Float[Tensor, "*batch N"]:
        """Compute `hidden @ rows(start, stop).T` without computing the adapted rows; without `stop`, up to row V - 1.

        Neither the padding row nor its adapters get a gradient.
        """
        stop = self.vocab_size if stop is None else stop
        products = self.table.raw_logits(hidden, start, stop)
        products = adapt_products(self.adapted_table().adapters, products, hidden, start, stop)
        fixed = row_within(self.padding_idx, start, stop)
        if fixed is not None:  # its adapters get no gradient either
            row = start + fixed
            products = with_fixed_product(products, hidden, self.rows_as(row, row + 1, hidden.dtype), fixed)
        return products
