"""Read the rows of any table, or of a plain tensor, a chunk at a time."""

import math
from collections.abc import Callable, Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from embedlayer.core.errors import ShapeError
from embedlayer.io.files import JsonObject
from embedlayer.tables.conversions import TableLike, as_rows

NUMBERS_AT_ONCE = 1 << 21  # numbers widened at a time, 8 MB in float32


class RowReader:
    """Read the V rows of width D of a table, without gradients."""

    def __init__(self, table: TableLike) -> None:
        table = as_rows(table)
        if isinstance(table, Tensor):
            if table.ndim != 2 or not table.is_floating_point():
                raise ShapeError(f"A plain table is (V, D) floats; found {tuple(table.shape)} of {table.dtype}.")
            self.vocab_size, self.embed_dim = table.shape
        else:
            self.vocab_size, self.embed_dim = table.vocab_size, table.embed_dim
        self.table = table

    def __len__(self) -> int:
        return self.vocab_size

    @torch.no_grad()
    def read(self, start: int, stop: int) -> Float[Tensor, "rows D"]:
        """Return rows `start` to `stop - 1` in the dtype and on the device of the table."""
        if isinstance(self.table, Tensor):
            return self.table.detach()[start:stop]
        return self.table.rows(start, stop).detach()

    @torch.no_grad()
    def take(self, ids: Int[Tensor, " N"]) -> Float[Tensor, "N D"]:
        """Return the rows of the IDs on the CPU, in float32 or wider."""
        if isinstance(self.table, Tensor):
            rows = self.table.detach().index_select(0, ids.to(self.table.device))
        else:
            rows = self.table.look_up(ids.to(self.table.device))
        return rows.detach().to("cpu", torch.promote_types(rows.dtype, torch.float32))

    def chunks(
        self, rows_at_once: int | None = None, start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[int, Float[Tensor, "rows D"]]]:
        """Yield rows `start` to `stop - 1` in order, a chunk at a time: the first ID of the chunk, and its rows."""
        stop = self.vocab_size if stop is None else stop
        step = rows_at_once or max(1, NUMBERS_AT_ONCE // max(1, self.embed_dim))
        for place in range(start, stop, step):
            yield place, self.read(place, min(place + step, stop))

    def wide_chunks(
        self, mask: Bool[Tensor, " V"], rows_at_once: int | None = None
    ) -> Iterator[Float[Tensor, "rows D"]]:
        """Yield the rows whose entry in `mask` is true, in order and in float64, a chunk at a time."""
        for start, chunk in self.chunks(rows_at_once):
            here = mask[start : start + len(chunk)]
            yield (chunk if here.all() else chunk[here.to(chunk.device)]).double()

    def total(
        self, mask: Bool[Tensor, " V"], of: Callable[[Tensor], Tensor] = lambda rows: rows
    ) -> Float[Tensor, " D"]:
        """Sum the rows whose entry in `mask` is true, or a function of them, in float64 on the CPU."""
        total = torch.zeros(self.embed_dim, dtype=torch.float64)
        for chunk in self.wide_chunks(mask):
            total += of(chunk).sum(0).cpu()
        return total

    @torch.no_grad()
    def norms(self) -> Float[Tensor, " V"]:
        """Return the Euclidean norm of each row in float64, on the CPU; NaN for a row with NaN or infinity."""
        parts = [torch.linalg.vector_norm(chunk, dim=1, dtype=torch.float64).cpu() for _, chunk in self.chunks()]
        norms = torch.cat([torch.empty(0, dtype=torch.float64), *parts])
        return norms.where(norms.isfinite(), math.nan)


def row_ids(mask: Tensor) -> tuple[int, ...]:
    """Return the IDs of the rows whose entry in the mask is true, in ascending order."""
    return tuple(torch.nonzero(mask)[:, 0].tolist())


def listed_ids(ids: tuple[int, ...], limit: int) -> JsonObject:
    """Return the JSON object `{"rows": number of IDs, "ids": the first IDs}` with at most `limit` IDs."""
    return {"rows": len(ids), "ids": list(ids[:limit])}


def drawn_ids(mask: Bool[Tensor, " V"], count: int, generator: torch.Generator | None = None) -> Int[Tensor, " N"]:
    """Draw at most `count` of the rows whose entry in the mask is true; without a generator always the same ones."""
    ids = torch.nonzero(mask)[:, 0]
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    return ids[torch.randperm(len(ids), generator=generator)[:count]]
