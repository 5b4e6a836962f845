"""The exported names and their signatures."""

import functools
import inspect
from collections.abc import Iterator
from importlib import import_module

from api import ROOT, SNAPSHOT, snapshot


def test_the_public_interface_is_the_one_in_the_snapshot() -> None:
    """If the change is wanted, run `python tools/api.py` and commit tests/api.txt with it."""
    assert snapshot().splitlines() == SNAPSHOT.read_text().splitlines()


def documented(value: object) -> Iterator[tuple[str, object]]:
    """Yield a function, or a class and its public methods and properties, those of our base classes included."""
    yield "", value
    for base in value.__mro__ if isinstance(value, type) else ():
        if base.__module__.startswith("embedlayer"):
            for name, part in vars(base).items():
                is_described = inspect.isroutine(part) or isinstance(part, property | functools.cached_property)
                if is_described and not name.startswith("_"):
                    yield f".{name}", getattr(part, "__func__", part)


def test_exported_names_and_their_public_methods_say_what_they_do() -> None:
    silent = set()
    for stub in (ROOT / "embedlayer").glob("*/__init__.pyi"):
        package = import_module(f"embedlayer.{stub.parent.name}")
        for name in package.__all__:
            value = getattr(package, name)
            if inspect.isroutine(value) or isinstance(value, type):
                silent |= {f"{package.__name__}.{name}{part}" for part, each in documented(value) if not each.__doc__}
    assert not silent
