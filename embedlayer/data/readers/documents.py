"""What a corpus reads: documents of a source, between two places of it; and which field of a row is the document."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from embedlayer.core.errors import TextError
from embedlayer.data.readers.chats import ChatTemplate
from embedlayer.data.text_chunks import split_text

TEXT_FIELD, CHAT_FIELD, TOOLS_FIELD = "text", "messages", "tools"
_SHOWN_NAMES = 12
_JSON_KINDS = {
    str: "a text",
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
}

TOOLS_REFUSED = f"{TOOLS_FIELD!r}: chats are rendered without tools. Leave it out, or write them into a message."

Record = Callable[[], str]
"""Function that returns how an error names a record, `FILE, line 3,`: it is called for an error only."""


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


def chosen_field(record: Record, row: Mapping[str, Any], options: RowOptions) -> tuple[str, bool]:
    """Return the name of the field with the document, and whether it is a chat, from the first row of a source."""
    names = [TEXT_FIELD, CHAT_FIELD] if options.text_field is None else [options.text_field]
    field = next((name for name in names if name in row), None)
    if field is None:
        raise TextError(f"{record()} has no field {names[0]!r} ({_named_fields(row)}): pass --text-field, text_field=.")
    if isinstance(row[field], list):
        options.chat_template  # noqa: B018  raises its errors before anything is encoded
        return field, True
    return field, False


def document_of(
    record: Record, row: Mapping[str, Any], field: str | None, is_chat: bool, options: RowOptions
) -> Document:
    assert field is not None  # the first row has chosen it
    try:
        value = row[field]
    except KeyError:
        raise TextError(f"{record()} has no field {field!r} ({_named_fields(row)}), as the first row has.") from None
    ranges = None
    if is_chat and isinstance(value, list):
        if row.get(TOOLS_FIELD):
            raise TextError(f"{record()} has a field {TOOLS_REFUSED}")
        try:
            value, ranges = options.chat_template.render(value)
        except TextError as error:
            raise TextError(f"{record()} has a chat in its field {field!r}. {error}") from error
    if not isinstance(value, str) or (is_chat and ranges is None):
        kind = _JSON_KINDS.get(type(value), type(value).__name__)
        raise TextError(f"{record()} has a field {field!r} that is {kind}, and not a {'chat' if is_chat else 'text'}.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise TextError(f"{record()} has {error.object[error.start]!a}, half of a surrogate pair.") from error
    return Document(value, weighted=ranges)


def _named_fields(row: Mapping[str, Any]) -> str:
    return f"it has {', '.join([*row][:_SHOWN_NAMES]) or 'none'}"
