"""`embedlayer compress`: a table as a smaller one, and what that costs."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from embedlayer.cli.paths import TABLE, TEXT, TOKENIZER
from embedlayer.short_repr import short_repr

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor

    from embedlayer.checkpoints.layer import EmbeddingLayer
    from embedlayer.compress.report import Comparison, Loss
    from embedlayer.models.decoder import DecoderLM

WINDOW = 256


@dataclass
class Source:
    """What is compressed."""

    __repr__ = short_repr

    model: "DecoderLM | EmbeddingLayer"
    tokenizer: "Tokenizer | None"
    specials: dict[str, Any] | None = None
    """Of a checkpoint of others: the IDs that start and end its texts."""
    adds_specials: bool = False
    window: int = WINDOW
    counts: "Tensor | None" = None
    """How often each token occurs."""
    kept: int | None = None
    """How many tokens `embedlayer vocab trim` would keep."""


@click.command()
@click.argument("source", type=TABLE)
@click.option("--to", help="int8, int4, int4-g32 (groups of 32 columns), or rank=128.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Folder for the result; it must not be there yet."
)
@click.option("--compare", is_flag=True, help="Show all choices side by side, and --to among them.")
@click.option("--text", type=TEXT, help="Text to measure the loss on, and to count tokens in.")
@click.option("--tokenizer", "tokenizer_from", type=TOKENIZER, help="Use this tokenizer instead.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one line of JSON, and nothing else.")
def compress(
    source: Path,
    to: str | None,
    output: Path | None,
    compare: bool,
    text: Path | None,
    tokenizer_from: Path | None,
    as_json: bool,
) -> None:
    """Make the table of SOURCE smaller: a trained run, a checkpoint, or a file of vectors.

    A run stays a run: embed, neighbors, generate and export read the result. Of other checkpoints the embedding layer
    is kept, for embedlayer.load; LLaMA-type ones become a run. A table of low rank is nearest to the tokens that occur
    often: in --text, else in the run's own corpus.

    \b
    embedlayer compress run --compare --text book.txt
    embedlayer compress run --to int4-g32 -o smaller
    """  # noqa: D301 (click needs the backspace)
    from embedlayer.compress.convert import check_kind
    from embedlayer.errors import FileError

    if to is None and not compare:
        raise click.UsageError("Give --to with -o to compress, or --compare to see the choices.")
    if (to is None and output is not None) or (to is not None and output is None and not compare):
        raise click.UsageError("--to and -o belong together: what to make, and where.")
    if to is not None:
        check_kind(to)
    if output is not None and output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FileError(f"{output} is not empty. Choose a folder that is not there yet.")
    opened = open_source(source, tokenizer_from)
    loss = None if text is None else read_text(opened, text)
    rows = _side_by_side(opened, to, loss) if compare else []
    if to is not None and output is not None:
        made = _write(opened, to, output, loss)
        rows = rows or made
    if as_json:
        click.echo(json.dumps({"output": None if output is None else str(output), "rows": [asdict(r) for r in rows]}))
        return
    _show(opened, rows)
    if output is not None:
        click.echo(f"\nWritten to {output}: {', '.join(sorted(file.name for file in output.iterdir()))}")


def open_source(path: Path, tokenizer_from: Path | None = None) -> Source:
    """A run, a LLaMA-type checkpoint, another checkpoint's embedding layer, or a table in a file.

    Raises:
        FileError: There is nothing to read.
        CheckpointError: It is damaged. A tokenizer that is: `TokenizerError`.
    """
    from embedlayer.checkpoints.loader import load
    from embedlayer.checkpoints.tables import is_file_of_vectors
    from embedlayer.errors import CheckpointError, FileError
    from embedlayer.files import read_json
    from embedlayer.text.tokenizer import load_tokenizer

    if not path.exists():
        raise FileError(f"There is no {path}.")
    if is_file_of_vectors(path):
        return _open_vectors(path)
    config = path / "config.json"
    kind = read_json(config).get("kind") if config.exists() else None
    if kind in (None, "DecoderLM"):
        try:
            return _open_model(path, tokenizer_from)
        except CheckpointError:
            if kind is not None:
                raise
    layer = load(path)
    tokenizer = layer.tokenizer if tokenizer_from is None else load_tokenizer(tokenizer_from)
    return Source(layer, tokenizer, adds_specials=True)


def _open_model(path: Path, tokenizer_from: Path | None) -> Source:
    from embedlayer.cli.generate import is_run, open_model

    opened = open_model(path, tokenizer_from)
    source = Source(opened.model, opened.tokenizer, adds_specials=opened.adds_specials)
    if opened.model.position.max_seq_len is not None:
        source.window = min(source.window, opened.model.position.max_seq_len)
    if opened.adds_specials:
        ends = [token for token in opened.stops if token not in opened.starts_with]
        source.specials = {"bos_token_id": [*opened.starts_with], "eos_token_id": ends}
    elif is_run(path):
        _read_run(source, path)
    return source


def _read_run(source: Source, path: Path) -> None:
    """What a run's folder says beside its model: how long its windows were, and how often its tokens occur."""
    from embedlayer.checkpoints.tables import counts_of
    from embedlayer.training.run_directory import RunDirectory
    from embedlayer.vocab.used_tokens import with_required_tokens

    run = RunDirectory(path)
    if run.holds_a_run:
        source.window = min(source.window, run.options().max_length)
    source.counts = counts_of(run, source.model.table.vocab_size)
    if source.counts is not None and source.tokenizer is not None:
        source.kept = len(with_required_tokens(source.tokenizer, source.counts.nonzero()[:, 0].tolist()))


def _open_vectors(path: Path) -> Source:
    """A table in a file as an embedding layer; its tokens are words between spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from embedlayer.checkpoints.formats import read_vectors
    from embedlayer.checkpoints.layer import EmbeddingLayer
    from embedlayer.tables.dense import TokenEmbedding

    tokens, rows = read_vectors(path)
    tokenizer = None
    if len(set(tokens)) == len(tokens):
        tokenizer = Tokenizer(models.WordLevel({token: place for place, token in enumerate(tokens)}, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Source(EmbeddingLayer(TokenEmbedding.from_pretrained(rows), family="vectors"), tokenizer)


def read_text(source: Source, text: Path) -> "Loss | None":
    """Count the text's tokens; the loss on it, where there is a model to predict it."""
    import torch

    from embedlayer.compress.report import loss_on
    from embedlayer.errors import TextError, TokenizerError
    from embedlayer.models.decoder import DecoderLM
    from embedlayer.text.corpus import read_pieces
    from embedlayer.text.tokenizer import require_rows
    from embedlayer.vocab.used_tokens import used_tokens

    if source.tokenizer is None:
        raise TokenizerError("--text needs a tokenizer, and there is none beside the table: name it with --tokenizer.")
    require_rows(source.tokenizer, source.model.table.vocab_size, "--text")
    encoded = source.tokenizer.encode("".join(read_pieces(text)), add_special_tokens=source.adds_specials)
    ids = torch.tensor(encoded.ids)
    starts = (source.specials or {}).get("bos_token_id", [])
    if starts and (not len(ids) or ids[0] != starts[0]):
        ids = torch.cat([torch.tensor(starts[:1]), ids])
    if len(ids) < 2:
        raise TextError(f"{text} is {len(ids)} tokens long: too short to measure on.")
    vocab_size = source.model.table.vocab_size
    source.counts = torch.bincount(ids, minlength=vocab_size)
    source.kept = len(used_tokens(source.tokenizer, text))
    return loss_on(source.model, ids, length=source.window) if isinstance(source.model, DecoderLM) else None


def _side_by_side(source: Source, to: str | None, loss: "Loss | None") -> "list[Comparison]":
    from embedlayer.compress.report import CHOICES, compare

    width = source.model.table.embed_dim
    choices = [choice for choice in CHOICES if width > 32 or "-g" not in choice]
    choices += [f"rank={rank}" for rank in (width // 2, width // 4) if rank]
    choices += [to] if to is not None and to not in choices else []
    return compare(source.model.table, choices, counts=source.counts, kept=source.kept, loss=loss)


def _write(source: Source, to: str, output: Path, loss: "Loss | None") -> "list[Comparison]":
    """Write the model around the compressed table; the folder appears complete or not at all."""
    from embedlayer.cli.generate import GENERATION
    from embedlayer.compress.convert import compressed, with_table
    from embedlayer.compress.report import compare
    from embedlayer.files import replacing_folder, writable_folder, write_json

    table = source.model.table
    other = compressed(table, to, counts=source.counts)
    rows = compare(table, {to: other}, counts=source.counts, loss=loss)[:2]
    writable_folder(output.parent)
    with replacing_folder(output) as partial:
        with_table(source.model, other).save_pretrained(partial, tokenizer=source.tokenizer)
        if source.specials is not None:
            write_json(partial / GENERATION, source.specials)
    return rows


def _show(source: Source, rows: "Sequence[Comparison]") -> None:
    from rich.console import Console
    from rich.table import Table

    from embedlayer.planner import format_bytes

    model = source.model
    table = Table(
        title=f"Table of {model.table.vocab_size:,} x {model.table.embed_dim}", title_justify="left", box=None
    )
    measured = any(row.loss is not None for row in rows)
    for heading in (
        "kind",
        "bytes",
        "of it",
        "row error",
        "nearest 10 kept",
        *(["loss", "change"] if measured else []),
    ):
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    for row in rows:
        cells = [
            row.to,
            format_bytes(row.bytes),
            f"{row.share:.1%}",
            f"{row.row_error:.2%}",
            _cell(row.neighbors, ".1%"),
        ]
        table.add_row(*cells, *([_cell(row.loss, ".4f"), _cell(row.loss_change, "+.4f")] if measured else []))
    console = Console(soft_wrap=False)
    console.print(table, markup=False)
    if any(row.to == "trim" for row in rows):
        click.echo("trim: without the rows that embedlayer vocab trim drops; the others are untouched.")
    head = model.head
    if head is not None and not head.tied:
        click.echo(f"The head has rows of its own, {format_bytes(head.weight.nbytes)}, which stay as they are.")


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
