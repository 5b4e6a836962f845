"""`embedlayer neighbors`: the nearest neighbours of a token by cosine similarity."""

import json
from pathlib import Path

import click

from embedlayer.cli.options import SOURCE, json_option, tokenizer_option


@click.command()
@click.argument("source", type=SOURCE)
@click.argument("token")
@click.option("-n", "--topn", type=click.IntRange(min=1), default=10, help="Number of neighbours.")
@tokenizer_option
@json_option
def neighbors(source: Path, token: str, topn: int, tokenizer_from: Path | None, as_json: bool) -> None:
    """List the nearest neighbours of TOKEN.

    Neighbours are ranked by cosine similarity of their rows in the table.

    SOURCE is a run, a saved layer, a checkpoint (a folder, a file, or owner/name on the hub), or a file of vectors.
    TOKEN is text that is one token, with its leading space if it has one: " first".
    """
    from embedlayer.analysis.vectors import TokenVectors
    from embedlayer.plots import visible_text
    from embedlayer.sources import open_model

    opened = open_model(source, tokenizer_from)
    vectors = TokenVectors(opened.table, opened.require_tokenizer())
    found = vectors.most_similar(token, topn=topn)
    if as_json:
        rows = [{"token": text, "cosine": score} for text, score in found]
        click.echo(json.dumps({"token": token, "id": vectors.id_of(token), "neighbors": rows}))
        return
    for text, score in found:
        click.echo(f"{score:7.4f}  {visible_text(text)}")
