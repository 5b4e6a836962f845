"""`embedlayer train`: real text in, a trained embedding layer out."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from embedlayer.cli.paths import TEXTS_OR_CORPUS, TOKENIZER
from embedlayer.errors import FileError, SizeError

if TYPE_CHECKING:
    from embedlayer.training.parallel import ParallelContext
    from embedlayer.training.run_directory import RunDirectory


@click.command()
@click.argument("files", nargs=-1, metavar="FILE...", type=TEXTS_OR_CORPUS)
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder for the result.")
@click.option("--resume", is_flag=True, help="Continue the run in the folder where it stopped.")
@click.option("--overwrite", is_flag=True, help="Replace a run that is in the folder.")
@click.option(
    "--tokenizer",
    type=click.Choice(["bpe", "wordpiece", "unigram", "word", "byte"]),
    default="bpe",
    show_default=True,
    help="Kind to learn from the text.",
)
@click.option("--tokenizer-from", type=TOKENIZER, help="Use this tokenizer (file or folder) instead.")
@click.option("--vocab-size", default=4096, show_default=True, help="Entries of a learned tokenizer.")
@click.option("--dim", default=192, show_default=True, help="Width of a row of the table.")
@click.option("--layers", default=4, show_default=True, help="Blocks of the decoder.")
@click.option("--heads", default=6, show_default=True, help="Query heads.")
@click.option("--kv-heads", type=int, help="Key/value heads.  [default: as many as query heads]")
@click.option("--rank", type=int, help="Factorise the table to this rank.  [default: a dense table]")
@click.option(
    "--position",
    type=click.Choice(["rotary", "learned", "sinusoidal", "scaled-sinusoidal", "alibi", "relative", "none"]),
    default="rotary",
    show_default=True,
    help="Position scheme.",
)
@click.option("--tied/--untied", default=True, show_default=True, help="Read the table as the output head too.")
@click.option(
    "--row-sparse", is_flag=True, help="Train the table at the cost of the batch, with the same result; needs --untied."
)
@click.option("--dropout", default=0.0, show_default=True, help="Share of numbers set to 0 in training.")
@click.option("--init-std", default=0.02, show_default=True, help="Standard deviation of the table's fresh rows.")
@click.option("--pad-to-multiple-of", type=int, help="Store spare rows up to this multiple.")
@click.option("--length", default=128, show_default=True, help="Tokens per window.")
@click.option("--batch-size", default=8, show_default=True, help="Windows per forward pass.")
@click.option("--accumulate", default=1, show_default=True, help="Forward passes per update.")
@click.option("--learning-rate", default=3e-3, show_default=True, help="Peak of the schedule.")
@click.option("--steps", type=int, help="Updates.")
@click.option("--minutes", type=float, help="Time to fill instead of a number of steps.  [default: 2]")
@click.option("--log-every", default=10, show_default=True, help="Steps from one line of metrics to the next.")
@click.option("--validation-fraction", default=0.1, show_default=True, help="Share of the text to measure on.")
@click.option("--seed", default=0, show_default=True, help="Of weights, order and dropout.")
@click.option("--device", default="auto", show_default=True, help="cpu, cuda, ...")
@click.option(
    "--precision",
    type=click.Choice(["auto", "float32", "bfloat16"]),
    default="auto",
    show_default=True,
    help="Of matrices.",
)
@click.option(
    "--save-seconds", default=60.0, show_default=True, help="Time from one checkpoint to the next, at lines of metrics."
)
@click.option(
    "--timeout-seconds",
    default=600.0,
    show_default=True,
    help="How long processes that torchrun started wait for each other.",
)
@click.option(
    "--vocab-parallel-size",
    type=int,
    help="Processes among which a table is divided; several times as many hold copies.  [default: all]",
)
@click.option("--probe", multiple=True, help="A token whose neighbours to show; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one line of JSON, and nothing else.")
def train(files: tuple[Path, ...], **options: Any) -> int:
    """Train an embedding layer on text.

    FILE... are text files (.gz too), folders of them, or - for standard input; or the folder of a corpus that
    "embedlayer corpus build" wrote, which brings its tokenizer.

    By several processes, or machines with one file system: torchrun --nproc-per-node N -m embedlayer train ...
    """
    from embedlayer.cli.pipeline import chosen_device
    from embedlayer.training.parallel import parallel_context
    from embedlayer.training.run_directory import RunDirectory

    device, directory = chosen_device(options["device"]), RunDirectory(options["output"])
    with (
        parallel_context(device, options["timeout_seconds"], options["vocab_parallel_size"]) as parallel,
        directory.hold_lock(parallel, create=not options["resume"]),
    ):
        return _train(directory, files, options, device, parallel)


def _train(
    directory: "RunDirectory",
    files: tuple[Path, ...],
    options: dict[str, Any],
    device: str,
    parallel: "ParallelContext",
) -> int:
    from embedlayer.cli.pipeline import (
        LayerOptions,
        show_summary,
        start_run,
        train_to_the_end,
    )
    from embedlayer.cli.report import make_report
    from embedlayer.training.loop import TrainingOptions

    quiet = options["as_json"] or not parallel.is_first
    stated = {f"--{name.replace('_', '-')}": value for name, value in options.items()}
    parallel.collectives.require_equal({"FILE...": [str(file) for file in files], **stated})
    if options["resume"] or parallel.collectives.any(
        parallel.is_first and was_started_by(parallel.launch_id, directory)
    ):
        if files and options["resume"]:
            raise SizeError("--resume reads the text kept in the folder: leave the files out.")
        trainer, tokenizer, _ = directory.resume(device, parallel)
        if not quiet:
            click.echo(f"Continuing at step {trainer.step}")
    else:
        if not files:
            raise SizeError("There is no text to train on: name a file, a folder, or - for standard input.")
        if (
            parallel.collectives.any(directory.contains_run) and not options["overwrite"]
        ):  # all look before rank 0 writes
            raise FileError(
                f"{directory.path} holds a run already. Continue it with --resume, replace it with --overwrite, "
                f"or choose another folder."
            )
        minutes = 2.0 if options["steps"] is None and options["minutes"] is None else options["minutes"]
        training = TrainingOptions(
            steps=options["steps"],
            minutes=minutes,
            batch_size=options["batch_size"],
            accumulate=options["accumulate"],
            max_length=options["length"],
            learning_rate=options["learning_rate"],
            log_every=options["log_every"],
            seed=options["seed"],
            precision=options["precision"],
        )
        names = LayerOptions.__dataclass_fields__
        layer = LayerOptions(**{name: value for name, value in options.items() if name in names})
        if parallel.is_first:
            trainer, tokenizer = start_run(
                directory,
                files,
                layer,
                training,
                validation_fraction=options["validation_fraction"],
                probes=options["probe"],
                device="cpu" if parallel.launch_id else device,
                quiet=quiet,
                launch=parallel.launch_id,
            )
        if parallel.launch_id:  # all read what rank 0 wrote, which forgets the whole table
            if parallel.is_first:
                del trainer
            parallel.wait_for_first()
            trainer, tokenizer, _ = directory.resume(device, parallel)
    if not train_to_the_end(directory, trainer, tokenizer, quiet=quiet, save_seconds=options["save_seconds"]):
        if parallel.is_first:
            click.echo(
                f"Stopped at step {trainer.step} of {trainer.steps}; everything is saved.\n"
                f"Continue with: embedlayer train --resume -o {directory.path}",
                err=True,
            )
        return 130
    if parallel.is_first:
        show_summary(make_report(directory), as_json=options["as_json"])
    return 0


def was_started_by(launch: str, directory: "RunDirectory") -> bool:
    """Whether an earlier attempt of this launch began the run in the folder; one machine of it is enough."""
    from embedlayer.errors import CheckpointError

    if not launch or not directory.contains_run:
        return False
    try:
        noted = directory.read()["notes"].get("launch", "")
    except CheckpointError:  # of another version: not of this launch
        return False
    return not set(launch.split()).isdisjoint(noted.split())
