"""What older releases lack: a test that needs it is skipped with these, and fails with the pinned ones."""

from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import transformers
from packaging.version import Version
from torch import Tensor

SINCE = {
    "token without a row in a per-layer table of Gemma 3n": "5.21",
    "YaRN of one layer type": "5.9",
    "accents of RemBERT's tokenizer": "5.14",
    "settings of ALBERT's tokenizer": "5.14",
    "text positions of ERNIE 4.5 VL": "5.24",
    "rotation of vision towers": "5.24",
    "sections of Qwen2-VL by default": "5.24",
    "configuration of DBRX from its dictionary": "5.24",
    "tied head of Voxtral Realtime's language model": "5.10",
    "encoder-decoder of any two models": "5.24",
    "rules of Qwen2's tokenizer": "5.24",
    "codebooks of Higgs Audio v2 other than 8": "5.18",
    "tokenizer classes of model types": "5.24",
}
"""What transformers computes otherwise, or cannot do, before this release."""


ROOT = Path(__file__).parents[1]


def pins(file: str = "constraints.txt") -> dict[str, str]:
    """Return the version of each package in a file of constraints."""
    lines = [line for line in (ROOT / file).read_text().splitlines() if not line.startswith("#")]
    return {name.replace("-", "_"): pin for name, _, pin in (line.partition("==") for line in lines)}


@cache
def is_older() -> bool:
    """Return whether torch, transformers or PEFT is older than the release that is pinned, or missing."""
    try:
        return any(Version(version(name)) < Version(pins()[name]) for name in ("torch", "transformers", "peft"))
    except PackageNotFoundError:
        return True


def has(name: str) -> bool:
    """Return whether a module, or an attribute of a module, can be imported."""
    module, _, attribute = name.partition(":")
    try:
        imported = import_module(module)
    except ImportError:
        return False
    return not attribute or hasattr(imported, attribute)


def skip_without(name: str) -> None:
    """Skip the test if older releases are installed that lack `name`."""
    if is_older() and not has(name):
        pytest.skip(f"these releases lack {name}")


def skip_without_type(model_type: str) -> None:
    """Skip the test if an older transformers is installed that lacks a model type."""
    if is_older() and model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this release of transformers lacks {model_type}")


def skip_before(what: str) -> None:
    """Skip the test if the installed transformers is older than `SINCE` says for `what`."""
    if Version(transformers.__version__) < Version(SINCE[what]):
        pytest.skip(f"{what} is compared since transformers {SINCE[what]}")


def per_layer_rows(model: Any, ids: Tensor) -> Tensor:
    """Return the rows of `ids` in the per-layer table; before 5.14, Gemma 4 requires its input vectors as well."""
    others = len(signature(model.get_per_layer_inputs).parameters) - 1
    rows: Tensor = model.get_per_layer_inputs(ids, *[None] * others)
    return rows
