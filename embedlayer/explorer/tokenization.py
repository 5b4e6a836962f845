"""How a text becomes tokens: the answer of the step Tokenize, by a source's tokenizer or one of the page's own."""

import re
from collections.abc import Iterable
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from embedlayer.core import visible_text
from embedlayer.core.errors import SizeError, TokenizerError
from embedlayer.explorer import text_answers
from embedlayer.explorer.example_tokens import example_texts
from embedlayer.explorer.pipeline_steps import MOST_TOKENS
from embedlayer.explorer.text_ids import NamedRows, lists_ids, shown_tokens, text_ids, vocabulary_of
from embedlayer.explorer.tiny_layer import DIM as TINY_DIM
from embedlayer.explorer.tiny_layer import TEXTS as TINY_TEXTS
from embedlayer.explorer.tiny_layer import WORDS as TINY_WORDS
from embedlayer.explorer.tokens import Params
from embedlayer.opening.opened_model import OpenedModel
from embedlayer.opening.readers import open_model
from embedlayer.tokenization.bytes import TokenBytes, entry_reader
from embedlayer.tokenization.ids import table_size
from embedlayer.tokenization.model_steps import BpeTrace, ModelTrace, UnigramTrace, WordPieceTrace
from embedlayer.tokenization.read import load_tokenizer
from embedlayer.tokenization.spans import token_spans
from embedlayer.tokenization.steps import TokenTrace, TokenTracer
from embedlayer.tokenization.tokenizer_calls import encode
from embedlayer.tokenization.train import train_tokenizer

MOST_CHARS = 1000
"""Most characters of a text that is traced: the time grows with the square of the length of a pre-token."""

TITLES = {"small": "Small byte-level BPE", "bytes": "Bytes"}
"""The tokenizers of the page itself: a small byte-level BPE, and one token for each byte."""

SMALL_VOCAB_SIZE = 1200
_MOST_COPIES = 4000  # of the most frequent word in the text that the small tokenizer is trained on

_WORDS = ("love", "lovely", "loved", "lowest", "newer", "played", "football", "teacher", "unhappiness", "café", "🙂")
TEXTS = (
    *(space + word for word in _WORDS for space in ("", " ")),
    "👩‍💻",
    "I love dogs",
    "Every day the teacher played football with new people in the old city.",
)
"""Texts whose tokens by the small tokenizer an exported page holds."""

_ID = re.compile(r"#(\d+)")


def answer(source: OpenedModel, params: Params) -> text_answers.Tokenization:
    """Answer a request of the page: how `text` becomes tokens, and how the model splits each pre-token."""
    name, text, is_tiny = params.get("tokenizer", ""), params.get("text", ""), params.get("layer") == "tiny"
    title, vocabulary, size = source.title, vocabulary_of(source), source.table.vocab_size
    if name and name not in TITLES:
        raise SizeError(f"There is no tokenizer {name!r}; the page has {', '.join(TITLES)}.")
    if name:
        title, vocabulary, size = TITLES[name], own_tokenizer(name), table_size(own_tokenizer(name))
    elif is_tiny:
        title, vocabulary, size = "Tiny layer", TINY_WORDS, len(TINY_WORDS.names)
    special = name == "" and source.adds_special_tokens
    ids = text_ids(vocabulary, text, size, add_special_tokens=special).ids
    if isinstance(vocabulary, Tokenizer):
        split = (_own_reader(name) if name else _reader_of(source)).split(text, add_special_tokens=special)
    else:
        split = _split_by_names(vocabulary, text)
    count = min(len(ids), MOST_TOKENS)
    places = zip(shown_tokens(vocabulary, ids[:count]), split.places, strict=False)
    pieces = (piece for piece in split.pieces if piece["first"] < count or len(ids) == count)
    return {
        "title": title,
        "model": split.model,
        "vocab_size": size,
        "embed_dim": TINY_DIM if is_tiny else source.table.embed_dim,
        "text": visible_text(text),
        "normalized": visible_text(split.normalized),
        "tokens": [{**token, "start": start, "stop": stop} for token, (start, stop) in places],
        "pieces": [{**piece, "behind": min(piece["behind"], count)} for piece in pieces],
        "left_out": len(ids) - count,
        "text_tokens": len(encode(vocabulary, text).ids) if isinstance(vocabulary, Tokenizer) else len(ids),
        "refused": split.refused,
    }


def exported_requests(source: OpenedModel) -> list[dict[str, str]]:
    """Return the parameters of the requests whose answers an exported page stores."""
    texts = [] if source.table_only else [{"text": text} for text in example_texts(source)]
    texts += [{"layer": "tiny", "text": text} for text in TINY_TEXTS]
    of_texts = [text | name for text, name in product(texts, [{}, *({"tokenizer": name} for name in TITLES)])]
    return of_texts + [{"text": text, "tokenizer": "small"} for text in TEXTS if {"text": text} not in texts]


@cache
def own_tokenizer(name: str) -> Tokenizer:
    """Return a tokenizer of the page itself by its key in `TITLES`; the same object at each call."""
    if name == "bytes":
        return train_tokenizer((), "byte", special_tokens=())
    ids = load_tokenizer(WORD_TABLE).get_vocab(with_added_tokens=False)
    words = ("I" if word == "i" else word for word in sorted(ids, key=ids.__getitem__) if word.isalpha())
    texts = (f" {word}" for rank, word in enumerate(words, 1) for _ in range(max(1, round(_MOST_COPIES / rank))))
    return train_tokenizer(texts, "bpe", vocab_size=SMALL_VOCAB_SIZE, special_tokens=())


class _Split(NamedTuple):
    """A text as a vocabulary splits it; `places` are the bytes of each token. The other fields are the answer's."""

    model: text_answers.TokenModel
    normalized: str
    places: list[tuple[int, int]]
    pieces: list[text_answers.TracedPiece]
    refused: str = ""


class _Reader:
    """What is read of a tokenizer once: its tracer, or why it cannot be traced, and the bytes of its tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.model: text_answers.TokenModel = type(tokenizer.model).__name__  # type: ignore[assignment]
        self.tracer: TokenTracer | str
        try:
            self.tracer = TokenTracer(tokenizer)
        except TokenizerError as error:
            self.tracer = str(error)
        self.tokens = self.tracer.tokens if isinstance(self.tracer, TokenTracer) else TokenBytes(tokenizer)
        self._read = entry_reader(tokenizer)

    def split(self, text: str, *, add_special_tokens: bool) -> _Split:
        """Split a text; one that cannot be traced has no pre-tokens."""
        try:
            traced = self._traced(text, add_special_tokens=add_special_tokens)
        except TokenizerError as error:
            spans = token_spans(self.tokens, text, add_special_tokens=add_special_tokens)
            places = [*zip(spans.starts.tolist(), spans.ends.tolist(), strict=True)]
            return _Split(self.model, text, places, [], str(error))
        pieces: list[text_answers.TracedPiece] = [
            {
                "start": piece.start,
                "stop": piece.stop,
                "text": self.visible(piece.text),
                "added": piece.trace is None,
                "first": piece.first,
                "behind": piece.behind,
                "trace": None if piece.trace is None else self._shown(piece.trace),
            }
            for piece in traced.pre_tokens
        ]
        return _Split(self.model, traced.normalized, [*zip(traced.starts, traced.ends, strict=True)], pieces)

    def _traced(self, text: str, *, add_special_tokens: bool) -> TokenTrace:
        """Trace a text; raise a `TokenizerError` if it is too long, or if the tokenizer cannot be traced."""
        if isinstance(self.tracer, str):
            raise TokenizerError(self.tracer)
        if len(text) > MOST_CHARS:
            raise TokenizerError(
                f"This text has {len(text):,} characters: the steps of at most {MOST_CHARS:,} are shown."
            )
        return self.tracer.trace(text, add_special_tokens=add_special_tokens)

    def visible(self, entry: str) -> str:
        """Return the visible form of the text of an entry of the vocabulary, or of one as it would be written there."""
        return visible_text(self._read(entry))

    def _shown(self, trace: ModelTrace) -> text_answers.ModelTrace:
        """Return the trace of a pre-token as a record for the page."""
        if isinstance(trace, BpeTrace):
            symbols = {*trace.symbols, *(merge.result for merge in trace.merges)}
            return {
                "kind": "bpe",
                "symbols": [*trace.symbols],
                "merges": [{"index": each.index, "rank": each.rank, "result": each.result} for each in trace.merges],
                "pairs": [(left, right, rank) for (left, right), rank in trace.pairs.items()],
                "shown": {symbol: self.visible(symbol) for symbol in sorted(symbols)},
                "whole": trace.is_whole,
            }
        if isinstance(trace, WordPieceTrace):
            tries: list[text_answers.WordPieceTry] = [
                {"start": start, "stop": stop, "text": self.visible(entry), "id": token_id}
                for start, stop, entry, token_id in trace.tries
            ]
            return {"kind": "wordpiece", "tries": tries, "too_long": trace.is_too_long}
        if isinstance(trace, UnigramTrace):
            paths: list[text_answers.UnigramPath] = [
                {
                    "pieces": [{"text": self.visible(text), "score": s, "ids": [*ids]} for text, s, ids in path.parts],
                    "score": path.score,
                }
                for path in trace.paths
            ]
            return {"kind": "unigram", "paths": paths}
        return {"kind": "whole", "id": trace.ids[0] if trace.is_known else None}


@cache
def _own_reader(name: str) -> _Reader:
    """Return the reader of a tokenizer of the page itself."""
    return _Reader(own_tokenizer(name))


def _reader_of(source: OpenedModel) -> _Reader:
    """Return the reader of a source's tokenizer, which is built once."""
    tokenizer = source.text_tokenizer
    assert tokenizer is not None  # the caller has it
    return source.once("tokenizer reader", lambda: _Reader(tokenizer))


def _split_by_names(vocabulary: NamedRows | None, text: str) -> _Split:
    """Split a text that lists IDs, or by the names of rows; an unknown word is the unknown row, or no token."""
    model: text_answers.TokenModel = "ids"
    unknown = None
    words: Iterable[tuple[int, int, int | None]]
    if vocabulary is None or lists_ids(text):
        words = ((*match.span(), int(match[1])) for match in _ID.finditer(text))
    else:
        model, unknown, words = "names", vocabulary.unknown, vocabulary.places(text)
    places: list[tuple[int, int]] = []
    pieces: list[text_answers.TracedPiece] = []
    for start, stop, row in words:
        first_byte, last_byte = len(text[:start].encode()), len(text[:stop].encode())
        first = len(places)
        places += [(first_byte, last_byte)] * (row is not None or unknown is not None)
        pieces.append(
            {
                "start": first_byte,
                "stop": last_byte,
                "text": visible_text(text[start:stop]),
                "added": False,
                "first": first,
                "behind": len(places),
                "trace": {"kind": "whole", "id": row},
            }
        )
    return _Split(model, text, places, pieces)


WORD_TABLE = Path(__file__).with_name("words")  # folder of the saved table; its README.md says where the rows come from


def open_word_table() -> OpenedModel:
    opened = open_model(WORD_TABLE, parts="table")
    opened.title, opened.source = "4,000 words of MiniLM", ""  # a page that is exported names no folder of this machine
    return opened
