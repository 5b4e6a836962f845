"""Other safetensors files in a folder of a model: second copies of its tensors, and adapters of PEFT."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from embedlayer.checkpoints.reader import Checkpoint
from embedlayer.checkpoints.reading.model import checkpoint_family, tensor_rules
from embedlayer.core.errors import CheckpointError
from embedlayer.families import META_LLAMA, Family, family_of
from embedlayer.families.left_out_files import other_safetensors
from embedlayer.families.vocabulary_tensors import tensor_rule
from embedlayer.formats.adapters import OF_TOKENS, PREFIX
from embedlayer.integrations.peft import MERGE
from embedlayer.io.safetensors_files import ADAPTER_WEIGHTS, DTYPES, Header, TensorInfo, read_header
from embedlayer.io.weight_files import WeightFiles, find_folder
from embedlayer.saving import FLOATS

Copies = dict[str, dict[str, str]]
"""From the path of a file to its copies: from the name of a tensor in the file to that of the tensor it copies."""


def own_files(checkpoint: Checkpoint) -> set[Path]:
    return {info.file for header in checkpoint.headers.values() for info in header.tensors.values()}


def find_copies(folder: Path, checkpoint: Checkpoint, aliases: Mapping[str, str], left_out: Collection[str]) -> Copies:
    """Find tensors with values for each token in the other safetensors files of a checkpoint folder.

    Such files are copies in another dtype (`model.fp16.safetensors`) or layout (`consolidated.safetensors`): their rows
    are those of the checkpoint in the dtype of the copy. `aliases` maps each name of such a tensor in the checkpoint to
    one of its names; that of the table is first. Files that an edit leaves out are not read. A copy of stored rows is
    in floating point (`is_dense`), or has the same bytes under the same names: then the result has the name of the
    weight that they replace.
    """
    copies: Copies = {}
    own = own_files(checkpoint)
    family = checkpoint_family(checkpoint)
    families = [each for each in (family, family_of(META_LLAMA)) if each is not None]
    model_type = checkpoint.config.get("model_type")
    keys = list(dict.fromkeys(aliases.values()))
    rules = tensor_rules(checkpoint)
    ends = {key: ("table" if key == keys[0] else rule.end if (rule := rules.get(key)) else None) for key in keys}
    shapes = {key: checkpoint.matrix_info(key).shape for key in keys}
    num_rows = shapes[keys[0]][0]
    for file in other_safetensors(folder, left_out):
        path = folder / file
        if path in own:
            continue
        header = read_header(path)
        if path.name == ADAPTER_WEIGHTS:
            _check_adapter(file, header, aliases, [] if family is None else [family], MERGE)
            continue
        stored = _stored_copies(checkpoint, aliases, file, path, header)
        copies |= {file: stored} if stored else {}
        parts = {part for name in stored for part in checkpoint.module_tensors(name).values()}
        for name, info in header.tensors.items():
            key = aliases.get(name)
            if name in parts:
                continue
            if key is None and name not in checkpoint.names:
                rule = tensor_rule(name, families, model_type)
                alike = {each: ends[each] for each in keys if shapes[each] == info.shape}
                end = None if rule is None else rule.end
                wanted = (end, "table") if end in ("table", "head") else (end,) if end else ()  # a head may be tied
                key = next((name for one in wanted for name, own_end in alike.items() if own_end == one), None)
                if key is None and num_rows in info.shape:
                    raise _unknown(file, name, info.shape)
            if key is not None:
                if info.shape != shapes[key] or not is_dense(info):
                    raise _unknown(file, name, info.shape)
                copies.setdefault(file, {})[name] = key
    return copies


def is_dense(info: TensorInfo | None) -> bool:
    """Return whether a tensor, `None` for a missing one, is stored in floating point of at least 16 bits."""
    return info is not None and DTYPES.get(info.dtype) in FLOATS


def _stored_copies(
    checkpoint: Checkpoint, aliases: Mapping[str, str], file: str, path: Path, header: Header
) -> dict[str, str]:
    """Return which stored rows of a checkpoint another file has with the same bytes: from name to key of the weight."""
    place = find_folder(path)
    assert place is not None
    other, copies = WeightFiles(place[0], path.name), dict[str, str]()
    for name, key in aliases.items():
        parts = {*checkpoint.module_tensors(name).values()} if checkpoint.stored(name) else set()
        present = sorted(parts & header.tensors.keys())
        if not present or is_dense(header.tensors.get(name)):
            continue
        kinds = ({part: each.info(part).dtype for part in present} for each in (other, checkpoint))
        is_whole = len(present) == len(parts) and next(kinds) == next(kinds)
        if not is_whole or not all(checkpoint.stores(part, other.read(part)) for part in present):
            raise _unknown(file, present[0], header.tensors[present[0]].shape)
        copies[name] = key
    return copies


def refuse_copies(
    folder: Path, files: Iterable[str], names: Collection[str], sizes: Collection[int], call: str
) -> None:
    """Refuse safetensors files beside a layer or a run of this library that may have values of tokens."""
    for file in files:
        header = read_header(folder / file)
        if Path(file).name == ADAPTER_WEIGHTS:
            _check_adapter(file, header, names, [], call)
        for name, info in header.tensors.items():
            if name in names or {*sizes} & {*info.shape}:
                raise _unknown(file, name, info.shape)


def _unknown(file: str, name: str, shape: tuple[int, ...]) -> CheckpointError:
    """Create, but do not raise, the error for a file that is no known copy of the model in its folder."""
    size = " x ".join(f"{size:,}" for size in shape)
    return CheckpointError(
        f"{file} has a tensor {name}, {size}, which may have values for each token: move it out of the folder."
    )


def _check_adapter(file: str, header: Header, names: Collection[str], families: list[Family], call: str) -> None:
    """Check that an adapter of PEFT changes no table and no head."""
    modules = {name.rpartition(".")[0] for name in names}
    for name in header.tensors:
        parts = name.removeprefix(PREFIX).split(".")
        starts = [".".join(parts[:count]) for count in range(1, len(parts))]
        is_end = any(start in modules or tensor_rule(f"{start}.weight", families) for start in starts)
        if is_end or any(part in name for part in OF_TOKENS):
            raise CheckpointError(
                f"{file} is an adapter with values of tokens ({name}). Merge it before the edit, with {call}."
            )
