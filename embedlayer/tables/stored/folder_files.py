"""What the files of a `RowFolder` say, and which process may use them."""

import base64
import os
import weakref
from pathlib import Path
from typing import Annotated, NotRequired, TypedDict

import torch
from torch import Tensor

from embedlayer.core.errors import CheckpointError, FileError
from embedlayer.io.files import JsonObject, file_errors, read_fields
from embedlayer.io.json_fields import Count, Range, Step, check_fields
from embedlayer.io.locks import LOCK, FileLock
from embedlayer.io.safetensors_files import DTYPE_NAMES, DTYPES
from embedlayer.io.system_calls import boot_id
from embedlayer.io.undo_log import LogContent, read_log

FORMAT_VERSION = 1
TABLE, WEIGHT, LOG, STATE = "table.json", "weight.safetensors", "undo.log", "state"
OPEN, CLOSED = "open.json", "closed.json"
RESIDENT_BYTES = 1 << 30  # default of the resident memory of a trainable table: 1 GiB


class TableFields(TypedDict):
    """Type of the content of `table.json`."""

    format_version: int
    vocab_size: Annotated[int, Range(1)]
    embed_dim: Annotated[int, Range(1)]
    dtype: str
    padding_idx: int | None
    scale: float | None
    init_std: float


class OpenFields(TypedDict):
    """Type of the content of `open.json`: where and since when the folder is open, and the largest number given out."""

    inode: int
    boot: str
    last_number: Count


class ClosedFields(TypedDict):
    """Type of the content of `closed.json`: the size of the log in bytes."""

    log_bytes: Count


class StateFields(TypedDict):
    """Type of an array of optimizer state in a log's state: its file, number of columns and data type.

    A `width` of `None` is that of an array `(V,)`.
    """

    file: str
    width: int | None
    dtype: str


class PendingUpdatesFields(TypedDict):
    """Type of the JSON values that a checkpoint stores for the pending updates of one row-sparse table.

    The tensors of the pending updates are stored separately.
    """

    start: NotRequired[Step]
    betas: NotRequired[list[Annotated[float, Range(0, 1)]]]
    applied_step: NotRequired[Step]
    rounding_seed: NotRequired[Count]


class CheckpointFields(TypedDict):
    """Type of the state that a log has for a checkpoint.

    `generation` is the number of this checkpoint, and `last_number` the largest that was given out to any. `arrays` are
    those that existed then, by name. `updates` are the numbers of the pending updates, and `tensors` their small
    tensors.
    """

    generation: Count
    last_number: Count
    arrays: JsonObject
    updates: NotRequired[PendingUpdatesFields]
    tensors: NotRequired[JsonObject]


_open_folders: "weakref.WeakValueDictionary[tuple[int, int], FileLock]" = weakref.WeakValueDictionary()
"""Locks of the folders that this process trains, by device and inode of the folder."""


def _key(path: Path) -> tuple[int, int]:
    """Return what identifies a folder, under any of its names: its device and inode."""
    status = os.stat(path)
    return status.st_dev, status.st_ino


def lock_folder(path: Path) -> FileLock:
    if _key(path) in _open_folders:
        raise FileError(f"The mapped table {path} is open in this process already. Use that one, or close it first.")
    lock = FileLock(path / LOCK, f"The mapped table {path}")
    with file_errors(f"train the mapped table {path}"):
        lock.acquire()
    _open_folders[_key(path)] = lock
    return lock


def unlock_folder(lock: FileLock) -> None:
    """Release the lock of a folder that this process trains. The folder may have been deleted."""
    lock.release()
    for key in [key for key, each in _open_folders.items() if each is lock]:
        del _open_folders[key]


def read_table_fields(path: Path) -> TableFields:
    """Read and check the `table.json` of a folder."""
    if not (path / TABLE).exists():
        advice = " Its creation did not end: delete the folder." if (path / WEIGHT).exists() else ""
        raise FileError(f"{path} holds no mapped table: create one with MappedEmbedding.create.{advice}")
    fields = read_fields(path / TABLE, TableFields, version=FORMAT_VERSION)
    if fields["dtype"] not in DTYPES:
        raise CheckpointError(f"{path / TABLE} has the unknown dtype {fields['dtype']!r}.")
    return fields  # type: ignore[return-value]  # checked


def check_at_rest(path: Path) -> None:
    """Check that the rows in a folder are those of a checkpoint; others are not for reading."""
    if _key(path) in _open_folders:
        raise FileError(f"The mapped table {path} is trained in this process: close it first, or look rows up in it.")
    FileLock(path / LOCK, f"The mapped table {path}").check_unlocked()
    content, _ = read_content(path)
    state = content.checkpoints[-1].state
    updates, tensors = state.get("updates"), state.get("tensors", {})
    if updates and updates.get("applied_step", 0) < updates["start"] + decode_tensor(tensors["history"]).shape[1]:
        how = "resume it, call apply_pending_updates(), make a checkpoint and close it"
        raise CheckpointError(f"Rows of {path} lack optimizer steps, which training applies at look-up: {how}.")
    if content.checkpoints[-1].rows:
        raise CheckpointError(f"Rows of {path} changed after its checkpoint: MappedEmbedding.resume rolls them back.")


def read_content(path: Path) -> tuple[LogContent, int]:
    """Return what the log of a folder says, and the largest number that was given out to a checkpoint."""
    numbers, size = [0], None
    if (path / OPEN).exists():
        mark = read_fields(path / OPEN, OpenFields)
        boot, numbers = boot_id(), [mark["last_number"]]
        if mark["inode"] != os.stat(path / WEIGHT).st_ino:
            raise CheckpointError(f"{path} was copied while it was open: copy the original again after close().")
        if not boot or mark["boot"] != boot:
            how = "open when the machine stopped" if boot else "open, and the machine may have stopped since"
            raise CheckpointError(f"{path} was {how}: restore a copy, or delete {OPEN} if all is on the disk.")
    elif (path / CLOSED).exists():
        size = read_fields(path / CLOSED, ClosedFields)["log_bytes"]
    content = read_log(path / LOG, size=size)
    for state, _, _ in content.checkpoints:
        check_fields(state, CheckpointFields, path / LOG)
        for fields in state["arrays"].values():
            check_fields(fields, StateFields, path / LOG)
        numbers.append(state["last_number"])
    return content, max(numbers)


def encode_tensor(tensor: Tensor) -> JsonObject:
    """Return a small tensor as JSON, bit for bit."""
    flat = tensor.detach().cpu().contiguous()
    data = flat.flatten().view(torch.uint8).numpy().tobytes()
    return {"dtype": DTYPE_NAMES[flat.dtype], "shape": list(flat.shape), "data": base64.b64encode(data).decode()}


def decode_tensor(value: JsonObject) -> Tensor:
    """Return the tensor that `encode_tensor` wrote."""
    data, dtype = bytearray(base64.b64decode(value["data"])), DTYPES[value["dtype"]]
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(value["shape"])
