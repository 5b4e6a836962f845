"""The record of an opened source: a token table, with the model, tokenizer and run that belong to it."""

import threading
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from embedlayer.core.errors import CheckpointError, SizeError, TextError, TokenizerError, UnknownTokenError
from embedlayer.core.forks import call_in_forked_processes
from embedlayer.core.formatting import short_repr
from embedlayer.io.files import read_json, recover_folder
from embedlayer.opening.path_kinds import CONFIG, GENERATION, PathKind, folder_of, path_kind

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor, nn

    from embedlayer.checkpoints.layer import EmbeddingLayer
    from embedlayer.inputs.embedding import TransformerEmbedding
    from embedlayer.models.decoder import DecoderLM
    from embedlayer.positions.position import Position
    from embedlayer.tables.table import TokenTable
    from embedlayer.training.run_directory import RunDirectory

TABLE_ONLY = "Only the table of {} can be read. {}"
"""What is said of a source of which only the table was read, with the reason."""

Answer = TypeVar("Answer")
Value = TypeVar("Value")


class _OnFirstUse(Generic[Value]):
    """Field of `OpenedModel` that is set to a value, or to a function that computes it when the field is first read.

    The function is one of Python code, such as a lambda; another object that can be called counts as a value.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.attribute = f"_{name}"

    def __get__(self, opened: "OpenedModel | None", owner: type | None = None) -> Value | None:
        if opened is None:  # the default of the field
            return None
        value: Value | Callable[[], Value | None] | None = getattr(opened, self.attribute)
        if isinstance(value, FunctionType):
            value = value()
            setattr(opened, self.attribute, value)
        return cast("Value | None", value)

    def __set__(self, opened: "OpenedModel", value: "Value | Callable[[], Value | None] | None") -> None:
        setattr(opened, self.attribute, value)


@dataclass(eq=False)
class OpenedModel:
    """A token table, with the model, tokenizer and run that were found with it.

    Attributes:
        title: Short name for titles and messages, such as the name of the folder.
        table: The token table, `(V, D)`.
        source: The path or hub name that was opened; `""` for a record built in memory.
        kind: What was opened, as a phrase for messages: `"trained run"`, `"checkpoint of family gpt2"`, `"file of
            vectors"`.
        model: The decoder, embedding layer or input embedding that contains the table; `None` for a table alone.
        tokenizer: The tokenizer of the table; for a file of vectors, one of whole words, with a token for each row
            (`word_tokenizer`). `None` if the rows have no names. It may be set as a function, which is called once, at
            the first use; so may `run`.
        tokens: The token of each row, if a file of vectors names the rows and no tokenizer was passed; else `None`.
        run: The folder of a saved decoder, such as that of a run of `embedlayer train`; else `None`.
        table_only: Why only the table of a model was read, such as an unknown model family; `""` if it was not, or if
            the source is only a table.
        no_decoder: One sentence that says why `model` is no whole decoder; `""` if there is nothing to say.
        no_tokenizer: Why no tokenizer could be read from the folder of a checkpoint, known once `tokenizer` was used;
            `""` if there was no such failure.
    """

    __repr__ = short_repr

    title: str
    table: "TokenTable"
    _: KW_ONLY
    source: Path | str = ""
    kind: str = "table"
    model: "DecoderLM | EmbeddingLayer | TransformerEmbedding | None" = None
    tokenizer: "_OnFirstUse[Tokenizer]" = _OnFirstUse()
    tokens: list[str] | None = None
    run: "_OnFirstUse[RunDirectory]" = _OnFirstUse()
    table_only: str = field(default="", repr=False)
    no_decoder: str = field(default="", repr=False)
    no_tokenizer: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        rows = self.table.vocab_size
        if self.tokens is not None and len(self.tokens) != rows:
            raise SizeError(f"{self.title} has {rows} rows and {len(self.tokens)} tokens; the numbers must be equal.")
        if self.tokens is not None and self.tokenizer is None:
            from embedlayer.tokenization.vocabulary_files import word_tokenizer

            self.tokenizer = lambda tokens=self.tokens: word_tokenizer(tokens)
        self._answers: dict[str, Any] = {}
        self._renew_locks()
        call_in_forked_processes(self._renew_locks)

    def _renew_locks(self) -> None:
        """Replace the locks by new ones: in a forked process, one that another thread held would stay locked."""
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def once(self, key: str, compute: Callable[[], Answer]) -> Answer:
        """Return the result of `compute()`, which is called only the first time for each `key`.

        Later calls return the stored result; an error is not stored, so the next call computes again. Concurrent
        threads that ask for the same key wait for the first one, and `compute` must not ask for it.

        Args:
            key: Name of the result.
            compute: Function without arguments.
        """
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._answers:
                self._answers[key] = compute()
            answer: Answer = self._answers[key]
            return answer

    @property
    def dtype(self) -> str:
        """Return the data type of the rows, such as `"float32"`."""
        return str(self.table.rows(0, 1).dtype).removeprefix("torch.")

    @property
    def stored_type(self) -> str:
        """Return the type in which the table stores its rows, such as `"Q4_K"`; `dtype` unless the rows are packed."""
        from embedlayer.tables.delta import DeltaEmbedding
        from embedlayer.tables.packed_rows import PackedRows

        base = self.table.base if isinstance(self.table, DeltaEmbedding) else self.table
        return base.stored_type if isinstance(base, PackedRows) else self.dtype

    @property
    def position(self) -> "Position | None":
        """Return the position scheme of the model, or `None` if there is no model."""
        return None if self.model is None else self.model.position

    @property
    def head(self) -> Any:
        """Return the LM head of the model, or `None` if there is no model or no head."""
        return getattr(self.model, "head", None)

    @cached_property
    def untied_head(self) -> "Tensor | TokenTable | None":
        """Return the rows of an untied head, `(V, D)`: the first V, one for each row of the table.

        They are a table if the head stores them in one (`OutputHead.own_rows`). The result is `None` if there is no
        head, the head is tied, or the head has another number of rows than V in a table, or fewer in a weight.
        """
        head = self.head
        if head is None or head.tied:
            return None
        own: TokenTable | None = getattr(head, "output", head).own_rows
        if own is not None:
            return own if own.vocab_size == self.table.vocab_size else None
        if len(head.weight) < self.table.vocab_size:
            return None
        rows: Tensor = head.weight.detach()[: self.table.vocab_size]
        return rows

    @cached_property
    def rows(self) -> "Tensor":
        """Return all rows of the table as stored, `(V, D)`, without the scale.

        The result is a view of the weight if the table stores its rows densely, else a new tensor.
        """
        import torch

        with torch.no_grad():
            return self.table.rows(0, self.table.vocab_size).detach()

    @cached_property
    def counts(self) -> "Tensor | None":
        """Return how often each token occurs in the training text of a run, `(V,)`.

        The result is `None` if there is no run or its corpus was deleted.

        Raises:
            CheckpointError: A file of the corpus is damaged.
            FileError: The run or its corpus cannot be read.
        """
        if self.run is None or not recover_folder(self.run.corpus).exists():
            return None
        import torch

        return torch.from_numpy(self.run.open_corpus().counts(self.table.vocab_size))

    @cached_property
    def validation_loss(self) -> float | None:
        """Return the loss of a run's weights on held-out text, in nats per token; `None` if it is not known.

        Raises:
            CheckpointError: A file of the run is damaged.
            FileError: The metrics cannot be read.
        """
        line = None if self.run is None else self.run.validation()
        return None if line is None else float(line["validation_loss"])

    def before(self) -> "OpenedModel | None":
        """Return a record of the table as it was before training, which is built again from the run's seed.

        The record has the same tokenizer and no model; it is computed once. The result is `None` if the table does not
        come from a training run.

        Raises:
            FileError: A file of the run cannot be read.
            CheckpointError: A file of the run is damaged.
        """
        run = self.run
        if run is None or not run.contains_run:
            return None
        title, tokenizer = f"{self.title}, before training", self.tokenizer
        return self.once("before", lambda: OpenedModel(title, run.initial_model().table, tokenizer=tokenizer))

    # Text

    @cached_property
    def token_texts(self) -> list[str]:
        """Return a readable text for each row, as a list of V strings.

        A row that has no token has the text `""`. If there is neither a tokenizer nor `tokens`, row 7 has the text
        `"#7"`.
        """
        if self.tokens is not None:
            return self.tokens
        tokenizer, rows = self.tokenizer, range(self.table.vocab_size)
        if tokenizer is None:
            return [f"#{row}" for row in rows]
        from embedlayer.tokenization.bytes import row_texts

        return row_texts(tokenizer, len(rows))

    @property
    def special_ids(self) -> list[int]:
        """Return the sorted IDs of the tokenizer's special tokens; an empty list without a tokenizer."""
        added = {} if self.tokenizer is None else self.tokenizer.get_added_tokens_decoder()
        return sorted(token for token, content in added.items() if content.special)

    @property
    def text_tokenizer(self) -> "Tokenizer | None":
        """Return the tokenizer; `None` if there is none, or if it only names the rows of a file of vectors."""
        return None if self.tokens is not None else self.tokenizer

    def require_tokenizer(self) -> "Tokenizer":
        """Return the tokenizer; for a file of vectors, the one that names its rows.

        Raises:
            TokenizerError: There is no tokenizer, or it has IDs outside the table.
        """
        from embedlayer.tokenization.ids import require_rows

        if self.tokenizer is None:
            reason = self.no_tokenizer or f"{self.source or self.title} has no tokenizer."
            raise TokenizerError(f"{reason} Name one with --tokenizer.")
        if self.tokens is None:  # else the tokens are as many as the rows
            require_rows(self.tokenizer, self.table.vocab_size, self.source or self.title)
        return self.tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the token IDs of `text`, with the special tokens that the model expects; nothing is truncated.

        Raises:
            TokenizerError: There is no tokenizer, or it has IDs outside the table.
            UnknownTokenError: The tokens come from a file of vectors, and a word of the text has no row.
        """
        from embedlayer.tokenization.tokenizer_calls import encode
        from embedlayer.tokenization.vocabulary_files import unknown_word

        tokenizer = self.require_tokenizer()
        if self.tokens is not None:
            unknown = unknown_word(tokenizer, text)
            if unknown is not None:
                raise UnknownTokenError(f"{unknown!r} is not among the {len(self.tokens):,} tokens of {self.source}.")
        ids: list[int] = encode(tokenizer, text, add_special_tokens=self.adds_special_tokens).ids
        return ids

    def tokens_by_row(self) -> "OpenedModel":
        """Return this record, or without a tokenizer and tokens one in which the token of row 7 is `"#7"`."""
        return self if self.tokenizer is not None else replace(self, tokens=self.token_texts)

    @property
    def adds_special_tokens(self) -> bool:
        """Return whether `encode` adds the tokenizer's special tokens to a text.

        They are added for checkpoints and saved layers, also if only the table was read; for a saved decoder if its
        folder has `generation_config.json`; and not for a file of vectors or a saved table.
        """
        is_model = self.model is not None or self.table_only != ""
        return is_model and (self.run is None or (self.run.path / GENERATION).exists())

    @cached_property
    def text_limits(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return two tuples: the token IDs that start a text, and the token IDs that end a text; each may be empty.

        The IDs come from `config.json` and `generation_config.json` in the folder of a checkpoint, or from the metadata
        of a GGUF file. If these do not state them, they are found by the names of the tokenizer's tokens, such as
        `<s>`. Where `adds_special_tokens` is false, both tuples have the tokenizer's end-of-text token, if it has one.

        Raises:
            TokenizerError: There is no tokenizer, or it has IDs outside the table.
            FileError: A configuration file cannot be read.
            CheckpointError: A configuration file is damaged.
        """
        from embedlayer.tokenization.ids import end_of_text_id

        tokenizer = self.require_tokenizer()
        end = end_of_text_id(tokenizer)
        if not self.adds_special_tokens:
            ends = () if end is None else (end,)
            return ends, ends
        config: dict[str, Any] = {}
        if path_kind(Path(self.source)) is PathKind.GGUF:
            from embedlayer.checkpoints.reader import Checkpoint

            config |= Checkpoint.open(Path(self.source)).config
        for name in (CONFIG, GENERATION) if not config else ():
            file = folder_of(Path(self.source)) / name
            if file.exists():
                config |= {key: value for key, value in read_json(file).items() if value is not None}

        def ids(key: str, named: int | None) -> tuple[int, ...]:
            """Return the token IDs that the files state, as a tuple."""
            values = config.get(key, named)
            values = values if isinstance(values, list) else [values]
            return tuple(value for value in values if isinstance(value, int))

        return ids("bos_token_id", tokenizer.token_to_id("<s>")), ids("eos_token_id", end)

    def require_decoder(self) -> "DecoderLM":
        """Return `model`, which must be a whole decoder (`DecoderLM`) that can predict the next token.

        Raises:
            CheckpointError: The model is no whole decoder; the message says why.
        """
        from embedlayer.models.decoder import DecoderLM

        if isinstance(self.model, DecoderLM):
            return self.model
        raise CheckpointError(
            self.no_decoder or f"{self.source or self.title} is a {self.kind}, which has no transformer blocks."
        )

    def require_causal(self) -> "nn.Module":
        """Return a whole causal language model: a `DecoderLM`, or transformers' model of a checkpoint, patched.

        The result is `model` if that is a `DecoderLM`. Else transformers loads the folder of the checkpoint; this is
        done once.

        Raises:
            CheckpointError: There are no transformer blocks; transformers cannot load the folder, or would initialise
                tensors that it lacks; or the model is no causal one, such as a masked one.
            MissingExtraError: The checkpoint needs transformers, which is not installed.
        """
        from embedlayer.models.causal import load_causal_model
        from embedlayer.models.decoder import DecoderLM

        if isinstance(self.model, DecoderLM):
            return self.model
        path = Path(self.source)
        if not self.kind.startswith("checkpoint") or not path.is_dir():
            return self.require_decoder()
        device = self.table.rows(0, 1).device
        return self.once("causal", lambda: load_causal_model(path, device=device))

    def require_input(self) -> "DecoderLM | EmbeddingLayer | TransformerEmbedding | TokenTable":
        """Return the module that computes the input of the first block: `model`, or the table if that is all there is.

        Raises:
            CheckpointError: Only the table was read, so scale and positions are not known; `table_only` says why.
        """
        if self.table_only:
            raise CheckpointError(TABLE_ONLY.format(self.source, self.table_only))
        return self.table if self.model is None else self.model

    def prompt(self, text: str) -> list[int]:
        """Return the token IDs of `text` as a prompt that `generate` continues; the list is never empty.

        If the text has no tokens, the result is the first ID that starts a text, from `text_limits`.

        Raises:
            TextError: The text has no tokens, and the model has no token that starts a text.
            TokenizerError: There is no tokenizer, or it has IDs outside the table.
            UnknownTokenError: The tokens come from a file of vectors, and a word of the text has no row.
            FileError: As in `text_limits`.
            CheckpointError: As in `text_limits`.
        """
        ids = self.encode(text) or list(self.text_limits[0][:1])
        if not ids:
            raise TextError("This model has no token that starts a text: pass a text of at least one token.")
        return ids
