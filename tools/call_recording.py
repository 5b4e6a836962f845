"""Record the calls of functions in transformers' modeling files while a model runs.

Functions are recognised by their names, and rotated tensors by their shapes. Nothing here is for one model type.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

_ROTARY = re.compile(r"rotary|rope|rotate_queries")
_NOT_ROTARY = re.compile(r"parameters|index|rotate_half|vision|init|update|compute_|get_|embeddings_and|standardize")
_ANGLES = {"cos", "sin", "freqs", "freqs_cis", "position_embeddings", "sinusoidal_pos", "rotary_pos_emb", "emb", "pos"}
"""Parameters of rotary functions that hold angles, not queries or keys."""


class FunctionCall(NamedTuple):
    """A call of a function in a modeling file.

    Attributes:
        name: Name of the function.
        caller: Class of the module that called it.
        arguments: Arguments by name, as they were before the call.
        result: What the function returned.
    """

    name: str
    caller: str
    arguments: dict[str, Any]
    result: Any


def is_rotary(name: str) -> bool:
    """Return whether a function of this name rotates queries and keys."""
    name = name.lower()
    return bool(_ROTARY.search(name)) and not _NOT_ROTARY.search(name)


def rotated_tensors(call: FunctionCall) -> list[tuple[Tensor, Tensor]]:
    """Return the tensors that a rotary function got and returned, as pairs of the same shape."""
    given = [value for name, value in call.arguments.items() if name not in _ANGLES and _is_wide(value)]
    pairs = []
    for after in filter(_is_wide, tree_leaves(call.result)):
        before = next((each for each in given if each.shape == after.shape), None)
        if before is not None:
            given = [each for each in given if each is not before]
            pairs.append((before, after.detach().clone()))
    return pairs


def _is_wide(value: Any) -> bool:
    """Return whether a value is a tensor of real numbers with at least three dimensions."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 3


@contextmanager
def recorded_calls(
    model: nn.Module, keep: Callable[[str], bool], record: Callable[[FunctionCall], None]
) -> Iterator[None]:
    """Record calls of functions and methods of a model's modeling files while this context is entered.

    The functions are wrapped until the context is left, in the whole process. Calls inside of recorded calls are not
    recorded.

    Args:
        model: A model of transformers.
        keep: Name of a function -> whether its calls are recorded.
        record: Function that gets each call.
    """
    undo: list[tuple[Any, str, Any]] = []
    running: list[str] = []

    def wrapped(name: str, function: Any) -> Any:
        @wraps(function)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if running:
                return function(*args, **kwargs)
            kept = tree_map(lambda each: each.clone() if isinstance(each, Tensor) else each, (args, kwargs))
            running.append(name)
            try:
                result = function(*args, **kwargs)
            finally:
                running.pop()
            caller = type(sys._getframe(1).f_locals.get("self")).__name__
            arguments = inspect.signature(function).bind(*kept[0], **kept[1]).arguments
            record(FunctionCall(name, caller, dict(arguments), result))
            return result

        return recorded

    for module in sorted({type(each).__module__ for each in model.modules()}):
        if not module.startswith("transformers.models"):
            continue
        space = sys.modules[module]
        classes = [each for each in vars(space).values() if inspect.isclass(each) and each.__module__ == module]
        for owner in (space, *classes):
            for name, value in list(vars(owner).items()):
                is_static = isinstance(value, staticmethod)
                if (is_static or inspect.isfunction(value)) and keep(name):
                    undo.append((owner, name, value))
                    new = wrapped(name, value.__func__ if is_static else value)
                    setattr(owner, name, staticmethod(new) if is_static else new)
    try:
        yield
    finally:
        for owner, name, function in undo:
            setattr(owner, name, function)
