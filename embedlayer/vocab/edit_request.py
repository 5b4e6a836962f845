"""Requests: where each token of the new vocabulary comes from, and how the rows of the new ones are initialised."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer
from torch import Tensor

from embedlayer.data.tokenizer import fingerprint, missing_rows_message
from embedlayer.errors import VocabularyError
from embedlayer.io.files import JsonObject
from embedlayer.short_repr import short_repr
from embedlayer.vocab.row_init import MeanInit, NewToken, RowInit, WeightRows
from embedlayer.vocab.row_map import NEW, RowEdit, RowMap, RowTensor
from embedlayer.vocab.special_tokens import NewTokenIds, SpecialTokens
from embedlayer.vocab.tokenizer_match import spell_new_tokens

LARGEST_MULTIPLE = 1024


@dataclass(frozen=True)
class TokenMap:
    """Map each token after an edit to its old token.

    Attributes:
        sources: Old ID of each token after the edit, or -1 for a new token.
        num_tokens: Number of tokens before the edit.
        merged: New ID of the token that replaces each merged token, by the old ID of the merged token.
        tokenizer: The tokenizer after the edit, or `None`.
        old_tokenizer: The tokenizer before the edit, or `None`.
        special_tokens: After a change to another tokenizer: its special tokens by role, such as `eos_token`.
    """

    __repr__ = short_repr

    sources: tuple[int, ...]
    num_tokens: int
    merged: Mapping[int, int] = field(default_factory=dict)
    tokenizer: Tokenizer | None = None
    old_tokenizer: Tokenizer | None = None
    special_tokens: SpecialTokens | None = None

    @property
    def added(self) -> dict[int, str]:
        """Return the new tokens as a dictionary from new ID to text."""
        ids = [token_id for token_id, source in enumerate(self.sources) if source == NEW]
        return {token_id: _text(self.tokenizer, token_id) for token_id in ids}

    @property
    def dropped(self) -> dict[int, str]:
        """Return the removed tokens as a dictionary from old ID to text, without the merged tokens."""
        ids = sorted({*range(self.num_tokens)} - {*self.sources} - self.merged.keys())
        return {token_id: _text(self.old_tokenizer, token_id) for token_id in ids}

    def row_map(self, rows: int, multiple: int | None = None) -> RowMap:
        """Return the row map of a tensor with `rows` rows: the rows of tokens first, then rows without a token.

        Old rows without a token keep their values, at the end of the result, as far as there is room.

        Args:
            rows: Number of rows before the edit, at least the number of tokens.
            multiple: The number of rows is rounded up to a multiple of this; see `rows_after` for `None`.
        """
        size = rows_after(self.num_tokens, rows, len(self.sources), multiple)
        unused, spare = torch.arange(self.num_tokens, rows), torch.full((size - len(self.sources),), NEW)
        kept = min(len(unused), len(spare))
        spare[len(spare) - kept :] = unused[len(unused) - kept :]
        return RowMap(torch.cat([torch.tensor(self.sources, dtype=torch.int64), spare]), rows)

    def new_token_ids(self, row_map: RowMap) -> NewTokenIds:
        """Return the converter from old to new token IDs for configurations.

        Args:
            row_map: The row map that `TokenMap.row_map` returned.
        """
        return NewTokenIds(row_map.token_ids(self.merged).tolist(), self.dropped, self.tokenizer, self.special_tokens)

    def new_tokens(self) -> list[NewToken]:
        """Return the new tokens in the order of their new IDs, each with the old tokenizer's IDs of its text.

        Without a tokenizer before or after the edit, these old IDs are empty.
        """
        if self.tokenizer is None or self.old_tokenizer is None:
            return [NewToken(text) for text in self.added.values()]
        return spell_new_tokens(self.old_tokenizer, self.tokenizer, self.added)


def _text(tokenizer: Tokenizer | None, token_id: int) -> str:
    """Return the name of a token in the vocabulary, or `#7` for ID 7 if there is no tokenizer or no such entry."""
    return f"#{token_id}" if tokenizer is None else tokenizer.id_to_token(token_id) or f"#{token_id}"


def rows_after(num_tokens: int, rows: int, new_tokens: int, multiple: int | None = None) -> int:
    """Return the number of rows to store for `new_tokens` tokens after an edit.

    Before the edit, `rows` rows were stored for `num_tokens` tokens. With `multiple` the result is rounded up to a
    multiple of that. Without it, a padded table stays padded to the largest power of two that explains `rows`. If no
    power does, the rows without a token stay unless the edit has fewer tokens.

    Example:
        >>> rows_after(32011, 32064, 32020), rows_after(32011, 32064, 20000), rows_after(32000, 32000, 32001)
        (32064, 20032, 32001)
    """
    if multiple is None and rows > num_tokens:
        powers = (2**k for k in range(LARGEST_MULTIPLE.bit_length() - 1, 0, -1))
        multiple = next((power for power in powers if round_up(num_tokens, power) == rows), None)
        if multiple is None:
            return max(new_tokens, rows) if new_tokens >= num_tokens else new_tokens
    return round_up(new_tokens, multiple or 1)


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `number`."""
    return math.ceil(number / multiple) * multiple


@dataclass(frozen=True)
class ResolvedEdit:
    """Describe an edit of one model, or the undo of an edit.

    Attributes:
        rows: The row map, and the values of initialised rows.
        tokenizer: The tokenizer after the edit, or `None` if the model has no tokenizer.
        tokens: The token map of the edit; `None` for an undo.
        settings: Sizes and IDs of the modules that an undo restores, by name; `None` for an edit.
        pad_to_multiple_of: Multiple to which each table's storage is padded; `None` to keep each table's multiple.
        origins: Descriptions of how rows were initialised, by new ID. Filled in while the edit is applied.
    """

    __repr__ = short_repr

    rows: RowEdit
    tokenizer: Tokenizer | None
    tokens: TokenMap | None = None
    settings: JsonObject | None = None
    pad_to_multiple_of: int | None = None
    origins: dict[int, str] = field(default_factory=dict)

    @property
    def new_ids(self) -> Tensor:
        """Return the new ID of each old row, `(old rows,)` int64, or -1 if the row is dropped.

        A merged token has the new ID of its replacement.
        """
        return self.rows.row_map.token_ids({} if self.tokens is None else self.tokens.merged)


class VocabularyEdit(ABC):
    """Define what live modules and folders can apply: an `EditRequest` or an `Undo`."""

    @abstractmethod
    def resolve(
        self, tokenizers: Iterable[Tokenizer | None], num_rows: int, *, part: str = "", all_rows_have_ids: bool = False
    ) -> ResolvedEdit:
        """Return the edit of one model, computed from the model's tokenizers and number of rows.

        Args:
            tokenizers: The tokenizers of the model's layers; `None` for a layer without one.
            num_rows: Number of rows of the model's tables.
            part: The model's prefix in a folder: "" for a layer or checkpoint, `"run/"` for the model of a run.
            all_rows_have_ids: Whether rows without a token can be looked up, as in a checkpoint. Padding rows are then
                part of the row map.

        Raises:
            VocabularyError: The request does not fit the tokenizer, or the tokenizer does not fit the model.
            CheckpointError: The receipt of an undo belongs to another model.
        """


@dataclass(frozen=True)
class EditRequest(VocabularyEdit):
    """Request an edit before the model is known: which tokens change, and how new rows are initialised.

    Attributes:
        token_map: Function of the old tokenizer (or `None`) and the number of rows that returns the token map.
        init: How rows of new tokens are initialised.
        init_head: How rows of new tokens are initialised in an untied head.
        tokenizer: The tokenizer of a model whose layers have none, or `None`.
        pad_to_multiple_of: Tables are padded to a multiple of this; `None` keeps each table's multiple.
    """

    __repr__ = short_repr

    token_map: Callable[[Tokenizer | None, int], TokenMap]
    init: RowInit
    init_head: RowInit
    tokenizer: Tokenizer | None = None
    pad_to_multiple_of: int | None = None

    def resolve(
        self, tokenizers: Iterable[Tokenizer | None], num_rows: int, *, part: str = "", all_rows_have_ids: bool = False
    ) -> ResolvedEdit:
        """Return the edit of one model; see `VocabularyEdit`."""
        tokenizer = self.tokenizer
        for own in tokenizers:
            if own is not None and tokenizer is not None and fingerprint(own) != fingerprint(tokenizer):
                raise VocabularyError(
                    "The tokenizer that was passed is not that of the model: leave it out, or see transplant."
                )
            tokenizer = tokenizer if own is None else own
        mismatch = None if tokenizer is None else missing_rows_message(tokenizer, num_rows)
        if mismatch is not None:
            raise VocabularyError(mismatch)
        tokens, multiple = self.token_map(tokenizer, num_rows), self.pad_to_multiple_of
        row_map = tokens.row_map(num_rows, multiple if all_rows_have_ids or multiple is None else 1)
        origins: dict[int, str] = {}
        edit = RowEdit(row_map, self._values(tokens, row_map, origins))
        return ResolvedEdit(
            edit, tokens.tokenizer, tokens, None, None if all_rows_have_ids else multiple, origins=origins
        )

    def _values(
        self, tokens: TokenMap, row_map: RowMap, origins: dict[int, str]
    ) -> Callable[[RowTensor], Iterator[Tensor]]:
        """Return a function that yields chunks of the initialised rows of a tensor, and fills in `origins`.

        Rows of new tokens are initialised as requested. Rows without a token get the mean of the others: such a
        row adds at most one part in V to a softmax over V tokens. A new bias value is the mean over the tokens that
        the new row was computed from, or over all tokens. So tables and heads must come before biases.
        """
        new_tokens = tokens.new_tokens()
        unused = [NewToken("")] * (len(row_map.initialised) - len(new_tokens))
        computed_from: dict[str | None, list[tuple[int, ...]]] = {}

        def values(rows: RowTensor) -> Iterator[Tensor]:
            stored = rows.tensor.detach()
            if stored.dim() == 1:
                none: list[tuple[int, ...]] = [()] * len(row_map.initialised)
                sources = computed_from.get(rows.end, computed_from.get("table", none))
                yield _bias(stored[: tokens.num_tokens], sources)
                return
            old = WeightRows(
                stored, vocab_size=tokens.num_tokens, num_rows=row_map.old_size, collectives=rows.collectives
            )
            found = computed_from[rows.end] = []
            init = self.init if rows.end == "table" else self.init_head
            for how, wanted in ((init, new_tokens), (MeanInit(), unused)):
                for new in how.chunks(old, wanted):
                    for origin in new.origins:
                        origins.setdefault(int(row_map.initialised[len(found)]), str(origin))
                        found.append(origin.old_ids)
                    yield new.values

        return values


def _bias(old: Tensor, sources: Sequence[Sequence[int]]) -> Tensor:
    """Return initial values of a bias for new tokens, `(k,)`, in the dtype of `old`.

    Args:
        old: The values of the old tokens, `(V,)`.
        sources: For each new token, the old IDs whose values are averaged; an empty list averages all old tokens.
    """
    mean = old.double().mean()
    return torch.stack([old[list(ids)].double().mean() if ids else mean for ids in sources]).to(old.dtype)
