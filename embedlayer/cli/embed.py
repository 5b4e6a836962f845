"""`embedlayer embed`: the way in, step by step."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from torch import Tensor

SHOWN_NUMBERS = 6


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("text")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with every number of the result.")
def embed(directory: Path, text: str, as_json: bool) -> None:
    """Show how TEXT becomes vectors in a trained layer: pieces, IDs, rows, scale, positions, result."""
    from embedlayer.training.run_directory import load_run

    steps = pipeline(*load_run(directory), text)
    if as_json:
        click.echo(json.dumps(steps, default=lambda tensor: tensor.tolist()))
        return
    from embedlayer.plots import visible_text

    click.echo(f"1 pieces     {' | '.join(visible_text(piece) for piece in steps['pieces'])}")
    click.echo(f"2 ids        {steps['ids']}")
    click.echo(f"3 rows       looked up in a table of {steps['table'][0]:,} x {steps['table'][1]}")
    _show_rows(steps["pieces"], steps["rows"])
    click.echo("4 scale      " + ("none" if steps["scale"] is None else f"each row times {steps['scale']:.6g}"))
    if steps["added"] is None:
        click.echo(f"5 positions  {steps['position']}: adds nothing here, it acts inside attention")
    else:
        click.echo(f"5 positions  {steps['position']}: adds a vector for each position")
        _show_rows([f"position {place}" for place in range(len(steps["ids"]))], steps["added"])
    click.echo(f"6 result     shape {tuple(steps['shape'])}")
    _show_rows(steps["pieces"], steps["vectors"][0])


def pipeline(model: Any, tokenizer: Any, text: str) -> dict[str, Any]:
    """Every step from `text` to what enters the first block, by name.

    Raises:
        TextError: The text has no tokens.
    """
    import torch

    from embedlayer.errors import TextError
    from embedlayer.layers.input import embed as embedded
    from embedlayer.positions.position import positions_of
    from embedlayer.text.tokenizer import token_text

    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if not ids:
        raise TextError(f"{text!r} has no tokens: there is nothing to look up.")
    table, position = model.table, model.position
    batch = torch.tensor([ids])
    with torch.no_grad():
        vectors = embedded(batch, table, position)
        added = position.add(torch.zeros_like(vectors), positions_of(batch))[0]
        rows = torch.cat([table.rows(token, token + 1) for token in ids])
    return {
        "text": text,
        "pieces": [token_text(tokenizer, token) for token in ids],
        "ids": ids,
        "table": [table.vocab_size, table.embed_dim],
        "rows": rows,
        "scale": table.scale,
        "position": type(position).__name__,
        "added": added if added.any() else None,
        "shape": list(vectors.shape),
        "vectors": vectors,
    }


def _show_rows(names: list[str], rows: "Tensor") -> None:
    from embedlayer.plots import visible_text

    width = min(16, max(len(visible_text(name)) for name in names))
    for name, row in zip(names, rows, strict=True):
        numbers = " ".join(f"{number:8.4f}" for number in row[:SHOWN_NUMBERS].tolist())
        click.echo(f"    {visible_text(name):<{width}} {numbers}{' ...' if len(row) > SHOWN_NUMBERS else ''}")
