"""New tokens of a tokenizer: which become entries of its model, and whether a text is encoded with each."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer

from embedlayer.core.errors import VocabularyError
from embedlayer.io.files import JsonObject
from embedlayer.tokenization.bytes import TokenBytes
from embedlayer.tokenization.tokenizer_calls import encode, normalized, pre_tokens, pure_tokenizer
from embedlayer.vocab.bpe_merges import BPEMerges

_RUNNING_TEXTS = ("a{} b", "a{}b", ".{}.", "a {} b", ". {} .")
_CONTEXTS = ("{}", "a{}", "{}a", " {}", "{} a", "1{}", ".{}")


@dataclass(frozen=True)
class AddedMerge:
    """Name a new BPE token by the two tokens that it is merged from; its merge comes after all others.

    Text is first encoded with the merges that were there before. Then each neighbouring pair `left`, `right` inside a
    pre-token becomes the new token, as in continued BPE training. So a text is encoded as before, with some runs of its
    tokens joined.

    Attributes:
        left: The first token as written in the vocabulary, such as `Ġasync`; an old token or an earlier new one.
        right: The second token as written in the vocabulary, such as `io`, with its continuation prefix if any.

    Example:
        >>> tokenizer = train_tokenizer("I love dogs, I love cats", vocab_size=270)
        >>> edit = edit_tokenizer(tokenizer, add=[AddedMerge("d", "o"), AddedMerge("do", "g")])
        >>> edit.tokenizer.encode("dogs, fog").tokens
        ['dog', 's', ',', 'Ġ', 'f', 'o', 'g']

    Reference:
        Purason et al., "Teaching Old Tokenizers New Words", https://arxiv.org/abs/2512.03989.
    """

    left: str
    right: str

    def name(self, prefix: str = "") -> str:
        """Return the new token as written in the vocabulary: `left`, and `right` without the continuation prefix."""
        return self.left + self.right[len(prefix) :]


AddedTokens = Iterable[str | AddedToken | AddedMerge]
"""New tokens, each as a text, as an `AddedToken` with its own rules, or as an `AddedMerge` of a BPE tokenizer."""


def new_entries(old: TokenBytes, add: AddedTokens, special: Iterable[str | AddedToken]) -> dict[str, AddedToken | None]:
    """Decide for each new token whether it becomes an entry of the model's vocabulary or an added token."""
    if isinstance(add, str) or isinstance(special, str):
        raise VocabularyError(f"Give a list of tokens, not the text {add or special!r}: its letters would be added.")
    added, specials = _by_name(add, "add", old), _by_name(special, "special", old)
    for text, token in (added | specials).items():
        if not text:
            raise VocabularyError("An empty text cannot be a token. Leave it out.")
        there = old.vocabulary.get(text)
        if there is None and not isinstance(token, AddedMerge) and old.convention in ("byte-level", "sentencepiece"):
            there = old.by_bytes.get(text.encode())
            there = None if there is not None and old.is_byte(there) else there
        if there is not None:
            raise VocabularyError(f"{text!r} cannot be added: it is token {there} ({old.entries[there]!r}).")
    _check_normalized(old, [text for text, token in added.items() if isinstance(token, str) and text not in specials])
    tokens: dict[str, AddedToken | None] = {}
    outside = has_added_ids(old)
    for text, token in (added | specials).items():
        if isinstance(token, AddedMerge):
            tokens[text] = None
            continue
        entry = None if text in specials or isinstance(token, AddedToken) else _entry(old, text)
        if entry is not None and not outside:
            if entry in tokens:
                raise VocabularyError(f"{text!r} is named twice among the new tokens. Name each once.")
            tokens[entry] = None
        else:
            mark = {"byte-level": "Ġ", "sentencepiece": "▁"}.get(old.convention)  # of a space in a file
            if isinstance(token, str) and mark is not None and mark in token:
                raise VocabularyError(f"{token!r} has a file's mark of a space: pass {token.replace(mark, ' ')!r}.")
            tokens[text] = _rules(old, token, word=entry == text, special=text in specials)
    return tokens


def _check_normalized(old: TokenBytes, texts: Sequence[str]) -> None:
    """Check that no two new tokens, and no new and old token, are the same text after the tokenizer's normalizer."""
    if old.tokenizer.normalizer is None:
        return
    seen: dict[str, str] = {}
    for text in texts:
        same = normalized(old.tokenizer, text).replace("▁", " ")
        other = seen.setdefault(same, text)
        if other.replace("▁", " ").strip() != text.replace("▁", " ").strip():
            raise VocabularyError(f"{other!r} and {text!r} normalize to {same!r}: name one, or normalized=False.")
        if same.strip() == text.strip():
            continue
        token_id = old.vocabulary.get(same, old.by_bytes.get(same.encode()))
        if token_id is not None:
            raise VocabularyError(f"{text!r} normalizes to {same!r}, token {token_id}: pass normalized=False.")


def _rules(old: TokenBytes, token: str | AddedToken, *, word: bool, special: bool) -> AddedToken:
    """Return the `AddedToken` for a new token that does not become an entry of the model's vocabulary."""
    if isinstance(token, AddedToken):
        return AddedToken(**{**token.__getstate__(), "special": token.special or special})
    normal = old.tokenizer.normalizer is not None and normalized(old.tokenizer, token) == token
    word = word and old.convention in ("word", "wordpiece")
    return AddedToken(token, single_word=word, normalized=normal and not special, special=special)


def _entry(old: TokenBytes, text: str) -> str | None:
    """Return the vocabulary entry with which the model would find a new token, or `None` if it cannot."""
    model = old.tokenizer.model
    kind = type(model).__name__
    chunks = pre_tokens(old.tokenizer, text)
    if kind == "Unigram":
        entry = text.replace(" ", "▁")
        word, whole = entry.removeprefix("▁"), chunks in ([entry], ["▁" + entry])
    elif kind in ("WordPiece", "WordLevel"):
        entry, word = text, text.removeprefix(old.prefix) or text
        chunks = pre_tokens(old.tokenizer, word)
        whole = chunks == [word] and len(word) <= getattr(model, "max_input_chars_per_word", sys.maxsize)
    else:
        return None
    return entry if whole and word and normalized(old.tokenizer, word) == word else None


def _by_name(tokens: AddedTokens, option: str, old: TokenBytes) -> dict[str, str | AddedToken | AddedMerge]:
    """Return a dictionary from the name of each new token to the token as it was passed."""
    named: dict[str, str | AddedToken | AddedMerge] = {}
    for token in tokens:
        name = token_name(token, old)
        if name in named:
            raise VocabularyError(f"{option} names {name!r} twice. Name each new token once.")
        named[name] = token
    return named


def token_name(token: str | AddedToken | AddedMerge, old: TokenBytes) -> str:
    """Return the text of a new token; for an `AddedMerge`, the vocabulary entry that it gives."""
    if isinstance(token, AddedMerge):
        return token.name(old.prefix)
    return token if isinstance(token, str) else token.content


def check_merges(merges: Mapping[str, AddedMerge], names: Sequence[str], data: JsonObject) -> None:
    """Check that the model of a tokenizer can have new merges, and that both parts of each exist before it."""
    kind = data["model"]["type"]
    if merges and kind != "BPE":
        raise VocabularyError(f"{next(iter(merges))!r} cannot be added: a {kind} tokenizer has no merges.")
    known = set(names) - merges.keys()
    for name, merge in merges.items():
        missing = [part for part in (merge.left, merge.right) if part not in known]
        if missing:
            raise VocabularyError(f"{name!r} cannot be merged: {missing[0]!r} is no token yet. Add it first.")
        known.add(name)


def check_reached(tokenizer: Tokenizer, new: Mapping[str, AddedToken | None], merges: BPEMerges | None) -> None:
    """Check that the edited tokenizer encodes the text of each new token as that token, alone and in a running text."""
    bare = pure_tokenizer(tokenizer)
    if merges is not None:
        tokens = TokenBytes(bare)
        for name in [name for name, rules in new.items() if rules is None]:
            if merges.parts_of(name) is None or not _is_in_a_word(tokens, name):
                raise VocabularyError(f"{name!r} cannot be added as a merge: no text is encoded with it. Leave it out.")
    for text in [text for text, rules in new.items() if rules is not None]:
        token_id = bare.token_to_id(text)
        around = _RUNNING_TEXTS if text == text.strip() else _RUNNING_TEXTS[:3]  # no two spaces in a row
        alone, *running = (encode(bare, each.format(text)) for each in ("{}", *around))
        if alone.ids == [token_id] and any(token_id in each.ids for each in running):
            continue
        tokens_of, where = (alone, "a text, which") if alone.ids != [token_id] else (running[0], "running text, which")
        raise VocabularyError(
            f"{text!r} cannot be added: it would never be found in {where} is encoded as {tokens_of.tokens}. Pass an "
            f"AddedToken with normalized=False, or remove the token that matches first."
        )


def _is_in_a_word(tokens: TokenBytes, name: str) -> bool:
    """Return whether a BPE token can be part of a pre-token, alone or with other text around it."""
    try:
        text = tokens.readings(tokens.vocabulary[name])[0].decode()
    except UnicodeDecodeError:
        return True
    letters = name.removeprefix(tokens.prefix).removesuffix(tokens.suffix)
    texts = [normalized(tokens.tokenizer, around.format(text)) for around in _CONTEXTS]
    return any(letters in word for each in texts for word in pre_tokens(tokens.tokenizer, each))


def has_added_ids(old: TokenBytes) -> bool:
    """Return whether at least one added token has an ID that is not in the model's own vocabulary."""
    return not old.added <= {*old.tokenizer.get_vocab(with_added_tokens=False).values()}
