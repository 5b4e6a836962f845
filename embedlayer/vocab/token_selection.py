"""Which tokens a vocabulary has after an edit, and in which order; with and without a tokenizer."""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence

import numpy as np

from embedlayer.core.errors import VocabularyError
from embedlayer.tokenization.bytes import Token, TokenBytes

SHOWN = 5


class NumberedTokens:
    """Vocabulary of a model without a tokenizer: its tokens are named `#0`, `#1` and so on, and found by ID only."""

    def __init__(self, size: int) -> None:
        self.entries = {token_id: f"#{token_id}" for token_id in range(size)}
        self.vocabulary = {name: token_id for token_id, name in self.entries.items()}

    def find(self, token: Token) -> int:
        """Return a token's ID, which is the token itself: without a tokenizer, a token is named by its ID only."""
        require_ids([token])
        if int(token) not in self.entries:
            raise VocabularyError(f"There is no token {token}: the model has {len(self.entries)} tokens.")
        return int(token)


def require_ids(tokens: Iterable[object]) -> None:
    """Raise a `VocabularyError` if a token is no ID, for a model without a tokenizer."""
    text = next((token for token in tokens if not isinstance(token, int | np.integer)), None)
    if text is not None:
        raise VocabularyError(f"{text!r} needs tokenizer=...; without one pass IDs, and add=2.")


def select_tokens(
    old: TokenBytes | NumberedTokens,
    new: Iterable[str] = (),
    *,
    remove: Iterable[Token] = (),
    keep: Iterable[Token] | None = None,
    order: Sequence[Token] | None = None,
    merge: Mapping[Token, Token] | None = None,
    required: Mapping[int, str] | None = None,
    with_parts: Callable[[set[int]], set[int]] = set,
    unreachable: Callable[[set[int]], set[int]] = lambda removed: set(),
) -> tuple[list[str], list[int], dict[int, int], list[int]]:
    """Return the tokens after an edit: the kept old ones in the order of their IDs, then the new ones."""
    new, required = dict.fromkeys(new), required or {}
    merged = _merge_targets(old, merge or {}, new)
    removed = set(_ids(old, remove, "remove"))
    if keep is not None and removed:
        raise VocabularyError("Pass remove or keep, not both.")
    for token_id in removed | merged.keys():
        if token_id in required:
            raise VocabularyError(f"{old.entries[token_id]!r} cannot be dropped: {required[token_id]}.")
    if both := sorted(merged.keys() & removed):
        raise VocabularyError(f"Token {both[0]} ({old.entries[both[0]]!r}) is in merge and in remove. Choose one.")
    if keep is not None:
        to_keep = {old.find(token) for token in _listed(keep, "keep")} - merged.keys()
        removed = old.entries.keys() - with_parts(to_keep | required.keys())
    removed |= merged.keys()
    along = unreachable(removed) - required.keys() - removed
    removed |= along
    for name in merged.values():
        if old.vocabulary.get(name) in removed:
            raise VocabularyError(f"{name!r} is removed, so it cannot be a merge target: keep it.")
    names = [old.entries[token_id] for token_id in sorted(old.entries.keys() - removed)] + list(new)
    if order is not None:
        names = _ordered(names, [_new_name(new, token) or old.entries[old.find(token)] for token in order])
    ids = {name: new_id for new_id, name in enumerate(names)}
    sources = [old.vocabulary.get(name, -1) for name in names]
    return names, sources, {token_id: ids[name] for token_id, name in merged.items()}, sorted(along)


def _listed(tokens: Iterable[Token], option: str) -> list[Token]:
    """Return tokens as a list; a single text, whose letters would be read as tokens, raises a `VocabularyError`."""
    if isinstance(tokens, str):
        raise VocabularyError(f"{option} must be a list of tokens, not the text {tokens!r}.")
    return list(tokens)


def _ids(old: TokenBytes | NumberedTokens, tokens: Iterable[Token], option: str) -> dict[int, Token]:
    """Return a dictionary from the ID of each token to the token as it was passed."""
    passed: dict[int, Token] = {}
    for token in _listed(tokens, option):
        token_id = old.find(token)
        if token_id in passed:
            raise VocabularyError(f"{option} names token {token_id} twice: {passed[token_id]!r}, {token!r}.")
        passed[token_id] = token
    return passed


def _new_name(new: Container[str], token: Token) -> str | None:
    """Return the name in `new` that a caller means by `token`, or `None` if there is none."""
    names = (token, token.replace(" ", "▁")) if isinstance(token, str) else ()
    return next((name for name in names if name in new), None)


def _merge_targets(
    old: TokenBytes | NumberedTokens, merge: Mapping[Token, Token], new: Container[str]
) -> dict[int, str]:
    """Return a dictionary from the old ID of each merged token to the name of the token that replaces it."""
    merged: dict[int, str] = {}
    for token, target in merge.items():
        token_id, name = old.find(token), _new_name(new, target) or old.entries[old.find(target)]
        if token_id in merged or old.entries[token_id] == name:
            raise VocabularyError(f"{token!r} cannot be merged into {target!r}: it is that token, or is merged twice.")
        merged[token_id] = name
    return merged


def _ordered(names: Sequence[str], wanted: list[str]) -> list[str]:
    """Check that `wanted`, the requested order, names each token of the result once, and return `wanted` unchanged."""
    known = set(names)
    extra, missing = [name for name in wanted if name not in known], sorted(known - set(wanted), key=names.index)
    if extra or missing or len(wanted) != len(names):
        raise VocabularyError(
            f"The order must name each of {len(names):,} tokens once, and has {len(wanted):,} places"
            f"{shown_names('; missing:', missing)}{shown_names('; not in the result:', extra)}."
        )
    return wanted


def shown_names(what: str, names: Sequence[str]) -> str:
    """Return a list of names for a message: `shown_names("missing:", names)` is "missing: 'a', 'b' and 3 more"."""
    more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return f"{what} {', '.join(map(repr, names[:SHOWN]))}{more}" if names else ""
