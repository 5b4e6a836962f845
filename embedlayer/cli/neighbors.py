"""`embedlayer neighbors`: which tokens a trained table holds for alike."""

import json
from pathlib import Path

import click

from embedlayer.cli.paths import RUN


@click.command()
@click.argument("directory", type=RUN)
@click.argument("token")
@click.option("-n", "--topn", default=10, show_default=True, help="How many.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def neighbors(directory: Path, token: str, topn: int, as_json: bool) -> None:
    """List the tokens nearest to TOKEN, by cosine, in the table of a trained layer.

    TOKEN is text that is one token, with its leading space if it has one: " first".
    """
    from embedlayer.analysis.vectors import TokenVectors
    from embedlayer.plots import visible_text
    from embedlayer.training.run_directory import load_run

    model, tokenizer = load_run(directory)
    vectors = TokenVectors(model.table, tokenizer)
    near = vectors.most_similar(token, topn=topn)
    if as_json:
        rows = [{"token": text, "cosine": score} for text, score in near]
        click.echo(json.dumps({"token": token, "id": vectors.id_of(token), "neighbors": rows}))
        return
    for text, score in near:
        click.echo(f"{score:7.4f}  {visible_text(text)}")
