"""The same edit in a folder: a layer of this library, a run that can be resumed, or a checkpoint of a known family.

The result is a new folder. It appears complete or not at all, and holds the receipt beside what changed.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer

from embedlayer.errors import CheckpointError, FileError
from embedlayer.io.files import recover_folder, replace_folder
from embedlayer.sources import OWN_FOLDERS, path_kind
from embedlayer.training.run_directory import RunDirectory
from embedlayer.vocab.change import Asked
from embedlayer.vocab.checkpoints import edit_checkpoint, undo_checkpoint
from embedlayer.vocab.receipt import Receipt
from embedlayer.vocab.runs import edit_own, undo_own

RECEIPT = "vocabulary-{}.receipt"
"""The receipt of the first edit, of the second, ..."""

METADATA, SHARDS = ".metadata", "shard-*-model-*.safetensors"
"""What `torch.distributed.checkpoint` writes: by default, and with its writer of safetensors."""


def edit_folder(folder: Path | str, out: Path | str | None, asked: Asked, tokenizer: Tokenizer | None) -> Receipt:
    """Write the folder, edited, to `out`, with the receipt in it.

    Raises:
        FileError: There is no such folder, or a process is training in it; or `out` is not given, not empty, or cannot
            be written.
        CheckpointError: It is a checkpoint of `torch.distributed.checkpoint`.
    """
    folder = Path(folder)
    with _new_folder(folder, out) as partial:
        edit = edit_own if path_kind(folder) in OWN_FOLDERS else edit_checkpoint
        receipt = edit(folder, partial, asked, tokenizer)
        receipt.save(partial / RECEIPT.format(len(receipts_in(folder)) + 1))
    return receipt


def undo_folder(receipt: Receipt, folder: Path | str, out: Path | str | None) -> None:
    """Write to `out` what a folder was before the edit that made it.

    Raises:
        CheckpointError: The receipt is not that of the folder's last edit, or its tensors were changed since.
    """
    folder = Path(folder)
    with _new_folder(folder, out) as partial:
        undo = undo_own if path_kind(folder) in OWN_FOLDERS else undo_checkpoint
        undo(receipt, folder, partial)
        for name, content in receipt.files.items():
            (partial / name).write_bytes(content)
        for name in receipt.created:
            (partial / name).unlink(missing_ok=True)
        receipts = receipts_in(folder)
        if receipts:
            (partial / receipts[-1].name).unlink(missing_ok=True)


def check_folder(folder: Path) -> None:
    """Refuse what is no folder, and what many processes saved together, whose tables need not fit into one.

    Raises:
        FileError: There is no such folder.
        CheckpointError: It is a checkpoint of `torch.distributed.checkpoint`.
    """
    if not recover_folder(folder).is_dir():
        raise FileError(f"There is no folder {folder}.")
    if (folder / METADATA).exists() or any(folder.glob(SHARDS)):
        raise CheckpointError(
            f"{folder} is a checkpoint of torch.distributed.checkpoint, in shards: its rows are edited where they are "
            f"loaded. Under torchrun, with any number of processes, build the model with the old vocabulary and divide "
            f"it, dcp.load what distributed_state(model, optimizer) gives, call edit_vocabulary(model, ..., "
            f"optimizer=optimizer), and dcp.save to another folder: docs/many-machines.md, Its vocabulary."
        )


def last_receipt(folder: Path | str) -> Receipt:
    """The receipt of the edit that made a folder.

    Raises:
        CheckpointError: The folder holds none.
    """
    receipts = receipts_in(folder)
    if not receipts:
        raise CheckpointError(f"{folder} holds no receipt ({RECEIPT.format('N')}): it is not what an edit gave.")
    return Receipt.load(receipts[-1])


def receipts_in(folder: Path | str) -> list[Path]:
    """The receipts of a folder, the first edit's first."""
    files = ((file.stem.rpartition("-")[2], file) for file in Path(folder).glob(RECEIPT.format("[0-9]*")))
    found = {int(number): file for number, file in files if re.fullmatch("[0-9]{1,9}", number)}
    return [found[number] for number in sorted(found)]


@contextmanager
def _new_folder(folder: Path, out: Path | str | None) -> Iterator[Path]:
    """A folder that takes the name `out` when it is complete."""
    check_folder(folder)
    if out is None:
        raise FileError(f"The edit of the folder {folder} is written to a new one: name it with out=...")
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileError(f"{out} is not empty. Choose a folder that is not there yet.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"Cannot write into the folder {out.parent}: {error.strerror or error}.") from error
    lock = RunDirectory(folder).lock  # a run in training changes under the hands of who reads it
    lock.check_unlocked()
    with replace_folder(out) as partial:
        yield partial
        lock.check_unlocked()
