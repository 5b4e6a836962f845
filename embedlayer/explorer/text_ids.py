"""Token IDs of a text, by a tokenizer, by names of rows, or typed as `#17 #42`; and tokens as the page shows them."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

from tokenizers import Tokenizer

from embedlayer.core import visible_text
from embedlayer.core.errors import TextError, TokenIdError, TokenizerError
from embedlayer.explorer.text_answers import ShownToken, TokenKind
from embedlayer.opening.opened_model import OpenedModel
from embedlayer.tokenization.bytes import entry_reader
from embedlayer.tokenization.ids import unknown_id
from embedlayer.tokenization.tokenizer_calls import decode, encode, pure_tokenizer

WORDS_OF_A_NAME = 6
UNKNOWN_SHOWN = 5
NAMES_SHOWN = 12
LONGEST_NUMBER = 18  # digits of the largest number that is read; tables have fewer rows
UNKNOWN_NAMES = ("<unk>", "<UNK>", "[UNK]", "UNK")  # names of the row that stands for all unknown words

_WORD = re.compile(r"\w+|[^\w\s]")
_IDS = re.compile(r"#\d+(?:[\s,]+#\d+)*")


class NamedRows:
    """The names of a table's rows, and the rows whose names are in a text."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.unknown = next((row for row, name in enumerate(names) if name in UNKNOWN_NAMES), None)
        self._exact: dict[str, int] = {}
        self._folded: dict[str, int] = {}
        for key in (str, str.strip):  # a name with spaces around it is found where no other is the word itself
            for row, name in enumerate(names):
                if name.strip():
                    self._exact.setdefault(key(name), row)
                    self._folded.setdefault(key(name).casefold(), row)

    def ids(self, text: str) -> tuple[list[int], list[str]]:
        """Return the rows of a text, and its words that are no row's name."""
        ids: list[int] = []
        unknown: list[str] = []
        for start, stop, row in self.places(text):
            if row is None:
                unknown.append(text[start:stop])
                row = self.unknown
            ids.extend([] if row is None else [row])
        return ids, unknown

    def places(self, text: str) -> Iterator[tuple[int, int, int | None]]:
        """Yield for each name in a text, as in `ids`, its first character, the one behind it, and its row."""
        words = list(_WORD.finditer(text))
        first = 0
        while first < len(words):
            start = words[first].start()
            for behind in range(min(len(words), first + WORDS_OF_A_NAME), first, -1):
                stop = words[behind - 1].end()
                row = self._row(text[start:stop])
                if row is not None or behind == first + 1:
                    yield start, stop, row
                    first = behind
                    break

    def _row(self, text: str) -> int | None:
        spaced = " ".join(text.split())
        forms = (spaced, spaced.replace(" ", "_"))
        exact = (self._exact.get(form) for form in forms)
        folded = (self._folded.get(form.casefold()) for form in forms)
        return next((row for row in (*exact, *folded) if row is not None), None)


Vocabulary = Tokenizer | NamedRows | None
"""What converts a text to token IDs; `None` accepts only IDs such as `#17 #42`."""


def vocabulary_of(source: OpenedModel) -> Vocabulary:
    """Return what converts texts to IDs of a source: its tokenizer, else the names of its rows, else `None`."""
    tokens, tokenizer = source.tokens, source.text_tokenizer
    if tokenizer is not None:
        return source.once("pure tokenizer", lambda: pure_tokenizer(tokenizer))
    if tokens is None:
        return None
    return source.once("named rows", lambda: NamedRows(tokens))


@dataclass(frozen=True)
class TextIds:
    """The token IDs of a text."""

    ids: list[int]
    how: str


def text_ids(vocabulary: Vocabulary, text: str, vocab_size: int, *, add_special_tokens: bool = False) -> TextIds:
    if isinstance(vocabulary, Tokenizer):
        try:
            ids = encode(vocabulary, text, add_special_tokens=add_special_tokens).ids
        except TokenizerError as error:
            raise TextError(f"{error} Try another text.") from error
        if not ids:
            raise TextError(f"{text!r} has no tokens: there is nothing to look up.")
        return TextIds(ids, "")
    if lists_ids(text):
        return TextIds(_typed_ids(text, vocab_size), "The text lists IDs: each is the number of a row.")
    if vocabulary is None:
        raise TokenizerError(
            "This source has no tokenizer and no names. Type IDs, such as #17 #42, or pass --tokenizer."
        )
    ids, unknown = vocabulary.ids(text)
    if not ids:
        said = f"{_quoted(unknown)}: no row has such a name" if unknown else f"{text!r} has no words"
        few = len(vocabulary.names) <= NAMES_SHOWN
        names = f"these: {', '.join(vocabulary.names)}" if few else "names of rows, or IDs such as #17 #42"
        raise TextError(f"{said}, so there is nothing to look up. Type {names}.")
    split = "Split at the names of the rows, the longest first."
    return TextIds(ids, f"{split} {_unknown_words(vocabulary, unknown)}".rstrip())


def _unknown_words(vocabulary: NamedRows, words: Sequence[str]) -> str:
    """Say what became of the words that are no row's name; `""` if there are none."""
    if not words:
        return ""
    if vocabulary.unknown is None:
        return f"Left out, because no row has such a name: {_quoted(words)}."
    name = visible_text(vocabulary.names[vocabulary.unknown])
    return f"Replaced by {name}, row {vocabulary.unknown}, because no row has such a name: {_quoted(words)}."


def lists_ids(text: str) -> bool:
    return _IDS.fullmatch(text.strip()) is not None


def _typed_ids(text: str, vocab_size: int) -> list[int]:
    """Return the IDs in a text such as `#17 #42`; raise a `TokenIdError` if one is outside the table."""
    ids = [whole_number(digits) for digits in re.findall(r"\d+", text)]
    outside = next((number for number in ids if number >= vocab_size), None)
    if outside is not None:
        raise TokenIdError(f"#{outside} is no row of this table: its rows are #0 to #{vocab_size - 1}.")
    return ids


def whole_number(digits: str) -> int:
    """Return the number of a string of digits; 10^18 for a longer one, as it is outside of every table."""
    return int(digits) if len(digits) <= LONGEST_NUMBER else 10**LONGEST_NUMBER


def _quoted(words: Sequence[str]) -> str:
    """Return the first of some different words in quotation marks, separated by commas."""
    different = list(dict.fromkeys(words))
    more = len(different) - UNKNOWN_SHOWN
    shown = ", ".join(f"“{word}”" for word in different[:UNKNOWN_SHOWN])
    return f"{shown} and {more} more" if more > 0 else shown


def longer_text(
    vocabulary: Vocabulary, text: str, appended: Sequence[int], vocab_size: int, *, add_special_tokens: bool = False
) -> tuple[str, tuple[int, ...]]:
    """Return the text with as many of the appended tokens as possible, and the IDs of the others."""
    if not appended:
        return text, ()

    def ids_of(some: str) -> list[int]:
        return text_ids(vocabulary, some, vocab_size, add_special_tokens=add_special_tokens).ids

    start = ids_of(text)
    for count in range(len(appended), 0, -1):
        longer = text + _text_after(vocabulary, start, appended[:count])
        if longer.isprintable() and ids_of(longer) == [*start, *appended[:count]]:
            return longer, tuple(appended[count:])
    return text, tuple(appended)


def _text_after(vocabulary: Vocabulary, start: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text of `ids` where it follows that of `start`."""
    if isinstance(vocabulary, Tokenizer):
        return decode(vocabulary, [*start, *ids]).removeprefix(decode(vocabulary, start))
    return "".join(f" #{number}" if vocabulary is None else f" {vocabulary.names[number]}" for number in ids)


_unknown_id = lru_cache(maxsize=8)(unknown_id)  # a Unigram model says it only when all of it is written as JSON


def shown_tokens(vocabulary: Vocabulary, ids: Sequence[int]) -> tuple[ShownToken, ...]:
    """Return tokens in the form that the page shows, one for each ID. The unknown token is a special one."""
    if vocabulary is None:
        return tuple(ShownToken(id=number, decoded="", text=f"#{number}", kind="text") for number in ids)
    if isinstance(vocabulary, NamedRows):
        names = ((number, vocabulary.names[number], number == vocabulary.unknown) for number in ids)
        return tuple(
            ShownToken(
                id=number, decoded=name, text=visible_text(name) or f"#{number}", kind="special" if special else "text"
            )
            for number, name, special in names
        )
    read = entry_reader(vocabulary)
    specials: set[int | None] = {i for i, token in vocabulary.get_added_tokens_decoder().items() if token.special}
    specials.add(_unknown_id(vocabulary))

    @cache
    def shown(number: int) -> ShownToken:
        """Return the token with the ID `number` in the form that the page shows; `row ID` if the tokenizer lacks it."""
        entry = vocabulary.id_to_token(number)
        if entry is None:
            return ShownToken(id=number, decoded="", text=f"row {number}", kind="special")
        text = read(entry)
        is_byte = text.startswith("<0x") and text.endswith(">")
        kind: TokenKind = "special" if number in specials else "byte" if is_byte else "text"
        return ShownToken(id=number, decoded=text, text=visible_text(text), kind=kind)

    return tuple(shown(number) for number in ids)
