"""Longer context: extend the positions of a model or a folder, with a receipt by which the edit is undone."""

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Annotated, TypedDict

from torch import Tensor, nn

from embedlayer.census.files import shown_files
from embedlayer.core.errors import CheckpointError, EmbedLayerWarning, FileError, SizeError
from embedlayer.core.short_repr import short_repr
from embedlayer.io.files import JsonObject, new_file, read_bytes
from embedlayer.io.json_fields import Count, Range, parse_json
from embedlayer.io.safetensors_files import load_tensors, save_tensors
from embedlayer.opening.path_kinds import PathKind, path_kind
from embedlayer.positions.position import Position
from embedlayer.positions.rotary.scaling import RotaryScaling
from embedlayer.saving import build, describe
from embedlayer.vocab.receipt import packed_bytes, receipt_fields, unpacked_bytes, without_prefix
from embedlayer.vocab.targets.folder import (
    POSITIONS_RECEIPT,
    edited_copy,
    receipt_beside,
    receipt_of_last_edit,
)
from embedlayer.vocab.targets.gguf_positions import HEAD, edit_of_gguf, gguf_head_hash, restore_gguf
from embedlayer.vocab.targets.positions import (
    PositionsEdit,
    PositionsRequest,
    SchemeChange,
    check_written,
    edit_of_folder,
    extended_position,
    write_edit,
)
from embedlayer.vocab.targets.transformers_positions import extend_live, is_transformers, set_keys

KIND, FORMAT_VERSION = "embedlayer/positions-receipt", 1
LIVE = "model"
"""Prefix, in a receipt, of the description and the tensors of a live model's scheme."""


class ContextReceiptFields(TypedDict):
    """Define the JSON fields of a saved receipt; contents of files and tensors are stored beside them."""

    kind: str
    format_version: int
    method: str
    lengths: tuple[Count, Count]
    trained: Count
    changes: list[tuple[Count, str, str, Annotated[float, Range(0)]]]
    hashes: dict[str, str]
    left_out: list[str]


@dataclass(frozen=True, eq=False)
class ContextReceipt:
    """Record what one edit of the longest sequence did; undo the edit, and save it.

    Attributes:
        method: Name of the method.
        lengths: Longest sequence before and after, in tokens.
        trained: Trained length, in tokens.
        changes: For each scheme that changed, what it was and is.
        files: From the name of each changed file to its content before the edit; of files with weights their tensors
            are in `tensors`.
        tensors: From `file/name` of each changed tensor to its values before the edit.
        hashes: From the name of each file in `files` to the SHA-256 of its content after the edit.
        left_out: Files that are not in the edited folder, because they hold the positions as they were.
    """

    __repr__ = short_repr

    method: str
    lengths: tuple[int, int]
    trained: int
    changes: tuple[SchemeChange, ...]
    files: dict[str, bytes] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    def undo(self, target: nn.Module | Path | str, *, out: Path | str | None = None) -> None:
        """Restore the positions before the edit: in a live model in place, of a folder or file into a new one.

        Every file of the folder has the bytes that it had before the edit, unless it was changed since: weights that
        are not of positions are copied as they are now.

        Args:
            target: What the edit changed or wrote; a folder is only read.
            out: The new folder or file; required for these. It must not exist or must be an empty folder.

        Raises:
            CheckpointError: `target` is not what this edit wrote, or another edit followed.
            FileError: `target` does not exist, or `out` is missing, not empty or cannot be written.
            SizeError: `out` is set for a live model.

        Warns:
            EmbedLayerWarning: Files that the edit left out are not restored.
        """
        if isinstance(target, nn.Module):
            if out is not None:
                raise SizeError("A live model is changed in place: pass out=... for folders and files only.")
            if LIVE not in self.files:
                raise CheckpointError("This is the receipt of a folder: undo it with the path of that folder.")
            fields = parse_json(self.files[LIVE].decode(), "The receipt")
            if is_transformers(target):
                set_keys(target, fields["before"], fields["after"])
                return
            _set_position(target, self._restored_position(target, fields))
            return
        source = Path(target)
        if LIVE in self.files:
            raise CheckpointError("This is the receipt of a live model: undo it with that model.")
        if path_kind(source) is PathKind.GGUF:
            if out is None:
                raise FileError(f"The undo of {source} is written to a new file: name it with out=...")
            if HEAD not in self.files or gguf_head_hash(source) != self.hashes[HEAD]:
                raise CheckpointError(f"{source} is not what this edit wrote: nothing was changed.")
            with new_file(out) as partial:
                restore_gguf(source, partial, self.files)
            return
        last = receipt_of_last_edit(source, POSITIONS_RECEIPT)
        for name, digest in self.hashes.items():
            if not (source / name).is_file() or sha256(read_bytes(source / name)).hexdigest() != digest:
                raise CheckpointError(f"{source / name} is not what this edit wrote: nothing was changed.")
        tensors: dict[str, dict[str, Tensor]] = {}
        for path, tensor in self.tensors.items():
            file, _, name = path.rpartition("/")
            tensors.setdefault(file, {})[name] = tensor
        with edited_copy(source, out, POSITIONS_RECEIPT) as (partial, _):
            write_edit(source, partial, PositionsEdit(self.method, self.lengths, self.trained, (), tensors=tensors))
            for name, content in self.files.items():
                (partial / name).write_bytes(content)
            (partial / last.name).unlink()
        if self.left_out:
            warnings.warn(
                f"Not restored: {shown_files(self.left_out)}, which the edited folder does not have: copy them from "
                f"the folder before the edit.",
                EmbedLayerWarning,
                stacklevel=2,
            )

    def save(self, path: Path | str) -> None:
        """Write the receipt to a safetensors file.

        Raises:
            FileError: The file cannot be written.
        """
        tensors = {f"files/{name}": packed_bytes(content) for name, content in self.files.items()}
        tensors |= {f"tensors/{name}": tensor for name, tensor in self.tensors.items()}
        fields = {"kind": KIND, "format_version": FORMAT_VERSION}
        fields |= {name: getattr(self, name) for name in ContextReceiptFields.__annotations__ if name not in fields}
        save_tensors(path, tensors, {"receipt": json.dumps(fields)})

    @classmethod
    def load(cls, path: Path | str) -> "ContextReceipt":
        """Read a receipt from a file that `save` wrote.

        Raises:
            FileError: There is no such file, or it cannot be read.
            CheckpointError: The file is damaged, or no receipt of an edit of positions.
        """
        tensors, metadata = load_tensors(path)
        fields = receipt_fields(path, metadata, ContextReceiptFields, KIND, FORMAT_VERSION)
        return cls(
            fields["method"],
            (fields["lengths"][0], fields["lengths"][1]),
            fields["trained"],
            tuple(SchemeChange(*each) for each in fields["changes"]),
            {name: unpacked_bytes(packed) for name, packed in without_prefix("files/", tensors).items()},
            without_prefix("tensors/", tensors),
            fields["hashes"],
            tuple(fields["left_out"]),
        )

    def _restored_position(self, model: nn.Module, fields: JsonObject) -> Position:
        """Return the scheme of a live model before the edit.

        Raises:
            CheckpointError: The model has another scheme than the edit left.
        """
        if json.dumps(describe(_position_of(model))) != json.dumps(fields["after"]):
            raise CheckpointError("The model has other positions than this edit left: nothing was changed.")
        position = build(fields["before"])
        assert isinstance(position, Position)
        position.load_state_dict(self.tensors)
        weight = next(iter(_position_of(model).parameters()), None)
        return position if weight is None else position.to(weight)

    def __str__(self) -> str:
        old, new = self.lengths
        lines = [f"{old:,} tokens -> {new:,} tokens, {self.method}, trained on {self.trained:,}"]
        for each in self.changes:
            where = f"{each.blocks} blocks: " * bool(each.blocks)
            below = f"    largest change below {self.trained:,}: {each.largest_change:.3g}"
            lines += [f"  {where}{each.before} -> {each.after}", below]
        lines += [f"  left out {shown_files(self.left_out)}"] if self.left_out else []
        return "\n".join(lines)


def extend_positions(
    target: nn.Module | Path | str,
    length: int,
    *,
    method: str | RotaryScaling | None = None,
    base: float | None = None,
    factors: Mapping[str, Sequence[float]] | None = None,
    original_length: int | None = None,
    replace: bool = False,
    out: Path | str | None = None,
) -> ContextReceipt:
    """Extend the positions of a model to sequences of `length` tokens; nothing is trained.

    Rotary positions get other frequencies, written in the keys of their family (`extend_rotary`); a table of learned
    positions gets more rows (`LearnedPositionalEmbedding.resize`), and tables of token types stay. The configuration's
    longest sequence and the tokenizer's `model_max_length` follow. ALiBi, T5's biases, fixed sinusoids and attention
    without positions have nothing to extend, and are refused with what is known of them.

    Args:
        target: A live `DecoderLM`, layer, or model of transformers with rotary positions, which is changed in place, or
            the path of a folder (a saved layer, a run,
            or a checkpoint) or GGUF file, which is only read.
        length: Longest sequence, N, in tokens.
        method: Of rotary positions `"linear"`, `"dynamic"`, `"yarn"` (the default), `"llama3"`, `"longrope"`, `"base"`,
            or a scaling; of tables `"interpolate"` (the default), `"extend"` or `"repeat"`, which keep the bits of the
            old rows.
        base: Base of the frequencies, for `"base"`; by default NTK-aware.
        factors: `short_factor` and `long_factor` for `"longrope"`.
        original_length: Trained length, where the configuration does not state it, as that of a live scheme.
        replace: Put the new scaling in the place of one that the positions have; its factor is relative to the original
            length.
        out: Path of the edited copy, which must not exist or must be an empty folder. The receipt is in it, or beside
            a GGUF file.

    Returns:
        The receipt of the edit, with the largest change of cosines and sines (or rows) below the trained length.

    Raises:
        CheckpointError: The positions are of a kind that is not extended, a key is not known or contradicts another, or
            positions are scaled already. Nothing was written.
        SizeError: `length` is not above the trained one, the method is not one of this kind of positions, or `out` does
            not fit the target.
        FileError: `target` does not exist, a process trains in it, or `out` cannot be written.
        MissingExtraError: A GGUF file needs the extra `gguf`.

    Warns:
        EmbedLayerWarning: Files that hold the old positions are left out.

    Example:
        >>> model = DecoderLM(TokenEmbedding(100, 32), "rotary", num_layers=1, num_heads=2)
        >>> print(extend_positions(model, 256, method="dynamic", original_length=64))
        64 tokens -> 256 tokens, dynamic, trained on 64
          base 10000 -> base 10000, DynamicNTKScaling(factor=4.0, original_max_seq_len=64)
            largest change below 64: 0
    """
    request = PositionsRequest(length, method, base, factors, original_length, replace)
    if isinstance(target, nn.Module):
        if out is not None:
            raise SizeError("A live model is changed in place: pass out=... for folders and files only.")
        return _extend_live(target, request)
    source = Path(target)
    if path_kind(source) is PathKind.GGUF:
        with edited_copy(source, out) as (partial, receipt_file):
            edit, old = edit_of_gguf(source, partial, request)
            receipt = _receipt(edit, old, {HEAD: gguf_head_hash(partial)})
            receipt.save(receipt_file)
        return receipt
    with edited_copy(source, out, POSITIONS_RECEIPT) as (partial, receipt_file):
        edit = edit_of_folder(source, request)
        write_edit(source, partial, edit)
        if edit.tensors and path_kind(source) is PathKind.CHECKPOINT:
            check_written(partial, length)
        hashes = {name: sha256(text.encode()).hexdigest() for name, text in edit.texts.items()}
        receipt = _receipt(edit, {name: read_bytes(source / name) for name in edit.texts}, hashes)
        receipt.save(receipt_file)
    if edit.left_out:
        warnings.warn(
            f"Left out: {shown_files(edit.left_out)}, which hold the positions as they were, or state that belongs to "
            f"them. Write them again from the new folder.",
            EmbedLayerWarning,
            stacklevel=2,
        )
    return receipt


def last_context_receipt(path: Path | str) -> ContextReceipt:
    """Read the receipt of the last edit of a folder or GGUF file, which must be one of its positions.

    Raises:
        CheckpointError: There is no receipt, the last edit was one of the vocabulary, or the receipt is damaged.
        FileError: The receipt cannot be read.
    """
    path = Path(path)
    if path_kind(path) is not PathKind.GGUF:
        return ContextReceipt.load(receipt_of_last_edit(path, POSITIONS_RECEIPT))
    if not receipt_beside(path).is_file():
        raise FileError(f"There is no receipt {receipt_beside(path)}.")
    return ContextReceipt.load(receipt_beside(path))


def _receipt(edit: PositionsEdit, files: dict[str, bytes], hashes: dict[str, str]) -> ContextReceipt:
    """Return the receipt of an edit; `files` has the old content of changed files, `hashes` those of the new."""
    tensors = {f"{file}/{name}": old for file, each in edit.old_tensors.items() for name, old in each.items()}
    lengths, changes, left_out = edit.lengths, edit.changes, edit.left_out
    return ContextReceipt(edit.method, lengths, edit.trained, changes, files, tensors, hashes, left_out)


def _position_of(model: nn.Module) -> Position:
    """Return the position scheme of a live model of this library.

    Raises:
        CheckpointError: It has none, or several, or is a scheme itself.
    """
    if isinstance(model, Position):
        raise CheckpointError(f"{type(model).__name__} is the scheme of a model: pass the model, or its folder.")
    position = getattr(model, "position", None)
    if not isinstance(position, Position) or getattr(model, "other_positions", None):
        raise CheckpointError(
            f"{type(model).__name__} has no position scheme of embedlayer, or several: save the model, extend its "
            f"folder, and load that."
        )
    return position


def _set_position(model: nn.Module, position: Position) -> None:
    """Replace the position scheme of a live model, from which its `config` has the longest sequence."""
    model.position = position


def _extend_live(model: nn.Module, request: PositionsRequest) -> ContextReceipt:
    """Replace the position scheme of a live model by one for longer sequences."""
    if is_transformers(model):
        edit, keys = extend_live(model, request)
        return _receipt(edit, {LIVE: json.dumps(keys).encode()}, {})
    old = _position_of(model)
    new, edit = extended_position(old, request)
    both = {"before": describe(old), "after": describe(new)}
    receipt = _receipt(edit, {LIVE: json.dumps(both).encode()}, {})
    receipt.tensors.update({name: tensor.detach().clone() for name, tensor in old.state_dict().items()})
    _set_position(model, new.train(old.training))
    return receipt
