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
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer

from embedlayer.distributed.ranks import Alone, Ranks
from embedlayer.errors import CheckpointError, FileError, TokenizerError
from embedlayer.files import (
    JsonObject,
    clear_away_partials,
    read_json,
    writable_folder,
    write_json,
    write_text,
)
from embedlayer.models.decoder import DecoderLM
from embedlayer.pretrained import CONFIG, TOKENIZER, WEIGHTS, write_config
from embedlayer.short_repr import short_repr
from embedlayer.text.corpus import TokenCorpus
from embedlayer.text.tokenizer import load_tokenizer, save_tokenizer, table_size
from embedlayer.training.loop import Trainer, TrainingOptions

FORMAT_VERSION = 1
PIECES_OF_A_TEXT, IDS_IN_A_PIECE = 256, 4096


class Run(NamedTuple):
    """A trained layer with its tokenizer, as `load_run` reads it."""

    model: DecoderLM
    tokenizer: Tokenizer

    def __repr__(self) -> str:
        return short_repr(self)


class RunDirectory:
    """A run's folder, by the names of its files."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.corpus = self.path / "corpus"
        self.checkpoint = self.path / "checkpoint.safetensors"
        self.best_facts = self.path / "best.json"
        self.metrics = self.path / "metrics.jsonl"
        self.report = self.path / "report.html"
        self.run = self.path / "run.json"

    @property
    def holds_a_run(self) -> bool:
        """Whether a run was started here."""
        return self.run.exists()

    def files(self) -> list[str]:
        """Names of what stands in the folder, folders with a slash behind."""
        return sorted(file.name + "/" * file.is_dir() for file in self.path.iterdir())

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
            FileError: The folder cannot be written.
        """
        writable_folder(self.path)
        result = (self.path / CONFIG, self.path / WEIGHTS)
        for file in (self.run, self.best_facts, *result, self.checkpoint, self.metrics, self.report):
            file.unlink(missing_ok=True)
        save_tokenizer(tokenizer, self.path / TOKENIZER)
        description: JsonObject = {
            "format_version": FORMAT_VERSION,
            "options": asdict(trainer.options),
            "model": trainer.ranks.describe(trainer.model),
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
                f"{self.run} has format version {description.get('format_version')!r}; "
                f"this embedlayer reads version {FORMAT_VERSION}."
            )
        return description

    def resume(
        self, device: torch.device | str = "cpu", ranks: Ranks | None = None
    ) -> tuple[Trainer, Tokenizer, JsonObject]:
        """Build the run again and continue at its last checkpoint, or at step 0 if it has none.

        Args:
            device: Where to train.
            ranks: The processes that go on with it together; as many as one likes, whatever their number was. All must
                see this folder.

        Returns:
            The trainer, the tokenizer, and the notes given to `start`.

        Raises:
            FileError: There is no run here, or a file of it cannot be read.
            CheckpointError: A file is damaged.
            PeerError: A rank sees another run, tokenizer or text than rank 0.
        """
        ranks = Alone() if ranks is None else ranks
        description, tokenizer = self.read(), load_tokenizer(self.path / TOKENIZER)
        ranks.agree(facts_of(description, TokenCorpus.open(self.corpus), tokenizer))
        trainer, description = self.open(device, ranks)
        ranks.agree({"step of the checkpoint": trainer.step})
        if ranks.first:
            self._keep_metrics_up_to(trainer.step if self.checkpoint.exists() else -1)
            clear_away_partials(self.checkpoint)  # of a process killed in a save
        return trainer, tokenizer, description["notes"]

    def open(self, device: torch.device | str = "cpu", ranks: Ranks | None = None) -> tuple[Trainer, JsonObject]:
        """The run as its last checkpoint has it, and what `start` wrote; nothing in the folder changes.

        Args:
            device: Where to train.
            ranks: The processes that open it together.

        Raises:
            FileError: There is no run here, or a file of it cannot be read.
            CheckpointError: A file is damaged.
        """
        ranks = Alone() if ranks is None else ranks
        description = self.read()
        options = TrainingOptions(**description["options"])
        model = self._seeded(description, ranks, device)
        parts = TokenCorpus.open(self.corpus).split(description["validation_fraction"])
        trainer = Trainer(model, *parts, options, ranks)
        if self.checkpoint.exists():
            tensors, metadata = ranks.load(self.checkpoint)
            trainer.load_state(tensors, json.loads(metadata.get("state", "{}")))
        return trainer, description

    def beginning(self) -> DecoderLM:
        """The model as the run's seed made it, before training.

        Raises:
            FileError: There is no run here.
            CheckpointError: It is damaged, or describes another kind of model.
        """
        with torch.random.fork_rng(devices=[]):
            return self._seeded(self.read(), Alone(), "cpu")

    def _seeded(self, description: JsonObject, ranks: Ranks, device: torch.device | str) -> DecoderLM:
        kind = description["model"].get("kind")
        if kind != DecoderLM.__name__:
            raise CheckpointError(f"{self.run} describes a {kind}, not a {DecoderLM.__name__}.")
        torch.manual_seed(description["options"]["seed"])
        return ranks.build(description["model"], device)

    def save_checkpoint(self, trainer: Trainer) -> None:
        """Write the run's state; the last checkpoint stays until the new one is whole. All ranks must call it."""
        tensors, rest = trainer.state()
        trainer.ranks.save(self.checkpoint, tensors, {"state": json.dumps(rest)})

    def best(self) -> JsonObject | None:
        """Return the step of the weights that `keep_best` wrote, and what was validated at it; `None` if it wrote none.

        Raises:
            CheckpointError: The file that says so is damaged.
        """
        whole = self.best_facts.exists() and (self.path / WEIGHTS).exists()
        return read_json(self.best_facts) if whole else None

    def keep_best(self, trainer: Trainer, line: JsonObject) -> bool:
        """Write the model as the result so far if the line's validation loss is the lowest yet; say whether it is.

        Until `finish` the folder holds no `config.json`, so nobody takes these weights for a finished result. All ranks
        must call it.
        """
        loss, best = line["validation_loss"], self.best() if trainer.ranks.first else None
        is_better = math.isfinite(loss) and (best is None or loss < best["validation_loss"])
        is_better = trainer.ranks.any(trainer.ranks.first and is_better)
        if is_better:
            facts = {name: value for name, value in line.items() if name == "step" or name.startswith("validation")}
            if trainer.ranks.first:  # a kill between the two files leaves no facts, rather than those of other weights
                self.best_facts.unlink(missing_ok=True)
            trainer.ranks.save(self.path / WEIGHTS, trainer.model.state_dict())
            if trainer.ranks.first:
                write_json(self.best_facts, facts)
        return is_better

    def finish(self, trainer: Trainer, tokenizer: Tokenizer) -> None:
        """Write the result: the weights that `keep_best` wrote, or the model as it is now if it wrote none.

        The tokenizer goes with it. All ranks must call it.
        """
        if not trainer.ranks.any(trainer.ranks.first and self.best() is not None):
            trainer.ranks.save(self.path / WEIGHTS, trainer.model.state_dict())
        if trainer.ranks.first:
            save_tokenizer(tokenizer, self.path / TOKENIZER)
            write_config(self.path, trainer.ranks.describe(trainer.model))

    def add_metrics(self, line: JsonObject) -> None:
        """Append one line to the metrics."""
        try:
            with self.metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise FileError(f"Cannot write {self.metrics}: {error.strerror or error}.") from error

    def read_metrics(self) -> list[dict[str, Any]]:
        """All lines of the metrics; a line that a killed process left unfinished is passed over."""
        if not self.metrics.exists():
            return []
        lines = self.metrics.read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

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
    path = Path(path)
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
    if table_size(tokenizer) > model.table.vocab_size:
        raise TokenizerError(
            f"The tokenizer in {path} gives IDs up to {table_size(tokenizer) - 1}, the table has "
            f"{model.table.vocab_size} rows: they do not belong together."
        )
    return Run(model, tokenizer)
