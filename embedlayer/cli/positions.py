"""`embedlayer positions`: extend the positions of a model to longer sequences, and undo that."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from embedlayer.cli.options import (
    EDITED,
    FOLDER,
    TEXT,
    chosen_device,
    json_option,
    new_model_option,
    tokenizer_option,
)
from embedlayer.cli.printing import make_console, print_json, print_line, print_table
from embedlayer.core.command_name import command_line
from embedlayer.core.errors import EmbedLayerError

if TYPE_CHECKING:
    from embedlayer.analysis.evaluation.positions import PositionLoss
    from embedlayer.vocab.context import ContextReceipt

METHODS = click.Choice(["linear", "dynamic", "yarn", "llama3", "longrope", "base", "interpolate", "extend", "repeat"])


@click.group()
def positions() -> None:
    """Extend the positions of a model to longer sequences, or undo that.

    The model is the folder of a run, a saved layer or a checkpoint, or a GGUF file. Rotary positions get other
    frequencies, and tables of learned positions more rows; configuration and tokenizer follow. Nothing is trained. The
    receipt in the result (of a GGUF file, beside it) undoes the edit.
    """


@positions.command()
@click.argument("directory", type=FOLDER)
@click.option("--to", "length", type=click.IntRange(min=2), required=True, help="Longest sequence, in tokens.")
@click.option(
    "--method",
    type=METHODS,
    help="Rotary: linear, dynamic, yarn, llama3, longrope, base. Tables: interpolate, extend, repeat.  [default: yarn "
    "or interpolate]",
)
@click.option("--base", type=float, help="base: the new base.  [default: NTK-aware]")
@click.option("--factors", type=TEXT, help="longrope: JSON file with short_factor and long_factor.")
@click.option("--original", type=click.IntRange(min=1), help="Trained length, if the configuration does not state it.")
@click.option("--replace", is_flag=True, help="Replace a scaling that the positions have already.")
@click.option("--text", type=TEXT, help="Measure the loss by position on this text, before and after.")
@tokenizer_option
@click.option("--device", default="auto", help="Device to measure on: cpu, cuda, ...")
@new_model_option
@json_option
def extend(
    directory: Path,
    length: int,
    method: str | None,
    base: float | None,
    factors: Path | None,
    original: int | None,
    replace: bool,
    text: Path | None,
    tokenizer_from: Path | None,
    device: str,
    output: Path,
    as_json: bool,
) -> None:
    """Extend the positions of the model in DIRECTORY, and print what changes for texts of the trained length.

    \b
    embedlayer positions extend llama --to 131072 --method yarn -o llama-128k
    embedlayer positions extend llama --to 131072 --text book.txt -o llama-128k
    embedlayer positions undo llama-128k -o llama-again
    """  # noqa: D301 (click needs the backspace)
    from embedlayer.io.files import read_json
    from embedlayer.vocab.context import extend_positions

    device = chosen_device(device)
    divisors = None if factors is None else read_json(factors)
    receipt = extend_positions(
        directory,
        length,
        method=method,
        base=base,
        factors=divisors,
        original_length=original,
        replace=replace,
        out=output,
    )
    if not as_json:  # before the losses, which may take long: the result is complete
        _show(receipt, output)
    losses = None if text is None else _measure(directory, output, receipt, text, tokenizer_from, device)
    if as_json:
        _print_json(receipt, output, losses)
    elif losses is not None:
        _show_losses(receipt, losses)


@positions.command()
@click.argument("directory", type=EDITED)
@new_model_option
@json_option
def undo(directory: Path, output: Path, as_json: bool) -> None:
    """Undo the last edit of the positions of the model in DIRECTORY, byte for byte, in a new folder or file."""
    from embedlayer.vocab.context import last_context_receipt

    receipt = last_context_receipt(directory)
    receipt.undo(directory, out=output)
    old, new = receipt.lengths
    if as_json:
        print_json({"directory": str(output), "tokens": [new, old]})
        return
    click.echo(f"Context  {new:,} -> {old:,} tokens, as before the edit\nWritten to {output}")


def _measure(
    before: Path, after: Path, receipt: "ContextReceipt", text: Path, tokenizer: Path | None, device: str
) -> "list[list[PositionLoss]] | None":
    """Return the losses of both models; `None` if they do not run here.

    The first one is that of texts of the trained length, the others are those by position in texts of the new length.
    """
    from embedlayer.analysis.evaluation.positions import PositionLoss, evaluate_positions
    from embedlayer.cli.evaluate import causal_model
    from embedlayer.opening.readers import open_model

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it reports missing tensors, which are an error here
    (old, new), results = receipt.lengths, []
    try:
        for folder in (before, after):
            model = causal_model(open_model(folder, tokenizer, device=device), device)
            is_table = folder == before and model.max_seq_len is not None and model.max_seq_len < new
            short = evaluate_positions(model, text, receipt.trained, receipt.trained)
            tokens = sum(each.tokens for each in short)
            loss = sum(each.loss * each.tokens for each in short) / tokens
            long = evaluate_positions(model, text, new, receipt.trained, read=old if is_table else None)
            results.append([PositionLoss(0, receipt.trained, loss, tokens), *long])
    except EmbedLayerError as error:
        click.echo(f"The loss is not measured here: {error}", err=True)
        return None
    return results


def _print_json(receipt: "ContextReceipt", output: Path, losses: "list[list[PositionLoss]] | None") -> None:
    """Print what an edit of positions changed, and the loss by position, as JSON."""
    summary: dict[str, Any] = {
        "directory": str(output),
        "tokens": list(receipt.lengths),
        "trained": receipt.trained,
        "method": receipt.method,
        "changes": [each._asdict() for each in receipt.changes],
        "left_out": list(receipt.left_out),
    }
    for name, loss in zip(("loss_before", "loss_after"), losses or (), strict=False):
        summary[name] = [each._asdict() for each in loss]
    print_json(summary)


def _show(receipt: "ContextReceipt", output: Path) -> None:
    """Print what an edit of positions changed, and how to undo it."""
    console = make_console()
    old, new = receipt.lengths
    print_line(console, f"Context  {old:,} -> {new:,} tokens by {receipt.method}, trained on {receipt.trained:,}")
    for each in receipt.changes:
        print_line(console, f"{f'{each.blocks} blocks: ' * bool(each.blocks)}{each.before} -> {each.after}")
        what = "of a cosine or sine" if each.before.startswith("base") else "of a number of the table"
        below = f"Largest change {what} below {receipt.trained:,} tokens: {each.largest_change:.3g}"
        print_line(console, below, indent=2)
    print_line(console, f"Written to {output}; undo with: {command_line('positions', 'undo', output, '-o', '...')}")


def _show_losses(receipt: "ContextReceipt", losses: "list[list[PositionLoss]]") -> None:
    """Print the loss by position before and after an edit."""
    console = make_console()
    before, after = ({(one.start, one.stop): f"{one.loss:.4f}" for one in loss} for loss in losses)
    names = {(0, receipt.trained): f"texts of {receipt.trained:,}"}
    rows = [
        [names.get(bounds, f"{bounds[0]:,} to {bounds[1]:,}"), before.get(bounds, "cannot"), loss]
        for bounds, loss in after.items()
    ]
    print_line(console, "Loss, nats per token")
    print_table(console, ["tokens before", "before the edit", "after it"], rows)
    if (measured := losses[1][-1].stop) < receipt.lengths[1]:
        print_line(console, f"The text ends after {measured:,} tokens; a longer one measures what is beyond.")
