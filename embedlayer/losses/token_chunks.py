"""The tokens of a pass in chunks, on one process or on several: gathered before a chunk, merged and divided after it.

Each rank has tokens of its own. A chunk has some tokens of each rank, whose hidden states every rank gathers.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from embedlayer.core.collectives import Collectives
from embedlayer.core.devices import device_kind
from embedlayer.losses.chunk_size import MULTIPLE
from embedlayer.losses.definition import counted_states
from embedlayer.losses.objective import Totals
from embedlayer.losses.targets import CountedTokens


class Chunk(NamedTuple):
    """Hold the tokens of all ranks that one chunk of a pass computes."""

    here: slice
    sizes: list[int]
    ranks: Collectives
    hidden: list[Tensor]
    ids: Tensor | None
    padding: int = 0

    def gathered(self, rows: Tensor, *, zeros: bool = False) -> Tensor:
        """All-gather: concatenate the rows of all ranks for the tokens of the chunk, from those of all own tokens.

        The padding has copies of the last row, or zeros with `zeros`, as gradients need.
        """
        found = self.ranks.all_gather(rows[self.here].contiguous(), self.sizes)
        if not self.padding:
            return found
        shape = self.padding, *found.shape[1:]
        return torch.cat([found, found.new_zeros(shape) if zeros else found[-1:].expand(shape)])

    def gathered_totals(self, totals: Totals, *, zeros: bool = False) -> Totals:
        """Return totals of the chunk from those of all tokens of each rank, which are along the last dimension."""
        return {name: self.gathered(x.movedim(-1, 0), zeros=zeros).movedim(0, -1) for name, x in totals.items()}

    def own(self, value: Tensor) -> Tensor:
        """Return the part of a total of the chunk, along its last dimension, that belongs to this rank's tokens."""
        if self.padding:
            return value[..., : -self.padding]
        parts: tuple[Tensor, ...] = value.split(self.sizes, dim=-1)
        return parts[self.ranks.rank]

    def merged(self, totals: Totals, merge: Callable[[Totals], Totals]) -> Totals:
        """Return the totals over the rows of all ranks, from those over the rows of each rank."""
        size, mine = self.ranks.size, self.sizes[self.ranks.rank]
        if size == 1:
            return totals
        packed = _Packed(totals)
        received = [self.ranks.all_to_all(rows, self.sizes, [mine] * size) for rows in packed.rows]
        of_ranks = packed.unpacked([rows.view(size, mine, rows.shape[1]) for rows in received])
        result = _Packed(merge(of_ranks))
        return result.unpacked([self.ranks.all_gather(rows, self.sizes) for rows in result.rows])


class TokenChunks:
    """The tokens of all ranks that are computed, in chunks."""

    def __init__(self, ranks: Collectives, tokens: int, counted: CountedTokens, multiple: int = 1) -> None:
        self.ranks, self.tokens, self.multiple, self._places = ranks, tokens, multiple, counted.places
        self._mask = counted.mask if counted.places is None else None  # of tokens that are computed, and do not count
        self._others = counted.others
        self.all_count = self._mask is None or self._others is not None
        self.of_ranks = counted.of_ranks
        self.counts = [counted.computed_of(tokens)] if self.of_ranks is None else self.of_ranks.counts
        assert len(self.counts) == ranks.size

    def chunks(self, step: int, hidden: list[Tensor], ids: Tensor | None) -> Iterator[Chunk]:
        """Yield the chunks, with at most `step` tokens of each rank."""
        # On CUDA a single process pads to 16 tokens: only then are rows of `(R, C)` blocks aligned to 128-bit reads.
        multiple = MULTIPLE if len(self.counts) == 1 and device_kind(hidden[0]) == "cuda" else self.multiple
        for start in range(0, max(self.counts), step):
            sizes = [min(max(count - start, 0), step) for count in self.counts]
            padding = -sizes[0] % multiple
            chunk = Chunk(slice(start, start + step), sizes, self.ranks, [], None, padding)
            chunk.hidden.extend(chunk.gathered(each) for each in hidden)
            yield chunk if ids is None else chunk._replace(ids=chunk.gathered(ids).T)

    def states(self, rows: Tensor) -> Tensor:
        """Return the hidden states `(N, D)` of the tokens that are computed; 0 for those that do not count."""
        if self._others is not None:
            return rows.masked_fill(self._others.unsqueeze(-1), 0)
        return counted_states(rows, self._mask) if self._places is None else rows.index_select(0, self._places)

    def compact(self, value: Tensor) -> Tensor:
        """Return the entries of the N tokens that are computed, along the last dimension."""
        return value if self._places is None else value.index_select(-1, self._places)

    def compact_ids(self, ids: Tensor | None) -> Tensor | None:
        """Return the token IDs `(N, K)` of the N tokens that are computed."""
        return ids if ids is None or self._places is None else ids[self._places]

    def masked(self, value: Tensor, dim: int = -1) -> Tensor:
        """Return the entries of `value` for all tokens, with 0 for those that are computed and do not count."""
        if self._mask is not None and self._others is None:
            value.movedim(dim, -1).masked_fill_(~self._mask, 0)
        return value

    def scattered(self, value: Tensor, dim: int = -1) -> Tensor:
        """Return a tensor for all tokens of this rank: `value` for the N tokens, and 0 for the others."""
        if self._places is None:
            return value
        value = value.movedim(dim, 0)
        return value.new_zeros(self.tokens, *value.shape[1:]).index_copy_(0, self._places, value).movedim(0, dim)


class _Packed:
    """Totals of a chunk as one tensor for each dtype, `(C, S)`, to send them to other ranks."""

    def __init__(self, totals: Totals) -> None:
        self.like = {name: value for name, value in totals.items() if not name.startswith("log_sum")}
        self.suffixes = [name.removeprefix("log_sum") for name in totals if name.startswith("log_sum")]
        self.dtypes = list(dict.fromkeys(value.dtype for value in self.like.values()))
        self.rows = [
            torch.cat([_as_rows(value) for value in self.like.values() if value.dtype == dtype], dim=1)
            for dtype in self.dtypes
        ]

    def unpacked(self, rows: list[Tensor]) -> Totals:
        """Return totals with the names of the packed ones from other rows, a tensor `(..., C', S)` for each dtype."""
        totals: Totals = {}
        for dtype, rows_of_dtype in zip(self.dtypes, rows, strict=True):
            names = [name for name, value in self.like.items() if value.dtype == dtype]
            widths = [_as_rows(self.like[name]).shape[1] for name in names]
            for name, part in zip(names, rows_of_dtype.split(widths, dim=-1), strict=True):
                totals[name] = part.mT if self.like[name].dim() == 2 else part.squeeze(-1)
        for suffix in self.suffixes:
            totals[f"log_sum{suffix}"] = totals[f"sums{suffix}"].log()
        return totals


def _as_rows(value: Tensor) -> Tensor:
    """Return totals `(C,)` or `(K, C)` as `(C, 1)` or `(C, K)`."""
    return value.T if value.dim() == 2 else value.unsqueeze(1)
