"""What a corpus reads: documents of a source, between two places of it, in the order of the source."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from embedlayer.data.readers.chats import ChatTemplate
from embedlayer.data.text_chunks import split_text


class Document(NamedTuple):
    """A document, or the rest of one."""

    text: str | Iterable[str]  # a string is encoded whole unless it is long
    before: str = ""  # the last characters before a rest
    weighted: Sequence[tuple[int, int]] | None = None  # ranges of characters with weight 1; None: all have it


class Reader(ABC):
    """Reader of the documents of one source.

    Places in it are numbers from 0 to its size in bytes; `position` is how far the last call of `documents` has read.
    A shard begins at a place that `cut` returns.
    """

    has_rows = True
    has_weights = False

    def __init__(self, source: str | Path) -> None:
        self.source = source
        self.position = 0

    @abstractmethod
    def cut(self, place: int, size: int, tokenizer: Tokenizer) -> int:
        """Return the first place at or after `place` where a shard may begin, from the bytes around it alone.

        The result is `size` if there is no such place. It depends only on the bytes around it, so that neighbouring
        shards agree, and grows with `place`; 0 and `size` are returned unchanged.
        """

    @abstractmethod
    def documents(self, begin: int = 0, end: int | None = None) -> Iterator[Document]:
        """Yield the documents between two places that `cut` returned; `end` is the end of the source by default."""

    def texts(self) -> Iterator[str]:
        """Yield the text of all documents, in chunks of some thousand characters, to train a tokenizer on."""
        for document in self.documents():
            yield from split_text([document.text] if isinstance(document.text, str) else document.text)


@dataclass(frozen=True)
class RowOptions:
    """Which part of a row is the document."""

    text_field: str | None = None
    tokenizer: object = None

    @cached_property
    def chat_template(self) -> ChatTemplate:
        return ChatTemplate.of(self.tokenizer)
