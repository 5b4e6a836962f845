"""Figures of training: losses over steps, and the path of a number under several optimizers."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from embedlayer.core.errors import FileError, SizeError
from embedlayer.plots.style import BLUE, DASHES, INK, LINES, MUTED, ORANGE, Axes, Figure, new_figure, with_missing

Metrics = Sequence[Mapping[str, Any]]
"""Lines of a run's `metrics.jsonl`: `step`, `loss` and, in some lines, `validation_loss`, in nats per token."""


def loss_curve(run: Metrics | Path | str, *, baseline: float | None = None, title: str = "Loss") -> Figure:
    """Draw training and validation loss over steps.

    Args:
        run: Lines of a run's `metrics.jsonl`, the path of that file, or the folder of the run. Values that are missing
            or `None` are left out; the legend says how many are left out because they are not finite.
        baseline: `ln V`, the loss of uniform probabilities, which is drawn as a line with this label; or `None`.
        title: Title of the figure.

    Raises:
        FileError: The file or folder does not exist or cannot be read.
        CheckpointError: A line of the file is damaged.

    Example:
        >>> figure = loss_curve([{"step": 0, "loss": 8.3}, {"step": 100, "loss": 5.1}], baseline=8.3)
    """
    metrics = read_metrics(run)
    with new_figure(7.2, 3.9, title=title) as (figure, axes):
        _draw(axes, metrics, "loss", label="training", color=BLUE)
        _draw(axes, metrics, "validation_loss", label="validation", color=ORANGE, marker="o", markersize=4)
        _finish(axes, "loss (nats per token)", baseline)
    return figure


def loss_curves(
    runs: Mapping[str, Metrics | Path | str],
    *,
    key: Literal["loss", "validation_loss"] = "validation_loss",
    baseline: float | None = None,
    title: str | None = None,
) -> Figure:
    """Draw one loss of several runs over steps, to compare them.

    Args:
        runs: Up to four runs by name, each as in `loss_curve`.
        key: The loss to draw.
        baseline: As in `loss_curve`.
        title: Title of the figure; `None` for the name of the loss and the number of runs.

    Raises:
        FileError: A file or folder does not exist or cannot be read.
        CheckpointError: A line of a file is damaged.
        SizeError: There are more than four runs, or `key` is another one.

    Example:
        >>> tied = [{"step": 0, "loss": 8.3}, {"step": 100, "loss": 5.1}]
        >>> untied = [{"step": 0, "loss": 8.4}, {"step": 100, "loss": 5.0}]
        >>> figure = loss_curves({"tied": tied, "untied": untied}, key="loss")
    """
    if len(runs) > len(LINES):
        raise SizeError(f"One figure shows at most {len(LINES)} runs; found {len(runs)}.")
    if key not in (names := {"loss": "training", "validation_loss": "validation"}):
        raise SizeError(f"key must be one of {', '.join(names)}, not {key!r}.")
    which = names[key]
    title = f"{which.capitalize()} loss of {len(runs)} runs" if title is None else title
    with new_figure(7.2, 3.9, title=title) as (figure, axes):
        for (name, run), colour, dashes in zip(runs.items(), LINES, DASHES, strict=False):
            style = {"label": name, "color": colour, "linestyle": dashes, "marker": "o", "markersize": 3.5}
            _draw(axes, read_metrics(run), key, **style)
        _finish(axes, f"{which} loss (nats per token)", baseline)
    return figure


def read_metrics(run: Metrics | Path | str) -> Metrics:
    """Return the lines of a run's `metrics.jsonl`, from its path, that of the folder, or the lines themselves."""
    if not isinstance(run, Path | str):
        return run
    from embedlayer.training.run_directory import RunDirectory

    directory = RunDirectory(run)
    if Path(run).is_file():
        directory.metrics = Path(run)
    if not directory.metrics.exists():
        raise FileError(f"{run} is no run: there is no {directory.metrics}. Give a run's folder or its metrics.jsonl.")
    return directory.read_metrics()


def _draw(axes: Axes, metrics: Metrics, key: str, **style: Any) -> None:
    """Draw one value of a run over its steps; values that are missing or not finite are left out."""
    values = [(line["step"], line[key]) for line in metrics if line.get(key) is not None]
    finite = [(step, value) for step, value in values if math.isfinite(value)]
    if len(finite) == 1:
        style |= {"marker": "o", "markersize": 5}
    style["label"] = with_missing(style["label"], len(values) - len(finite))
    if values:
        axes.plot([step for step, _ in finite], [loss for _, loss in finite], **style)


def _finish(axes: Axes, loss: str, baseline: float | None) -> None:
    """Add axis labels, an optional line for the baseline, and a legend to a figure of losses."""
    axes.set(xlabel="step", ylabel=loss)
    axes.grid(visible=False, axis="x")
    axes.margins(x=0.02, y=0.08)
    if baseline is not None:
        axes.axhline(baseline, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.annotate(
            f"ln V = {baseline:.2f}, uniform",
            (1, baseline),
            xycoords=("axes fraction", "data"),
            xytext=(-2, 4),
            textcoords="offset points",
            ha="right",
            color=MUTED,
        )
    if names := axes.get_legend_handles_labels()[1]:
        columns = len(names) if sum(map(len, names)) < 40 else 1
        place = {"loc": "lower right", "bbox_to_anchor": (1.01, 1.0)} if columns > 1 else {"loc": "upper right"}
        axes.legend(**place, ncols=columns, borderaxespad=0.2, handlelength=1.8)


def optimizer_paths(
    values: Mapping[str, Sequence[float]], *, touched: Sequence[int] = (), title: str = "One number of a rare row"
) -> Figure:
    """Draw one number of a table over the training steps of several optimizers, to compare them with the first.

    Args:
        values: The number after each step, by name of the optimizer: one to three, the first drawn as a broad line. The
            legend says how many numbers are not finite.
        touched: Steps, counted from 1, at which the row had a gradient; they are marked at the lower edge.
        title: Title of the figure.

    Raises:
        SizeError: There are no optimizers or more than three.

    Example:
        >>> figure = optimizer_paths({"AdamW": [0.1, 0.2], "RowAdamW": [0.1, 0.2]}, touched=[1])
    """
    looks = [(MUTED, 6.0, 0.35, "-"), (BLUE, 1.6, 1.0, "-"), (ORANGE, 1.6, 1.0, (0, (5, 2)))]
    if not 1 <= len(values) <= len(looks):
        raise SizeError(f"One figure shows 1 to {len(looks)} optimizers; found {len(values)}.")
    with new_figure(7.2, 3.9, title=title) as (figure, axes):
        for (name, path), (colour, width, alpha, style) in zip(values.items(), looks, strict=False):
            steps = range(1, len(path) + 1)
            label = with_missing(name, sum(not math.isfinite(value) for value in path))
            axes.plot(steps, path, color=colour, linewidth=width, alpha=alpha, linestyle=style, label=label)
        across = axes.get_xaxis_transform()
        axes.plot(touched, [0.02] * len(touched), "|", color=INK, markersize=9, transform=across, label="gradient")
        axes.set(xlabel="step", ylabel="value")
        axes.margins(x=0.02, y=0.1)
        axes.legend(loc="best")
    return figure
