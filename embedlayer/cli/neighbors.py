"""`embedlayer neighbors`: the nearest neighbours of a token by cosine similarity."""

from pathlib import Path

import click

from embedlayer.cli.options import SOURCE, json_option, token_or_id, tokenizer_option
from embedlayer.cli.printing import print_json
from embedlayer.core import visible_text


@click.command()
@click.argument("source", type=SOURCE)
@click.argument("tokens", nargs=-1, required=True, metavar="TOKEN...", type=token_or_id)
@click.option(
    "--minus", multiple=True, metavar="TOKEN", type=token_or_id, help="Token whose row is subtracted; may be repeated."
)
@click.option("-n", "--topn", type=click.IntRange(min=1), default=10, help="Number of neighbours.")
@tokenizer_option
@json_option
def neighbors(
    source: Path,
    tokens: tuple[str | int, ...],
    minus: tuple[str | int, ...],
    topn: int,
    tokenizer_from: Path | None,
    as_json: bool,
) -> None:
    """List the nearest neighbours of TOKEN, or of a sum of tokens.

    Neighbours are ranked by cosine similarity of their rows in the table. The rows of a sum are scaled to length 1
    first, and its own tokens are left out.

    SOURCE is a run, a saved layer, a checkpoint (a folder, a file, or owner/name on the hub), or a file of vectors.
    TOKEN is text that is one token, with its leading space if it has one: " first". Or it is an ID: "#304". IDs need no
    tokenizer.

    \b
    embedlayer neighbors DIR " first"
    embedlayer neighbors FILE king woman --minus man
    embedlayer neighbors DIR "#304"
    """  # noqa: D301 (click needs the backspace)
    from embedlayer.analysis.vectors import TokenVectors
    from embedlayer.opening.readers import open_model

    opened = open_model(source, tokenizer_from, parts="table")
    if all(isinstance(token, int) for token in (*tokens, *minus)):
        opened = opened.tokens_by_row()
    vectors = TokenVectors(opened.table, opened.require_tokenizer())
    nearest = vectors.most_similar([*tokens], [*minus], topn=topn)
    if as_json:
        rows = [{"token": text, "cosine": score} for text, score in nearest]
        plus_ids, minus_ids = ([*map(vectors.id_of, each)] for each in (tokens, minus))
        content = {"tokens": tokens, "ids": plus_ids, "minus": minus, "minus_ids": minus_ids, "neighbors": rows}
        print_json(content)
        return
    for text, score in nearest:
        click.echo(f"{score:7.4f}  {visible_text(text)}")
