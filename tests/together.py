"""Calls of several tests on ranks that start once: each rank takes a twentieth of a second of the CPU to start."""

import functools
from typing import Any

from processes import on_ranks

Call = tuple[Any, ...]
"""A function, and its arguments."""


def together(ranks: int, calls: tuple[Call, ...], call: Call) -> list[Any]:
    """What `call` returns on each of `ranks` processes; if it is one of `calls`, they make all of them, once."""
    return _results(ranks, calls if call in calls else (call,))[call]


@functools.cache
def _results(ranks: int, calls: tuple[Call, ...]) -> dict[Call, list[Any]]:
    """What each of `calls` returns on each of `ranks` processes, which make one call after the other."""
    found = on_ranks(ranks, all_of, calls)
    return {call: [results[number] for results in found] for number, call in enumerate(calls)}


def all_of(calls: tuple[Call, ...]) -> list[Any]:
    """What each call returns."""
    return [function(*arguments) for function, *arguments in calls]
