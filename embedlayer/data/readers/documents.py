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
    """A document, or the rest of one.

    Attributes:
        text: The text: a string, which is encoded whole unless it is long, or blocks of it.
        before: The last characters before `text`, if it is the rest of a document.
        weighted: Character ranges `(start, stop)` of a string, in order: the tokens in them have the weight 1 in the
            loss and all others 0. `None`: every token has the weight 1.
    """

    text: str | Iterable[str]
    before: str = ""
    weighted: Sequence[tuple[int, int]] | None = None


class Reader(ABC):
    """Reader of the documents of one source.

    Places in a source are numbers from 0 to its size in bytes. A shard begins at a place that `cut` returns.

    Attributes:
        source: The path of the source, or `"-"`.
        has_rows: Whether each row of the source is a document; if not, the source is one document.
        has_weights: Whether its documents have weights.
        position: How many bytes of the source the last call of `documents` has read so far.
    """

    has_rows = True
    has_weights = False

    def __init__(self, source: str | Path) -> None:
        self.source = source
        self.position = 0

    def check(self) -> None:  # noqa: B027  nothing is left to check of rows
        """Check the start of the source, as far as that was not done when the reader was built.

        Raises:
            TextError: It is not plain text.
        """

    @abstractmethod
    def cut(self, place: int, size: int, tokenizer: Tokenizer) -> int:
        """Return the first place at or after `place` where a shard may begin; `size` if there is none.

        It depends on the bytes around it alone, and grows with `place`; 0 and `size` are returned unchanged.

        Raises:
            FileError: The source cannot be read.
            TextError: The source is not what it should be.
        """

    @abstractmethod
    def documents(self, begin: int = 0, end: int | None = None) -> Iterator[Document]:
        """Yield the documents between two places that `cut` returned; `end` is the end of the source by default.

        Raises:
            FileError: The source cannot be read or is damaged.
            TextError: The source is not plain text, or a record is not what it should be; the error names the record.
        """

    def texts(self) -> Iterator[str]:
        """Yield the text of all documents, in chunks of some thousand characters, to train a tokenizer on."""
        for document in self.documents():
            yield from split_text([document.text] if isinstance(document.text, str) else document.text)


@dataclass(frozen=True)
class RowOptions:
    """Which part of a row is the document.

    Attributes:
        text_field: Name of the field with the text, or with the messages of a chat; `None`: `text`, else `messages`.
        tokenizer: Tokenizer of transformers whose chat template renders chats, or the path of its folder or of a file
            in it; see `ChatTemplate.of`.
    """

    text_field: str | None = None
    tokenizer: object = None

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The chat template; its errors are those of `ChatTemplate.of`."""
        return ChatTemplate.of(self.tokenizer)
