"""The folder of a run: everything that a result is, and everything that resuming needs.

```
DIR/
  config.json            what the model is
  model.safetensors      its weights, the trained table among them: those with the lowest validation loss so far
  best.json              the step that these weights are from, and what was validated at it
  tokenizer.json         text to IDs
  metrics.jsonl          one line per logged step
  report.html            the same to look at
  run.json               how it was trained
  checkpoint.safetensors weights, moments and generators in the middle of a run
  corpus/                the token IDs that it reads, or a link to them
```
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NotRequired, TypedDict

import numpy as np
import torch
from tokenizers import Tokenizer

from embedlayer.errors import CheckpointError, FileError, SizeError
from embedlayer.fields import Count, Range, check_arguments, check_fields, parse_json, shown
from embedlayer.files import (
    JsonObject,
    clear_away_partials,
    read_fields,
    read_json,
    restored,
    writable_folder,
    write_json,
    write_text,
)
from embedlayer.locks import LOCK, FileLock
from embedlayer.models.decoder import DecoderLM
from embedlayer.pretrained import CANNOT_BE_BUILT, CONFIG, TOKENIZER, WEIGHTS, build, short, write_config
from embedlayer.short_repr import short_repr
from embedlayer.text.corpus import TokenCorpus
from embedlayer.text.tokenizer import load_tokenizer, require_rows, save_tokenizer, table_size
from embedlayer.training.loop import Trainer, TrainingOptions
from embedlayer.training.parallel import ParallelContext

FORMAT_VERSION = 1
PIECES_OF_A_TEXT, IDS_IN_A_PIECE = 256, 4096
PATIENCE_SECONDS = 10.0
"""How long rank 0 of a restarted launch waits for the lock of the one before, which may still be ending elsewhere."""


class NeighborsBefore(TypedDict):
    """A token, and the text of those nearest to it before training, with their cosines."""

    id: Count
    token: str
    near: list[tuple[str, float]]


class Notes(TypedDict):
    """What the command `train` notes beside a run; a program may note more."""

    neighbors_before: NotRequired[list[NeighborsBefore]]
    launch: NotRequired[str]


class ModelDescription(TypedDict):
    """As much of a model's description as is read from it without building it."""

    kind: str
    position: NotRequired[JsonObject]
    head: NotRequired[JsonObject]


class RunDescription(TypedDict):
    """`run.json`."""

    options: JsonObject
    model: ModelDescription
    validation_fraction: Annotated[float, Range(0, 1)]
    notes: Notes


class MetricsLine(TypedDict):
    """A line of `metrics.jsonl`, as `Trainer.run` gives it: nats per token, tokens per second."""

    step: Count
    loss: NotRequired[float]
    lr: NotRequired[float]
    tokens_per_second: NotRequired[float]
    rows_touched: NotRequired[float]
    validation_loss: NotRequired[float]
    validation_bits_per_byte: NotRequired[float]


class BestFacts(TypedDict):
    """`best.json`: the step of the weights that are kept, and what was validated at it."""

    step: Count
    validation_loss: float
    validation_bits_per_byte: float


class LedgerState(TypedDict):
    """What is not a tensor of the pending updates of a row-sparse table."""

    start: NotRequired[Count]
    betas: NotRequired[list[Annotated[float, Range(0, 1)]]]


class TrainerState(TypedDict):
    """What is not a tensor of `checkpoint.safetensors`."""

    step: Count
    steps: Count | None
    ledgers: dict[str, LedgerState]


class Run(NamedTuple):
    """A trained layer with its tokenizer, as `load_run` reads it."""

    model: DecoderLM
    tokenizer: Tokenizer

    def __repr__(self) -> str:
        return short_repr(self)


class RunDirectory:
    """A run's folder, by the names of its files.

    One process at a time writes to it: `start` and `resume` take a lock, on rank 0, and `finish` releases it. Before
    that it ends with this object, or with the process. Reading needs no lock.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.corpus = self.path / "corpus"
        self.checkpoint = self.path / "checkpoint.safetensors"
        self.best_facts = self.path / "best.json"
        self.metrics = self.path / "metrics.jsonl"
        self.report = self.path / "report.html"
        self.run = self.path / "run.json"
        self.lock = FileLock(self.path / LOCK, f"The run folder {self.path}")

    @property
    def holds_a_run(self) -> bool:
        """Whether a run was started here.

        Raises:
            FileError: The folder cannot be looked into.
        """
        return (restored(self.path) / self.run.name).exists()

    @contextmanager
    def written_by(self, parallel: ParallelContext, *, create: bool) -> Iterator[None]:
        """Hold the lock on rank 0 while the block runs, whatever `start`, `resume` and `finish` do in it.

        Args:
            parallel: The processes that write to the folder together.
            create: Create the folder if it is missing; one that the block leaves empty is removed again.

        Raises:
            FileError: Another process writes to the folder, or it cannot be created.
        """
        created = parallel.is_first and create and not self.path.exists()
        if created:
            writable_folder(self.path)
        lock = FileLock(self.lock.path, self.lock.what)
        try:
            if parallel.is_first and self.path.is_dir():
                lock.acquire(patience_seconds=PATIENCE_SECONDS if parallel.launch_id else 0.0)
            yield
        finally:
            lock.release()
            if created:
                self.lock.release()
                with suppress(OSError):  # it is not empty
                    self.path.rmdir()

    def files(self) -> list[str]:
        """Names of what is in the folder, folders with a slash behind; without hidden files."""
        found = (file for file in self.path.iterdir() if not file.name.startswith("."))
        return sorted(file.name + "/" * file.is_dir() for file in found)

    def start(
        self, trainer: Trainer, tokenizer: Tokenizer, *, validation_fraction: float, notes: JsonObject | None = None
    ) -> None:
        """Write down what the run is, before its first step; what an earlier run left here goes.

        Args:
            trainer: The run; its model is described, so that resuming can build it.
            tokenizer: Text to IDs.
            validation_fraction: Share of the corpus that is measured on.
            notes: Anything else that should come back in `read()["notes"]`.

        Raises:
            FileError: The folder cannot be written, or another process writes to it.
        """
        writable_folder(self.path)
        self.lock.acquire()
        result = (self.path / CONFIG, self.path / WEIGHTS)
        for file in (self.run, self.best_facts, *result, self.checkpoint, self.metrics, self.report):
            file.unlink(missing_ok=True)
        save_tokenizer(tokenizer, self.path / TOKENIZER)
        description: JsonObject = {
            "format_version": FORMAT_VERSION,
            "options": asdict(trainer.options),
            "model": trainer.parallel.describe(trainer.model),
            "validation_fraction": validation_fraction,
            "notes": notes or {},
        }
        write_json(self.run, description)

    def read(self) -> JsonObject:
        """What `start` wrote.

        Raises:
            FileError: There is no run here.
            CheckpointError: The file is damaged or of another version.
        """
        if not self.path.exists():
            raise FileError(f"{self.path} does not exist.")
        if not self.holds_a_run:
            raise FileError(f"{self.path} holds no run: there is no {self.run.name} in it.")
        description = read_json(self.run)
        if description.get("format_version") != FORMAT_VERSION:
            raise CheckpointError(
                f"{self.run} has format version {shown(description.get('format_version'))}; "
                f"this embedlayer reads version {FORMAT_VERSION}."
            )
        check_fields(description, RunDescription, self.run)
        return description

    def options(self) -> TrainingOptions:
        """How the run is trained.

        Raises:
            FileError: There is no run here.
            CheckpointError: The file that says so is damaged.
        """
        options = self.read()["options"]
        check_arguments(TrainingOptions, options, f"{self.run}, options")
        try:
            return TrainingOptions(**options)
        except (TypeError, SizeError) as error:
            raise CheckpointError(f"{self.run}, options: {error} The file is damaged.") from error

    def resume(
        self, device: torch.device | str = "cpu", parallel: ParallelContext | None = None
    ) -> tuple[Trainer, Tokenizer, JsonObject]:
        """Build the run again and continue at its last checkpoint, or at step 0 if it has none.

        Args:
            device: Where to train.
            parallel: The processes that train it together, any number of them. All must see this folder.

        Returns:
            The trainer, the tokenizer, and the notes given to `start`.

        Raises:
            FileError: There is no run here, a file of it cannot be read, or another process writes to the folder.
            CheckpointError: A file is damaged.
            TokenizerError: The tokenizer is damaged, or has more entries than the table.
            PeerError: A rank sees another run, tokenizer or text than rank 0.
        """
        parallel = ParallelContext() if parallel is None else parallel
        self.read()  # an error where there is no run, before anything is written
        if parallel.is_first:
            self.lock.acquire()
        description, tokenizer = self.read(), load_tokenizer(self.path / TOKENIZER)
        parallel.collectives.require_equal(facts_of(description, TokenCorpus.open(self.corpus), tokenizer))
        trainer, description = self.open(device, parallel)
        require_rows(tokenizer, trainer.model.table.vocab_size, self.path)
        parallel.collectives.require_equal({"step of the checkpoint": trainer.step})
        if parallel.is_first:
            self._keep_metrics_up_to(trainer.step if self.checkpoint.exists() else -1)
            clear_away_partials(self.checkpoint)  # of a process killed in a save
        return trainer, tokenizer, description["notes"]

    def open(
        self, device: torch.device | str = "cpu", parallel: ParallelContext | None = None
    ) -> tuple[Trainer, JsonObject]:
        """The run as its last checkpoint has it, and what `start` wrote; nothing in the folder changes.

        Args:
            device: Where to train.
            parallel: The processes that open it together.

        Raises:
            FileError: There is no run here, or a file of it cannot be read.
            CheckpointError: A file is damaged.
        """
        parallel = ParallelContext() if parallel is None else parallel
        description, options = self.read(), self.options()
        model = self._seeded(description, parallel, device)
        parts = TokenCorpus.open(self.corpus).split(description["validation_fraction"])
        trainer = Trainer(model, *parts, options, parallel)
        if self.checkpoint.exists():
            tensors, metadata = parallel.load(self.checkpoint)
            state = parse_json(metadata.get("state", "{}"), f"The state in {self.checkpoint}")
            check_fields(state, TrainerState, f"The state in {self.checkpoint}")
            if options.steps is not None and (state["steps"] != options.steps or state["step"] > options.steps):
                raise CheckpointError(
                    f"{self.checkpoint} is at step {state['step']} of {state['steps']}, and {self.run} states "
                    f"{options.steps} steps: they do not belong together, or one is damaged."
                )
            try:
                trainer.load_state(tensors, state)
            except CANNOT_BE_BUILT as error:
                if isinstance(error, CheckpointError):
                    raise
                raise CheckpointError(f"{self.checkpoint} does not fit this run: {short(error)}") from error
        return trainer, description

    def beginning(self) -> DecoderLM:
        """The model as the run's seed made it, before training.

        Raises:
            FileError: There is no run here.
            CheckpointError: It is damaged, or describes another kind of model.
        """
        with torch.random.fork_rng(devices=[]):
            return self._seeded(self.read(), ParallelContext(), "cpu")

    def _seeded(self, description: JsonObject, parallel: ParallelContext, device: torch.device | str) -> DecoderLM:
        kind = description["model"].get("kind")
        if kind != DecoderLM.__name__:
            raise CheckpointError(f"{self.run} describes a {kind}, not a {DecoderLM.__name__}.")
        torch.manual_seed(self.options().seed)
        self._check_size(description)
        return parallel.build(description["model"], device)

    def _check_size(self, description: JsonObject) -> None:
        """Refuse a model that this machine cannot hold, before anything is allocated."""
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            needed = sum(tensor.nbytes for tensor in build(description["model"]).parameters())
        held = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else needed
        if needed > held:
            raise CheckpointError(
                f"{self.run} describes a model of {needed / 2**30:,.1f} GiB, and this machine has {held / 2**30:,.1f}: "
                f"it is damaged, or was made on a larger machine."
            )

    def save_checkpoint(self, trainer: Trainer) -> None:
        """Write the run's state; the last checkpoint stays until the new one is whole. All ranks must call it."""
        tensors, rest = trainer.state()
        trainer.parallel.save(self.checkpoint, tensors, {"state": json.dumps(rest)})

    def best(self) -> JsonObject | None:
        """Return the step of the weights that `keep_best` wrote, and what was validated at it; `None` if it wrote none.

        Raises:
            CheckpointError: The file that says so is damaged.
        """
        whole = self.best_facts.exists() and (self.path / WEIGHTS).exists()
        return read_fields(self.best_facts, BestFacts) if whole else None

    def keep_best(self, trainer: Trainer, line: JsonObject) -> bool:
        """Write the model as the result so far if the line's validation loss is the lowest yet; say whether it is.

        Until `finish` the folder holds no `config.json`, so nobody takes these weights for a finished result. All ranks
        must call it.
        """
        loss, best = line["validation_loss"], self.best() if trainer.parallel.is_first else None
        is_better = math.isfinite(loss) and (best is None or loss < best["validation_loss"])
        is_better = trainer.parallel.collectives.any(trainer.parallel.is_first and is_better)
        if is_better:
            facts = {name: value for name, value in line.items() if name == "step" or name.startswith("validation")}
            if (
                trainer.parallel.is_first
            ):  # a kill between the two files leaves no facts, rather than those of other weights
                self.best_facts.unlink(missing_ok=True)
            trainer.parallel.save(self.path / WEIGHTS, trainer.model.state_dict())
            if trainer.parallel.is_first:
                write_json(self.best_facts, facts)
        return is_better

    def finish(self, trainer: Trainer, tokenizer: Tokenizer) -> None:
        """Write the result: the weights that `keep_best` wrote, or the model as it is now if it wrote none.

        The tokenizer goes with it. All ranks must call it.
        """
        if not trainer.parallel.collectives.any(trainer.parallel.is_first and self.best() is not None):
            trainer.parallel.save(self.path / WEIGHTS, trainer.model.state_dict())
        if trainer.parallel.is_first:
            save_tokenizer(tokenizer, self.path / TOKENIZER)
            write_config(self.path, trainer.parallel.describe(trainer.model))
            self.lock.release()

    def add_metrics(self, line: JsonObject) -> None:
        """Append one line to the metrics."""
        try:
            with self.metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise FileError(f"Cannot write {self.metrics}: {error.strerror or error}.") from error

    def read_metrics(self) -> list[dict[str, Any]]:
        """All lines of the metrics; a last one that a killed process left unfinished is passed over.

        Raises:
            FileError: The file cannot be read.
            CheckpointError: A line is damaged.
        """
        try:
            content = self.metrics.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise FileError(f"Cannot read {self.metrics}: {error.strerror or error}.") from error
        lines = []
        for number, raw in enumerate(content.split(b"\n")[:-1], start=1):
            source = f"{self.metrics}, line {number},"
            lines.append(parse_json(raw, source))
            check_fields(lines[-1], MetricsLine, source)
        return lines

    def _keep_metrics_up_to(self, step: int) -> None:
        lines: Sequence[dict[str, Any]] = [line for line in self.read_metrics() if line["step"] <= step]
        write_text(self.metrics, "".join(json.dumps(line) + "\n" for line in lines))


def facts_of(description: JsonObject, corpus: TokenCorpus, tokenizer: Tokenizer) -> JsonObject:
    """What must be the same for all that train one run, by name; of a long text, some pieces."""
    first_ids = np.linspace(0, max(0, len(corpus) - IDS_IN_A_PIECE), PIECES_OF_A_TEXT).astype(np.int64)
    some = b"".join(np.asarray(corpus.ids[first : first + IDS_IN_A_PIECE]).tobytes() for first in np.unique(first_ids))
    return {
        "vocabulary": table_size(tokenizer),
        "tokenizer": digest(tokenizer.to_str().encode()),
        "tokens of text": len(corpus),
        "text": digest(some),
        **{f"configuration of {name}": value for name, value in description.items() if name != "notes"},
        "torch": torch.__version__,
    }


def digest(content: bytes) -> str:
    """A few letters that other content has otherwise."""
    return hashlib.sha256(content).hexdigest()[:12]


def load_run(path: Path | str, *, device: torch.device | str = "cpu") -> Run:
    """Read the result of a run: its model, with the trained table, and its tokenizer.

    Raises:
        FileError: The folder or a file in it is missing.
        CheckpointError: A file is damaged or does not fit.
        TokenizerError: The tokenizer has more entries than the table.
    """
    path = restored(path)
    if not path.exists():
        raise FileError(f"{path} does not exist.")
    if RunDirectory(path).holds_a_run and not (path / CONFIG).exists():
        raise FileError(
            f"{path} holds no trained layer yet, because its run is not finished: continue it with "
            f"embedlayer train --resume -o {path}"
        )
    if not (path / CONFIG).exists():
        raise FileError(f"{path} holds no trained layer: it is not a folder that embedlayer train wrote.")
    model = DecoderLM.read_pretrained(path, device=device).eval()
    tokenizer = load_tokenizer(path / TOKENIZER)
    require_rows(tokenizer, model.table.vocab_size, path)
    return Run(model, tokenizer)
