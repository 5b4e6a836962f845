"""What the page looks at: a run, a checkpoint, or a table in a file, opened as one kind of thing."""

import threading
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from tokenizers import Tokenizer
from torch import Tensor

from embedlayer.checkpoints.layer import EmbeddingLayer
from embedlayer.checkpoints.tables import open_table
from embedlayer.errors import SizeError
from embedlayer.files import JsonObject
from embedlayer.layers.input import TransformerEmbedding
from embedlayer.models.decoder import DecoderLM
from embedlayer.positions.position import Position
from embedlayer.tables.table import TokenTable
from embedlayer.text.tokenizer import require_rows, token_text
from embedlayer.training.run_directory import RunDirectory

Layer = DecoderLM | EmbeddingLayer | TransformerEmbedding
Answer = TypeVar("Answer")


class Source:
    """A table with what belongs to it, and answers about it that are computed once.

    Args:
        title: What the page calls it.
        table: Its rows.
        tokens: Readable text of each row; `""` for a row without a token. By default what the tokenizer says.
        tokenizer: Text to IDs, or `None`.
        model: The layer or decoder that the table is a part of, or `None`.
        run: The folder of the run that trained it, or `None`.
        path: Where it was read from.

    Raises:
        TokenizerError: The tokenizer has IDs outside the table.
        SizeError: As many tokens as rows are needed.
    """

    def __init__(
        self,
        title: str,
        table: TokenTable,
        *,
        tokens: list[str] | None = None,
        tokenizer: Tokenizer | None = None,
        model: Layer | None = None,
        run: RunDirectory | None = None,
        path: Path | None = None,
    ) -> None:
        if tokenizer is not None:
            require_rows(tokenizer, table.vocab_size, title)
        if tokens is not None and len(tokens) != table.vocab_size:
            raise SizeError(f"{title} has {table.vocab_size} rows and {len(tokens)} tokens; both must be as many.")
        self.title = title
        self.table = table
        self.tokenizer = tokenizer
        self.model = model
        self.run = run
        self.path = path
        self._tokens = tokens
        self._answers: dict[str, Any] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    @property
    def position(self) -> Position | None:
        """The position scheme, or `None` if nothing is known of it."""
        return None if self.model is None else self.model.position

    @property
    def head(self) -> Any:
        """The way out, or `None`."""
        return getattr(self.model, "head", None)

    @cached_property
    def tokens(self) -> list[str]:
        """Readable text of each row; a row without a token has `""`."""
        if self._tokens is not None:
            return self._tokens
        if self.tokenizer is None:
            return [f"#{row}" for row in range(self.table.vocab_size)]
        known = set(self.tokenizer.get_vocab(with_added_tokens=True).values())
        return [token_text(self.tokenizer, row) if row in known else "" for row in range(self.table.vocab_size)]

    @cached_property
    def special(self) -> list[int]:
        """IDs of the special tokens."""
        if self.tokenizer is None:
            return []
        added = self.tokenizer.get_added_tokens_decoder()
        return sorted(token for token, content in added.items() if content.special)

    @cached_property
    def rows(self) -> Float[Tensor, "V D"]:
        """The rows as stored; a view where the table holds them as they are."""
        with torch.no_grad():
            return self.table.rows(0, self.table.vocab_size).detach()

    def before(self) -> "Source | None":
        """The same table before training, if it is a run's: built again from its seed, as resuming builds it."""
        if self.run is None or not self.run.contains_run:
            return None
        return self.once("before", self._before)

    def _before(self) -> "Source":
        assert self.run is not None
        return Source(
            f"{self.title}, before training",
            self.run.initial_model().table,
            tokens=self.tokens,
            tokenizer=self.tokenizer,
        )

    def once(self, key: str, compute: Callable[[], Answer]) -> Answer:
        """What `compute` gives, computed at most once for `key`, whichever requests come at the same time."""
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._answers:
                self._answers[key] = compute()
            answer: Answer = self._answers[key]
            return answer

    def manifest(self) -> JsonObject:
        """What the page must know before it opens a room."""
        position = self.position
        there = {
            "vectors": True,
            "tokens": self._tokens is not None or self.tokenizer is not None,
            "tokenizer": self.tokenizer is not None,
            "position": position is not None and type(position) is not Position,
            "head": self.head is not None,
            "metrics": self.run is not None and self.run.metrics.exists(),
            "before": self.run is not None and self.run.contains_run,
            "frequency": self.run is not None and self.run.corpus.exists(),
        }
        return {
            "title": self.title,
            "path": str(self.path or ""),
            "vocabSize": self.table.vocab_size,
            "embedDim": self.table.embed_dim,
            "has": [name for name, has in there.items() if has],
            "position": None if position is None else {"kind": type(position).__name__, **_plain(position.config)},
            "scale": None if self.table.factor is None else float(self.table.factor),
            "tied": bool(self.head is not None and self.head.tied),
            "kind": type(self.table).__name__,
        }


def open_source(path: Path | str, tokenizer: Path | None = None) -> Source:
    """Open what stands at `path`: see `open_table`.

    Args:
        path: Folder, file, or name on the hub.
        tokenizer: File or folder of the tokenizer, where it is not beside the table.

    Raises:
        FileError: There is nothing of that name, or it cannot be read.
        CheckpointError: It is damaged, or nothing that is known.
        TokenizerError: Tokenizer and table do not belong together.
    """
    opened = open_table(path, tokenizer)
    place = opened.source if isinstance(opened.source, Path) else None
    return Source(
        str(opened.source) if place is None else _title(place),
        opened.table,
        tokens=opened.tokens,
        tokenizer=opened.tokenizer,
        model=opened.layer if isinstance(opened.layer, Layer) else None,
        run=opened.run,
        path=place,
    )


def source_of_run(directory: RunDirectory, model: DecoderLM, tokenizer: Tokenizer) -> Source:
    """A run whose result was read already."""
    title = _title(directory.path)
    return Source(title, model.table, tokenizer=tokenizer, model=model, run=directory, path=directory.path)


def _title(path: Path) -> str:
    place = path.resolve()
    return f"{place.parent.name}/{place.name}" if place.name in {"model", "checkpoint", "run"} else place.name


def _plain(config: JsonObject) -> JsonObject:
    return {key: value for key, value in config.items() if isinstance(value, str | int | float | bool | None | list)}
