"""Counts, sizes, classes, records, invisible characters and commands to type as short text, for people."""

import dataclasses
import os
import re
import shlex
import shutil
import sys
import unicodedata
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any


def format_parameters(count: int) -> str:
    """Format a number of parameters as text in decimal units: 1 M is 10^6."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return str(count)


def format_bytes(count: int) -> str:
    """Format a number of bytes as text in binary units: 1 MiB is 2^20 bytes."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count * 1024 >= size * 1000:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def count_of(number: int, noun: str) -> str:
    """Return a number and a noun, which gets an "s" unless the number is 1."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def a_or_an(noun: object) -> str:
    """Return a noun after "a" or "an", by its first letter: a string, or the name of the class of any other value."""
    word = noun if isinstance(noun, str) else type(noun).__name__
    return f"{'an' if word[:1].lower() in 'aeio' else 'a'} {word}"


def shortened(value: object) -> str:
    """Return a value as text of at most 60 characters, the end of a longer text replaced by three dots."""
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


LONGEST = 80
"""Longest `repr` of a value, in characters; a longer one is replaced by the type."""


def short_repr(record: Any) -> str:
    """Return a one-line description of a dataclass or named tuple, with the sizes of large fields."""
    if dataclasses.is_dataclass(record):
        names = [field.name for field in dataclasses.fields(record) if field.repr]
    else:
        names = list(record._fields)
    shown = ", ".join(f"{name}={_described(getattr(record, name))}" for name in names)
    return f"{type(record).__name__}({shown})"


def _described(value: Any) -> str:
    from tokenizers import Tokenizer
    from torch import Tensor, nn

    kind = type(value).__name__
    if isinstance(value, Tokenizer):
        return f"<{type(value.model).__name__} tokenizer, {value.get_vocab_size():,} tokens>"
    if isinstance(value, nn.Module):
        return f"<{kind}, {sum(parameter.numel() for parameter in value.parameters()):,} parameters>"
    if isinstance(value, Tensor):
        return f"<{str(value.dtype).removeprefix('torch.')} tensor {tuple(value.shape)}>"
    if isinstance(value, Mapping | Collection) and not isinstance(value, str | bytes) and len(value) > 3:
        return f"<{kind} of {len(value):,}>"
    text = repr(value)
    return text if len(text) <= LONGEST and "\n" not in text else f"<{kind}>"


VISIBLE = {" ": "·", "\n": "⏎", "\t": "⇥"}

_IGNORABLE = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
"""Letters and marks that have no form of their own, such as variation selectors: Default_Ignorable_Code_Point."""


def visible_text(text: str) -> str:
    """Return a text with invisible characters replaced: space by `·`, newline by `⏎`, tab by `⇥`, others by escapes.

    Example:
        >>> visible_text(" first")
        '·first'
    """
    return "".join(mark or character for character, mark in visible_characters(text))


def visible_characters(text: str) -> Iterator[tuple[str, str | None]]:
    """Yield `(character, visible form)` for each character; the form is `None` if the character is visible itself."""
    for character in text:
        category = unicodedata.category(character)
        if character in VISIBLE:
            yield character, VISIBLE[character]
        elif category in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"} or _IGNORABLE.match(character):
            yield character, character.encode("unicode_escape").decode("ascii")
        else:
            yield character, None


def command_name() -> str:
    """Return the words before a subcommand, as the process was started: a user can type what is printed."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py" and program.parent.name == "embedlayer":
        python = Path(sys.executable)
        return f"{_typed(python, 'python', 'python3', python.name)} -m embedlayer"
    return _typed(program, "embedlayer") if program.stem == "embedlayer" else "embedlayer"


def command_line(*words: object) -> str:
    """Return a command of `embedlayer`, from its subcommand and arguments, as a line to type, quoted for a shell."""
    return " ".join([command_name(), *(word if word == "..." else shlex.quote(word) for word in map(str, words))])


def _typed(program: Path, *names: str) -> str:
    """Return the first name by which the shell finds a program in the same folder, else the program's path, quoted."""
    folder = Path(os.path.abspath(program)).parent
    for name in names:
        command = shutil.which(name)
        if command is not None and Path(os.path.abspath(command)).parent == folder:
            return name
    path = folder / program.name
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))
