"""K streams of token IDs, as sound, image and action codes come: one table for all streams, and sums of its rows."""

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from operator import attrgetter

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from embedlayer.core.computed_buffers import ComputedBuffers
from embedlayer.core.devices import device_kind
from embedlayer.core.errors import ShapeError, SizeError
from embedlayer.core.index_checks import as_ids, check_integer_ids
from embedlayer.core.shapes import Ids, IdsLike, Vectors
from embedlayer.core.torch_state import calls_forward, may_use, values_are_read
from embedlayer.kernels.index_check import IndexCheck, StreamCheck
from embedlayer.saving import Pretrained
from embedlayer.tables.conversions import as_lookup_table
from embedlayer.tables.dense import TokenEmbedding
from embedlayer.tables.dense_table import DenseTable
from embedlayer.tables.lookup import LookupTable
from embedlayer.tables.row_sparse import RowSparseEmbedding
from embedlayer.tables.sums import summed_rows
from embedlayer.tables.table import TokenTable


class StreamTable(Pretrained, ComputedBuffers):
    """Sum of the rows of K streams: `out = scale * (rows[ids[..., 0]] + rows[offsets[1] + ids[..., 1]] + ...)`.

    Each stream has its own rows, `offsets[k]` to `offsets[k] + sizes[k] - 1` of one table of any kind, where `offsets`
    are the sums of the sizes before. Rows are added one after another, as K modules `nn.Embedding` that are added.

    Args:
        rows: Table of `sum(sizes)` rows, a `LookupTable` or a plain `nn.Embedding`; one more with `shared_padding_idx`.
        sizes: Number of rows of each stream, K numbers.
        shared_padding_idx: ID of the last row, `sum(sizes)`, which means this row in every stream, as in Kyutai's
            models; or `None`.

    Attributes:
        rows: The table.
        offsets: Row of ID 0 of each stream, int64, `(K,)`; a computed buffer.

    Example:
        >>> table = StreamTable(TokenEmbedding(20, 8), (8, 12))
        >>> table(torch.tensor([[[7, 11], [0, 0]]])).shape
        torch.Size([1, 2, 8])

    Reference: transformers/models/musicgen, moshi, csm, dia, higgs_audio_v2, kyutai_speech_to_text and bark.
    """

    offsets: Tensor

    def __init__(
        self, rows: LookupTable | nn.Embedding, sizes: Sequence[int], *, shared_padding_idx: int | None = None
    ) -> None:
        super().__init__()
        rows, sizes = as_lookup_table(rows), tuple(sizes)
        needed = sum(sizes) + (shared_padding_idx is not None)
        if rows.vocab_size != needed or min(sizes) < 1:
            raise SizeError(f"Streams of sizes {sizes} need a table of {needed} rows, not {rows.vocab_size}.")
        if shared_padding_idx not in (None, sum(sizes)):
            raise SizeError(f"The shared padding row is the last one, {sum(sizes)}; found {shared_padding_idx}.")
        self.rows, self.sizes, self.shared_padding_idx = rows, sizes, shared_padding_idx
        self.index_checks = nn.ModuleList(IndexCheck(size, f"token id of stream {k}") for k, size in enumerate(sizes))
        self.stream_check = StreamCheck(sizes, -1 if shared_padding_idx is None else shared_padding_idx)
        for check in (*self.index_checks, self.stream_check):
            check.move_record(self.rows.device)
        self.recompute_buffers(self.rows.device)

    @classmethod
    def of_equal_sizes(cls, rows: LookupTable | nn.Embedding, num_streams: int) -> "StreamTable":
        """Build a table of K streams of `V / K` rows each, as CSM, Dia and Higgs Audio have them."""
        rows = as_lookup_table(rows)
        if rows.vocab_size % num_streams:
            raise SizeError(f"{num_streams} streams of equal sizes do not divide a table of {rows.vocab_size} rows.")
        return cls(rows, [rows.vocab_size // num_streams] * num_streams)

    @classmethod
    def from_tables(cls, tables: Sequence[DenseTable | nn.Embedding]) -> "StreamTable":
        """Build a table of copies of the rows of K tables, such as the K modules `nn.Embedding` of a model.

        Of the tables, dtype, device, scale, row-sparse gradients and `requires_grad` are kept, and the padding row if
        one table has it.
        """
        parts = [as_lookup_table(table) for table in tables]
        dense = [part for part in parts if isinstance(part, DenseTable)]
        if len(dense) < len(parts):
            kinds = sorted({type(part).__name__ for part in parts})
            raise SizeError(f"Rows of dense tables can be joined, not of {', '.join(kinds)}.")
        first = dense[0]
        for k, each in enumerate(dense):
            for name in ("embed_dim", "dtype", "device", "scale", "round_scale", "row_sparse", "weight.requires_grad"):
                one, other = attrgetter(name)(first), attrgetter(name)(each)
                if one != other:
                    raise SizeError(f"Tables of streams have one {name}; found {one} in stream 0 and {other} in {k}.")
        sizes = [each.vocab_size for each in dense]
        padding = [start + each.padding_idx for start, each in zip(_starts(sizes), dense, strict=True)
                   if each.padding_idx is not None]  # fmt: skip
        if len(padding) > 1:
            raise SizeError(f"A table has one padding row; {len(padding)} of these have one: set the others' to None.")
        joined = (RowSparseEmbedding if first.row_sparse else TokenEmbedding)(
            *(sum(sizes), first.embed_dim, padding[0] if padding else None), scale=first.scale,
            round_scale=first.round_scale, init_std=first.init_std, device="meta", dtype=first.dtype,
        )  # fmt: skip
        rows = torch.cat([each.rows(0, each.vocab_size).detach() for each in dense])
        joined.weight = nn.Parameter(rows, requires_grad=first.weight.requires_grad)
        joined.index_check.move_record(first.device)
        joined.recompute_buffers(first.device)
        return cls(joined, sizes)

    @property
    def num_streams(self) -> int:
        """Return the number of streams, K."""
        return len(self.sizes)

    @property
    def embed_dim(self) -> int:
        """Return the width of a row, D."""
        return self.rows.embed_dim

    @property
    def token_table(self) -> TokenTable:
        """Return `rows`, if a head can read them."""
        if not isinstance(self.rows, TokenTable):
            raise SizeError(f"A {type(self.rows).__name__} is read by ID alone, so that no head can be tied to it.")
        return self.rows

    def buffer_values(self) -> dict[str, Tensor]:
        """Return `{"offsets": ...}`, the row of ID 0 of each stream, int64, `(K,)`."""
        return {"offsets": torch.tensor(_starts(self.sizes))}

    def stream(self, k: int) -> range:
        """Return the numbers of the rows of stream `k`, for instance for `table.rows.rows(r.start, r.stop)`."""
        require_stream(k, self.num_streams)
        start = _starts(self.sizes)[k]
        return range(start, start + self.sizes[k])

    def look_up(self, ids: Ids, k: int) -> Vectors:
        """Return the scaled rows of IDs of stream `k` alone, `(...)` to `(..., D)`, as a depth decoder reads them.

        Raises:
            TokenIdError: On the CPU, an ID is outside the stream. See `LookupTable.look_up` for accelerators.
        """
        rows, outside = self._checked(as_ids(ids, beside=self.rows), k)
        vectors: Tensor = self.rows(rows)
        return vectors if outside is None else vectors.masked_fill(outside.unsqueeze(-1), 0)

    def forward(self, ids: IdsLike, *, streams: int | None = None) -> Float[Tensor, "*batch D"]:
        """Return the sum of the rows of the streams times the scale of the table, `(..., K)` to `(..., D)`.

        Args:
            ids: IDs, `(..., T, K)`: the streams are the last dimension.
            streams: Number of streams that are summed, the first ones, as in Bark's fine model; `None` for all.

        Raises:
            ShapeError: The IDs are not integers, or their last dimension is not K.
            TokenIdError: On the CPU, an ID is outside its own stream; the error names stream, row and column. See
                `LookupTable.look_up` for accelerators.
        """
        ids = as_ids(ids, beside=self.rows)
        if ids.dim() == 0 or ids.shape[-1] != self.num_streams:
            raise ShapeError(f"{self.num_streams} streams have IDs (..., {self.num_streams}), not {tuple(ids.shape)}.")
        count = self.num_streams if streams is None else streams
        if not 1 <= count <= self.num_streams:
            raise SizeError(f"streams={streams} is none of 1..{self.num_streams}, the first streams that are summed.")
        if not calls_forward(self.rows, LookupTable.forward):  # its hooks see one call for all streams
            numbers, outside = self.row_numbers(ids[..., :count])
            vectors = self.rows(numbers)
            vectors = vectors if outside is None else vectors.masked_fill(outside.unsqueeze(-1), 0)
            result: Tensor = reduce(torch.add, vectors.unbind(-2))
            return result
        by_kernel, factor = device_kind(ids) == "cuda" and may_use(self.rows, "stored", "look_up"), self.rows.factor
        stored = self.rows.stored(ids) if by_kernel else None
        if stored is not None:
            stored = stored._replace(check=self.stream_check)
            sums = summed_rows(stored, None, None, starts=self.offsets, streams=count)
        else:
            numbers, outside = self.row_numbers(ids[..., :count])
            weights = None if outside is None else (~outside).to(torch.get_default_dtype())
            sums = self.rows.summed(numbers, weights=weights)
        return sums if factor is None else factor * sums

    def row_numbers(
        self, ids: Int[Tensor, "*batch K"]
    ) -> tuple[Int[Tensor, "*batch K"], Bool[Tensor, "*batch K"] | None]:
        """Return the row of each ID of the first streams, `ids + offsets`, after a check of the IDs.

        Returns:
            Row numbers, and a mask of IDs outside their streams on an accelerator, which have the row of an ID inside;
            elsewhere `None`.

        Raises:
            TokenIdError: As in `forward`.
        """
        check_integer_ids(ids)
        count = ids.shape[-1]
        if values_are_read(ids):
            is_inside = (ids >= 0) & (ids < torch.tensor(self.sizes[:count], device=ids.device))
            if bool((is_inside if self.shared_padding_idx is None else is_inside | self._is_shared(ids)).all()):
                rows = ids + self.offsets[:count]
                return rows if self.shared_padding_idx is None else torch.where(self._is_shared(ids), ids, rows), None
        columns = [self._checked(ids[..., k], k) for k in range(count)]
        rows = torch.stack([numbers for numbers, _ in columns], -1)
        masks = [outside for _, outside in columns if outside is not None]
        return rows, torch.stack(masks, -1) if masks else None

    def _checked(self, ids: Tensor, k: int) -> tuple[Tensor, Tensor | None]:
        """Return the row of each ID of stream `k`, and the mask of IDs outside of it; see `row_numbers`."""
        start = self.stream(k).start
        own = ids if self.shared_padding_idx is None else ids.masked_fill(self._is_shared(ids), 0)
        rows, outside = self.index_checks[k](own)
        rows = rows + start
        return rows if self.shared_padding_idx is None else torch.where(self._is_shared(ids), ids, rows), outside

    def _is_shared(self, ids: Tensor) -> Tensor:
        """Return where IDs are the shared padding ID."""
        assert self.shared_padding_idx is not None
        return ids == self.shared_padding_idx

    def extra_repr(self) -> str:
        """Return the sizes of the streams, for `print`."""
        shared = "" if self.shared_padding_idx is None else f", shared_padding_idx={self.shared_padding_idx}"
        return f"sizes={self.sizes}{shared}"


def require_stream(stream: int, count: int) -> None:
    """Raise a `SizeError` if `stream` is not the number of one of `count` streams."""
    if not 0 <= stream < count:
        raise SizeError(f"Stream {stream} is none of the {count} streams (0..{count - 1}).")


def _starts(sizes: Sequence[int]) -> list[int]:
    """Return the sum of the sizes before each stream, K numbers."""
    return [0, *accumulate(sizes)][:-1]
