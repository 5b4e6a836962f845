"""The result of a finished run: losses, what its table learned, neighbours; and `embedlayer report`, its page."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from embedlayer.cli.options import RUN
from embedlayer.cli.printing import make_console, print_facts, print_json, print_line
from embedlayer.cli.training_runs import neighbors_of
from embedlayer.core.errors import FileError
from embedlayer.core.formatting import visible_text

if TYPE_CHECKING:
    from embedlayer.models.decoder import DecoderLM
    from embedlayer.opening.opened_model import OpenedModel
    from embedlayer.training.run_directory import RunDirectory

FREQUENT = 50  # occurrences in the text from which on the neighbours of a token in the demo make sense


def summarise(directory: "RunDirectory", model: "DecoderLM") -> dict[str, Any]:
    """Return the figures of a finished run: losses in nats per token, sizes, and tokens per second."""
    import statistics

    metrics = directory.read_metrics()
    validated = [line for line in metrics if "validation_loss" in line]
    first, rest = metrics[:1], metrics[1:]
    whole = all("loss" in line for line in first) and all("tokens_per_second" in line for line in rest)
    whole = whole and all("validation_bits_per_byte" in line for line in validated)
    if not (validated and rest and whole) or metrics[0]["step"] != 0:
        raise FileError(f"{directory.metrics} is not the record of a finished run. Train again, or resume the run.")
    best = directory.validation()
    assert best is not None  # a line was validated
    run = directory.read()
    weights, losses = run.get("weights", []), best.get("validation_losses", [])
    names = run["notes"].get("sources", [str(number) for number in range(len(weights))])
    return {
        "directory": str(directory.path),
        "first_loss": metrics[0]["loss"],
        "ln_vocab_size": math.log(model.table.vocab_size),
        "validation_loss": best["validation_loss"],
        "validation_bits_per_byte": best["validation_bits_per_byte"],
        "best_step": best["step"],
        "last_validation_loss": validated[-1]["validation_loss"],
        "corpora": [
            {"source": name, "weight": weight, "validation_loss": corpus_loss}
            for name, weight, corpus_loss in zip(names, weights, losses, strict=True)
        ],
        "steps": metrics[-1]["step"],
        "tokens_per_second": round(statistics.median([line["tokens_per_second"] for line in rest])),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "table_parameters": sum(parameter.numel() for parameter in model.table.parameters()),
    }


def what_was_learned(opened: "OpenedModel") -> dict[str, Any] | None:
    """Return what the table of a run learned, and what it did not, as figures for `show_summary` and `--json`."""
    from embedlayer.analysis.row_verdicts import VERDICTS
    from embedlayer.explorer.health import table_report

    health, counts = table_report(opened), opened.counts
    if counts is None or health.loss is None:
        return None
    return {
        "rows": {verdict.replace(" ", "_"): health.verdicts.count(verdict) for verdict in VERDICTS},
        "sentence": health.verdicts.sentence(),
        "frequent": int((counts >= FREQUENT).sum()),
        "unigram_entropy": health.loss.unigram_entropy,
        "gain": health.loss.gain,
        "is_little": health.loss.is_little,
        "is_sound": health.is_sound,
        "verdict": health.summary(),
    }


def show_summary(summary: dict[str, Any], *, as_json: bool) -> None:
    """Print the figures of a run as a readable report, or as one line of JSON."""
    if as_json:
        print_json(summary)
        return
    console, loss = make_console(), "{:.3f} nats per token".format
    speed, guess = f"{summary['tokens_per_second']:,} tokens/s", f"{summary['ln_vocab_size']:.2f}"
    whole, part = (f"{summary[name] / 1e6:.2f} M" for name in ("parameters", "table_parameters"))
    bits = f"{summary['validation_bits_per_byte']:.3f} bits per byte, at step {summary['best_step']:,}"
    print_line(console, "\nResult")
    facts = [
        ("trained", f"{summary['steps']:,} steps", speed),
        ("parameters", whole, f"{part} in the table"),
        ("first loss", loss(summary["first_loss"]), f"a uniform guess has ln V = {guess}"),
        ("held-out text", loss(summary["validation_loss"]), f"{bits}; the weights of this step are kept"),
    ]
    whole_weight = sum(corpus["weight"] for corpus in summary["corpora"])
    for corpus in summary["corpora"]:
        share = f"{corpus['weight'] / whole_weight:.1%} of the windows"
        facts.append((f"  {Path(corpus['source']).name}", loss(corpus["validation_loss"]), share))
    if summary["best_step"] != summary["steps"]:
        facts.append(("at the last step", loss(summary["last_validation_loss"]), "on held-out text"))
    units = "probability e^-x of the next token; bits per byte: sum / ln 2 / bytes of text"
    facts.append(("units", "a loss of x nats", units))
    print_facts(console, facts)
    print_line(console, "\nNearest neighbours by cosine similarity (· is a space)")
    facts = [("token", "before training", "after training")]
    for row in summary["neighbors"]:
        before, after = ("  ".join(visible_text(text) for text, _ in row[when][:5]) for when in ("before", "after"))
        facts.append((visible_text(row["token"]), before, after))
    print_facts(console, facts)
    if learned := summary["learned"]:
        print_line(console, "\nWhat the table learned, and what not")
        print_line(console, "\n".join(_sentences_learned(learned, summary["validation_loss"])), indent=2)
    click.echo(f"\nWritten to {summary['directory']}: {', '.join(summary['files'])}")


def _sentences_learned(learned: dict[str, Any], loss: float) -> Iterator[str]:
    """Yield what a table learned, and what not, in sentences."""
    if not learned["is_sound"]:
        yield learned["verdict"]
    yield learned["sentence"]
    if not learned["is_little"]:
        yield (
            f"The neighbours of the {learned['frequent']:,} tokens that occur {FREQUENT} times or more in the text are "
            f"of similar use; a row of a rarer token has learned little, and its neighbours mean less."
        )
    if not learned["is_little"]:
        yield (
            f"Context lowers the loss on held-out text from {learned['unigram_entropy']:.2f} nats per token, which "
            f"token frequencies alone give, to {loss:.2f}."
        )


@click.command()
@click.argument("directory", type=RUN)
def report(directory: Path) -> None:
    """Write the HTML report of a finished run.

    DIRECTORY is the folder of the run. "embedlayer train" writes the report too; this command replaces it. The report
    is one file that opens without a server.
    """
    from embedlayer.training.run_directory import RunDirectory

    run = RunDirectory(directory)
    make_report(run)
    click.echo(f"Written to {run.report}")


def make_report(run: "RunDirectory") -> dict[str, Any]:
    """Write the HTML report of a finished run, `report.html`, into its folder; an old report is replaced."""
    from embedlayer.explorer.export import write_page
    from embedlayer.opening.readers import open_model

    opened = open_model(run.path)
    model, tokenizer = opened.require_decoder(), opened.require_tokenizer()
    before = run.read()["notes"].get("neighbors_before", [])  # nearest neighbours of the probe tokens
    after = neighbors_of([row["id"] for row in before], model, tokenizer)
    neighbors = [
        {"token": old["token"], "before": old["near"], "after": new["near"]}
        for old, new in zip(before, after, strict=True)
    ]
    summary = {**summarise(run, model), "neighbors": neighbors, "learned": what_was_learned(opened)}
    write_page(run.report, [opened])
    return {**summary, "files": run.files()}
