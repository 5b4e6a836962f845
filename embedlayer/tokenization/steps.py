"""How a tokenizer splits a text, step by step: normalised, split into pre-tokens, and these by the model.

The `tokenizers` library's own components find added tokens, normalise, split into pre-tokens and add special tokens.
What the model does with a pre-token is traced by `model_steps`.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

from embedlayer.core.errors import TokenizerError
from embedlayer.core.formatting import short_repr
from embedlayer.tokenization.bytes import TokenBytes
from embedlayer.tokenization.model_steps import ModelTrace, traced_model
from embedlayer.tokenization.spans import token_spans
from embedlayer.tokenization.tokenizer_calls import as_tokenizer, tokenizer_errors


class TracedPreToken(NamedTuple):
    """A pre-token, a part of a text that the model splits by itself; or an added token, which is cut out before.

    Attributes:
        text: The pre-token as the model gets it, such as `Ġlove` or `▁love`.
        start: First byte of the pre-token in the text.
        stop: First byte behind it.
        first: Place of its first token among those of the text.
        behind: Place behind its last token; equal to `first` if it has none.
        trace: How the model splits it; `None` for an added token.
    """

    text: str
    start: int
    stop: int
    first: int
    behind: int
    trace: ModelTrace | None


@dataclass(frozen=True)
class TokenTrace:
    """How a tokenizer splits a text; offsets are in bytes of the text in UTF-8.

    Attributes:
        text: The text.
        normalized: The text after normalisation, as it is split into pre-tokens.
        ids: Token IDs, those of `tokenizer.encode`.
        starts: First byte of each token, see `token_spans`.
        ends: First byte behind each token.
        pre_tokens: The pre-tokens in order. A special token that is not in the text belongs to none.
    """

    __repr__ = short_repr

    text: str
    normalized: str
    ids: tuple[int, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    pre_tokens: tuple[TracedPreToken, ...]


class TokenTracer:
    """Trace how a tokenizer splits texts, see `trace_tokens`.

    Args:
        tokenizer: A `tokenizers.Tokenizer`, or a fast tokenizer of transformers. It is not changed. If it is changed
            afterwards, create another tracer.

    Attributes:
        tokens: The bytes of its tokens.
        model: The plain definition of its model.

    Raises:
        TokenizerError: `tokenizer` is no tokenizer, its model is not known, or its tokens depend on chance (`dropout`).
    """

    def __init__(self, tokenizer: object) -> None:
        tokenizer = as_tokenizer(tokenizer)
        self.model = traced_model(tokenizer)
        self.tokens = TokenBytes(tokenizer)
        self._before, self._after = _Recorder(), _Recorder()
        pure, self._recording = self.tokens.tokenizer, Tokenizer(self.tokens.tokenizer.model)
        for name in ("normalizer", "post_processor"):
            if (component := getattr(pure, name)) is not None:
                setattr(self._recording, name, component)
        steps = [PreTokenizer.custom(recorder) for recorder in (self._before, self._after)]
        if pure.pre_tokenizer is not None:
            steps.insert(1, pure.pre_tokenizer)
        self._recording.pre_tokenizer = pre_tokenizers.Sequence(steps)
        self._recording.add_tokens([token for _, token in sorted(pure.get_added_tokens_decoder().items())])
        self._recording.encode_special_tokens = pure.encode_special_tokens

    def trace(self, text: str, *, add_special_tokens: bool = False) -> TokenTrace:
        """Return how the tokenizer splits a text; see `trace_tokens`."""
        spans = token_spans(self.tokens, text, add_special_tokens=add_special_tokens)
        ids, starts, ends = (tuple(each.tolist()) for each in (spans.ids, spans.starts, spans.ends))
        with tokenizer_errors("split a text"):
            words = self._recording.encode(text, add_special_tokens=add_special_tokens).word_ids
        normalized = "".join(text for text, _, _ in self._before.splits)
        first_of = {number: place for place, number in reversed([*enumerate(words)])}
        pre_tokens: list[TracedPreToken] = []
        first = behind = place = 0
        for number, (pre_token, (start, stop), added) in enumerate(self._after.splits):
            if number in first_of:
                first = first_of[number]
                behind = next((i for i in range(first, len(words)) if words[i] != number), len(words))
                start, stop = starts[first], ends[behind - 1]
            else:
                first, (start, stop) = behind, (max(start, place), max(stop, place))
            place = stop
            trace = None if added else self.model.trace(pre_token)
            if trace is not None and trace.ids != ids[first:behind]:
                raise TokenizerError(
                    f"{pre_token!r} becomes {ids[first:behind]}, and {trace.ids} by its model. It cannot be traced."
                )
            pre_tokens.append(TracedPreToken(pre_token, start, stop, first, behind, trace))
        return TokenTrace(text, normalized, ids, starts, ends, tuple(pre_tokens))


def trace_tokens(tokenizer: object, text: str, *, add_special_tokens: bool = False) -> TokenTrace:
    """Return how a tokenizer splits a text: normalised text, pre-tokens, and how the model splits each pre-token.

    | model | what is recorded of a pre-token |
    |---|---|
    | BPE | the symbols at the start, each merge with its rank, and the pairs that could merge |
    | WordPiece | each look-up, the longest first |
    | Unigram | the best segmentation and the second best, with their log-probabilities |
    | WordLevel | whether the pre-token is an entry |

    Args:
        tokenizer: A `TokenTracer`, which is read once for many calls; a `tokenizers.Tokenizer`; or a fast tokenizer of
            transformers.
        text: Any text; it is encoded whole.
        add_special_tokens: Add the special tokens of the tokenizer's template, such as `[CLS]`.

    Raises:
        TokenizerError: `tokenizer` is no tokenizer, cannot encode the text, has a model that is not known, or leaves
            out merges by chance (`dropout`).

    Example:
        >>> trace = trace_tokens(train_tokenizer("love love", vocab_size=260), "love").pre_tokens[0].trace
        >>> trace.symbols, [merge.result for merge in trace.merges]
        (('l', 'o', 'v', 'e'), ['lo', 've', 'love'])
    """
    tracer = tokenizer if isinstance(tokenizer, TokenTracer) else TokenTracer(tokenizer)
    return tracer.trace(text, add_special_tokens=add_special_tokens)


_Split = tuple[str, tuple[int, int], Sequence[Any] | None]
"""A part of a text, its bytes in the text, and its tokens if it is an added token."""


class _Recorder(threading.local):
    """A pre-tokenizer that changes nothing, and keeps the parts of the text that this thread encoded last."""

    splits: Sequence[_Split] = ()

    def pre_tokenize(self, parts: Any) -> None:
        self.splits = parts.get_splits("original", "byte")
