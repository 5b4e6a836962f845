"""Save and load any layer of the house: `config.json`, `model.safetensors`, and `tokenizer.json` where there is one.

A layer states its constructor's arguments as JSON in `config`; a layer inside a layer stands there as its own
description, `{"kind": "RotaryEmbedding", "head_dim": 64, ...}`. Reading is the same walk backwards, so every
combination of tables, positions and heads that can be built can be saved.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from embedlayer.derived import derive_all
from embedlayer.errors import CheckpointError, EmbedLayerError
from embedlayer.io.json_fields import check_arguments, printable
from embedlayer.io.safetensors_files import load_tensors
from embedlayer.io.safetensors_files import save_tensors
from embedlayer.io.files import JsonObject, read_json, recover_folder, create_folder, write_json

FORMAT_VERSION = 1
Layer = TypeVar("Layer", bound="Pretrained")
Thing = TypeVar("Thing", bound="Described")

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
CANNOT_BE_BUILT = (EmbedLayerError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError)
"""What constructors raise when they are given values of the right types that do not go together."""

LARGEST = {
    "num_layers": 1 << 12,
    **dict.fromkeys(("num_heads", "num_kv_heads", "head_dim", "rotary_dim", "num_buckets"), 1 << 16),
    **dict.fromkeys(("embed_dim", "mlp_dim", "max_seq_len", "max_distance"), 1 << 24),
}
"""Arguments from which something is computed that no saved tensor bounds: beyond these a file is damaged."""

MOST_DERIVED = 1 << 32
"""Numbers in a table of positions that is computed and not saved."""

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"


class Described:
    """Abstract: something that states its constructor's arguments as JSON, and is built from them."""

    @property
    def config(self) -> JsonObject:
        """The constructor's arguments as JSON; inner ones through `describe`."""
        raise NotImplementedError

    @classmethod
    def from_config(cls: type[Thing], config: JsonObject) -> Thing:
        """Build what `config` describes, freshly initialised.

        Raises:
            CheckpointError: An argument is unknown or missing.
        """
        return cls.construct(
            **{name: build(value) if is_description(value) else value for name, value in config.items()}
        )

    @classmethod
    def construct(cls: type[Thing], **arguments: Any) -> Thing:
        """Call the constructor with values out of a file, after a look at their types and sizes.

        Raises:
            CheckpointError: An argument is unknown or missing, of another type, or larger than that of any model.
        """
        check_saved(cls, arguments)
        try:
            return cls(**arguments)
        except TypeError as error:
            raise CheckpointError(f"The saved configuration does not fit {cls.__name__}: {error}.") from error

    @classmethod
    def from_description(cls: type[Thing], arguments: JsonObject) -> Thing:
        """What `build` calls: `from_config`, except where that also reads configurations of another make."""
        return cls.from_config(arguments)


class Pretrained(Described, nn.Module):
    """Abstract: a layer that can be saved to a folder and read back bit for bit."""

    def save_pretrained(self, directory: Path | str, *, tokenizer: Any = None) -> None:
        """Write `config.json`, `model.safetensors` and, if given, `tokenizer.json` into `directory`.

        Each file is replaced wholly or not at all, the configuration last.

        Raises:
            FileError: The folder cannot be written.
        """
        directory = create_folder(directory)
        if tokenizer is not None:
            from embedlayer.data.tokenizer import as_tokenizer, save_tokenizer

            save_tokenizer(as_tokenizer(tokenizer), directory / TOKENIZER)
        save_tensors(directory / WEIGHTS, self.state_dict())
        write_config(directory, describe(self))

    @classmethod
    def read_pretrained(cls: type[Layer], directory: Path | str, *, device: torch.device | str = "cpu") -> Layer:
        """Read what `save_pretrained` wrote, in the dtype it was saved in.

        Raises:
            FileError: The folder or a file in it is missing.
            CheckpointError: A file is damaged, of another format, or describes another class than this one.
        """
        directory = recover_folder(directory)
        description = read_json(directory / CONFIG)
        version = description.pop("format_version", None)
        if version != FORMAT_VERSION or not is_description(description):
            raise CheckpointError(
                f"{directory / CONFIG} has format version {printable(version)} and kind {printable(description.get('kind'))}; "
                f"this embedlayer reads version {FORMAT_VERSION} of its own layers."
            )
        with torch.device("meta"):
            layer = build(description)
        if not isinstance(layer, cls):
            raise CheckpointError(
                f"{directory} holds a {type(layer).__name__}, not a {cls.__name__}: "
                f"read it with {type(layer).__name__}.from_pretrained."
            )
        tensors, _ = load_tensors(directory / WEIGHTS, str(device))
        assign(layer, tensors, source=directory / WEIGHTS)
        derive_all(layer, device)
        return layer


def write_config(directory: Path, description: JsonObject) -> None:
    """Write `config.json`: the last file of a layer, so that it is whole where this one is."""
    write_json(directory / CONFIG, {"format_version": FORMAT_VERSION, **description})


def describe(layer: Described) -> JsonObject:
    """`{"kind": class name, **config}`: what `build` needs to make it again."""
    return {"kind": type(layer).__name__, **layer.config}


def is_description(value: object) -> bool:
    """Whether `value` is what `describe` returns."""
    return isinstance(value, dict) and isinstance(value.get("kind"), str)


def build(description: JsonObject) -> Any:
    """Build a layer, or a part that a layer describes, from its description, freshly initialised.

    Raises:
        CheckpointError: The kind is not of this library, or its arguments do not fit.
    """
    import embedlayer

    if not is_description(description):
        raise CheckpointError(f"The saved configuration holds {printable(description)} where a layer is described.")
    arguments = dict(description)
    kind = arguments.pop("kind")
    layer = getattr(embedlayer, kind) if kind in embedlayer.__all__ else None
    if not (isinstance(layer, type) and issubclass(layer, Described)):
        raise CheckpointError(f"A layer of kind {kind!r} is not known to embedlayer {embedlayer.__version__}.")
    try:
        return layer.from_description(arguments)
    except CheckpointError:
        raise
    except CANNOT_BE_BUILT as error:
        raise CheckpointError(
            f"The saved configuration of {kind} cannot be built ({type(error).__name__}): {short(error)}"
        ) from error


def check_saved(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Refuse values out of a file that cannot be arguments of a function, by their types and sizes.

    Raises:
        CheckpointError: One has another type than the signature says, or is larger than that of any model.
    """
    source = f"The saved configuration of {function.__name__}"
    check_arguments(function, arguments, source)
    for name, value in arguments.items():
        if isinstance(value, int | float) and value > LARGEST.get(name, math.inf):
            raise CheckpointError(f"{source}: {name} {printable(value)} is beyond all models: it is damaged.")
    rows, width = (arguments.get(name) for name in ("max_seq_len", "embed_dim"))
    if isinstance(rows, int) and isinstance(width, int) and rows * width > MOST_DERIVED:
        raise CheckpointError(f"{source}: positions of {rows:,} x {width:,} are beyond all models: it is damaged.")


def short(error: Exception) -> str:
    """The first line of what another library says."""
    return printable((str(error).splitlines() or [""])[0])[1:-1] if not isinstance(error, EmbedLayerError) else str(error)


def assign(layer: nn.Module, tensors: dict[str, torch.Tensor], *, source: Path) -> None:
    """Give a layer its tensors by name, all or none.

    Raises:
        CheckpointError: Names or shapes differ; the message lists them.
    """
    state = layer.state_dict()
    expected = {name: tuple(tensor.shape) for name, tensor in state.items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    types = [
        f"{name} is stored as {tensor.dtype} where {state[name].dtype} is expected"
        for name, tensor in tensors.items()
        if name in state and not _can_hold(state[name].dtype, tensor.dtype)
    ]
    if expected != found or types:
        faults = types
        faults += [f"{name} is missing" for name in expected.keys() - found.keys()]
        faults += [f"{name} is unexpected" for name in found.keys() - expected.keys()]
        faults += [
            f"{name} has shape {found[name]} where {shape} is expected"
            for name, shape in expected.items()
            if found.get(name, shape) != shape
        ]
        shown = "; ".join(sorted(faults)[:8]) + ("; ..." if len(faults) > 8 else "")
        raise CheckpointError(f"{source} does not fit its configuration: {shown}.")
    layer.load_state_dict(tensors, assign=True)


def _can_hold(expected: torch.dtype, found: torch.dtype) -> bool:
    """Whether a tensor may be of a type: floating point of any width, else exactly that of the layer."""
    return found in FLOATS if expected in FLOATS else found == expected
