"""What a tied head reads where PEFT has put a module in the place of its table.

PEFT replaces the table inside its parent, `parent.table = lora.Embedding(base_layer=table)`; a head that refers to the
table does not notice. So a head also refers to the place, a parent and a name, and reads what the module there looks
up: the table, the copy of it that is trained, or the table with low-rank or replaced rows. Any other module is refused.
PEFT is not imported: its modules are known by their attributes.
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


class Place:
    """A child of a module by its name, whatever module that is at the moment.

    A copy of the whole model refers to the copied parent; a copy of the head alone refers to none.

    Args:
        parent: The module that has the child.
        name: The child's name there.
    """

    def __init__(self, parent: nn.Module | None, name: str) -> None:
        self.parent = parent
        self.name = name

    @property
    def module(self) -> nn.Module | None:
        """The child, or `None` if the parent has none of this name."""
        return None if self.parent is None else self.parent._modules.get(self.name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Place":
        return Place(memo.get(id(self.parent)), self.name)


class LowRank(NamedTuple):
    """LoRA on a table: `rows + A^T B^T * scaling`."""

    a: Float[Tensor, "R V"]
    b: Float[Tensor, "D R"]
    scaling: float


class Replaced(NamedTuple):
    """Rows of some tokens in the place of the table's."""

    token_ids: list[int]
    values: Float[Tensor, "N D"]


Adapter = LowRank | Replaced


class Found(NamedTuple):
    """What a module looks up: the rows of `table`, changed by `adapters` in turn."""

    table: nn.Module
    adapters: tuple[Adapter, ...] = ()


def weight_of(found: Found) -> Tensor | None:
    """Return the parameter that stores the rows, below those of a `DeltaEmbedding`."""
    table: Any = found.table
    while isinstance(table, DeltaEmbedding):
        table = table.base
    weight: Tensor | None = getattr(table, "weight", None)
    return weight


def looked_up(module: nn.Module, name: str) -> Found:
    """Return the table and the adapters whose rows a module in a table's place looks up.

    Args:
        module: A table, or what PEFT put in its place.
        name: Of the place, for the message.

    Raises:
        CheckpointError: It is a module whose rows are not known here.
    """
    here: Any = module
    if isinstance(module, TokenTable | nn.Embedding | nn.Linear):
        return Found(module)
    if hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
        active = [] if here.disable_adapters else here.active_adapters
        chosen = [each for each in active if each in here.modules_to_save]
        return looked_up(here.modules_to_save[chosen[0]] if chosen else here.original_module, name)
    if hasattr(module, "token_adapter"):
        return looked_up(here.token_adapter, name)
    if not hasattr(module, "base_layer"):
        raise CheckpointError(
            f"A tied head reads the table through the module {name!r} of its model, and there is a "
            f"{type(module).__name__} now, which is no table. Give the model an untied head."
        )
    base = looked_up(here.base_layer, name)
    if here.disable_adapters or here.merged:
        return base
    return Found(base.table, (*base.adapters, *_active(here, name)))


def _active(wrapper: Any, name: str) -> Iterator[Adapter]:
    """Yield the active adapters of one module of PEFT's.

    Raises:
        CheckpointError: They are of another kind than LoRA and trainable tokens, or a variant of LoRA (DoRA).
    """
    low_rank, replaced = (hasattr(wrapper, kind) for kind in ("lora_embedding_A", "trainable_tokens_delta"))
    if not low_rank and not replaced:
        raise CheckpointError(
            f"{type(wrapper).__module__}.{type(wrapper).__name__} on {name!r} cannot be followed by the head that is "
            f"tied to it: its rows are not known here. Use LoRA, trainable_token_indices or modules_to_save, leave "
            f"{name!r} out, or give the model an untied head."
        )
    for adapter in wrapper.active_adapters:
        if low_rank and adapter in getattr(wrapper, "lora_variant", ()):
            raise CheckpointError(
                f"The adapter {adapter} is a variant of LoRA on {name!r} that a tied head cannot follow."
            )
        if low_rank and adapter in wrapper.lora_embedding_A:
            yield LowRank(
                wrapper.lora_embedding_A[adapter], wrapper.lora_embedding_B[adapter], float(wrapper.scaling[adapter])
            )
        if replaced and adapter in wrapper.trainable_tokens_delta:
            yield Replaced(list(wrapper.token_indices[adapter]), wrapper.trainable_tokens_delta[adapter])


def together(found: list[Found]) -> Found:
    """Return what several look-ups that share one weight have in common.

    Raises:
        CheckpointError: PEFT has put adapters on some of them, or different ones.
    """
    first = found[0]
    for other in found[1:]:
        if list(map(_parameters_of, other.adapters)) != list(map(_parameters_of, first.adapters)):
            raise CheckpointError(
                f"{len(found)} look-ups and the head of this model share one weight, and PEFT has put adapters on some "
                f"of the look-ups: merged they would change all. Leave the look-ups out of PEFT's configuration, or "
                f"give each a weight of its own."
            )
    return first


def adds_them_itself(head: nn.Linear, place: Place, adapters: tuple[Adapter, ...]) -> bool:
    """Return whether the module that PEFT put on a tied head adds the table's adapters (`ensure_weight_tying=True`).

    Raises:
        CheckpointError: It adds others, which merging would write into the table.
    """
    wrapper: Any = place.module
    if wrapper is None or wrapper is head or not hasattr(wrapper, "base_layer"):
        return False
    if wrapper.disable_adapters or wrapper.merged:
        return False
    active = [each for each in wrapper.active_adapters if each in getattr(wrapper, "lora_A", ())]
    shared = {each.b.data_ptr() for each in adapters if isinstance(each, LowRank)}
    if active and all(wrapper.lora_A[each].weight.data_ptr() in shared for each in active):
        return True
    raise CheckpointError(
        f"PEFT has put {type(wrapper).__module__}.{type(wrapper).__name__} on the head {place.name!r}, which is tied "
        f"to the table: active it changes the logits alone, merged the look-ups too. Leave the head out with "
        f"exclude_modules=[{place.name!r}] and target the table, which adapts both; or give the model an untied head."
    )


def _parameters_of(adapter: Adapter) -> list[int]:
    return [part.data_ptr() for part in adapter if isinstance(part, Tensor)]


def changed_rows(adapter: Adapter, rows: Tensor, start: int, stop: int) -> Tensor:
    """Return rows `start` to `stop - 1` as an adapter changes them."""
    if isinstance(adapter, LowRank):
        return rows + (adapter.a[:, start:stop].T @ adapter.b.T * adapter.scaling).to(rows.dtype)
    index, values = _between(adapter, start, stop)
    return rows.index_copy(0, index, values.to(rows.dtype))


def changed_products(adapter: Adapter, products: Tensor, hidden: Tensor, start: int, stop: int) -> Tensor:
    """Return `hidden @ rows.T` for rows that an adapter changes: two narrow products are added, or columns replaced."""
    if isinstance(adapter, LowRank):
        narrow = hidden.to(adapter.b.dtype) @ adapter.b * adapter.scaling
        return products + (narrow @ adapter.a[:, start:stop]).to(products.dtype)
    index, values = _between(adapter, start, stop)
    return products.index_copy(-1, index, F.linear(hidden, values.to(hidden.dtype)).to(products.dtype))


def _between(adapter: Replaced, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Return where the replaced rows are among `start .. stop - 1`, and their values."""
    chosen = [number for number, token in enumerate(adapter.token_ids) if start <= token < stop]
    index = [adapter.token_ids[number] - start for number in chosen]
    return torch.tensor(index, dtype=torch.long, device=adapter.values.device), adapter.values[chosen]


class AdaptedRows(TokenTable):
    """The rows of a table as adapters change them at the moment, to be read by a head. It owns nothing.

    Args:
        adapted_table: Returns the table and its adapters.
    """

    padding_idx = None
    scale = None

    def __init__(self, adapted_table: Callable[[], Found]) -> None:
        super().__init__()
        self.adapted_table = adapted_table

    @property
    def table(self) -> TokenTable:
        """The table without adapters."""
        return cast(TokenTable, self.adapted_table().table)

    @property
    def vocab_size(self) -> int:  # type: ignore[override]
        """Tokens, V."""
        return self.table.vocab_size

    @property
    def num_rows(self) -> int:  # type: ignore[override]
        """Rows of the table, the spare ones among them."""
        return self.table.num_rows

    @property
    def embed_dim(self) -> int:  # type: ignore[override]
        """Width of a row, D."""
        return self.table.embed_dim

    def look_up(self, ids: Ids) -> Vectors:
        """Return the rows of `ids`, adapters included."""
        return F.embedding(ids, self.rows(0, self.num_rows))

    def rows(self, start: int, stop: int) -> Float[Tensor, "N D"]:
        """Rows `start` to `stop - 1`, adapters included."""
        rows = self.table.rows(start, stop)
        for adapter in self.adapted_table().adapters:
            rows = changed_rows(adapter, rows, start, stop)
        return rows

    def raw_logits(
        self, hidden: Float[Tensor, "*batch D"], start: int = 0, stop: int | None = None
    ) -> Float[Tensor, "*batch N"]:
        """`hidden @ rows(start, stop).T`, without the rows."""
        stop = self.vocab_size if stop is None else stop
        products = self.table.raw_logits(hidden, start, stop)
        for adapter in self.adapted_table().adapters:
            products = changed_products(adapter, products, hidden, start, stop)
        return products

    def check(self) -> None:
        """Let the table do that."""
        self.table.check()
