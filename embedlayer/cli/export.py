"""`embedlayer export`: a table as a file that other tools read."""

import json
from pathlib import Path

import click

FORMATS = ("word2vec", "word2vec-binary", "glove", "fasttext", "npy", "projector")


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="File; for projector a folder.")
@click.option("--format", type=click.Choice(FORMATS), help="Of the file.  [default: what its name says]")
@click.option("--tokenizer", "tokenizer_from", type=click.Path(path_type=Path), help="Use this tokenizer instead.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one line of JSON, and nothing else.")
def export(directory: Path, output: Path, format: str | None, tokenizer_from: Path | None, as_json: bool) -> None:
    """Write the table of a trained run, or of a LLaMA-type checkpoint, with its tokens.

    Spaces in tokens become "▁" where the format ends a token at a space. Rows without a token are left out.
    """
    import torch

    from embedlayer.checkpoints.formats import format_of, write_vectors
    from embedlayer.cli.generate import open_model

    opened = open_model(directory, tokenizer_from)
    table, tokenizer = opened.model.table, opened.tokenizer
    chosen = format_of(output, format)
    named = [(token, tokenizer.id_to_token(token)) for token in range(table.vocab_size)]
    ids = [token for token, piece in named if piece is not None]
    pieces = [piece for _, piece in named if piece is not None]
    if chosen not in ("npy", "projector"):
        pieces = [piece.replace(" ", "▁") for piece in pieces]
    with torch.no_grad():
        rows = table if len(ids) == table.vocab_size else table.rows(0, table.vocab_size)[ids]
        write_vectors(output, pieces, rows, chosen)
    if as_json:
        click.echo(json.dumps({"file": str(output), "format": chosen, "rows": len(ids), "columns": table.embed_dim}))
    else:
        click.echo(f"Wrote {len(ids):,} rows of {table.embed_dim} numbers as {chosen} to {output}")
