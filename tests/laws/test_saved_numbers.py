"""Kinds of layers x numbers of their configuration x hostile values: one error of ours, or a layer that can exist."""

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from covering import looped, some
from fuzz import LAYERS as SAVED
from kinds import BAGS, INJECTIONS, LAYERS, LOOKUP_TABLES, POSITIONS, STREAM_HEADS, STREAM_TABLES, TABLES, UNTIED_HEADS

from embedlayer import EmbedLayerError

HUGE = (2**50, -(2**50), 2**70, 10**400)
NO_NUMBERS = (math.nan, math.inf, -math.inf)
NEVER_NEGATIVE = {"dropout", "norm_eps", "eps", "pad_to_multiple_of", "init_std", "num_layers", "embed_dim", "head_dim"}
NEVER_NEGATIVE |= {"num_heads", "vocab_size", "max_seq_len", "rank", "group_size", "factor", "num_buckets", "width"}
SOUND = [("multipliers", 2**50)]
"""Factors of a hash, of any 63 bits."""

KINDS: dict[str, Callable[[], Any]] = {
    **{f"layer, {name}": make for name, make in SAVED.items()},
    **{f"table, {name}": make for name, make in {**TABLES, **LOOKUP_TABLES}.items() if "file" not in name},
    **{f"bag, {name}": make for name, make in BAGS.items()},
    **{f"streams, {name}": STREAM_TABLES[name] for name in ("dense", "shared padding")},
    **{f"position, {name}": make for name, make in POSITIONS.items()},
    **{f"head, {name}": make for name, make in UNTIED_HEADS.items()},
    **{f"streams, {name}": make for name, make in STREAM_HEADS.items()},
    **{f"injection, {name}": make for name, make in INJECTIONS.items()},
    "GPTEmbedding": LAYERS["GPTEmbedding"],
    "DecoderLM": LAYERS["DecoderLM"],
}


def numbers(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to all numbers in a description; of a list to its first ones."""
    if isinstance(value, dict | list | tuple):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value[:2]):
            yield from numbers(inner, (*way, key))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield way


def changed(value: Any, way: tuple[Any, ...], number: Any) -> Any:
    value = outer = json.loads(json.dumps(value))
    for key in way[:-1]:
        outer = outer[key]
    outer[way[-1]] = number
    return value


ALWAYS = [
    "table, delta",
    "table, int4, q4_0",
    "position, axial",
    "position, rotary, query scaling",
    "position, relative",
]
ALWAYS += [name for name in KINDS if not name.startswith(("table", "position", "bag"))]
LIKE_OTHERS = ["layer, decoder", "DecoderLM", "injection, n-gram at the input", "streams, own rows, factorised"]
"""Kinds whose parts are those of others: `--all` adds them."""


@looped("kind", some({*ALWAYS} - {*LIKE_OTHERS}, KINDS))
def test_a_hostile_number_is_one_error(kind: str) -> None:
    layer = KINDS[kind]()
    if not hasattr(layer, "from_config"):
        pytest.skip("it is saved by its parts")
    description, accepted, said = json.loads(json.dumps(layer.config)), [], []
    for way in numbers(description):
        name = next(key for key in reversed(way) if isinstance(key, str))
        values: list[Any] = [*NO_NUMBERS, *HUGE, True, "1"]
        values += [-1] if name in NEVER_NEGATIVE else []
        for value in values:
            try:
                with torch.device("meta"):
                    layer.from_config(changed(description, way, value))
            except EmbedLayerError as error:
                said.append(str(error))
            else:
                accepted += [(name, value)] if (name, value) not in SOUND else []
    assert not accepted
    assert all(len(text) < 1000 for text in said)
