"""The folder of a training run: its result, and all files for resuming it.

```
DIR/
  config.json            configuration of the model
  model.safetensors      weights of the step with the lowest validation loss so far
  best.json              step and validation results of these weights
  tokenizer.json         the tokenizer
  metrics.jsonl          one line per logged step
  report.html            the metrics as a web page
  run.json               options of the run
  checkpoint.safetensors weights, moments and random generators at the last checkpoint
  corpus/                the token IDs, or a link to them; of a mixture one folder or link for each corpus: 0, 1, ...
  tables/                mapped tables, each in a folder, if the run has some
```
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import nn

from embedlayer.core.errors import CheckpointError, FileError, SizeError, TokenizerError
from embedlayer.core.formatting import a_or_an
from embedlayer.data.corpus import TokenCorpus
from embedlayer.data.corpus_files import is_corpus
from embedlayer.data.mixture import TokenMixture, corpora_of
from embedlayer.io.files import (
    JsonObject,
    create_folder,
    file_errors,
    named_path,
    read_bytes,
    read_fields,
    recover_folder,
    remove_partials,
    visible_names,
    write_json,
    write_text,
)
from embedlayer.io.json_fields import Count, Measurement, Range, Step, check_arguments, check_fields, parse_json
from embedlayer.io.locks import LOCK, FileLock
from embedlayer.io.mapped_rows import machine_bytes
from embedlayer.io.partials import partial_folder, remove
from embedlayer.io.safetensors_files import open_safetensors, read_header
from embedlayer.models.decoder import DecoderLM
from embedlayer.saving import (
    CANNOT_BE_BUILT,
    CONFIG,
    TOKENIZER,
    WEIGHTS,
    assign,
    build,
    building,
    require_loadable,
    short,
    write_config,
)
from embedlayer.tables.lookup import LookupTable
from embedlayer.tables.stored.folder_files import PendingUpdatesFields
from embedlayer.tables.stored.mapped import MappedEmbedding
from embedlayer.tokenization.ids import require_rows, table_size
from embedlayer.tokenization.read import load_tokenizer, save_tokenizer
from embedlayer.tokenization.tokenizer_calls import fingerprint
from embedlayer.training.loop import Trainer, TrainingOptions, trained_files
from embedlayer.training.parallel import ParallelContext

FORMAT_VERSION = 1
SAMPLES_OF_A_TEXT, IDS_PER_SAMPLE = 256, 4096
MOST_METRICS = 1 << 32  # most bytes of `metrics.jsonl`: some 20 million lines

PATIENCE_SECONDS = 10.0
"""Time that rank 0 waits after a restart for the lock of the process before it, which may still be ending."""


class NeighborsBefore(TypedDict):
    """Nearest neighbours of a token before training, as a note in `run.json`.

    `near` has pairs of a token's text and its cosine similarity, the nearest first.
    """

    id: Count
    token: str
    near: list[tuple[str, Measurement]]


class Notes(TypedDict):
    """Type of `notes` in `run.json`, which the command `train` writes; other programs may add keys.

    `launch` is the `launch_id` of the torchrun launch that started the run. `sources` names the corpora of a mixture.
    """

    neighbors_before: NotRequired[list[NeighborsBefore]]
    launch: NotRequired[str]
    sources: NotRequired[list[str]]


class ModelDescription(TypedDict):
    """Type of those fields of a model's description, `describe(model)`, that are read without building the model."""

    kind: str
    position: NotRequired[JsonObject]
    head: NotRequired[JsonObject]


class RunDescription(TypedDict):
    """Type of the content of `run.json`: training options, model, validation fraction and notes of a run.

    `weights` has the weight of each corpus if the run trains on a mixture.
    """

    options: JsonObject
    model: ModelDescription
    validation_fraction: Annotated[float, Range(0, 1)]
    weights: NotRequired[list[float]]
    notes: Notes


class MonitorFields(TypedDict):
    """Type of `monitor` in a line of metrics: the fields of a `MonitorReport` that are not `None`.

    Tokens are named by their texts, which an edit of the vocabulary leaves as they are.
    """

    never_seen: Measurement
    norms: list[Measurement | None]
    update_ratios: list[Measurement | None]
    losses: list[Measurement | None]
    loss_never_seen: NotRequired[Measurement]
    new_norm: NotRequired[Measurement]
    new_update_ratio: NotRequired[Measurement]
    new_loss: NotRequired[Measurement]
    rows_not_finite: Count
    tokens_not_finite: list[str]
    gradients_not_finite: NotRequired[Count]
    tokens_of_gradients: list[str]
    logit_std: NotRequired[Measurement]
    log_z: NotRequired[Measurement]
    largest_logit: NotRequired[Measurement]


class MetricsLine(TypedDict):
    """Type of a line of `metrics.jsonl`, which `Trainer.run` yields. Losses are in nats per token."""

    step: Step
    loss: NotRequired[Measurement]
    lr: NotRequired[Measurement]
    tokens_per_second: NotRequired[Measurement]
    rows_touched: NotRequired[Measurement]
    validation_loss: NotRequired[Measurement]
    validation_bits_per_byte: NotRequired[Measurement]
    validation_losses: NotRequired[list[Measurement]]
    monitor: NotRequired[MonitorFields]


class BestFacts(TypedDict):
    """Type of the content of `best.json`: number of the step and validation results of the saved weights."""

    step: Step
    validation_loss: float
    validation_bits_per_byte: float
    validation_losses: NotRequired[list[float]]


class TrainerState(TypedDict):
    """Type of the JSON values that every `checkpoint.safetensors` has in its metadata.

    `Trainer.state` returns them and others. `generations` has the number of the checkpoint of each mapped table.
    """

    step: Step
    steps: Step | None
    pending_updates: dict[str, PendingUpdatesFields]
    generations: NotRequired[list[Count]]


class RunDirectory:
    """The folder of a training run: read, start, resume, save and finish the run.

    One process at a time writes to the folder. `start` and `resume` acquire a lock, on rank 0, and `finish` releases
    it. The lock also ends when this object is deleted or the process ends. Reading needs no lock.

    Args:
        path: The folder, which need not exist.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = named_path(path)
        self.corpus = self.path / "corpus"
        self.checkpoint = self.path / "checkpoint.safetensors"
        self.best_facts = self.path / "best.json"
        self.metrics = self.path / "metrics.jsonl"
        self.report = self.path / "report.html"
        self.run = self.path / "run.json"
        self.tables = self.path / "tables"
        self.lock = FileLock(self.path / LOCK, f"The run folder {self.path}")

    @property
    def contains_run(self) -> bool:
        """Whether the folder contains a run, that is, a `run.json`.

        Raises:
            FileError: The folder cannot be read.
        """
        return (recover_folder(self.path) / self.run.name).exists()

    @property
    def is_free(self) -> bool:
        """Whether a new run can start in the folder: it is missing, or has hidden files at most, such as a lock.

        Raises:
            FileError: The folder cannot be read, or is a file.
        """
        return not visible_names(recover_folder(self.path))

    def check_own_folders(self) -> None:
        """Check that `corpus` and `tables`, which a new run replaces, have what a run writes there and nothing else.

        Raises:
            FileError: One of them has other files, or cannot be read.
        """
        corpora = (self.corpus, self.corpus / "0")
        if visible_names(self.corpus) and not (self.corpus.is_symlink() or any(map(is_corpus, corpora))):
            raise FileError(f"{self.corpus} holds other files than a corpus. Choose another folder for the run.")
        if not all(name.isdecimal() for name in visible_names(self.tables)):
            raise FileError(f"{self.tables} holds other files than mapped tables. Choose another folder for the run.")

    @contextmanager
    def new_corpus(self, *, mapped: bool) -> Iterator[Path]:
        """Context manager: yield a temporary path for the corpus of a new run, which is named `corpus` at the end.

        The corpus and the mapped tables of an earlier run are deleted at the end. If the block raises an error, they
        are as before.

        Args:
            mapped: Whether the block writes mapped tables into `tables`, which is then missing at its start.

        Raises:
            FileError: One of these folders has other files.
        """
        self.check_own_folders()
        with partial_folder(self.corpus) as partial:
            corpus, old_tables = partial / self.corpus.name, partial / self.tables.name
            if mapped and self.tables.exists():
                self.tables.rename(old_tables)
            try:
                yield corpus
            except BaseException:
                if mapped:
                    remove(self.tables)
                if old_tables.exists():
                    old_tables.rename(self.tables)
                raise
            if os.path.lexists(self.corpus):
                self.corpus.rename(partial / "old")
            corpus.rename(self.corpus)

    @contextmanager
    def hold_lock(self, parallel: ParallelContext, *, create: bool) -> Iterator[None]:
        """Context manager: keep the lock of the folder on rank 0 during the block, even if `finish` is called in it.

        A folder that is missing and not created is not locked.

        Args:
            parallel: The processes that write to the folder together. Each of them may call this; only rank 0 locks.
            create: Whether rank 0 creates a missing folder. It is removed again if the block leaves it empty.

        Raises:
            FileError: Another process writes to the folder, or the folder cannot be created.
        """
        created = parallel.is_first and create and not self.path.exists()
        if created:
            create_folder(self.path)
        lock = FileLock(self.lock.path, self.lock.what)
        try:
            if parallel.is_first and self.path.is_dir():
                lock.acquire(timeout_seconds=PATIENCE_SECONDS if parallel.launch_id else 0.0)
            yield
        finally:
            lock.release()
            if created:
                self.lock.release()
                with suppress(OSError):  # it is not empty
                    self.path.rmdir()

    def files(self) -> list[str]:
        """List the names of the files and folders in the run folder, sorted; a folder's name ends with a slash.

        Hidden files are left out.

        Raises:
            FileError: The folder cannot be read.
        """
        return [name + "/" * (self.path / name).is_dir() for name in visible_names(self.path)]

    def start(
        self,
        trainer: Trainer,
        tokenizer: Tokenizer,
        *,
        validation_fraction: float,
        notes: JsonObject | None = None,
        overwrite: bool = False,
    ) -> None:
        """Begin a new run in this folder: write `run.json` and the tokenizer. Call it before the first step, on rank 0.

        An earlier run in the folder is deleted without asking: its checkpoint, result, metrics and report, and its
        mapped tables unless the new model has some. The lock is acquired, which `finish` releases. The corpus is not
        written: the caller puts it into the subfolder `corpus`, or those of a mixture into `corpus/0`, `corpus/1`, ...
        Files with other names stay.

        Args:
            trainer: The trainer at step 0.
            tokenizer: The tokenizer of the corpus.
            validation_fraction: Fraction of the corpus for validation.
            notes: JSON values that `read()["notes"]` returns later.
            overwrite: Whether files are replaced that have the names of a run's in a folder without a run.

        Raises:
            FileError: The folder cannot be written, another process writes to it, or it has such a file or folder.
            CheckpointError: The trained model could not be loaded again (see `require_loadable`), or is one of
                transformers.
        """
        model = trainer.parallel.describe(trainer.decoder)
        if trainer.parallel.collectives.size == 1:  # else `shard` has checked it
            require_loadable(trainer.decoder, model, trainer.decoder.state_dict())
        replaced = [self.path / CONFIG, self.path / WEIGHTS, self.path / TOKENIZER, self.run, self.best_facts]
        replaced += [self.checkpoint, self.metrics, self.report]
        folders = [] if trained_files(trainer.model) else [self.tables]
        self.check_own_folders()
        if not (overwrite or self.contains_run) and (names := [p.name for p in (*replaced, *folders) if p.exists()]):
            raise FileError(
                f"{self.path} holds {', '.join(names)}, and no run: choose another folder, or overwrite=True."
            )
        create_folder(self.path)
        self.lock.acquire()
        if trainer.monitor is not None:  # its reports name tokens by their texts
            trainer.monitor.tokenizer = tokenizer
        for file in replaced:
            file.unlink(missing_ok=True)
        for folder in folders:
            remove(folder)
        save_tokenizer(tokenizer, self.path / TOKENIZER)
        description: JsonObject = {
            "format_version": FORMAT_VERSION,
            "options": asdict(trainer.options),
            "model": model,
            "validation_fraction": validation_fraction,
            **({"weights": list(corpora.weights)} if isinstance(corpora := trainer.training, TokenMixture) else {}),
            "notes": notes or {},
        }
        write_json(self.run, description)

    def read(self) -> JsonObject:
        """Return the content of `run.json` as a dictionary.

        Raises:
            FileError: The folder contains no run.
            CheckpointError: The file is damaged or of another version.
        """
        if not self.contains_run:
            raise FileError(f"{self.path} holds no run: there is no {self.run.name} in it.")
        return read_fields(self.run, RunDescription, version=FORMAT_VERSION)

    def options(self) -> TrainingOptions:
        """Return the training options of the run.

        Raises:
            FileError: The folder contains no run.
            CheckpointError: `run.json` is damaged.
        """
        options = self.read()["options"]
        check_arguments(TrainingOptions, options, f"{self.run}, options")
        try:
            return TrainingOptions(**options)
        except (TypeError, SizeError) as error:
            raise CheckpointError(f"{self.run}, options: {error} The file is damaged.") from error

    def open_corpus(self) -> TokenCorpus | TokenMixture:
        """Open the token IDs of the run: one corpus, or the mixture that it trains on.

        Raises:
            FileError: The folder contains no run, or there is no corpus.
            CheckpointError: A file is damaged.
        """
        weights = self.read().get("weights")
        if weights is None:
            return TokenCorpus.open(self.corpus)
        corpora = [TokenCorpus.open(self.corpus / str(number)) for number in range(len(weights))]
        try:
            return TokenMixture(zip(corpora, weights, strict=True))
        except (SizeError, TokenizerError) as error:
            raise CheckpointError(f"{self.run} or a corpus in {self.corpus} is damaged: {error}") from error

    def resume(
        self, device: torch.device | str = "cpu", parallel: ParallelContext | None = None
    ) -> tuple[Trainer, Tokenizer, JsonObject]:
        """Open the run for writing, at its last checkpoint, or at step 0 if it has none. All ranks must call it.

        The lock is acquired, which `finish` releases. Metrics after the checkpoint are deleted.

        Args:
            device: Device to train on; several processes use those of their launch instead.
            parallel: The processes that continue the run, any number of them; by default a single process. All must see
                this folder.

        Returns:
            The trainer, the tokenizer, and the notes that were passed to `start`.

        Raises:
            SizeError: The run has mapped tables, and torchrun started the processes.
            FileError: The folder contains no run, a file of it cannot be read, or another process writes to the folder.
            CheckpointError: A file is damaged.
            TokenizerError: The tokenizer is damaged, or has more entries than the table.
            TextError: The corpus is too small to be split, or shorter than one window.
            PeerError: A rank reads another run, tokenizer or text than rank 0.
        """
        parallel = ParallelContext() if parallel is None else parallel
        self.read()  # an error where there is no run, before anything is written
        if parallel.is_first:
            self.lock.acquire()
        description, tokenizer = self.read(), load_tokenizer(self.path / TOKENIZER)
        parallel.collectives.require_equal(consistency_facts(description, self.open_corpus(), tokenizer))
        trainer, description = self.open(device, parallel)
        require_rows(tokenizer, trainer.model.table.vocab_size, self.path)
        if trainer.monitor is not None:  # its reports name tokens by their texts
            trainer.monitor.tokenizer = tokenizer
        parallel.collectives.require_equal({"step of the checkpoint": trainer.step})
        if parallel.is_first:
            last = trainer.step if self.checkpoint.exists() else -1  # later lines are of steps that are repeated
            lines: Sequence[dict[str, Any]] = [line for line in self.read_metrics() if line["step"] <= last]
            write_text(self.metrics, "".join(json.dumps(line) + "\n" for line in lines))
            remove_partials(self.checkpoint)  # of a process killed in a save
        return trainer, tokenizer, description["notes"]

    def open(
        self, device: torch.device | str = "cpu", parallel: ParallelContext | None = None
    ) -> tuple[Trainer, JsonObject]:
        """Read the run at its last checkpoint. Only mapped tables in its folder are changed.

        A trainer trains mapped tables in place. So they are rolled back to the checkpoint, and this process is the only
        one that may open them until they are closed.

        Args:
            device: Device to train on; several processes use those of their launch instead.
            parallel: The processes that open the run together, each of which must call it; by default a single process.

        Returns:
            A trainer at the last checkpoint, or at step 0 if there is none, and the content of `run.json`.

        Raises:
            SizeError: The run has mapped tables, and torchrun started the processes.
            FileError: The folder contains no run, a file of it cannot be read, or another process has opened a mapped
                table.
            CheckpointError: A file is damaged.
            TextError: The corpus is too small to be split, or shorter than one window.
        """
        parallel = ParallelContext() if parallel is None else parallel
        if self.tables.exists() and parallel.launch_id:
            raise SizeError(
                f"{self.path} has mapped tables, which only one process without torchrun can train: leave torchrun out."
            )
        description, options = self.read(), self.options()
        model = self._build_with_seed(description, parallel, device, self._tables_at_checkpoint())
        training, validation = self.open_corpus().split(description["validation_fraction"])
        trainer = Trainer(model, training, validation, options, parallel)
        if self.checkpoint.exists():
            tensors, metadata = parallel.load(self.checkpoint)
            state = self._trainer_state(metadata)
            if options.steps is not None and (state["steps"] != options.steps or state["step"] > options.steps):
                at = f"step {state['step']} of {state['steps']}"
                raise CheckpointError(f"{self.checkpoint} is at {at}, and {self.run} states {options.steps} steps.")
            try:
                trainer.load_state(tensors, state)
            except CANNOT_BE_BUILT as error:
                if isinstance(error, CheckpointError):
                    raise
                raise CheckpointError(f"{self.checkpoint} does not fit this run: {short(error)}") from error
        elif names := saved_buffers(model):
            raise CheckpointError(
                f"{self.checkpoint} is missing, with its {', '.join(names)}: restore it, or train again."
            )
        return trainer, description

    def _trainer_state(self, metadata: Mapping[str, str]) -> JsonObject:
        source = f"The state in {self.checkpoint}"
        state: JsonObject = parse_json(metadata.get("state", "{}"), source)
        check_fields(state, TrainerState, source)
        return state

    def _tables_at_checkpoint(self) -> Callable[[JsonObject], LookupTable] | None:
        """Return a function that opens the mapped tables of the run as they were at the checkpoint."""
        if not self.tables.exists():
            return None
        if not self.checkpoint.exists():
            raise CheckpointError(
                f"{self.checkpoint} is missing, whose step {self.tables} are at: restore it, or train again."
            )
        state = self._trainer_state(read_header(self.checkpoint).metadata)
        generations = enumerate(state.get("generations", []))

        def resume(description: JsonObject) -> LookupTable:
            number, generation = next(generations, (None, None))
            if number is None:
                raise CheckpointError(f"{self.checkpoint} names fewer mapped tables than {self.run}: one is damaged.")
            return MappedEmbedding.resume(self.tables / str(number), generation)

        return resume

    def initial_model(self) -> DecoderLM:
        """Return the model as it was before training, on the CPU: its weights are drawn again from the seed of the run.

        Torch's random generator is unchanged afterwards.

        Raises:
            FileError: The folder contains no run, or lacks a checkpoint that is needed (see `saved_buffers`).
            CheckpointError: A file of the run is damaged, or describes another kind of model, or one too large for the
                memory of this machine.
        """
        with torch.random.fork_rng(devices=[]):
            model = self._build_with_seed(self.read(), ParallelContext(), "cpu")
        if names := saved_buffers(model):
            with open_safetensors(self.checkpoint) as file:
                buffers = {name: file.get_tensor(f"model.{name}") for name in names}
            assign(model, {**model.state_dict(), **buffers}, source=self.run)
        return model

    def _build_with_seed(
        self,
        description: JsonObject,
        parallel: ParallelContext,
        device: torch.device | str,
        make_table: Callable[[JsonObject], LookupTable] | None = None,
    ) -> DecoderLM:
        """Seed torch's generator with the seed of the run, and build its model.

        `make_table` opens a mapped table from its description; with `None` the rows are drawn in memory.
        """
        kind = description["model"].get("kind")
        if kind != "decoder_lm":
            raise CheckpointError(f"{self.run} describes {a_or_an(str(kind))}, not {a_or_an(DecoderLM.__name__)}.")
        torch.manual_seed(self.options().seed)
        self._check_size(description, with_files=make_table is None)
        with building(MappedEmbedding, make_table):
            return parallel.build(description["model"], device)

    def _check_size(self, description: JsonObject, *, with_files: bool) -> None:
        """Raise a `CheckpointError` if the parameters are larger than this machine's memory, if that is known.

        Nothing is allocated. `with_files`: whether the rows of mapped tables count too.
        """
        in_files: set[nn.Parameter] = set()

        def left_out(table: JsonObject) -> LookupTable:
            built: LookupTable = build(table)
            in_files.update(() if with_files else built.parameters())
            return built

        with torch.random.fork_rng(devices=[]), torch.device("meta"), building(MappedEmbedding, left_out):
            parameters = build(description["model"]).parameters()
        needed = sum(tensor.nbytes for tensor in parameters if tensor not in in_files)
        memory = machine_bytes()
        if memory is not None and needed > memory:
            gib = f"{needed / 2**30:,.1f} GiB, and this machine has {memory / 2**30:,.1f}"
            raise CheckpointError(f"{self.run} describes a model of {gib}: it is damaged, or of a larger machine.")

    def save_checkpoint(self, trainer: Trainer) -> None:
        """Write the state of the trainer to `checkpoint.safetensors`, atomically. All ranks must call it.

        A checkpoint of the mapped tables is made in their own files with it.

        Raises:
            FileError: The file cannot be written.
        """
        with trainer.checkpoint() as (tensors, rest):
            trainer.parallel.save(self.checkpoint, tensors, {"state": json.dumps(rest)})

    def best(self) -> JsonObject | None:
        """Return the content of `best.json`: step and validation results of the weights that `keep_best` wrote.

        Returns:
            The dictionary; `None` if `keep_best` has written no weights.

        Raises:
            CheckpointError: `best.json` is damaged.
            FileError: `best.json` cannot be read.
        """
        whole = self.best_facts.exists() and (self.path / WEIGHTS).exists()
        return read_fields(self.best_facts, BestFacts) if whole else None

    def validation(self) -> JsonObject | None:
        """Return step and validation results of the run; `None` before the first validation.

        They are those of `best`. A run without `best`, such as one with mapped tables, has the line of metrics with the
        lowest validation loss; the first one counts only if it is the only one.

        Raises:
            FileError: The metrics cannot be read.
            CheckpointError: `best.json` or a line of metrics is damaged.
        """
        if best := self.best():
            return best
        validated = [line for line in self.read_metrics() if "validation_loss" in line]
        return min(validated[1:] or validated, key=lambda line: float(line["validation_loss"]), default=None)

    def keep_best(self, trainer: Trainer, line: JsonObject) -> bool:
        """Write `model.safetensors` and `best.json` if this validation loss is the lowest of the run so far.

        All ranks must call it. A loss that is NaN or infinite never is. Until `finish` the folder has no `config.json`,
        so these weights are not read as a finished result. A run with mapped tables keeps its last weights instead: a
        copy of all rows at each validation could take longer than the steps.

        Args:
            trainer: The trainer, with the weights to write.
            line: Line of metrics of its current step, with `validation_loss`.

        Returns:
            Whether the weights were written, equal on all ranks.

        Raises:
            FileError: A file cannot be written.
            CheckpointError: `best.json` is damaged.
        """
        loss, best = line["validation_loss"], self.best() if trainer.parallel.is_first else None
        is_better = math.isfinite(loss) and (best is None or loss < best["validation_loss"])
        is_better = is_better and not trained_files(trainer.model)
        is_better = trainer.parallel.collectives.any(trainer.parallel.is_first and is_better)
        if is_better:
            facts = {name: value for name, value in line.items() if name == "step" or name.startswith("validation")}
            if trainer.parallel.is_first:  # a process killed between the two files leaves no facts of other weights
                self.best_facts.unlink(missing_ok=True)
            trainer.parallel.save(self.path / WEIGHTS, trainer.model.state_dict())
            if trainer.parallel.is_first:
                write_json(self.best_facts, facts)
        return is_better

    def finish(self, trainer: Trainer, tokenizer: Tokenizer) -> None:
        """Complete the result of the run, and release the lock. All ranks must call it.

        Rank 0 writes `config.json` and the tokenizer. The current weights are written only if `keep_best` wrote none.

        Args:
            trainer: The trainer after its last step.
            tokenizer: The tokenizer of the corpus.

        Raises:
            FileError: A file cannot be written.
            CheckpointError: `best.json` is damaged.
        """
        if not trainer.parallel.collectives.any(trainer.parallel.is_first and self.best() is not None):
            trainer.parallel.save(self.path / WEIGHTS, trainer.model.state_dict())
        if trainer.parallel.is_first:
            save_tokenizer(tokenizer, self.path / TOKENIZER)
            write_config(self.path, trainer.parallel.describe(trainer.decoder))
            self.lock.release()

    def add_metrics(self, line: JsonObject) -> None:
        """Append a line of metrics to `metrics.jsonl`. Only rank 0 calls it.

        Raises:
            FileError: The file cannot be written.
        """
        with file_errors(f"write {self.metrics}"), self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """Read `metrics.jsonl` and return its lines as dictionaries, in order; the list is empty if there is no file.

        A last line without a line break is left out: a process was killed while it wrote the line.

        Raises:
            FileError: The file cannot be read.
            CheckpointError: A line is damaged.
        """
        content = read_bytes(self.metrics, most=MOST_METRICS) if self.metrics.exists() else b""
        lines = []
        for number, raw in enumerate(content.split(b"\n")[:-1], start=1):
            source = f"{self.metrics}, line {number},"
            lines.append(parse_json(raw, source))
            check_fields(lines[-1], MetricsLine, source)
        return lines


def saved_buffers(model: DecoderLM) -> list[str]:
    """Return the names of the buffers that a saved model contains, such as the token map of an n-gram table.

    The seed of a run does not determine them, so a run whose model has some needs a checkpoint from its start.
    """
    saved = model.state_dict().keys()
    return [name for name, _ in model.named_buffers() if name in saved]


def consistency_facts(description: JsonObject, text: TokenCorpus | TokenMixture, tokenizer: Tokenizer) -> JsonObject:
    """Return what must be equal on all ranks before they train together: run, tokenizer, text and torch version.

    The text is compared by its length and by a hash over the starts of its documents and up to 256 samples of 4096 IDs
    each, spread over the text; of a mixture, each text.
    """
    samples = hashlib.sha256()
    for corpus in corpora_of(text):
        samples.update(corpus.documents.tobytes())
        starts = np.linspace(0, max(0, len(corpus) - IDS_PER_SAMPLE), SAMPLES_OF_A_TEXT).astype(np.int64)
        for start in np.unique(starts):
            samples.update(np.asarray(corpus.ids[start : start + IDS_PER_SAMPLE]).tobytes())
    return {
        "vocabulary": table_size(tokenizer),
        "tokenizer": fingerprint(tokenizer),
        "tokens of text": len(text),
        "text": samples.hexdigest()[:12],
        **{f"configuration of {name}": value for name, value in description.items() if name != "notes"},
        "torch": torch.__version__,
    }
