"""Rows that several tokens share, with a weight for each token (model2vec): an edit moves rows and both lists together.

Token i reads `rows[mapping[i]] * weights[i]`. In an edit each token has one row of bytes: its row, its weight, and the
number of its row.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from embedlayer.checkpoints.reader import Checkpoint
from embedlayer.checkpoints.reading.model import checkpoint_family
from embedlayer.checkpoints.reading.table import fold_rows
from embedlayer.families.records import FoldedRows
from embedlayer.formats.stored import Part, join_row_bytes, split_row_bytes
from embedlayer.vocab.map import RowMap, RowTensor

OWN = 0
"""In the numbers of rows of an edit: the row of a new token, which no other token reads."""


@dataclass(frozen=True)
class FoldedTable:
    """The tensors of a token table `rows[mapping] * weights[:, None]` in a checkpoint."""

    # The bytes of a token: its row, its weight if any, and with a mapping an int64: r + 1 for row r, `OWN` if new.
    # `names` are those of rows, mapping and weights; "" for one that is missing.

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
    def _parts(self) -> list[Part]:
        """Return type and shape of what the bytes of a token consist of."""
        parts = [Part(self.rows.dtype, (self.rows.shape[1],))]
        parts += [] if self.weights is None else [Part(self.weights.dtype, ())]
        return parts if self.mapping is None else [*parts, Part(torch.int64, ())]

    @property
    def row_tensor(self) -> RowTensor:
        """Return the bytes of all tokens; `encode` of the result gives new tokens the weight 1."""
        rows, numbers = self.rows, None
        if self.mapping is not None:
            rows, numbers = self.rows.index_select(0, self.mapping), self.mapping + 1
        return RowTensor(self._bytes(rows, self.weights, numbers), "table", encode=self._encode, decode=self._decode)

    def _bytes(self, rows: Tensor, weights: Tensor | None, numbers: Tensor | None) -> UInt8[Tensor, "N bytes"]:
        """Return the bytes of tokens; see the class."""
        return join_row_bytes([part for part in (rows, weights, numbers) if part is not None])

    def _encode(self, values: Tensor) -> UInt8[Tensor, "N bytes"]:
        """Return the bytes of tokens with rows of their own."""
        weights = None if self.weights is None else self.weights.new_ones(len(values))
        numbers = None if self.mapping is None else torch.full((len(values),), OWN)
        return self._bytes(values.to(self.rows.dtype), weights, numbers)

    def _decode(self, row_bytes: UInt8[Tensor, "N bytes"], dtype: torch.dtype = torch.float32) -> Float[Tensor, "N D"]:
        """Return the vectors of tokens of which these are the bytes."""
        rows, *others = split_row_bytes(row_bytes, self._parts)
        return fold_rows(rows, None, None if self.weights is None else others[0]).to(dtype)

    def after(self, row_bytes: UInt8[Tensor, "N bytes"], row_map: RowMap) -> dict[str, Tensor]:
        """Return the new tensors by name, from the bytes of all tokens after an edit.

        Rows that only dropped tokens read are dropped, and those of new tokens are appended. The others keep their
        order.
        """
        rows, *others = split_row_bytes(row_bytes, self._parts)
        name, of_mapping, of_weights = self.names
        new = {} if self.weights is None else {of_weights: others[0]}
        if self.mapping is None:
            return {name: rows, **new}
        numbers, is_new = others[-1], others[-1] == OWN
        is_kept = torch.zeros(len(self.mapping), dtype=torch.bool)
        is_kept[row_map.sources[~is_new]] = True
        is_read = torch.zeros(2, len(self.rows), dtype=torch.bool)
        is_read[is_kept.long(), self.mapping] = True
        stays = is_read[1] | ~is_read[0]  # a row that no token reads stays
        mapping = torch.empty_like(numbers)
        mapping[~is_new] = (stays.cumsum(0) - 1)[numbers[~is_new] - 1]
        mapping[is_new] = int(stays.sum()) + torch.arange(int(is_new.sum()))
        return {of_mapping: mapping, name: torch.cat([self.rows[stays], rows[is_new]]), **new}
