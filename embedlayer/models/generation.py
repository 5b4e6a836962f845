"""Generate text with a `DecoderLM`: greedy decoding or sampling, with cached keys and values."""

import math
from collections.abc import Collection, Iterator
from typing import Any, Literal, NamedTuple, Unpack, cast, get_args, overload

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from embedlayer.core.devices import device_kind
from embedlayer.core.documents import AttentionMask, check_mask
from embedlayer.core.errors import CheckpointError, ShapeError, SizeError
from embedlayer.core.option_docs import show_options
from embedlayer.core.shapes import Ids
from embedlayer.kernels.index_check import check_indices
from embedlayer.losses.options import LogitOptions, LossSettings, check_options
from embedlayer.losses.statistics import token_statistics_of
from embedlayer.models.cache import KeyValueCache
from embedlayer.models.causal import evaluating
from embedlayer.models.decoder import DecoderLM
from embedlayer.models.sampling import Sampler, SamplingOptions, not_finite
from embedlayer.positions.rotary.embedding import RotaryEmbedding

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
"""Of which distribution log-probabilities of new tokens are: that of the logits, or the one that is sampled from."""


class GenerationOptions(SamplingOptions, total=False):
    """Options of `generate` and `next_tokens`: `SamplingOptions`, how logits are computed, and which log-probabilities.

    Attributes:
        logprobs_mode: `"raw_logprobs"`, the default, for what `model.head.token_statistics` returns for the new token
            and the hidden state before it. `"processed_logprobs"` for the distribution that is sampled from: with a
            temperature alone `token_statistics(temperature=...)`, else the softmax of the logits after repetition
            penalty, temperature, top-k, top-p and min-p. Temperature 0 counts as 1 without filters there.
        head_dtype: See `LogitOptions`; `None` for that of the model's head.
        batch_invariant: See `LogitOptions`; `None` for that of the model's head. If it is true, logits and
            log-probabilities are those of a pass over the finished text to the bit, for equal hidden states. It does
            not act on the blocks of the model, nor on samples: those of a batch share one sequence of random numbers.
    """

    logprobs_mode: LogprobsMode
    head_dtype: torch.dtype | str | None
    batch_invariant: bool | None


class GeneratedTokens(NamedTuple):
    """Hold tokens that a model has generated, with their log-probabilities.

    N is the number of tokens that were added to each text. In `next_tokens` all three have the shape `(B,)`.

    Attributes:
        ids: The tokens of the texts and the new ones, `(..., T + N)`; in `next_tokens` the new one of each text.
        log_probs: Log-probability of each new token, in nats, `(..., N)`; 0 where `mask` is `False`.
        mask: Whether a new token belongs to its text, `(..., N)`; `False` where the last token of a text that has ended
            is repeated until all have.
    """

    ids: Int[Tensor, "*batch S"]
    log_probs: Float[Tensor, "*batch N"]
    mask: Bool[Tensor, "*batch N"]


@overload
def generate(
    model: DecoderLM,
    ids: Ids,
    *,
    max_new_tokens: int,
    stop_id: int | Collection[int] | None = None,
    attention_mask: AttentionMask | None = None,
    return_log_probs: Literal[False] = False,
    **options: Unpack[GenerationOptions],
) -> Int[Tensor, "*batch S"]: ...


@overload
def generate(
    model: DecoderLM,
    ids: Ids,
    *,
    max_new_tokens: int,
    stop_id: int | Collection[int] | None = None,
    attention_mask: AttentionMask | None = None,
    return_log_probs: Literal[True],
    **options: Unpack[GenerationOptions],
) -> GeneratedTokens: ...


@show_options(SamplingOptions, GenerationOptions)
def generate(
    model: DecoderLM,
    ids: Ids,
    *,
    max_new_tokens: int,
    stop_id: int | Collection[int] | None = None,
    attention_mask: AttentionMask | None = None,
    return_log_probs: bool = False,
    **options: Unpack[GenerationOptions],
) -> Int[Tensor, "*batch S"] | GeneratedTokens:
    """Continue `ids` token by token: the most likely token, or a sample from `softmax(logits / temperature)`.

    Keys and values are cached, so the model reads each token once. The result equals that of reading the whole text for
    every new token. Past the trained length of `DynamicNTKScaling` the model does read it for every token, and with
    `LongRopeScaling` once, because the frequencies change; see `KeyValueCache`. Dropout is off during the call.

    On an accelerator the memory of all keys and values is allocated first (`KeyValueCache(max_seq_len)`), unless the
    frequencies depend on the length. The call waits for the device once for the prompt, and then at most once a token:
    with `stop_id`, or if the text may become longer than the positions of the model; otherwise once at the end. Where
    the frequencies depend on the length, it also waits for each length.

    Args:
        model: The model that computes the logits.
        ids: First tokens of the texts, `(T,)` or `(B, T)`.
        max_new_tokens: Largest number of new tokens.
        stop_id: A token ID, or several, that ends a text. The result includes it. `None` for none.
        attention_mask: Of the shape of `ids`: 0 for padding, which is not read; 1 for text, or 1, 2, 3, ... for packed
            documents, of which the last one of a row is continued. `None` for one text without padding.
        return_log_probs: Whether to return `GeneratedTokens`, with the log-probability of each new token. They need a
            second pass over the rows of the head for each token, except those of filtered logits.
        **options: See `GenerationOptions`.

    Returns:
        The tokens in `ids`, padding included, and the new ones. A text that ends before others of its batch is filled
        with its last token. Pad at the left, so that the new tokens follow the text. With `return_log_probs`, the
        `GeneratedTokens`.

    Raises:
        ShapeError: `ids` are no integers or have no token; `embedlayer.core.check_mask` refuses the mask; or a row of
            the mask has no text.
        PositionError: The text becomes longer than the positions of the model allow.
        TokenIdError: An ID is outside the table.
        CheckpointError: The largest logit of a token is NaN or infinite: the model has weights that are not finite.
        TypeError: An option is unknown.

    Example:
        >>> generate(model, torch.tensor([1, 2, 3]), max_new_tokens=4).shape
        torch.Size([7])
        >>> generate(model, torch.tensor([1, 2, 3]), max_new_tokens=4, return_log_probs=True).log_probs.shape
        torch.Size([4])
    """
    batch = torch.atleast_2d(ids)
    mask = None if attention_mask is None else torch.atleast_2d(attention_mask)
    call: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop_id": stop_id, "attention_mask": mask, **options}
    empty = batch.new_empty(len(batch), 0)
    parts = [[batch], [empty.float()], [empty.bool()]]
    if return_log_probs:
        for new in next_tokens(model, batch, return_log_probs=True, **call):
            for part, column in zip(parts, new, strict=True):
                part.append(column.unsqueeze(-1))
    else:
        parts[0] += [tokens.unsqueeze(-1) for tokens in next_tokens(model, batch, **call)]
    joined = GeneratedTokens(*(torch.cat(part, dim=-1).view(*ids.shape[:-1], -1) for part in parts))
    generated = joined._replace(ids=joined.ids.to(ids.dtype))
    return generated if return_log_probs else generated.ids


@overload
def next_tokens(
    model: DecoderLM,
    ids: Int[Tensor, "B T"],
    *,
    max_new_tokens: int,
    stop_id: int | Collection[int] | None = None,
    attention_mask: AttentionMask | None = None,
    return_log_probs: Literal[False] = False,
    **options: Unpack[GenerationOptions],
) -> Iterator[Int[Tensor, " B"]]: ...


@overload
def next_tokens(
    model: DecoderLM,
    ids: Int[Tensor, "B T"],
    *,
    max_new_tokens: int,
    stop_id: int | Collection[int] | None = None,
    attention_mask: AttentionMask | None = None,
    return_log_probs: Literal[True],
    **options: Unpack[GenerationOptions],
) -> Iterator[GeneratedTokens]: ...


def next_tokens(
    model: DecoderLM,
    ids: Int[Tensor, "B T"],
    *,
    max_new_tokens: int,
    stop_id: int | Collection[int] | None = None,
    attention_mask: AttentionMask | None = None,
    return_log_probs: bool = False,
    **options: Unpack[GenerationOptions],
) -> Iterator[Int[Tensor, " B"]] | Iterator[GeneratedTokens]:
    """Yield the new token of each text, `(B,)`, as soon as it is computed; or `GeneratedTokens` of it.

    The arguments, errors and tokens are those of `generate`, but `ids` are `(B, T)`. A text that has ended repeats its
    last token until all have ended. A wrong option or mask is an error at the call, and a bad ID when the first token
    is requested; on an accelerator there a mask with a row of padding alone too.
    """
    sampling: dict[str, Any] = dict(options)
    if "logprobs_mode" in sampling and not return_log_probs:
        raise SizeError("logprobs_mode says which log-probabilities are returned: pass return_log_probs=True too.")
    mode = sampling.pop("logprobs_mode", "raw_logprobs")
    if mode not in get_args(LogprobsMode):
        raise SizeError(f"logprobs_mode must be one of {', '.join(get_args(LogprobsMode))}, not {mode!r}.")
    passed = {name: sampling.pop(name, None) for name in ("head_dtype", "batch_invariant")}
    of_logits = {name: value for name, value in passed.items() if value is not None}
    check_options(of_logits, LogitOptions, "generate")
    sampler = Sampler(**sampling)
    if max_new_tokens < 0:
        raise SizeError(f"max_new_tokens must be at least 0, not {max_new_tokens}.")
    stops = sorted({stop_id} if isinstance(stop_id, int) else set(stop_id or ()))
    if attention_mask is not None:
        check_mask(attention_mask, ids.shape)
        if device_kind(attention_mask) == "cpu":
            _require_text(bool((attention_mask == 0).all(-1).any()))
    settings = _Settings(sampler, cast(LogitOptions, of_logits), mode if return_log_probs else None)
    new = _decode(model, ids, attention_mask, max_new_tokens, settings, stops)
    if not return_log_probs:
        return (tokens for tokens, *_ in new)
    return (
        GeneratedTokens(tokens, cast(Tensor, log_probs).masked_fill(ended, 0), ~ended)
        for tokens, log_probs, ended in new
    )


class _Settings(NamedTuple):
    """How the token that follows a text is chosen."""

    sampler: Sampler
    of_logits: LogitOptions  # options of the logits that replace those of the head
    logprobs_mode: LogprobsMode | None  # `None`: no log-probabilities

    @torch.no_grad()
    def choose(
        self,
        model: DecoderLM,
        unread: Int[Tensor, "B S"],
        last: Int[Tensor, "B 1"] | None,
        attention_mask: AttentionMask | None,
        cache: KeyValueCache,
        ids: Int[Tensor, "B T"],
    ) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"], Float[Tensor, " B"] | None]:
        """Return the token after each text, the largest logit there, and the log-probability of the token.

        `unread` are the tokens that the model has not read, and `last` the place of the last one of each text there;
        `None` if that is the last column. `cache` has the tokens before, and gains the keys and values of `unread`.
        `ids` are all tokens of each text, as far as the sampler reads them. The model runs in evaluation mode.
        """
        with evaluating(model):
            states = model.hidden(unread, attention_mask=attention_mask, cache=cache)
            if last is not None:
                states = states.gather(1, last.unsqueeze(-1).expand(-1, -1, states.shape[-1]))
            head, hidden = model.head, states[:, -1]
            logits = head.uncomputed_logits(hidden, **self.of_logits).head_logits() if self.of_logits else head(hidden)
        processed, is_raw = self.sampler.processed_logits(logits, ids), self.logprobs_mode == "raw_logprobs"
        tokens, largest = self.sampler.sampled(processed)
        if self.logprobs_mode is None:
            return tokens, largest, None
        if not is_raw and not self.sampler.only_divides:
            return tokens, largest, processed.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        temperature = 1.0 if is_raw else self.sampler.divisor
        uncomputed = head.uncomputed_logits(hidden, **self.of_logits).divided_by(temperature)
        # nothing is dropped, so that an accelerator does not wait to count
        loss = LossSettings(drop_ignored=False)
        log_probs = token_statistics_of(uncomputed, tokens, loss, statistics=("log_probs",)).log_probs
        return tokens, largest, log_probs


def _require_text(is_without_text: bool) -> None:
    """Raise the error of a mask with a row of padding alone."""
    if is_without_text:
        raise ShapeError("A text of padding alone cannot be continued: its mask needs at least one token.")


def _decode(
    model: DecoderLM,
    ids: Int[Tensor, "B T"],
    attention_mask: AttentionMask | None,
    max_new_tokens: int,
    settings: _Settings,
    stops: list[int],
) -> Iterator[tuple[Int[Tensor, " B"], Float[Tensor, " B"] | None, Bool[Tensor, " B"]]]:
    """Yield the next token of each text, `(B,)`, until all texts have ended or there are `max_new_tokens` new ones.

    With it come its log-probability, if that is requested, and whether the text had ended before; a text that has ended
    repeats its last token. `stops` are the IDs of the tokens that end a text.

    An accelerator waits once for the prompt, to check its IDs and mask, and once per token if there are `stops` or if
    positions may run out. Each wait checks the logits since the last one.
    """
    length, reach, unread = ids.shape[-1], model.position.max_seq_len, ids
    position = model.position
    grows = device_kind(ids) == "cpu" or (isinstance(position, RotaryEmbedding) and position.depends_on_length)
    cache = KeyValueCache(None if grows or not max_new_tokens else length + max_new_tokens - 1)
    ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    last: Tensor | None = None  # place of the last token of each text, if it is not the last of all
    checks: list[Tensor] = []
    unchecked: list[tuple[Tensor, Tensor]] = []  # of new tokens: largest logit, and which texts had ended before
    if attention_mask is not None:
        is_text = attention_mask != 0
        checks.append(~is_text.any(-1).all())
        last = torch.where(is_text, torch.arange(ids.shape[-1], device=ids.device), 0).amax(-1, keepdim=True)
        ids = torch.where(is_text, ids, ids.gather(-1, last))  # padding is no token that a text repeats
    for number in range(max_new_tokens):
        tokens, logit, log_probs = settings.choose(model, unread, last, attention_mask, cache, ids)
        tokens, had_ended = torch.where(ended, ids[:, -1], tokens), ended
        unchecked.append((logit, had_ended))
        for stop in stops:
            ended = ended | (tokens == stop)
        all_ended, reads_logits = False, device_kind(ids) == "cpu"
        is_checked = number == 0 or (reach is not None and length + number > reach)
        if is_checked:
            all_ended, is_undefined, *faults = check_indices(model, ended.all(), not_finite(logit).any(), *checks)
            _require_text(any(faults))
            reads_logits |= is_undefined
            if number == 0 and not is_undefined:
                unchecked.clear()
        if unchecked and (reads_logits or (stops and not is_checked)):
            all_ended = _check_logits(unchecked, ended, number)
        yield tokens, log_probs, had_ended
        if stops and all_ended:
            break
        last, attention_mask, unread = None, None, tokens.unsqueeze(-1)  # it continues its text
        ids = unread if settings.sampler.repetition_penalty is None else torch.cat([ids, unread], dim=-1)
    if unchecked:
        _check_logits(unchecked, ended, number)


def _check_logits(unchecked: list[tuple[Tensor, Tensor]], ended: Bool[Tensor, " B"], number: int) -> bool:
    """Wait for the device, and return whether all texts have ended; a logit that is not finite is an error.

    `unchecked` has the largest logits of the new tokens up to `number`, and is cleared. Texts that had ended before do
    not count.
    """
    logits, had_ended = zip(*unchecked, strict=True)
    *rows, last = torch.cat([*logits, *had_ended, ended]).view(-1, len(ended)).tolist()
    for place in range(len(unchecked)):
        for text, (logit, has_ended) in enumerate(zip(rows[place], rows[len(unchecked) + place], strict=True)):
            if not (has_ended or math.isfinite(logit)):
                new = number + 1 - len(unchecked) + place
                raise CheckpointError(
                    f"The largest logit of new token {new} of text {text} is {logit}: none can be chosen."
                )
    unchecked.clear()
    return all(last)
