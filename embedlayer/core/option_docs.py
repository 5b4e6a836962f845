"""Keyword options of functions, which a `TypedDict` declares: shown in their docstrings, and refused if unknown."""

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def unknown_option(options: Mapping[str, object], kind: type, call: str) -> str | None:
    """Return the sentence that refuses all options that a class of options does not declare, or `None`."""
    names = [name for name in options if name not in kind.__annotations__]
    if not names:
        return None
    which = "option" if len(names) == 1 else "options"
    return f"{call} has no {which} {', '.join(names)}. Its options: {', '.join(kind.__annotations__)}."


def show_options(*kinds: type) -> Callable[[Function], Function]:
    """Decorator: insert the attributes of `TypedDict` classes behind the entry of a function's `**options`."""
    sections = [inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2] for kind in kinds]
    entries = "\n".join(inspect.cleandoc(section.partition("\n\n")[0]) for section in sections)

    def decorate(function: Function) -> Function:
        if function.__doc__ is not None and entries:  # python -OO has no docstrings
            function.__doc__ = _ENTRY.sub(
                lambda found: f"{found[0]}\n{textwrap.indent(entries, found['indent'])}", function.__doc__, count=1
            )
        return function

    return decorate


_ENTRY = re.compile(r"^(?P<indent> +)\*\*\w+: .*(?:\n(?P=indent) +\S.*)*", re.MULTILINE)
"""The entry of variable keyword arguments in a section of arguments, with its further lines."""
