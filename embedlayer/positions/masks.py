"""The mask of causal attention: which keys a query attends to."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from embedlayer.core.documents import check_mask
from embedlayer.core.errors import SizeError


def causal_mask(
    queries: int,
    keys: int | None = None,
    *,
    documents: Int[Tensor, "*batch S"] | Bool[Tensor, "*batch S"] | None = None,
    window: int | None = None,
    device: torch.device | str | None = None,
) -> Bool[Tensor, "*rows T S"]:
    """Return which keys each query attends to, as `F.scaled_dot_product_attention(..., attn_mask=mask)` takes it.

    Query t is the token `i = S - T + t`. It attends to key j if `j <= i`, both are of one document, and
    `i - j < window`. Padding attends to itself only, so that no row of the softmax is empty.

    Args:
        queries: Number of new tokens, T.
        keys: Number of all tokens, S, of which the queries are the last: those in the cache and the new ones. `None`
            for T, which is no cache.
        documents: For each key 0 for padding, else the number of its document, `(B, S)` or `(S,)`: the
            `attention_mask` of `positions_of`. `None`: every row is one document without padding.
        window: Number of keys that a query attends to, itself included; `None` for all.
        device: Device of the result; `None` for that of `documents`, or torch's default.

    Returns:
        True where the query attends to the key: `(T, S)`, with documents `(B, 1, T, S)` or `(1, T, S)`, for all heads.

    Raises:
        ShapeError: `documents` are no mask of the keys; see `embedlayer.core.check_mask`.

    Example:
        >>> causal_mask(3, documents=torch.tensor([1, 1, 2]))[0].int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [0, 0, 1]], dtype=torch.int32)
        >>> causal_mask(1, 4, window=2).int()
        tensor([[0, 0, 1, 1]], dtype=torch.int32)
    """
    keys = queries if keys is None else keys
    if queries > keys:
        raise SizeError(f"The {queries} queries are the last of the keys, and there are {keys} keys.")
    if window is not None and window < 1:
        raise SizeError(f"A window is a number of keys, at least 1, the token itself, not {window}.")
    if documents is not None:
        check_mask(documents, (*documents.shape[:-1], keys), "documents")
        device = documents.device if device is None else device
    return allowed_keys(queries, keys, documents, window, device)


def allowed_keys(
    queries: int,
    keys: int,
    documents: Int[Tensor, "*batch S"] | Bool[Tensor, "*batch S"] | None,
    window: int | None,
    device: torch.device | str | None,
    places: Int[Tensor, " T"] | None = None,
) -> Bool[Tensor, "*rows T S"]:
    """Return the result of `causal_mask` for arguments that were checked, as a model checks them at its input."""
    if places is None:
        places = torch.arange(queries, device=device) + (keys - queries)
    key, query = torch.arange(keys, device=device), places.unsqueeze(-1)
    allowed = key <= query
    if window is not None:
        allowed = allowed & (key > query - window)
    if documents is None:
        return allowed
    of_queries = documents.index_select(-1, places).unsqueeze(-1)
    allowed = (allowed & (of_queries == documents.unsqueeze(-2)) & (of_queries != 0)) | (key == query)
    return allowed.unsqueeze(-3)
