"""Train an embedding layer: from text files to the folder of a run. Shared by `train`, `demo` and `corpus build`."""

import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from embedlayer.cli.options import TOKENIZER
from embedlayer.cli.printing import say
from embedlayer.cli.texts import CorpusOptions, prepare_corpus
from embedlayer.core.errors import EmbedLayerWarning, FileError, SizeError
from embedlayer.core.formatting import count_of
from embedlayer.io.files import create_folder

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from embedlayer.inputs.injection import EmbeddingInjection
    from embedlayer.models.decoder import DecoderLM
    from embedlayer.tables.lookup import LookupTable
    from embedlayer.training.loop import Trainer, TrainingOptions
    from embedlayer.training.run_directory import RunDirectory

Command = TypeVar("Command", bound=Callable[..., Any])

NEIGHBORS = 6
PROBES, SHORTEST_PROBE = 8, 4
NGRAM_HEADS = 4  # hash heads of each order of an n-gram table


class _TokenizerKind(click.Choice):  # type: ignore[type-arg]  # generic since click 8.2 only
    """Type of a click parameter: the kind of a tokenizer to train. A file is refused with the option that takes it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the kind; click calls this method."""
        if value not in self.choices and Path(value).exists():
            self.fail(f"{value} is a file or folder, and not a kind: pass --tokenizer-from {value}.", param, ctx)
        return super().convert(value, param, ctx)


TOKENIZER_KINDS = _TokenizerKind(["bpe", "wordpiece", "unigram", "word", "byte"])
POSITIONS = click.Choice(["rotary", "learned", "sinusoidal", "scaled-sinusoidal", "alibi", "relative", "none"])


def _option(default: Any, help: str, **settings: Any) -> Any:
    """Return a dataclass field that `layer_options` turns into an option of the command `train`."""
    return field(default=default, metadata={"help": help, **settings})


@dataclass(frozen=True)
class LayerOptions:
    """Options of the tokenizer and the decoder that `train` builds; each field's help text says what it means."""

    tokenizer: str = _option("bpe", "Kind of tokenizer to train on the text.", type=TOKENIZER_KINDS)
    tokenizer_from: Path | None = _option(None, "Use this tokenizer, and train none.", type=TOKENIZER)  # noqa: RUF009
    vocab_size: int = _option(4096, "Number of tokens of a trained tokenizer.")
    dim: int = _option(192, "Width of a table row, D.")
    layers: int = _option(4, "Number of transformer blocks.")
    heads: int = _option(6, "Number of query heads.", type=click.IntRange(min=1))
    kv_heads: int | None = _option(None, "Number of key/value heads.  [default: as many as query heads]", type=int)
    rank: int | None = _option(None, "Rank of a factorised table.  [default: a dense table]", type=int)
    position: str = _option("rotary", "Position scheme.", type=POSITIONS)
    tied: bool = _option(True, "Whether the LM head shares the table's weight.")
    row_sparse: bool = _option(False, "Update only the rows that a batch uses; needs --untied.", is_flag=True)
    dropout: float = _option(0.0, "Dropout probability.")
    init_std: float = _option(0.02, "Standard deviation of the initial rows.")
    pad_to_multiple_of: int | None = _option(None, "Round the number of rows up to a multiple of this.", type=int)
    value_embedding: bool = _option(
        False, "Add a table to the attention values of every other block, as in nanochat.", is_flag=True
    )
    ngram: int | None = _option(
        None,
        f"Largest number of rows of a hashed n-gram table, added before block 1 with {NGRAM_HEADS} hash heads an "
        f"order, as in Engram; --dim must be a multiple of {NGRAM_HEADS} * (order - 1).  [default: none]",
        type=int,
    )
    ngram_order: int = _option(3, "Longest n-gram of that table, in tokens.")
    per_layer: int | None = _option(None, "Width of per-layer embeddings, as in Gemma 3n.  [default: none]", type=int)
    mapped: bool = _option(
        False,
        "Keep the rows and optimizer state of the tables of --ngram, --value-embedding and --per-layer in DIR/tables, "
        "not in memory. One process only.",
        is_flag=True,
    )

    def __post_init__(self) -> None:
        if self.row_sparse and (self.tied or self.rank is not None):
            raise SizeError(
                "--row-sparse needs --untied and no --rank: a tied head and factors give every row a gradient."
            )
        if self.mapped and not self.value_embedding and self.ngram is None and self.per_layer is None:
            raise SizeError("--mapped needs additional tables: add --ngram, --value-embedding or --per-layer.")


def layer_options(command: Command) -> Command:
    """Add an option for each field of `LayerOptions` to a click command, and return the command."""
    for each in reversed(fields(LayerOptions)):
        name, settings = each.name.replace("_", "-"), dict(each.metadata)
        names = f"--{name}/--un{name}" if each.default is True else f"--{name}"
        command = click.option(names, default=each.default, **settings)(command)
    return command


def start_run(
    directory: "RunDirectory",
    sources: Sequence[str | Path],
    layer: LayerOptions,
    options: "TrainingOptions",
    *,
    validation_fraction: float,
    probes: Sequence[str],
    device: str,
    quiet: bool,
    launch: str = "",
    weights: Sequence[float] | None = None,
    text_field: str | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
) -> tuple["Trainer", "Tokenizer"]:
    """Build tokenizer, corpus, model and trainer from texts, and write them to the folder of the run."""
    # The folder's content is replaced only when the trainer is complete, so an error leaves it as it was.
    import torch

    from embedlayer.data.mixture import corpora_of
    from embedlayer.tokenization.ids import table_size
    from embedlayer.training.loop import Trainer
    from embedlayer.training.run_directory import saved_buffers

    create_folder(directory.path)
    replaced = None if directory.corpus.is_symlink() else directory.corpus.resolve()
    if inside := [source for source in sources if replaced in (path := Path(source).resolve(), *path.parents)]:
        raise FileError(f"{inside[0]} is in {directory.corpus}, which a new run replaces. Copy it to another folder.")
    with directory.new_corpus(mapped=layer.mapped) as target:
        wanted = CorpusOptions(layer.tokenizer_from, layer.tokenizer, layer.vocab_size, text_field, dtype)
        corpus, tokenizer = prepare_corpus(sources, weights, target, wanted, quiet=quiet)
        mean, size = corpus.num_bytes / len(corpus), tokenizer.get_vocab_size()
        numbers = [len(each.documents) for each in corpora_of(corpus)]
        documents = f" in {count_of(sum(numbers), 'document')}" * options.documents
        say(f"  {len(corpus):,} tokens of {mean:.2f} bytes on average{documents}, vocabulary of {size:,}", quiet)
        if options.documents and max(numbers) == 1:
            warnings.warn(
                "--documents changes nothing here: each corpus is one document, as a text file is. Rows of JSON "
                "lines, Parquet and Arrow files are documents, and so are the text files of a folder.",
                EmbedLayerWarning,
                stacklevel=2,
            )
        torch.manual_seed(options.seed)
        model = build_model(layer, tokenizer, options.max_length, directory.tables if layer.mapped else None)
        training, validation = corpus.split(validation_fraction)
        trainer = Trainer(model.to(device), training, validation, options)
        chosen = [_single_token(tokenizer, probe) for probe in probes] or frequent_words(
            corpus.counts(table_size(tokenizer)), tokenizer
        )
        notes: dict[str, Any] = {"neighbors_before": neighbors_of(chosen, model, tokenizer)}
    notes |= {"launch": launch} if launch else {}
    notes |= {"sources": [str(source) for source in sources]} if weights is not None else {}
    directory.start(trainer, tokenizer, validation_fraction=validation_fraction, notes=notes, overwrite=overwrite)
    if saved_buffers(model) or layer.mapped:
        directory.save_checkpoint(trainer)
    return trainer, tokenizer


def build_model(
    layer: LayerOptions, tokenizer: "Tokenizer", max_length: int, tables: Path | None = None
) -> "DecoderLM":
    """Return a decoder of the sizes in the options, with freshly initialised weights, on the CPU."""
    from embedlayer.heads.output import OutputHead
    from embedlayer.inputs.embedding import as_position
    from embedlayer.models.decoder import DecoderLM
    from embedlayer.tables.dense import TokenEmbedding
    from embedlayer.tables.factorized import FactorizedEmbedding
    from embedlayer.tables.row_sparse import RowSparseEmbedding
    from embedlayer.tables.table import TokenTable
    from embedlayer.tokenization.ids import table_size

    table: TokenTable
    vocab_size = table_size(tokenizer)
    shared: dict[str, Any] = {"init_std": layer.init_std, "pad_to_multiple_of": layer.pad_to_multiple_of}
    if layer.rank is None:
        kind = RowSparseEmbedding if layer.row_sparse else TokenEmbedding
        table = kind(vocab_size, layer.dim, scale="sqrt_dim", **shared)
    else:
        table = FactorizedEmbedding(vocab_size, layer.dim, layer.rank, scale="sqrt_dim", **shared)
    sizes = {"max_seq_len": max_length, "embed_dim": layer.dim, "num_heads": layer.heads}
    position = as_position(layer.position, **sizes)  # type: ignore[arg-type]
    return DecoderLM(
        table,
        position,
        None if layer.tied else OutputHead(vocab_size=vocab_size, embed_dim=layer.dim),
        num_layers=layer.layers,
        num_heads=layer.heads,
        num_kv_heads=layer.kv_heads,
        dropout=layer.dropout,
        injections=list(build_injections(layer, tokenizer, tables)),
    )


def build_injections(
    layer: LayerOptions, tokenizer: "Tokenizer", tables: Path | None = None
) -> "Iterator[EmbeddingInjection]":
    """Yield the additional tables that the options ask for, freshly initialised, on the CPU."""
    from embedlayer.inputs.gated import GatedEmbedding
    from embedlayer.inputs.ngram import NgramEmbedding, NgramHash
    from embedlayer.inputs.per_layer_embedding import PerLayerEmbedding
    from embedlayer.inputs.value import ValueEmbedding, alternate_blocks
    from embedlayer.tables.lookup import check_positive
    from embedlayer.tables.row_sparse import RowSparseEmbedding
    from embedlayer.tables.stored.mapped import MappedEmbedding
    from embedlayer.tokenization.ids import table_size
    from embedlayer.tokenization.token_compression import compressed_tokens

    vocab_size, kv_heads, numbers = table_size(tokenizer), layer.kv_heads or layer.heads, count()

    def make_table(rows: int, width: int, *, init_std: float = 0.02, scale: float | None = None) -> "LookupTable":
        if tables is None:
            return RowSparseEmbedding(rows, width, scale=scale, init_std=init_std)
        return MappedEmbedding.create(tables / str(next(numbers)), rows, width, scale=scale, init_std=init_std)

    if layer.value_embedding:
        width = kv_heads * (layer.dim // layer.heads)
        for block in alternate_blocks(layer.layers):
            table = make_table(vocab_size, width, init_std=layer.dim**-0.5)
            yield ValueEmbedding(table, kv_heads, blocks=[block], gate_channels=min(32, layer.dim))
    if layer.ngram is not None:
        token_map = compressed_tokens(tokenizer)
        ngrams = NgramHash.for_rows(
            layer.ngram, vocab_size, max_order=layer.ngram_order, heads=NGRAM_HEADS, token_map=token_map
        )
        if layer.dim % ngrams.num_hashes:
            raise SizeError(f"--dim {layer.dim} must be a multiple of the {ngrams.num_hashes} rows of each token.")
        vectors = NgramEmbedding(ngrams, make_table(ngrams.num_rows, layer.dim // ngrams.num_hashes))
        yield GatedEmbedding(vectors, layer.dim, block=min(1, layer.layers - 1))
    if layer.per_layer is not None:
        width = check_positive("--per-layer", layer.per_layer)
        table = make_table(vocab_size, layer.layers * width, scale=width**0.5)
        yield PerLayerEmbedding(table, layer.dim, num_layers=layer.layers)


def train_to_the_end(
    directory: "RunDirectory", trainer: "Trainer", tokenizer: "Tokenizer", *, quiet: bool, save_seconds: float = 60.0
) -> bool:
    """Train up to the last step, write checkpoints, and keep the weights with the lowest validation loss."""
    # All ranks must call this. Ctrl-C ends it after the current step, with a checkpoint and without a result. Mapped
    # tables of the model are closed.
    from embedlayer.cli.progress import display, stopping_gently
    from embedlayer.training.loop import trained_files

    parallel, saved_at = trainer.parallel, time.monotonic()
    with stopping_gently(trainer), display(trainer, quiet=quiet) as show:
        for line in trainer.run(on_step=show):
            if parallel.is_first:
                directory.add_metrics(line)
            show(line["step"], line)
            if "validation_loss" in line and line["step"]:
                directory.keep_best(trainer, line)
            if parallel.collectives.any(time.monotonic() - saved_at > save_seconds):
                directory.save_checkpoint(trainer)
                saved_at = time.monotonic()
    directory.save_checkpoint(trainer)
    reached = trainer.step == trainer.steps
    if reached:
        directory.finish(trainer, tokenizer)
    for table in trained_files(trainer.model).values():
        table.close()  # writes its files to the disk
    return reached


def frequent_words(counts: Any, tokenizer: "Tokenizer") -> list[int]:
    """Return the IDs of up to `PROBES` frequent words, the most frequent first, to show their nearest neighbours."""
    import numpy as np

    from embedlayer.tokenization.bytes import token_text

    words = [int(token) for token in np.argsort(-counts, kind="stable") if counts[token] >= 5]
    texts = {token: token_text(tokenizer, token) for token in words[:1000]}
    space = " " if any(texts[token].startswith(" ") for token in words[:200]) else ""
    whole = re.compile(rf"{space}[^\W\d_]{{{SHORTEST_PROBE},}}")
    named = [token for token, text in texts.items() if whole.fullmatch(text)] or words
    return [named[i * (len(named) - 1) // (PROBES - 1)] for i in range(min(PROBES, len(named)))]


def neighbors_of(tokens: Sequence[int], model: "DecoderLM", tokenizer: "Tokenizer") -> list[dict[str, Any]]:
    """Return the nearest neighbours of some tokens in the model's table, by cosine similarity."""
    from embedlayer.analysis.vectors import TokenVectors
    from embedlayer.tokenization.bytes import token_text

    vectors = TokenVectors(model.table, tokenizer)
    near = [vectors.most_similar(token, topn=min(NEIGHBORS, len(vectors) - 1)) for token in tokens]
    return [
        {"id": token, "token": token_text(tokenizer, token), "near": n} for token, n in zip(tokens, near, strict=True)
    ]


def _single_token(tokenizer: "Tokenizer", text: str) -> int:
    """Return the ID of the one token that the text of a `--probe` option is."""
    from embedlayer.tokenization.tokenizer_calls import encode

    ids = encode(tokenizer, text).ids
    if len(ids) != 1:
        raise SizeError(f"--probe {text!r} is {len(ids)} tokens for this tokenizer; it must be one.")
    return int(ids[0])
