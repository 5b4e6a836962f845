"""Parse JSON and check its values: fields against a `TypedDict` or a function's signature, a configuration's numbers.

An error names the file, the field, its value and the expected type.
"""

import json
import math
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, Required, Union, get_args, get_origin

from embedlayer.core.errors import CheckpointError

MAX_INT64 = 2**63 - 1
"""Largest integer that int64 can represent."""

MAX_PRINTED = 60
_LISTS = (list, tuple, Sequence, Iterable)


class Range(NamedTuple):
    """Bounds of a number, both included, for the annotation of a field: `Annotated[int, Range(1, 8)]`."""

    # NaN is outside every range

    least: float = -math.inf
    most: float = math.inf


Count = Annotated[int, Range(0, MAX_INT64)]
"""An integer of at least 0."""

MAX_STEP = 2**31 - 1
"""Largest number of an optimizer step: rows store theirs as int32."""

Step = Annotated[int, Range(0, MAX_STEP)]
"""The number of an optimizer step."""

_MEASURED = "NaN and infinity are values too"

Measurement = Annotated[float, _MEASURED]
"""A number that may be NaN or infinite, such as the loss of a run that diverged. A `float` is finite."""


def parse_json(text: str | bytes, source: object) -> Any:
    """Parse JSON text and return the value: a dictionary, a list, a string, a number, a boolean or `None`."""
    try:
        text = text if isinstance(text, str) else text.decode()
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source} is not JSON ({error}): it is damaged or another kind of file.") from error
    if "\\u" in text or not text.isascii():  # only these can hold half of a pair
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"{error.object[error.start]!a}"
            raise CheckpointError(f"{source} is damaged: a string has {half}, half of a surrogate pair.") from error
    return value


def finite_json(value: Any) -> Any:
    """Return a JSON value with each NaN and infinity in it, which JSON does not have, replaced by `None`."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: finite_json(inner) for name, inner in value.items()}
    return [finite_json(inner) for inner in value] if isinstance(value, list | tuple) else value


def check_fields(value: object, kind: type, source: object) -> None:
    """Check that `value` is a JSON object with the fields of a `TypedDict`.

    A field of type `float` takes finite numbers, and a `Measurement` any. Fields that the `TypedDict` does not name are
    allowed. The message names the first fault.
    """
    for fault in _faults(value, kind, ""):
        raise CheckpointError(f"{source}: {fault}. The file is damaged, or was written by another program.")


def check_arguments(function: Callable[..., Any], values: Mapping[str, object], source: object) -> None:
    """Check that each value has the type that a function's signature states for the argument of that name."""
    hints = typing.get_type_hints(function.__init__ if isinstance(function, type) else function)  # type: ignore[misc]
    for name, value in values.items():
        for fault in _faults(value, hints.get(name, Any), name):
            raise CheckpointError(f"{source}: {fault}.")


def as_number(value: object, key: str, *, above: float = -math.inf) -> float:
    """Check that the value of a configuration key is a finite number above `above`, and return it as a `float`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not above < value <= sys.float_info.max:
        kind = "a positive number" if above == 0 else "a number"
        raise CheckpointError(f"The configuration's {key} must be {kind}, not {value!r}.")
    return float(value)


def as_whole_number(value: object, key: str, *, most: int = 2**31 - 1) -> int:
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    if type(number) is not int or number < 1:
        raise CheckpointError(f"The configuration's {key} must be a whole number of at least 1, not {value!r}.")
    if number > most:
        raise CheckpointError(f"The configuration's {key} {number:,} is larger than in any model: the file is damaged.")
    return number


def _faults(value: object, kind: Any, path: str) -> Iterator[str]:
    """Check a parsed JSON value against a type, and yield an error message for each difference."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (NotRequired, Required):
        yield from _faults(value, inner[0], path)
    elif origin is Annotated:
        if not (_MEASURED in inner[1:] and type(value) is float):
            yield from _faults(value, inner[0], path)
        if isinstance(value, int | float):
            for bound in inner[1:]:
                if isinstance(bound, Range) and not bound.least <= value <= bound.most:
                    yield f"{path} is {printable(value)}, outside {printable(bound.least)} to {printable(bound.most)}"
    elif typing.is_typeddict(kind):
        if not isinstance(value, dict):
            yield f"{path or 'the whole'} is {printable(value)}, where an object is expected"
            return
        for name, expected in typing.get_type_hints(kind, include_extras=True).items():
            place = f"{path}.{name}".lstrip(".")
            if name in value:
                yield from _faults(value[name], expected, place)
            elif name in kind.__required_keys__:
                yield f"{place} is missing"
    elif not _has_type(value, kind, origin, inner):
        if origin in (Union, types.UnionType):  # an object or a list of the right kind has a fault inside
            for one in inner:
                if get_origin(one) in (*_LISTS, dict, Mapping) and _has_type(
                    value, one, get_origin(one), get_args(one)
                ):
                    yield from _faults(value, one, path)
                    return
        yield f"{path or 'the whole'} is {printable(value)}, where {_name(kind)} is expected"
    elif origin in _LISTS and isinstance(value, list | tuple):
        kinds: Sequence[Any] = inner if origin is tuple and inner[-1] is not Ellipsis else [inner[0]] * len(value)
        for number, (one, expected) in enumerate(zip(value, kinds, strict=True)):
            yield from _faults(one, expected, f"{path}[{number}]")
    elif origin in (dict, Mapping) and isinstance(value, dict):
        for key, one in value.items():
            yield from _faults(one, inner[1], f"{path}[{printable(key)}]")


def _has_type(value: object, kind: Any, origin: Any, inner: tuple[Any, ...]) -> bool:
    """Return whether a value has a type: a class, or an annotation with this origin and these arguments."""
    if kind is Any or isinstance(kind, typing.TypeVar):
        return True
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in inner)
    if origin in (Union, types.UnionType):
        return any(not any(_faults(value, choice, "")) for choice in inner)
    if kind is int:
        return type(value) is int and -MAX_INT64 <= value <= MAX_INT64
    if kind is float:
        return math.isfinite(value) if type(value) is float else type(value) is int and abs(value) <= MAX_INT64
    if origin in _LISTS:
        fixed = origin is tuple and inner[-1] is not Ellipsis
        return isinstance(value, list | tuple) and (not fixed or len(value) == len(inner))
    if origin in (dict, Mapping):
        return isinstance(value, dict)
    return isinstance(value, kind) if isinstance(kind, type) else True


def _name(kind: Any) -> str:
    """Describe a type in words for an error message."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin in (Union, types.UnionType):
        return " or ".join(_name(choice) for choice in inner)
    if origin is Annotated:
        return _name(inner[0])
    words = {
        int: "a whole number",
        float: "a finite number",
        str: "a string",
        bool: "true or false",
        types.NoneType: "null",
    }
    if kind in words:
        return words[kind]
    if origin in (list, Sequence, Iterable) or (origin is tuple and inner[-1] is Ellipsis):
        return f"a list of {_name(inner[0])}"
    if origin is tuple:
        return f"a list of {len(inner)} values"
    if origin in (dict, Mapping) or kind is dict:
        return "an object"
    return str(getattr(kind, "__name__", kind))


def printable(value: object) -> str:
    """Return `ascii(value)`, cut to 60 characters, for an error message; a dictionary gives `"an object"`."""
    text = ascii(value) if not isinstance(value, dict) else "an object"
    return text if len(text) <= MAX_PRINTED else f"{text[:MAX_PRINTED]}..."
