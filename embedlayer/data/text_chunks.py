"""Split a text into chunks whose token IDs are those of the whole text, and encode them.

Which cuts are safe depends on the tokenizer: GPT-2 joins a space to the next word, LLaMA and T5 put a space before
every text, other tokenizers join line breaks to the full stop before them. So each cut is tried with the tokenizer
itself. A cut between `left` and `right` is safe if, for 128 characters on either side,

    encode(left + right) == encode(left) + encode(anchor + right)[len(encode(anchor)):]

where the anchor is the last 16 characters of `left`. A tokenizer may change the start of a text; this change then
affects the anchor, whose IDs are discarded. Limit: the IDs may change if a tokenizer depends on text further away.
Where no cut is safe within a million characters (one endless word), the text is cut anyway, with a warning.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Encoding, Tokenizer

from embedlayer.core.errors import EmbedLayerWarning
from embedlayer.core.forks import BackgroundThread
from embedlayer.data.memmap import IdArray
from embedlayer.data.process_pool import usable_cores
from embedlayer.data.text_files import decoded, opened
from embedlayer.tokenization.tokenizer_calls import ANCHOR_CHARS, as_tokenizer, encode, encode_batch, pure_tokenizer

_FEWEST_CHARS, _MOST_CHARS = 512, 1 << 14
_ENDLESS_CHARS = 1 << 20
CONTEXT_CHARS = 128
_FEWEST_CHUNKS, _CHUNKS_PER_CORE = 32, 4
_TRIES = 8
_CUTS = (  # best first
    re.compile(r"(?<=[^\W_])(?= [^\W_])"),  # a single space between two words
    re.compile(r"(?<=\S)(?=\s)"),  # any white space
    re.compile(r"(?<=\w)(?=[^\w\s])|(?<=[^\w\s])(?=\w)"),  # a word beside a mark
)
CUT = re.compile("|".join(pattern.pattern for pattern in _CUTS))


def read_text_chunks(source: str | Path, *, tokenizer: object = None) -> Iterator[str]:
    """Yield a text in chunks of some hundred to some thousand characters; their concatenation is the text.

    Args:
        source: A UTF-8 file, compressed if it ends in `.gz` or `.zst`, or `"-"` for standard input. Line ends are
            kept; a byte-order mark at the start is left out.
        tokenizer: The chunks are cut such that their IDs are the IDs of the whole text, with each of several tokenizers
            in a tuple. `None`: cut between words.

    Raises:
        FileError: When chunks are requested: the file cannot be read.
        TextError: Then: the file is not plain text.
        TokenizerError: Then: `tokenizer` is no tokenizer.

    Warns:
        EmbedLayerWarning: Within a million characters no cut leaves the IDs unchanged, and the text is cut anyway; or
            the file has JSON lines and a name that ends in `.txt`, and is read as text.
    """
    with opened(source) as (read, _):
        given = () if tokenizer is None else tokenizer if isinstance(tokenizer, tuple) else (tokenizer,)
        yield from split_text(decoded(source, read), *(pure_tokenizer(as_tokenizer(each)) for each in given))


def encode_chunks(chunks: Iterable[str], tokenizer: object, *, before: str = "") -> Iterator[tuple[str, IdArray]]:
    """Encode a text chunk by chunk, and yield each chunk with its token IDs, `(N,)` int64.

    The concatenated IDs are those of the whole text. No special tokens are added at the start or the end of the text.

    Args:
        chunks: Chunks from `read_text_chunks` for this tokenizer.
        tokenizer: A `tokenizers.Tokenizer`, or a fast tokenizer of transformers.
        before: The last characters before the first chunk, if the chunks do not start at the start of the text.

    Raises:
        TokenizerError: When IDs are requested: `tokenizer` is no tokenizer, or cannot encode a chunk.
    """
    for chunk, ids, _ in encode_ahead(_behind_anchors(chunks, before), as_tokenizer(tokenizer)):
        yield chunk.text, ids


class TextChunk(NamedTuple):
    """A chunk of a document, and what its token IDs depend on."""

    text: str
    anchor: str  # the last characters before it in its document
    starts_document: bool
    weighted: Sequence[tuple[int, int]] | None = None


def document_chunks(text: str | Iterable[str], tokenizer: Tokenizer, *, before: str = "") -> Iterator[TextChunk]:
    """Split a document into chunks, such that their IDs, concatenated, are the IDs of the whole document."""
    if isinstance(text, str):
        blocks = (text[at : at + _MOST_CHARS] for at in range(0, len(text), _MOST_CHARS))
        return _behind_anchors(split_text(blocks, tokenizer, fewest=_MOST_CHARS), before)
    return _behind_anchors(split_text(text, tokenizer), before)


def _behind_anchors(chunks: Iterable[str], before: str) -> Iterator[TextChunk]:
    """Yield the chunks of one document, in order, with the anchors before them; `before` are the characters before."""
    anchor, starts_document = before[-ANCHOR_CHARS:], True
    for text in chunks:
        yield TextChunk(text, anchor, starts_document)
        anchor, starts_document = text[-ANCHOR_CHARS:], False


def encode_ahead(chunks: Iterator[TextChunk], tokenizer: Tokenizer) -> Iterator[tuple[TextChunk, IdArray, Encoding]]:
    """Yield each chunk with its token IDs, `(N,)` int64, and the encoding of the chunk behind its anchor.

    A thread encodes a batch of chunks while the caller uses the batch before and the next one is cut. The encodings of
    chunks with `weighted` have offsets.
    """
    tokenizer = pure_tokenizer(tokenizer)
    with closing(BackgroundThread("embedlayer-encode")) as thread:
        begun: list[tuple[list[TextChunk], Callable[[], list[Encoding]]]] = []
        while (batch := list(_batch(chunks))) or begun:
            if batch:
                texts = [chunk.anchor + chunk.text for chunk in batch]
                anchors = [chunk.anchor for chunk in batch if chunk.anchor]
                offsets = any(chunk.weighted is not None for chunk in batch)
                begun.append((batch, thread.submit(partial(encode_batch, tokenizer, texts + anchors, offsets=offsets))))
            if len(begun) > 1 or not batch:  # the next batch is encoded meanwhile, if there is one
                encoded, job = begun.pop(0)
                wholes = job()
                anchored = iter(wholes[len(encoded) :])
                for chunk, whole in zip(encoded, wholes, strict=False):
                    skipped = len(next(anchored).ids) if chunk.anchor else 0
                    yield chunk, np.array(whole.ids, dtype=np.int64)[skipped:], whole


def _batch(chunks: Iterator[TextChunk]) -> Iterator[TextChunk]:
    """Yield the next chunks to encode together: some for each core, and more of short ones."""
    fewest = max(_FEWEST_CHUNKS, _CHUNKS_PER_CORE * usable_cores())
    chars = 0
    for number, chunk in enumerate(chunks, 1):
        yield chunk
        chars += len(chunk.text)
        if number >= fewest and (chars >= fewest * _FEWEST_CHARS or number >= fewest * _CHUNKS_PER_CORE):
            return


def split_text(texts: Iterable[str], *tokenizers: Tokenizer, fewest: int = _FEWEST_CHARS) -> Iterator[str]:
    """Split a text into chunks, such that the IDs of the chunks, concatenated, are the IDs of the whole text.

    The first chunks have up to `fewest` characters and later ones up to 16384, so that a short text has several chunks
    too. A chunk is longer where no cut is safe; after a million characters the text is cut anyway, with a warning.
    Without a tokenizer cuts are not checked, and IDs may change; with several tokenizers, the IDs of each are
    unchanged.
    """
    rest, done, wanted = "", 0, fewest
    for text in texts:
        rest += text
        while len(rest) >= wanted + CONTEXT_CHARS:
            cut = _find_cut(rest, wanted, tokenizers)
            if cut is None and wanted < _ENDLESS_CHARS:
                wanted *= 2
                continue
            if cut is None:
                cut = wanted
                warnings.warn(
                    f"No safe position for a cut was found in {wanted} characters from character {done} on. Cut at "
                    f"{done + cut}: the IDs next to it may differ from those of the uncut text.",
                    EmbedLayerWarning,
                    stacklevel=2,
                )
            yield rest[:cut]
            rest, done = rest[cut:], done + cut
            wanted = min(max(done // 64, fewest), _MOST_CHARS)
    if rest:
        yield rest


def _find_cut(text: str, end: int, tokenizers: tuple[Tokenizer, ...]) -> int | None:
    """Return an index between `end / 2` and `end` at which a text can be cut safely; `None` if none is found.

    Cuts between two words are tried first, then those at white space and at punctuation; of each kind, the last ones.
    `text` has at least 128 characters after `end`. Without a tokenizer the first cut tried is returned.
    """
    for pattern in _CUTS:
        width, start, places = _FEWEST_CHARS, end, list[int]()
        while len(places) < _TRIES and start > end // 2:  # search backwards in windows that grow
            start = max(end // 2, end - width)
            places = [match.start() for match in pattern.finditer(text, start, end + 1)]
            width *= _TRIES
        for place in places[: -_TRIES - 1 : -1]:
            if all(is_safe_cut(text, place, tokenizer) for tokenizer in tokenizers):
                return place
    return None


def is_safe_cut(text: str, place: int, tokenizer: Tokenizer) -> bool:
    """Return whether the IDs of a text stay the same if it is cut in two at `place`.

    Only the 128 characters on either side of the cut are encoded and compared. `place` is the index of the first
    character after the cut.
    """

    def ids_of(part: str) -> list[int]:
        return encode(tokenizer, part).ids

    left, right = text[max(0, place - CONTEXT_CHARS) : place], text[place : place + CONTEXT_CHARS]
    anchor = left[-ANCHOR_CHARS:]
    return ids_of(left + right) == ids_of(left) + ids_of(anchor + right)[len(ids_of(anchor)) :]
