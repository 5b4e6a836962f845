"""Rows: which field of a row is the document, and what it must be."""

from collections.abc import Callable, Mapping
from typing import Any

from embedlayer.core.errors import TextError
from embedlayer.data.readers.documents import Document, RowOptions

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
