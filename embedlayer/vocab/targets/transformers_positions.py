"""Live models of transformers: the configuration of rotary positions, and the modules that compute their angles."""

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from embedlayer.core.errors import CheckpointError
from embedlayer.io.files import JsonObject
from embedlayer.positions.position import Position
from embedlayer.positions.rotary.extension import extend_rotary
from embedlayer.vocab.targets.positions import (
    PositionsEdit,
    PositionsRequest,
    check_rotary,
    rotary_change,
    shown_method,
)

FREQUENCIES = "inv_freq"


def is_transformers(model: nn.Module) -> bool:
    """Return whether a module has a configuration of transformers, and no position scheme of this library."""
    is_own = isinstance(getattr(model, "position", None), Position)
    return not is_own and hasattr(getattr(model, "config", None), "get_text_config")


def extend_live(model: nn.Module, request: PositionsRequest) -> tuple[PositionsEdit, JsonObject]:
    """Extend the rotary positions of a live model of transformers in place.

    Returns:
        The edit, and the changed keys of the configuration: `before` and `after`.

    Raises:
        CheckpointError: `extend_rotary` refuses the configuration, or the model has no module that computes its angles.
        SizeError: The request does not fit the positions.
    """
    config = _text_config(model)
    described = json.loads(json.dumps(config.to_dict(), default=str))
    check_rotary(described, type(model).__name__, "save the model, extend its folder, and load that.")
    longer = extend_rotary(described, request.length, **request.rotary_options)
    after = {key: value for key, value in longer.config.items() if value != described.get(key)}
    before = {key: described.get(key) for key in after}
    set_keys(model, after, before)
    changes = tuple(rotary_change(each, longer.original_length) for each in longer.changes)
    method, lengths = shown_method(request.rotary_options["method"]), (longer.old_length, request.length)
    return PositionsEdit(method, lengths, longer.original_length, changes), {"before": before, "after": after}


def set_keys(model: nn.Module, values: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Set keys of the configuration of a live model, and build the modules anew that compute angles from it.

    Raises:
        CheckpointError: The keys do not have the values in `expected`, or there are no such modules.
    """
    config = _text_config(model)
    if json.loads(json.dumps({key: getattr(config, key, None) for key in expected}, default=str)) != dict(expected):
        raise CheckpointError("The model has other positions than this edit left: nothing was changed.")
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if getattr(child, "config", None) is config
        and any(key.endswith(FREQUENCIES) for key, _ in child.named_buffers(recurse=False))
    ]
    if not places:
        raise CheckpointError(
            f"{type(model).__name__} has no module that computes rotary angles from its configuration: save the model, "
            f"extend its folder, and load that."
        )
    for key, value in values.items():
        setattr(config, key, value)
    for parent, name, child in places:
        old: Tensor = next(buffer for key, buffer in child.named_buffers() if key.endswith(FREQUENCIES))
        build: Any = type(child)
        setattr(parent, name, build(config).to(old.device).train(child.training))


def _text_config(model: nn.Module) -> Any:
    """Return the configuration object of the language model of a live model of transformers."""
    config: Any = model.config
    return config.get_text_config()
