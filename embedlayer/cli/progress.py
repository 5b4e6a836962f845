"""What a person sees while a run goes on, and how Ctrl-C ends it."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import click

if TYPE_CHECKING:
    from rich.progress import Progress

    from embedlayer.training.loop import Trainer

SECONDS_BETWEEN_LINES = 10


@contextmanager
def stopping_gently(trainer: "Trainer") -> Iterator[None]:
    """Ctrl-C and SIGTERM ask the trainer to stop after the step it is in; a second one stops at once."""

    def stop(number: int, frame: FrameType | None) -> None:
        trainer.stop()
        signal.signal(number, before[number])
        if trainer.parallel.is_first:
            click.echo("\nStopping after this step ... (again to stop at once)", err=True)

    before: dict[int, Any] = {}
    try:
        for wanted in (signal.SIGINT, signal.SIGTERM):
            before[wanted] = signal.signal(wanted, stop)
    except ValueError:  # not the main thread: nobody sends signals here
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def reading(*, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """What shows bytes read of bytes in all: a bar in a terminal, a line now and then elsewhere, nothing if `quiet`."""
    if quiet:
        yield lambda read, total: None
    elif not sys.stdout.isatty():
        yield _lines_of_bytes()
    else:
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

        columns = (BarColumn(bar_width=24), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns) as progress:
            task = progress.add_task("", total=None)
            yield lambda read, total: progress.update(task, completed=read, total=total)


def _lines_of_bytes() -> Callable[[int, int], None]:
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


class Display(Protocol):
    """How a run is shown while it goes on."""

    def step(self, step: int) -> None:
        """Step number `step` was done."""

    def line(self, line: dict[str, Any]) -> None:
        """A line of metrics was measured."""


@contextmanager
def display(trainer: "Trainer", *, quiet: bool) -> Iterator[Display]:
    """A live display in a terminal, a line now and then elsewhere, nothing if `quiet`."""
    if quiet:
        yield Silent()
    elif not sys.stdout.isatty():
        yield Lines(trainer)
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
            yield Live(trainer, progress)


class Silent:
    """Nothing is shown."""

    def step(self, step: int) -> None:
        """Show nothing."""

    def line(self, line: dict[str, Any]) -> None:
        """Show nothing."""


class Lines:
    """A line now and then, for logs and pipes."""

    def __init__(self, trainer: "Trainer") -> None:
        self.trainer = trainer
        self.started = self.shown = time.monotonic()
        self.first_step = trainer.step

    def step(self, step: int) -> None:
        """Show nothing: steps are too many."""

    def line(self, line: dict[str, Any]) -> None:
        """Show the first and the last line, and others when some seconds have passed."""
        now = time.monotonic()
        steps = self.trainer.steps or 0
        if 0 < line["step"] < steps and now - self.shown < SECONDS_BETWEEN_LINES:
            return
        self.shown = now
        text = f"step {line['step']}/{steps}  loss {line['loss']:.3f}"
        text += f"  validation {line['validation_loss']:.3f}" if "validation_loss" in line else ""
        if done := line["step"] - self.first_step:
            left = (now - self.started) / done * (steps - line["step"])
            text += f"  {line['tokens_per_second']:,} tokens/s  {left:.0f} s left"
        click.echo(text)


class Live:
    """One line of a terminal that follows the run."""

    def __init__(self, trainer: "Trainer", progress: "Progress") -> None:
        self.trainer = trainer
        self.progress = progress
        self.task = progress.add_task("", total=1, loss="...", validation="...", speed="...")

    def step(self, step: int) -> None:
        """Move the bar."""
        self.progress.update(self.task, completed=step, total=self.trainer.steps)

    def line(self, line: dict[str, Any]) -> None:
        """Show what was measured."""
        fields: dict[str, Any] = {"loss": f"{line['loss']:.3f}"}
        if line["step"]:
            fields["speed"] = f"{line['tokens_per_second']:,}"
        if "validation_loss" in line:
            fields["validation"] = f"{line['validation_loss']:.3f}"
        self.progress.update(self.task, completed=line["step"], total=self.trainer.steps, **fields)
