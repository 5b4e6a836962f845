"""Whether an answer of the explorer's server is of the type that its function states."""

import json
from collections.abc import Callable
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from embedlayer.explorer.server import to_json


def conforms(value: Any, kind: Any) -> bool:
    """Whether a value that JSON represents is of a type, records of `explorer.answers` included."""
    origin, parts = get_origin(kind), get_args(kind)
    if is_typeddict(kind):
        hints = get_type_hints(kind)
        present = isinstance(value, dict) and kind.__required_keys__ <= value.keys()
        return present and all(conforms(value[name], hint) for name, hint in hints.items() if name in value)
    if origin is Literal:
        return value in parts
    if origin in (Union, UnionType):
        return any(conforms(value, part) for part in parts)
    if origin is list:
        return isinstance(value, list) and all(conforms(each, parts[0]) for each in value)
    if origin is tuple:
        same = isinstance(value, list) and len(value) == len(parts)
        return same and all(map(conforms, value, parts))
    if origin is dict:
        return isinstance(value, dict) and all(conforms(each, parts[1]) for each in value.values())
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number if kind is float else isinstance(value, kind) and (kind is not int or is_number)


def check(found: Any, function: Callable[..., Any]) -> None:
    """The answer of a function conforms to its return type."""
    kind = get_type_hints(function)["return"]
    assert isinstance(found, bytes) if kind is bytes else conforms(json.loads(to_json(found)), kind), function
