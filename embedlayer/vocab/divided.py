"""Rows that are divided among processes, as surgery moves and reads them: a piece at a time, never all in one place."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from embedlayer.collectives import RowPartition
from embedlayer.distributed.sharded import collectives_of
from embedlayer.errors import PeerError
from embedlayer.io.files import JsonObject
from embedlayer.vocab.owners import Ids, Owners, Part
from embedlayer.vocab.starting_rows import Rows


class ManyOwners(Owners):
    """The ranks of a mesh, of which each has the rows that `ShardedTable` gives it.

    Args:
        mesh: The ranks, one-dimensional.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.group, self.collectives = mesh, mesh.get_group(), collectives_of(mesh)
        self.count, self.rank = mesh.size(), mesh.get_local_rank()

    def spans(self, size: int) -> list[tuple[int, int]]:
        """`ceil(size / count)` rows for each but the last, which has what is left."""
        parts = [RowPartition(size, rank, self.count) for rank in range(self.count)]
        return [(part.start, part.stop) for part in parts]

    def sent(self, part: Part, wanted: Sequence[Ids], size: int) -> Part:
        """The rows that this process wants, from those that have them: nothing but rows crosses the network."""
        low, high = self.span(size)
        asked = [ids[(ids >= low) & (ids < high)] - low for ids in wanted]
        rows = part.index_select(0, torch.cat(asked).to(part.device))
        owners = wanted[self.rank] // math.ceil(size / self.count)
        receives = torch.bincount(owners, minlength=self.count).tolist()
        arrived = self.collectives.all_to_all(rows, [len(ids) for ids in asked], receives)
        return arrived.index_select(0, torch.argsort(torch.argsort(owners, stable=True)).to(part.device))

    def delivered(self, ids: Ids, rows: Part, size: int) -> tuple[Ids, Part]:
        """Each row with its ID to its owner."""
        ids, order = torch.sort(ids, stable=True)
        sends = torch.bincount(ids // math.ceil(size / self.count), minlength=self.count).tolist()
        receives = self.collectives.exchange_counts(sends)
        arrived = self.collectives.all_to_all(rows.index_select(0, order), sends, receives)
        return self.collectives.all_to_all(ids, sends, receives) - self.span(size)[0], arrived

    def everywhere(self, part: Part, ids: Ids, size: int) -> Part:
        """Rows that all processes want alike, to the bit: owners put in theirs, the others zeros, as bytes."""
        low, high = self.span(size)
        places = ((ids >= low) & (ids < high)).nonzero().squeeze(1)
        found = part.new_zeros((len(ids), *part.shape[1:]))
        found.index_copy_(0, places.to(part.device), part.index_select(0, (ids[places] - low).to(part.device)))
        if found.numel():
            dist.all_reduce(found.view(torch.uint8), group=self.group)
        return found

    def reader(self, part: Part, size: int, count: int) -> Rows:
        """The rows, of which nobody keeps more than the block that was read."""
        return _Reader(self, part, size, count)

    def first_says(self, values: Part) -> Part:
        """The numbers of rank 0."""
        said = values.clone(memory_format=torch.contiguous_format)
        dist.broadcast(said, group_src=0, group=self.group)
        return said

    @contextmanager
    def agreed(self) -> Iterator[JsonObject]:
        """What is done inside, without a word to the others, is done by all, or fails for all."""
        facts: JsonObject = {}
        try:
            yield facts
        except BaseException as error:
            self._told({"error": f"{error}" or type(error).__name__})
            raise
        everybody = self._told({"facts": facts})
        for rank, note in enumerate(everybody):
            if "error" in note:
                raise PeerError(f"Rank {rank} refused, so nothing was changed on any: {note['error']}")
        first = everybody[0]["facts"]
        for rank, note in enumerate(everybody):
            names = [name for name in first | note["facts"] if first.get(name) != note["facts"].get(name)]
            if names:
                raise PeerError(
                    f"Rank {rank} differs from rank 0 in {', '.join(names)}. All ranks must make the same edit of the "
                    f"same model, tokenizer and optimizer. Nothing was changed."
                )

    def _told(self, note: JsonObject) -> list[dict[str, Any]]:
        """The notes of all."""
        return self.collectives.all_gather_object(note)


@dataclass(frozen=True)
class _Reader:
    """Divided rows, read like a table's by all processes together."""

    owners: ManyOwners
    part: Tensor
    size: int
    vocab_size: int
    padding_idx: int | None = None

    @property
    def embed_dim(self) -> int:
        """Width, D."""
        return self.part.shape[1]

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop - 1`, on every process."""
        return self.look_up(torch.arange(start, stop))

    def look_up(self, ids: Tensor) -> Tensor:
        """Rows by ID, on every process."""
        return self.owners.everywhere(self.part, ids.cpu(), self.size)
