"""Save and load any layer: `config.json`, `model.safetensors`, and `tokenizer.json` if there is a tokenizer.

A layer returns its constructor's arguments as JSON in `config`. A layer inside a layer is written as its own
description, `{"kind": "rotary", "head_dim": 64, ...}`, with an identifier of its class (`core.class_identifiers`).
Reading builds the inner layers first, so every combination of tables, positions and heads can be saved.
"""

import inspect
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from embedlayer.core.class_identifiers import KINDS, class_of, kind_of
from embedlayer.core.computed_buffers import recompute_all_buffers
from embedlayer.core.errors import CheckpointError, EmbedLayerError, FileError
from embedlayer.core.formatting import a_or_an
from embedlayer.core.partitioned import refuse_partitioned
from embedlayer.core.torch_state import is_current
from embedlayer.io.json_fields import Range, check_arguments, printable
from embedlayer.kernels.index_check import check_indices

if TYPE_CHECKING:  # files are imported when one is read or written: every layer imports this module
    from embedlayer.io.files import JsonObject

FORMAT_VERSION = 1
Layer = TypeVar("Layer", bound="Pretrained")
Thing = TypeVar("Thing", bound="Described")

_builder: ContextVar["tuple[type, Callable[[JsonObject], Any]] | None"] = ContextVar("builder", default=None)

FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
"""Data types that may be read for one another; every other data type is read as itself only."""

CANNOT_BE_BUILT = (EmbedLayerError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError)
"""Errors that constructors raise for values of the right types that do not fit together."""

WHOLE = Range(1 - (1 << 31), (1 << 31) - 1)
FINITE = Range(-torch.finfo(torch.float32).max, torch.finfo(torch.float32).max)
RANGES = {
    "num_layers": Range(1, 1 << 12),
    **dict.fromkeys(("num_heads", "num_kv_heads", "head_dim", "rotary_dim", "num_buckets"), Range(0, 1 << 16)),
    **dict.fromkeys(("embed_dim", "mlp_dim", "max_seq_len", "max_distance", "width"), Range(0, 1 << 24)),
    **dict.fromkeys(("pad_to_multiple_of", "rank", "kernel_size", "dilation", "window"), Range(0, 1 << 24)),
    **dict.fromkeys(("dropout", "expected", "proportion", "norm_eps", "eps"), Range(0, 1)),
    **dict.fromkeys(("grid", "widths"), Range(0, 1 << 24)),
    "blocks": Range(0, 1 << 12),
    "init_std": Range(0, 1 << 20),
    "vocab_size": Range(0, 1 << 40),
}
"""Ranges of arguments, which no saved tensor limits. A file with other values is damaged.

Other integers are in `WHOLE`, and other numbers in `FINITE`.
"""

MOST_COMPUTED = 1 << 32
"""Largest size of a position table that is computed and not saved, in numbers."""

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
TABLE_WEIGHTS = "table.safetensors"
"""Name of the weights in a folder that has the blocks of a model of transformers too; see `hide_weights`."""


class Described:
    """Abstract base of objects that can be described in JSON by their constructor's arguments, and built from that."""

    @property
    def config(self) -> "JsonObject":
        """Return the constructor's arguments by name, as JSON values, without `device` and `dtype`.

        Each is the attribute of the same name; a subclass with other attributes overrides this property. `Described`
        objects are stored as their descriptions (see `describe`), also in lists, and tuples as lists.

        Raises:
            CheckpointError: An argument has no attribute of its name.
        """
        return _attributes(self)

    @classmethod
    def from_config(cls: type[Thing], config: "JsonObject") -> Thing:
        """Build a new object from what `config` returned. Its weights are freshly initialised.

        Each description in the values of `config`, also inside lists, is built first.

        Raises:
            CheckpointError: An argument is unknown or missing, has another type, or is larger than in any model; or an
                inner object cannot be built. All other errors are those of the constructor.
            FileError: A file that an inner description names is missing or cannot be read.
        """
        return cls.construct(**{name: _built(value) for name, value in config.items()})

    @classmethod
    def construct(cls: type[Thing], **arguments: Any) -> Thing:
        """Check values from a file by type and size, and call the constructor with them.

        Args:
            **arguments: Values of the constructor's arguments.

        Raises:
            CheckpointError: An argument is unknown or missing, has another type, or is larger than in any model; or the
                constructor raises a `TypeError`. All other errors are those of the constructor.
        """
        check_saved(cls, arguments)
        try:
            return cls(**arguments)
        except TypeError as error:
            raise CheckpointError(f"The saved configuration does not fit {cls.__name__}: {error}.") from error

    @classmethod
    def from_description(cls: type[Thing], arguments: "JsonObject") -> Thing:
        """Build an object from a description without its key `kind`, as `from_config` does.

        A class overrides this method if its `from_config` also reads configurations of other libraries.
        """
        return cls.from_config(arguments)


class Pretrained(Described, nn.Module):
    """Abstract: a layer that can be saved to a folder and read back bit for bit."""

    def save_pretrained(self, directory: Path | str, *, tokenizer: Any = None) -> None:
        """Save `config.json`, `model.safetensors` and, with a tokenizer, `tokenizer.json` in `directory`.

        Each file is replaced atomically, the configuration last.

        Args:
            directory: Folder, created if missing.
            tokenizer: Tokenizer to save; `None` writes none, and a `tokenizer.json` that is there already stays.

        Raises:
            FileError: The folder cannot be written.
            CheckpointError: The layer, or a layer inside it, could not be loaded again: it has no `config`, is defined
                inside a function, or `require_loadable` finds what its configuration does not contain. Or it is a tied
                head, which has no rows of its own, or a tensor is a sharded `DTensor`. Nothing is written.
            SizeError: DeepSpeed's ZeRO-3 has partitioned a parameter, which it has not gathered.
            TokenizerError: `tokenizer` is no tokenizer.
        """
        from embedlayer.io.files import create_folder
        from embedlayer.io.safetensors_files import require_whole, save_tensors

        if getattr(self, "tied", False):
            raise CheckpointError("A tied head has no rows of its own: save the table, and tie a new head to it.")
        refuse_partitioned(self.named_parameters(), "is saved")
        description, state = describe(self), self.state_dict()
        require_whole(state)
        require_loadable(self, description, state)
        directory = create_folder(directory)
        if tokenizer is not None:
            from embedlayer.tokenization.read import save_tokenizer
            from embedlayer.tokenization.tokenizer_calls import as_tokenizer

            save_tokenizer(as_tokenizer(tokenizer), directory / TOKENIZER)
        save_tensors(directory / WEIGHTS, state)
        (directory / TABLE_WEIGHTS).unlink(missing_ok=True)  # those of an earlier save, which would be read first
        write_config(directory, description)

    @classmethod
    def from_pretrained(cls: type[Layer], directory: Path | str, *, device: torch.device | str = "cpu") -> Layer:
        """Read what `save_pretrained` wrote, in the dtype in which it was saved.

        Args:
            directory: Folder to read.
            device: Device of the layer.

        Raises:
            FileError: The folder or a file in it is missing.
            CheckpointError: A file is damaged, has another format, or describes another class than this one.
            RuntimeError: The weights are larger than memory.
        """
        from embedlayer.io.files import recover_folder

        directory = recover_folder(directory)
        description = _read_description(directory)
        with torch.device("meta"):
            layer = build(description)
        if not isinstance(layer, cls):
            raise CheckpointError(f"{directory} holds {a_or_an(layer)}, not {a_or_an(cls.__name__)}.")
        _read_weights(layer, directory, device)
        return layer

    def check(self) -> None:
        """Wait for the device, and raise the error of a bad ID or position that was looked up since the last check.

        Also raise that of a bad target of any loss in this process, also of another layer, that did not wait for the
        device. On the CPU look-up and loss raise the error themselves.

        Raises:
            TokenIdError: A token ID was outside its table, or a target was outside the vocabulary.
            PositionError: A position was outside its scheme.
        """
        check_indices(self)


def part_from_pretrained(directory: Path | str, name: str, *, device: torch.device | str = "cpu") -> nn.Module:
    """Read one inner layer of what `save_pretrained` wrote, such as the table of a decoder, and nothing else of it."""
    from embedlayer.io.files import recover_folder

    directory = recover_folder(directory)
    with torch.device("meta"):
        layer: nn.Module = build(_read_description(directory).get(name, {}))
    _read_weights(layer, directory, device, prefix=f"{name}.")
    return layer


def _read_description(directory: Path) -> "JsonObject":
    """Return the description of the layer that is saved in a folder, without the format version of its file."""
    from embedlayer.io.files import read_json

    description = read_json(directory / CONFIG)
    version = description.pop("format_version", None)
    if version != FORMAT_VERSION or not is_description(description):
        found = f"format version {printable(version)} and kind {printable(description.get('kind'))}"
        raise CheckpointError(f"{directory / CONFIG} has {found}; this embedlayer reads version {FORMAT_VERSION}.")
    return description


def _read_weights(layer: nn.Module, directory: Path, device: torch.device | str, prefix: str = "") -> None:
    """Read the weights of a layer on the meta device from a saved folder, where their names begin with `prefix`.

    The file is `table.safetensors` if the folder has it, else `model.safetensors`. Buffers that are not saved are
    computed on `device`.
    """
    from embedlayer.io.safetensors_files import load_tensors

    weights = directory / (TABLE_WEIGHTS if (directory / TABLE_WEIGHTS).exists() else WEIGHTS)
    tensors, _ = load_tensors(weights, str(device), prefix)
    assign(layer, tensors, source=weights)
    recompute_all_buffers(layer, device)


def hide_weights(directory: Path) -> None:
    """Rename the weights that `save_pretrained` wrote, so that transformers does not take them for a whole model.

    `LlamaForCausalLM.from_pretrained` reads any `config.json`, and fills in random rows for tensors that it misses; it
    raises an error for a folder without `model.safetensors`.
    """
    (directory / WEIGHTS).rename(directory / TABLE_WEIGHTS)


def write_config(directory: Path, description: "JsonObject") -> None:
    """Write `config.json` atomically: the description of a layer and the format version.

    Write it after all other files of a layer, because a folder with `config.json` counts as complete.
    """
    from embedlayer.io.files import write_json

    write_json(directory / CONFIG, {"format_version": FORMAT_VERSION, **description})


def describe(layer: Described) -> "JsonObject":
    """Return the description of an object, `{"kind": kind identifier, **arguments}`, for `build`.

    A subclass that has a constructor of its own, and inherits `config`, is described by what its constructor takes:
    those of the inherited arguments that it names, or all if it has `**kwargs`, and its own arguments, from the
    attributes of the same names.
    """
    cls = type(layer)
    kind, arguments = kind_of(cls), dict(layer.config)
    if kind in KINDS or not issubclass(cls, Described) or is_current(cls, "config", "__init__"):
        return {"kind": kind, **arguments}  # PEFT's wrapper of a table is no Described
    parameters = inspect.signature(cls).parameters
    if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        arguments = {name: value for name, value in arguments.items() if name in parameters}
    base = next(part for part in cls.__mro__ if "config" in vars(part))
    known = inspect.signature(base).parameters.keys() | arguments.keys()
    return {"kind": kind, **arguments, **_attributes(layer, known)}


def _attributes(layer: Described, known: Collection[str] = ()) -> "JsonObject":
    """Return the constructor's arguments that are not `known`, from the attributes of their names, as JSON values."""
    cls = type(layer)
    parameters = inspect.signature(cls).parameters.values()
    names = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    names = [name for name in names if name not in ("device", "dtype", *known)]
    for name in names:
        if not hasattr(layer, name):
            raise CheckpointError(
                f"A {cls.__name__} cannot be saved: its constructor takes {name}: set self.{name}, or define config."
            )
    return {name: _described(getattr(layer, name)) for name in names}


def _described(value: Any) -> Any:
    """Return an argument with descriptions of the `Described` objects in it, and lists for tuples."""
    if isinstance(value, Described):
        return describe(value)
    return [_described(each) for each in value] if isinstance(value, list | tuple | nn.ModuleList) else value


def _built(value: Any) -> Any:
    """Return an argument with the objects that the descriptions in it describe."""
    if is_description(value):
        return build(value)
    return [_built(each) for each in value] if isinstance(value, list) else value


def require_loadable(layer: Described, description: "JsonObject", state: Mapping[str, torch.Tensor]) -> None:
    """Check that a layer can be loaded again: build one from its description on the meta device and compare.

    `_differences` says what is compared. Random generators keep their state.
    """
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            other = build(json.loads(json.dumps(description)))
    except (CheckpointError, FileError, TypeError) as error:
        raise CheckpointError(f"A {type(layer).__name__} that cannot be loaded again is not saved. {error}") from error
    if faults := sorted(_differences(layer, other, state)):
        what = "; ".join(faults[:8])
        raise CheckpointError(f"A {type(layer).__name__} that cannot be loaded again is not saved: {what}.")


def _differences(layer: Described, other: Any, state: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Yield a sentence for each difference between a layer and the one that is built from its description.

    Compared are the names and shapes of tensors, the `config` of modules of equal class without the layers in it, and
    the classes of modules, except where the layer's module is of one of `KINDS`. Values, dtypes and devices are not
    compared. `state` is `layer.state_dict()`.
    """
    expected: Mapping[str, torch.Tensor] = other.state_dict()
    yield from (f"{name} would be missing" for name in expected.keys() - state.keys())
    yield from (f"{name} would be unexpected" for name in state.keys() - expected.keys())
    for name in state.keys() & expected.keys():
        shape, new_shape = tuple(state[name].shape), tuple(expected[name].shape)
        if shape != new_shape:
            yield f"{name} has shape {shape}, and would have {new_shape}"
    modules = dict(layer.named_modules()) if isinstance(layer, nn.Module) else {}
    for name, new in other.named_modules():
        module = modules.get(name, new)
        if type(module) is type(new) and isinstance(module, Described) and isinstance(new, Described):
            own, others = _without_layers(module.config), _without_layers(new.config)
            for key in own:
                if json.dumps(own[key]) != json.dumps(others.get(key)):
                    place = f"{name}.{key}".strip(".")
                    yield f"{place} is {printable(own[key])}, and would be {printable(others.get(key))}"
        elif type(module) is not type(new) and (
            not isinstance(module, Described) or kind_of(type(module)) not in KINDS
        ):
            yield f"{name} is {a_or_an(module)}, and would be {a_or_an(new)}"


def _without_layers(value: Any) -> Any:
    """Return a part of a `config` in which the descriptions of modules, which have configs of their own, are `None`."""
    if is_description(value) and issubclass(class_of(value["kind"]), nn.Module):
        return None
    if isinstance(value, dict):
        return {key: _without_layers(each) for key, each in value.items()}
    return [_without_layers(each) for each in value] if isinstance(value, list | tuple) else value


def is_description(value: object) -> bool:
    """Return whether `value` is a dictionary with a string `kind`, as `describe` returns."""
    return isinstance(value, dict) and isinstance(value.get("kind"), str)


def build(description: "JsonObject") -> Any:
    """Build an object from its description, as `describe` returns. Its weights are freshly initialised."""
    if not is_description(description):
        raise CheckpointError(f"The saved configuration holds {printable(description)} instead of a layer.")
    arguments = dict(description)
    kind = arguments.pop("kind")
    cls = class_of(kind)
    if not issubclass(cls, Described):
        raise CheckpointError(f"The kind {kind!r} is not a class that can be saved and read back.")
    builder = _builder.get()
    if builder is not None and issubclass(cls, builder[0]):
        with building(builder[0], None):
            return builder[1](description)
    try:
        return cls.from_description(arguments)
    except (CheckpointError, FileError):
        raise
    except CANNOT_BE_BUILT as error:
        what = f"{type(error).__name__}: {short(error)}"
        raise CheckpointError(f"The saved configuration of {kind} cannot be built ({what})") from error


@contextmanager
def building(base: type, make: "Callable[[JsonObject], Any] | None") -> Iterator[None]:
    """Context manager: inside it, `build` calls `make` for each description of a subclass of `base`.

    That applies to descriptions inside other descriptions too, but not inside the call of `make`. `None` is no such
    function.
    """
    before = _builder.set(None if make is None else (base, make))
    try:
        yield
    finally:
        _builder.reset(before)


def check_saved(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Check the types and sizes of values from a file before they are passed to a function."""
    source = f"The saved configuration of {function.__name__}"
    check_arguments(function, arguments, source)
    for name, value in arguments.items():
        for number in _numbers(value):
            bounds = RANGES.get(name, WHOLE if type(number) is int and value is number else FINITE)
            if not bounds.least <= number <= bounds.most:
                span = f"{bounds.least:g} to {bounds.most:g}"
                raise CheckpointError(f"{source}: {name} {printable(number)} is outside of {span}: it is damaged.")
    rows, width = (arguments.get(name) for name in ("max_seq_len", "embed_dim"))
    if isinstance(rows, int) and isinstance(width, int) and rows * width > MOST_COMPUTED:
        raise CheckpointError(f"{source}: positions of {rows:,} x {width:,} are larger than in any model.")


def _numbers(value: object) -> Iterator[int | float]:
    """Yield a number, or the numbers in a list of any depth; of other values nothing."""
    if isinstance(value, list | tuple):
        for each in value:
            yield from _numbers(each)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def short(error: Exception) -> str:
    """Return the message of an error as text for another message."""
    if isinstance(error, EmbedLayerError):
        return str(error)
    return printable((str(error).splitlines() or [""])[0])[1:-1]


def assign(layer: nn.Module, tensors: dict[str, torch.Tensor], *, source: Path) -> None:
    """Replace a layer's parameters and saved buffers by tensors from a file; on an error the layer does not change.

    The layer refers to the passed tensors, without copies. A tensor keeps its dtype: floating-point types may differ
    from the layer's, other dtypes must be equal.
    """
    state = layer.state_dict()
    faults = [f"{name} is missing" for name in state.keys() - tensors.keys()]
    for name, tensor in tensors.items():
        expected = state.get(name)
        if expected is None:
            faults.append(f"{name} is unexpected")
        elif tensor.shape != expected.shape:
            faults.append(f"{name} has shape {tuple(tensor.shape)} where {tuple(expected.shape)} is expected")
        elif tensor.dtype != expected.dtype and not {expected.dtype, tensor.dtype} <= FLOATS:
            faults.append(f"{name} is stored as {tensor.dtype} where {expected.dtype} is expected")
    if faults:
        raise CheckpointError(f"{source} does not fit its configuration: {'; '.join(sorted(faults)[:8])}.")
    layer.load_state_dict(tensors, assign=True)
