"""Position schemes and folders for longer sequences: what an edit of the longest sequence changes in each.

Rotary positions are keys of a configuration. Learned positions are a table, whose old rows are in the receipt.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import torch
from torch import Tensor

from embedlayer.census.files import files_left_out, files_to_copy
from embedlayer.checkpoints.layer import load
from embedlayer.checkpoints.reader import CONFIG, Checkpoint
from embedlayer.checkpoints.reading.configuration import text_config
from embedlayer.checkpoints.reading.model import CheckpointModel, checkpoint_model
from embedlayer.checkpoints.reading.positions import LENGTH_KEYS, chosen_positions, first_position
from embedlayer.checkpoints.writer import copy_with_tensors
from embedlayer.core.errors import CheckpointError, SizeError
from embedlayer.families import REFUSED_ROTARY, ROTARY, family_of
from embedlayer.families.records import AlibiPositions, LearnedPositions, PositionChoice, RelativePositions
from embedlayer.io.files import JsonObject, read_json
from embedlayer.io.safetensors_files import INDEX, load_tensors, read_header
from embedlayer.opening.path_kinds import OWN_FOLDERS, path_kind
from embedlayer.positions.alibi import AlibiBias
from embedlayer.positions.learned import LearnedPositionalEmbedding, TableMethod
from embedlayer.positions.position import Position
from embedlayer.positions.relative import RelativePositionBias
from embedlayer.positions.rotary.config import language_model_keys
from embedlayer.positions.rotary.embedding import RotaryEmbedding
from embedlayer.positions.rotary.extension import (
    METHODS,
    RotaryChange,
    extend_rotary,
    ntk_aware_base,
    scaling_of_method,
)
from embedlayer.positions.rotary.scaling import RotaryScaling
from embedlayer.saving import TOKENIZER, WEIGHTS, build, describe
from embedlayer.training.run_directory import RunDirectory
from embedlayer.vocab.targets.folder_files import GENERATION, TOKENIZER_CONFIG

TABLE_METHODS: tuple[str, ...] = get_args(TableMethod)
POSITION, POSITION_WEIGHT = "position", "position.weight"
EXPORTED = ("*.onnx", "*.onnx_data*", "*.ort", "onnx/", "openvino*", "*.gguf", "*.tflite", "*.mlmodel", "*.engine")
"""Files that hold the angles of rotary positions as they were."""

RUN_STATE = ("run.json", "checkpoint.safetensors", "metrics.jsonl", "best.json", "report.html", "corpus/", "tables/")
"""Files of a run beside its result, which is then a saved model."""

LENGTHS_OF_TEXTS = {
    TOKENIZER_CONFIG: "model_max_length",
    GENERATION: "max_length",
    "sentence_bert_config.json": "max_seq_length",
}
"""Files beside a configuration -> key of the longest sequence in each."""

NO_TABLE = {
    AlibiBias: "ALiBi adds -slope * distance to the scores, at any distance: there is no number to extend. Its authors "
    "evaluate a model at several times its trained length (Press et al., 2022); what this one does has to be measured.",
    RelativePositionBias: "T5's biases are numbers of buckets of distances, and all distances from "
    "relative_attention_max_distance on share the last bucket: there is no table of positions to extend. Longer texts "
    "run as they are; what the model loses has to be measured.",
    Position: "Attention without positions has no longest sequence, and there is nothing to extend; what it loses "
    "beyond the trained length has to be measured.",
}
"""Class of a scheme -> why it is not extended."""

NOT_EXTENDED = (
    "Its vectors or biases are computed from the position or distance and have no trained row for each: there is "
    "nothing to extend."
)


@dataclass(frozen=True)
class PositionsRequest:
    """What `extend_positions` was asked for; its arguments."""

    length: int
    method: str | RotaryScaling | None = None
    base: float | None = None
    factors: Mapping[str, Sequence[float]] | None = None
    original_length: int | None = None
    replace: bool = False

    def __post_init__(self) -> None:
        """Check the numbers of tokens.

        Raises:
            SizeError: One is no whole number, or too small.
        """
        for name, value, least in (("length", self.length, 2), ("original_length", self.original_length, 1)):
            if value is not None and (not isinstance(value, int) or value < least):
                raise SizeError(f"{name} must be a whole number of at least {least}, not {value!r}.")

    @property
    def rotary_options(self) -> dict[str, Any]:
        """Return the arguments of `extend_rotary` beside the configuration and the length.

        Raises:
            SizeError: The method is one of tables.
        """
        if self.method in TABLE_METHODS:
            raise SizeError(f"Rotary positions have no table: use one of {', '.join(METHODS)}, not {self.method!r}.")
        names = ("base", "factors", "original_length", "replace")
        return {"method": self.method or "yarn", **{name: getattr(self, name) for name in names}}

    def table_method(self, old_length: int) -> TableMethod:
        """Return the method for a table of `old_length` positions.

        Raises:
            SizeError: The method is none of tables, an option of rotary positions is set, or the table is long enough.
        """
        if self.method not in (None, *TABLE_METHODS) or self.base is not None or self.factors is not None:
            raise SizeError(
                f"Learned positions are a table: use one of {', '.join(TABLE_METHODS)}, without base and factors."
            )
        if self.original_length not in (None, old_length):
            raise SizeError(f"The table has {old_length:,} positions, and original_length is {self.original_length}.")
        if self.length <= old_length:
            raise SizeError(f"The table has {old_length:,} positions: sequences of {self.length:,} need no edit.")
        return cast(TableMethod, self.method or "interpolate")


class SchemeChange(NamedTuple):
    """How the positions of some blocks changed.

    Attributes:
        blocks: Number of blocks; 0 for a scheme that is applied once.
        before: The scheme before, as text.
        after: The scheme afterwards, as text.
        largest_change: Largest change below the old length: of a cosine or sine times the attention factor, or of a
            number of a learned row.
    """

    blocks: int
    before: str
    after: str
    largest_change: float


@dataclass(frozen=True)
class PositionsEdit:
    """What changes when positions are extended.

    Attributes:
        method: Name of the method.
        lengths: Longest sequence before and after, in tokens.
        trained: Trained length, in tokens.
        changes: What changed of each scheme.
        texts: From the name of each changed file to its new content.
        tensors: From the name of each changed safetensors file to its new tensors by name.
        old_tensors: The same tensors as they were.
        left_out: Files that are not copied, and why.
    """

    method: str
    lengths: tuple[int, int]
    trained: int
    changes: tuple[SchemeChange, ...]
    texts: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    old_tensors: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


def extended_position(position: Position, request: PositionsRequest) -> tuple[Position, PositionsEdit]:
    """Return a scheme for longer sequences, and what changed; `position` does not change.

    Raises:
        CheckpointError: A scheme of this kind is not extended; or rotary positions are scaled already or do not state
            their trained length.
        SizeError: The request does not fit the scheme.
    """
    if isinstance(position, LearnedPositionalEmbedding):
        old = position.max_seq_len or 0
        method = request.table_method(old)
        table = position.resize(request.length, method)
        change = float((table.weight[: len(position.weight)] - position.weight).detach().abs().max())
        changes = (SchemeChange(0, f"table of {old:,}", f"table of {request.length:,}", change),)
        return table, PositionsEdit(method, (old, request.length), old, changes)
    if not isinstance(position, RotaryEmbedding):
        raise CheckpointError(NO_TABLE.get(type(position), f"{type(position).__name__}: {NOT_EXTENDED}"))
    options, scaling = request.rotary_options, position.scaling
    if scaling is not None and not request.replace:
        raise CheckpointError(
            f"These positions have {scaling!r} already: pass replace (--replace) to put another in its place."
        )
    trained = request.original_length or getattr(scaling, "original_max_seq_len", None)
    if trained is None:
        raise CheckpointError(
            "Rotary positions do not state for which length they were trained: pass original_length (--original)."
        )
    if request.length <= trained:
        raise SizeError(
            f"The positions were trained on {trained:,} tokens: sequences of {request.length:,} need no edit."
        )
    arguments = {name: getattr(position, name) for name in ("head_dim", "interleaved", "rotary_dim", "axes")}
    arguments |= {name: getattr(position, name) for name in ("query_scaling", "reversed", "trailing")}
    method, ratio = options["method"], request.length / trained
    if method == "base":
        base = request.base or ntk_aware_base(position.base, position.rotary_dim, ratio)
        new = RotaryEmbedding(base=base, **arguments)
    else:
        new_scaling = scaling_of_method(method, ratio, trained, request.factors) if isinstance(method, str) else method
        new = RotaryEmbedding(base=position.base, scaling=new_scaling, **arguments)
    own = rotary_change(RotaryChange(0, position, new), trained)
    return new, PositionsEdit(shown_method(method), (trained, request.length), trained, (own,))


def rotary_change(change: RotaryChange, trained: int) -> SchemeChange:
    """Return a change of rotary positions as text and number."""
    before, after = (
        f"base {scheme.base:g}" + ("" if scheme.scaling is None else f", {shown_method(scheme.scaling)}")
        for scheme in (change.before, change.after)
    )
    return SchemeChange(change.blocks, before, after, change.largest(trained))


def shown_method(method: str | RotaryScaling) -> str:
    """Return a scaling as short text, without lists of divisors."""
    if isinstance(method, str):
        return method
    values = {name: value for name, value in vars(method).items() if not isinstance(value, tuple) and value is not None}
    return f"{type(method).__name__}({', '.join(f'{name}={value}' for name, value in values.items())})"


def edit_of_folder(folder: Path, request: PositionsRequest) -> PositionsEdit:
    """Return what an extension changes in the folder of a saved layer, a run, or a checkpoint; nothing is written.

    Raises:
        CheckpointError: The positions are of a kind that is not extended; see `extend_rotary` and `extended_position`.
        SizeError: The request does not fit the positions.
        FileError: A file cannot be read.
    """
    if not (folder / CONFIG).is_file():
        raise CheckpointError(
            f"{folder} has no {CONFIG}, in which the positions of a model are stated: none is edited."
        )
    config = read_json(folder / CONFIG)
    if path_kind(folder) in OWN_FOLDERS:
        edit = _edit_of_own_folder(folder, config, request)
    elif _is_rotary(config):
        longer = extend_rotary(config, request.length, **request.rotary_options)
        changes = tuple(rotary_change(each, longer.original_length) for each in longer.changes)
        method = request.rotary_options["method"]
        texts = {CONFIG: _json_text(longer.config)}
        lengths = (longer.old_length, request.length)
        left_out = _matching(folder, EXPORTED)
        edit = PositionsEdit(shown_method(method), lengths, longer.original_length, changes, texts, left_out=left_out)
    else:
        edit = _edit_of_tables(folder, config, request)
    return replace(edit, texts={**edit.texts, **_other_lengths(folder, edit.lengths[0], request.length)})


def write_edit(folder: Path, partial: Path, edit: PositionsEdit) -> None:
    """Write a copy of a folder with an edit to the empty folder `partial`.

    Raises:
        FileError: A file cannot be read or written.
        CheckpointError: The copy of a checkpoint with tables cannot be loaded.
    """
    for name in files_to_copy(folder, partial, edit.left_out):
        file = folder / name
        if name in edit.texts:
            (partial / name).write_text(edit.texts[name], encoding="utf-8")
        elif name in edit.tensors:
            copy_with_tensors(file, partial / name, read_header(file), edit.tensors[name], {})
        else:
            shutil.copyfile(file, partial / name)


def _is_rotary(config: JsonObject) -> bool:
    """Return whether the language model of a configuration has rotary positions, as its family's record says."""
    part = config
    for key in language_model_keys(config):
        part = part[key]
    family = family_of(text_config(config).get("model_type"))
    spec = None if family is None else family.position
    if isinstance(spec, PositionChoice):
        chosen = part.get(spec.key, spec.choices[0][0])
        return next((scheme for value, scheme in spec.choices if value == chosen), spec.otherwise) == "rotary"
    return spec == "rotary" or (family is None and part.get("model_type") in {**ROTARY, **REFUSED_ROTARY})


def check_rotary(config: JsonObject, source: str, remedy: str) -> None:
    """Check that a live model or a GGUF file, of which tables are not extended, is of a type with rotary positions.

    Raises:
        CheckpointError: It is not; `remedy` says what to do with a table.
    """
    for key in language_model_keys(config):
        config = config[key]
    name = config.get("model_type")
    if name in {**ROTARY, **REFUSED_ROTARY}:
        return
    family = family_of(name)
    if family is not None and isinstance(family.position, (AlibiPositions, RelativePositions)):
        raise _not_extended(family.position, source, family.name)
    raise CheckpointError(f"{source} has no rotary positions that are known here, and no others are extended: {remedy}")


def _not_extended(spec: object, source: str, family: str) -> CheckpointError:
    """Return the error that says what is known of the lengths of positions without a table."""
    kinds = {AlibiPositions: AlibiBias, RelativePositions: RelativePositionBias, type(None): Position}
    kind = kinds.get(type(spec))
    return CheckpointError(f"{source} is of family {family}. {NOT_EXTENDED if kind is None else NO_TABLE[kind]}")


def _edit_of_own_folder(folder: Path, config: JsonObject, request: PositionsRequest) -> PositionsEdit:
    """Return what changes in a folder of this library, whose configuration describes the scheme."""
    description = config.get(POSITION)
    if not isinstance(description, dict) or config.get("other_positions"):
        raise CheckpointError(
            f"{folder} is a layer with {'several position schemes' if description else 'no position scheme'}: extend "
            f"the model that it is a part of."
        )
    with torch.random.fork_rng(devices=[]):
        position = build(description)
    old_tensors: dict[str, dict[str, Tensor]] = {}
    if isinstance(position, LearnedPositionalEmbedding):
        weight = load_tensors(folder / WEIGHTS)[0].get(POSITION_WEIGHT)
        if weight is None or weight.shape != position.weight.shape:
            raise CheckpointError(f"{folder / WEIGHTS} has no table of the positions that {CONFIG} describes.")
        position.weight = torch.nn.Parameter(weight, requires_grad=False)
        old_tensors = {WEIGHTS: {POSITION_WEIGHT: weight}}
    run = RunDirectory(folder)
    if run.contains_run and request.original_length is None and isinstance(position, RotaryEmbedding):
        request = replace(request, original_length=run.options().max_length)
    new, edit = extended_position(position, request)
    content = {**config, POSITION: describe(new)}
    tensors = {WEIGHTS: {POSITION_WEIGHT: new.weight.detach()}} if isinstance(new, LearnedPositionalEmbedding) else {}
    left_out = _matching(folder, (*RUN_STATE, *EXPORTED))
    return replace(
        edit, texts={CONFIG: _json_text(content)}, tensors=tensors, old_tensors=old_tensors, left_out=left_out
    )


def _edit_of_tables(folder: Path, config: JsonObject, request: PositionsRequest) -> PositionsEdit:
    """Return what changes in a checkpoint with learned positions: its tables, and tensors that follow their rows."""
    checkpoint = Checkpoint.open(folder)
    model = checkpoint_model(checkpoint, None, "cpu")
    tables = _tables_of(model)
    offsets = {offset for _, offset in tables.values()}
    shapes = {name: checkpoint.info(name).shape for name in tables}
    lengths = {shape[0] - offset for (_, offset), shape in zip(tables.values(), shapes.values(), strict=True)}
    if len(lengths) != 1 or len(offsets) != 1:
        raise CheckpointError(f"The tables of positions of {folder} have different lengths: {shapes}.")
    (old,), (offset,) = lengths, offsets
    if checkpoint.info(next(iter(tables))).file.parent != folder:
        raise CheckpointError(f"The weights of {folder} are in a folder inside it: extend that one.")
    rows, added = old + offset, request.length - old
    method = request.table_method(old)
    old_tensors: dict[str, dict[str, Tensor]] = {}
    tensors: dict[str, dict[str, Tensor]] = {}
    changes = []
    for name in checkpoint.names:
        info = checkpoint.info(name)
        if name in tables:
            table = LearnedPositionalEmbedding(old, info.shape[1], offset=offset, dtype=info.torch_dtype)
            table.weight = torch.nn.Parameter(checkpoint.read(name), requires_grad=False)
            new = table.resize(request.length, method).weight
            change = float((new[:rows].float() - table.weight.float()).abs().max())
            changes.append(SchemeChange(0, f"{name}, {rows:,} rows", f"{rows + added:,} rows", change))
        elif info.shape in ((rows,), (1, rows), (old,), (1, old)) or info.shape[-2:] in ((rows, rows), (old, old)):
            counted = _grown(checkpoint, name, added)
            if counted is None:
                continue
            new = counted
        else:
            continue
        file = info.file.relative_to(folder).as_posix()
        old_tensors.setdefault(file, {})[name] = checkpoint.read(name)
        tensors.setdefault(file, {})[name] = new.detach()
    texts = {CONFIG: _json_text(_with_more_positions(config, model, {rows, old}, added))}
    if (folder / INDEX).is_file():
        pairs = [(new, old_tensors[file][name]) for file, each in tensors.items() for name, new in each.items()]
        nbytes = sum(new.nbytes - before.nbytes for new, before in pairs)
        index = read_json(folder / INDEX)
        if isinstance(index.get("metadata"), dict) and isinstance(index["metadata"].get("total_size"), int):
            index["metadata"]["total_size"] += nbytes
            texts[INDEX] = _json_text(index)
    left_out = tuple(files_left_out(folder))
    return PositionsEdit(method, (old, request.length), old, tuple(changes), texts, tensors, old_tensors, left_out)


def _tables_of(model: CheckpointModel) -> dict[str, tuple[LearnedPositions, int]]:
    """Return the tables of learned positions of a checkpoint: from the name of each to its record and offset.

    Raises:
        CheckpointError: A stack has positions of another kind, or a table is stored in quantised form or is missing.
    """
    family, checkpoint = model.family, model.tensors.checkpoint
    specs = [family.position] + ([] if family.decoder_input is None else [family.decoder_input.position])
    tables: dict[str, tuple[LearnedPositions, int]] = {}
    for spec in dict.fromkeys(specs):
        spec = chosen_positions(model, spec)
        if not isinstance(spec, LearnedPositions):
            raise _not_extended(spec, checkpoint.name, model.tensors.family_name)
        found = [name for name in checkpoint.find(*spec.names) if checkpoint.stored(name) is None]
        if not found:
            raise CheckpointError(f"{checkpoint.name} has no table of positions named {' or '.join(spec.names)}.")
        tables[found[0]] = (spec, first_position(model) if spec.offset == "padding" else int(spec.offset))
        shape = checkpoint.info(found[0]).shape
        if others := [name for name in found[1:] if name not in tables and checkpoint.info(name).shape == shape]:
            raise CheckpointError(f"{', '.join(others)} may be another table of positions of {checkpoint.name}.")
    return tables


def _grown(checkpoint: Checkpoint, name: str, added: int) -> Tensor | None:
    """Return a tensor that counts positions, with more of them; `None` for a tensor that does not.

    Older checkpoints store the numbers of positions, token types of zeros, and causal masks.
    """
    old = checkpoint.read(name)
    size = old.shape[-1] + added
    if old.dim() <= 2 and not old.is_floating_point():
        if torch.equal(old.flatten(), torch.arange(old.numel(), dtype=old.dtype)):
            return torch.arange(size, dtype=old.dtype).view(*old.shape[:-1], size)
        return None if old.any() else old.new_zeros(*old.shape[:-1], size)
    if old.dim() == 4 and torch.equal(old, torch.ones_like(old).tril()):
        return old.new_ones(*old.shape[:-2], size, size).tril()
    return None


def _with_more_positions(config: JsonObject, model: CheckpointModel, old: set[int], added: int) -> JsonObject:
    """Return a configuration whose keys of lengths in `old` are `added` larger, in each part with such keys.

    Raises:
        CheckpointError: There is no such key.
    """
    counts = [0]

    def grown(part: JsonObject) -> JsonObject:
        own = {key: part[key] + added for key in (*LENGTH_KEYS, "n_ctx") if part.get(key) in old}
        counts[0] += len(own)
        stacks = [key for key in ("text_config", *model.family.sub_configs) if isinstance(part.get(key), dict)]
        return {**part, **{key: grown(part[key]) for key in stacks}, **own}

    new = grown(config)
    if not counts[0]:
        raise CheckpointError(
            f"{model.config.file} states none of {', '.join(LENGTH_KEYS)} with the {min(old):,} positions of the "
            f"table: write it first, so that the longer table is opened by it."
        )
    return new


def _other_lengths(folder: Path, old: int, new: int) -> dict[str, str]:
    """Return the new content of the files that state the longest sequence beside the configuration.

    The tokenizer's `model_max_length` becomes `new` if it is smaller, the others if they are `old`.
    """
    texts = {}
    for name, key in LENGTHS_OF_TEXTS.items():
        content = read_json(folder / name) if (folder / name).is_file() else {}
        value = content.get(key)
        if type(value) is int and (value == old or (name == TOKENIZER_CONFIG and 0 < value < new)):
            texts[name] = _json_text({**content, key: new})
    tokenizer = read_json(folder / TOKENIZER) if (folder / TOKENIZER).is_file() else {}
    truncation = tokenizer.get("truncation")
    if isinstance(truncation, dict) and truncation.get("max_length") == old:
        texts[TOKENIZER] = _json_text({**tokenizer, "truncation": {**truncation, "max_length": new}})
    return texts


def _json_text(content: JsonObject) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _matching(folder: Path, patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the paths in a folder that patterns name; that of a folder ends in a slash."""
    paths = {path for pattern in patterns for path in folder.glob(pattern.removesuffix("/"))}
    return tuple(sorted(f"{path.name}/" if path.is_dir() else path.name for path in paths))


def check_written(folder: Path, length: int) -> None:
    """Check that a checkpoint with a longer table is read with it.

    Raises:
        CheckpointError: It cannot be loaded, or has other positions.
    """
    layer = load(folder)
    if layer.position.max_seq_len != length:
        raise CheckpointError(f"The edited copy has {layer.position.max_seq_len} positions, not {length}.")
