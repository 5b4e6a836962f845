"""GGUF files: the metadata of rotary positions in an edited copy. Tensors are copied byte for byte."""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import numpy as np

from embedlayer.checkpoints.reader import Checkpoint
from embedlayer.core.errors import CheckpointError
from embedlayer.families import LONG_FACTORS, ROPE_FACTORS
from embedlayer.io.files import JsonObject
from embedlayer.io.gguf_files import GGUFFile, read_gguf, write_gguf
from embedlayer.io.safetensors_files import TensorInfo, copy_bytes
from embedlayer.positions.rotary.extension import extend_rotary
from embedlayer.vocab.targets.positions import (
    PositionsEdit,
    PositionsRequest,
    check_rotary,
    rotary_change,
    shown_method,
)

WRITTEN_TYPES = ("linear", "yarn")
"""Values of `rope.scaling.type` in llama.cpp that need no tensor of divisors."""

TYPES = {
    "context_length": 4,
    "rope.freq_base": 6,
    "rope.scaling.type": 8,
    "rope.scaling.factor": 6,
    "rope.scaling.original_context_length": 4,
}
"""Key after the name of the architecture -> number of its type: uint32, float32 or string."""

HEAD, TAIL = "head", "tail"
"""Names, in a receipt, of the bytes of a file before its first tensor and after its last one."""


def edit_of_gguf(source: Path, out: Path, request: PositionsRequest) -> tuple[PositionsEdit, dict[str, bytes]]:
    """Write the copy of a GGUF file with longer rotary positions.

    Returns:
        The edit, and the old bytes before and after the tensors.

    Raises:
        CheckpointError: The file has no rotary positions that are read here, or the method needs tensors that it lacks.
        SizeError: The request does not fit the positions.
        FileError: A file cannot be read or written.
        MissingExtraError: The extra `gguf` is not installed.
    """
    file = read_gguf(source)
    if stored := [name for name in (ROPE_FACTORS, LONG_FACTORS) if name in file.tensors]:
        raise CheckpointError(
            f"{source} has divisors of its frequencies in the tensor {stored[0]}, which is not replaced. Extend the "
            f"folder that the file was converted from, and convert the result."
        )
    config = Checkpoint.open(source).config
    check_rotary(config, str(source), "extend the folder that it was converted from, and convert the result.")
    options = request.rotary_options
    longer = extend_rotary(config, request.length, **options)
    scaling = longer.config.get("rope_scaling") or {}
    kind, base = scaling.get("rope_type", "default"), longer.config.get("rope_theta")
    if kind not in ("default", *WRITTEN_TYPES):
        raise CheckpointError(
            f"llama.cpp has no {kind!r} without a tensor of divisors: use {', '.join(WRITTEN_TYPES)} or base, or "
            f"extend the folder that {source} was converted from, and convert the result."
        )
    written: JsonObject = {"context_length": request.length}
    if kind != "default":
        original = {"rope.scaling.original_context_length": longer.original_length}
        written |= {"rope.scaling.type": kind, "rope.scaling.factor": scaling["factor"], **original}
    elif "rope_scaling" in config:
        written["rope.scaling.type"] = "none"
    if base != config.get("rope_theta"):
        written["rope.freq_base"] = base
    name = file.get("general.architecture")
    types = {f"{name}.{key}": TYPES[key] for key in written}
    write_gguf(file, out, metadata={f"{name}.{key}": value for key, value in written.items()}, tensors={}, types=types)
    changes = tuple(rotary_change(each, longer.original_length) for each in longer.changes)
    lengths = (longer.old_length, request.length)
    edit = PositionsEdit(shown_method(options["method"]), lengths, longer.original_length, changes)
    start, stop = tensor_range(file)
    content = np.memmap(source, np.uint8, "r")
    return edit, {HEAD: content[:start].tobytes(), TAIL: content[stop:].tobytes()}


def restore_gguf(source: Path, out: Path, files: Mapping[str, bytes]) -> None:
    """Write the copy of a GGUF file with the bytes before and after its tensors that it had before an edit.

    Raises:
        FileError: A file cannot be read or written.
    """
    start, stop = tensor_range(read_gguf(source))
    with source.open("rb") as data, out.open("wb") as new:
        new.write(files[HEAD])
        copy_bytes(data, new, TensorInfo("", "U8", (stop - start,), source, start, stop))
        new.write(files[TAIL])


def tensor_range(file: GGUFFile) -> tuple[int, int]:
    """Return where the first tensor of a file starts, and where the last one ends."""
    return min(info.start for info in file.tensors.values()), max(info.stop for info in file.tensors.values())


def gguf_head_hash(path: Path) -> str:
    """Return the SHA-256 of the bytes of a file before its first tensor."""
    with path.open("rb") as data:
        return sha256(data.read(tensor_range(read_gguf(path))[0])).hexdigest()
