"""`embedlayer evaluate`: how well a model predicts a text, and how another model differs from it."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from embedlayer.cli.options import SOURCE, TEXT, chosen_device, json_option, tokenizer_option
from embedlayer.cli.printing import make_console, print_json, print_line, print_table
from embedlayer.core.formatting import visible_text
from embedlayer.opening.path_kinds import BLOCKS, CONFIG

if TYPE_CHECKING:
    from embedlayer.analysis.text_evaluation import CausalModel, TextEvaluation
    from embedlayer.opening.opened_model import OpenedModel


SCORES = {
    "bits per byte": ("bits_per_byte", ".4f"),
    "loss, nats per token": ("loss", ".4f"),
    "entropy, nats per token": ("entropy", ".4f"),
    "most likely token is right": ("accuracy", ".1%"),
    "tokens": ("tokens", ","),
}
"""Name of each score in the table -> attribute of `ModelScores`, and format."""


@click.command()
@click.argument("model", type=SOURCE)
@click.argument("other", required=False, type=SOURCE)
@click.option("--text", required=True, type=TEXT, help="The text: a UTF-8 file, or .gz. Use one of no training text.")
@click.option(
    "--window",
    type=click.IntRange(min=2),
    help="Tokens that a model reads at once.  [default: the trained length, or up to 1,024, at most the text]",
)
@click.option(
    "--stride", type=click.IntRange(min=1), help="Tokens from one window to the next.  [default: half a window]"
)
@click.option("-n", "--topn", type=click.IntRange(min=0), default=10, help="Tokens in each list.")
@tokenizer_option
@click.option("--device", default="auto", help="Device to run on: cpu, cuda, ...")
@json_option
def evaluate(
    model: Path,
    other: Path | None,
    text: Path,
    window: int | None,
    stride: int | None,
    topn: int,
    tokenizer_from: Path | None,
    device: str,
    as_json: bool,
) -> None:
    """Measure how well MODEL predicts a text, and how OTHER differs from it.

    MODEL and OTHER are causal language models: runs, saved decoders, or checkpoints (a folder or a file). Checkpoints
    that are not of LLaMA type are loaded by transformers. A tokenizer that you name is that of MODEL, and of OTHER if
    that has none. Two models with one tokenizer are also compared at each token.

    \b
    embedlayer evaluate run --text book.txt
    embedlayer evaluate run smaller --text book.txt --json
    """  # noqa: D301 (click needs the backspace)
    from embedlayer.analysis.text_evaluation import evaluate_text
    from embedlayer.opening.readers import open_model

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it reports missing tensors, which are an error here
    device = chosen_device(device)
    first = open_model(model, tokenizer_from, device=device)
    second = None if other is None else open_model(other, device=device)
    if second is not None and second.tokenizer is None and tokenizer_from is not None:
        second = open_model(second.source, tokenizer_from, device=device)
    models = [None if one is None else causal_model(one, device) for one in (first, second)]
    assert models[0] is not None
    evaluation = evaluate_text(models[0], text, models[1], window=window, stride=stride)
    if as_json:
        print_json({"text": str(text), "context": evaluation.context, **asdict(evaluation)})
    else:
        _show(evaluation, text, topn)


def causal_model(opened: "OpenedModel", device: str) -> "CausalModel":
    """Return the causal model of a source; transformers loads the blocks that `embedlayer compress` copied."""
    from embedlayer.analysis.text_evaluation import CausalModel
    from embedlayer.compress.transformers_models import load_model
    from embedlayer.models.decoder import DecoderLM

    if isinstance(opened.model, DecoderLM) or not (Path(opened.source) / BLOCKS / CONFIG).exists():
        return CausalModel.of(opened)
    return CausalModel.of(opened, load_model(opened.source, device=device))


def _show(evaluation: "TextEvaluation", text: Path, topn: int) -> None:
    """Print the scores, how the models differ, and the tokens that matter most."""
    console = make_console()
    models = [evaluation.model] if evaluation.other is None else [evaluation.model, evaluation.other]
    titles = [each.title for each in models]
    print_line(console, f"{text}: {evaluation.model.bytes:,} bytes")
    print_line(console, evaluation.context, indent=2)
    print_table(
        console,
        ["", *titles],
        [[name, *(format(getattr(each, score), form) for each in models)] for name, (score, form) in SCORES.items()],
    )
    for each in models:
        if each.unknown:
            note = f"{each.title}: {each.unknown:,} tokens are the unknown token, so its bits per byte are too low."
            print_line(console, note, indent=2)
    if evaluation.difference is not None:
        difference = evaluation.difference
        named = f"KL({titles[0]} || {titles[1]})"
        print_line(console, f"{named}: {difference.kl:.4f} nats per token", indent=2)
        print_line(console, f"The same most likely token at {difference.agreement:.1%} of the places", indent=2)
        print_line(console, "\nTokens whose summed loss changed most, losses in nats")
        lines = [
            [visible_text(one.token), f"{one.count:,}", f"{one.loss:.3f}", f"{one.other_loss:.3f}", f"{one.kl:.4f}"]
            for one in difference.by_token[:topn]
        ]
        print_table(console, ["token", "count", "loss", "loss of other", "KL"], lines)
        return
    if evaluation.no_difference:
        print_line(console, evaluation.no_difference, indent=2)
    for each in models:
        print_line(console, f"\nTokens that raise the loss of {each.title} most, in nats")
        lines = [
            [visible_text(one.token), f"{one.count:,}", f"{one.loss:.3f}", f"{one.entropy:.3f}"]
            for one in each.by_token[:topn]
        ]
        print_table(console, ["token", "count", "loss", "entropy"], lines)
