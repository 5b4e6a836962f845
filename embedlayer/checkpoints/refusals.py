"""What is refused in a checkpoint, an unknown family or quantised weights, and which tables can be read alone."""

import re
from collections.abc import Iterable

from embedlayer.checkpoints.reader import CONFIG, Checkpoint
from embedlayer.core.errors import CheckpointError, release
from embedlayer.families import (
    GGUF_ARCHITECTURES,
    REFUSED,
    TRANSFORMERS_VERSION,
    is_table_name,
    nearest_model_types,
)
from embedlayer.io.safetensors_files import DTYPES
from embedlayer.saving import FLOATS

NAMED = 4
"""Number of tables that a message names."""

FEWEST_ROWS = 16
"""Rows of the smallest table that a message names."""

_QUANTISED = {
    *("scale", "scales", "zero", "zeros", "biases", "qbiases", "absmax", "codes", "codebooks", "tables", "tables2"),
    *("quant", "quantized", "packed", "data", "qdata", "qtype", "qweight", "dqweight", "qzeros", "qscale", "SCB", "W"),
}
"""Words in the names of tensors that quantisers store beside a weight or in its place."""


def unknown_family_error(checkpoint: Checkpoint, model_type: object) -> CheckpointError:
    """Return, without raising it, the error for a checkpoint whose configuration names no family that is read."""
    file = checkpoint.file(CONFIG)
    if checkpoint.gguf is not None:
        name, known = checkpoint.gguf.metadata.get("general.architecture"), ", ".join(GGUF_ARCHITECTURES)
        return CheckpointError(f"{checkpoint.name}: general.architecture {name!r} is not known here (known: {known}).")
    if file is None or model_type is None:
        missing = f"there is no {CONFIG}" if file is None else f"{CONFIG} has no model_type"
        return CheckpointError(
            f"{checkpoint.name}: {missing}, so the family is unknown. Copy the model's {CONFIG} there."
        )
    if isinstance(model_type, str) and model_type in REFUSED:
        return CheckpointError(f"{file}: model_type {model_type!r} is not read, because {REFUSED[model_type]}.")
    near = " or ".join(map(repr, nearest_model_types(str(model_type))))
    version = str(checkpoint.config.get("transformers_version", ""))
    newer = (
        f" It was written by transformers {version}, and {TRANSFORMERS_VERSION} is known: look for a newer embedlayer."
        if release(version) > release(TRANSFORMERS_VERSION)
        else ""
    )
    return CheckpointError(f"{file}: model_type {model_type!r} is not known (nearest known: {near}).{newer}")


def table_names(checkpoint: Checkpoint) -> list[str]:
    """Return the names of the matrices of a checkpoint that are called like tables of tokens or codes, sorted."""
    called_so = {
        weight if quantised_parts(checkpoint, (weight := f"{name.rpartition('.')[0]}.weight",)) else name
        for name in checkpoint.names
        if not re.search(r"(?:^|\.)(?:layers?|blocks?|h)\.\d", name) and is_table_name(name)
    }
    return [name for name in sorted(called_so) if _is_readable_table(checkpoint, name)]


def _is_readable_table(checkpoint: Checkpoint, name: str) -> bool:
    """Return whether a weight is a matrix of at least `FEWEST_ROWS` rows, and is read as a table."""
    try:
        is_stored = checkpoint.stored(name) is not None
        if is_stored:
            checkpoint.read_stored(name)
    except CheckpointError:
        return False
    if not is_stored and (name not in checkpoint.names or quantised_parts(checkpoint, (name,))):
        return False
    info = checkpoint.matrix_info(name)
    is_matrix = len(info.shape) == 2 and info.shape[0] >= FEWEST_ROWS
    return is_matrix and (is_stored or DTYPES.get(info.dtype) in FLOATS)


def table_advice(checkpoint: Checkpoint, *, is_found: bool) -> str:
    """Return how to read a table of a refused checkpoint alone, as a sentence; `""` if it has none."""
    if is_found:
        return "To read the table alone: load(..., table_only=True)."
    names = table_names(checkpoint)
    if not names:
        return ""
    calls = [f"load(..., table_only={name!r})" for name in names[:NAMED]]
    more = f" ({len(names) - NAMED} more)" if len(names) > NAMED else ""
    return f"To read one of its tables alone: {' or '.join(calls)}{more}."


def quantised_parts(checkpoint: Checkpoint, names: Iterable[str]) -> list[str]:
    """Return the names of the tensors that store weights in quantised form; none for weights in full precision.

    Quantisers store scales, zero points and packed numbers as further tensors of the same module, such as
    `lm_head.qweight` or `lm_head.weight_scale`, and every quantiser of transformers names them with a word of its own.
    `names` are full names of weights, or ends of names.
    """
    parts: dict[str, None] = {}
    for name in names:
        module, own_name = f".{name.rpartition('.')[0]}.", name.rpartition(".")[2]
        for other in checkpoint.names if module != ".." else ():
            _, is_inside, rest = f".{other}".rpartition(module)
            own = rest.removeprefix(f"{own_name}.")
            if rest == own_name or (own_name != "weight" and not rest.startswith(own_name)):
                continue  # the weight itself, or a part of another parameter of the module
            if is_inside and "." not in own.removeprefix("quant_state.") and _QUANTISED & {*re.split(r"[._]", own)}:
                parts[other] = None
    return list(parts)


def combined_error(checkpoint: Checkpoint, what: str, *names: str) -> CheckpointError:
    """Return, without raising it, the error for rows that are computed from several tensors, one of them quantised."""
    info = checkpoint.matrix_info(next(name for name in names if checkpoint.stored(name) is not None))
    return CheckpointError(
        f"{info.file}: the {what} is computed from {' and '.join(names)}: {info.name} is quantised, {info.dtype}."
    )
