"""`embedlayer report`: what a run looks like, as one page."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from embedlayer.training.run_directory import RunDirectory

POSITIONS_SHOWN = 128
LABELS = 300


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
def report(directory: Path) -> None:
    """Write the report of a finished run again, for instance after installing the extra `plots`."""
    from embedlayer.training.run_directory import RunDirectory

    run = RunDirectory(directory)
    make_report(run)
    click.echo(f"Written to {run.report}")


def make_report(directory: "RunDirectory") -> dict[str, Any]:
    """Write `report.html` from what stands in the run's folder.

    Returns:
        What the run came to, as `summarise` gives it, and the names of its files.

    Raises:
        FileError: The run is not finished.
    """
    import numpy as np
    import torch

    from embedlayer.analysis.geometry import pca, position_values
    from embedlayer.cli.pipeline import frequent_words, neighbor_rows, summarise, token_counts
    from embedlayer.report import RunReport, TableMap, write_report
    from embedlayer.text.corpus import TokenCorpus
    from embedlayer.text.tokenizer import token_text
    from embedlayer.training.run_directory import load_run

    model, tokenizer = load_run(directory.path)
    neighbors = neighbor_rows(directory, model, tokenizer)
    summary = summarise(directory, model, neighbors)
    table = model.table
    corpus = TokenCorpus.open(directory.corpus)
    counts = token_counts(corpus.ids, table.vocab_size)
    with torch.no_grad():
        components = pca(table.rows(0, table.vocab_size))
    frequent = frequent_words(counts, tokenizer, count=LABELS)
    write_report(
        directory.report,
        RunReport(
            title=f"Embedding layer: {table.vocab_size:,} tokens of width {table.embed_dim}",
            summary=_tiles(summary),
            metrics=directory.read_metrics(),
            baseline=summary["ln_vocab_size"],
            neighbors=neighbors,
            table=TableMap(
                coordinates=components.coordinates.float(),
                labels={token: token_text(tokenizer, token) for token in frequent},
                explained_variance_ratio=components.explained_variance_ratio.float(),
                values=torch.from_numpy(np.log10(counts + 1.0)).float(),
                value_label="occurrences in the text, log10(1 + n)",
            ),
            position=position_values(model.position, POSITIONS_SHOWN),
            options=_options(directory.read(), table),
        ),
    )
    return {**summary, "files": directory.files()}


def _tiles(summary: dict[str, Any]) -> dict[str, str]:
    return {
        "First loss": f"{summary['first_loss']:.2f}\nln V = {summary['ln_vocab_size']:.2f} nats per token",
        "Validation loss": f"{summary['validation_loss']:.3f}\nnats per token",
        "Bits per byte": f"{summary['validation_bits_per_byte']:.3f}\non the validation part",
        "Steps": f"{summary['steps']:,}",
        "Speed": f"{summary['tokens_per_second']:,}\ntokens per second",
        "Parameters": f"{summary['parameters']:,}\n{summary['table_parameters']:,} in the table",
    }


def _options(run: dict[str, Any], table: Any) -> dict[str, str]:
    model = run["model"]
    described = {
        "table": f"{model['table']['kind']} ({table.extra_repr()})",
        "position": model["position"]["kind"],
        "head": "tied to the table" if model["head"]["tied"] else "free",
        "layers": str(model["num_layers"]),
        "heads": f"{model['num_heads']} query, {model['num_kv_heads']} key/value",
        "validation fraction": str(run["validation_fraction"]),
    }
    return described | {
        name.replace("_", " "): str(value) for name, value in run["options"].items() if value is not None
    }
