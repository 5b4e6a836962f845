"""Folders of this library, edited: a saved layer, and the run that it came from, so that it can be resumed."""

import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from embedlayer.data.corpus import TokenCorpus
from embedlayer.data.corpus_files import write_shard_tables
from embedlayer.data.tokenizer import fingerprint, load_tokenizer, save_tokenizer, table_size
from embedlayer.errors import EmbedLayerWarning, VocabularyError
from embedlayer.io.files import PARTIAL, JsonObject, write_json
from embedlayer.io.locks import LOCK
from embedlayer.pretrained import CONFIG, TOKENIZER, WEIGHTS, Pretrained, describe
from embedlayer.training.loop import Trainer
from embedlayer.training.run_directory import RunDirectory
from embedlayer.vocab.change import Asked, own_or_given
from embedlayer.vocab.live import edit_live, undo_live
from embedlayer.vocab.receipt import Receipt

Entry = TypeVar("Entry")
Remap = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]

IDS_AT_ONCE = 1 << 22
RUN = "run/"
"""In a receipt: before the names of what belongs to the run; those of its result have the same names."""

OF_RUN = ("run.json", "checkpoint.safetensors", "metrics.jsonl", "corpus")
CHANGED = (CONFIG, TOKENIZER, "run.json", "corpus/index.json", "report.html")


def edit_own(folder: Path, partial: Path, asked: Asked, tokenizer: Tokenizer | None) -> Receipt:
    """Write a saved layer, and its run if there is one, edited, into `partial`.

    The corpus of a run is remapped. Where it holds tokens that are gone, only the result of the run is written, with a
    warning. The report is left out: `embedlayer report` makes it again.

    Raises:
        VocabularyError: There is no result yet, and the run cannot go on without a token that would be gone.
    """
    if (folder / TOKENIZER).exists():
        tokenizer = own_or_given(load_tokenizer(folder / TOKENIZER), tokenizer)
    drawn_from = torch.get_rng_state()
    run, receipt, parts = RunDirectory(folder), None, {}
    if (folder / CONFIG).exists():
        layer = Pretrained.read_pretrained(folder)
        receipt = parts[""] = edit_live(layer, asked, tokenizer)
        layer.save_pretrained(partial, tokenizer=receipt.tokenizer)
    if run.contains_run and (receipt is None or _goes_on(run, receipt)):
        with torch.random.fork_rng(devices=[]):
            trainer, description = run.open()
            of_run = torch.get_rng_state()
            torch.set_rng_state(drawn_from)  # new rows of the run start as those of its result do
            parts[RUN] = edit_live(trainer.model, asked, tokenizer, trainer.optimizer)
            torch.set_rng_state(of_run)
            if receipt is None and not _goes_on(run, parts[RUN]):
                raise VocabularyError(
                    f"The run in {folder} is not finished and its text holds tokens that would be gone. Finish it "
                    f"first (embedlayer train --resume), or keep them."
                )
            receipt = parts[RUN] if receipt is None else receipt
            description["notes"] = _moved_notes(description["notes"], receipt)
            _write_run(run, RunDirectory(partial), trainer, description, receipt.remap, receipt.tokenizer)
    assert receipt is not None
    _copy_others(folder, partial)
    files = {name: (folder / name).read_bytes() for name in CHANGED if (folder / name).exists()}
    return _joined(receipt, parts, files)


def undo_own(receipt: Receipt, folder: Path, partial: Path) -> None:
    """Write into `partial` what `edit_own` made `folder` of."""
    if (folder / CONFIG).exists():
        layer = Pretrained.read_pretrained(folder)
        undo_live(_part(receipt, ""), layer)
        layer.save_pretrained(partial, tokenizer=receipt.old_tokenizer)
    run = RunDirectory(folder)
    if run.contains_run:
        with torch.random.fork_rng(devices=[]):
            trainer, description = run.open()
            undo_live(_part(receipt, RUN), trainer.model, trainer.optimizer)
            back = Receipt(receipt.move.inverse(), receipt.num_tokens[::-1])
            _write_run(run, RunDirectory(partial), trainer, description, back.remap, receipt.old_tokenizer)
    _copy_others(folder, partial)


def _goes_on(run: RunDirectory, receipt: Receipt) -> bool:
    """Whether every token of the run's text is still there; a warning if not."""
    stays = receipt.move.new_ids.numpy() >= 0
    lost = int(TokenCorpus.open(run.corpus).counts(len(stays))[~stays].sum())
    if lost:
        warnings.warn(
            f"The text of the run in {run.path} holds {lost:,} tokens that are gone: its result is written, and there "
            f"is no run to resume.",
            EmbedLayerWarning,
            stacklevel=4,
        )
    return not lost


def _write_run(
    old: RunDirectory,
    new: RunDirectory,
    trainer: Trainer,
    description: JsonObject,
    remap: Any,
    tokenizer: Tokenizer | None,
) -> None:
    """The run's own files, with the trainer's present state and a corpus that goes with it."""
    assert tokenizer is not None  # a run has one
    save_tokenizer(tokenizer, new.path / TOKENIZER)
    write_json(new.run, {**description, "model": describe(trainer.model)})
    new.save_checkpoint(trainer)
    if old.metrics.exists():
        shutil.copyfile(old.metrics, new.metrics)
    new.corpus.mkdir()
    corpus, size = TokenCorpus.open(old.corpus), table_size(tokenizer)
    dtype = np.dtype("<u2" if size <= 1 << 16 else "<u4")
    with (new.corpus / "ids.bin").open("wb") as file:
        for start in range(0, len(corpus), IDS_AT_ONCE):
            ids = remap(np.asarray(corpus.ids[start : start + IDS_AT_ONCE]).astype(np.int64))
            file.write(ids.astype(dtype).tobytes())
    facts = {
        "dtype": dtype.name,
        "num_tokens": len(corpus),
        "num_bytes": corpus.num_bytes,
        "vocab_size": size,
        "tokenizer": fingerprint(tokenizer),
    }
    write_shard_tables(new.corpus, corpus.documents, corpus.blocks, facts)


def _moved_notes(notes: Mapping[str, Any], receipt: Receipt) -> JsonObject:
    """The tokens whose neighbours a report shows, by their new IDs."""
    new_ids = receipt.new_ids.tolist()
    rows = [{**row, "id": new_ids[row["id"]]} for row in notes.get("neighbors_before", [])]
    return {**notes, "neighbors_before": [row for row in rows if row["id"] >= 0]} if rows else dict(notes)


def _copy_others(folder: Path, partial: Path) -> None:
    """Everything in the folder that has nothing to do with the edit."""
    edited = {*OF_RUN, *CHANGED, WEIGHTS, LOCK}
    for file in folder.iterdir():
        if (partial / file.name).exists() or file.name in edited or file.name.endswith(PARTIAL):
            continue
        (shutil.copytree if file.is_dir() else shutil.copyfile)(file, partial / file.name)


def _joined(receipt: Receipt, parts: Mapping[str, Receipt], files: dict[str, bytes]) -> Receipt:
    """One receipt for the result and its run."""
    return replace(
        receipt,
        files=files,
        rows={prefix + name: value for prefix, part in parts.items() for name, value in part.rows.items()},
        before={prefix + name: value for prefix, part in parts.items() for name, value in part.before.items()},
        after={prefix + name: value for prefix, part in parts.items() for name, value in part.after.items()},
        settings={prefix + name: value for prefix, part in parts.items() for name, value in part.settings.items()},
    )


def _part(receipt: Receipt, prefix: str) -> Receipt:
    """The receipt of the result alone, or of the run alone."""

    def of(entries: Mapping[str, Entry]) -> dict[str, Entry]:
        names = [name for name in entries if name.startswith(RUN) == (prefix == RUN)]
        return {name.removeprefix(prefix): entries[name] for name in names}

    return replace(
        receipt,
        rows=of(receipt.rows),
        before=of(receipt.before),
        after=of(receipt.after),
        settings=of(receipt.settings),
    )
