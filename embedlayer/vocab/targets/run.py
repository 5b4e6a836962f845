"""Folders of this library: a saved layer, and the run that trained it, which can be resumed after an edit."""

import shutil
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from embedlayer.checkpoints.second_copies import refuse_copies
from embedlayer.core.errors import EmbedLayerWarning, VocabularyError
from embedlayer.core.formatting import command_line
from embedlayer.data.corpus import CorpusWriter, TokenCorpus
from embedlayer.data.corpus_files import WEIGHTS_FILE, write_shard_tables
from embedlayer.data.memmap import IdArray
from embedlayer.data.mixture import TokenMixture, corpora_of
from embedlayer.families.edit_report import CensusReport
from embedlayer.families.left_out_files import files_left_out, files_to_copy, other_safetensors
from embedlayer.io.files import JsonObject, write_json
from embedlayer.io.locks import LOCK
from embedlayer.io.partials import PARTIAL
from embedlayer.io.safetensors_files import read_header
from embedlayer.saving import CONFIG, TOKENIZER, WEIGHTS, Pretrained, describe
from embedlayer.tokenization.read import load_tokenizer, save_tokenizer
from embedlayer.training.loop import Trainer
from embedlayer.training.run_directory import RunDirectory
from embedlayer.vocab.edit import ModelResult, ResolveEdit, missing_rows
from embedlayer.vocab.map import RowMap
from embedlayer.vocab.targets.apply_rows import EditResult
from embedlayer.vocab.targets.live import apply_to_module, row_tensors
from embedlayer.vocab.targets.module_parts import vocabulary_modules
from embedlayer.vocab.targets.module_settings import settings_of

IDS_AT_ONCE = 1 << 22
RUN_FILES = ("run.json", "checkpoint.safetensors", "metrics.jsonl", "corpus")
CORPUS_FILES = (
    "corpus/index.json",
    "corpus/[0-9]*/index.json",
    "corpus/tokenizer.json",
    "corpus/[0-9]*/tokenizer.json",
)
CHANGED = (CONFIG, TOKENIZER, "run.json", *CORPUS_FILES, "report.html")


def apply_to_run(folder: Path, partial: Path, resolve: ResolveEdit) -> EditResult:
    """Write the edited copy of a folder of this library into `partial`; `folder` does not change."""
    tokenizer = load_tokenizer(folder / TOKENIZER) if (folder / TOKENIZER).exists() else None
    random_state = torch.get_rng_state()
    run, results = RunDirectory(folder), list[ModelResult]()
    _refuse_mapped(run)
    if (folder / CONFIG).exists():
        layer = Pretrained.from_pretrained(folder)
        results.append(apply_to_module(layer, resolve, tokenizer=tokenizer))
        layer.save_pretrained(partial, tokenizer=results[0].edit.tokenizer)
    if run.contains_run and (not results or _keeps_corpus(run, results[0].edit.row_map)):
        with torch.random.fork_rng(devices=[]):
            trainer, description = run.open()
            run_state = torch.get_rng_state()
            torch.set_rng_state(random_state)  # the run's new rows get the same random values as those of its result
            results.append(apply_to_module(trainer.model, resolve, trainer.optimizer, tokenizer=tokenizer))
            torch.set_rng_state(run_state)
            edit = results[-1].edit
            if len(results) == 1 and not _keeps_corpus(run, edit.row_map):
                raise VocabularyError(
                    f"The corpus of the unfinished run has tokens that would be removed. Finish it first: "
                    f"{command_line('train', '--resume', '-o', folder)}"
                )
            if trainer.monitor is not None:
                trainer.monitor.move_counts(edit.new_ids)
            assert edit.tokenizer is not None  # a run has one
            new_ids = edit.new_ids.numpy()
            description = {**description, "notes": _moved_notes(description["notes"], new_ids)}
            _write_run(run, RunDirectory(partial), trainer, description, new_ids, edit.tokenizer)
    others = [file for file in _others(folder) if not (partial / file.name).exists()]
    own = tuple(f"{file.name}/" if file.is_dir() else file.name for file in others)
    left_out = {path: rule for path, rule in files_left_out(folder).items() if path.startswith(own)}
    names = {name for result in results for name in result.before}
    _refuse_copies(folder, left_out, names, results[0].edit.row_map.old_size)
    written = (f"{file.name}/" if file.is_dir() else file.name for file in folder.iterdir() if file not in others)
    for name in files_to_copy(folder, partial, [*left_out, *written]):
        shutil.copyfile(folder / name, partial / name)
    return EditResult(results[0].edit, left_out)


def run_census(folder: Path, left_out: Collection[str]) -> CensusReport:
    """Return what follows the vocabulary in a folder of this library, as `apply_to_run` moves it."""
    _refuse_mapped(RunDirectory(folder))
    layer = Pretrained.from_pretrained(folder)
    modules = vocabulary_modules(layer)
    tensors = row_tensors(layer, modules)[0]
    tokenizer = load_tokenizer(folder / TOKENIZER) if (folder / TOKENIZER).exists() else None
    if tokenizer is not None and (missing := missing_rows(tokenizer, modules.vocab_size, folder)):
        warnings.warn(missing, EmbedLayerWarning, stacklevel=3)
    _refuse_copies(folder, left_out, tensors, modules.vocab_size)
    ids = {
        name: setting.value for name, setting in settings_of(modules).items() if "padding" in name or setting.names_ids
    }
    files = [file.relative_to(folder).as_posix() for name in (*CHANGED, *RUN_FILES) for file in folder.glob(name)]
    return CensusReport(
        {name: tuple(rows.tensor.shape) for name, rows in tensors.items()},
        {name: value for name, value in ids.items() if value is not None},
        tuple(sorted({*files})),
    )


def _refuse_mapped(run: RunDirectory) -> None:
    """Raise a `VocabularyError` if a run has mapped tables."""
    if run.tables.exists():
        raise VocabularyError(f"The run has mapped tables in {run.tables}: save the model into another folder.")


def _others(folder: Path) -> list[Path]:
    """Return what is in a folder beside the files of its layer and its run."""
    edited = {*RUN_FILES, *CHANGED, WEIGHTS, LOCK}
    return [file for file in folder.iterdir() if file.name not in edited and not file.name.endswith(PARTIAL)]


def _refuse_copies(folder: Path, left_out: Collection[str], names: Collection[str], size: int) -> None:
    """Raise a `CheckpointError` if another safetensors file of a folder may have values of tokens."""
    others, weights = {file.name for file in _others(folder)}, folder / WEIGHTS
    tensors = read_header(weights).tensors if weights.exists() else {}
    sizes = {size, *(tensors[name].shape[0] for name in names if name in tensors)}  # with padding rows
    files = [path for path in other_safetensors(folder, left_out) if Path(path).parts[0] in others]
    refuse_copies(folder, files, names, sizes, f"embedlayer.vocab.merge_adapter(model, {str(folder)!r})")


def _keeps_corpus(run: RunDirectory, row_map: RowMap) -> bool:
    """Return whether the edit keeps every token that occurs in the corpus of a run; if not, warn."""
    is_kept = row_map.new_ids.numpy() >= 0
    lost = int(run.open_corpus().counts(len(is_kept))[~is_kept].sum())
    if lost:
        warnings.warn(
            f"The corpus of the run in {run.path} contains {lost:,} removed tokens: its result is written, and there "
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
    new_ids: IdArray,
    tokenizer: Tokenizer,
) -> None:
    """Write the files of an edited run: tokenizer, `run.json`, checkpoint, metrics, and the corpus with new IDs."""
    # The caller checks with `_keeps_corpus` that the corpus has no removed token, whose new ID is negative.
    save_tokenizer(tokenizer, new.path / TOKENIZER)
    write_json(new.run, {**description, "model": describe(trainer.decoder)})
    new.save_checkpoint(trainer)
    if old.metrics.exists():
        shutil.copyfile(old.metrics, new.metrics)
    text = old.open_corpus()
    for number, corpus in enumerate(corpora_of(text)):
        folder = new.corpus / str(number) if isinstance(text, TokenMixture) else new.corpus
        folder.mkdir(parents=True)
        _write_corpus(folder, corpus, new_ids, tokenizer)


def _write_corpus(folder: Path, corpus: TokenCorpus, new_ids: IdArray, tokenizer: Tokenizer) -> None:
    """Write the corpus with new token IDs. It contains no removed token; `folder` is empty."""
    with (folder / "ids.bin").open("wb") as file:
        writer = CorpusWriter(tokenizer, lambda ids: file.write(ids.tobytes()))
        for start in range(0, len(corpus), IDS_AT_ONCE):
            writer.write(new_ids[np.asarray(corpus.ids[start : start + IDS_AT_ONCE])].astype(writer.dtype))
    index = {**writer.index(), "num_tokens": len(corpus), "num_bytes": corpus.num_bytes}
    if corpus.token_weights is not None:
        with (folder / WEIGHTS_FILE).open("wb") as file:
            for start in range(0, len(corpus), IDS_AT_ONCE):
                file.write(np.asarray(corpus.token_weights[start : start + IDS_AT_ONCE]).tobytes())
        index["has_weights"] = True
    write_shard_tables(folder, corpus.documents, corpus.blocks, index)
    save_tokenizer(tokenizer, folder / TOKENIZER)


def _moved_notes(notes: Mapping[str, Any], new_ids: IdArray) -> JsonObject:
    """Return a copy of the `notes` of a run in which the tokens of the neighbour report have their new IDs."""
    rows = [{**row, "id": int(new_ids[row["id"]])} for row in notes.get("neighbors_before", [])]
    return {**notes, "neighbors_before": [row for row in rows if row["id"] >= 0]} if rows else dict(notes)
