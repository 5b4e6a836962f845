"""`embedlayer positions`: the rotary positions of a checkpoint for longer sequences."""

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from embedlayer.cli.options import (
    NEW_FOLDER,
    TEXT,
    InputPath,
    chosen_device,
    json_option,
    tokenizer_option,
)
from embedlayer.cli.printing import make_console, print_json, print_line, print_table
from embedlayer.core.errors import EmbedLayerError
from embedlayer.opening.path_kinds import CONFIG, GENERATION, TOKENIZER, TOKENIZER_CONFIG, PathKind

if TYPE_CHECKING:
    from embedlayer.analysis.text_evaluation import PositionLoss
    from embedlayer.io.files import JsonObject
    from embedlayer.positions.rotary.embedding import RotaryEmbedding
    from embedlayer.positions.rotary.extension import RotaryExtension

CHECKPOINT = InputPath(
    "the folder of a checkpoint of transformers: set model.position of a run or a saved layer in Python, and convert a "
    "GGUF file again from its extended folder",
    *(PathKind.CHECKPOINT, PathKind.FOLDER),
)
METHODS = click.Choice(["linear", "dynamic", "yarn", "llama3", "longrope", "base"])
LENGTHS = {
    TOKENIZER_CONFIG: "model_max_length",
    GENERATION: "max_length",
    "sentence_bert_config.json": "max_seq_length",
}
"""Files that state the longest sequence in addition to the configuration, and the key of each."""

EXPORTED = ("*.onnx", "*.onnx_data*", "*.ort", "onnx", "openvino*", "*.gguf", "*.tflite", "*.mlmodel", "*.engine")
"""Exported models, which contain the old frequencies and are not copied."""


@click.group()
def positions() -> None:
    """Give a checkpoint rotary frequencies for longer sequences. Nothing is trained."""


@positions.command()
@click.argument("directory", type=CHECKPOINT)
@click.option("--to", "length", type=click.IntRange(min=2), required=True, help="Longest sequence, in tokens.")
@click.option("--method", type=METHODS, default="yarn", show_default=True, help="Scaling of the frequencies.")
@click.option("--base", type=float, help="base: the new base.  [default: NTK-aware]")
@click.option("--factors", type=TEXT, help="longrope: JSON file with short_factor and long_factor.")
@click.option("--original", type=click.IntRange(min=1), help="Trained length, if the configuration does not state it.")
@click.option("--replace", is_flag=True, help="Replace a scaling that the positions have already.")
@click.option("--text", type=TEXT, help="Measure the loss by position on this text, before and after.")
@tokenizer_option
@click.option("--device", default="auto", help="Device to measure on: cpu, cuda, ...")
@click.option("-o", "--output", required=True, type=NEW_FOLDER, help="New folder for the result.")
@json_option
def extend(
    directory: Path,
    length: int,
    method: str,
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
    """Copy the checkpoint in DIRECTORY with rotary positions for longer texts, and print what changes for short ones.

    \b
    embedlayer positions extend llama --to 131072 --method yarn -o llama-128k
    embedlayer positions extend llama --to 131072 --text book.txt -o llama-128k
    """  # noqa: D301 (click needs the backspace)
    from embedlayer.io.files import read_json
    from embedlayer.positions.rotary.extension import extend_rotary

    device = chosen_device(device)
    longer = extend_rotary(
        read_json(directory / CONFIG),
        length,
        method,
        base=base,
        factors=None if factors is None else read_json(factors),
        original_length=original,
        replace=replace,
    )
    left_out = _write_copy(directory, output, longer, length)
    trained = longer.original_length
    summary: dict[str, Any] = {
        "directory": str(output),
        "tokens": [longer.old_length, length],
        "trained": trained,
        "method": method,
        "changes": [
            {
                "blocks": each.blocks,
                "before": _shown(each.before),
                "after": _shown(each.after),
                "largest_change": each.largest(trained),
            }
            for each in longer.changes
        ],
        "left_out": left_out,
    }
    if not as_json:  # before the losses, which may take long: the result is complete
        _show(directory, summary)
    losses = None if text is None else _measure((directory, output), length, trained, text, tokenizer_from, device)
    if as_json:
        for name, loss in zip(("loss_before", "loss_after"), losses or (), strict=False):
            summary[name] = [each._asdict() for each in loss]
        print_json(summary)
    elif losses is not None:
        _show_losses(losses, length, trained)


def _write_copy(source: Path, output: Path, longer: "RotaryExtension", length: int) -> list[str]:
    """Write a copy of a folder with an extended configuration, and return the names of the files that it lacks."""
    from embedlayer.families.left_out_files import files_to_copy
    from embedlayer.io.files import new_folder, read_json, write_json

    changed: dict[str, JsonObject] = {CONFIG: longer.config}
    for name, key in LENGTHS.items():
        content = read_json(source / name) if (source / name).is_file() else {}
        value, is_shorter = content.get(key), name == TOKENIZER_CONFIG
        if type(value) is int and (value == longer.old_length or (is_shorter and 0 < value < length)):
            changed[name] = {**content, key: length}
    tokenizer = read_json(source / TOKENIZER) if (source / TOKENIZER).is_file() else {}
    truncation = tokenizer.get("truncation")
    if isinstance(truncation, dict) and truncation.get("max_length") == longer.old_length:
        changed[TOKENIZER] = {**tokenizer, "truncation": {**truncation, "max_length": length}}
    exported = {path for pattern in EXPORTED for path in source.glob(pattern)}
    left_out = sorted(f"{path.name}/" if path.is_dir() else path.name for path in exported)
    with new_folder(output) as partial:
        for name in files_to_copy(source, partial, left_out):
            if name in changed:
                write_json(partial / name, changed[name])
            else:
                shutil.copyfile(source / name, partial / name)
    return left_out


def _shown(scheme: "RotaryEmbedding") -> str:
    """Return the base and the scaling of a scheme as short text, without lists of divisors."""
    if scheme.scaling is None:
        return f"base {scheme.base:g}"
    values = {name: value for name, value in vars(scheme.scaling).items() if isinstance(value, int | float)}
    shown = ", ".join(f"{name}={value}" for name, value in values.items())
    return f"base {scheme.base:g}, {type(scheme.scaling).__name__}({shown})"


def _measure(
    folders: tuple[Path, Path], length: int, trained: int, text: Path, tokenizer: Path | None, device: str
) -> "list[list[PositionLoss]] | None":
    """Return the losses of both models; `None` if they do not run here."""
    from embedlayer.analysis.text_evaluation import PositionLoss, evaluate_positions
    from embedlayer.cli.evaluate import causal_model
    from embedlayer.opening.readers import open_model

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it reports missing tensors, which are an error here
    results = []
    try:
        for folder in folders:
            model = causal_model(open_model(folder, tokenizer, device=device), device)
            short = evaluate_positions(model, text, trained, trained)
            tokens = sum(each.tokens for each in short)
            loss = sum(each.loss * each.tokens for each in short) / tokens
            results.append([PositionLoss(0, trained, loss, tokens), *evaluate_positions(model, text, length, trained)])
    except EmbedLayerError as error:
        click.echo(f"The loss is not measured here: {error}", err=True)
        return None
    return results


def _show(source: Path, summary: dict[str, Any]) -> None:
    """Print what changed in the copy of a folder."""
    console = make_console()
    (old, new), trained = summary["tokens"], summary["trained"]
    print_line(console, f"Context  {old:,} -> {new:,} tokens by {summary['method']}, trained on {trained:,}")
    for each in summary["changes"]:
        print_line(console, f"{each['blocks']} blocks: {each['before']} -> {each['after']}")
        below = f"Largest change of a cosine or sine below {trained:,} tokens: {each['largest_change']:.3g}"
        print_line(console, below, indent=2)
    if summary["left_out"]:
        print_line(console, f"Left out, export again: {', '.join(summary['left_out'])}")
    print_line(console, f"Written to {summary['directory']}")
    print_line(console, f"{source} is unchanged; to undo, delete {summary['directory']}.")


def _show_losses(losses: "list[list[PositionLoss]]", length: int, trained: int) -> None:
    """Print the loss by position before and after."""
    console = make_console()
    rows = [
        [f"{after.start:,} to {after.stop:,}", f"{before.loss:.4f}", f"{after.loss:.4f}"]
        for before, after in zip(*losses, strict=True)
    ]
    rows[0][0] = f"texts of {trained:,}"
    print_line(console, "Loss, nats per token")
    print_table(console, ["tokens before", "before the edit", "after it"], rows)
    if (measured := losses[1][-1].stop) < length:
        print_line(console, f"The text ends after {measured:,} tokens; a longer one measures what is beyond.")
