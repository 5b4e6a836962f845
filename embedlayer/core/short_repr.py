"""A one-line `repr` for records that hold a model, a tokenizer or tensors: sizes instead of contents."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

LONGEST = 80
"""Longest `repr` of a value, in characters; a longer one is replaced by the type."""


def short_repr(record: Any) -> str:
    """Return a one-line description of a dataclass or named tuple, with sizes instead of the contents of large fields.

    Assign this function to `__repr__` in the class.

    Example:
        >>> from typing import NamedTuple
        >>> Pair = NamedTuple("Pair", [("model", torch.nn.Module), ("size", int)])
        >>> short_repr(Pair(torch.nn.Linear(3, 2), 5))
        'Pair(model=<Linear, 8 parameters>, size=5)'
    """
    if dataclasses.is_dataclass(record):
        names = [field.name for field in dataclasses.fields(record) if field.repr]
    else:
        names = list(record._fields)
    shown = ", ".join(f"{name}={_described(getattr(record, name))}" for name in names)
    return f"{type(record).__name__}({shown})"


def _described(value: Any) -> str:
    """Return a short text for the value of a field.

    It is type and size for a module, tensor, tokenizer, or collection of more than three items. For other values it is
    the `repr`, or only the type if the `repr` is longer than `LONGEST` or has several lines.
    """
    from tokenizers import Tokenizer
    from torch import Tensor, nn

    kind = type(value).__name__
    if isinstance(value, Tokenizer):
        return f"<{type(value.model).__name__} tokenizer, {value.get_vocab_size():,} tokens>"
    if isinstance(value, nn.Module):
        return f"<{kind}, {sum(parameter.numel() for parameter in value.parameters()):,} parameters>"
    if isinstance(value, Tensor):
        return f"<{str(value.dtype).removeprefix('torch.')} tensor {tuple(value.shape)}>"
    if isinstance(value, Mapping | Collection) and not isinstance(value, str | bytes) and len(value) > 3:
        return f"<{kind} of {len(value):,}>"
    text = repr(value)
    return text if len(text) <= LONGEST and "\n" not in text else f"<{kind}>"
