"""Classify each row of a table by what its tokenizer says about the token.

| kind | tokens |
|---|---|
| `"no token"` | a row beyond the tokenizer's entries, or in a gap of its IDs |
| `"special"` | a token that was added or that the tokenizer never splits: `[CLS]`, `<s>`, padding |
| `"byte"` | bytes that are not a whole character: `<0xE2>`, also a byte-fallback token of a character |
| `"unreachable"` | an entry that the tokenizer produced for none of the tested texts: `[unused12]`, BERT's `##三` |
| `"space"` | white space only |
| `"number"` | digits, with or without punctuation |
| `"punctuation"` | neither letters nor digits |
| `"word"` | letters at the start of a word |
| `"part"` | letters inside a word |
"""

from collections.abc import Sequence
from itertools import pairwise

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from embedlayer.tokenization.bytes import BYTE_ENTRY, entry_reader
from embedlayer.tokenization.ids import unknown_id
from embedlayer.tokenization.tokenizer_calls import encode_batch, pure_tokenizer

KINDS = ("word", "part", "number", "punctuation", "space", "byte", "special", "unreachable", "no token")
"""All kinds, in the order in which reports list them."""

CONTEXTS = ("", "«", "\n", "a ", "7")
"""Texts placed before an entry to test whether the tokenizer produces it; letters of the vocabulary are added."""

LETTERS = 8

ENCODED_AT_ONCE = 4096


def token_kinds(tokenizer: Tokenizer, vocab_size: int) -> list[str]:
    """Return the kind of each of the `vocab_size` rows, by ID: one of `KINDS`, which this module's docstring explains.

    An entry is `"unreachable"` if the tokenizer produces it for none of up to twenty texts that end with it. The test
    can miss a rare context, so an entry may be called unreachable by mistake, but never reachable by mistake. A
    tokenizer without its own unknown token, such as that of a file of vectors, cannot encode most texts, so the test is
    skipped.

    Example:
        >>> from embedlayer.tokenization.train import train_tokenizer
        >>> kinds = token_kinds(train_tokenizer((), "byte"), 258)
        >>> kinds[ord("a")], kinds[ord("7")], kinds[0xE2], kinds[256], kinds[257]
        ('word', 'number', 'byte', 'special', 'no token')
    """
    tokenizer = pure_tokenizer(tokenizer)
    unknown = unknown_id(tokenizer)
    added = {*tokenizer.get_added_tokens_decoder(), unknown}
    read = entry_reader(tokenizer)
    inner = getattr(tokenizer.model, "continuing_subword_prefix", None) or ""  # WordPiece's `##`
    kinds: list[str] = []
    texts: dict[int, str] = {}
    for token in range(vocab_size):
        entry = tokenizer.id_to_token(token)
        if entry is None:
            kinds.append("no token")
        elif token in added:
            kinds.append("special")
        else:
            text = read(entry)
            is_part = bool(inner) and entry.startswith(inner) and entry != inner
            texts[token] = text[len(inner) :] if is_part else text
            kinds.append(_kind(entry, texts[token], is_part=is_part))
    written = [token for token in texts if kinds[token] != "byte"]
    can_encode = unknown is not None or getattr(tokenizer.model, "unk_token", None) is None  # else an error
    if can_encode:
        for token in set(written) - reachable(tokenizer, written, [texts[token] for token in written]):
            kinds[token] = "unreachable"
    words = {token for token, kind in enumerate(kinds) if kind == "word"}
    begin = {token for token in words if texts[token][0].isspace()}
    # if words begin with a space, others are parts; entries of WordLevel are whole words
    if begin and not inner and not isinstance(tokenizer.model, WordLevel):
        for token in words - begin:
            kinds[token] = "part"
    return kinds


def reachable(tokenizer: Tokenizer, tokens: Sequence[int], texts: Sequence[str]) -> set[int]:
    """Return the IDs that the tokenizer produces when it encodes the tokens' own texts.

    Each text is encoded in up to twenty contexts, until its ID is produced: after each of `CONTEXTS`, and after one or
    two letters.
    """
    left = list(zip(tokens, texts, strict=True))
    produced: set[int] = set()
    letters = sorted({text for text in texts if len(text) == 1 and text.isalnum() and text.isascii()}, reverse=True)
    letters = letters[:: max(1, len(letters) // LETTERS)][:LETTERS]
    pairs = [first + second for first, second in pairwise(letters)]
    for context in (*CONTEXTS, *letters, *pairs):
        for start in range(0, len(left), ENCODED_AT_ONCE):
            part = left[start : start + ENCODED_AT_ONCE]
            encodings = encode_batch(tokenizer, [context + text for _, text in part])
            produced |= {token for (token, _), encoding in zip(part, encodings, strict=True) if token in encoding.ids}
        left = [(token, text) for token, text in left if token not in produced]
    return produced


def _kind(entry: str, text: str, *, is_part: bool) -> str:
    """Return the kind of a vocabulary entry by its characters, one of the kinds in the table of this module."""
    if BYTE_ENTRY.search(text) or BYTE_ENTRY.fullmatch(entry):
        return "byte"
    if not text.strip():
        return "space"
    if not any(map(str.isalnum, text)):
        return "punctuation"
    if not any(map(str.isalpha, text)):
        return "number"
    return "part" if is_part else "word"
