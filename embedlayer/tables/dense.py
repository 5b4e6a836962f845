"""The dense table: one learned row per token."""

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor

from embedlayer.core.devices import device_kind
from embedlayer.core.index_checks import INTEGERS, raise_if_outside
from embedlayer.core.shapes import Ids, Vectors
from embedlayer.core.torch_state import PLAIN_TYPES, fusible
from embedlayer.kernels.input import StoredRows, gather_rows, rows_on_cuda
from embedlayer.tables.dense_table import DenseTable

if TYPE_CHECKING:
    from embedlayer.io.files import JsonObject


class TokenEmbedding(DenseTable, checks_ids=True):
    """One learned row per token: `out[..., :] = scale * weight[ids]`.

    It is an `nn.Embedding` with the parameter `weight`, `(num_rows, D)`, so PEFT, FSDP and transformers recognise it.

    Args:
        vocab_size: Number of tokens, V.
        embed_dim: Width of a row, D.
        padding_idx: Row that is initialised to zero and gets no gradient, at look-up and under a tied head; a negative
            number counts from the end. Other values that are written to it are kept. `None` for no such row.
        scale: Factor on every looked-up row: a number, `"sqrt_dim"` for sqrt(D), or `None` for 1.
        round_scale: Whether to round the scale to the dtype of the rows, as Gemma does: sqrt(3072) = 55.4256 is 55.5 in
            bfloat16. The rounded number is the buffer `embed_scale`, which follows changes of the dtype.
        init_std: Standard deviation of the normal initialisation: a number, or `"1/sqrt_dim"` for 1 / sqrt(D).
        pad_to_multiple_of: Store spare zero rows, so that `num_rows` is a multiple of this number (64 suits GPUs).
            Spare rows are not looked up and take no part in the loss. `None` for no spare rows.
        device: Device of the rows; `None` for torch's default.
        dtype: Data type of the rows; `None` for torch's default.
        **arguments: Sizes under torch's names, `num_embeddings` and `embedding_dim`; see `EmbeddingArguments`.

    Raises:
        SizeError: A size is below 1, or an argument is not supported, such as `row_sparse`: see `RowSparseEmbedding`.
        TypeError: A size is missing, passed under both names or not an integer, or an argument is unknown.

    Example:
        >>> TokenEmbedding(100, 8)(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 8])
        >>> TokenEmbedding(100, 3072, scale="sqrt_dim", round_scale=True).bfloat16().embed_scale
        tensor(55.5000, dtype=torch.bfloat16)

    Reference: torch/nn/modules/sparse.py. We differ: torch initialises with a standard deviation of 1 and this table
    with 0.02, because under a tied head 1 makes the first loss far larger than ln V; the error of a bad ID names the ID
    and its position; and the padding row gets no gradient also under a tied head.
    """

    @classmethod
    def from_config(cls, config: "JsonObject") -> Any:
        """Build a table from its `config`; earlier versions wrote `"row_sparse": true` for a `RowSparseEmbedding`."""
        if not config.get("row_sparse"):
            return super().from_config(config)
        from embedlayer.tables.row_sparse import RowSparseEmbedding

        return RowSparseEmbedding.from_config(config)

    def look_up(self, ids: Ids) -> Vectors:
        """Return `weight[ids]` without `scale`, `(...)` to `(..., D)`. See `LookupTable.look_up` for the errors."""
        kind, rows = device_kind(ids), self._parameters.get("weight")
        if (
            kind == "cpu"
            and rows is not None
            and type(ids) is Tensor
            and ids.dtype in INTEGERS
            and type(rows) in PLAIN_TYPES
            and rows.dim() == 2
            and not (rows.shape[0] == self._stated_rows != self._stated_vocab_size)
            and fusible(rows)
        ):
            try:  # on a CPU torch checks the IDs as it reads the rows
                return F.embedding(ids, rows, self.padding_idx)
            except IndexError:
                raise_if_outside(ids, rows.shape[0], "token id")
                raise
        if kind == "cuda" and (stored := self.stored(ids)) is not None:
            return gather_rows(stored)
        ids, outside = self._current_check()(ids)
        return self._looked_up(ids, self._read_weight(), outside)

    def stored(self, ids: Ids) -> StoredRows | None:
        """Return IDs, weight and check, by which a kernel gathers the vectors; see `LookupTable.stored`."""
        weight, check = self._read_weight(), self._current_check()
        if device_kind(ids) != "cpu":
            return rows_on_cuda(ids, weight, check, self.padding_idx)
        return StoredRows(ids, weight, check, self.padding_idx)

    def _current_rows(self, start: int = 0, stop: int | None = None) -> Tensor:
        weight = self._read_weight()
        return weight if stop is None else weight[start:stop]
