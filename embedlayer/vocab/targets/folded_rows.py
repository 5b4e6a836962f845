"""Rows that several tokens share, with a weight for each token (model2vec): an edit moves rows and both lists together.

Token i reads `rows[mapping[i]] * weights[i]`. In an edit each token has one row of bytes: its row, its weight, and the
number of its row. So the dropped rows of a receipt restore all three tensors bit for bit.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from embedlayer.checkpoints.reader import Checkpoint
from embedlayer.checkpoints.reading.model import checkpoint_family
from embedlayer.checkpoints.reading.table import fold_rows
from embedlayer.families.records import FoldedRows
from embedlayer.formats.stored import Part, join_row_bytes, split_row_bytes
from embedlayer.vocab.edit import ModelEdit
from embedlayer.vocab.map import NEW, RowMap, RowTensor

OWN = 0
"""In the numbers of rows of an edit: a row that belongs to no other token, or that of a token that the edit keeps."""


@dataclass(frozen=True)
class FoldedTable:
    """The tensors of a token table `rows[mapping] * weights[:, None]` in a checkpoint.

    The bytes of a token are those of its row, of its weight if there are weights, and of an int64 number if there is a
    mapping. That is r + 1 for a token that an edit drops while another one keeps row r, -r - 1 if row r is dropped
    with it, and `OWN` for all other tokens.

    Attributes:
        names: Names in the checkpoint of the rows, the mapping and the weights; `""` for one that is missing.
        rows: The rows, `(R, D)`.
        mapping: Row of each token, `(V,)` int64; `None` for row i of token i.
        weights: Factor of each token, `(V,)`; `None` for 1.
    """

    names: tuple[str, str, str]
    rows: Float[Tensor, "R D"]
    mapping: Int[Tensor, " V"] | None
    weights: Float[Tensor, " V"] | None

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> "FoldedTable | None":
        """Read the tensors of a checkpoint, which `load` has checked; `None` if the tokens have plain rows."""
        family = checkpoint_family(checkpoint)
        if family is None or not isinstance(family.rows, FoldedRows):
            return None
        mapping, weights = (next(iter(checkpoint.find(end)), "") for end in (family.rows.mapping, family.rows.weights))
        if not (mapping or weights):
            return None
        name = checkpoint.find(*family.table)[0]
        return cls(
            (name, mapping, weights),
            checkpoint.read(name),
            checkpoint.read(mapping, dtype=torch.int64) if mapping else None,
            checkpoint.read(weights) if weights else None,
        )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor by its name, first of one with an entry for each token."""
        named = zip(self.names, (self.rows, self.mapping, self.weights), strict=True)
        shapes = {name: tuple(tensor.shape) for name, tensor in named if tensor is not None}
        return dict(sorted(shapes.items(), key=lambda named: self.mapping is not None and named[0] == self.names[0]))

    @property
    def axes(self) -> dict[str, int]:
        """Return the axis of the tokens of the weights by their name, for `write_tensors`; empty without weights."""
        return {self.names[2]: 0} if self.weights is not None else {}

    @property
    def shared(self) -> tuple[str, ...]:
        """Return the name of the rows if their number is not that of the tokens."""
        return self.names[:1] if self.mapping is not None else ()

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens, V."""
        return len(self.rows) if self.mapping is None else len(self.mapping)

    @property
    def _parts(self) -> list[Part]:
        """Return type and shape of what the bytes of a token consist of."""
        parts = [Part(self.rows.dtype, (self.rows.shape[1],))]
        parts += [] if self.weights is None else [Part(self.weights.dtype, ())]
        return parts if self.mapping is None else [*parts, Part(torch.int64, ())]

    def row_tensor(self, edit: ModelEdit | None = None) -> RowTensor:
        """Return the bytes of all tokens, with the numbers that the class describes for an edit.

        `encode` of the result gives new tokens the weight 1.
        """
        numbers = torch.full((self.num_tokens,), OWN)
        if edit is not None and self.mapping is not None:
            numbers = self._numbers(edit)
        rows = self.rows if self.mapping is None else self.rows.index_select(0, self.mapping)
        return RowTensor(self._bytes(rows, self.weights, numbers), "table", encode=self._encode, decode=self._decode)

    def _numbers(self, edit: ModelEdit) -> Int[Tensor, " V"]:
        """Return the number of each token's row in its bytes; with `edit.written`, r + 1 for every token."""
        assert self.mapping is not None
        if edit.written is not None:
            return self.mapping + 1
        is_kept = edit.row_map.new_ids >= 0
        numbers = torch.where(self._dropped_rows(is_kept)[self.mapping], -self.mapping - 1, self.mapping + 1)
        return numbers.masked_fill(is_kept, OWN)

    def _dropped_rows(self, is_kept: Bool[Tensor, " V"]) -> Bool[Tensor, " R"]:
        """Return which rows only tokens read that are not kept; a row that no token reads stays."""
        assert self.mapping is not None
        is_read = torch.zeros(2, len(self.rows), dtype=torch.bool)
        is_read[is_kept.long(), self.mapping] = True
        return is_read[0] & ~is_read[1]

    def _bytes(self, rows: Tensor, weights: Tensor | None, numbers: Tensor) -> UInt8[Tensor, "N bytes"]:
        """Return the bytes of tokens; see the class."""
        parts = [rows] if weights is None else [rows, weights]
        return join_row_bytes(parts if self.mapping is None else [*parts, numbers])

    def _encode(self, values: Tensor) -> UInt8[Tensor, "N bytes"]:
        """Return the bytes of tokens with rows of their own."""
        weights = None if self.weights is None else self.weights.new_ones(len(values))
        return self._bytes(values.to(self.rows.dtype), weights, torch.full((len(values),), OWN))

    def _decode(self, row_bytes: UInt8[Tensor, "N bytes"], dtype: torch.dtype = torch.float32) -> Float[Tensor, "N D"]:
        """Return the vectors of tokens of which these are the bytes."""
        rows, *others = split_row_bytes(row_bytes, self._parts)
        return fold_rows(rows, None, None if self.weights is None else others[0]).to(dtype)

    def after(self, row_bytes: UInt8[Tensor, "N bytes"], row_map: RowMap, edit: ModelEdit) -> dict[str, Tensor]:
        """Return the new tensors by name, from the bytes of all tokens after an edit.

        Rows that only dropped tokens read are dropped, and those of new tokens are appended, or put back in their
        places by an undo. The other rows keep their order.
        """
        rows, *others = split_row_bytes(row_bytes, self._parts)
        name, of_mapping, of_weights = self.names
        new = {} if self.weights is None else {of_weights: others[0]}
        if self.mapping is None:
            return {name: rows, **new}
        numbers, sources = others[-1], row_map.sources
        is_moved = (sources != NEW) & ((numbers != OWN) if edit.written is not None else True)
        is_kept = torch.zeros(self.num_tokens, dtype=torch.bool)
        is_kept[sources[is_moved]] = True
        stays = ~self._dropped_rows(is_kept)
        is_own = ~is_moved & (numbers <= OWN)  # a new row, or one that the undo puts back
        places = -numbers - 1
        if edit.restored_rows is None:
            places[is_own] = int(stays.sum()) + torch.arange(int(is_own.sum()))
        is_new = torch.zeros(int(stays.sum()) + len(places[is_own].unique()), dtype=torch.bool)
        is_new[places[is_own]] = True
        new_rows = self.rows.new_empty(len(is_new), self.rows.shape[1])
        new_rows[~is_new] = self.rows[stays]
        new_rows[places[is_own]] = rows[is_own]
        new_numbers = torch.zeros(len(self.rows), dtype=torch.int64)
        new_numbers[stays] = (~is_new).nonzero().squeeze(1)
        mapping = torch.where(is_own, places, numbers - 1)
        mapping[is_moved] = new_numbers[self.mapping[sources[is_moved]]]
        return {of_mapping: mapping, name: new_rows, **new}
