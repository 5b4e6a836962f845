"""`embedlayer train`: train an embedding layer on text."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from embedlayer.cli.options import (
    TEXTS_OR_CORPUS,
    OutputPath,
    chosen_device,
    dtype_option,
    json_option,
    text_field_option,
)
from embedlayer.cli.training_runs import LayerOptions, layer_options
from embedlayer.core.errors import CheckpointError, FileError, SizeError
from embedlayer.core.formatting import command_line

if TYPE_CHECKING:
    from embedlayer.training.parallel import ParallelContext
    from embedlayer.training.run_directory import RunDirectory


Options = TypeVar("Options")

OF_A_RESUMED_RUN = {
    *("files", "output", "resume", "weights", "device", "save_seconds", "timeout_seconds", "vocab_parallel_size"),
    "as_json",
}
"""Parameters of the command that a run which continues may have; the others are those with which it began."""

PRECISIONS = click.Choice(["auto", "float32", "bfloat16"])


def _weights(_: click.Context, __: click.Parameter, value: str | None) -> tuple[float, ...] | None:
    """Return the weights that a text such as `3,1` states; `_require_weights` checks that they are above 0."""
    try:
        return None if value is None else tuple(float(part) for part in value.split(","))
    except ValueError:
        raise SizeError(
            f"--weights {value!r} is not a list of numbers: pass one for each FILE, with commas, such as 3,1."
        ) from None


@click.command()
@click.argument("files", nargs=-1, metavar="FILE...", type=TEXTS_OR_CORPUS)
@click.option("-o", "--output", required=True, type=OutputPath(), help="Folder of the run.")
@click.option(
    "--weights",
    metavar="NUMBER,...",
    callback=_weights,
    help="Train on a mixture: share of each FILE in the windows, such as 3,1.  [default: all FILES are one text]",
)
@click.option(
    "--resume", is_flag=True, help="Continue the run in the folder from its last checkpoint, with its own options."
)
@click.option("--overwrite", is_flag=True, help="Replace the run in the folder, or files of the names of a run's.")
@text_field_option
@dtype_option
@layer_options
@click.option("--length", default=128, help="Tokens per window.")
@click.option(
    "--documents",
    is_flag=True,
    help="Train on each document by itself: a token neither attends to another one nor is predicted from it.",
)
@click.option("--batch-size", default=8, help="Windows per forward pass.")
@click.option("--accumulate", default=1, help="Forward passes per update.")
@click.option("--learning-rate", default=3e-3, help="Peak learning rate.")
@click.option(
    "--rate",
    "rates",
    type=(str, float),
    multiple=True,
    metavar="ROLE RATE",
    help="Peak learning rate of tables, heads, positions, norms or matrices alone; may be repeated.",
)
@click.option("--steps", type=int, help="Number of optimizer steps.")
@click.option("--minutes", type=float, help="Train for this time instead of a number of steps.  [default: 2]")
@click.option("--min-steps", default=1, help="Smallest number of steps with --minutes, also if they take longer.")
@click.option("--log-every", default=10, help="Steps between lines of metrics.")
@click.option(
    "--monitor",
    type=int,
    metavar="N",
    help="Report rows, losses and logits by token frequency every N steps, a multiple of --log-every.",
)
@click.option(
    "--validation-fraction", default=0.1, help="Fraction of the text that is held out, of each with --weights."
)
@click.option("--seed", default=0, help="Seed of weights, order and dropout.")
@click.option("--device", default="auto", help="Device to train on: cpu, cuda, ...")
@click.option("--precision", default="auto", type=PRECISIONS, help="Precision of matrix products.")
@click.option("--save-seconds", default=60.0, help="Seconds between checkpoints.")
@click.option("--timeout-seconds", default=600.0, help="Time that processes of a torchrun launch wait for each other.")
@click.option(
    "--vocab-parallel-size",
    type=int,
    help="Processes that share the rows of one table; N times as many processes train N replicas.  [default: all]",
)
@click.option("--probe", multiple=True, help="Token whose nearest neighbours are shown; may be repeated.")
@json_option
def train(files: tuple[Path, ...], **options: Any) -> int:
    """Train an embedding layer on text.

    FILE... are text files, JSON lines, Parquet and Arrow files, folders of them, or - for standard input; or files of
    token IDs, with --tokenizer-from; or one folder that "embedlayer corpus build" wrote. That folder contains the
    tokenizer too.

    With --weights 3,1 and two FILES, three of four windows are of the first FILE, and one is of the second. Each is a
    text file, a folder of them, or a folder that "embedlayer corpus build" wrote; all have one tokenizer. The loss on
    held-out text is reported of each, and as the mean with these weights.

    With several processes, or machines that share a file system: torchrun --nproc-per-node N -m embedlayer train ...
    """
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
    """Start or resume the run in `directory`, train to the last step, and print the summary on rank 0."""
    # All ranks call this with equal files and options, and the caller holds the folder's lock. `options` are completed
    # in place.
    from embedlayer.cli.run_summary import make_report, show_summary
    from embedlayer.cli.training_runs import start_run, train_to_the_end
    from embedlayer.training.loop import TrainingOptions

    quiet = options["as_json"] or not parallel.is_first
    passed = {f"--{name.replace('_', '-')}": value for name, value in options.items()}
    parallel.collectives.require_equal({"FILE...": [str(file) for file in files], **passed})
    if options["resume"] or parallel.collectives.any(
        parallel.is_first and was_started_by(parallel.launch_id, directory)
    ):
        if options["resume"]:
            if files:
                raise SizeError("--resume uses the corpus in the folder: leave the files out.")
            _require_no_options_of_a_new_run()
        if options["weights"] is not None:
            _require_same_weights(directory, options["weights"])
        trainer, tokenizer, _ = directory.resume(device, parallel)
        if not quiet:
            what = "The run is complete" if trainer.step == trainer.steps else "Continuing"
            click.echo(f"{what} at step {trainer.step}")
    else:
        if not files:
            raise SizeError("There is no text to train on: name a file, a folder, or - for standard input.")
        if options["weights"] is not None:
            _require_weights(files, options["weights"])
        exists = parallel.collectives.any(directory.contains_run)  # all look before rank 0 writes
        is_taken = parallel.collectives.any(not directory.is_free)
        if is_taken and not options["overwrite"]:
            there = "other files. Replace those that a run writes"
            there = "a run already. Continue it with --resume, replace it" if exists else there
            raise FileError(f"{directory.path} holds {there} with --overwrite, or choose another folder.")
        if options["steps"] is None and options["minutes"] is None:
            options["minutes"] = 2.0
        options["max_length"], options["rates"] = options["length"], dict(options["rates"]) or None
        options["monitor_every"] = options["monitor"]
        layer, training = _named(options, LayerOptions), _named(options, TrainingOptions)
        if layer.mapped and parallel.launch_id:
            raise SizeError(
                "--mapped is for one process: the processes of torchrun shard rows over their memories instead."
            )
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
                weights=options["weights"],
                text_field=options["text_field"],
                dtype=options["dtype"],
                overwrite=options["overwrite"],
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
                f"Continue with: {command_line('train', '--resume', '-o', directory.path)}",
                err=True,
            )
        return 130
    if parallel.is_first:
        show_summary(make_report(directory), as_json=options["as_json"])
    return 0


def _named(options: dict[str, Any], kind: type[Options]) -> Options:
    """Return a dataclass of type `kind`, built from those options that are its fields; other options are ignored."""
    return kind(**{field.name: options[field.name] for field in fields(kind) if field.name in options})  # type: ignore[arg-type]


def _require_no_options_of_a_new_run() -> None:
    """Raise a `SizeError` if the command line has options that a run which continues has chosen already."""
    context = click.get_current_context()
    passed = [name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    names = {each.name: each.opts[0] for each in context.command.params}
    if fixed := [names[name] for name in passed if name not in OF_A_RESUMED_RUN]:
        raise SizeError(f"--resume continues with the options of the run: leave {', '.join(fixed)} out.")


def _require_weights(files: tuple[Path, ...], weights: tuple[float, ...]) -> None:
    """Raise a `SizeError` unless `--weights` has a weight above 0 for each of several files."""
    from embedlayer.data.mixture import windows_of_an_epoch

    if len(files) == 1:
        raise SizeError("--weights mixes several FILES, and there is one: name the others too, or leave --weights out.")
    if len(weights) != len(files):
        raise SizeError(f"--weights has {len(weights)} numbers for {len(files)} FILES: pass one for each.")
    windows_of_an_epoch(weights)


def _require_same_weights(directory: "RunDirectory", weights: tuple[float, ...]) -> None:
    """Raise a `SizeError` unless the run in a folder has these weights."""
    recorded = directory.read().get("weights")
    if recorded != list(weights):
        what = "one text, without weights" if recorded is None else f"the weights {_as_text(recorded)}"
        raise SizeError(
            f"--weights {_as_text(weights)} cannot change the run in {directory.path}, which trains on {what}."
        )


def _as_text(weights: Sequence[float]) -> str:
    """Return weights as the option `--weights` states them."""
    return ",".join(f"{weight:g}" for weight in weights)


def was_started_by(launch: str, directory: "RunDirectory") -> bool:
    """Return whether an earlier attempt of the same torchrun launch began the run in the folder."""
    if not launch or not directory.contains_run:
        return False
    try:
        noted = directory.read()["notes"].get("launch", "")
    except CheckpointError:  # written by another version of embedlayer, so not by this launch
        return False
    return not set(launch.split()).isdisjoint(noted.split())
