"""Ctrl-C ends a command within a second, also while foreign code runs, such as the training of a tokenizer.

Python calls a signal's handler between two of its own instructions. While a library works for minutes in the main
thread, nothing happens. So a thread of the command waits for the signal too: if no handler has run for
`SECONDS`, it removes what this process was writing, and ends the process.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from embedlayer.core.forks import call_in_forked_processes

SECONDS = 0.6  # time in which Python's own handler may run
INTERRUPTED = 130  # exit code of a command that Ctrl-C ended

_handled = threading.Event()


def note_interrupt() -> None:
    """Say that a handler of Ctrl-C has run: the command ends as it wants to, and is not stopped at once."""
    _handled.set()


def raise_interrupt(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C: raise `KeyboardInterrupt`."""
    note_interrupt()
    signal.default_int_handler(number, frame)


@contextmanager
def ending_on_interrupt() -> Iterator[None]:
    """Context manager: Ctrl-C raises `KeyboardInterrupt` in the block, or ends the process within a second.

    It ends if foreign code runs for `SECONDS`, so that Python cannot call the signal's handler. Where the signal is
    ignored, as in a shell's background processes, it stays so. Outside the main thread, or below a caller with a
    handler of its own, nothing changes.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before not in (
        signal.default_int_handler,
        signal.SIG_IGN,
    ):
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    former = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, raise_interrupt)
    threading.Thread(target=_watch, args=(reading,), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(former)
        signal.signal(signal.SIGINT, before)
        os.close(writing)  # ends the thread


def _watch(reading: int) -> None:
    """Wait for signals of this process, and end it if no handler of Ctrl-C runs for `SECONDS`."""
    while signals := os.read(reading, 64):
        if signal.SIGINT in signals:
            if not _handled.wait(SECONDS):
                from embedlayer.io.partials import remove_own_folders

                remove_own_folders()  # what this process has begun to write
                with suppress(OSError):
                    os.write(2, b"Stopped.\n")
                os._exit(INTERRUPTED)
            _handled.clear()
    os.close(reading)


def _forget() -> None:
    """Detach a forked process from the pipe of its parent, so that it handles its own signals."""
    global _handled
    _handled = threading.Event()
    with suppress(ValueError):  # not the main thread
        if signal.getsignal(signal.SIGINT) is raise_interrupt:
            signal.set_wakeup_fd(-1)


call_in_forked_processes(_forget)
