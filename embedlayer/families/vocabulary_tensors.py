"""Which parameters and buffers of a model have a size that follows its vocabulary, and at which axis.

There are two kinds of evidence. A family's record names the tensors of its checkpoints. A model of transformers is also
built on the meta device, with each number of tokens of its configuration as it is and increased by one: what gets
another shape together with the token table follows the vocabulary. That a size equals the number of tokens is no
evidence, because a width may equal it too.
"""

import copy
import importlib.util
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from embedlayer.core.errors import CheckpointError, transformers_errors
from embedlayer.families import MULTIMODAL, VOCAB_SIZE_KEYS, Family, family_of
from embedlayer.families.field_types import End
from embedlayer.io.files import JsonObject

Axes = dict[str, tuple[int, ...]]
"""From the name of a tensor to the axes whose size follows the vocabulary."""

PlainName = Callable[[str], str]
"""Function that removes from a name in a model what other libraries add to it where they wrap a module."""


class TensorRule(NamedTuple):
    """How an edit of the vocabulary moves a tensor."""

    axis: int  # of the tokens: 0, or -1 for the last one
    end: End | None  # which initialisation computes its values for new tokens; `None` if these are not known
    use: str = ""  # for an `end` of `None`: what the model does with the tensor, as a sentence without full stop


def families_in(config: JsonObject) -> list[Family]:
    """Return the record of each family that a configuration names, those of its nested configurations included."""
    own = family_of(config.get("model_type"))
    nested = [value for value in config.values() if isinstance(value, dict)]
    inner = [family for part in nested for family in families_in(part)]
    return inner if own is None else [own, *inner]


def tensor_rule(name: str, families: Iterable[Family], model_type: object = None) -> TensorRule | None:
    """Return how records say that a tensor is moved, by the end of its name; `None` if they do not name it."""
    tables = MULTIMODAL[model_type].table if isinstance(model_type, str) and model_type in MULTIMODAL else ()
    rules = [(tables, TensorRule(0, "table"))]
    for family in families:
        head, decoder = family.head, family.decoder_input
        others = [other for other in family.other_tables if other.of_tokens]
        rules += [((other.name,), TensorRule(0, other.end, other.use)) for other in others]
        rules += [(family.table if decoder is None else (*family.table, *decoder.table), TensorRule(0, "table"))]
        if head is not None:
            rules += [(head.weight, TensorRule(0, "head")), ((*head.bias, *head.columns), TensorRule(-1, "head"))]
        if family.per_layer is not None:
            rules += [((family.per_layer.table,), TensorRule(0, "per_layer"))]
    dotted = f".{name}"
    return next((rule for ends, rule in rules if any(dotted.endswith(f".{end}") for end in ends)), None)


def axes_by_build(model_class: Any, config: Any, known: Collection[str]) -> Axes:
    """Return the tensors of a class of transformers that follow the vocabulary, by building it on the meta device.

    It is built once as the configuration says, and once for each number of tokens in the configuration, increased by
    one. A number is that of the vocabulary if the shape of a tensor of `known`, the names of tables and heads, follows
    it. No memory is allocated for the weights; a build takes as long as `from_pretrained` without reading the files
    (0.1 s for 1,000 tensors). The axes of tied tensors are under each of their names.
    """
    parts = [(path, key, value) for path, part in _config_parts(config) for key, value in vars(part).items()]
    sizes = [each for each in parts if each[1] in VOCAB_SIZE_KEYS and type(each[2]) is int]
    before = _built_shapes(model_class, config) if sizes else {}
    axes: Axes = {}
    for path, key, size in sizes:
        other = copy.deepcopy(config)
        owner = other
        for name in path:
            owner = getattr(owner, name)
        setattr(owner, key, size + 1)
        after = _built_shapes(model_class, other)
        follows = {
            name: tuple(axis for axis, (old, new) in enumerate(zip(shape, after[name], strict=True)) if old != new)
            for name, shape in before.items()
            if after.get(name, shape) != shape
        }
        if follows.keys() & known:
            axes |= follows
    return axes


def axes_by_architecture(config: JsonObject, known: Collection[str]) -> Axes | None:
    """Return the tensors that follow the vocabulary in the class of transformers that a `config.json` names.

    The result has the axes of each tensor of the class, `()` for one that does not follow the vocabulary. It is `None`
    if transformers does not have the class or cannot build it, or if no number of tokens in the configuration
    determines the size of a tensor of `known`.
    """
    try:
        found = class_named_in(config)
        axes = axes_by_build(*found, known) if found is not None else {}
        return dict.fromkeys(_built_shapes(*found), ()) | axes if found is not None and axes else None
    except CheckpointError:
        return None


def class_named_in(config: JsonObject) -> tuple[Any, Any] | None:
    """Return the class of transformers that a `config.json` names, and its configuration."""
    classes = config.get("architectures")
    if importlib.util.find_spec("transformers") is None or not isinstance(classes, list) or len(classes) != 1:
        return None
    import transformers

    model_class = getattr(transformers, str(classes[0]), None)
    settings = configuration_of(config)
    return None if model_class is None or settings is None else (model_class, settings)


def configuration_of(content: JsonObject) -> Any:
    """Return a configuration as its class in transformers reads it."""
    model_type = content.get("model_type")
    if importlib.util.find_spec("transformers") is None or not isinstance(model_type, str):
        return None
    import transformers

    if model_type not in transformers.CONFIG_MAPPING:
        return None
    with transformers_errors(f"read the configuration of model type {model_type!r}"):
        return transformers.CONFIG_MAPPING[model_type].from_dict(_with_floats(content))


def _with_floats(value: Any) -> Any:
    """Return a copy of a value of a configuration file in which infinite numbers, which JSON lacks, are floats."""
    if isinstance(value, dict):
        is_float = value.keys() == {"__float__"}
        return float(value["__float__"]) if is_float else {key: _with_floats(each) for key, each in value.items()}
    return [_with_floats(each) for each in value] if isinstance(value, list) else value


def _config_parts(config: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield path and configuration for a configuration of transformers and those in it."""
    yield path, config
    for key, value in vars(config).items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from _config_parts(value, (*path, key))


def built_on_meta(model_class: Any, config: Any) -> Any:
    """Return a model of a class of transformers on the meta device, without memory for its weights."""
    config = copy.deepcopy(config)
    for _, part in _config_parts(config):
        if isinstance(vars(part).get("dtype"), str):
            part.dtype = getattr(torch, part.dtype)
    with (
        transformers_errors(f"build {model_class.__name__} on the meta device, to see what follows the vocabulary"),
        torch.random.fork_rng(devices=[]),  # some models draw numbers as they are built
        torch.device("meta"),
    ):
        return model_class(config)


def _built_shapes(model_class: Any, config: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter and buffer of a model that is built on the meta device."""
    return {name: tuple(tensor.shape) for name, tensor in named_tensors(built_on_meta(model_class, config))}


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of a module, a tied one under each of its names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def models_in(module: nn.Module) -> dict[str, Any]:
    """Return the models of transformers in a module by name, without those that are a part of another one."""
    transformers = sys.modules.get("transformers")
    models: dict[str, Any] = {}
    for name, part in module.named_modules() if transformers is not None else ():
        inside = any(name.startswith(f"{outer}." if outer else "") for outer in models)
        if not inside and isinstance(part, transformers.PreTrainedModel):  # type: ignore[union-attr]
            models[name] = part
    return models


def tensors_in(
    module: nn.Module, tables: Collection[int], plain_name: PlainName
) -> Iterator[tuple[str, Tensor, tuple[int, ...], TensorRule]]:
    """Yield the tensors of the models of transformers in a live module that follow the vocabulary of its tables.

    `tables` has the `id` of each weight of a table or head, and of each table that has no weight, such as a quantised
    one: in the class of transformers it has one. Yields name, tensor, axes, and how an edit moves it; the name is the
    first one of a tied tensor.
    """
    for name, model in models_in(module).items():
        config = model.config.to_dict()
        families = families_in(config)
        live = [(plain_name(own), own, tensor) for own, tensor in named_tensors(model)]
        known = {plain for plain, _, tensor in live if id(tensor) in tables}
        known |= {f"{plain_name(own)}.weight" for own, part in model.named_modules() if id(part) in tables}
        axes = axes_by_build(type(model), model.config, known)
        done: set[int] = set()
        for plain, own, tensor in live:
            if plain in axes and id(tensor) not in done:
                done.add(id(tensor))
                rule = tensor_rule(plain, families, config.get("model_type")) or TensorRule(0, None)
                yield f"{name}.{own}".lstrip("."), tensor, axes[plain], rule


def linear_sizes(module: nn.Module, plain_name: PlainName) -> Iterator[tuple[str, nn.Linear, str]]:
    """Yield the sizes that linear layers state of a weight that follows the vocabulary, by the records of families.

    These are heads, also one that was wrapped before `patch`, and MobileBERT's further columns. Yields the name
    in the module, the layer, and `out_features` or `in_features`.
    """
    for name, model in models_in(module).items():
        config = model.config.to_dict()
        families = families_in(config)
        for own, part in model.named_modules():
            if isinstance(part, nn.Linear):
                rule = tensor_rule(f"{plain_name(f'{own}.')}weight", families, config.get("model_type"))
                if rule is not None and rule.end == "head":
                    yield f"{name}.{own}".lstrip("."), part, "out_features" if rule.axis == 0 else "in_features"
