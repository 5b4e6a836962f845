"""Edits: which tokens change, how new rows are initialised, and what that is for one model."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from embedlayer.core.errors import CheckpointError, VocabularyError
from embedlayer.core.formatting import short_repr
from embedlayer.tokenization.ids import added_without_rows, missing_rows_message
from embedlayer.tokenization.tokenizer_calls import build_tokenizer, fingerprint
from embedlayer.vocab.init.old_rows import WeightRows
from embedlayer.vocab.init.row_init import MeanInit, NewToken, RowInit, spell_new_tokens
from embedlayer.vocab.map import NEW, RowMap, RowTensor, RowValues, local_rows, row_fingerprint
from embedlayer.vocab.special_tokens import NewTokenIds, SpecialTokens
from embedlayer.vocab.tokenizer_edit import tokenizer_data

POWERS_OF_TWO = (1024, 512, 256, 128, 64, 32, 16, 8, 4, 2)


@dataclass(frozen=True)
class TokenMap:
    """Map each token after an edit to its old token.

    A merged token is removed, and another token replaces its ID in stored IDs.

    Attributes:
        sources: Old ID of each token in the order of the new IDs, or -1 for a new token.
        num_tokens: Number of tokens before the edit.
        merged: From the old ID of each merged token to the new ID of the token that replaces it.
        tokenizer: The tokenizer after the edit, or `None`.
        old_tokenizer: The tokenizer before the edit, or `None`.
        special_tokens: If the edit changes to another tokenizer: from each role, such as `eos_token`, to the text of
            the new tokenizer's special token. Else `None`.
        speller: The tokenizer that encodes the texts of new tokens as old ones, if it is not `old_tokenizer`.
        unreachable: Old IDs that were removed although not named, because no text is encoded with them once the named
            ones are gone.
    """

    __repr__ = short_repr

    sources: tuple[int, ...]
    num_tokens: int
    merged: Mapping[int, int] = field(default_factory=dict)
    tokenizer: Tokenizer | None = None
    old_tokenizer: Tokenizer | None = None
    special_tokens: SpecialTokens | None = None
    speller: Tokenizer | None = None
    unreachable: tuple[int, ...] = ()

    @property
    def added(self) -> dict[int, str]:
        """Return a dictionary from the new ID of each new token to its text; `#7` for ID 7 if there is no tokenizer."""
        ids = [token_id for token_id, source in enumerate(self.sources) if source == NEW]
        return {token_id: _text(self.tokenizer, token_id) for token_id in ids}

    @property
    def dropped(self) -> dict[int, str]:
        """Return a dictionary from the old ID of each removed token to its text, without the merged tokens.

        The text is `#7` for ID 7 if there is no tokenizer.
        """
        ids = sorted({*range(self.num_tokens)} - {*self.sources} - self.merged.keys())
        return {token_id: _text(self.old_tokenizer, token_id) for token_id in ids}

    def row_map(self, rows: int, multiple: int | None = None) -> RowMap:
        """Return the old row of each new row of a table: first the rows of tokens, then rows without a token.

        A table may store more rows than there are tokens. Old rows without a token come last in the result and keep
        their values. If there is room for fewer of them, the first ones are dropped; if there is room for more, the
        additional rows before them are initialised. The table has `rows` rows before the edit; the number after it is
        rounded up to `multiple`, as `rows_after` says, also for `None`.
        """
        size = rows_after(self.num_tokens, rows, len(self.sources), multiple)
        unused, spare = torch.arange(self.num_tokens, rows), torch.full((size - len(self.sources),), NEW)
        num_kept = min(len(unused), len(spare))
        spare[len(spare) - num_kept :] = unused[len(unused) - num_kept :]
        return RowMap(torch.cat([torch.tensor(self.sources, dtype=torch.int64), spare]), rows)

    def new_token_ids(self, row_map: RowMap) -> NewTokenIds:
        """Return an object that converts the old token IDs in configurations to new IDs.

        `row_map` is the row map of the tables in the same edit.
        """
        new_ids = row_map.token_ids(self.merged).tolist()
        return NewTokenIds(new_ids, self.dropped, self.tokenizer, self.special_tokens, size=row_map.size)

    def new_tokens(self) -> list[NewToken]:
        """Return the new tokens by ascending new ID, each with the IDs by which the old tokenizer encodes its text.

        If there is no tokenizer, these old IDs are empty.
        """
        if self.tokenizer is None or self.old_tokenizer is None:
            return [NewToken(text) for text in self.added.values()]
        return spell_new_tokens(self.speller or self.old_tokenizer, self.tokenizer, self.added)

    def completed(self, rows: int, source: Path | None = None) -> "TokenMap":
        """Return the map in which old tokens without a row are new: the old tokenizer was extended, the table was not.

        Raises:
            VocabularyError: The edit does more than to add tokens.
            TokenizerError: The tokenizer cannot be written or read as a `tokenizer.json`.
        """
        assert self.old_tokenizer is not None
        if self.sources[: self.num_tokens] != (*range(self.num_tokens),):
            raise VocabularyError(f"{missing_rows_message(self.old_tokenizer, rows, source)} Then make this edit.")
        data = tokenizer_data(self.old_tokenizer)
        data["added_tokens"] = [token for token in data["added_tokens"] if token["id"] < rows]
        sources = tuple(source if source < rows else NEW for source in self.sources)
        return replace(self, sources=sources, num_tokens=rows, speller=build_tokenizer(data))


def _text(tokenizer: Tokenizer | None, token_id: int) -> str:
    """Return the vocabulary entry of a token ID; `#7` for ID 7 if there is no tokenizer, or if it has no such token."""
    return f"#{token_id}" if tokenizer is None else tokenizer.id_to_token(token_id) or f"#{token_id}"


def missing_rows(tokenizer: Tokenizer, rows: int, source: Path | None = None) -> str | None:
    """Return a message if added tokens of a tokenizer have no row, which an edit gives them; `None` if all have one."""
    mismatch = missing_rows_message(tokenizer, rows, source)
    if mismatch is not None and not added_without_rows(tokenizer, rows):
        raise VocabularyError(mismatch)
    return mismatch


def rows_after(num_tokens: int, rows: int, new_tokens: int, multiple: int | None = None) -> int:
    """Return the number of rows that a table stores after an edit."""
    # Without `multiple`, the largest power of two that explains the old padding; else the number of rows never falls.
    if multiple is None and rows > num_tokens:
        multiple = next((power for power in POWERS_OF_TWO if round_up(num_tokens, power) == rows), None)
        if multiple is None:
            return max(new_tokens, rows) if new_tokens >= num_tokens else new_tokens
    return round_up(new_tokens, multiple or 1)


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `number`."""
    return math.ceil(number / multiple) * multiple


@dataclass(frozen=True)
class ModelEdit:
    """Describe an edit of one model, or the undo of an edit, ready to be applied to the tensors of that model.

    Attributes:
        row_map: The old row of each new row.
        values: For an edit: function that yields the initialised rows of a tensor whose `end` is not `None`.
        tokenizer: The tokenizer after the edit, or `None` if the model has none.
        tokens: The old token of each new token; `None` for an undo, and if rows are written and tokens stay.
        pad_to_multiple_of: Multiple to which the number of stored rows of each table is rounded up; `None` to keep each
            table's multiple.
        origins: From the new ID of each initialised row to a description of how it was computed. Empty at first; filled
            in while the edit is applied.
        undoes: For an undo: the result of the edit that it undoes, which has the initialised rows.
        written: For a table that is written into a folder: function that returns all rows of a tensor after the edit,
            in the form of `RowTensor.local`, or `None` for a tensor whose rows are only moved.
    """

    __repr__ = short_repr

    row_map: RowMap
    values: RowValues | None = None
    tokenizer: Tokenizer | None = None
    tokens: TokenMap | None = None
    pad_to_multiple_of: int | None = None
    origins: dict[int, str] = field(default_factory=dict)
    undoes: "ModelResult | None" = None
    written: Callable[[RowTensor], Tensor | None] | None = None

    @property
    def new_ids(self) -> Tensor:
        """Return the new ID of each old ID, `(old rows,)` int64, or -1 for a removed token.

        A merged token has the new ID of the token that replaces it.
        """
        return self.row_map.token_ids({} if self.tokens is None else self.tokens.merged)


@dataclass(frozen=True)
class ModelResult:
    """Store what the undo of an edit of a live module restores.

    Attributes:
        edit: The edit that was applied.
        dropped_rows: From each tensor's name to the rows that the edit dropped and that this rank stored, on the CPU.
        before: From each tensor's name to its fingerprint before the edit, as `row_fingerprint` returns it.
        settings: Sizes and IDs of the modules before the edit, by name.
    """

    edit: ModelEdit
    dropped_rows: dict[str, Tensor]
    before: dict[str, str]
    settings: dict[str, Any]

    @classmethod
    def of(cls, edit: ModelEdit, tensors: Mapping[str, RowTensor], settings: dict[str, Any]) -> "ModelResult":
        """Return what the undo of an edit restores, from the tensors and settings before it."""
        dropped_rows = {}
        for name, rows in tensors.items():
            dropped = local_rows(edit.row_map.dropped, rows.partitions(edit.row_map)[0])
            if rows.missing_row is not None:
                dropped = dropped[dropped < len(rows.local)]
            dropped_rows[name] = rows.local.index_select(0, dropped.to(rows.local.device)).cpu()
        before = {name: row_fingerprint(rows.local) for name, rows in tensors.items()}
        return cls(replace(edit, values=None), dropped_rows, before, settings)  # not to keep the initialisation

    def resolve_undo(self, tokenizers: Iterable[Tokenizer | None], num_rows: int, _: bool) -> ModelEdit:
        """Return the undo of the edit; see `ResolveEdit`.

        Raises:
            CheckpointError: The model does not have as many rows as the edit left.
        """
        row_map, tokens = self.edit.row_map, self.edit.tokens
        if num_rows != row_map.size:
            raise CheckpointError(f"This model has {num_rows:,} rows, and the receipt's model {row_map.size:,}.")
        return ModelEdit(row_map.inverse(), tokenizer=None if tokens is None else tokens.old_tokenizer, undoes=self)


ResolveEdit = Callable[[Iterable[Tokenizer | None], int, bool], ModelEdit]
"""Function that returns the edit of one model, such as `EditRequest.resolve` or `ModelResult.resolve_undo`.

Its arguments are the tokenizer of each layer of the model, or `None` for a layer without one; the number of rows of its
tables; and whether rows without a token are part of the row map, as in a checkpoint, whose table has an ID for each
row. If not, a table adds padding rows itself.
"""


@dataclass(frozen=True)
class EditRequest:
    """Request an edit before the model is known: which tokens change, and how new rows are initialised."""

    __repr__ = short_repr

    token_map: Callable[[Tokenizer | None, int], TokenMap]
    init: RowInit
    init_head: RowInit
    tokenizer: Tokenizer | None = None
    pad_to_multiple_of: int | None = None
    source: Path | None = None

    def resolve(self, tokenizers: Iterable[Tokenizer | None], num_rows: int, all_rows_have_ids: bool) -> ModelEdit:
        """Return the edit of one model; see `ResolveEdit` for the arguments."""
        tokenizer = self.tokenizer
        for own in tokenizers:
            if own is not None and tokenizer is not None and fingerprint(own) != fingerprint(tokenizer):
                raise VocabularyError("tokenizer= is not that of the model: leave it out, or see transplant.")
            tokenizer = tokenizer if own is None else own
        mismatch = None if tokenizer is None else missing_rows(tokenizer, num_rows, self.source)
        tokens, multiple = self.token_map(tokenizer, num_rows), self.pad_to_multiple_of
        tokens = tokens if mismatch is None else tokens.completed(num_rows, self.source)
        row_map = tokens.row_map(num_rows, multiple if all_rows_have_ids or multiple is None else 1)
        origins: dict[int, str] = {}
        return ModelEdit(
            row_map,
            self._values(tokens, row_map, origins),
            tokens.tokenizer,
            tokens,
            None if all_rows_have_ids else multiple,
            origins,
        )

    def _values(
        self, tokens: TokenMap, row_map: RowMap, origins: dict[int, str]
    ) -> Callable[[RowTensor], Iterator[Tensor]]:
        """Return a function that yields the initialised rows of a tensor, in chunks."""
        # Call it for tables and heads before their biases: the first call fills in `origins`, and a bias is the mean of
        # the biases of those tokens. Rows without a token get the mean row, which adds at most one part in V to a
        # softmax.
        new_tokens, new_ids = tokens.new_tokens(), row_map.initialised.tolist()
        unused = [NewToken("")] * (len(new_ids) - len(new_tokens))
        computed_from: dict[str | None, list[tuple[int, ...]]] = {}

        def values(rows: RowTensor) -> Iterator[Tensor]:
            is_bias = rows.local.dim() == 1
            old = WeightRows(
                rows.local.unsqueeze(1) if is_bias else rows.local,
                vocab_size=tokens.num_tokens,
                num_rows=rows.partitions(row_map)[0].num_rows,
                collectives=rows.readers,
                columns=rows.columns,
                embed_dim=None if is_bias or rows.decode is not None else rows.row_shape[0],
                decode=rows.decode,
                missing_row=rows.missing_row,
            )
            if is_bias:
                none: list[tuple[int, ...]] = [()] * len(new_ids)
                sources = computed_from.get(rows.end, computed_from.get("table", none))
                biases = old.rows(0, tokens.num_tokens).squeeze(1)
                mean = biases.double().mean()
                means = [biases[list(ids)].double().mean() if ids else mean for ids in sources]
                yield torch.stack(means).to(biases.dtype)
                return
            old_ids = computed_from[rows.end] = []
            init = self.init_head if rows.end == "head" else self.init
            if rows.end == "per_layer":
                init = init.of_other_widths or init
            for how, wanted in ((init, new_tokens), (MeanInit(), unused)):
                for new in how.chunks(old, wanted):
                    for origin in new.origins:
                        origins.setdefault(new_ids[len(old_ids)], str(origin))
                        old_ids.append(origin.old_ids)
                    yield new.values if rows.encode is None else rows.encode(new.values)

        return values
