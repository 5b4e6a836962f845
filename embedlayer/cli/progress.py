"""Progress of long commands, and how Ctrl-C ends them."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.progress import Progress

    from embedlayer.training.loop import Trainer

SECONDS_BETWEEN_LINES = 10


@contextmanager
def stopping_gently(trainer: "Trainer") -> Iterator[None]:
    """Make Ctrl-C and SIGTERM stop the trainer after its current step; a second one stops at once."""

    def stop(number: int, frame: FrameType | None) -> None:
        trainer.stop()
        signal.signal(number, before[number])
        if trainer.parallel.is_first:
            click.echo("\nStopping after this step ... (again to stop at once)", err=True)

    before: dict[int, Any] = {}
    try:
        for wanted in (signal.SIGINT, signal.SIGTERM):
            before[wanted] = signal.signal(wanted, stop)
    except ValueError:  # not the main thread, which receives no signals
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def reading(*, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows bytes read and bytes in all.

    It moves a bar in a terminal, prints a line every few seconds elsewhere, and does nothing if `quiet`.
    """
    if quiet:
        yield lambda read, total: None
    elif not sys.stdout.isatty():
        yield _byte_lines()
    else:
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

        columns = (BarColumn(bar_width=24), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns) as progress:
            task = progress.add_task("", total=None)
            yield lambda read, total: progress.update(task, completed=read, total=total)


def _byte_lines() -> Callable[[int, int], None]:
    started = shown = time.monotonic()
    first: int | None = None

    def show(read: int, total: int) -> None:
        nonlocal first, shown
        now = time.monotonic()
        first = read if first is None else first
        if now - shown < SECONDS_BETWEEN_LINES:
            return
        shown = now
        rate = (read - first) / (now - started)
        left = f"  {(total - read) / rate:.0f} s left" if rate else ""
        click.echo(f"{read / 1e6:,.1f} of {total / 1e6:,.1f} MB  {rate / 1e6:.1f} MB/s{left}")

    return show


ShowTraining = Callable[..., None]
"""Function `show(step, line=None)` that shows a step, with the metrics measured at it if there are any."""


@contextmanager
def display(trainer: "Trainer", *, quiet: bool) -> Iterator[ShowTraining]:
    """Yield a function that shows a training run.

    It moves a bar in a terminal, prints a line every few seconds elsewhere, and does nothing if `quiet`.
    """
    if quiet:
        yield lambda step, line=None: None
    elif not sys.stdout.isatty():
        yield _metric_lines(trainer)
    else:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("step {task.completed:,.0f}/{task.total:,.0f}"),
            BarColumn(bar_width=24),
            TextColumn("loss [bold]{task.fields[loss]}[/bold]"),
            TextColumn("validation {task.fields[validation]}"),
            TextColumn("{task.fields[speed]} tokens/s"),
            TimeRemainingColumn(),
        )
        with Progress(*columns) as progress:
            yield _metric_bar(trainer, progress)


def _metric_lines(trainer: "Trainer") -> ShowTraining:
    """Return a function that prints the first and the last metrics, and others every few seconds."""
    started = shown = time.monotonic()
    first_step = trainer.step

    def show(step: int, line: dict[str, Any] | None = None) -> None:
        nonlocal shown
        now, steps = time.monotonic(), trainer.steps or 0
        if line is None or (0 < step < steps and now - shown < SECONDS_BETWEEN_LINES):
            return
        shown = now
        text = f"step {step}/{steps}  loss {line['loss']:.3f}"
        text += f"  validation {line['validation_loss']:.3f}" if "validation_loss" in line else ""
        if done := step - first_step:
            left = (now - started) / done * (steps - step)
            text += f"  {line['tokens_per_second']:,} tokens/s  {left:.0f} s left"
        click.echo(text)

    return show


def _metric_bar(trainer: "Trainer", progress: "Progress") -> ShowTraining:
    """Return a function that moves a bar and writes the last metrics beside it."""
    task = progress.add_task("", total=1, loss="...", validation="...", speed="...")
    forms = {"loss": ("loss", ".3f"), "validation": ("validation_loss", ".3f"), "speed": ("tokens_per_second", ",")}

    def show(step: int, line: dict[str, Any] | None = None) -> None:
        line = line or {}
        fields: dict[str, Any] = {
            field: format(line[name], form) for field, (name, form) in forms.items() if line.get(name)
        }
        progress.update(task, completed=step, total=trainer.steps, **fields)

    return show
