"""`embedlayer compress`: replace a table by a smaller one, and measure what that costs."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from embedlayer.cli.options import SOURCE, TEXT, NewFolder, json_option, tokenizer_option
from embedlayer.cli.printing import make_console, print_line, print_table

if TYPE_CHECKING:
    from torch import Tensor

    from embedlayer.compress.report import CompressionResult, Loss
    from embedlayer.sources import OpenedModel

WINDOW = 256
"""Longest window in tokens on which the loss is measured."""


class TokenUse(NamedTuple):
    """How a text uses the tokens of a table.

    Attributes:
        counts: Number of occurrences of each token, `(V,)`, or `None` if unknown.
        kept: Number of tokens that `embedlayer vocab trim` would keep for the text, or `None` if unknown.
        loss: Function that returns the model's loss on the text for any table in place of its own; `None` without a
            decoder or a text.
    """

    counts: "Tensor | None" = None
    kept: int | None = None
    loss: "Loss | None" = None


@click.command()
@click.argument("source", type=SOURCE)
@click.option("--to", help="Kind of the smaller table: int8, int4, int4-g32 (groups of 32 columns), or rank=128.")
@click.option("-o", "--output", type=NewFolder(), help="New folder for the result.")
@click.option("--compare", is_flag=True, help="Show all choices side by side, with --to among them.")
@click.option("--text", type=TEXT, help="Text to measure the loss on, and to count tokens in.")
@tokenizer_option
@json_option
def compress(
    source: Path,
    to: str | None,
    output: Path | None,
    compare: bool,
    text: Path | None,
    tokenizer_from: Path | None,
    as_json: bool,
) -> None:
    """Make the table of SOURCE smaller.

    SOURCE is a run, a saved layer, a checkpoint (a folder, a file, or owner/name on the hub), or a file of vectors. The
    result is the same model with the smaller table: embed, neighbors, generate and export read it. Of a checkpoint that
    is not of LLaMA type only the embedding layer is kept. A low-rank table approximates the tokens best that occur
    often in --text, else in the training text of a run.

    \b
    embedlayer compress run --compare --text book.txt
    embedlayer compress run --to int4-g32 -o smaller
    """  # noqa: D301 (click needs the backspace)
    from embedlayer.compress.convert import check_kind
    from embedlayer.sources import open_model

    if to is None and not compare:
        raise click.UsageError("Give --to with -o to compress, or --compare to see the choices.")
    if (to is None and output is not None) or (to is not None and output is None and not compare):
        raise click.UsageError("--to and -o belong together: pass the kind of table and the new folder.")
    if to is not None:
        check_kind(to)
    opened = open_model(source, tokenizer_from)
    use = known_use(opened) if text is None else measure_use(opened, text)
    rows = _side_by_side(opened, to, use) if compare else []
    if to is not None and output is not None:
        written = _write(opened, to, output, use)
        rows = rows or written
    if as_json:
        click.echo(json.dumps({"output": None if output is None else str(output), "rows": [asdict(r) for r in rows]}))
        return
    _show(opened, rows)
    if output is not None:
        click.echo(f"\nWritten to {output}: {', '.join(sorted(file.name for file in output.iterdir()))}")


def known_use(opened: "OpenedModel") -> TokenUse:
    """Return how the training text of a run uses its tokens; `loss` is `None`.

    For other sources than runs all fields of the result are `None`. Without a tokenizer, `kept` is `None` too.
    """
    from embedlayer.vocab.token_usage import with_required_tokens

    if opened.counts is None or opened.tokenizer is None:
        return TokenUse(opened.counts)
    return TokenUse(opened.counts, len(with_required_tokens(opened.tokenizer, opened.counts.nonzero()[:, 0].tolist())))


def measure_use(opened: "OpenedModel", text: Path) -> TokenUse:
    """Count the tokens of a text file, and prepare the function `loss` if the model is a decoder.

    The loss is measured on windows of at most `WINDOW` tokens, and of at most the model's longest sequence.

    Args:
        opened: The model.
        text: The text file.

    Raises:
        FileError: The text cannot be read.
        TextError: The text has fewer than two tokens.
        TokenizerError: There is no tokenizer, or it has IDs outside the table.
    """
    import torch

    from embedlayer.compress.report import loss_on_text
    from embedlayer.data.corpus import read_text_chunks
    from embedlayer.errors import TextError
    from embedlayer.models.decoder import DecoderLM
    from embedlayer.vocab.token_usage import used_tokens

    found = opened.encode("".join(read_text_chunks(text)))
    starts = opened.text_limits[0][:1] if opened.adds_special_tokens else ()
    ids = torch.tensor(found if tuple(found[:1]) == starts else [*starts, *found])
    if len(ids) < 2:
        raise TextError(f"{text} is {len(ids)} tokens long: too short to measure on.")
    counts = torch.bincount(ids, minlength=opened.table.vocab_size)
    kept = len(used_tokens(opened.require_tokenizer(), text))
    if not isinstance(opened.model, DecoderLM):
        return TokenUse(counts, kept)
    limits = [WINDOW, opened.model.position.max_seq_len or WINDOW]
    if opened.run is not None and opened.run.contains_run:
        limits.append(opened.run.options().max_length)
    return TokenUse(counts, kept, loss_on_text(opened.model, ids, length=min(limits)))


def _side_by_side(opened: "OpenedModel", to: str | None, use: TokenUse) -> "list[CompressionResult]":
    """Compare the table with all kinds of compressed tables that suit its width.

    Args:
        opened: The model.
        to: Another kind to compare, such as `"int4-g32"`, or `None`.
        use: How a text uses the tokens.

    Returns:
        One result for each table, the original one first.
    """
    from embedlayer.compress.report import CHOICES, compare_compression

    width = opened.table.embed_dim
    choices = [choice for choice in CHOICES if width > 32 or "-g" not in choice]
    choices += [f"rank={rank}" for rank in (width // 2, width // 4) if rank]
    choices += [to] if to is not None and to not in choices else []
    return compare_compression(opened.table, choices, counts=use.counts, kept=use.kept, loss=use.loss)


def _write(opened: "OpenedModel", to: str, output: Path, use: TokenUse) -> "list[CompressionResult]":
    """Write the model with the compressed table to the folder `output`, which appears complete or not at all.

    Args:
        opened: The model; it does not change.
        to: Kind of the compressed table, such as `"int4-g32"`.
        output: The new folder.
        use: How a text uses the tokens; a low-rank table approximates frequent tokens best.

    Returns:
        The results for the original table and for the compressed table.
    """
    from embedlayer.checkpoints.embedding_layer import EmbeddingLayer
    from embedlayer.compress.convert import compress_table, replace_table
    from embedlayer.compress.report import compare_compression
    from embedlayer.io.files import create_folder, replace_folder, write_json
    from embedlayer.models.decoder import DecoderLM
    from embedlayer.pretrained import Pretrained
    from embedlayer.sources import GENERATION

    table = compress_table(opened.table, to, counts=use.counts)
    rows = compare_compression(opened.table, {to: table}, counts=use.counts, loss=use.loss)[:2]
    layer: Pretrained = table
    if opened.model is not None:
        layer = replace_table(opened.model, table)
    elif opened.kind == "file of vectors":
        layer = EmbeddingLayer(table, family="vectors")
    create_folder(output.parent)
    with replace_folder(output) as partial:
        layer.save_pretrained(partial, tokenizer=opened.vocabulary)
        if isinstance(layer, DecoderLM) and opened.adds_special_tokens and opened.vocabulary is not None:
            starts, ends = opened.text_limits
            write_json(partial / GENERATION, {"bos_token_id": [*starts], "eos_token_id": [*ends]})
    return rows


def _show(opened: "OpenedModel", rows: "Sequence[CompressionResult]") -> None:
    """Print a table with one line for each result, and below it notes on trimming and on an untied head."""
    from embedlayer.formatting import format_bytes

    console, table = make_console(), opened.table
    print_line(console, f"Table of {table.vocab_size:,} x {table.embed_dim}")
    headings = ["kind", "bytes", "of it", "row error", "nearest 10 kept"]
    headings += ["loss", "change"] if any(row.loss is not None for row in rows) else []
    lines = [
        [
            *(row.to, format_bytes(row.bytes), f"{row.share:.1%}", f"{row.row_error:.2%}"),
            *(_cell(row.neighbors, ".1%"), _cell(row.loss, ".4f"), _cell(row.loss_change, "+.4f")),
        ]
        for row in rows
    ]
    print_table(console, headings, lines)
    if any(row.to == "trim" for row in rows):
        click.echo("trim: the table without the rows that embedlayer vocab trim drops; the other rows are unchanged.")
    if opened.head is not None and not opened.head.tied:
        click.echo(f"The untied head keeps its own {format_bytes(opened.head.weight.nbytes)} unchanged.")


def _cell(value: float | None, form: str) -> str:
    """Return `value` in the format `form`, such as `.1%`, or `""` for `None`."""
    return "" if value is None else format(value, form)
