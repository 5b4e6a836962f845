"""Receipts: what one edit of a vocabulary did, and its undo."""

import json
import warnings
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.optim import Optimizer

from embedlayer.census.files import shown_files
from embedlayer.core.errors import CheckpointError, EmbedLayerWarning, FileError, ShapeError, TokenIdError
from embedlayer.core.short_repr import short_repr
from embedlayer.io.files import JsonObject, named_path, read_bytes
from embedlayer.io.json_fields import Count, Range, check_fields, parse_json, printable
from embedlayer.io.safetensors_files import load_tensors, save_tensors
from embedlayer.opening.path_kinds import PathKind, path_kind
from embedlayer.tokenization.tokenizer_calls import build_tokenizer
from embedlayer.vocab.edit import ModelEdit
from embedlayer.vocab.init.row_init import count_origins
from embedlayer.vocab.map import DROPPED, RowMap
from embedlayer.vocab.row_training import merged_rows
from embedlayer.vocab.targets.apply_rows import EditResult, StoredTypes
from embedlayer.vocab.targets.folder import (
    apply_to_files,
    edited_copy,
    next_receipt,
    receipt_beside,
    receipt_of_last_edit,
    receipts_in,
)
from embedlayer.vocab.targets.live import apply_to_module
from embedlayer.vocab.targets.run import RUN
from embedlayer.vocab.token_selection import shown_names
from embedlayer.vocab.tokenizer_edit import tokens_with_extra_space

KIND, FORMAT_VERSION = "embedlayer/vocabulary-receipt", 1
MAX_UNPACKED_BYTES = 1 << 30
TOKENIZERS = ("tokenizer", "old_tokenizer")
UNREACHABLE = "that no text is encoded with any more"
"""Of removed tokens that were not named, in a printed receipt."""

EXTRA_SPACE = "each use of {:,} of these costs one more token, for the space that follows"
"""Of new words in a vocabulary of SentencePiece's BPE, in a printed receipt."""

TUPLES = ("created", "left_out", "unreachable", "extra_space_decoded")
"""Fields that are lists in JSON; files of earlier releases lack some."""

SIZES = ("vocab_size", "num_rows")
"""Settings that are used in computations."""

Values = TypeVar("Values")
IdArray = TypeVar("IdArray", Tensor, npt.NDArray[np.integer[Any]])


class ReceiptFields(TypedDict):
    """Define the JSON fields of a saved receipt; its tensors are stored beside them.

    `kind` and `format_version` identify the file format, and `old_size` is the number of rows before the edit. The
    other fields are those of `Receipt`. Token IDs that are keys are strings, as all keys in JSON.
    """

    kind: str
    format_version: int
    old_size: Annotated[int, Range(1, 1 << 26)]
    num_tokens: tuple[Count, Count]
    settings: dict[str, Any]
    created: list[str]
    left_out: NotRequired[list[str]]
    unreachable: NotRequired[list[Count]]
    added: dict[str, str]
    dropped: dict[str, str]
    merged: dict[str, Count]
    origins: dict[str, str]
    before: dict[str, str]
    after: dict[str, str]
    stored: NotRequired[dict[str, tuple[str, str, Annotated[float, Range(0)]]]]
    extra_space_decoded: NotRequired[list[Count]]


@dataclass(frozen=True, eq=False)
class Receipt:
    """Record what one edit of a vocabulary did; convert stored token IDs with it, undo the edit, and save it.

    A fingerprint is a hash of a tensor's values, dtype and shape.

    Attributes:
        row_map: The old row of each new row.
        num_tokens: Number of tokens before and after the edit; rows beyond these have no token.
        added: From the new ID of each new token to its text.
        dropped: From the old ID of each removed token to its text.
        unreachable: Old IDs that were removed although not named, because no text is encoded with them once the named
            ones are gone, such as longer tokens that BPE merges from these.
        merged: From the old ID of each merged token to the new ID of the token that replaces it.
        origins: From the new ID of each initialised row to how it was computed, such as "subword mean of 5, 7".
        dropped_rows: From each tensor's name to the rows that were dropped; with sharded tables those of this rank.
        before: From the name of each edited tensor to its fingerprint before the edit.
        after: From the name of each edited tensor to its fingerprint after the edit.
        settings: Sizes and token IDs of modules and configurations before the edit, by dotted name, as JSON has them.
        tokenizer: The tokenizer after the edit, or `None`.
        old_tokenizer: The tokenizer before the edit, or `None`.
        files: From the name of each changed file of a folder to its content before the edit.
        created: Names of the files of a folder that did not exist before the edit.
        left_out: Paths of the files of a folder that hold values by token and could not be edited; that of a folder
            ends in a slash. The edited folder and the receipt do not have them, and the undo does not restore them.
        stored: For a GGUF file, and for the quantised tables and heads of a folder: from the name of each edited tensor
            to its stored types before and after the edit, and the largest change of a number in a kept row. Empty for
            all else. Only a GGUF file may get another type; elsewhere kept rows keep every bit.
        extra_space_decoded: For a GGUF file: new IDs of the added tokens around which text gets an extra space when it
            is decoded from the file, which has no place for the rule of `tokenizer` that removes it.
    """

    __repr__ = short_repr

    row_map: RowMap
    num_tokens: tuple[int, int]
    added: dict[int, str] = field(default_factory=dict)
    dropped: dict[int, str] = field(default_factory=dict)
    merged: dict[int, int] = field(default_factory=dict)
    origins: dict[int, str] = field(default_factory=dict)
    dropped_rows: dict[str, Tensor] = field(default_factory=dict)
    before: dict[str, str] = field(default_factory=dict)
    after: dict[str, str] = field(default_factory=dict)
    settings: JsonObject = field(default_factory=dict)
    tokenizer: Tokenizer | None = None
    old_tokenizer: Tokenizer | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    created: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    unreachable: tuple[int, ...] = ()
    stored: dict[str, StoredTypes] = field(default_factory=dict)
    extra_space_decoded: tuple[int, ...] = ()

    @classmethod
    def of(cls, result: EditResult, folder: Path = Path()) -> "Receipt":
        """Build the receipt of an edit that was applied.

        Args:
            result: What it changed; not the result of an undo. In the receipt the names of its models become prefixes
                of the tensors' names.
            folder: The folder before the edit, from which the old content of the changed files is read. It is not used
                for a live module.
        """
        edit = next(iter(result.models.values())).edit
        tokens = edit.tokens
        assert tokens is not None
        files = {name: folder / name for name in result.changed}

        def joined(key: str) -> dict[str, Any]:
            models = result.models.items()
            return {part + name: value for part, model in models for name, value in getattr(model, key).items()}

        return cls(
            row_map=edit.row_map,
            num_tokens=(tokens.num_tokens, len(tokens.sources)),
            added=tokens.added,
            dropped=tokens.dropped,
            merged=dict(tokens.merged),
            origins=edit.origins,
            **{key: joined(key) for key in ("dropped_rows", "before", "after", "settings")},
            tokenizer=tokens.tokenizer,
            old_tokenizer=tokens.old_tokenizer,
            files={name: read_bytes(file) for name, file in files.items() if file.exists()},
            created=tuple(name for name, file in files.items() if not file.exists()),
            left_out=tuple(result.left_out),
            unreachable=tokens.unreachable,
            stored=result.stored,
            extra_space_decoded=result.extra_space_decoded,
        )

    @property
    def kept(self) -> int:
        """Return the number of tokens after the edit that have kept their row."""
        return int((self.row_map.sources[: self.num_tokens[1]] >= 0).sum())

    @property
    def requantised(self) -> dict[str, StoredTypes]:
        """Return those of `stored` whose kept rows were written in another type, so that their numbers changed."""
        return {name: rows for name, rows in self.stored.items() if rows.is_requantised}

    @property
    def extra_space(self) -> list[int]:
        """Return the new IDs of those added words after which a text has an additional token for a space.

        See `tokens_with_extra_space`; the list is empty without a tokenizer.
        """
        return [] if self.tokenizer is None else tokens_with_extra_space(self.tokenizer, self.added)

    @property
    def new_rows(self) -> str:
        """Return how many rows of new tokens came from where, as text: "9 from the mean of their subwords".

        It is `""` if no token is new.
        """
        return count_origins(origin for token, origin in self.origins.items() if token < self.num_tokens[1])

    @property
    def new_ids(self) -> Tensor:
        """Return the new ID of each old ID, `(old rows,)` int64, or -1 for a removed token.

        A merged token has the new ID of the token that replaces it.
        """
        return self.row_map.token_ids(self.merged)

    def remap(self, ids: IdArray, *, replacement: int | None = None) -> IdArray:
        """Convert stored token IDs of the old vocabulary to IDs of the new vocabulary; `ids` is not changed.

        Args:
            ids: Old IDs, a tensor or an array of any shape. Negative values, which losses ignore (-100), are kept.
            replacement: New ID for removed tokens; with `None`, a removed token raises an error.

        Returns:
            The new IDs, with the type, shape and dtype of `ids`.

        Raises:
            TokenIdError: `ids` contains a removed token, and `replacement` is `None` or not a new ID; or `ids` contains
                an ID that no old row has.
            ShapeError: `ids` has no integer dtype, or a new ID does not fit into the dtype of `ids`.
        """
        if isinstance(ids, Tensor):
            if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
                raise ShapeError(f"IDs are integers, not {ids.dtype}.")
            return torch.from_numpy(self.remap(ids.cpu().numpy(), replacement=replacement)).to(ids.device)
        if not np.issubdtype(ids.dtype, np.integer):
            raise ShapeError(f"IDs are integers, not {ids.dtype}.")
        new_ids = self.new_ids.numpy()
        inside = ids >= 0
        if ids.size and ids.max() >= len(new_ids):
            raise TokenIdError(
                f"token id {int(ids.max())} is not one of the {len(new_ids)} of the old vocabulary: these IDs were "
                f"remapped already, or are another tokenizer's."
            )
        new = np.where(inside, new_ids[np.where(inside, ids, 0)], ids)
        removed = inside & (new == DROPPED)
        if removed.any():
            if replacement is None:
                old = int(ids[removed][0])
                name = f" ({self.dropped[old]!r})" if old in self.dropped else ""
                raise TokenIdError(
                    f"token id {old}{name} is removed, and these IDs contain removed tokens {int(removed.sum()):,} "
                    f"times.\nEncode the text again with the new tokenizer (receipt.tokenizer), or pass "
                    f"remap(replacement=...)."
                )
            if not 0 <= replacement < self.row_map.size:
                raise TokenIdError(f"The replacement {replacement} is none of the {self.row_map.size} new IDs.")
            new = np.where(removed, replacement, new)
        if new.size and new.max() > np.iinfo(ids.dtype).max:
            raise ShapeError(f"The new ID {int(new.max())} does not fit into {ids.dtype}: widen the IDs first.")
        return new.astype(ids.dtype)

    def undo(
        self, target: nn.Module | Path | str, *, optimizer: Optimizer | None = None, out: Path | str | None = None
    ) -> None:
        """Restore the state before the edit, bit for bit: in a live module in place, from a folder into a new folder.

        Rows that the edit added may have been trained since, also by `train_only_rows`, whose rows need not be merged
        before. Rows that it kept must have their values of then. Files that the edit left out are not restored; a
        warning names them.

        With sharded tables all ranks must call this, and the number of ranks must be that of the edit.

        Args:
            target: What the edit changed or wrote: the same live module, or the edited folder, which is only read.
            optimizer: The optimizer whose state was edited too; for a live module only.
            out: The new folder for the result; required for a folder. It must not exist or must be empty.

        Raises:
            CheckpointError: `target` is not what this edit wrote, kept rows were changed since, or it is a GGUF file.
                Nothing was changed.
            FileError: `target` does not exist, or `out` is missing, not empty or cannot be written.
            PeerError: Another rank raised an error, or undoes another edit.
            VocabularyError: The module has other values of tokens since, such as an adapter of PEFT; or the run has
                mapped tables.
            StaleRowsError: The optimizer's state is that before the edit, to which it was not passed.
            SizeError: The optimizer trains other parameters, or the module has no table that can be edited.
            TokenizerError: The tokenizer of the folder is damaged.
        """
        if "stream" in self.settings:
            raise CheckpointError("An earlier version edited one stream of codes here, which this one does not undo.")
        if isinstance(target, nn.Module):
            with merged_rows(target):
                apply_to_module(target, self._resolve_undo, optimizer)
            return
        folder = Path(target)
        _refuse_gguf(folder, self)
        if receipts_in(folder):  # a folder that was saved from an edited model has none
            receipt_of_last_edit(folder)
        with edited_copy(folder, out) as (partial, _):
            result = apply_to_files(folder, partial, self._resolve_undo)
            left_out = sorted({*self.left_out, *result.left_out})
            if left_out:
                warnings.warn(
                    f"Not restored: {shown_files(left_out)}. They hold values by token, and neither the edited folder "
                    f"nor the receipt has them for the old vocabulary: copy them from the folder before the edit.",
                    EmbedLayerWarning,
                    stacklevel=2,
                )
            for name, content in self.files.items():
                (partial / name).write_bytes(content)
            for name in [*self.created, *(receipt.name for receipt in receipts_in(folder)[-1:])]:
                (partial / name).unlink(missing_ok=True)

    def _resolve_undo(
        self, tokenizers: Iterable[Tokenizer | None], num_rows: int, *, part: str = "", all_rows_have_ids: bool = False
    ) -> ModelEdit:
        """Return the undo for one model; see `ResolveEdit`. Only `num_rows` and `part` are used.

        Raises:
            CheckpointError: The model does not have as many rows as the edit left.
        """
        if num_rows != self.row_map.size:
            raise CheckpointError(
                f"This model is not what the receipt belongs to: its vocabulary has {num_rows:,} rows, the receipt's "
                f"{self.row_map.size:,}. Nothing was changed."
            )

        def of(entries: Mapping[str, Values]) -> dict[str, Values]:
            names = [name for name in entries if name.startswith(RUN) == (part == RUN)]
            return {name.removeprefix(part): entries[name] for name in names}

        return ModelEdit(
            self.row_map.inverse(),
            tokenizer=self.old_tokenizer,
            restored_rows=of(self.dropped_rows),
            after=of(self.before),
            settings=of(self.settings),
        )

    def save(self, path: Path | str) -> None:
        """Write the receipt to a safetensors file; an existing file is replaced only if the write succeeds.

        Args:
            path: The file; or the folder of the edited model, where the file is `vocabulary-1.receipt` or has the next
                number. `embedlayer vocab undo` reads the last one.

        Raises:
            FileError: The file cannot be written.
        """
        path = named_path(path)
        if path.is_dir():
            path = path / next_receipt(path)
        tensors = {"sources": self.row_map.sources}
        tensors |= {f"rows/{name}": rows for name, rows in self.dropped_rows.items()}
        tensors |= {f"files/{name}": packed_bytes(content) for name, content in self.files.items()}
        for name in TOKENIZERS:
            tokenizer = getattr(self, name)
            if tokenizer is not None:
                tensors[name] = packed_bytes(tokenizer.to_str().encode())
        fields = {"kind": KIND, "format_version": FORMAT_VERSION, "old_size": self.row_map.old_size}
        fields |= {name: getattr(self, name) for name in ReceiptFields.__annotations__ if name not in fields}
        save_tensors(path, tensors, {"receipt": json.dumps(fields)})

    @classmethod
    def load(cls, path: Path | str) -> "Receipt":
        """Read a receipt from a file that `save` wrote.

        Raises:
            FileError: There is no such file, or it cannot be read.
            CheckpointError: The file is damaged, not a receipt, or a receipt of another format version.
        """
        if Path(path).is_dir():
            raise FileError(
                f"{path} is a folder: the receipt of its last edit is embedlayer.vocab.last_receipt({str(path)!r})."
            )
        tensors, metadata = load_tensors(path)
        fields = receipt_fields(path, metadata, ReceiptFields, KIND, FORMAT_VERSION)
        for name, value in fields["settings"].items():
            if name.rpartition(".")[2] in SIZES and type(value) is not int:
                raise CheckpointError(f"The receipt in {path} states {printable(value)} as {name}: it is damaged.")
        try:
            sources = tensors["sources"]
            if sources.dtype != torch.int64 or sources.dim() != 1:
                raise CheckpointError(f"{path} is damaged: its rows are {sources.dtype} of {list(sources.shape)}.")
            texts = {name: unpacked_bytes(tensors[name]).decode() for name in TOKENIZERS if name in tensors}
            tokenizers = {
                name: build_tokenizer(parse_json(text, f"The receipt in {path}")) for name, text in texts.items()
            }
            values: JsonObject = {name: tuple(fields.get(name, ())) for name in TUPLES}
            for name in ("added", "dropped", "merged", "origins"):
                values[name] = {int(token): value for token, value in fields[name].items()}
            values |= {name: fields[name] for name in ("before", "after", "settings")}
            return cls(
                row_map=RowMap(sources, fields["old_size"]),
                num_tokens=(fields["num_tokens"][0], fields["num_tokens"][1]),
                dropped_rows=without_prefix("rows/", tensors),
                files={name: unpacked_bytes(packed) for name, packed in without_prefix("files/", tensors).items()},
                tokenizer=tokenizers.get("tokenizer"),
                old_tokenizer=tokenizers.get("old_tokenizer"),
                stored={name: StoredTypes(*rows) for name, rows in fields.get("stored", {}).items()},
                **values,
            )
        except (KeyError, TypeError, ValueError, IndexError, RuntimeError, zlib.error) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{path} is not a receipt, or is damaged ({printable(str(error))}).") from error

    def __str__(self) -> str:
        old, new = self.num_tokens
        lines = [f"{old:,} tokens -> {new:,} tokens, {self.row_map.old_size:,} rows -> {self.row_map.size:,} rows"]
        lines += [f"  kept     {self.kept:,}"]
        lines += [f"  stored   {name} as {rows}" for name, rows in self.requantised.items()]
        lines += [f"  new      {len(self.added):,}{shown_names(':', [*self.added.values()])}"] * bool(self.added)
        lines += [f"  rows     {self.new_rows}"] * bool(self.new_rows)
        lines += [f"  spaces   {EXTRA_SPACE.format(len(extra))}" for extra in [self.extra_space] if extra]
        lines += [f"  dropped  {len(self.dropped):,}{shown_names(':', [*self.dropped.values()])}"] * bool(self.dropped)
        along = [self.dropped[token] for token in self.unreachable if token in self.dropped]
        lines += [f"  of these {len(along):,} {UNREACHABLE}{shown_names(':', along)}"] * bool(along)
        lines += [f"  merged   {len(self.merged):,}"] * bool(self.merged)
        lines += [f"  left out {shown_files(self.left_out)}"] if self.left_out else []
        return "\n".join(lines)


def receipt_fields(path: Path | str, metadata: Mapping[str, str], kind: type, name: str, version: int) -> JsonObject:
    """Return the JSON fields of a receipt, checked against a `TypedDict`; `metadata` is that of the file at `path`.

    Raises:
        CheckpointError: There are none, they are damaged, or they are of another kind or format version.
    """
    if "receipt" not in metadata:
        raise CheckpointError(f"{path} is not a receipt: it has no field of that name.")
    value = parse_json(metadata["receipt"], f"The receipt in {path}")
    fields: JsonObject = value if isinstance(value, dict) else {}
    found = fields.get("kind"), fields.get("format_version")
    if None not in found and found != (name, version):
        raise CheckpointError(
            f"{path} is {printable(found[0])} of format version {found[1]}; this embedlayer reads {name!r} of version "
            f"{version}."
        )
    check_fields(value, kind, f"The receipt in {path}")
    return fields


def last_receipt(folder: Path | str) -> Receipt:
    """Read the receipt of the last edit that led to a folder.

    Raises:
        CheckpointError: There is no folder or no receipt in it, the receipt is damaged, or `folder` is a GGUF file.
        FileError: The receipt cannot be read.
    """
    folder = Path(folder)
    _refuse_gguf(folder)
    return Receipt.load(receipt_of_last_edit(folder))


def _refuse_gguf(path: Path, receipt: Receipt | None = None) -> None:
    """Raise a `CheckpointError` if a path is a GGUF file: its edit has no undo, because the old file is still there.

    The message names the tensors whose kept rows were written in another type, from `receipt`; `None` reads the receipt
    beside the file, if there is one.
    """
    if path_kind(path) is not PathKind.GGUF:
        return
    beside = receipt_beside(path)
    if receipt is None and beside.is_file():
        receipt = Receipt.load(beside)
    changed = [f"{name}: {rows}" for name, rows in ({} if receipt is None else receipt.requantised).items()]
    more = f" Only that file has the kept rows as they were before ({'; '.join(changed)})." if changed else ""
    raise CheckpointError(
        f"An edit of a GGUF file leaves the old file as it was: use that file in place of an undo.{more}"
    )


def without_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names start with `prefix`, in a dictionary by their names without the prefix."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def packed_bytes(content: bytes) -> Tensor:
    """Compress bytes with zlib, and return them as a uint8 tensor of one dimension."""
    return torch.frombuffer(bytearray(zlib.compress(content)), dtype=torch.uint8)


def unpacked_bytes(packed: Tensor) -> bytes:
    """Return the bytes that `packed_bytes` compressed into a tensor.

    Raises:
        CheckpointError: They are cut short, or more than `MAX_UNPACKED_BYTES`, 1 GiB.
        zlib.error: The tensor was not written by `packed_bytes`.
    """
    stream = zlib.decompressobj()
    content = stream.decompress(packed.numpy().tobytes(), MAX_UNPACKED_BYTES)
    if not stream.eof:
        raise CheckpointError(f"A file in the receipt is cut short or larger than {MAX_UNPACKED_BYTES:,} bytes.")
    return content
