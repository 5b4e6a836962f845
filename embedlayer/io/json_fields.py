"""Checked JSON: the fields of this library's own files, by type and range, before anything is computed from them.

What a file holds is stated as a `TypedDict`, or is the signature of the constructor that its values go to. A wrong
field is an error that names the file, the field, and what is expected there.
"""

import json
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, Required, Union, get_args, get_origin

from embedlayer.errors import CheckpointError

MAX_INT64 = 2**63 - 1
"""The largest whole number: what fits into int64."""

MAX_PRINTED = 60


class Range(NamedTuple):
    """Bounds of a number, both included, as in `Annotated[int, Range(1, 8)]`; NaN is in no range."""

    least: float = -math.inf
    most: float = math.inf


Count = Annotated[int, Range(0, MAX_INT64)]
"""A whole number from 0 on."""


def parse_json(text: str | bytes, source: object) -> Any:
    """Parse JSON that is UTF-8 text throughout.

    Args:
        text: The JSON.
        source: Where it is from, as errors call it.

    Raises:
        CheckpointError: It is not JSON, or a string in it holds half of a surrogate pair, which no file can hold.
    """
    try:
        text = text if isinstance(text, str) else text.decode()
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source} is not JSON ({error}): it is damaged or another kind of file.") from error
    if "\\u" in text or not text.isascii():  # only these can hold half of a pair
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise CheckpointError(
                f"{source} holds a string with {error.object[error.start]!a}, half of a surrogate pair: it is damaged."
            ) from error
    return value


def check_fields(value: object, kind: type, source: object) -> None:
    """Return if `value` is a JSON object with the fields of a `TypedDict`; further ones are allowed.

    Raises:
        CheckpointError: A field is missing, or has another type or range; the message names it.

    Example:
        >>> class Sizes(typing.TypedDict):
        ...     rows: Count
        >>> check_fields({"rows": 3}, Sizes, "sizes.json")
    """
    for fault in _faults(value, kind, ""):
        raise CheckpointError(f"{source}: {fault}. The file is damaged, or was written by another program.")


def check_arguments(function: Callable[..., Any], values: Mapping[str, object], source: object) -> None:
    """Return if `values` have the types that the signature of a function, or a constructor, states by name.

    Names that the signature lacks are left to the call.

    Raises:
        CheckpointError: A value has another type; the message names it.
    """
    hints = typing.get_type_hints(function.__init__ if isinstance(function, type) else function)  # type: ignore[misc]
    for name, value in values.items():
        for fault in _faults(value, hints.get(name, Any), name):
            raise CheckpointError(f"{source}: {fault}.")


def _faults(value: object, kind: Any, path: str) -> Iterator[str]:
    """What is wrong with a value, the first first."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (NotRequired, Required):
        yield from _faults(value, inner[0], path)
    elif origin is Annotated:
        yield from _faults(value, inner[0], path)
        if isinstance(value, int | float):
            for bound in inner[1:]:
                if isinstance(bound, Range) and not bound.least <= value <= bound.most:
                    yield f"{path} is {printable(value)}, outside {printable(bound.least)} to {printable(bound.most)}"
    elif typing.is_typeddict(kind):
        yield from _faults_of_object(value, kind, path)
    elif not _fits(value, kind, origin, inner):
        yield f"{path or 'the whole'} is {printable(value)}, where {_name(kind)} is expected"
    elif origin in (list, tuple, Sequence) and isinstance(value, list | tuple):
        if origin is tuple and inner[-1] is not Ellipsis:
            kinds: Sequence[Any] = inner
        else:
            kinds = [inner[0]] * len(value)
        for number, (one, expected) in enumerate(zip(value, kinds, strict=True)):
            yield from _faults(one, expected, f"{path}[{number}]")
    elif origin in (dict, Mapping) and isinstance(value, dict):
        for key, one in value.items():
            yield from _faults(one, inner[1], f"{path}[{printable(key)}]")


def _faults_of_object(value: object, kind: Any, path: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{path or 'the whole'} is {printable(value)}, where an object is expected"
        return
    for name, expected in typing.get_type_hints(kind, include_extras=True).items():
        place = f"{path}.{name}".lstrip(".")
        if name in value:
            yield from _faults(value[name], expected, place)
        elif name in kind.__required_keys__:
            yield f"{place} is missing"


def _fits(value: object, kind: Any, origin: Any, inner: tuple[Any, ...]) -> bool:
    """Whether a value is of a type, as far as its outermost part goes."""
    if kind is Any or isinstance(kind, typing.TypeVar):
        return True
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in inner)
    if origin in (Union, types.UnionType):
        return any(not any(_faults(value, choice, "")) for choice in inner)
    if kind is None or kind is types.NoneType:
        return value is None
    if kind is bool or kind is str:
        return type(value) is kind
    if kind is int:
        return type(value) is int and -MAX_INT64 <= value <= MAX_INT64
    if kind is float:
        return type(value) is float or (type(value) is int and -MAX_INT64 <= value <= MAX_INT64)
    if origin in (list, tuple, Sequence):
        fixed = origin is tuple and inner[-1] is not Ellipsis
        return isinstance(value, list | tuple) and (not fixed or len(value) == len(inner))
    if origin in (dict, Mapping) or kind is dict:
        return isinstance(value, dict)
    return isinstance(value, kind) if isinstance(kind, type) else True


def _name(kind: Any) -> str:
    """A type as people call it."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin in (Union, types.UnionType):
        return " or ".join(_name(choice) for choice in inner)
    if origin is Annotated:
        return _name(inner[0])
    words = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", types.NoneType: "null"}
    if kind in words:
        return words[kind]
    if origin in (list, Sequence) or (origin is tuple and inner[-1] is Ellipsis):
        return f"a list of {_name(inner[0])}"
    if origin is tuple:
        return f"a list of {len(inner)} values"
    if origin in (dict, Mapping) or kind is dict:
        return "an object"
    return str(getattr(kind, "__name__", kind))


def printable(value: object) -> str:
    """A value for an error: short, and of characters that every terminal has."""
    text = ascii(value) if not isinstance(value, dict) else "an object"
    return text if len(text) <= MAX_PRINTED else f"{text[:MAX_PRINTED]}..."
