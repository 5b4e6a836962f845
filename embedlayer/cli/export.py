"""`embedlayer export`: write a table as a file that other tools read."""

import json
from pathlib import Path

import click

from embedlayer.cli.options import GGUF_FILE, SOURCE, json_option, tokenizer_option
from embedlayer.errors import FileError

FORMATS = ("word2vec", "word2vec-binary", "glove", "fasttext", "npy", "projector", "parquet", "gguf")


@click.command()
@click.argument("source", type=SOURCE)
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="File; for projector a folder.")
@click.option("--format", type=click.Choice(FORMATS), help="Format of the file.  [default: by its name]")
@tokenizer_option
@click.option("--into", type=GGUF_FILE, help="For gguf: the file to copy with the new table and tokens.")
@click.option(
    "--neighbors",
    type=click.IntRange(min=0),
    default=15,
    help="Nearest neighbours per token in a parquet file; the search is exact, so slow for large tables.",
)
@json_option
def export(
    source: Path,
    output: Path,
    format: str | None,
    tokenizer_from: Path | None,
    into: Path | None,
    neighbors: int,
    as_json: bool,
) -> None:
    """Write a table for other tools.

    The file contains the rows of the table of SOURCE, with their tokens.

    SOURCE is a run, a saved layer, a checkpoint (a folder, a file, or owner/name on the hub), or a file of vectors.
    Spaces in tokens become "▁" in formats that end a token at a space. Rows without a token are left out. A parquet
    file is for embedding-atlas: it contains a map and neighbours instead of the rows.

    A gguf file is a copy of the file --into, in which the table, an untied head and the tokens are those of SOURCE. All
    other tensors are copied byte for byte, and rows that did not change keep their bytes.
    """
    import torch

    from embedlayer.analysis.row_reader import RowReader
    from embedlayer.checkpoints.vector_files import format_of, write_vectors
    from embedlayer.sources import open_model

    as_gguf = format == "gguf" or (format is None and output.suffix == ".gguf")
    if as_gguf != (into is not None):
        raise FileError("A gguf file is a copy of another one: name that file with --into, and the format gguf.")
    as_parquet = format == "parquet" or (format is None and output.suffix == ".parquet")
    chosen = None if as_parquet or as_gguf else format_of(output, format)
    opened = open_model(source, tokenizer_from)
    rows, tokenizer = RowReader(opened.table), opened.require_tokenizer()
    name = chosen or ("gguf" if as_gguf else "parquet")
    if into is not None:
        from embedlayer.vocab.gguf_files import new_file, write_into_gguf

        write_into_gguf(opened.table, tokenizer, into, new_file(source, output), head=opened.untied_head)
        count = len(rows)
    elif chosen is None:
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
    facts = {"file": str(output), "format": name, "rows": count, "columns": rows.embed_dim}
    text = f"Wrote {count:,} rows of {rows.embed_dim} numbers as {name} to {output}"
    click.echo(json.dumps(facts) if as_json else text)
