"""Errors for checkpoints that are refused: an unknown model family, and quantised tables and heads."""

import re
from collections.abc import Iterable

from embedlayer.checkpoints.reader import CONFIG, Checkpoint
from embedlayer.core.errors import CheckpointError, release
from embedlayer.families import (
    GGUF_ARCHITECTURES,
    REFUSED,
    TRANSFORMERS_VERSION,
    VOCAB_SIZE_KEYS,
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
        name = checkpoint.gguf.metadata.get("general.architecture")
        return CheckpointError(
            f"{checkpoint.name}: general.architecture {name!r} is not known here (known: "
            f"{', '.join(GGUF_ARCHITECTURES)}), so scale, positions and head are not known either."
        )
    if file is None:
        return CheckpointError(
            f"{checkpoint.name}: there is no {CONFIG}, so the model family is unknown, and with it scale, positions "
            f"and head. Copy the model's {CONFIG} there."
        )
    if model_type is None:
        return CheckpointError(
            f"{file} has no model_type, so the model family is unknown, and with it scale, positions and head. Copy "
            f"the model's own {CONFIG} there, or add its model_type."
        )
    if isinstance(model_type, str) and model_type in REFUSED:
        return CheckpointError(f"{file}: model_type {model_type!r} is not read, because {REFUSED[model_type]}.")
    if not _states_vocabulary(checkpoint.config) and not table_names(checkpoint):
        return CheckpointError(
            f"{file}: model_type {model_type!r} has no vocabulary: the configuration states no vocab_size, and no "
            f"tensor is called like a table of tokens."
        )
    near = " or ".join(map(repr, nearest_model_types(str(model_type))))
    written = str(checkpoint.config.get("transformers_version", ""))
    newer = (
        f"It was written by transformers {written}, and this embedlayer knows the families of {TRANSFORMERS_VERSION}: "
        f"look for a newer embedlayer."
        if release(written) > release(TRANSFORMERS_VERSION)
        else ""
    )
    return CheckpointError(
        f"{file}: model_type {model_type!r} is not known (nearest known: {near}), so scale, positions and head are not "
        f"known either. {newer}".rstrip()
    )


def _states_vocabulary(config: object) -> bool:
    """Return whether a configuration states the number of tokens, at any depth."""
    if not isinstance(config, dict):
        return False
    return any(key in VOCAB_SIZE_KEYS and type(size) is int for key, size in config.items()) or any(
        map(_states_vocabulary, config.values())
    )


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
    """Return the names of the tensors that store weights in quantised form; none for weights in full precision."""
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


def quantised_error(checkpoint: Checkpoint, what: str, name: str, parts: Iterable[str]) -> CheckpointError:
    """Return, without raising it, the error for a weight that is stored in quantised form."""
    info = checkpoint.info(name)
    beside = [part for part in parts if part != name]
    scales = f" beside {', '.join(beside[:3])}{', ...' if len(beside) > 3 else ''}" if beside else ""
    method, scheme = "", checkpoint.quantisation
    if scheme is not None:
        bits = 8 if scheme.get("load_in_8bit") else 4 if scheme.get("load_in_4bit") else scheme.get("bits")
        method = (
            f" ({scheme.get('quant_method', 'no quant_method')}{f', {bits} bits' if isinstance(bits, int) else ''})"
        )
    return CheckpointError(
        f"{info.file}: the {what} is quantised{method}: {name} is stored as {info.dtype} "
        f"{list(info.shape)}{scales}, and embedlayer reads no such format there. Load the model from which it was "
        f"quantised, or that model in one of the formats of docs/checkpoints.md."
    )


def combined_error(checkpoint: Checkpoint, what: str, *names: str) -> CheckpointError:
    """Return, without raising it, the error for rows that are computed from several tensors, one of them quantised."""
    stored = next(name for name in names if checkpoint.stored(name) is not None)
    info = checkpoint.matrix_info(stored)
    return CheckpointError(
        f"{info.file}: the {what} is computed from {' and '.join(names)}, which is read for numbers alone: {stored} is "
        f"quantised, {info.dtype}. Load the model from which it was quantised."
    )
