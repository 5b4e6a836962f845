"""Generate text with a `DecoderLM`: greedy decoding or sampling, with cached keys and values."""

from collections.abc import Collection, Iterator
from typing import Any, Unpack

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from embedlayer.core.devices import device_kind
from embedlayer.core.documents import AttentionMask, check_mask
from embedlayer.core.errors import ShapeError, SizeError
from embedlayer.core.option_docs import show_options
from embedlayer.core.shapes import Ids
from embedlayer.kernels.index_check import check_indices
from embedlayer.models.cache import KeyValueCache
from embedlayer.models.decoder import DecoderLM
from embedlayer.models.sampling import Sampler, SamplingOptions


@show_options(SamplingOptions)
def generate(
    model: DecoderLM,
    ids: Ids,
    *,
    max_new_tokens: int,
    stop_id: int | Collection[int] | None = None,
    attention_mask: AttentionMask | None = None,
    **sampling: Unpack[SamplingOptions],
) -> Int[Tensor, "*batch S"]:
    """Continue `ids` token by token: the most likely token, or a sample from `softmax(logits / temperature)`.

    Keys and values are cached, so the model reads each token once. The result equals that of reading the whole text for
    every new token, except past the trained length of `DynamicNTKScaling` and `LongRopeScaling`; see `KeyValueCache`.
    Dropout is off during the call.

    On an accelerator the memory of all keys and values is allocated first (`KeyValueCache(max_seq_len)`). The call
    waits for the device once for the prompt, and then at most once a token: with `stop_id`, or if the text may become
    longer than the positions of the model.

    Args:
        model: The model that computes the logits.
        ids: First tokens of the texts, `(T,)` or `(B, T)`.
        max_new_tokens: Largest number of new tokens.
        stop_id: A token ID, or several, that ends a text. The result includes it. `None` for none.
        attention_mask: Of the shape of `ids`: 0 for padding, which is not read; 1 for text, or 1, 2, 3, ... for packed
            documents, of which the last one of a row is continued. `None` for one text without padding.
        **sampling: See `SamplingOptions`.

    Returns:
        The tokens in `ids`, padding included, and the new ones. A text that ends before others of its batch is filled
        with its last token. Pad at the left, so that the new tokens follow the text.

    Raises:
        SizeError: An option is out of its range.
        PositionError: The text becomes longer than the positions of the model allow.
        TokenIdError: An ID is outside the table.
        ShapeError: `ids` are no integers or have no token; `embedlayer.core.check_mask` refuses the mask; or a row of
            the mask has no text.
        TypeError: An option is unknown.

    Example:
        >>> generate(model, torch.tensor([1, 2, 3]), max_new_tokens=4).shape
        torch.Size([7])
    """
    batch = torch.atleast_2d(ids)
    mask = None if attention_mask is None else torch.atleast_2d(attention_mask)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop_id": stop_id, "attention_mask": mask}
    new = next_tokens(model, batch, **options, **sampling)
    return torch.cat([batch, *(token.to(ids.dtype).unsqueeze(-1) for token in new)], dim=-1).view(*ids.shape[:-1], -1)


def next_tokens(
    model: DecoderLM,
    ids: Int[Tensor, "B T"],
    *,
    max_new_tokens: int,
    stop_id: int | Collection[int] | None = None,
    attention_mask: AttentionMask | None = None,
    **sampling: Unpack[SamplingOptions],
) -> Iterator[Int[Tensor, " B"]]:
    """Yield the new token of each text, `(B,)`, as soon as it is computed.

    The arguments, errors and tokens are those of `generate`, but `ids` are `(B, T)`. A text that has ended repeats its
    last token until all have ended. A wrong option or mask is an error at the call, and a bad ID when the first token
    is requested; on an accelerator there a mask with a row of padding alone too.
    """
    sampler = Sampler.of(sampling, "generate")
    if max_new_tokens < 0:
        raise SizeError(f"max_new_tokens must be at least 0, not {max_new_tokens}.")
    if ids.shape[-1] == 0:
        raise ShapeError("An empty text cannot be continued: pass at least one token, such as the token <s>.")
    stops = sorted({stop_id} if isinstance(stop_id, int) else set(stop_id or ()))
    if attention_mask is not None:
        check_mask(attention_mask, ids.shape)
        if device_kind(attention_mask) == "cpu":
            _require_text(bool(_is_without_text(attention_mask)))
    return _decode(model, ids, attention_mask, max_new_tokens, sampler, stops)


def _is_without_text(attention_mask: AttentionMask) -> Bool[Tensor, ""]:
    """Return whether a row of a mask is padding alone."""
    return (attention_mask == 0).all(-1).any()


def _require_text(is_without_text: bool) -> None:
    """Raise the error of a mask with a row of padding alone."""
    if is_without_text:
        raise ShapeError("A text of padding alone cannot be continued: its mask needs at least one token.")


def _decode(
    model: DecoderLM,
    ids: Int[Tensor, "B T"],
    attention_mask: AttentionMask | None,
    max_new_tokens: int,
    sampler: Sampler,
    stops: list[int],
) -> Iterator[Int[Tensor, " B"]]:
    """Yield the next token of each text, `(B,)`, until all texts have ended or there are `max_new_tokens` new ones.

    A text that has ended repeats its last token. `stops` are the IDs of the tokens that end a text.

    An accelerator waits once for the prompt, to check its IDs and its mask, and once a token if there are `stops`, or
    if positions may run out. Tokens that the model has chosen need no check.
    """
    length, reach, unread = ids.shape[-1], model.position.max_seq_len, ids
    cache = KeyValueCache(length + max_new_tokens - 1 if device_kind(ids) != "cpu" and max_new_tokens else None)
    ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    last: Tensor | None = None  # place of the last token of each text, if it is not the last of all
    checks: list[Tensor] = []
    if attention_mask is not None:
        checks.append(_is_without_text(attention_mask))
        is_text = attention_mask != 0
        last = torch.where(is_text, torch.arange(ids.shape[-1], device=ids.device), 0).amax(-1, keepdim=True)
        ids = torch.where(is_text, ids, ids.gather(-1, last))  # padding is no token that a text repeats
    for number in range(max_new_tokens):
        logits = _logits_after(model, unread, last, attention_mask, cache)
        tokens = torch.where(ended, ids[:, -1], sampler.next_tokens(logits, ids))
        for stop in stops:
            ended = ended | (tokens == stop)
        all_ended = False
        if number == 0 or (reach is not None and length + number > reach):
            all_ended, *faults = check_indices(model, ended.all(), *checks)
            _require_text(any(faults))
        elif stops:
            all_ended = bool(ended.all())
        yield tokens
        if stops and all_ended:
            return
        last, attention_mask, unread = None, None, tokens.unsqueeze(-1)  # it continues its text
        ids = unread if sampler.repetition_penalty is None else torch.cat([ids, unread], dim=-1)


@torch.no_grad()
def _logits_after(
    model: DecoderLM,
    ids: Int[Tensor, "B T"],
    last: Int[Tensor, "B 1"] | None,
    attention_mask: AttentionMask | None,
    cache: KeyValueCache,
) -> Float[Tensor, "B V"]:
    """Return the logits of the token that follows each text, computed in evaluation mode without gradients.

    Afterwards all modules of the model are in the mode that the model itself had. `last` is the place in `ids`, the new
    tokens, of the last one of each text; `None` if these are in the last column. `cache` has the tokens before, and
    gains the keys and values of `ids`. Tokens that continue a cached text have no mask.
    """
    training = model.training
    model.eval()
    try:
        hidden = model.hidden(ids, attention_mask=attention_mask, cache=cache)
        if last is not None:
            hidden = hidden.gather(1, last.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
        logits: Tensor = model.head(hidden[:, -1])
    finally:
        model.train(training)
    return logits
