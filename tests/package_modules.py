"""The modules of the package, without those that need a package which is not installed here."""

import importlib
import pkgutil
from collections.abc import Iterator
from contextlib import suppress
from types import ModuleType

import pytest

import embedlayer

OPTIONAL = {"axolotl", "numba", "triton"}
"""Packages that some modules cannot be imported without; the others import none of them."""

NAMES = [found.name for found in pkgutil.walk_packages(embedlayer.__path__, "embedlayer.")]
NAMES = [name for name in NAMES if "__main__" not in name]


def import_or_skip(name: str) -> ModuleType:
    """Import a module of the package; skip the test if the package that it needs is missing."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL:
            raise
        pytest.skip(f"the package {error.name} is missing")


def package_modules() -> Iterator[ModuleType]:
    """Import all modules, except those that need a missing package."""
    for name in NAMES:
        with suppress(pytest.skip.Exception):
            yield import_or_skip(name)
