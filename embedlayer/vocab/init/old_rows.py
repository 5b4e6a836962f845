"""The old rows that an initialisation reads: of a table or a plain weight, and which of them were trained."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from embedlayer.core.block_sizes import TABLE_ROWS
from embedlayer.core.collectives import SINGLE_PROCESS, Collectives
from embedlayer.core.errors import VocabularyError
from embedlayer.tables.table import TokenTable


class WeightRows:
    """Wrap a plain weight, such as that of an untied head, so that a `RowInit` can read its rows."""

    def __init__(
        self,
        weight: Tensor,
        padding_idx: int | None = None,
        *,
        vocab_size: int | None = None,
        num_rows: int | None = None,
        collectives: Collectives = SINGLE_PROCESS,
        columns: slice = slice(None),
        embed_dim: int | None = None,
        decode: Callable[[Tensor], Tensor] | None = None,
        missing_row: int | None = None,
    ) -> None:
        self.decode, self.missing_row, self.columns = decode, missing_row, columns
        self.weight, self.padding_idx, self.collectives = weight, padding_idx, collectives
        self.vocab_size = len(weight) if vocab_size is None else vocab_size
        self.num_rows = len(weight) if num_rows is None else num_rows
        self.embed_dim = embed_dim or (weight if decode is None else decode(weight[:1])).shape[1]

    def rows(self, start: int, stop: int) -> Float[Tensor, "N D"]:
        if self.missing_row is not None and stop > len(self.weight):
            return self.look_up(torch.arange(start, stop))
        if self.decode is not None:
            return self.decode(self.weight[start:stop])
        return self.weight[start:stop] if self.collectives.size == 1 else self.look_up(torch.arange(start, stop))

    def look_up(self, ids: Int[Tensor, " k"]) -> Float[Tensor, "k D"]:
        """Return the rows of `ids`, `(k, D)`; if the rows are sharded, every rank gets all of them."""
        # All ranks must make the same reads in the same order. The all-reduce adds bytes, of which all ranks but one
        # have zeros, so that values stay exact.
        places, is_local = self.collectives.partition(self.num_rows).local(ids.to(self.weight.device))
        if self.missing_row is not None:
            places = torch.where(places < len(self.weight), places, self.missing_row)
        if self.collectives.size == 1:
            rows = self.weight.index_select(0, places)
            return rows if self.decode is None else self.decode(rows)
        rows = self.weight.new_zeros((len(ids), self.embed_dim))
        rows[:, self.columns][is_local] = self.weight.index_select(0, places[is_local])
        if rows.numel():
            self.collectives.all_reduce(rows.view(torch.uint8))
        return rows


OldRows = TokenTable | WeightRows
"""The rows that an initialisation reads."""

DeadRows = Sequence[int] | Callable[[OldRows], Bool[Tensor, " V"]]
"""Rows that were never trained: their IDs, or a function that marks them."""


class LiveRows:
    """Read the live rows of a table, and compute their count, mean and standard deviation in float64 on the CPU."""

    # A row is live if it is not dead, not the padding row, not all zero, and finite.

    def __init__(self, old: OldRows, dead: DeadRows) -> None:
        self.old = old
        self._is_dead = torch.zeros(old.vocab_size, dtype=torch.bool)
        if callable(dead):
            self._is_dead |= dead(old).cpu()
        else:
            self._is_dead[self._checked(list(dead))] = True
        if old.padding_idx is not None:
            self._is_dead[old.padding_idx] = True

    def _checked(self, ids: Sequence[int]) -> Tensor:
        """Check that each ID is that of an old row, and return the IDs as an int64 tensor."""
        for token_id in ids:
            if not 0 <= token_id < self.old.vocab_size:
                raise VocabularyError(f"There is no old row {token_id}: the IDs are 0..{self.old.vocab_size - 1}.")
        return torch.tensor(ids, dtype=torch.int64)

    def look_up(self, ids: Sequence[int]) -> Float[Tensor, "k D"]:
        """Return old rows by ID, live or not, in float64 on the CPU."""
        with torch.no_grad():
            return self.old.look_up(self._checked(ids).to(self.old.rows(0, 1).device)).double().cpu()

    def select(self, ids: Iterable[int]) -> Iterator[tuple[int, Float[Tensor, " D"]]]:
        """Return an iterator of `(ID, row)` for each live row (`LiveRows`) among `ids`, by ascending ID, each once."""
        wanted = sorted(set(ids))
        rows = self.look_up(wanted)
        is_live = has_values(rows) & ~self._is_dead[wanted]
        return ((token_id, row) for token_id, row, live in zip(wanted, rows, is_live.tolist(), strict=True) if live)

    def chunks(self) -> Iterator[Float[Tensor, "n D"]]:
        """Yield all live rows (`LiveRows`) by ascending ID, in chunks, on the CPU in their own dtype."""
        size = TABLE_ROWS["cpu"]
        for start in range(0, self.old.vocab_size, size):
            rows = self.old.rows(start, min(start + size, self.old.vocab_size)).detach().cpu()
            yield rows[has_values(rows) & ~self._is_dead[start : start + len(rows)]]

    @cached_property
    def is_live(self) -> Bool[Tensor, " V"]:
        """Return which old rows are live, `(V,)` on the CPU; the rows are read in chunks, at the first use only."""
        size = TABLE_ROWS["cpu"]
        starts = range(0, self.old.vocab_size, size)
        stops = [min(start + size, self.old.vocab_size) for start in starts]
        trained = [has_values(self.old.rows(*span).detach()).cpu() for span in zip(starts, stops, strict=True)]
        return torch.cat([self._is_dead[:0], *trained]) & ~self._is_dead

    @cached_property
    def _count_and_mean(self) -> tuple[int, Tensor]:
        """Return the number of live rows (`LiveRows`) and their mean row, `(D,)`, computed at the first use only."""
        count, total = 0, torch.zeros(self.old.embed_dim, dtype=torch.float64)
        for rows in self.chunks():
            count += len(rows)
            total += rows.sum(0, dtype=torch.float64)
        if count == 0:
            raise VocabularyError(f"None of the {self.old.vocab_size} rows is trained: RandomInit(std=...).")
        return count, total / count

    @property
    def count(self) -> int:
        """Return the number of live rows; `LiveRows` defines these."""
        return self._count_and_mean[0]

    @property
    def mean(self) -> Float[Tensor, " D"]:
        return self._count_and_mean[1]

    @property
    def std(self) -> float:
        """Return the standard deviation of the live rows: the root mean square of all values of `row - mean`."""
        total = sum(float((rows - self.mean).square().sum()) for rows in self.chunks())
        return math.sqrt(total / self.count / self.old.embed_dim)


def has_values(rows: Float[Tensor, "n D"]) -> Bool[Tensor, " n"]:
    """Return for each row or vector whether its values are all finite and not all zero, `(n,)`."""
    return rows.isfinite().all(1) & rows.any(1)
