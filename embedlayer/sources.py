"""Open whatever the user names: a run, a checkpoint, a saved layer, a file of vectors, or a name on the hub.

`path_kind` tells what a path holds from file names and first bytes alone. `open_model` reads the path and returns one
record, `OpenedModel`. Every command, the explorer and the analysis use these two functions. Importing this module
imports no torch: the readers are imported inside the functions.
"""

import codecs
import json
import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from embedlayer.command_name import command_line
from embedlayer.errors import (
    CheckpointError,
    EmbedLayerWarning,
    FileError,
    SizeError,
    TextError,
    TokenizerError,
    UnknownTokenError,
)
from embedlayer.families import UNKNOWN
from embedlayer.forks import call_in_forked_processes
from embedlayer.io.files import read_bytes, read_json, recover_folder, require_file
from embedlayer.short_repr import short_repr

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor, nn

    from embedlayer.checkpoints.embedding_layer import EmbeddingLayer
    from embedlayer.layers.input import TransformerEmbedding
    from embedlayer.models.decoder import DecoderLM
    from embedlayer.positions.position import Position
    from embedlayer.tables.table import TokenTable
    from embedlayer.training.run_directory import RunDirectory

Answer = TypeVar("Answer")

CONFIG, TOKENIZER, GENERATION = "config.json", "tokenizer.json", "generation_config.json"
BLOCKS = "model"
"""Folder with the blocks of a model of transformers, in the folder of its compressed table."""

FIRST_BYTES = 4096
STRUCTURED_FILES = (".json", ".jsonl", ".safetensors")


class PathKind(StrEnum):
    """List the kinds of things that a path can contain; the value of each is a phrase for messages."""

    MISSING = "nothing"
    EMPTY_FOLDER = "an empty folder"
    EMPTY_FILE = "an empty file"
    RUN = "the folder of a run"
    SAVED = "the folder of a saved layer"
    CHECKPOINT = "the folder of a checkpoint"
    VECTORS = "a file of text or vectors"
    CORPUS = "a corpus of token IDs"
    CORPUS_ALONE = "a corpus of token IDs without its tokenizer"
    FOLDER = "a folder"
    TEXT = "a text file"
    DATA_FILE = "a JSON or safetensors file"
    GGUF = "a GGUF file"
    BINARY = "a binary file"


OWN_FOLDERS = (PathKind.RUN, PathKind.SAVED)
"""Folders that this library wrote."""


def path_kind(path: Path) -> PathKind:
    """Return what a path holds, judged by file names and first bytes; nothing is loaded.

    Raises:
        FileError: The path exists and cannot be read.

    Example:
        >>> path_kind(Path("nothere"))
        <PathKind.MISSING: 'nothing'>
    """
    try:
        path.stat()
        return _kind_of_folder(path) if path.is_dir() else _kind_of_file(path)
    except (FileNotFoundError, NotADirectoryError):
        return PathKind.MISSING
    except FileError:
        raise
    except (OSError, ValueError) as error:
        raise FileError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error


def _kind_of_folder(path: Path) -> PathKind:
    """Return the kind of a folder from the names of its files.

    Only a `config.json` is read, to see whether this library wrote it.
    """
    names = set(os.listdir(path))
    if not names:
        return PathKind.EMPTY_FOLDER
    if "corpus.json" in names:
        return PathKind.CORPUS
    if {"ids.bin", "index.json"} <= names:
        return PathKind.CORPUS if TOKENIZER in names else PathKind.CORPUS_ALONE
    if "run.json" in names:
        return PathKind.RUN
    if CONFIG in names:
        return PathKind.SAVED if _describes_layer(path / CONFIG) else PathKind.CHECKPOINT
    if "tensors.tsv" in names or {"vectors.tsv", "metadata.tsv"} <= names:
        return PathKind.VECTORS
    return PathKind.CHECKPOINT if any(name.endswith((".safetensors", ".gguf")) for name in names) else PathKind.FOLDER


def _describes_layer(config: Path) -> bool:
    """Return whether a `config.json` has the key `kind`, which only `save_pretrained` of this library writes.

    The result is `False` for a damaged file.
    """
    try:
        content = json.loads(read_bytes(config))
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and isinstance(content.get("kind"), str)


def _kind_of_file(path: Path) -> PathKind:
    """Return the kind of a file, judged by its suffix and its first `FIRST_BYTES` bytes."""
    require_file(path)
    with path.open("rb") as file:
        start = file.read(FIRST_BYTES)
    if not start:
        return PathKind.EMPTY_FILE
    if path.suffix == ".gguf" or start.startswith(b"GGUF"):
        return PathKind.GGUF
    if path.suffix in STRUCTURED_FILES:
        return PathKind.DATA_FILE
    from embedlayer.checkpoints.vector_files import SUFFIXES

    if Path(path.name.removesuffix(".gz")).suffix in SUFFIXES and not path.name.startswith("pytorch_model"):
        return PathKind.VECTORS
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)  # the last character may be cut off
    except UnicodeDecodeError:
        return PathKind.BINARY
    return PathKind.BINARY if b"\0" in start else PathKind.TEXT


class _TokenizerOrNames:
    """Field of `OpenedModel`: the tokenizer that was set, or else one whose vocabulary is `tokens`, built once."""

    def __get__(self, opened: "OpenedModel | None", owner: type | None = None) -> "Tokenizer | None":
        if opened is None:  # the default of the field
            return None
        if opened._tokenizer is None and opened.tokens is not None:
            from embedlayer.tokenization.words import word_tokenizer

            opened._tokenizer = word_tokenizer(opened.tokens)
        return opened._tokenizer

    def __set__(self, opened: "OpenedModel", tokenizer: "Tokenizer | None") -> None:
        opened._tokenizer = tokenizer


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
            (`word_tokenizer`). `None` if the rows have no names.
        tokens: The token of each row, if a file of vectors names the rows and no tokenizer was passed; else `None`.
        run: The folder of a run of `embedlayer train`, or `None`.
        table_only: Why only the table of a checkpoint was read, such as an unknown model family; `""` if `model` has
            all that the source has.
        no_decoder: One sentence that says why `model` is no whole decoder; `""` if there is nothing to say.
        no_tokenizer: Why no tokenizer could be read from the folder of a checkpoint; `""` if there was no such failure.

    Raises:
        SizeError: `tokens` and the table differ in length.
    """

    __repr__ = short_repr

    title: str
    table: "TokenTable"
    _: KW_ONLY
    source: Path | str = ""
    kind: str = "table"
    model: "DecoderLM | EmbeddingLayer | TransformerEmbedding | None" = None
    tokenizer: _TokenizerOrNames = _TokenizerOrNames()
    _tokenizer: "Tokenizer | None" = field(default=None, init=False, repr=False)
    tokens: list[str] | None = None
    run: "RunDirectory | None" = None
    table_only: str = field(default="", repr=False)
    no_decoder: str = field(default="", repr=False)
    no_tokenizer: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        rows = self.table.vocab_size
        if self.tokens is not None and len(self.tokens) != rows:
            raise SizeError(f"{self.title} has {rows} rows and {len(self.tokens)} tokens; the numbers must be equal.")
        self._answers: dict[str, Any] = {}
        self._renew_locks()
        call_in_forked_processes(self._renew_locks)

    def _renew_locks(self) -> None:
        """Begin without locked locks, as in a forked process."""
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def once(self, key: str, compute: Callable[[], Answer]) -> Answer:
        """Return the result of `compute()`, which is called only the first time for each `key`.

        Later calls return the stored result. Concurrent threads that ask for the same key wait for the first one.

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
        """Return the type in which the table stores its rows, such as `"Q4_K"` or `"int8"`; `dtype` if that is it."""
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
    def untied_head(self) -> "Tensor | None":
        """Return the rows of an untied head, `(V, D)`: the first V, one for each row of the table.

        The result is `None` if there is no head, the head is tied, or the head has fewer than V rows.
        """
        head = self.head
        if head is None or head.tied or len(head.weight) < self.table.vocab_size:
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
        """
        line = None if self.run is None else self.run.validation()
        return None if line is None else float(line["validation_loss"])

    def before(self) -> "OpenedModel | None":
        """Return a record of the table as it was before training, which is built again from the run's seed.

        The record has the same tokenizer and no model; it is computed once. The result is `None` if the table does not
        come from a training run.
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
        """Return the tokenizer; `None` if it only names the rows of a file of vectors."""
        return None if self.tokens is not None else self.tokenizer

    def require_tokenizer(self) -> "Tokenizer":
        """Return the tokenizer, which names the rows of a file of vectors.

        Raises:
            TokenizerError: There is no tokenizer, or it has IDs outside the table.
        """
        from embedlayer.tokenization.ids import require_rows

        if self.tokenizer is None:
            found = self.no_tokenizer or f"{self.source or self.title} has no tokenizer."
            raise TokenizerError(f"{found} Name one with --tokenizer.")
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
        from embedlayer.tokenization.words import unknown_word

        tokenizer = self.require_tokenizer()
        if self.tokens is not None:
            unknown = unknown_word(tokenizer, text)
            if unknown is not None:
                raise UnknownTokenError(f"{unknown!r} is not among the {len(self.tokens):,} tokens of {self.source}.")
        ids: list[int] = encode(tokenizer, text, add_special_tokens=self.adds_special_tokens).ids
        return ids

    @property
    def has_tokenizer_file(self) -> bool:
        """Return whether the folder of the source has a file of a tokenizer, which may be one that is not read."""
        from embedlayer.tokenization.read import tokenizer_file

        path = Path(self.source)
        kind = path_kind(path)
        if kind in (PathKind.GGUF, PathKind.MISSING):
            return kind is PathKind.MISSING  # `no_tokenizer` of a model on the hub is that of a file
        try:
            return tokenizer_file(_folder(path)) is not None
        except TokenizerError:
            return True  # several

    def tokens_by_row(self) -> "OpenedModel":
        """Return this record, or without a tokenizer and tokens one in which the token of row 7 is `"#7"`."""
        return self if self.tokenizer is not None else replace(self, tokens=self.token_texts)

    @property
    def adds_special_tokens(self) -> bool:
        """Return whether `encode` adds the tokenizer's special tokens to a text.

        They are added for checkpoints, and for runs that contain `generation_config.json`; not for a table alone.
        """
        is_model = self.model is not None or self.table_only != ""
        return is_model and (self.run is None or (self.run.path / GENERATION).exists())

    @cached_property
    def text_limits(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return two tuples: the token IDs that start a text, and the token IDs that end a text; each may be empty.

        The IDs come from `config.json` and `generation_config.json` in the folder of a checkpoint. If neither file
        states them, they are found by the names of the tokenizer's tokens, such as `<s>`.

        Raises:
            TokenizerError: There is no tokenizer, or it has IDs outside the table.
        """
        from embedlayer.tokenization.ids import end_of_text_id

        tokenizer, end = self.require_tokenizer(), end_of_text_id(self.require_tokenizer())
        if not self.adds_special_tokens:
            ends = () if end is None else (end,)
            return ends, ends
        stated: dict[str, Any] = {}
        if path_kind(Path(self.source)) is PathKind.GGUF:
            from embedlayer.checkpoints.reader import Checkpoint

            stated |= Checkpoint.open(Path(self.source)).config
        for name in (CONFIG, GENERATION) if not stated else ():
            file = _folder(Path(self.source)) / name
            if file.exists():
                stated |= {key: value for key, value in read_json(file).items() if value is not None}

        def ids(key: str, named: int | None) -> tuple[int, ...]:
            """Return the token IDs that the files state, as a tuple.

            Args:
                key: Name in the JSON files, such as `"eos_token_id"`.
                named: ID to use if the files state none; `None` gives an empty tuple.
            """
            values = stated.get(key, named)
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

        `model` if it is a `DecoderLM`. Else transformers loads the folder of the checkpoint; this is done once.

        Raises:
            CheckpointError: There are no transformer blocks, or the model is no causal one, such as a masked one.
            MissingExtraError: The checkpoint needs transformers, which is not installed.
        """
        from embedlayer.checkpoints.causal_models import load_causal_model
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
            CheckpointError: Only the table of a checkpoint could be read, so its scale and positions are not known.
        """
        if self.table_only:
            raise CheckpointError(f"Only the table of {self.source} can be read. {self.table_only}")
        return self.table if self.model is None else self.model

    def prompt(self, text: str) -> list[int]:
        """Return the token IDs of `text` as a prompt that `generate` continues; the list is never empty.

        If the text has no tokens, the result is the first ID that starts a text, from `text_limits`.

        Raises:
            TextError: The text has no tokens, and the model has no token that starts a text.
            TokenizerError: There is no tokenizer, or it has IDs outside the table.
            UnknownTokenError: The tokens come from a file of vectors, and a word of the text has no row.
        """
        ids = self.encode(text) or list(self.text_limits[0][:1])
        if not ids:
            raise TextError("This model has no token that starts a text: pass a text of at least one token.")
        return ids


def open_model(source: Path | str, tokenizer: Path | str | None = None, *, device: str = "cpu") -> OpenedModel:
    """Open a table with the model, tokenizer and run that belong to it.

    | `source` | result |
    |---|---|
    | folder that `embedlayer train` wrote | the decoder, with its run |
    | folder that `save_pretrained` wrote | the layer, model or table |
    | checkpoint folder, safetensors file or index | a LLaMA-type decoder, else the embedding layer, else the table |
    | GGUF file | the same; the decoder only if its blocks are not quantised |
    | word2vec, GloVe, fastText, NumPy or projector file | the table, with a token for each row |
    | `owner/name` on the hub | the embedding layer; only shards with its tensors are downloaded |

    The table alone is read if the model family is unknown, or if anything else of the embedding layer cannot be read.

    Args:
        source: Folder, file, or name on the hub.
        tokenizer: File or folder of the tokenizer to use instead of the one that belongs to the table.
        device: Where to put the tensors.

    Raises:
        FileError: The path does not exist, or cannot be read. A mistyped path is never sent to the hub.
        CheckpointError: The source is damaged, or has no token table.
        TokenizerError: The tokenizer is damaged; or `tokenizer`, or that of a saved layer, has IDs outside the table.

    Warns:
        EmbedLayerWarning: Only the table of a checkpoint can be read; rows contain NaN or infinity; or a checkpoint's
            tokenizer cannot be read or has IDs outside the table.

    Example:
        >>> from embedlayer.checkpoints.vector_files import write_vectors
        >>> write_vectors("cats.txt", ["cat", "dog"], torch.eye(2), format="word2vec")
        >>> open_model("cats.txt").encode("dog cat")
        [1, 0]
    """
    path = recover_folder(source)
    found = path_kind(path)
    if found is PathKind.VECTORS:
        opened = _open_vectors(path)
    elif found in OWN_FOLDERS:
        opened = _open_saved(path, device)
    elif found is PathKind.MISSING:
        opened = _open_layer(source, device)
    else:
        opened = _open_checkpoint(path, device)
    if tokenizer is None and opened.no_tokenizer and opened.has_tokenizer_file:
        warnings.warn(
            f"{opened.no_tokenizer} Rows are named by their numbers, and what needs text is refused.",
            EmbedLayerWarning,
            stacklevel=2,
        )
    if tokenizer is not None:
        from embedlayer.tokenization.ids import require_rows
        from embedlayer.tokenization.read import load_tokenizer

        opened.tokenizer, opened.tokens = load_tokenizer(tokenizer), None
        require_rows(opened.tokenizer, opened.table.vocab_size, tokenizer)
    return opened


def _open_vectors(path: Path) -> OpenedModel:
    """Open a file of word vectors as a table on the CPU, with one token for each row and no tokenizer."""
    from embedlayer.checkpoints.vector_files import read_vectors
    from embedlayer.tables.dense import TokenEmbedding

    tokens, rows = read_vectors(path, nonfinite="keep")
    table = TokenEmbedding.from_pretrained(rows)
    return OpenedModel(_title(path), table, source=path, kind="file of vectors", tokens=tokens)


def _open_saved(path: Path, device: str) -> OpenedModel:
    """Open a folder that this library wrote: a training run, or a folder of `save_pretrained`.

    Raises:
        FileError: The run is not finished, so there is no trained layer.
        CheckpointError: The saved module has no token table.
        TokenizerError: The tokenizer has IDs outside the table.
    """
    from embedlayer.checkpoints.embedding_layer import EmbeddingLayer
    from embedlayer.layers.input import TransformerEmbedding
    from embedlayer.layers.ngram import NgramEmbedding
    from embedlayer.models.decoder import DecoderLM
    from embedlayer.pretrained import Pretrained
    from embedlayer.tables.table import TokenTable
    from embedlayer.tokenization.ids import require_rows
    from embedlayer.tokenization.read import load_tokenizer
    from embedlayer.training.run_directory import RunDirectory

    if not (path / CONFIG).exists():
        raise FileError(
            f"{path} holds no trained layer yet, because its run is not finished: continue it with "
            f"{command_line('train', '--resume', '-o', path)}"
        )
    layer = Pretrained.from_pretrained(path, device=device).eval()
    table = layer if isinstance(layer, TokenTable) else getattr(layer, "table", None)
    if not isinstance(table, TokenTable) or isinstance(layer, NgramEmbedding):
        raise CheckpointError(f"{path} holds a {type(layer).__name__}, which has no table of tokens.")
    tokenizer = load_tokenizer(path / TOKENIZER) if (path / TOKENIZER).exists() else None
    if tokenizer is not None:
        require_rows(tokenizer, table.vocab_size, path)
    run = RunDirectory(path) if isinstance(layer, DecoderLM) else None
    is_trained = run is not None and run.contains_run
    blocks = f"The blocks of {path} are those of a model of transformers: load it with embedlayer.compress.load_model."
    return OpenedModel(
        _title(path),
        table,
        source=path,
        kind="trained run" if is_trained else f"saved {type(layer).__name__}",
        model=layer if isinstance(layer, DecoderLM | EmbeddingLayer | TransformerEmbedding) else None,
        tokenizer=tokenizer,
        run=run,
        no_decoder=blocks if (path / BLOCKS / CONFIG).exists() else "",
    )


def _open_checkpoint(path: Path, device: str) -> OpenedModel:
    """Open a local checkpoint: as a whole decoder if `load_llama` can read it, else its embedding layer alone.

    In the second case, `no_decoder` of the result is the message of the error of `load_llama`. A tokenizer with IDs
    outside the table causes a warning.

    Raises:
        CheckpointError: The embedding layer cannot be read either.
        FileError: A file is missing or cannot be read.
    """
    from embedlayer.models.llama import load_llama
    from embedlayer.tokenization.ids import missing_rows_message

    try:
        model = load_llama(path, device=device)
    except (CheckpointError, FileError) as error:
        opened = _open_layer(path, device)
        opened.no_decoder = opened.no_decoder or str(error)
    else:
        config = _folder(path) / CONFIG
        is_file = path_kind(path) is PathKind.GGUF
        family = read_json(config).get("model_type") if config.exists() and not is_file else None
        kind = "GGUF file" if is_file else f"checkpoint of family {family}" if family else "checkpoint"
        opened = OpenedModel(_title(path), model.table, source=path, kind=kind, model=model)
    if opened.tokenizer is None and not opened.no_tokenizer:
        opened.tokenizer, opened.no_tokenizer = _tokenizer_beside(path)
        if opened.tokenizer is not None:
            mismatch = missing_rows_message(opened.tokenizer, opened.table.vocab_size, path)
            if mismatch is not None:
                warnings.warn(mismatch, EmbedLayerWarning, stacklevel=3)
    return opened


def _open_layer(source: Path | str, device: str) -> OpenedModel:
    """Open the embedding layer of a checkpoint, and no transformer blocks, from a local path or from the hub.

    If it cannot be read but its table can, the result has the table alone, and a warning says why.

    Raises:
        FileError: The source does not exist, or cannot be read.
        CheckpointError: The source is damaged, and its table cannot be read either.
    """
    from embedlayer.checkpoints.embedding_layer import load

    is_here = Path(source).exists()
    source = source if is_here else str(source)
    reason = ""
    try:
        layer = load(source, device=device, per_layer=is_here)  # from the hub, its table would be downloaded too
    except CheckpointError as error:
        try:
            layer = load(source, device=device, table_only=True)
        except CheckpointError:
            raise error from None
        reason = str(error)
        warnings.warn(f"Only the table is read. {reason}", EmbedLayerWarning, stacklevel=3)
    noun = "GGUF file" if path_kind(Path(source)) is PathKind.GGUF else "checkpoint"
    download = f"Only the embedding layer of {source} is read from the hub: download the model."
    tokenizer, no_tokenizer = None, ""
    if noun == "checkpoint":
        try:
            tokenizer = layer.tokenizer
        except TokenizerError as error:  # what needs no text is still possible
            no_tokenizer = str(error)
    return OpenedModel(
        _title(Path(source)) if is_here else str(source),
        layer.table,
        source=source,
        kind=noun if layer.family == UNKNOWN.name else f"{noun} of family {layer.family}",
        model=None if reason else layer,
        tokenizer=tokenizer,
        no_tokenizer=no_tokenizer,
        table_only=reason,
        no_decoder=reason or ("" if is_here else download),
    )


def _tokenizer_beside(path: Path) -> "tuple[Tokenizer | None, str]":
    """Return the tokenizer in the folder of `path`, and the reason if there is none or it cannot be read.

    The result is `(tokenizer, "")` or `(None, reason)`.
    """
    from embedlayer.tokenization.read import load_tokenizer

    try:
        return load_tokenizer(path if path_kind(path) is PathKind.GGUF else _folder(path)), ""
    except (FileError, TokenizerError, CheckpointError) as error:
        return None, str(error)


def _folder(path: Path) -> Path:
    """Return `path` if it is a folder, else the folder that contains it."""
    return path if path.is_dir() else path.parent


def _title(path: Path) -> str:
    """Return the name of a path; `parent/name` if the name is only `model`, `checkpoint` or `run`."""
    place = path.resolve()
    return f"{place.parent.name}/{place.name}" if place.name in {"model", "checkpoint", "run"} else place.name
