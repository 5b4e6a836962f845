"""`embedlayer embed`: the vectors of a text after each step of the model."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from embedlayer.cli.options import SOURCE, json_option, tokenizer_option
from embedlayer.cli.printing import print_json

if TYPE_CHECKING:
    from torch import Tensor

    from embedlayer.explorer.pipeline import Pipeline
    from embedlayer.explorer.pipeline_steps import PipelineStep

SHOWN_NUMBERS = 6
SHOWN_TOKENS = 3
MOST_TOKENS = 1024


@click.command()
@click.argument("source", type=SOURCE)
@click.argument("text")
@tokenizer_option
@json_option
def embed(source: Path, text: str, tokenizer_from: Path | None, as_json: bool) -> None:
    """Show the vectors of TEXT after each step of the input embedding, and what the head predicts.

    The output lists tokens, IDs, rows, scale, positions and their sum, and for a decoder what its first block computes.
    Then follow the head's most likely next tokens with their logits, and the rows that get a gradient from the loss.
    """
    from embedlayer.explorer.pipeline import pipeline
    from embedlayer.opening.readers import open_model

    opened = open_model(source, tokenizer_from)
    opened.encode(text)  # an error of ours where the text cannot be encoded
    result = pipeline(
        opened.require_input(),
        opened.tokenizer,
        text,
        add_special_tokens=opened.adds_special_tokens,
        most_tokens=MOST_TOKENS,
        no_decoder=opened.no_decoder,
    )
    if as_json:
        print_json(_as_json(result))
        return
    click.echo(f"1 tokens     {' | '.join(token['text'] for token in result.tokens)}")
    click.echo(f"2 ids        {[token['id'] for token in result.tokens]}")
    if result.left_out:
        click.echo(f"             {result.left_out:,} more tokens are left out")
    for number, step in enumerate(result.steps[2:], start=3):
        click.echo(f"{number} {step.title.lower():<10} {step.note}")
        _show(step, [token["text"] for token in result.tokens])


def _show(step: "PipelineStep", names: list[str]) -> None:
    """Print what a step computed; nothing if it is none of the following."""
    if step.name == "head":
        click.echo(f"    {step.formula}")
        for name, top_tokens in zip(names, step.facts["top_tokens"], strict=True):
            said = "  ".join(
                f"{token['text']} {token['chance']:.1%} (z {token['logit']:.2f})" for token in top_tokens[:SHOWN_TOKENS]
            )
            click.echo(f"    {name:<16} {said}")
    elif step.name == "gradient":
        for row in step.facts["rows"]:
            click.echo(f"    {row['text']:<16} norm {row['norm']:8.4f}")
    elif step.name == "block":
        click.echo(f"    lengths of the vectors of {names[-1]}:")
        for vector, length in zip(step.facts["vectors"], step.values["lengths"][-1].tolist(), strict=True):
            click.echo(f"    {vector['symbol']:<2} {length:9.4f}  {vector['formula']}")
        lengths = "  ".join(f"{length:.4f}" for length in step.values["state_lengths"][-1].tolist())
        click.echo(f"    input of the first block, then the output of each: {lengths}")
    elif step.vectors is not None:
        width = min(16, max(len(name) for name in names))
        for name, row in zip(names, step.vectors, strict=True):
            numbers = " ".join(f"{number:8.4f}" for number in row[:SHOWN_NUMBERS].tolist())
            click.echo(f"    {name:<{width}} {numbers}{' ...' if len(row) > SHOWN_NUMBERS else ''}")


def _as_json(result: "Pipeline") -> dict[str, Any]:
    """Return all results of the pipeline as a dictionary for JSON."""
    steps = {step.name: step for step in result.steps}
    facts = {name: step.facts for name, step in steps.items()}
    vectors = result.vectors.unsqueeze(0)
    head = steps["head"].values if "head" in steps else {}
    return {
        "text": result.text,
        "tokens": [token["decoded"] for token in result.tokens],
        "ids": [token["id"] for token in result.tokens],
        "table": [result.vocab_size, result.embed_dim],
        "rows": _numbers(steps["look_up"].vectors),
        "scale": facts["scale"]["factor"] if facts["scale"]["scaled"] else None,
        "position": facts["position"]["scheme"],
        "added": _numbers(steps["position"].vectors),
        "shape": list(vectors.shape),
        "vectors": _numbers(vectors),
        "block": _block(steps["block"]) if "block" in steps else None,
        "head_formula": steps["head"].formula if "head" in steps else None,
        "before_norm": _numbers(head.get("before_norm")),
        "hidden": _numbers(head.get("hidden")),
        "logits": _numbers(head.get("logits")),
        "top_tokens": facts.get("head", {}).get("top_tokens"),
        "gradient": facts.get("gradient"),
    }


def _block(step: "PipelineStep") -> dict[str, Any]:
    """Return the vectors inside of the first block, and the lengths of all states, for JSON."""
    values = {vector["name"]: (step.values[vector["name"]], vector["size"]) for vector in step.facts["vectors"]}
    whole = {name: _numbers(rows) for name, (rows, size) in values.items() if rows.shape[-1] == size}
    return {**whole, **{name: _numbers(step.values[name]) for name in ("lengths", "state_lengths")}}


def _numbers(vectors: "Tensor | None") -> object:
    """Return vectors as nested lists, or `None`."""
    return None if vectors is None else vectors.tolist()
