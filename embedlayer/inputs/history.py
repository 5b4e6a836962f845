"""The last tokens of each text, which layers that look back a few tokens keep between calls in cached decoding."""

import torch
from jaxtyping import Int64
from torch import Tensor

from embedlayer.core.documents import AttentionMask, check_mask

DecodingState = dict[str, Tensor]
"""State of one batch in cached decoding: start with an empty dictionary, and pass it to each call of one layer."""


def documents_of(documents: AttentionMask | None, shape: torch.Size) -> Int64[Tensor, "B T"] | None:
    """Return a mask of padding and packed documents of tokens `(T,)` or `(B, T)` as int64; `None` for `None`."""
    if documents is None:
        return None
    check_mask(documents, shape, "documents", gaps=False)
    rows: Tensor = torch.atleast_2d(documents.to(torch.int64))
    return rows


def prepend_history(
    name: str, x: Tensor, documents: Int64[Tensor, "B T"] | None, state: DecodingState | None, *, length: int, fill: int
) -> tuple[Tensor, Int64[Tensor, "B S"] | None]:
    """Return tokens and their documents behind the last `length` tokens of the earlier calls, and update `state`."""
    batch, tokens, *rest = x.shape
    history = None if state is None else state.get(name)
    if history is None:
        history = x.new_full((batch, length, *rest), fill)
        numbers = torch.zeros(batch, length, dtype=torch.int64, device=x.device)
    else:
        assert state is not None
        numbers = state[f"{name}_documents"]
    x = torch.cat([history, x], dim=1)
    if documents is None and state is None:
        return x, None
    if documents is None:
        documents = numbers[:, -1:].clamp(min=1).expand(batch, tokens)
    documents = torch.cat([numbers, documents], dim=1)
    if state is not None:
        last = (documents != 0).to(torch.uint8).sort(dim=1, stable=True).indices[:, -length:]  # padding comes first
        state[f"{name}_documents"] = documents.gather(1, last)
        state[name] = x.gather(1, last.reshape(batch, length, *[1] * len(rest)).expand(batch, length, *rest))
    return x, documents
