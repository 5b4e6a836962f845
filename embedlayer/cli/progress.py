"""Progress of long commands, and how Ctrl-C ends them."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from embedlayer.cli.interrupts import note_interrupt

if TYPE_CHECKING:
    from embedlayer.training.loop import Trainer

SECONDS_BETWEEN_LINES = 10

Show = Callable[[int, int, str], None]
"""Function `show(done, total, text)` that shows a stage of the work; an empty text changes no text."""


@contextmanager
def stopping_gently(trainer: "Trainer") -> Iterator[None]:
    """Make the first Ctrl-C or SIGTERM in the `with` block stop the trainer after its current step.

    The same signal again has its usual effect at once. The former handlers are restored at the end of the block.
    Outside the main thread, which alone can receive signals, the block runs without this.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        note_interrupt()
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
def _progress(*columns: str, quiet: bool) -> Iterator[Show]:
    """Yield a function `show(done, total, text)` that shows the progress of a command.

    In a terminal it moves a bar, elsewhere it prints lines, and with `quiet` it does nothing. The bar is followed by
    `columns`, names of classes in `rich.progress`; if there are none, by `text`.
    """
    if quiet:
        yield lambda done, total, text: None
    elif not sys.stdout.isatty():
        yield _lines()
    else:
        from rich import progress

        follow = [getattr(progress, name)() for name in columns] or [progress.TextColumn("{task.description}")]
        with progress.Progress(progress.BarColumn(bar_width=10), *follow, progress.TimeRemainingColumn()) as bar:
            task = bar.add_task("", total=None)
            yield lambda done, total, text: bar.update(task, completed=done, total=total, description=text or None)


def _lines() -> Show:
    """Return a function `show(done, total, text)` that prints `text` and the estimated time left."""
    started, shown, last = time.monotonic(), -float("inf"), ""
    first: int | None = None

    def show(done: int, total: int, text: str) -> None:
        nonlocal shown, first, last
        now = time.monotonic()
        first = done if first is None else first
        if text in ("", last) or (done < total and now - shown < SECONDS_BETWEEN_LINES):
            return
        shown, last = now, text
        left = f"  {(now - started) / (done - first) * (total - done):.0f} s left" if done > first else ""
        click.echo(text + left)

    return show


@contextmanager
def reading(*, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Yield a function `show(read, total)` that shows how many bytes of text were read.

    With `quiet` the function does nothing.
    """
    with _progress("DownloadColumn", "TransferSpeedColumn", quiet=quiet) as show:

        def show_bytes(read: int, total: int) -> None:
            unit, size = ("MB", 1e6) if total >= 1e6 else ("kB", 1e3)
            show(read, total, f"{read / size:,.1f} of {total / size:,.1f} {unit}")

        yield show_bytes


@contextmanager
def exporting() -> Iterator[Callable[[float, str], None]]:
    """Yield a function `show(share, text)` that shows the share of a work that is done, and what is done now."""
    with _progress(quiet=False) as show:
        yield lambda share, text: show(round(1000 * share), 1000, text)


@contextmanager
def display(trainer: "Trainer", *, quiet: bool) -> Iterator[Callable[..., None]]:
    """Yield a function `show(step, line=None)` that shows the progress of a training; with `quiet` it does nothing.

    `line` is a dictionary of the metrics that were measured at the step; with `None` only the bar moves.
    """
    with _progress(quiet=quiet) as show:

        def show_step(step: int, line: dict[str, Any] | None = None) -> None:
            text = "" if line is None else f"step {step}/{trainer.steps}  loss {line['loss']:.3f}"
            if line is not None:
                text += f", on held-out text {line['validation_loss']:.3f}" if "validation_loss" in line else ""
                text += " nats per token"
                text += f"  {line['tokens_per_second']:,} tokens/s" if step else ""
                budget = trainer.budget
                if budget is not None and budget.expected_seconds > 1.1 * budget.seconds:
                    minutes = budget.expected_seconds / 60
                    text += f"  (at least {budget.min_steps} steps: about {minutes:.1f} minutes in all)"
            show(step, trainer.steps or 0, text)

        yield show_step
