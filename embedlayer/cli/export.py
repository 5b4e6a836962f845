"""`embedlayer export`: a table as a file that other tools read."""

import json
from pathlib import Path

import click

from embedlayer.cli.paths import TABLE_OR_HUB_NAME, TOKENIZER

FORMATS = ("word2vec", "word2vec-binary", "glove", "fasttext", "npy", "projector", "parquet")


@click.command()
@click.argument("directory", metavar="DIR|FILE", type=TABLE_OR_HUB_NAME)
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="File; for projector a folder.")
@click.option("--format", type=click.Choice(FORMATS), help="Of the file.  [default: what its name says]")
@click.option("--tokenizer", "tokenizer_from", type=TOKENIZER, help="Use this tokenizer instead.")
@click.option(
    "--neighbors",
    type=click.IntRange(min=0),
    default=15,
    show_default=True,
    help="Nearest tokens of each in a parquet file; exact, so slow for large tables.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as one line of JSON, and nothing else.")
def export(
    directory: Path, output: Path, format: str | None, tokenizer_from: Path | None, neighbors: int, as_json: bool
) -> None:
    """Write the table of a trained run, a checkpoint, a saved layer or a file of vectors, with its tokens.

    Spaces in tokens become "▁" where the format ends a token at a space. Rows without a token are left out. A parquet
    file is for embedding-atlas; it holds a map and neighbours in place of the rows.
    """
    import torch

    from embedlayer.analysis.rows import Rows
    from embedlayer.checkpoints.vector_files import format_of, write_vectors
    from embedlayer.checkpoints.tables import open_table
    from embedlayer.errors import TokenizerError
    from embedlayer.data.tokenizer import require_rows

    as_parquet = format == "parquet" or (format is None and output.suffix == ".parquet")
    chosen = None if as_parquet else format_of(output, format)
    opened = open_table(directory, tokenizer_from)
    rows, tokenizer = Rows(opened.table), opened.vocabulary
    if tokenizer is None:
        raise TokenizerError(f"{directory} has no tokenizer, so its rows have no names: give one with --tokenizer.")
    require_rows(tokenizer, len(rows), directory)
    if chosen is None:
        from embedlayer.analysis.atlas import write_atlas

        count = write_atlas(output, opened.table, tokenizer, num_neighbors=neighbors)
    else:
        named = [(token, tokenizer.id_to_token(token)) for token in range(len(rows))]
        ids = [token for token, piece in named if piece is not None]
        pieces = [piece for _, piece in named if piece is not None]
        if chosen not in ("npy", "projector"):
            pieces = [piece.replace(" ", "▁") for piece in pieces]
        with torch.no_grad():
            kept = opened.table if len(ids) == len(rows) else rows.take(torch.tensor(ids))
            write_vectors(output, pieces, kept, chosen)
        count = len(ids)
    name = chosen or "parquet"
    if as_json:
        click.echo(json.dumps({"file": str(output), "format": name, "rows": count, "columns": rows.embed_dim}))
    else:
        click.echo(f"Wrote {count:,} rows of {rows.embed_dim} numbers as {name} to {output}")
