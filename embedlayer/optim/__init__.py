"""Optimizers at the cost of the rows of a batch, their state by rows, parameter groups, and gradient clipping."""

from importlib import import_module
from typing import Any

import lazy_loader

OTHER_PATHS = {"RowAdagrad": "embedlayer", "RowAdamW": "embedlayer", "StochasticRounding": "embedlayer.tables"}
"""Names that this package has too, so that an optimizer and its options can be imported together."""

_own, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    """Import a public name, or one of `OTHER_PATHS`, when it is first used."""
    return getattr(import_module(OTHER_PATHS[name]), name) if name in OTHER_PATHS else _own(name)
