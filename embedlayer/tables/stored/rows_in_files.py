"""Rows that stay in files: those of a tensor that is only read, and those of a folder that are trained."""

from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from embedlayer.core.errors import CheckpointError, FileError, SizeError
from embedlayer.core.forks import BackgroundThread
from embedlayer.io.files import JsonObject
from embedlayer.io.mapped_rows import MappedRows, ResidentLimit
from embedlayer.io.safetensors_files import TensorInfo
from embedlayer.kernels.cpu.rows import gather_segments
from embedlayer.kernels.operation import Operation
from embedlayer.row_sparse.gradient import rows_in_block, segments_of_equal_ids
from embedlayer.tables.packed_rows import DTYPES
from embedlayer.tables.row_sparse import RowSparseEmbedding
from embedlayer.tables.stored.row_folder import RowFolder

GATHER_SEGMENTS = Operation("look-ups by segments", segments_of_equal_ids, cpu=[gather_segments])

_handles = count()
_by_handle: "WeakValueDictionary[int, FileRows]" = WeakValueDictionary()  # operators take numbers and tensors


class FileRows:
    """Rows of a tensor in a safetensors file, which is only read."""

    weight: nn.Parameter | None = None

    def __init__(self, info: TensorInfo, max_resident_bytes: int | None) -> None:
        if len(info.shape) != 2 or info.torch_dtype not in DTYPES.values():
            kind = f"{info.dtype} {info.shape}"
            raise CheckpointError(f"{info.name} in {info.file} is {kind}; needed: (V, D) of {', '.join(DTYPES)}.")
        self.info = info
        (self.vocab_size, self.embed_dim), self.dtype = info.shape, info.torch_dtype
        self.max_resident_bytes = max_resident_bytes
        self._mapped: MappedRows | None = info.map_rows(limit=ResidentLimit(max_resident_bytes))
        self._thread = BackgroundThread("embedlayer-prefetch")
        self._prefetched: deque[tuple[Tensor, Callable[[], Tensor]]] = deque(maxlen=1)  # one thread of several takes it
        self.pinned = False
        self.handle = next(_handles)
        _by_handle[self.handle] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> "FileRows":
        return self  # the file does not change

    def __reduce__(self) -> tuple[type["FileRows"], tuple[TensorInfo, int | None]]:
        return FileRows, (self.info, self.max_resident_bytes)

    @property
    def mapped(self) -> MappedRows:
        if self._mapped is None:
            raise FileError(f"The mapped table {self.info.file} is closed: open it again with MappedEmbedding.open.")
        return self._mapped

    def look_up(self, ids: Int[Tensor, "*ids"]) -> Float[Tensor, "*ids D"]:
        """Return copies of the rows of checked IDs, those that `prefetch` has read if its IDs were the same."""
        try:
            prefetched, job = self._prefetched.pop()
        except IndexError:
            return self._gather(ids)
        return job() if torch.equal(prefetched, ids) else self._gather(ids)

    def _gather(self, ids: Tensor) -> Tensor:
        """Return copies of rows, in pinned memory if they go to a GPU."""
        mapped, flat = self.mapped, ids.reshape(-1).long()
        vectors = torch.empty((len(flat), self.embed_dim), dtype=self.dtype, pin_memory=self.pinned)
        if not gather_by_kernel(mapped, flat, vectors):
            vectors = mapped.read(flat, out=vectors.view(torch.uint8)).view(self.dtype)
        return vectors.view(*ids.shape, self.embed_dim)

    def rows(self, start: int, stop: int) -> Float[Tensor, "N D"]:
        """Return copies of rows `start` to `stop - 1`."""
        return self.mapped.read_slice(start, stop).view(self.dtype)

    def prefetch(self, ids: Int[Tensor, "*ids"]) -> None:
        """Start to gather the rows in another thread, for the next look-up if it has the same IDs."""
        self.mapped  # noqa: B018 (a closed table raises an error here)
        ids = ids.clone()
        self._prefetched.append((ids, self._thread.submit(partial(self._gather, ids))))

    def folder(self, verb: str) -> RowFolder:
        """Raise the `SizeError` for what the caller does: read-only rows have no folder."""
        raise SizeError(f"Cannot {verb} a table that only reads {self.info.file}: use MappedEmbedding.create.")

    def close(self) -> None:
        """Unmap the file and end the thread of `prefetch`."""
        self._mapped = None
        self._prefetched.clear()
        self._thread.close()


class FolderRows:
    """Rows in a `RowFolder`, which are trained as a `RowSparseEmbedding` over the mapped memory."""

    def __init__(self, folder: RowFolder) -> None:
        self._folder, fields = folder, folder.fields
        self.vocab_size, self.embed_dim, self.dtype = fields["vocab_size"], fields["embed_dim"], folder.weight.dtype
        table = RowSparseEmbedding(
            self.vocab_size,
            self.embed_dim,
            fields["padding_idx"],
            scale=fields["scale"],
            init_std=fields["init_std"],
            device="meta",
        )
        table.weight = nn.Parameter(folder.weight)
        table.index_check.move_record("cpu")
        assert table.pending_updates is not None
        self.table, self.updates, self.weight = table, table.pending_updates, table.weight
        self.updates.storage, self.updates.lock = folder, folder.lock
        if folder.updates is not None:
            numbers, tensors = folder.updates
            moments = {name: folder.restored(name) for name in numbers["moments"]}
            self.updates.load_state(table.weight, tuple(moments.values()), tensors, numbers)
            self.updates.restored = moments
        folder.forget_restored()

    def state(self) -> tuple[JsonObject, dict[str, Tensor]]:
        """Return the numbers and small tensors of the pending updates, for the state of a checkpoint."""
        updates, folder = self.updates, self._folder
        tensors, numbers = updates.state()
        if updates.forgotten:
            raise SizeError(f"The state of {folder.path} was replaced, and its step is unknown: make a step before.")
        if not numbers:
            return {}, {}
        names = [folder.name_of(each) for each in updates.moments]
        steps = [folder.name_of(each) for each in (tensors["value_steps"], tensors["moment_steps"])]
        if None in names + steps:
            raise SizeError(f"The optimizer's state of {folder.path} is not in it: let it be created or loaded.")
        return {**numbers, "moments": names}, tensors

    def look_up(self, ids: Int[Tensor, "*ids"]) -> Float[Tensor, "*ids D"]:
        """Return the rows, with a sparse gradient. Their pending updates are applied first."""
        if torch.compiler.is_compiling():
            return self.table.look_up(ids)
        self._folder.check_open()
        vectors = self.table.look_up(ids)
        with self.updates.lock:
            self._folder.limit.keep(ids.numel())
        return vectors

    def rows(self, start: int, stop: int) -> Float[Tensor, "N D"]:
        """Return a view of rows `start` to `stop - 1`. Their pending updates are applied first."""
        self._folder.check_open()
        return self.table.rows(start, stop)

    def prefetch(self, ids: Int[Tensor, "*ids"]) -> None:
        """Bring the pages of the rows into memory in another thread. No values stay: the look-up reads them again."""
        self._folder.prefetch(ids.flatten().long().clone())

    def folder(self, verb: str) -> RowFolder:
        return self._folder

    def close(self) -> None:
        """Write everything to the disk, and release the lock of the folder."""
        self._folder.close()


RowsInFiles = FileRows | FolderRows
"""Where the rows of a `MappedEmbedding` are, and whether they are trained."""


def gather_by_kernel(mapped: MappedRows, ids: Int[Tensor, " N"], vectors: Float[Tensor, "N D"]) -> bool:
    """Copy mapped rows into `vectors` by a kernel, in the order of the file; return `False` if none applies."""
    if not GATHER_SEGMENTS.applies(mapped.words, ids):
        return False
    rows, order, offsets = segments_of_equal_ids(ids)
    out = vectors.view(mapped.words.dtype)
    for chunk in mapped.limit.chunks(len(rows)):
        items = chunk.stop - chunk.start
        ends = offsets[chunk.start : chunk.stop + 1]
        if not gather_segments.run(items, rows[chunk], order, ends, mapped.words, out, block=rows_in_block(out)):
            return False
    return True


@torch.library.custom_op("embedlayer::mapped_rows", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def mapped_rows(ids: Tensor, handle: int, width: int, dtype: torch.dtype) -> Tensor:
    """Look up rows of a read-only mapped table as one node of a compiled or exported graph."""
    rows: Tensor = _by_handle[handle].look_up(ids.cpu()).to(ids.device)
    return rows


@mapped_rows.register_fake
def _(ids: Tensor, handle: int, width: int, dtype: torch.dtype) -> Tensor:
    return ids.new_empty((*ids.shape, width), dtype=dtype)


@mapped_rows.register_vmap
def _(info: Any, dims: Any, ids: Tensor, handle: int, width: int, dtype: torch.dtype) -> tuple[Tensor, int]:
    rows: Tensor = mapped_rows(ids.movedim(dims[0], 0), handle, width, dtype)
    return rows, 0
