"""Folders and files: where an edit reads the old one, and writes the new one with its receipt."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from embedlayer.core.errors import CheckpointError, EmbedLayerError, EmbedLayerWarning, FileError
from embedlayer.families.edit_report import CensusReport
from embedlayer.families.left_out_files import files_left_out
from embedlayer.io.files import named_path, new_files, new_folder, recover_folder
from embedlayer.opening.path_kinds import BLOCKS, CONFIG, OWN_FOLDERS, PathKind, path_kind
from embedlayer.training.run_directory import RunDirectory
from embedlayer.vocab.edit import ResolveEdit
from embedlayer.vocab.targets.apply_rows import EditResult
from embedlayer.vocab.targets.checkpoint import apply_to_checkpoint, checkpoint_census
from embedlayer.vocab.targets.gguf import apply_to_gguf
from embedlayer.vocab.targets.run import apply_to_run, run_census

RECEIPT = "vocabulary-{}.receipt"
"""Name of the receipt of the first edit, of the second, ..."""

METADATA, SHARDS = ".metadata", "shard-*-model-*.safetensors"
"""Files of `torch.distributed.checkpoint`: of its default writer, and of its safetensors writer."""


def apply_to_files(source: Path, partial: Path, resolve: ResolveEdit) -> EditResult:
    """Write the edited copy of a folder or GGUF file to `partial`; `source` does not change."""
    kind = path_kind(source)
    if kind is PathKind.GGUF:
        return apply_to_gguf(source, partial, resolve)
    return (apply_to_run if kind in OWN_FOLDERS else apply_to_checkpoint)(source, partial, resolve)


def folder_census(folder: Path) -> CensusReport:
    """Return what follows the vocabulary in a folder, and what an edit does with it; nothing is written."""
    left_out = files_left_out(folder)
    census = run_census if path_kind(folder) in OWN_FOLDERS else checkpoint_census
    with warnings.catch_warnings(record=True, action="always", category=EmbedLayerWarning) as caught:
        try:
            check_folder(folder)
            report = census(folder, left_out)
        except EmbedLayerError as error:
            report = CensusReport(refused=str(error))
    notes = [str(each.message) for each in caught if issubclass(each.category, EmbedLayerWarning)]
    return replace(report, left_out={path: rule.what for path, rule in left_out.items()}, notes=tuple(notes))


def check_folder(folder: Path) -> None:
    """Check that a folder exists, and is neither a sharded checkpoint nor a model with a compressed table."""
    if not recover_folder(folder).is_dir():
        raise FileError(f"There is no folder {folder}.")
    if (folder / METADATA).exists() or any(folder.glob(SHARDS)):
        raise CheckpointError(f"{folder} is sharded. See docs/errors.md, Sharded checkpoints.")
    if path_kind(folder) in OWN_FOLDERS and (folder / BLOCKS / CONFIG).exists():
        raise CheckpointError(f"{folder} has a compressed table. Edit the checkpoint that it was compressed from.")


def receipts_in(folder: Path | str) -> list[Path]:
    """Return the paths of the receipts in a folder, from the first edit to the last; empty if there are none."""
    numbers = {file: file.stem.rpartition("-")[2] for file in Path(folder).glob(RECEIPT.format("[0-9]*"))}
    by_number = {int(number): file for file, number in numbers.items() if re.fullmatch("[0-9]{1,9}", number)}
    return [by_number[number] for number in sorted(by_number)]


def next_receipt(folder: Path) -> str:
    """Return the name of the receipt of the next edit of a folder: its number follows that of the last receipt."""
    numbers = [int(file.stem.rpartition("-")[2]) for file in receipts_in(folder)]
    return RECEIPT.format(max(numbers, default=0) + 1)


def receipt_beside(file: Path) -> Path:
    """Return the path of the receipt of the edit that wrote a GGUF file: that of the file with `.receipt` added."""
    return file.with_name(f"{file.name}.receipt")


@contextmanager
def edited_copy(source: Path, out: Path | str | None) -> Iterator[tuple[Path, Path]]:
    """Yield the temporary paths of an edited copy and its receipt, which get their names when the block ends."""
    if path_kind(source) is PathKind.GGUF:
        if out is None:
            raise FileError(f"The edit of {source} is written to a new file: name it with out=...")
        with new_files(out, receipt_beside(named_path(out))) as (file, receipt):
            yield file, receipt
        return
    check_folder(source)
    if out is None:
        raise FileError(f"The edit of the folder {source} is written to a new one: name it with out=...")
    lock = RunDirectory(source).lock  # a run in training writes to its folder while it is read
    lock.check_unlocked()
    with new_folder(out) as partial:
        yield partial, partial / next_receipt(source)
        lock.check_unlocked()
