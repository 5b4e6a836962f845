"""Generate text with a `DecoderLM`: greedy decoding or sampling, with cached keys and values."""

import math
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import TypedDict, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.errors import ShapeError, SizeError
from embedlayer.models.cache import KeyValueCache
from embedlayer.models.decoder import DecoderLM
from embedlayer.shapes import Ids


class SamplingOptions(TypedDict, total=False):
    """Options of `generate` and `next_tokens` that choose a token from logits.

    Attributes:
        temperature: 0, the default, selects the most likely token; above 0, higher is more random.
        top_k: Sample from the K most likely tokens; `None` for all.
        top_p: Sample from the most likely tokens that together reach this probability (nucleus sampling); `None` for
            all.
        generator: Random number generator; `None` for torch's own, which `torch.manual_seed` seeds.
    """

    temperature: float
    top_k: int | None
    top_p: float | None
    generator: torch.Generator | None


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
        **sampling: `temperature`, `top_k`, `top_p`, `generator`; see `SamplingOptions`.

    Returns:
        The tokens in `ids` and the new ones. A text that ends before others of its batch is filled with its last token.

    Raises:
        SizeError: An option is out of its range.
        PositionError: The text becomes longer than the positions of the model allow.
        TokenIdError: An ID is outside the table.
        ShapeError: `ids` has no token.

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
    temperature, top_k, top_p = sampling.get("temperature", 0.0), sampling.get("top_k"), sampling.get("top_p")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise SizeError(f"temperature must be 0 or a positive number, not {temperature}.")
    if top_k is not None and top_k < 1:
        raise SizeError(f"top_k must be at least 1, not {top_k}.")
    if top_p is not None and not 0 < top_p <= 1:
        raise SizeError(f"top_p must be above 0 and at most 1, not {top_p}.")
    if max_new_tokens < 0:
        raise SizeError(f"max_new_tokens must be at least 0, not {max_new_tokens}.")
    if ids.shape[-1] == 0:
        raise ShapeError("An empty text cannot be continued: pass at least one token, such as the token <s>.")
    stops = torch.tensor(sorted({stop_id} if isinstance(stop_id, int) else set(stop_id or ())), device=ids.device)
    return _decode(model, ids, max_new_tokens, partial(sample_tokens, **sampling), stops)


def _decode(
    model: DecoderLM, ids: Int[Tensor, "B T"], max_new_tokens: int, sample: Callable[[Tensor], Tensor], stops: Tensor
) -> Iterator[Int[Tensor, " B"]]:
    """Yield the next token of each text, `(B,)`, until all texts have ended or there are `max_new_tokens` new ones.

    A text that has ended repeats its last token.

    Args:
        model: The model that computes the logits.
        ids: First tokens of the texts, at least one each.
        max_new_tokens: Largest number of new tokens.
        sample: Function from logits `(B, V)` to one token ID per row.
        stops: IDs of the tokens that end a text; empty for none.
    """
    cache = KeyValueCache()
    ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    for _ in range(max_new_tokens):
        tokens = torch.where(ended, ids[:, -1], sample(_last_logits(model, ids, cache)))
        yield tokens
        ended = ended | torch.isin(tokens, stops)
        if len(stops) and bool(ended.all()):
            return
        ids = tokens.unsqueeze(-1)


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


def sample_tokens(
    logits: Float[Tensor, "B V"],
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Int[Tensor, " B"]:
    """Return one token ID per row of `logits`: the most likely one at temperature 0, else a random sample.

    The arguments are those of `SamplingOptions`.
    """
    if temperature == 0:
        return logits.argmax(dim=-1)
    probabilities, tokens = sampling_probabilities(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    drawn = torch.multinomial(probabilities, 1, generator=generator)
    return tokens.gather(-1, drawn).squeeze(-1)


def sampling_probabilities(
    logits: Float[Tensor, "B V"], *, temperature: float, top_k: int | None = None, top_p: float | None = None
) -> tuple[Float[Tensor, "B K"], Int[Tensor, "B K"]]:
    """Return (probabilities, token IDs) from which `sample_tokens` samples, most likely token first.

    The probabilities are `softmax(logits / temperature)` over the K most likely tokens; K is `top_k`, or V for `None`.
    `top_p` then sets the probability of a token to 0 if the tokens before it already reach `top_p`, and rescales the
    others. The most likely token always stays.

    Reference: transformers' TemperatureLogitsWarper, TopKLogitsWarper and TopPLogitsWarper, in this order.
    """
    best, tokens = logits.float().topk(min(top_k or logits.shape[-1], logits.shape[-1]), dim=-1)
    kept = ((best - best[:, :1]) / temperature).softmax(dim=-1)
    if top_p is not None and top_p < 1:
        before = kept.cumsum(dim=-1) - kept
        kept = kept.where(before < top_p, 0.0)
        kept = kept / kept.sum(dim=-1, keepdim=True)
    return kept, tokens
