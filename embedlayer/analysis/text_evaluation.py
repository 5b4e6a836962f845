"""Evaluate causal language models on a text: bits per byte, divergence of two models, losses by token and position.

Logits are computed and dropped in blocks, so tokens x V of them are never in memory. The text is read in overlapping
windows. Each token is predicted once, so each byte counts once.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from embedlayer.checkpoints.reader import Checkpoint
from embedlayer.core.documents import IGNORED
from embedlayer.core.errors import CheckpointError, SizeError, TextError
from embedlayer.core.formatting import short_repr
from embedlayer.data.text_chunks import encode_chunks, read_text_chunks, split_text
from embedlayer.families.records import POSITION_KEYS
from embedlayer.losses.divergences import divergence
from embedlayer.losses.statistics import token_statistics_of
from embedlayer.losses.uncomputed_logits import LinearLogits
from embedlayer.models.causal import causal_logits, check_causal, evaluating, longest_sequence
from embedlayer.models.decoder import DecoderLM
from embedlayer.opening.opened_model import OpenedModel
from embedlayer.opening.path_kinds import PathKind, path_kind
from embedlayer.tokenization.bytes import token_text
from embedlayer.tokenization.ids import unknown_id
from embedlayer.tokenization.tokenizer_calls import as_tokenizer, encode, pure_tokenizer
from embedlayer.tokenization.train import raise_if_path

WINDOW, UNKNOWN_WINDOW = 1024, 256
"""Longest default window, in tokens: of a model that states its longest sequence, and of one that does not."""

WINDOWS = 16  # most windows that `evaluate_positions` reads

TOKENS_AT_ONCE = 4096  # tokens in a batch of windows; a model that computes its logits reads one window at a time


@dataclass(frozen=True)
class CausalModel:
    """A causal language model with its tokenizer, as `evaluate_text` reads a text with it.

    Attributes:
        model: A `DecoderLM`, or a causal language model of transformers. Call `patch` on the latter; otherwise all
            logits of a batch are computed.
        tokenizer: A `tokenizers.Tokenizer`, or a fast tokenizer of transformers.
        title: Name for messages and tables.
        start_id: Token with which every window starts, such as `<s>` or the separator of documents; `None` for none.
        trained_length: Length of the sequences it was trained on; `None` if it is not known.
    """

    __repr__ = short_repr

    model: nn.Module
    tokenizer: object
    title: str = "model"
    start_id: int | None = None
    trained_length: int | None = None

    @classmethod
    def of(cls, opened: OpenedModel, model: nn.Module | None = None) -> "CausalModel":
        """Return the causal language model of what `open_model` opened.

        Every window starts with the first token of `opened.text_limits` that starts a text, else with the first that
        ends one, if there is one.

        Args:
            opened: What `open_model` returned.
            model: The whole model, if `opened` has its table alone; `None` for `opened.require_causal()`.

        Raises:
            CheckpointError: It is no causal language model; see `OpenedModel.require_causal`.
            TokenizerError: There is no tokenizer, or it has IDs outside the table.
            MissingExtraError: The checkpoint needs transformers, which is not installed.
        """
        model = opened.require_causal() if model is None else model
        tokenizer = opened.require_tokenizer()
        starts = opened.text_limits[0] or opened.text_limits[1]
        return cls(model, tokenizer, opened.title, starts[0] if starts else None, _trained_length(opened))

    @property
    def max_seq_len(self) -> int | None:
        """Return the longest sequence that the model states, in tokens; `None` if it states none."""
        return longest_sequence(self.model)

    @property
    def default_window(self) -> int:
        """Return the tokens that the model reads at once by default: its trained length or longest sequence.

        It is at most `WINDOW`, and `UNKNOWN_WINDOW` if neither is known.
        """
        return min(WINDOW, self.trained_length or self.max_seq_len or UNKNOWN_WINDOW)

    @property
    def device(self) -> torch.device:
        """Return the device of the model."""
        return next(self.model.parameters()).device


def _trained_length(opened: OpenedModel) -> int | None:
    """Return the length of the sequences on which a `DecoderLM` was trained, if a run or a configuration states it."""
    if opened.run is not None and opened.run.contains_run:
        return opened.run.options().max_length
    is_checkpoint = path_kind(Path(opened.source)) in (PathKind.CHECKPOINT, PathKind.GGUF)
    if not isinstance(opened.model, DecoderLM) or not is_checkpoint:
        return None
    config = Checkpoint.open(Path(opened.source)).config
    return next((config[key] for key in POSITION_KEYS if isinstance(config.get(key), int)), None)


@dataclass(frozen=True)
class TokenScore:
    """The loss of one token, averaged over its places in the text.

    Attributes:
        token: Its text.
        id: Its ID.
        count: How often it is predicted.
        loss: Mean loss, `-log p[token]`, in nats.
        entropy: Mean entropy of the predicted distribution at its places, in nats.
    """

    token: str
    id: int
    count: int
    loss: float
    entropy: float


@dataclass(frozen=True)
class ModelScores:
    """What one model predicts of a text.

    Attributes:
        title: Name of the model.
        tokens: Number of predicted tokens.
        bytes: Number of UTF-8 bytes of the text that they encode.
        bits_per_byte: Summed loss in bits over `bytes`; comparable between models with different tokenizers.
        loss: Mean loss in nats per token.
        entropy: Mean entropy of the predicted distributions, in nats.
        accuracy: Share of tokens that had the largest logit.
        unknown: Number of tokens that are the unknown token, which stands for text that the tokenizer cannot encode;
            the model does not predict that text, so its bits per byte are too low.
        by_token: One entry for each token that occurs, first those that raise the mean loss most:
            `count * (their loss - mean loss)`.
    """

    title: str
    tokens: int
    bytes: int
    bits_per_byte: float
    loss: float
    entropy: float
    accuracy: float
    unknown: int
    by_token: tuple[TokenScore, ...]


@dataclass(frozen=True)
class TokenChange:
    """How two models differ in one token, averaged over its places in the text.

    Attributes:
        token: Its text.
        id: Its ID.
        count: How often it is predicted.
        loss: Mean loss of the first model, in nats.
        other_loss: Mean loss of the other model, in nats.
        kl: Mean divergence KL(first || other) of the distributions at its places, in nats.
    """

    token: str
    id: int
    count: int
    loss: float
    other_loss: float
    kl: float


@dataclass(frozen=True)
class ModelDifference:
    """How two models with one tokenizer differ at each place of a text.

    Attributes:
        kl: Mean of `KL(p || q) = sum of p (log p - log q)`, p the first model's distribution and q the other's, in nats
            per token.
        agreement: Share of places where both have the largest logit at the same token.
        by_token: One entry for each token that occurs, first those that change the summed loss most.
    """

    kl: float
    agreement: float
    by_token: tuple[TokenChange, ...]


@dataclass(frozen=True)
class TextEvaluation:
    """The result of `evaluate_text`.

    Attributes:
        window: Number of tokens that a model reads at once.
        stride: Number of tokens from the start of one window to that of the next.
        model: Scores of the model.
        other: Scores of the other model, or `None`.
        difference: Comparison at each place; `None` without another model, or if it has another tokenizer.
        no_difference: Why another model is compared by its scores alone; `""` if it is not.
    """

    __repr__ = short_repr

    window: int
    stride: int
    model: ModelScores
    other: ModelScores | None = None
    difference: ModelDifference | None = None
    no_difference: str = ""

    @property
    def context(self) -> str:
        """Return one sentence that says how much of the text each token is predicted from."""
        return context_of(self.window, self.stride)


def context_of(window: int, stride: int) -> str:
    """Return one sentence that says from how much of a text each token is predicted."""
    return (
        f"Windows of {window:,} tokens, {stride:,} apart: each token is predicted once, from {window - stride:,} to "
        f"{window - 1:,} tokens before it, and those of the first window from fewer."
    )


@torch.no_grad()
def evaluate_text(
    model: CausalModel | OpenedModel,
    text: str | Path,
    other: CausalModel | OpenedModel | None = None,
    *,
    window: int | None = None,
    stride: int | None = None,
) -> TextEvaluation:
    """Measure how well a causal language model predicts a text, and how another model differs from it.

    A window is `window` tokens that the model reads at once, its start token included. The next window begins `stride`
    tokens later, and only the tokens that no window before has predicted count. So each token counts once. It is
    predicted from `window - stride` tokens of the text or more, except in the first window. A model without a start
    token cannot predict the first token of the text, whose bytes then do not count either.

    Args:
        model: What `open_model` returns, or a `CausalModel`.
        text: The text, or the path of a UTF-8 file; a file whose name ends in `.gz` is decompressed.
        other: A model to compare with. If it has the vocabulary of `model`, it reads the same tokens, with the start
            token of `model`, and the divergence at each place is computed.
        window: Tokens that a model reads at once. `None` for the length the model was trained on, else its longest
            sequence, at most 1,024; 256 if neither is known; of two models the smaller, and at most the whole text.
        stride: Tokens from one window to the next, from 1 to `window`; `None` for half a window.

    Raises:
        TextError: The text is not UTF-8, is empty, has fewer tokens than one window, or is a `str` that looks like a
            path.
        FileError: The file cannot be read.
        CheckpointError: A model is no causal language model: it has no blocks, or it sees the tokens that it predicts.
            Or its loss is not finite.
        TokenizerError: There is no tokenizer, or it has IDs outside the table.
        MissingExtraError: A checkpoint needs transformers, which is not installed.

    Example:
        >>> result = evaluate_text(CausalModel(model, tokenizer), "the cat sat on the mat . " * 20, window=32)
        >>> result.model.tokens, result.model.bytes, result.model.bits_per_byte > 0
        (499, 499, True)
    """
    models = [one if isinstance(one, CausalModel) else CausalModel.of(one) for one in (model, other) if one is not None]
    has_one_vocabulary = False
    if other is not None:
        first, second = (as_tokenizer(each.tokenizer).get_vocab(with_added_tokens=True) for each in models)
        has_one_vocabulary = first == second
    if has_one_vocabulary:  # the same input for both, so that they are compared at each place
        models[1] = replace(models[1], start_id=models[0].start_id)
    texts = [encode_text(one, text) for one in models]
    if window is None:
        window = max(2, min(*(one.default_window for one in models), *(each.predicted for each in texts)))
    stride = window // 2 if stride is None else stride
    for one, encoded in zip(models, texts, strict=True):
        if window < 2 or window > (one.max_seq_len or window):
            limit = f" to {one.max_seq_len:,}" if one.max_seq_len else " up"
            raise SizeError(f"window must be from 2{limit} tokens for {one.title}; found {window}.")
        if not 1 <= stride <= window:
            raise SizeError(f"stride must be from 1 to the window of {window}, else tokens are left out; not {stride}.")
        if encoded.predicted < window:
            found = f"{encoded.predicted:,} tokens that {one.title} can predict"
            raise TextError(f"The text has {found}, a window {window:,}: pass a longer text or a shorter window.")
        check_causal(one.model, encoded.ids)
    with evaluating(*(one.model for one in models)):
        probes = [
            causal_logits(one.model, encoded.ids[:2].to(one.device).unsqueeze(0))
            for one, encoded in zip(models, texts, strict=True)
        ]
        sizes = [each.vocab_size for each in probes]
        is_computed = [
            not isinstance(one.model, DecoderLM) and not isinstance(each, LinearLogits)
            for one, each in zip(models, probes, strict=True)
        ]
        at_once = window if any(is_computed) else TOKENS_AT_ONCE
        reason = ""
        if other is not None and not (has_one_vocabulary and torch.equal(texts[0].ids, texts[1].ids)):
            reason = "The models have different tokenizers, so only their bits per byte can be compared."
        elif len({*sizes}) > 1:
            reason = f"The models have {sizes[0]:,} and {sizes[1]:,} logits, so their distributions cannot be compared."
        groups = [[one] for one in models] if reason else [models]  # the models of a group read the same tokens
        measured = [
            _measure(group, encoded, size, window, stride, at_once)
            for group, encoded, size in zip(groups, texts, sizes, strict=False)
        ]
    sums = [own for of_models, _ in measured for own in of_models]
    scores = [_scores(*each) for each in zip(models, texts, sums, strict=True)]
    difference = None if other is None or reason else _difference(scores, measured[0][1])
    return TextEvaluation(window, stride, scores[0], scores[1] if other is not None else None, difference, reason)


class EncodedText(NamedTuple):
    """A text as one model reads it."""

    ids: Int[Tensor, " T"]  # with the start token in front, if there is one
    num_bytes: int  # of all tokens but the first
    unknown: int | None  # ID of the unknown token

    @property
    def predicted(self) -> int:
        """Return the number of tokens that have a token before them."""
        return len(self.ids) - 1


def encode_text(model: CausalModel, text: str | Path) -> EncodedText:
    """Read and encode a text, the start token of the model in front, and count the bytes that its tokens encode."""
    tokenizer = pure_tokenizer(as_tokenizer(model.tokenizer))
    if isinstance(text, str):
        raise_if_path(text)
    chunks = split_text([text], tokenizer) if isinstance(text, str) else read_text_chunks(text, tokenizer=tokenizer)
    parts = [] if model.start_id is None else [torch.tensor([model.start_id])]
    num_bytes = 0
    for chunk, ids in encode_chunks(chunks, tokenizer):
        num_bytes += len(chunk.encode())
        if len(ids) and not parts:  # nothing stands before the first token
            first = encode(tokenizer, chunk).offsets[0][1]
            num_bytes -= len(chunk[:first].encode())
        parts.append(torch.from_numpy(ids))
    if num_bytes == 0 and len(parts) <= 1:
        raise TextError(f"{text if isinstance(text, Path) else 'The text'} is empty: there is nothing to predict.")
    return EncodedText(torch.cat(parts), num_bytes, unknown_id(tokenizer))


def _measure(
    models: Sequence[CausalModel], text: EncodedText, size: int, window: int, stride: int, at_once: int
) -> tuple[Float[Tensor, "M 4 V"], Float[Tensor, "2 V"]]:
    """Run M models that have the same tokens over a text, and sum what they predict by token ID.

    Return, of each model, the number of places, losses, entropies and right predictions; of two models, the divergences
    and the number of places with one most likely token.
    """
    sums = torch.zeros(len(models), 4, size, dtype=torch.float64)
    differences = torch.zeros(2, size, dtype=torch.float64)
    for inputs, targets in windows_of(text.ids, window, stride, models[0].start_id, at_once):
        counted = targets != IGNORED
        tokens = targets[counted]
        logits, best = [], []
        for one, own in zip(models, sums, strict=True):
            logits.append(causal_logits(one.model, inputs.to(one.device)))
            statistics = token_statistics_of(logits[-1], targets.to(one.device), top_k=1)
            assert statistics.log_probs is not None
            assert statistics.entropy is not None
            assert statistics.top_ids is not None
            losses, entropies = (each.cpu()[counted].double() for each in (-statistics.log_probs, statistics.entropy))
            best.append(statistics.top_ids.cpu()[..., 0][counted])
            right = (best[-1] == tokens).double()
            own.index_add_(1, tokens, torch.stack([torch.ones_like(losses), losses, entropies, right]))
        if len(models) == 2:
            labels = targets.to(models[1].device)
            kl = divergence(logits[1], logits[0], labels=labels, ignore_index=IGNORED, reduction="none")
            is_same = (best[0] == best[1]).double()
            differences.index_add_(1, tokens, torch.stack([kl.cpu()[counted].double(), is_same]))
    return sums, differences


def windows_of(
    ids: Int[Tensor, " T"], window: int, stride: int, start_id: int | None, at_once: int
) -> Iterator[tuple[Int[Tensor, "B W"], Int[Tensor, "B W"]]]:
    """Yield batches of windows: the tokens to read and to predict, `IGNORED` where another window predicts them.

    The last window ends with the text, so that all have one length. A batch has at least `at_once` tokens, except for
    the last one.
    """
    last, done = len(ids) - 1 - window, 0
    batch: list[tuple[Tensor, Tensor]] = []
    for number in range(math.ceil(last / stride) + 1):
        begin = min(number * stride, last)
        inputs, targets = (ids[begin + shift : begin + shift + window].clone() for shift in (0, 1))
        if start_id is not None:
            inputs[0] = start_id
        targets[: done - begin] = IGNORED
        done = begin + window
        batch.append((inputs, targets))
        if len(batch) * window >= at_once or begin == last:
            ready, batch = batch, []
            yield torch.stack([one for one, _ in ready]), torch.stack([two for _, two in ready])


def _scores(model: CausalModel, text: EncodedText, sums: Float[Tensor, "4 V"]) -> ModelScores:
    """Return the scores of a model; a loss that is not finite is a `CheckpointError`."""
    ids = sums[0].nonzero()[:, 0]
    counts, losses, entropies, right = sums[:, ids]
    total, count = float(losses.sum()), int(counts.sum())
    if not math.isfinite(total):
        raise CheckpointError(f"{model.title} gives the text a loss of {total}: it has weights that are not finite.")
    order = (losses - counts * total / count).argsort(descending=True, stable=True)
    rows = zip(*(column[order].tolist() for column in (ids, counts, losses, entropies)), strict=True)
    tokenizer = as_tokenizer(model.tokenizer)
    return ModelScores(
        title=model.title,
        tokens=count,
        bytes=text.num_bytes,
        bits_per_byte=total / math.log(2) / text.num_bytes,
        loss=total / count,
        entropy=float(entropies.sum()) / count,
        accuracy=int(right.sum()) / count,
        unknown=int(sums[0, text.unknown]) if text.unknown is not None else 0,
        by_token=tuple(
            TokenScore(token_text(tokenizer, token), token, int(number), loss / number, entropy / number)
            for token, number, loss, entropy in rows
        ),
    )


def _difference(scores: Sequence[ModelScores], sums: Float[Tensor, "2 V"]) -> ModelDifference:
    """Return how two models differ at each place, from the scores of both and the sums over the text."""
    others = {each.id: each.loss for each in scores[1].by_token}
    changes = [
        TokenChange(each.token, each.id, each.count, each.loss, others[each.id], float(sums[0, each.id]) / each.count)
        for each in scores[0].by_token
    ]
    changes.sort(key=lambda each: -abs(each.count * (each.other_loss - each.loss)))
    kl, agreed = (sums.sum(1) / scores[0].tokens).tolist()
    return ModelDifference(kl, agreed, tuple(changes))


class PositionLoss(NamedTuple):
    """Mean loss at a range of positions.

    Attributes:
        start: First number of tokens before the predicted one.
        stop: End of the range, which is not in it.
        loss: Mean loss, in nats per token.
        tokens: Number of predicted tokens.
    """

    start: int
    stop: int
    loss: float
    tokens: int


@torch.no_grad()
def evaluate_positions(
    model: CausalModel, text: str | Path, window: int, trained: int, *, read: int | None = None
) -> list[PositionLoss]:
    """Measure the loss at ranges of positions: up to half of the trained length, up to it, up to twice it, and so on.

    The model reads at most 16 windows, at equal distances in the text, each from position 0, so that every position
    has the same number of predicted tokens.

    Args:
        model: The model, with its tokenizer.
        text: The text, or the path of a UTF-8 file.
        window: Tokens of a window; a shorter text is one window of its own length.
        trained: Trained length of the model, in tokens.
        read: Tokens that the model reads of each window, where it has no more positions; `None` for the window.

    Raises:
        TextError: The text is not UTF-8, is empty, or has a single token.
        FileError: The file cannot be read.
        PositionError: The model has fewer positions.
        CheckpointError: The model is no causal language model.
        TokenizerError: There is no tokenizer, or it has IDs outside the table.

    Example:
        >>> losses = evaluate_positions(CausalModel(model, tokenizer), "the cat sat on the mat . " * 20, 64, trained=16)
        >>> [(each.start, each.stop) for each in losses]
        [(0, 8), (8, 16), (16, 32), (32, 64)]
    """
    if window < 2 or trained < 2:
        raise SizeError(f"window and trained must be at least 2, not {window} and {trained}.")
    encoded = encode_text(model, text)
    window = min(window, encoded.predicted)
    if window < 2:
        raise TextError("The text has a single token: pass a longer one.")
    read = window if read is None else min(read, window)
    check_causal(model.model, encoded.ids)
    last = encoded.predicted - window
    starts = torch.linspace(0, last, min(WINDOWS, last // window + 1)).long().tolist()
    sums = torch.zeros(read, dtype=torch.float64)
    with evaluating(model.model):
        for start in starts:
            inputs, targets = (encoded.ids[start + shift : start + shift + read].clone() for shift in (0, 1))
            if model.start_id is not None:
                inputs[0] = model.start_id
            logits = causal_logits(model.model, inputs[None].to(model.device))
            log_probs = token_statistics_of(logits, targets[None].to(model.device)).log_probs
            assert log_probs is not None
            sums -= log_probs[0].cpu().double()
    bounds, end = [0, trained // 2], trained
    while end < read:
        bounds, end = [*bounds, end], 2 * end
    bounds = [*(each for each in bounds if each < read), read]
    counts = [(first, end, (end - first) * len(starts)) for first, end in pairwise(bounds)]
    return [PositionLoss(first, end, float(sums[first:end].sum()) / count, count) for first, end, count in counts]
