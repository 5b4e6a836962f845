"""`embedlayer export`: write a table as a file that other tools read."""

import json
from pathlib import Path

import click

from embedlayer.cli.options import SOURCE, json_option, tokenizer_option

FORMATS = ("word2vec", "word2vec-binary", "glove", "fasttext", "npy", "projector", "parquet", "onnx")


@click.command()
@click.argument("source", type=SOURCE)
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="File; for projector a folder.")
@click.option("--format", type=click.Choice(FORMATS), help="Format of the file.  [default: by its name]")
@tokenizer_option
@click.option(
    "--neighbors",
    type=click.IntRange(min=0),
    default=15,
    help="Nearest neighbours per token in a parquet file; the search is exact, so slow for large tables.",
)
@json_option
def export(
    source: Path, output: Path, format: str | None, tokenizer_from: Path | None, neighbors: int, as_json: bool
) -> None:
    """Write a table for other tools.

    The file contains the rows of the table of SOURCE, with their tokens.

    SOURCE is a run, a saved layer, a checkpoint (a folder, a file, or owner/name on the hub), or a file of vectors.
    Spaces in tokens become "▁" in formats that end a token at a space. Rows without a token are left out. A parquet
    file is for embedding-atlas: it contains a map and neighbours instead of the rows. An onnx file computes look-ups
    and, if the head is tied, logits; it needs a table that embedlayer compress wrote with --to q4_0 or q8_0.
    """
    import torch

    from embedlayer.analysis.row_reader import RowReader
    from embedlayer.checkpoints.vector_files import format_of, write_vectors
    from embedlayer.sources import open_model

    if format == "onnx" or (format is None and output.suffix == ".onnx"):
        _export_onnx(source, output, tokenizer_from, as_json=as_json)
        return
    as_parquet = format == "parquet" or (format is None and output.suffix == ".parquet")
    chosen = None if as_parquet else format_of(output, format)
    opened = open_model(source, tokenizer_from)
    rows, tokenizer = RowReader(opened.table), opened.require_tokenizer()
    if chosen is None:
        from embedlayer.analysis.atlas import write_atlas

        count = write_atlas(output, opened.table, tokenizer, num_neighbors=neighbors)
    else:
        named = [(row, tokenizer.id_to_token(row)) for row in range(len(rows))]
        ids = [row for row, token in named if token is not None]
        tokens = [token for _, token in named if token is not None]
        if chosen not in ("npy", "projector"):
            tokens = [token.replace(" ", "▁") for token in tokens]
        with torch.no_grad():
            kept = opened.table if len(ids) == len(rows) else rows.take(torch.tensor(ids))
            write_vectors(output, tokens, kept, chosen)
        count = len(ids)
    _report(output, chosen or "parquet", count, rows.embed_dim, as_json=as_json)


def _export_onnx(source: Path, output: Path, tokenizer_from: Path | None, *, as_json: bool) -> None:
    """Write the table of a source as an ONNX file, with logits unless the model's head is untied."""
    from embedlayer.compress.onnx_export import export_onnx
    from embedlayer.sources import open_model

    opened = open_model(source, tokenizer_from)
    export_onnx(opened.table, output, logits=opened.head is None or opened.head.tied)
    _report(output, "onnx", opened.table.vocab_size, opened.table.embed_dim, as_json=as_json)


def _report(output: Path, name: str, count: int, embed_dim: int, *, as_json: bool) -> None:
    """Print the file, its format and the number of its rows and columns."""
    facts = {"file": str(output), "format": name, "rows": count, "columns": embed_dim}
    text = f"Wrote {count:,} rows of {embed_dim} numbers as {name} to {output}"
    click.echo(json.dumps(facts) if as_json else text)
