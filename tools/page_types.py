"""TypeScript declarations of the server's answers, from the records of `explorer.answers` and `explorer.text_answers`.

`python tools/page_types.py` prints them; `--write` writes `embedlayer/explorer/page/answers.d.ts`.
"""

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from embedlayer.explorer import answers, routes, text_answers

FILE = Path(__file__).parent.parent / "embedlayer/explorer/page/answers.d.ts"
PLAIN: dict[object, str] = {
    int: "number",
    float: "number",
    str: "string",
    bool: "boolean",
    bytes: "ArrayBuffer",
    NoneType: "null",
    object: "unknown",
}
HEAD = """/** Answers of the server, by `python tools/page_types.py --write`: edit answers.py or text_answers.py. */

"""

TYPES = [*vars(answers).items(), *vars(text_answers).items()]
ALIASES: dict[object, str] = {
    value: name for name, value in TYPES if get_origin(value) in (Literal, tuple, Union, UnionType)
}
"""The types with a name of their own."""

ANSWERS: dict[str, Callable[..., Any]] = {
    "manifest": routes.manifest,
    **{name: route.answer for name, route in routes.ROUTES.items()},
    **routes.PAIRS,
}
"""The functions that return the answer of each route."""


def typescript(kind: Any) -> str:
    """Return a Python type of JSON values, or bytes, in TypeScript, by its name if it has one."""
    return ALIASES[kind] if kind in ALIASES else spelled_out(kind)


def spelled_out(kind: Any) -> str:
    """Return a Python type in TypeScript without its own name.

    Raises:
        TypeError: The type has no counterpart, such as `Any`.
    """
    origin, parts = get_origin(kind), get_args(kind)
    if kind in PLAIN:
        return PLAIN[kind]
    if is_typeddict(kind):
        return str(kind.__name__)
    if origin is Literal:
        return " | ".join(f'"{part}"' for part in parts)
    if origin in (Union, UnionType):
        return " | ".join(dict.fromkeys(map(typescript, parts)))
    if origin is list:
        part = typescript(parts[0])
        return f"({part})[]" if " " in part else f"{part}[]"
    if origin is tuple:
        return f"[{', '.join(map(typescript, parts))}]"
    if origin is dict:
        return f"Record<string, {typescript(parts[1])}>"
    raise TypeError(f"{kind!r} has no type in the page: use a record of explorer/answers.py.")


def attributes(text: str) -> dict[str, str]:
    """Return the entries of the section `Attributes` of a docstring, each in one line."""
    entries: dict[str, str] = {}
    name = ""
    for line in text.partition("Attributes:\n")[2].splitlines():
        if line.startswith("        "):
            entries[name] += f" {line.strip()}"
        elif ": " in line:
            name, entries[line.strip().partition(": ")[0]] = line.strip().partition(": ")[::2]
    return entries


def interface(record: type) -> str:
    """Return the declaration of a `TypedDict`, with its docstring as comments."""
    text = inspect.cleandoc(record.__doc__ or "")
    notes = attributes(text)
    lines = [f"/** {text.splitlines()[0]} */", f"export interface {record.__name__} {{"]
    for name, kind in get_type_hints(record).items():
        lines += [f"  /** {notes[name]} */"] if name in notes else []
        lines.append(f"  {name}{'' if name in record.__required_keys__ else '?'}: {typescript(kind)};")  # type: ignore[attr-defined]
    return "\n".join([*lines, "}", ""])


def declarations() -> str:
    """Return the whole file: every type and record, and `Answers`, the answer of each route."""
    records = [value for _, value in TYPES if is_typeddict(value)]
    entries = [f'  "{name}": {typescript(get_type_hints(made)["return"])};' for name, made in ANSWERS.items()]
    aliases = [f"export type {name} = {spelled_out(kind)};" for kind, name in ALIASES.items()]
    table = ["/** The answer to the request of each name. */", "export interface Answers {", *entries, "}", ""]
    return HEAD + "\n".join([*aliases, "", *map(interface, records), *table])


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        FILE.write_text(declarations())
    else:
        print(declarations(), end="")
