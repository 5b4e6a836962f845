"""Other safetensors files in a checkpoint's folder: second copies of its tensors, and adapters of PEFT."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from embedlayer.census.files import other_safetensors
from embedlayer.census.tensors import tensor_rule
from embedlayer.checkpoints.loader import checkpoint_family
from embedlayer.checkpoints.reader import Checkpoint
from embedlayer.errors import CheckpointError
from embedlayer.families import META_LLAMA, Family, family_of
from embedlayer.families.records import End
from embedlayer.io.safetensors_files import ADAPTER_WEIGHTS, Header, WeightFiles, find_folder, read_header
from embedlayer.vocab.row_map import RowTensor

Copies = dict[str, dict[str, str]]
"""From the path of a file to its tensors: from the name of each in the file to its name in the edit."""

_OF_TOKENS = ("lora_embedding_", "trainable_tokens_")
"""Parts of the names of an adapter's tensors that have values for each token or for single tokens."""


def second_copies(
    folder: Path,
    checkpoint: Checkpoint,
    tensors: Mapping[str, RowTensor],
    aliases: Mapping[str, str],
    left_out: Collection[str],
) -> tuple[dict[str, RowTensor], Copies]:
    """Find the tensors by token in the safetensors files of a folder that are not those of its checkpoint.

    Such files are copies in another dtype (`model.fp16.safetensors`) or layout (`consolidated.safetensors`). Their rows
    move as those of the checkpoint do, and new rows are those of the checkpoint in the dtype of the copy.

    Args:
        folder: The folder.
        checkpoint: Its checkpoint.
        tensors: The tensors of the checkpoint that are edited, by name.
        aliases: From each name of such a tensor in the checkpoint to its key in `tensors`.
        left_out: Paths of files that the edit leaves out.

    Returns:
        1. The tensors to edit, under names of the form `FILE/TENSOR`.
        2. The names of 1. by file and tensor.

    Raises:
        CheckpointError: An adapter has values of tokens. Or another file has a tensor with as many rows or columns as
            there are tokens, and how these belong to tokens is not known.
    """
    found: dict[str, RowTensor] = {}
    copies: Copies = {}
    own = {info.file for header in checkpoint.headers.values() for info in header.tensors.values()}
    family = checkpoint_family(checkpoint)
    families = [each for each in (family, family_of(META_LLAMA)) if each is not None]
    model_type = checkpoint.config.get("model_type")
    for file in other_safetensors(folder, left_out):
        path = folder / file
        if path in own:
            continue
        header = read_header(path)
        if path.name == ADAPTER_WEIGHTS:
            _check_adapter(file, header, aliases, [] if family is None else [family])
            continue
        for name, info in header.tensors.items():
            key = aliases.get(name)
            if key is None and name not in checkpoint.names:
                rule = tensor_rule(name, families, model_type)
                key = _tensor_like(tensors, None if rule is None else rule.end, info.shape)
                if key is None and len(next(iter(tensors.values())).tensor) in info.shape:
                    raise _unknown(file, name, info.shape)
            if key is not None:
                if info.shape != tuple(tensors[key].tensor.shape):
                    raise _unknown(file, name, info.shape)
                stored = replace(tensors[key], tensor=_read(path, name), parameter=key, state_of=_same)
                found[f"{file}/{name}"] = stored
                copies.setdefault(file, {})[name] = f"{file}/{name}"
    return found, copies


def _tensor_like(tensors: Mapping[str, RowTensor], end: End | None, shape: tuple[int, ...]) -> str | None:
    """Return the name of the first edited tensor of the same end and shape; of a tied head, that of the table."""
    alike = {rows.end: name for name, rows in reversed([*tensors.items()]) if tuple(rows.tensor.shape) == shape}
    return alike.get(end, alike.get("table")) if end in ("table", "head") else alike.get(end) if end else None


def _same(rows: Tensor) -> Tensor:
    """Return new rows unchanged: those of a copy are those of the checkpoint."""
    return rows


def _read(path: Path, name: str) -> Tensor:
    """Read one tensor of a safetensors file."""
    place = find_folder(path)
    assert place is not None
    return WeightFiles(place[0], path.name).read(name)


def _unknown(file: str, name: str, shape: tuple[int, ...]) -> CheckpointError:
    """Create, but do not raise, the error for a file that is no known copy of the checkpoint."""
    return CheckpointError(
        f"{file} has a tensor {name} of {' x '.join(f'{size:,}' for size in shape)}, which may have values for each "
        f"token, and it is not known how they belong to those of the checkpoint. Move {file} out of the folder, and "
        f"edit the rest."
    )


def _check_adapter(file: str, header: Header, aliases: Mapping[str, str], families: list[Family]) -> None:
    """Check that an adapter of PEFT changes no table and no head.

    Raises:
        CheckpointError: It does.
    """
    modules = {alias.rpartition(".")[0] for alias in aliases}
    for name in header.tensors:
        parts = name.removeprefix("base_model.model.").split(".")
        starts = [".".join(parts[:count]) for count in range(1, len(parts))]
        is_end = any(start in modules or tensor_rule(f"{start}.weight", families) for start in starts)
        if is_end or any(part in name for part in _OF_TOKENS):
            raise CheckpointError(
                f"{file} is an adapter of PEFT with values of tokens ({name}), which an edit of the vocabulary cannot "
                f"move. Merge it before the edit, with PeftModel.merge_and_unload(), or move it out of the folder."
            )
