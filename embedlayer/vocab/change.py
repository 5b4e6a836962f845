"""What an edit asks for: where each token of the new vocabulary comes from, and what the new ones start as."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from embedlayer.data.tokenizer import fingerprint, table_size
from embedlayer.errors import VocabularyError
from embedlayer.io.files import JsonObject
from embedlayer.short_repr import short_repr
from embedlayer.vocab.receipt import Receipt
from embedlayer.vocab.roles import Roles
from embedlayer.vocab.rows import NEW, Moved, RowMove, Slot, Start
from embedlayer.vocab.starting_rows import Mean, NewToken, Origin, StartingRows
from embedlayer.vocab.tokenizer_edit import edit_tokenizer
from embedlayer.vocab.transplant import spelled_by

LARGEST_MULTIPLE = 1024

Token = str | int
"""A token, by its text or its ID."""


@dataclass(frozen=True)
class Change:
    """Where each token comes from.

    Attributes:
        sources: Old ID of each token after the edit, or -1.
        num_tokens: Tokens before.
        merged: Old ID to the new ID that stands for it now.
        tokenizer: After.
        old_tokenizer: Before.
        roles: Where the tokenizer is another one: its special token of each role, such as `eos_token`.
    """

    __repr__ = short_repr

    sources: tuple[int, ...]
    num_tokens: int
    merged: Mapping[int, int] = field(default_factory=dict)
    tokenizer: Tokenizer | None = None
    old_tokenizer: Tokenizer | None = None
    roles: Roles | None = None

    def move(self, rows: int, multiple: int | None = None) -> RowMove:
        """The move of a tensor with `rows` rows: first the tokens', behind them the last ones without a token.

        Args:
            rows: As many as there are tokens, or more.
            multiple: As in `rows_after`.
        """
        unnamed = torch.arange(self.num_tokens, rows)
        spare = torch.full((rows_after(self.num_tokens, rows, len(self.sources), multiple) - len(self.sources),), NEW)
        taken = min(len(unnamed), len(spare))
        if taken:
            spare[-taken:] = unnamed[-taken:]
        return RowMove(torch.cat([torch.tensor(self.sources, dtype=torch.int64), spare]), rows)

    def new_tokens(self, ids: Sequence[int]) -> list[NewToken]:
        """New tokens, as the old tokenizer writes them."""
        if self.tokenizer is None or self.old_tokenizer is None:
            return [NewToken(f"#{token}") for token in ids]
        return spelled_by(self.old_tokenizer, self.tokenizer, ids)

    def receipt(self, move: RowMove, moved: Moved, settings: JsonObject) -> Receipt:
        """What the edit did."""
        size, dropped = len(self.sources), [int(token) for token in move.dropped if token < self.num_tokens]
        return Receipt(
            move=move,
            num_tokens=(self.num_tokens, size),
            added={token: _name(self.tokenizer, token) for token in range(size) if self.sources[token] == NEW},
            dropped={token: _name(self.old_tokenizer, token) for token in dropped if token not in self.merged},
            merged=dict(self.merged),
            origins=moved.origins,
            rows=moved.rows,
            before=moved.before,
            after=moved.after,
            settings=settings,
            tokenizer=self.tokenizer,
            old_tokenizer=self.old_tokenizer,
        )


def _name(tokenizer: Tokenizer | None, token: int) -> str:
    return f"#{token}" if tokenizer is None else tokenizer.id_to_token(token) or f"#{token}"


def rows_after(num_tokens: int, rows: int, new_tokens: int, multiple: int | None = None) -> int:
    """Rows that are stored once there are `new_tokens`, where `rows` were stored for `num_tokens`.

    A table that is padded to a multiple stays so: the largest power of two that explains its rows, if `multiple` does
    not say. Rows that nothing explains stay for tokens to come, and go when tokens do.

    Example:
        >>> rows_after(32011, 32064, 32020), rows_after(32011, 32064, 20000), rows_after(32000, 32000, 32001)
        (32064, 20032, 32001)
    """
    if multiple is None and rows > num_tokens:
        powers = (2**k for k in range(LARGEST_MULTIPLE.bit_length() - 1, 0, -1))
        multiple = next((power for power in powers if _rounded_up(num_tokens, power) == rows), None)
        if multiple is None:
            return max(new_tokens, rows) if new_tokens >= num_tokens else new_tokens
    return _rounded_up(new_tokens, 1 if multiple is None else multiple)


def _rounded_up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple


class Asked(NamedTuple):
    """An edit, before it is known of what.

    Attributes:
        change: Where each token comes from, given the tokenizer and the rows that there are.
        init: What new tokens start as.
        init_head: What they start as in a head that has rows of its own.
        pad_to_multiple_of: Rows are stored up to this multiple.
    """

    change: Callable[[Tokenizer | None, int], Change]
    init: StartingRows
    init_head: StartingRows
    pad_to_multiple_of: int | None

    def starts(self, change: Change, move: RowMove) -> Callable[[Slot], Iterator[Start]]:
        """What the fresh rows of a tensor hold: new tokens as asked, rows without a token the mean of the others.

        A mean row adds at most one part in V to a softmax over V tokens, whatever the hidden state. A bias follows its
        rows: it is the mean over those that a new row was made from, or over all.
        """
        size = len(change.sources)
        fresh = move.started.tolist()
        tokens = change.new_tokens([token for token in fresh if token < size])
        unnamed = [NewToken("")] * (len(fresh) - len(tokens))

        def start(slot: Slot) -> Iterator[Start]:
            part = slot.tensor.detach()
            if part.dim() == 1:
                rows_of_each = made[slot.end] if slot.end in made else made.get("table", [()] * len(tokens))
                yield Start(_bias(part[: change.num_tokens], [*rows_of_each, *[()] * len(unnamed)]), [])
                return
            init = self.init if slot.end == "table" else self.init_head
            rows = slot.owners.reader(part, move.old_size, change.num_tokens)
            made[slot.end] = []
            for new in init.blocks(rows, tokens):
                made[slot.end] += [origin.rows for origin in new.origins]
                yield Start(new.values, [_words(origin) for origin in new.origins])
            for new in Mean().blocks(rows, unnamed):
                yield Start(new.values, ["mean"] * len(new.values))

        made: dict[str | None, list[tuple[int, ...]]] = {}
        return start


def _bias(old: Tensor, made_from: Sequence[Sequence[int]]) -> Tensor:
    mean = old.double().mean()
    return torch.stack([old[list(rows)].double().mean() if rows else mean for rows in made_from]).to(old.dtype)


def _words(origin: Origin) -> str:
    return f"{origin.start} of {', '.join(map(str, origin.rows))}" if origin.rows else origin.start


def change_of_tokens(tokenizer: Tokenizer, **options: Any) -> Change:
    """A change of a tokenizer's vocabulary, with the options of `edit_tokenizer`."""
    edit = edit_tokenizer(tokenizer, **options)
    sources = tuple(NEW if source is None else source for source in edit.sources)
    return Change(sources, table_size(tokenizer), edit.merged, edit.tokenizer, tokenizer)


def change_of_ids(
    size: int,
    *,
    add: object = (),
    remove: Iterable[Token] = (),
    keep: Iterable[Token] | None = None,
    order: Sequence[Token] | None = None,
    merge: Mapping[Token, Token] | None = None,
    special: object = (),
) -> Change:
    """A change of a vocabulary that is known by its IDs only.

    Raises:
        VocabularyError: A token is named by text, twice, or is none of the vocabulary.
    """
    if special or not isinstance(add, int):
        raise_if_named([*special, *(() if isinstance(add, int) else add)])  # type: ignore[misc]
    count = add if isinstance(add, int) else 0
    gone = set(_ids(remove, size, "remove"))
    if keep is not None:
        if gone:
            raise VocabularyError("Give remove or keep, not both.")
        gone = set(range(size)) - set(_ids(keep, size, "keep"))
    into = dict(zip(_ids(merge or {}, size, "merge"), _ids((merge or {}).values(), size, "", once=False), strict=True))
    gone |= into.keys()
    lost = sorted(gone & set(into.values()))
    if lost:
        raise VocabularyError(f"Token {lost[0]} cannot stand for another one: it goes itself.")
    if count < 0:
        raise VocabularyError(f"{count} new tokens cannot be added.")
    stay = [token for token in range(size) if token not in gone]
    if order is not None:
        stay = _ids(order, size, "reorder")
        if set(stay) != set(range(size)) - gone:
            raise VocabularyError(f"reorder must name each of the {size - len(gone)} tokens that stay, and no other.")
    place = {token: new for new, token in enumerate(stay)}
    merged = {old: place[new] for old, new in into.items()}
    return Change((*stay, *[NEW] * count), size, merged)


def _ids(tokens: Iterable[Token], size: int, option: str, *, once: bool = True) -> list[int]:
    found = list(tokens)
    raise_if_named(found)
    for token in found:
        if not 0 <= int(token) < size:
            raise VocabularyError(f"Token {token} is none of the {size} tokens (0..{size - 1}).")
    if once and len(set(found)) < len(found):
        raise VocabularyError(f"{option} names a token twice.")
    return [int(token) for token in found]


def raise_if_named(tokens: Iterable[object]) -> None:
    """Without a tokenizer, refuse tokens that are given by their text.

    Raises:
        VocabularyError: Naming the first.
    """
    named = next((token for token in tokens if not isinstance(token, int | np.integer)), None)
    if named is not None:
        raise VocabularyError(
            f"{named!r} is a text, and there is no tokenizer here that knows it: give tokenizer=..., or name tokens by "
            f"their IDs and say how many are added, add=2."
        )


def own_or_given(own: Tokenizer | None, given: Tokenizer | None) -> Tokenizer | None:
    """The tokenizer of a layer or folder, which need not be given.

    Raises:
        VocabularyError: Another one was given.
    """
    if own is not None and given is not None and fingerprint(own) != fingerprint(given):
        raise VocabularyError("The given tokenizer is not the one that is there: leave it out, or see transplant.")
    return given if own is None else own
