"""Text files: each is one document."""

from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from embedlayer.core.errors import TextError
from embedlayer.data.readers.documents import Document, Reader
from embedlayer.data.text_chunks import CONTEXT_CHARS, CUT, is_safe_cut
from embedlayer.data.text_files import checked, decoded, opened
from embedlayer.data.text_formats import COMPRESSIONS, not_text
from embedlayer.tokenization.tokenizer_calls import ANCHOR_CHARS

_MAX_CHAR_BYTES = 4


class TextFile(Reader):
    """Reader of a text file, which is one document: UTF-8, also compressed. `"-"` is standard input."""

    has_rows = False

    def cut(self, place: int, size: int, tokenizer: Tokenizer) -> int:
        """Return the first place at or after `place` where cutting the text changes no ID.

        Two shards that share a boundary find the same place, because it depends only on the characters around it. Only
        cuts at white space, and between a word and a mark, are tried; the result is `size` if none is safe.
        """
        if is_compressed(self.source):
            return size if place else 0
        source = str(self.source)
        if place in (0, size):
            return place
        place = _next_character(source, place)
        text = _text_before(source, place, CONTEXT_CHARS)
        at, offset = len(text), place - len(text.encode())  # first character not looked at, byte of the first in `text`
        with opened(source, place, size) as (read, _):
            chunks = decoded(source, read, offset=place)
            ended = False
            while not ended:
                chunk = next(chunks, "")
                ended, text = not chunk, text + chunk
                last = len(text) if ended else len(text) - CONTEXT_CHARS
                for match in CUT.finditer(text, at, last + 1):
                    if is_safe_cut(text, match.start(), tokenizer):
                        return offset + len(text[: match.start()].encode())
                at = max(at, last + 1)
                passed = max(0, at - CONTEXT_CHARS)
                offset += len(text[:passed].encode())
                text, at = text[passed:], at - passed
        return size

    def documents(self, begin: int = 0, end: int | None = None) -> Iterator[Document]:
        before = _text_before(str(self.source), begin, ANCHOR_CHARS) if begin else ""
        with opened(self.source, begin, end) as (read, position):

            def blocks() -> Iterator[str]:
                for block in decoded(self.source, read, offset=begin):
                    self.position = position()
                    yield block
                self.position = position()

            yield Document(blocks(), before)


def is_compressed(source: str | Path) -> bool:
    """Return whether a source is a compressed file, which can be read from its start only."""
    return str(source).endswith(tuple(COMPRESSIONS))


def _text_before(source: str, place: int, count: int) -> str:
    """Return the last `count` characters before byte `place` of a file, fewer near the start; no byte-order mark."""
    begin = _next_character(source, max(0, place - _MAX_CHAR_BYTES * (count + 1)))
    raw = _bytes_of(source, begin, place)
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise TextError(not_text(source, raw, begin + error.start, raw[error.start])) from error
    return (text if begin else text.removeprefix("\ufeff"))[-count:]


def _next_character(source: str, place: int) -> int:
    """Return the offset of the first byte at or after `place` at which a UTF-8 character of the file starts."""
    following = _bytes_of(source, place, place + _MAX_CHAR_BYTES - 1)
    return place + next((n for n, byte in enumerate(following) if byte & 0xC0 != 0x80), len(following))


def _bytes_of(source: str, begin: int, end: int) -> bytes:
    """Read the bytes of a file from offset `begin` up to, but without, offset `end`."""
    with opened(source, begin, end) as (read, _):
        return checked(source, read, end - begin)
