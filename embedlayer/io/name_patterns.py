"""Patterns over names of modules, matched in bounded time: the part of regular expressions that adapters of PEFT need.

Python's `re` tries one choice after another. A pattern from a file, such as `(a+)+b`, can take it years.
`NamePattern` follows all choices at once: `n` characters of a name and `m` of a pattern take time in proportion to
`n * m` at most.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from embedlayer.core.errors import CheckpointError

LONGEST = 1000
"""Most characters of a pattern."""

_DEEPEST = 20
_CLASSES: dict[str, Callable[[str], bool]] = {
    "d": str.isdecimal,
    "w": lambda letter: letter.isalnum() or letter == "_",
    "s": str.isspace,
}
_PUNCTUATION = "^$.*+?{}[]()|\\-/,:;<>=!#&~@%'\"` "


class _Letter(NamedTuple):
    """Read one character, if the test holds for it."""

    holds: Callable[[str], bool]


class _Jump(NamedTuple):
    """Go on at each of these offsets from here, without reading a character."""

    offsets: tuple[int, ...]


class _Place(NamedTuple):
    """Go on only at the start of the name (`^`), or only at its end (`$`)."""

    at_end: bool


_Program = list[_Letter | _Jump | _Place]


class NamePattern:
    r"""A pattern that matches a whole name, or the last parts of one, after a dot.

    A pattern consists of letters, digits, `_` and escaped punctuation, `.`, `\d`, `\w`, `\s`, classes such as `[a-z_]`
    and `[^0-9]`, groups `(...)` and `(?:...)`, `|`, `*`, `+`, `?`, `^` and `$`, with their meaning in `re`.

    Args:
        pattern: The pattern.
        source: Path or name of the file and the key, for the error.

    Raises:
        CheckpointError: The pattern has another element, is not complete, or is longer than `LONGEST`.

    Example:
        >>> pattern = NamePattern(r"layers\.\d+\.(q|k)_proj", "adapter_config.json")
        >>> pattern.matches("model.layers.12.k_proj"), pattern.matches("model.layers.x.k_proj")
        (True, False)

    Reference: Thompson, Regular Expression Search Algorithm, 1968.
    """

    def __init__(self, pattern: str, source: object) -> None:
        self._pattern, self._source, self._at = pattern, source, 0
        if len(pattern) > LONGEST:
            raise self._refusal(f"it has {len(pattern)} characters, and at most {LONGEST} are read")
        program = self._alternatives(0)
        if self._at < len(pattern):
            raise self._refusal(f"the {pattern[self._at]!r} at character {self._at + 1} closes nothing")
        first_parts: _Program = [*_repeated([_Letter(_is_no_line_break)], "*"), _Letter(".".__eq__)]
        self._program: _Program = [*_repeated(first_parts, "?"), *program]
        # with nothing to choose but where it starts, `re` is bounded too, and 100 times as fast
        self._fixed = None if {*pattern} & {*"*+?|"} else re.compile(rf"(.*\.)?({pattern})$")

    def matches(self, name: str) -> bool:
        """Return whether the pattern matches the name, or all of it after one of its dots."""
        if self._fixed is not None:
            return self._fixed.match(name) is not None
        places = self._reached({0}, at_start=True, at_end=not name)
        for index, letter in enumerate(name):
            letters = ((place, self._at_place(place)) for place in places)
            read = {place + 1 for place, each in letters if isinstance(each, _Letter) and each.holds(letter)}
            places = self._reached(read, at_start=False, at_end=index == len(name) - 1)
            if not places:
                return False
        return len(self._program) in places

    def _at_place(self, place: int) -> _Letter | _Jump | _Place | None:
        """Return the instruction at a place, or `None` at the end of the program."""
        return self._program[place] if place < len(self._program) else None

    def _reached(self, places: set[int], *, at_start: bool, at_end: bool) -> set[int]:
        """Return `places` and all that follow from them without reading a character.

        `at_start` says that no character of the name was read yet, and `at_end` that all were read.
        """
        reached, waiting = set(places), list(places)
        while waiting:
            place = waiting.pop()
            match self._at_place(place):
                case _Jump(offsets):
                    after = {place + offset for offset in offsets}
                case _Place(at_end=needs_end) if at_end if needs_end else at_start:
                    after = {place + 1}
                case _:
                    continue
            waiting += after - reached
            reached |= after
        return reached

    def _alternatives(self, depth: int) -> _Program:
        """Read sequences separated by `|`, up to the end of the pattern or of the group, and return their program.

        `depth` is the number of groups around them.
        """
        if depth > _DEEPEST:
            raise self._refusal(f"groups are nested more than {_DEEPEST} times")
        program = self._sequence(depth)
        while self._take("|"):
            other = self._sequence(depth)
            program = [_Jump((1, len(program) + 2)), *program, _Jump((len(other) + 1,)), *other]
        return program

    def _sequence(self, depth: int) -> _Program:
        """Read elements one after another, up to `|`, `)` or the end."""
        program: _Program = []
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            element = self._element(depth)
            if self._at < len(self._pattern) and (sign := self._pattern[self._at]) in "*+?{":
                self._at += 1
                if element and isinstance(element[0], _Place) and len(element) == 1:
                    raise self._refusal(f"the {sign!r} at character {self._at} repeats nothing")
                if sign == "{" or (self._at < len(self._pattern) and self._pattern[self._at] in "*+?{"):
                    raise self._refusal(f"the repetition at character {self._at} is none of *, + and ?")
                element = _repeated(element, sign)
            program += element
        return program

    def _element(self, depth: int) -> _Program:
        """Read one element without its repetition."""
        letter = self._next()
        if letter == "(":
            if self._take("?") and not self._take(":"):
                raise self._refusal(f"the group at character {self._at - 1} is none of (...) and (?:...)")
            program = self._alternatives(depth + 1)
            if not self._take(")"):
                raise self._refusal("a group is not closed")
            return program
        if letter in "*+?{":
            raise self._refusal(f"the {letter!r} at character {self._at} repeats nothing")
        if letter in "^$":
            return [_Place(letter == "$")]
        if letter == "[":
            return [_Letter(self._class())]
        if letter == ".":
            return [_Letter(_is_no_line_break)]
        return [_Letter(self._escaped() if letter == "\\" else letter.__eq__)]

    def _escaped(self) -> Callable[[str], bool]:
        r"""Read what follows a backslash, such as the `d` of `\d` or punctuation; return a test of a character."""
        letter = self._next()
        if letter in _CLASSES:
            return _CLASSES[letter]
        if letter in _PUNCTUATION:
            return letter.__eq__
        raise self._refusal(f"\\{letter} at character {self._at - 1} is not read")

    def _class(self) -> Callable[[str], bool]:
        """Read a character class up to its `]`, and return a test of a character."""
        negated = self._take("^")
        tests: list[Callable[[str], bool]] = []
        while (letter := self._next()) != "]" or not tests:
            if letter in "[]":
                raise self._refusal(f"the {letter!r} at character {self._at} within a class is not read: escape it")
            test = self._escaped() if letter == "\\" else letter.__eq__
            following = self._pattern[self._at : self._at + 2]
            if len(following) == 2 and following[0] == "-" and following[1] != "]":
                last = following[1]
                if letter == "\\" or last in "\\[" or last < letter:
                    raise self._refusal(f"the range {letter}-{last} is not read")
                self._at += 2
                test = partial(_is_between, letter, last)
            tests.append(test)
        return lambda letter: any(holds(letter) for holds in tests) != negated

    def _next(self) -> str:
        """Read the next character."""
        if self._at == len(self._pattern):
            raise self._refusal("it ends too early")
        self._at += 1
        return self._pattern[self._at - 1]

    def _take(self, letter: str) -> bool:
        """Read the next character if it is this one; return whether it is."""
        is_next = self._pattern[self._at : self._at + 1] == letter
        self._at += is_next
        return is_next

    def _refusal(self, why: str) -> CheckpointError:
        """Return the error for a pattern that is not read."""
        shown = ascii(self._pattern[:100])
        return CheckpointError(
            f"{self._source}: the pattern {shown} is not read: {why}. Names, ., \\d, \\w, classes, groups, |, *, + and "
            f"? are read. Write the names of the modules instead."
        )


def _repeated(program: _Program, sign: str) -> _Program:
    """Return a program that runs another one any number of times (`*`), at least once (`+`), or at most once (`?`)."""
    if sign == "?":
        return [_Jump((1, len(program) + 1)), *program]
    if sign == "+":
        return [*program, _Jump((-len(program), 1))]
    return [_Jump((1, len(program) + 2)), *program, _Jump((-len(program) - 1,))]


def _is_no_line_break(letter: str) -> bool:
    """Return whether `.` matches a character."""
    return letter != "\n"


def _is_between(first: str, last: str, letter: str) -> bool:
    """Return whether a character is in a range of code points, both ends included."""
    return first <= letter <= last
