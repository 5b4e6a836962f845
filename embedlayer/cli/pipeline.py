"""The main job, from files of text to a folder with a trained embedding layer: what `train` and `demo` share."""

import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from embedlayer.errors import FileError, SizeError, TextError, TokenizerError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from embedlayer.models.decoder import DecoderLM
    from embedlayer.text.corpus import TokenCorpus
    from embedlayer.training.loop import Trainer, TrainingOptions
    from embedlayer.training.run_directory import RunDirectory

TOKENIZER_BYTES = 200_000_000
NEIGHBORS = 6
PROBES, SHORTEST_PROBE = 8, 4


@dataclass(frozen=True)
class NeighborRow:
    """A token and what was nearest to it before and after training.

    Attributes:
        token: The token's text, as it is (` first`).
        before: `(text, cosine)`, nearest first, as `TokenVectors.most_similar` gives them.
        after: The same after training.
    """

    token: str
    before: list[tuple[str, float]]
    after: list[tuple[str, float]]


@dataclass(frozen=True)
class LayerOptions:
    """What is trained: the tokenizer, the two ends, and the decoder between them."""

    tokenizer: str = "bpe"
    tokenizer_from: Path | None = None
    vocab_size: int = 4096
    dim: int = 192
    layers: int = 4
    heads: int = 6
    kv_heads: int | None = None
    rank: int | None = None
    position: str = "rotary"
    tied: bool = True
    row_sparse: bool = False
    dropout: float = 0.0
    init_std: float = 0.02
    pad_to_multiple_of: int | None = None

    def __post_init__(self) -> None:
        if self.row_sparse and (self.tied or self.rank is not None):
            raise SizeError(
                "--row-sparse trains only the rows that a batch uses. A tied head sends a gradient to every row, and a "
                "factorised table's projection is in every vector: use it with --untied and without --rank."
            )


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
) -> tuple["Trainer", "Tokenizer"]:
    """Text to tokenizer, corpus, model and trainer, all written down in the folder, with `launch` in its notes."""
    import torch

    from embedlayer.files import writable_folder
    from embedlayer.text.tokenizer import table_size
    from embedlayer.training.loop import Trainer

    writable_folder(directory.path)
    if directory.corpus.is_symlink():  # of an earlier run on a corpus that lies elsewhere
        directory.corpus.unlink()
    if (ready := _corpus_among(sources)) is not None:
        corpus, tokenizer = _linked_corpus(ready, directory, layer)
    else:
        corpus, tokenizer = _built_corpus(sources, directory, layer, quiet)
    bytes_per_token = corpus.num_bytes / len(corpus)
    _say(f"  {len(corpus):,} tokens, {bytes_per_token:.2f} bytes each, {tokenizer.get_vocab_size():,} entries", quiet)

    torch.manual_seed(options.seed)
    model = build_model(layer, table_size(tokenizer), options.max_length).to(device)
    trainer = Trainer(model, *corpus.split(validation_fraction), options)
    chosen = [_single_token(tokenizer, probe) for probe in probes] or frequent_words(
        corpus.counts(table_size(tokenizer)), tokenizer
    )
    notes = {"neighbors_before": _neighbors_of(chosen, model, tokenizer), **({"launch": launch} if launch else {})}
    directory.start(trainer, tokenizer, validation_fraction=validation_fraction, notes=notes)
    return trainer, tokenizer


def _built_corpus(
    sources: Sequence[str | Path], directory: "RunDirectory", layer: LayerOptions, quiet: bool
) -> "tuple[TokenCorpus, Tokenizer]":
    """Learn or read a tokenizer, and build the run's own corpus."""
    from embedlayer.text.corpus import TokenCorpus, find_texts
    from embedlayer.text.tokenizer import load_tokenizer

    with _kept_standard_input(find_texts(sources), directory.path) as texts:
        if layer.tokenizer_from is not None:
            tokenizer = load_tokenizer(layer.tokenizer_from)
        else:
            tokenizer = learn_tokenizer(texts, layer.tokenizer, layer.vocab_size, quiet=quiet)
        _say("Turning the text into token IDs", quiet)
        return TokenCorpus.build(texts, tokenizer, directory.corpus), tokenizer


def learn_tokenizer(texts: Sequence[str | Path], kind: str, vocab_size: int, *, quiet: bool) -> "Tokenizer":
    """Train a tokenizer on texts, at most on their first `TOKENIZER_BYTES`.

    Raises:
        FileError: A text cannot be read.
        TextError: The texts are empty, or not UTF-8.
    """
    from embedlayer.text.corpus import read_pieces
    from embedlayer.text.tokenizer import train_tokenizer

    _say(f"Learning a {kind} tokenizer of {vocab_size:,} entries", quiet)
    chunks = _at_most(TOKENIZER_BYTES, (chunk for text in texts for chunk in read_pieces(text)))
    return train_tokenizer(chunks, kind, vocab_size=vocab_size)  # type: ignore[arg-type]


def _linked_corpus(ready: Path, directory: "RunDirectory", layer: LayerOptions) -> "tuple[TokenCorpus, Tokenizer]":
    """A corpus that lies elsewhere, with its tokenizer; the run keeps a link to it."""
    import shutil

    from embedlayer.text.corpus import TokenCorpus
    from embedlayer.text.tokenizer import fingerprint, load_tokenizer

    corpus = TokenCorpus.open(ready)
    tokenizer = load_tokenizer(layer.tokenizer_from or ready / "tokenizer.json")
    if fingerprint(tokenizer) != corpus.tokenizer_fingerprint:
        raise TokenizerError(f"The corpus {ready} was built with another tokenizer. Leave --tokenizer-from out.")
    if directory.corpus.exists():
        shutil.rmtree(directory.corpus)
    directory.corpus.symlink_to(ready.resolve(), target_is_directory=True)
    return corpus, tokenizer


def _corpus_among(sources: Sequence[str | Path]) -> Path | None:
    """The corpus built by `embedlayer corpus build` that is named instead of texts."""
    from embedlayer.text.parts import PLAN

    found = [Path(source) for source in sources if (Path(source) / PLAN).exists()]
    if found and len(sources) > 1:
        raise TextError(f"{found[0]} is a corpus, and a run reads one alone: build one corpus of all the texts.")
    return found[0] if found else None


def build_model(layer: LayerOptions, vocab_size: int, max_length: int) -> "DecoderLM":
    """The decoder that the options describe."""
    from embedlayer.layers.input import make_position
    from embedlayer.layers.output import OutputHead
    from embedlayer.models.decoder import DecoderLM
    from embedlayer.tables.dense import TokenEmbedding
    from embedlayer.tables.factorized import FactorizedEmbedding
    from embedlayer.tables.table import TokenTable

    table: TokenTable
    if layer.rank is None:
        table = TokenEmbedding(
            vocab_size,
            layer.dim,
            scale="sqrt_dim",
            init_std=layer.init_std,
            pad_to_multiple_of=layer.pad_to_multiple_of,
            row_sparse=layer.row_sparse,
        )
    else:
        table = FactorizedEmbedding(
            vocab_size,
            layer.dim,
            layer.rank,
            scale="sqrt_dim",
            init_std=layer.init_std,
            pad_to_multiple_of=layer.pad_to_multiple_of,
        )
    position = make_position(
        layer.position,  # type: ignore[arg-type]
        max_seq_len=max_length,
        embed_dim=layer.dim,
        num_heads=layer.heads,
    )
    return DecoderLM(
        table,
        position,
        None if layer.tied else OutputHead(vocab_size=vocab_size, embed_dim=layer.dim),
        num_layers=layer.layers,
        num_heads=layer.heads,
        num_kv_heads=layer.kv_heads,
        dropout=layer.dropout,
    )


def train_to_the_end(
    directory: "RunDirectory", trainer: "Trainer", tokenizer: "Tokenizer", *, quiet: bool, save_seconds: float = 60.0
) -> bool:
    """Train with a live display and checkpoints, and keep the weights with the lowest validation loss as the result.

    Ctrl-C ends after the step it falls in, with everything saved.

    Of several processes all must call it; rank 0 writes and speaks.

    Returns:
        Whether the last step was reached.
    """
    from embedlayer.cli.progress import display, stopping_gently

    parallel, saved_at = trainer.parallel, time.monotonic()
    with stopping_gently(trainer), display(trainer, quiet=quiet) as show:
        for line in trainer.run(on_step=show.step):
            if parallel.is_first:
                directory.add_metrics(line)
            show.line(line)
            if "validation_loss" in line and line["step"]:
                directory.keep_best(trainer, line)
            if parallel.collectives.any(time.monotonic() - saved_at > save_seconds):
                directory.save_checkpoint(trainer)
                saved_at = time.monotonic()
    directory.save_checkpoint(trainer)
    if trainer.step != trainer.steps:
        return False
    directory.finish(trainer, tokenizer)
    return True


def summarise(directory: "RunDirectory", model: "DecoderLM", neighbors: Sequence[NeighborRow]) -> dict[str, Any]:
    """What a finished run came to, as plain numbers."""
    metrics = directory.read_metrics()
    validated = [line for line in metrics if "validation_loss" in line]
    first, rest = metrics[:1], metrics[1:]
    whole = all("loss" in line for line in first) and all("tokens_per_second" in line for line in rest)
    whole = whole and all("validation_bits_per_byte" in line for line in validated)
    if not (validated and rest and whole) or metrics[0]["step"] != 0:
        raise FileError(f"{directory.metrics} is not the record of a finished run. Train again, or resume the run.")
    best = directory.best() or min(validated[1:] or validated, key=lambda line: line["validation_loss"])
    return {
        "directory": str(directory.path),
        "first_loss": metrics[0]["loss"],
        "ln_vocab_size": math.log(model.table.vocab_size),
        "validation_loss": best["validation_loss"],
        "validation_bits_per_byte": best["validation_bits_per_byte"],
        "best_step": best["step"],
        "last_validation_loss": validated[-1]["validation_loss"],
        "steps": metrics[-1]["step"],
        "tokens_per_second": round(statistics.median([line["tokens_per_second"] for line in metrics[1:]])),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "table_parameters": sum(parameter.numel() for parameter in model.table.parameters()),
        "neighbors": [{"token": row.token, "before": list(row.before), "after": list(row.after)} for row in neighbors],
    }


def show_summary(summary: dict[str, Any], *, as_json: bool) -> None:
    """Print what a run came to: for people, or as one line of JSON."""
    if as_json:
        click.echo(json.dumps(summary))
        return
    from rich.console import Console
    from rich.table import Table

    from embedlayer.plots import visible_text

    console = Console(soft_wrap=False)
    console.print("\n" + _results(summary), highlight=False)
    table = Table(
        title="\nTokens, and the five nearest to each by cosine similarity of their rows (· is a space)",
        title_justify="left",
        box=None,
        pad_edge=False,
        title_style="bold",
    )
    for heading in ("token", "before training", "after training"):
        table.add_column(heading, overflow="fold")
    for row in summary["neighbors"]:
        cells = ["  ".join(visible_text(text) for text, _ in row[when][:5]) for when in ("before", "after")]
        table.add_row(visible_text(row["token"]), *cells)
    console.print(table, markup=False)
    click.echo(f"\nWritten to {summary['directory']}: {', '.join(summary['files'])}")


def _results(summary: dict[str, Any]) -> str:
    """Return what a run came to, in sentences."""
    parameters, in_table = summary["parameters"] / 1e6, summary["table_parameters"] / 1e6
    best, last = summary["best_step"], summary["steps"]
    text = (
        f"Trained {last:,} steps at {summary['tokens_per_second']:,} tokens/s: {parameters:.2f} M parameters, "
        f"{in_table:.2f} M of them in the embedding table.\n"
        f"The loss began at {summary['first_loss']:.2f} nats per token; guessing among all tokens evenly costs ln V = "
        f"{summary['ln_vocab_size']:.2f}.\n"
        f"On text kept out of training it fell to {summary['validation_loss']:.3f} nats per token "
        f"({summary['validation_bits_per_byte']:.3f} bits per byte)"
    )
    if best == last:
        return f"{text} at the last step: these weights are kept."
    return (
        f"{text} at step {best:,}: these weights are kept, because it was {summary['last_validation_loss']:.3f} at the "
        f"last step."
    )


def neighbor_rows(directory: "RunDirectory", model: "DecoderLM", tokenizer: "Tokenizer") -> list[NeighborRow]:
    """The run's probe tokens with what was nearest before and is nearest after training."""
    before = directory.read()["notes"].get("neighbors_before", [])
    after = _neighbors_of([row["id"] for row in before], model, tokenizer)
    return [
        NeighborRow(token=old["token"], before=_pairs(old["near"]), after=_pairs(new["near"]))
        for old, new in zip(before, after, strict=True)
    ]


def frequent_words(counts: Any, tokenizer: "Tokenizer") -> list[int]:
    """IDs of frequent whole words, spread over the frequent half of the words that occur: what to look at first."""
    import numpy as np

    from embedlayer.text.tokenizer import token_text

    words = [int(token) for token in np.argsort(-counts, kind="stable") if counts[token] >= 5]
    starts_word = any(token_text(tokenizer, token).startswith(" ") for token in words[:200])
    named = [
        token
        for token in words[:1000]
        if (text := token_text(tokenizer, token)).strip().isalpha()
        and len(text.strip()) >= SHORTEST_PROBE
        and text.startswith(" ") == starts_word
    ]
    named = named or words
    return [named[i * (len(named) - 1) // (PROBES - 1)] for i in range(min(PROBES, len(named)))]


def _neighbors_of(tokens: Sequence[int], model: "DecoderLM", tokenizer: "Tokenizer") -> list[dict[str, Any]]:
    from embedlayer.analysis.vectors import TokenVectors
    from embedlayer.text.tokenizer import token_text

    vectors = TokenVectors(model.table, tokenizer)
    return [
        {
            "id": token,
            "token": token_text(tokenizer, token),
            "near": vectors.most_similar(token, topn=min(NEIGHBORS, len(vectors) - 1)),
        }
        for token in tokens
    ]


def _pairs(rows: Sequence[Sequence[Any]]) -> list[tuple[str, float]]:
    return [(str(text), float(score)) for text, score in rows]


def _single_token(tokenizer: "Tokenizer", text: str) -> int:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if len(ids) != 1:
        raise SizeError(f"--probe {text!r} is {len(ids)} tokens for this tokenizer; it must be one.")
    return int(ids[0])


def _at_most(size: int, pieces: Iterator[str]) -> Iterator[str]:
    """Pieces until they come to `size` bytes: enough to learn a vocabulary from."""
    for piece in pieces:
        yield piece
        size -= len(piece.encode())
        if size <= 0:
            return


@contextmanager
def _kept_standard_input(texts: Sequence[str | Path], folder: Path) -> Iterator[Sequence[str | Path]]:
    """Standard input can be read once, and the text is needed twice: keep it in a file for that long."""
    if "-" not in map(str, texts):
        yield texts
        return
    import shutil
    import tempfile

    with tempfile.NamedTemporaryFile(dir=folder, prefix=".standard-input.", suffix=".txt") as kept:
        shutil.copyfileobj(sys.stdin.buffer, kept)
        kept.flush()
        yield [Path(kept.name) if str(text) == "-" else text for text in texts]


def _say(text: str, quiet: bool) -> None:
    if not quiet:
        click.echo(text)


def chosen_device(name: str) -> str:
    """`auto` as the device it means; a device that is not there is an error.

    Raises:
        SizeError: CUDA is asked for and not there.
    """
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise SizeError(f"Device {name} is not available here; use --device cpu or auto.")
    return name
