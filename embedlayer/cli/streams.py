"""The standard streams of a command: characters that their encoding lacks, and what happens if they cannot be written.

Commands write as if a stream took everything. `main` wraps both streams once, and so has one outcome for all commands.
"""

import os
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

_PLAIN = {"·": ".", "′": "'", "√": "sqrt ", "−": "-", "×": "x", "±": "+-", "→": "->", "–": "-", "—": "-", "‖": "||"}
_BARS = "_2345678"
"""What stands for the bars of eight heights; the lowest one is SentencePiece's mark of a space too."""


class OutputError(Exception):
    """The standard output cannot be written; no `OSError`, so that no command takes it for one about its own files.

    Args:
        error: What the system said.
    """

    def __init__(self, error: OSError) -> None:
        super().__init__(f"Cannot write the output: {error.strerror or error}.")
        self.is_closed = isinstance(error, BrokenPipeError)


class Stream:
    """A standard stream that writes every character, escaped where its encoding lacks it.

    If it cannot be written any more, the rest of the output is dropped. The standard output says so by `OutputError`;
    what the standard error says must not end a command.

    Args:
        stream: The stream.
        is_output: Whether it is the standard output.
    """

    encoding = "utf-8"  # what click and rich may write; click would write UTF-8 past a stream that names ASCII

    def __init__(self, stream: TextIO, *, is_output: bool) -> None:
        self._stream, self._is_output = stream, is_output
        self._error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text, and return its number of characters."""
        with self._noting_failure():
            self._stream.write(encodable(text, self._stream.encoding or "utf-8"))
        return len(text)

    def flush(self) -> None:
        """Write what is in the buffer."""
        with self._noting_failure():
            self._stream.flush()

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._error = error
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), self._stream.fileno())
        if self._is_output and self._error is not None:  # at each call: click passes over an error of its first one
            raise OutputError(self._error) from self._error


@contextmanager
def safe_streams() -> Iterator[None]:
    """Context manager: write through `Stream` in the block. What goes to a stream that is closed is dropped.

    Standard streams that were closed are open on the null device, so that no file of a command gets their numbers.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w", encoding="utf-8") as nothing:
        sys.stdout = Stream(sys.stdout or nothing, is_output=True)
        sys.stderr = Stream(sys.stderr or nothing, is_output=False)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before


def encodable(text: str, encoding: str) -> str:
    """Return a text in which each character that an encoding lacks has what looks like it, or else its escape."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return "".join(_plain(character, encoding) for character in text)
    return text


def _plain(character: str, encoding: str) -> str:
    """Return a character, or ASCII in its place if an encoding lacks it."""
    plain = _PLAIN.get(character, unicodedata.normalize("NFKC", character))
    if "\u2500" <= character <= "\u257f":  # lines
        plain = "-"
    elif "\u2581" <= character <= "\u2588":
        plain = _BARS[ord(character) - 0x2581]
    for each in (character, plain):
        with suppress(UnicodeEncodeError):
            each.encode(encoding)
            return each
    return character.encode("ascii", "backslashreplace").decode()
