"""Generate text with a `DecoderLM`: greedy decoding or sampling, with cached keys and values."""

from collections.abc import Collection, Iterator
from typing import Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.errors import ShapeError, SizeError
from embedlayer.models.cache import KeyValueCache
from embedlayer.models.decoder import DecoderLM
from embedlayer.models.sampling import Sampler, SamplingOptions
from embedlayer.option_docs import show_options
from embedlayer.shapes import Ids


@show_options(SamplingOptions)
def generate(
    model: DecoderLM,
    ids: Ids,
    *,
    max_new_tokens: int,
    stop_id: int | Collection[int] | None = None,
    **sampling: Unpack[SamplingOptions],
) -> Int[Tensor, "*batch S"]:
    """Continue `ids` token by token: the most likely token, or a sample from `softmax(logits / temperature)`.

    Keys and values are cached, so the model reads each token once. The result equals that of reading the whole text for
    every new token. Dropout is off during the call.

    Args:
        model: The model that computes the logits.
        ids: First tokens of the texts, `(T,)` or `(B, T)`, without padding.
        max_new_tokens: Largest number of new tokens.
        stop_id: A token ID, or several, that ends a text. The result includes it.
        **sampling: See `SamplingOptions`.

    Returns:
        The tokens in `ids` and the new ones. A text that ends before others of its batch is filled with its last token.

    Raises:
        SizeError: An option is out of its range.
        PositionError: The text becomes longer than the positions of the model allow.
        TokenIdError: An ID is outside the table.
        ShapeError: `ids` has no token.
        TypeError: An option is unknown.

    Example:
        >>> generate(model, torch.tensor([1, 2, 3]), max_new_tokens=4).shape
        torch.Size([7])
    """
    batch = torch.atleast_2d(ids)
    new = next_tokens(model, batch, max_new_tokens=max_new_tokens, stop_id=stop_id, **sampling)
    return torch.cat([batch, *(token.to(ids.dtype).unsqueeze(-1) for token in new)], dim=-1).view(*ids.shape[:-1], -1)


def next_tokens(
    model: DecoderLM,
    ids: Int[Tensor, "B T"],
    *,
    max_new_tokens: int,
    stop_id: int | Collection[int] | None = None,
    **sampling: Unpack[SamplingOptions],
) -> Iterator[Int[Tensor, " B"]]:
    """Yield the new token of each text, `(B,)`, as soon as it is computed.

    The arguments, errors and tokens are those of `generate`.
    """
    sampler = Sampler(**sampling)
    if max_new_tokens < 0:
        raise SizeError(f"max_new_tokens must be at least 0, not {max_new_tokens}.")
    if ids.shape[-1] == 0:
        raise ShapeError("An empty text cannot be continued: pass at least one token, such as the token <s>.")
    stops = torch.tensor(sorted({stop_id} if isinstance(stop_id, int) else set(stop_id or ())), device=ids.device)
    return _decode(model, ids, max_new_tokens, sampler, stops)


def _decode(
    model: DecoderLM, ids: Int[Tensor, "B T"], max_new_tokens: int, sampler: Sampler, stops: Tensor
) -> Iterator[Int[Tensor, " B"]]:
    """Yield the next token of each text, `(B,)`, until all texts have ended or there are `max_new_tokens` new ones.

    A text that has ended repeats its last token.

    Args:
        model: The model that computes the logits.
        ids: First tokens of the texts, at least one each.
        max_new_tokens: Largest number of new tokens.
        sampler: Chooses the tokens.
        stops: IDs of the tokens that end a text; empty for none.
    """
    cache = KeyValueCache()
    unread = ids
    ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    for _ in range(max_new_tokens):
        tokens = torch.where(ended, ids[:, -1], sampler.next_tokens(_last_logits(model, unread, cache), ids))
        yield tokens
        ended = ended | torch.isin(tokens, stops)
        if len(stops) and bool(ended.all()):
            return
        unread = tokens.unsqueeze(-1)
        ids = torch.cat([ids, unread], dim=-1)


@torch.no_grad()
def _last_logits(model: DecoderLM, ids: Int[Tensor, "B T"], cache: KeyValueCache) -> Float[Tensor, "B V"]:
    """Return the logits of the token that follows `ids`, computed in evaluation mode without gradients.

    The model is back in its mode afterwards. `cache` gains the keys and values of `ids`.
    """
    training = model.training
    model.eval()
    try:
        logits: Tensor = model.head(model.hidden(ids, cache=cache)[:, -1])
        model.check()
    finally:
        model.train(training)
    return logits
