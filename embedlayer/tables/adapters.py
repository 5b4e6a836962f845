"""Adapters of PEFT on the rows of a table: what they are, and how rows, looked-up vectors and logits change.

Adapters on modules of a live model (`heads.peft`) and adapters in files (`tables.adapter_files`) are the same records.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


class LoraAdapter(NamedTuple):
    """Hold LoRA matrices of a table of V rows of width D, with which the rows become `rows + (b @ a).T * scaling`.

    Attributes:
        a: Matrix `(r, V)`, where r is the rank of the adapter.
        b: Matrix `(D, r)`.
        scaling: Factor of the product.
    """

    a: Float[Tensor, "R V"]
    b: Float[Tensor, "D R"]
    scaling: float


class TrainableTokens(NamedTuple):
    """Hold trained rows, which replace the rows of the same tokens in a table.

    Attributes:
        token_ids: IDs of the N tokens.
        values: Their trained rows, `(N, D)`, in the same order.
    """

    token_ids: list[int]
    values: Float[Tensor, "N D"]


Adapter = LoraAdapter | TrainableTokens


def adapt_rows(adapter: Adapter, rows: Tensor, start: int, stop: int) -> Tensor:
    """Return rows `start` to `stop - 1` of a table, `(stop - start, D)`, with an adapter applied, as a new tensor."""
    if isinstance(adapter, LoraAdapter):
        dtype = torch.promote_types(rows.dtype, adapter.b.dtype)
        added = adapter.a[:, start:stop].T.to(dtype) @ adapter.b.T.to(dtype) * adapter.scaling
        return rows + added.to(rows.device, rows.dtype)
    index, values = _trained_between(adapter, start, stop)
    return rows.index_copy(0, index.to(rows.device), values.to(rows.device, rows.dtype))


def adapt_vectors(adapter: Adapter, vectors: Tensor, ids: Tensor) -> Tensor:
    """Return looked-up rows, `(..., D)` for IDs `(...)`, with an adapter applied, as a new tensor."""
    if isinstance(adapter, LoraAdapter):
        dtype = torch.promote_types(vectors.dtype, adapter.b.dtype)
        added = F.embedding(ids, adapter.a.T).to(dtype) @ adapter.b.T.to(dtype) * adapter.scaling
        return vectors + added.to(vectors.dtype)
    tokens, order = torch.tensor(adapter.token_ids, dtype=torch.long, device=ids.device).sort()
    places = torch.searchsorted(tokens, ids.long().contiguous()).clamp(max=len(tokens) - 1)
    trained = F.embedding(order[places], adapter.values).to(vectors.dtype)
    return torch.where((tokens[places] == ids).unsqueeze(-1), trained, vectors)


def adapt_products(adapter: Adapter, products: Tensor, hidden: Tensor, start: int, stop: int) -> Tensor:
    """Return `hidden @ adapted_rows.T`, computed from the products with the unadapted rows, as a new tensor.

    For LoRA two products with the narrow matrices are added. For trained tokens their columns are replaced. `products`
    is `hidden @ rows.T` for the unadapted rows `start` to `stop - 1`, and `hidden` is `(..., D)`.
    """
    if isinstance(adapter, LoraAdapter):
        dtype = torch.promote_types(hidden.dtype, adapter.b.dtype)
        narrow = hidden.to(dtype) @ adapter.b.to(dtype) * adapter.scaling
        return products + (narrow @ adapter.a[:, start:stop].to(dtype)).to(products.dtype)
    index, values = _trained_between(adapter, start, stop)
    return products.index_copy(-1, index, F.linear(hidden, values.to(hidden.dtype)).to(products.dtype))


def _trained_between(adapter: TrainableTokens, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Return the IDs, minus `start`, and the rows, `(N, D)`, of the trained tokens among `start` to `stop - 1`."""
    chosen = [number for number, token in enumerate(adapter.token_ids) if start <= token < stop]
    index = [adapter.token_ids[number] - start for number in chosen]
    return torch.tensor(index, dtype=torch.long, device=adapter.values.device), adapter.values[chosen]
