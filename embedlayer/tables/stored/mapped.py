"""Tables whose rows stay in files: larger than memory, read-only or trained in place."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from embedlayer.core.computed_buffers import ComputedBuffers
from embedlayer.core.devices import device_kind
from embedlayer.core.errors import CheckpointError, SizeError
from embedlayer.core.index_checks import as_ids
from embedlayer.core.initialization import init_normal_rows_, zero_rows_
from embedlayer.core.shapes import Ids, IdsLike, Vectors
from embedlayer.core.torch_state import plain_operators_only
from embedlayer.io.files import JsonObject
from embedlayer.io.mapped_rows import default_resident_bytes
from embedlayer.io.safetensors_files import DTYPE_NAMES
from embedlayer.io.weight_files import WeightFiles, choose_weight_files, find_folder, no_such_path
from embedlayer.kernels.index_check import IndexCheck
from embedlayer.kernels.input import StoredRows
from embedlayer.saving import check_saved
from embedlayer.tables.dense_table import resolve_init_std, resolve_scale
from embedlayer.tables.lookup import LookupTable, check_sizes
from embedlayer.tables.packed_rows import DTYPES
from embedlayer.tables.row_sparse import RowSparseEmbedding
from embedlayer.tables.stored.folder_files import (
    FORMAT_VERSION,
    RESIDENT_BYTES,
    TABLE,
    WEIGHT,
    TableFields,
    check_at_rest,
    read_table_fields,
)
from embedlayer.tables.stored.row_folder import RowFolder
from embedlayer.tables.stored.rows_in_files import FileRows, FolderRows, RowsInFiles, mapped_rows


class MappedEmbedding(LookupTable, ComputedBuffers, checks_ids=True):
    """A table whose rows stay in a file: `out[..., :] = scale * rows[ids]`.

    `MappedEmbedding.open` reads the rows of any safetensors file, which it never changes. `MappedEmbedding.create`
    makes a folder with a table that is trained in place, and `MappedEmbedding.resume` opens such a folder again as it
    was at a checkpoint, also after the process was killed at any moment.

    Rows are read through a memory map, without reading ahead. `max_resident_bytes` limits the mapped pages in this
    process; released pages stay in the system's page cache. Looked-up vectors have the device and dtype to which the
    module was moved; the rows stay in their file, on the CPU and in the file's dtype. The table is only looked up: it
    has no logits.

    With a GPU, every look-up copies the IDs to the CPU, which waits for the device: pass CPU IDs. Vectors of a
    read-only table are gathered in pinned memory and copied asynchronously. A trained table looks up, accumulates
    gradients and steps on the CPU, and vectors and gradients are copied synchronously.

    A trained table is row-sparse: train it with `RowAdamW` or `RowAdagrad`, which also keep their state in the folder.
    Every change goes to the files at once. Before a row changes for the first time after a checkpoint, the old contents
    of the row and of its optimizer state are appended to a log, with 8 bytes for its number. Write rows with the
    optimizer, `load_state_dict` or `reset_parameters`; what else writes to `weight` is not in the log.

    A trained table is crash-safe for the process, `kill -9` included, and not for the machine. `checkpoint` does not
    flush to the disk; only `close` does. After a power failure or a crash of the system, `resume` raises a
    `CheckpointError` for a folder that was open.

    Args:
        source: Where the rows are; use the class methods.
        padding_idx: Padding token, whose row gets no gradient, or `None`.
        scale: Factor on every looked-up row: a number, `"sqrt_dim"` for sqrt(D), or `None` for 1.

    Example:
        >>> table = MappedEmbedding.create("rows", 1000, 8, init_std=0.02)
        >>> optimizer = RowAdamW(table.parameters(), lr=1e-3)
        >>> table(torch.tensor([[1, 2, 3]])).sum().backward()
        >>> optimizer.step()
        >>> with table.checkpoint() as generation:
        ...     torch.save({"rows": generation}, "rest.pt")
        >>> table.close()
        >>> with MappedEmbedding.resume("rows", generation) as table:
        ...     table([[1, 2, 3]]).shape
        torch.Size([1, 3, 8])

    Reference: Mohan et al., ARIES: a transaction recovery method, 1992, for write-ahead logs; ours is an undo log
    only.
    """

    weight: nn.Parameter | None
    """The rows as a parameter over the mapped memory, `(V, D)`; `None` if they are read-only."""

    example: Tensor

    def __init__(
        self, source: RowsInFiles, *, padding_idx: int | None = None, scale: float | Literal["sqrt_dim"] | None = None
    ) -> None:
        super().__init__()
        self.source = source
        self.vocab_size = self.num_rows = source.vocab_size
        self.embed_dim = source.embed_dim
        self.padding_idx = check_sizes(padding_idx=padding_idx, vocab_size=self.vocab_size, embed_dim=self.embed_dim)
        self.scale = resolve_scale(scale, self.embed_dim)
        self.row_sparse = source.weight is not None
        self.index_check = IndexCheck(self.vocab_size, "token id")
        self.register_parameter("weight", source.weight)
        self.register_buffer("example", torch.empty(0, dtype=source.dtype), persistent=False)
        self.recompute_buffers(None if source.weight is None else "cpu")

    @classmethod
    def open(
        cls,
        source: Path | str,
        tensor: str | None = None,
        *,
        padding_idx: int | None = None,
        scale: float | Literal["sqrt_dim"] | None = None,
        max_resident_bytes: int | Literal["auto"] | None = "auto",
    ) -> "MappedEmbedding":
        """Open a table that reads its rows straight out of a safetensors file. The file is never changed.

        Args:
            source: A safetensors file, a folder with one or with shards and an index, or a folder that
                `MappedEmbedding.create` made; call `apply_pending_updates()` before its last checkpoint.
            tensor: Name of the tensor, or its end after a dot, such as `"embed_tokens.weight"`. `None` for the only
                tensor.
            padding_idx: Padding token, whose row is read as it is stored; a negative number counts from the end. `None`
                for that of a folder that `create` made; in another source for no such token.
            scale: As in the constructor; `None` for that of a folder that `create` made, and for 1 in another source.
            max_resident_bytes: Limit of the mapped pages in this process, in bytes; `None` for no limit. `"auto"` is
                128 MiB, or no limit for a table of at most 1/16 of physical memory.

        Raises:
            FileError: The file is missing or cannot be read, or a process trains the rows.
            CheckpointError: The file is damaged, has no such tensor or several, the tensor is not `(V, D)` floats, or
                rows of a trained folder lack optimizer steps, or were changed after its last checkpoint.

        Example:
            >>> from embedlayer.io.safetensors_files import save_tensors
            >>> save_tensors("model.safetensors", {"wte.weight": torch.eye(4)})
            >>> MappedEmbedding.open("model.safetensors", "wte.weight")([2])
            tensor([[0., 0., 1., 0.]])
        """
        path = Path(source)
        path = path.parent if path.name == WEIGHT and (path.parent / TABLE).exists() else path
        if path.is_dir() and (path / TABLE).exists():
            fields = read_table_fields(path)
            check_at_rest(path)
            path, padding_idx = path / WEIGHT, fields["padding_idx"] if padding_idx is None else padding_idx
            scale = fields["scale"] if scale is None else scale
        if (place := find_folder(path)) is None:
            raise no_such_path(path)
        files = WeightFiles(place[0], choose_weight_files(*place))
        names = list(files.names) if tensor is None else files.find(tensor)
        names = [tensor] if tensor in names else names
        if len(names) != 1:
            many = f"{len(names)} tensors" + ("" if tensor is None else f" that end in {tensor!r}")
            listed = ", ".join(sorted(names or files.names)[:8])
            raise CheckpointError(f"{path} has {many}: pass the name of the table. It has, among others: {listed}.")
        info = files.info(names[0])
        if max_resident_bytes == "auto":
            max_resident_bytes = default_resident_bytes(info.nbytes)
        rows = FileRows(info, max_resident_bytes)
        return cls(rows, padding_idx=padding_idx, scale=scale)

    @classmethod
    def create(
        cls,
        folder: Path | str,
        vocab_size: int,
        embed_dim: int,
        *,
        padding_idx: int | None = None,
        scale: float | Literal["sqrt_dim"] | None = None,
        init_std: float | Literal["1/sqrt_dim"] = 0.0,
        dtype: torch.dtype | None = None,
        max_resident_bytes: int | None = RESIDENT_BYTES,
    ) -> "MappedEmbedding":
        """Create a table in a folder of its own, which is trained in place.

        The disk space of the rows is allocated now, and that of each array of optimizer state at its first step. So a
        full disk is a `FileError` then, or when old rows are appended to the log, and not while rows are written. On
        systems without `posix_fallocate`, such as macOS, allocating takes as long as writing zeros. A file system that
        copies what is written, or compresses it, may need more space later; without it, the process ends.

        Args:
            folder: A new or empty folder.
            vocab_size: Number of rows, V.
            embed_dim: Width of a row, D.
            padding_idx: Token whose row is zero at first and gets no gradient, or `None`.
            scale: As in the constructor.
            init_std: Standard deviation of the normal initialisation. With 0 nothing is written, and the file's zeros
                are the rows.
            dtype: Data type of the rows; `None` for torch's default.
            max_resident_bytes: Limit of the mapped pages in this process, in bytes, which a batch may exceed while it
                is processed; 1 GiB by default, and `None` for no limit.

        Raises:
            FileError: The folder holds files already or cannot be written, or the disk is too small.
        """
        padding_idx = check_sizes(padding_idx=padding_idx, vocab_size=vocab_size, embed_dim=embed_dim)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if dtype not in DTYPES.values():
            raise SizeError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype}.")
        fields: TableFields = {
            "format_version": FORMAT_VERSION,
            "vocab_size": vocab_size,
            "embed_dim": embed_dim,
            "dtype": DTYPE_NAMES[dtype],
            "padding_idx": padding_idx,
            "scale": resolve_scale(scale, embed_dim),
            "init_std": resolve_init_std(init_std, embed_dim),
        }
        rows = RowFolder.create(
            folder,
            fields,
            lambda weight: _initialize(weight, fields) if fields["init_std"] else None,  # a new file has zeros
            max_resident_bytes=max_resident_bytes,
        )
        return cls(FolderRows(rows), padding_idx=padding_idx, scale=fields["scale"])

    @classmethod
    def resume(
        cls, folder: Path | str, generation: int | None = None, *, max_resident_bytes: int | None = RESIDENT_BYTES
    ) -> "MappedEmbedding":
        """Open a table that `create` made, as it was at a checkpoint: rows, optimizer state and pending updates.

        What was changed after the checkpoint is rolled back. A new `RowAdamW` continues from the stored moments and
        step numbers. Build it with the same `state=`, and pass `lr`, `betas`, `eps` and `weight_decay` again: they are
        not stored.

        Args:
            folder: The folder.
            generation: Number that `checkpoint` yielded, as it was saved with the rest of the model. `None` for the
                last checkpoint that was completed; then the rest of the model may be of another step.
            max_resident_bytes: As in `create`.

        Raises:
            FileError: The folder holds no complete table, is read-only, or is open in this or another process.
            CheckpointError: The folder is not at this generation, was copied while it was open, was open when the
                machine stopped, or a file in it is damaged or has the wrong size.
        """
        rows = RowFolder.resume(folder, generation, max_resident_bytes=max_resident_bytes)
        return cls(FolderRows(rows), padding_idx=rows.fields["padding_idx"], scale=rows.fields["scale"])

    @contextmanager
    def checkpoint(self) -> Iterator[int]:
        """Context manager: make the present rows and optimizer state the next checkpoint, and yield its number.

        Save everything else inside the block, together with the number, and pass the number to `resume`. If the process
        is killed inside the block, either checkpoint can be resumed: the number says which. Rows must not change inside
        the block. If the block raises an error, both checkpoints can be resumed too, until a later one is completed.

        Raises:
            FileError: The disk is full, or the table is closed.
            StaleRowsError: Rows are changed inside the block, or blocks are nested.
        """
        folder = self.source.folder("make a checkpoint of")
        assert isinstance(self.source, FolderRows)
        with folder.checkpoint(self.source.state) as generation:
            yield generation

    def apply_pending_updates(self, start: int = 0, stop: int | None = None) -> None:
        """Apply the optimizer steps that are pending for rows `start` to `stop - 1`; see `RowSparseEmbedding`.

        Without effect on a read-only table.
        """
        if isinstance(self.source, FolderRows):
            self.source.table.apply_pending_updates(start, stop)

    def reset_parameters(self) -> None:
        """Draw all rows of a trained table again, as `create` does. Without effect on a read-only table."""
        if isinstance(self.source, FolderRows):
            folder, weight = self.source.folder("initialise"), self.source.table.weight
            with folder.lock:
                self.source.table.apply_pending_updates()
                folder.log_all_rows()
                _initialize(weight.detach(), folder.fields)

    def close(self) -> None:
        """Close the files; those of a trained table are written to the disk first, which may take long.

        What was changed after the last checkpoint is rolled back by the next `resume`. A table that is garbage
        collected is closed too, without waiting for the disk. Later look-ups and writes raise a `FileError`.

        Raises:
            FileError: The disk reports an error.
        """
        self.source.close()

    def __enter__(self) -> "MappedEmbedding":
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files; see `close`."""
        self.close()

    @property
    def dtype(self) -> torch.dtype:
        """Return the data type of looked-up vectors. The rows in the file may have another one."""
        return self.example.dtype

    @property
    def device(self) -> torch.device:
        """Return the device of looked-up vectors. The rows are on the CPU."""
        return self.example.device

    @property
    def config(self) -> JsonObject:
        """Return the file and tensor of a read-only table. A trained table is saved as a `RowSparseEmbedding`.

        A folder that `save_pretrained` writes has all rows of a trained table. Of a read-only one it has the absolute
        path of its file and no rows.
        """
        if isinstance(self.source, FolderRows):
            return self.source.table.config
        assert isinstance(self.source, FileRows)
        return {
            "source": str(self.source.info.file.absolute()),
            "tensor": self.source.info.name,
            "vocab_size": self.vocab_size,
            "embed_dim": self.embed_dim,
            "padding_idx": self.padding_idx,
            "scale": self.scale,
        }

    @classmethod
    def from_config(cls, config: JsonObject) -> Any:
        """Open the file of a read-only table again, or a `RowSparseEmbedding` for the saved rows of a trained one.

        Raises:
            FileError: The file is missing.
            CheckpointError: The file is damaged or has a table of other sizes, or an argument is unknown or has another
                type.
        """
        if "source" not in config:
            return RowSparseEmbedding.from_config(config)
        sizes = {name: config.get(name) for name in ("vocab_size", "embed_dim")}
        arguments = {name: value for name, value in config.items() if name not in sizes}
        check_saved(cls.open, arguments)
        try:
            table = cls.open(**arguments)
        except TypeError as error:
            raise CheckpointError(f"The saved configuration does not fit {cls.__name__}: {error}.") from error
        if sizes != {"vocab_size": table.vocab_size, "embed_dim": table.embed_dim}:
            found, saved = f"{table.vocab_size:,} x {table.embed_dim:,}", " x ".join(map(str, sizes.values()))
            raise CheckpointError(
                f"{config['source']} has a table of {found}, not the saved {saved}: it is another one."
            )
        return table

    def buffer_values(self) -> dict[str, Tensor]:
        """Return `{"example": empty}` in the dtype of the vectors, so that `.to(dtype)` has a tensor to cast."""
        return {"example": torch.empty(0, dtype=self.example.dtype)}

    def look_up(self, ids: Ids) -> Vectors:
        """Return the rows of `ids` without `scale`, `(...)` to `(..., D)`. See `LookupTable.look_up` for the errors.

        For IDs on an accelerator the call waits for the device once: the rows are read from the file by the CPU.
        """
        ids, outside = self.index_check(ids)
        if device_kind(ids) == "meta":
            return torch.empty((*ids.shape, self.embed_dim), dtype=self.dtype, device="meta")
        source = self.source
        self._require_own_weight()
        in_graph = torch.compiler.is_compiling() or plain_operators_only()
        if isinstance(source, FileRows) and in_graph:
            vectors: Tensor = mapped_rows(ids, source.handle, self.embed_dim, source.dtype)
        else:
            vectors = source.look_up(ids.cpu())
        vectors = vectors.to(self.example.device, self.example.dtype, non_blocking=True)
        return vectors if outside is None else vectors.masked_fill(outside.unsqueeze(-1), 0)

    def stored(self, ids: Ids) -> StoredRows | None:
        """Return IDs and the weight of a trained table; see `LookupTable.stored`.

        The result is `None` for a read-only table, and where vectors have another device or dtype than the rows.
        """
        if not isinstance(self.source, FolderRows) or self.dtype != self.source.dtype or self.device.type != "cpu":
            return None
        self._require_own_weight()
        self.source.folder("look up").check_open()
        return self.source.table.stored(ids)

    def prefetch(self, ids: IdsLike) -> None:
        """Start to read the rows of the next batch in another thread, while this one is processed.

        On a read-only table, the next look-up of the same IDs uses what was read, and one of other IDs reads them
        itself. On a trained table, this only brings the pages into memory. For IDs on an accelerator the call waits for
        the device.

        Args:
            ids: IDs of the next look-up, `(...)`.

        Raises:
            TokenIdError: As in `look_up`.
            FileError: The file of a read-only table is closed.
        """
        checked, _ = self.index_check(as_ids(ids, beside=self))
        self.source.prefetch(checked.cpu())

    def rows(self, start: int, stop: int) -> Float[Tensor, "N D"]:
        """Return rows `start` to `stop - 1` without `scale`, `(stop - start, D)`: of a read-only table as a copy."""
        self._require_own_weight()
        start, stop, _ = slice(start, stop).indices(self.vocab_size)
        return self.source.rows(start, max(start, stop)).to(self.example.device, self.example.dtype)

    def _require_own_weight(self) -> None:
        """Raise a `SizeError` if the weight is computed from other parameters, as by `prune`; the file has the rows."""
        if "weight" not in self._parameters:
            raise SizeError("A weight that is computed (pruning, a parametrization) is not in the file of its rows.")

    def requires_grad_(self, requires_grad: bool = True) -> "MappedEmbedding":
        """Set whether the rows are trained, as in torch."""
        if requires_grad:
            self.source.folder("train")
        super().requires_grad_(requires_grad)
        return self

    def extra_repr(self) -> str:
        """Return the sizes and the file for `print`."""
        where = self.source.info.file if isinstance(self.source, FileRows) else self.source.folder("print").path
        return f"{self.vocab_size}, {self.embed_dim}, {str(where)!r}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "MappedEmbedding":
        """Move or cast the looked-up vectors, as in torch. The rows stay where they are."""
        weight = self._parameters.pop("weight")
        try:
            super()._apply(fn, recurse)
        finally:
            self._parameters["weight"] = weight
        if isinstance(self.source, FileRows):
            self.source.pinned = self.example.is_cuda
        return self

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Tensor], prefix: str, metadata: Any, strict: bool, *lists: list[str]
    ) -> None:
        """Copy loaded rows into the files of a trained table, in chunks, each logged first."""
        rows = state_dict.get(f"{prefix}weight")
        missing, unexpected, errors = lists
        if self.weight is None or rows is None:
            if strict and (self.weight is None) != (rows is None):
                (missing if rows is None else unexpected).append(f"{prefix}weight")
        elif rows.shape != self.weight.shape:
            errors.append(f"size mismatch for {prefix}weight: {tuple(rows.shape)} is not {tuple(self.weight.shape)}.")
        else:
            self.apply_pending_updates()
            self.source.folder("load").fill(lambda chunk: rows[chunk])

    def __getstate__(self) -> dict[str, Any]:
        if isinstance(self.source, FolderRows):
            self.source.folder("copy").refuse_copy()
        return self.__dict__


def _initialize(weight: Tensor, fields: TableFields) -> None:
    """Draw the rows of a trained table, with a zero padding row. With a standard deviation of 0 they are zeros."""
    if fields["init_std"]:
        init_normal_rows_(weight, start=0, num_rows=len(weight), std=fields["init_std"])
    else:
        weight.zero_()
    zero_rows_(weight, [] if fields["padding_idx"] is None else [fields["padding_idx"]])
