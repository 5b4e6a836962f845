"""What a model says next: one token after another, each read once."""

import math
from collections.abc import Callable, Collection, Iterator
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.errors import ShapeError, SizeError
from embedlayer.models.cache import KeyValueCache
from embedlayer.models.decoder import DecoderLM
from embedlayer.shapes import Ids


def generate(
    model: DecoderLM,
    ids: Ids,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_id: int | Collection[int] | None = None,
    generator: torch.Generator | None = None,
) -> Int[Tensor, "*batch S"]:
    """Continue `ids` token by token: the most likely one, or a sample from `softmax(logits / temperature)`.

    Keys and values are cached, so each token is read once; the result is that of reading everything anew. Dropout is
    off meanwhile.

    Args:
        model: What gives the logits.
        ids: How the texts begin, `(T,)` or `(B, T)`, without padding.
        max_new_tokens: Tokens to add at most.
        temperature: 0 takes the most likely token; above 0, higher is more random.
        top_k: Sample from the K most likely tokens.
        top_p: Sample from the most likely tokens whose probabilities together reach this (nucleus sampling).
        stop_id: A token, or several, that ends a text. It is part of the result.
        generator: Where random numbers come from; torch's own, which `torch.manual_seed` fixes, if `None`.

    Returns:
        The given tokens and the new ones. A text that ends before others in its batch is filled up with its last token.

    Raises:
        SizeError: An option is out of its range.
        PositionError: The text would be longer than the model's positions reach.
        TokenIdError: A given token is not in the table.
        ShapeError: `ids` are empty.

    Example:
        >>> generate(model, torch.tensor([1, 2, 3]), max_new_tokens=4).shape
        torch.Size([7])
    """
    following = next_tokens(
        model,
        torch.atleast_2d(ids),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop_id=stop_id,
        generator=generator,
    )
    parts = [torch.atleast_2d(ids), *(token.to(ids.dtype).unsqueeze(-1) for token in following)]
    return torch.cat(parts, dim=-1).view(*ids.shape[:-1], -1)


def next_tokens(
    model: DecoderLM,
    ids: Int[Tensor, "B T"],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_id: int | Collection[int] | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Int[Tensor, " B"]]:
    """The tokens that `generate` adds, as soon as each is known; it has the arguments and errors."""
    if not (math.isfinite(temperature) and temperature >= 0):
        raise SizeError(f"temperature must be 0 or a positive number, not {temperature}.")
    if top_k is not None and top_k < 1:
        raise SizeError(f"top_k must be at least 1, not {top_k}.")
    if top_p is not None and not 0 < top_p <= 1:
        raise SizeError(f"top_p must be above 0 and at most 1, not {top_p}.")
    if max_new_tokens < 0:
        raise SizeError(f"max_new_tokens must be at least 0, not {max_new_tokens}.")
    if ids.shape[-1] == 0:
        raise ShapeError(
            "An empty text cannot be continued: give at least one token, such as the one that begins texts."
        )
    stops = torch.tensor(sorted({stop_id} if isinstance(stop_id, int) else set(stop_id or ())), device=ids.device)
    choice = partial(choose, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
    return _decode(model, ids, max_new_tokens, choice, stops)


def _decode(
    model: DecoderLM,
    ids: Int[Tensor, "B T"],
    max_new_tokens: int,
    choice: Callable[[Tensor], Tensor],
    stops: Tensor,
) -> Iterator[Int[Tensor, " B"]]:
    cache = KeyValueCache()
    ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    for _ in range(max_new_tokens):
        chosen = choice(_last_logits(model, ids, cache))
        chosen = torch.where(ended, ids[:, -1], chosen)
        yield chosen
        ended = ended | torch.isin(chosen, stops)
        if len(stops) and bool(ended.all()):
            return
        ids = chosen.unsqueeze(-1)


@torch.no_grad()
def _last_logits(model: DecoderLM, ids: Int[Tensor, "B T"], cache: KeyValueCache) -> Float[Tensor, "B V"]:
    training = model.training
    model.eval()
    try:
        logits: Tensor = model.head(model.hidden(ids, cache=cache)[:, -1])
        model.check()
    finally:
        model.train(training)
    return logits


def choose(
    logits: Float[Tensor, "B V"],
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Int[Tensor, " B"]:
    """Return a token for each row: the most likely one, or a sample from `probabilities`."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    sampled, tokens = probabilities(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    drawn = torch.multinomial(sampled, 1, generator=generator)
    return tokens.gather(-1, drawn).squeeze(-1)


def probabilities(
    logits: Float[Tensor, "B V"], *, temperature: float, top_k: int | None = None, top_p: float | None = None
) -> tuple[Float[Tensor, "B K"], Int[Tensor, "B K"]]:
    """Return `softmax(logits / temperature)` of the tokens that are sampled from, most likely first, and their IDs.

    `top_k` keeps the K most likely tokens; of these `top_p` keeps each token if those before it have less than `top_p`
    of the probability, and sets the others to 0. The most likely token always stays.

    Reference: transformers' TemperatureLogitsWarper, TopKLogitsWarper and TopPLogitsWarper, in this order.
    """
    best, tokens = logits.float().topk(min(top_k or logits.shape[-1], logits.shape[-1]), dim=-1)
    kept = ((best - best[:, :1]) / temperature).softmax(dim=-1)
    if top_p is not None and top_p < 1:
        before = kept.cumsum(dim=-1) - kept
        kept = kept.where(before < top_p, 0.0)
        kept = kept / kept.sum(dim=-1, keepdim=True)
    return kept, tokens
