"""Receipts: what one edit of a vocabulary did."""

import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.optim import Optimizer

from embedlayer.core.errors import CheckpointError, FileError, ShapeError, TokenIdError
from embedlayer.core.formatting import short_repr
from embedlayer.families.left_out_files import shown_files
from embedlayer.io.files import JsonObject, named_path
from embedlayer.io.json_fields import Count, Range, check_fields, parse_json, printable
from embedlayer.io.safetensors_files import load_tensors, save_tensors
from embedlayer.opening.path_kinds import PathKind, path_kind
from embedlayer.tokenization.tokenizer_calls import build_tokenizer
from embedlayer.vocab.edit import ModelResult
from embedlayer.vocab.init.row_init import count_origins
from embedlayer.vocab.map import DROPPED, RowMap
from embedlayer.vocab.row_training import merged_rows
from embedlayer.vocab.targets.apply_rows import EditResult, StoredTypes
from embedlayer.vocab.targets.folder import RECEIPT, next_receipt, receipt_beside, receipts_in
from embedlayer.vocab.targets.live import apply_to_module
from embedlayer.vocab.token_selection import shown_names
from embedlayer.vocab.tokenizer_edit import tokens_with_extra_space

KIND, FORMAT_VERSION = "embedlayer/vocabulary-receipt", 1
MAX_UNPACKED_BYTES = 1 << 30
UNREACHABLE = "that no text is encoded with any more"
"""Of removed tokens that were not named, in a printed receipt."""

EXTRA_SPACE = "each use of {:,} of these costs one more token, for the space that follows"
"""Of new words in a vocabulary of SentencePiece's BPE, in a printed receipt."""

TUPLES = ("left_out", "unreachable", "extra_space_decoded")
"""Fields that are lists in JSON; files of earlier releases lack some."""

IdArray = TypeVar("IdArray", Tensor, npt.NDArray[np.integer[Any]])


class ReceiptFields(TypedDict):
    """Define the JSON fields of a saved receipt; the row map and the tokenizer are stored beside them.

    `kind` and `format_version` identify the file format, and `old_size` is the number of rows before the edit. The
    other fields are those of `Receipt`. Token IDs that are keys are strings, as all keys in JSON. Receipts of earlier
    releases have further fields.
    """

    kind: str
    format_version: int
    old_size: Annotated[int, Range(1, 1 << 26)]
    num_tokens: tuple[Count, Count]
    left_out: NotRequired[list[str]]
    unreachable: NotRequired[list[Count]]
    added: dict[str, str]
    dropped: dict[str, str]
    merged: dict[str, Count]
    origins: dict[str, str]
    stored: NotRequired[dict[str, tuple[str, str, Annotated[float, Range(0)]]]]
    extra_space_decoded: NotRequired[list[Count]]


@dataclass(frozen=True, eq=False)
class Receipt:
    """Record what one edit of a vocabulary did; convert stored token IDs with it, and save it.

    Attributes:
        row_map: The old row of each new row.
        num_tokens: Number of tokens before and after the edit; rows beyond these have no token.
        added: From the new ID of each new token to its text.
        dropped: From the old ID of each removed token to its text.
        unreachable: Old IDs that were removed although not named, because no text is encoded with them once the named
            ones are gone, such as longer tokens that BPE merges from these.
        merged: From the old ID of each merged token to the new ID of the token that replaces it.
        origins: From the new ID of each initialised row to how it was computed, such as "subword mean of 5, 7".
        tokenizer: The tokenizer after the edit, or `None`.
        left_out: Paths of the files of a folder that hold values by token and could not be edited; that of a folder
            ends in a slash. The edited folder does not have them.
        stored: For a GGUF file, and for the quantised tables and heads of a folder: from the name of each edited tensor
            to its stored types before and after the edit, and the largest change of a number in a kept row. Empty for
            all else. Only a GGUF file may get another type; elsewhere kept rows keep every bit.
        extra_space_decoded: For a GGUF file: new IDs of the added tokens around which text gets an extra space when it
            is decoded from the file, which has no place for the rule of `tokenizer` that removes it.
        live: What `undo` restores in a live module, with sharded tables on this rank; it is not saved. `None` for a
            folder, a file, and a receipt that was read from a file.
    """

    __repr__ = short_repr

    row_map: RowMap
    num_tokens: tuple[int, int]
    added: dict[int, str] = field(default_factory=dict)
    dropped: dict[int, str] = field(default_factory=dict)
    merged: dict[int, int] = field(default_factory=dict)
    origins: dict[int, str] = field(default_factory=dict)
    tokenizer: Tokenizer | None = None
    left_out: tuple[str, ...] = ()
    unreachable: tuple[int, ...] = ()
    stored: dict[str, StoredTypes] = field(default_factory=dict)
    extra_space_decoded: tuple[int, ...] = ()
    live: ModelResult | None = None

    @classmethod
    def of(cls, result: EditResult, live: ModelResult | None = None) -> "Receipt":
        """Build the receipt of an edit that was applied; `live` is what it changed in a live module."""
        edit, tokens = result.edit, result.edit.tokens
        assert tokens is not None
        return cls(
            row_map=edit.row_map,
            num_tokens=(tokens.num_tokens, len(tokens.sources)),
            added=tokens.added,
            dropped=tokens.dropped,
            merged=dict(tokens.merged),
            origins=edit.origins,
            tokenizer=tokens.tokenizer,
            left_out=tuple(result.left_out),
            unreachable=tokens.unreachable,
            stored=result.stored,
            extra_space_decoded=result.extra_space_decoded,
            live=live,
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
            ShapeError: `ids` has no integer dtype, or a new ID does not fit into the dtype of `ids`.
            TokenIdError: `ids` contains a removed token, and `replacement` is `None` or not a new ID; or `ids` contains
                an ID that no old row has.
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
            raise TokenIdError(f"token id {int(ids.max())} is not in the old vocabulary of {len(new_ids)}.")
        new = np.where(inside, new_ids[np.where(inside, ids, 0)], ids)
        removed = inside & (new == DROPPED)
        if removed.any():
            if replacement is None:
                old = int(ids[removed][0])
                name = f" ({self.dropped[old]!r})" if old in self.dropped else ""
                raise TokenIdError(f"token id {old}{name} is removed, {removed.sum()} times: pass replacement=...")
            if not 0 <= replacement < self.row_map.size:
                raise TokenIdError(f"The replacement {replacement} is none of the {self.row_map.size} new IDs.")
            new = np.where(removed, replacement, new)
        if new.size and new.max() > np.iinfo(ids.dtype).max:
            raise ShapeError(f"The new ID {int(new.max())} does not fit into {ids.dtype}: widen the IDs first.")
        return new.astype(ids.dtype)

    def undo(self, module: nn.Module, *, optimizer: Optimizer | None = None) -> None:
        """Restore a live module in place, bit for bit, with the receipt that its edit returned.

        Rows that the edit added may have been trained since, also by `train_only_rows`, whose rows need not be merged
        before. Rows that it kept must have their values of then. The edit of a folder or file needs no undo: its source
        is unchanged.

        With sharded tables all ranks must call this.

        Args:
            module: The module that was edited.
            optimizer: The optimizer whose state was edited too.

        Raises:
            SizeError: The optimizer trains other parameters, or the module has no table that can be edited.
            CheckpointError: This is the receipt of a folder or was read from a file; or `module` is not what this edit
                left, or kept rows were changed since. Nothing was changed.
            VocabularyError: The module has other values of tokens since, such as an adapter of PEFT.
            StaleRowsError: The optimizer's state is that before the edit, to which it was not passed.
            PeerError: Another rank raised an error, or undoes another edit.
        """
        if self.live is None:
            raise CheckpointError("Only the receipt of a live edit undoes it; the source of a folder is unchanged.")
        with merged_rows(module):
            apply_to_module(module, self.live.resolve_undo, optimizer)

    def save(self, path: Path | str) -> None:
        """Write the receipt to a safetensors file; an existing file is replaced only if the write succeeds.

        Args:
            path: The file; or the folder of the edited model, where the file is `vocabulary-1.receipt` or has the next
                number. `last_receipt` reads the last one.

        Raises:
            FileError: The file cannot be written.
        """
        path = named_path(path)
        if path.is_dir():
            path = path / next_receipt(path)
        tensors = {"sources": self.row_map.sources}
        if self.tokenizer is not None:
            tensors["tokenizer"] = torch.frombuffer(
                bytearray(zlib.compress(self.tokenizer.to_str().encode())), dtype=torch.uint8
            )
        fields = {"kind": KIND, "format_version": FORMAT_VERSION, "old_size": self.row_map.old_size}
        fields |= {name: getattr(self, name) for name in ReceiptFields.__annotations__ if name not in fields}
        save_tensors(path, tensors, {"receipt": json.dumps(fields)})

    @classmethod
    def load(cls, path: Path | str) -> "Receipt":
        """Read a receipt from a file that `save` wrote; it converts token IDs, and undoes nothing.

        Raises:
            FileError: There is no such file, or it cannot be read.
            CheckpointError: The file is damaged, not a receipt, or a receipt of another format version.
        """
        if Path(path).is_dir():
            raise FileError(f"{path} is a folder: see embedlayer.vocab.last_receipt({str(path)!r}).")
        tensors, metadata = load_tensors(path)
        if "receipt" not in metadata:
            raise CheckpointError(f"{path} is not a receipt: it has no field of that name.")
        value = parse_json(metadata["receipt"], f"The receipt in {path}")
        fields: JsonObject = value if isinstance(value, dict) else {}
        found = fields.get("kind"), fields.get("format_version")
        if None not in found and found != (KIND, FORMAT_VERSION):
            raise CheckpointError(f"{path}: {printable(found[0])} {found[1]} is not {KIND} version {FORMAT_VERSION}.")
        check_fields(value, ReceiptFields, f"The receipt in {path}")
        try:
            sources = tensors["sources"]
            if sources.dtype != torch.int64 or sources.dim() != 1:
                raise CheckpointError(f"{path} is damaged: its rows are {sources.dtype} of {list(sources.shape)}.")
            tokenizer = None
            if "tokenizer" in tensors:
                text = unpacked_bytes(tensors["tokenizer"]).decode()
                tokenizer = build_tokenizer(parse_json(text, f"The receipt in {path}"))
            values: JsonObject = {name: tuple(fields.get(name, ())) for name in TUPLES}
            for name in ("added", "dropped", "merged", "origins"):
                values[name] = {int(token): value for token, value in fields[name].items()}
            return cls(
                row_map=RowMap(sources, fields["old_size"]),
                num_tokens=(fields["num_tokens"][0], fields["num_tokens"][1]),
                tokenizer=tokenizer,
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


def last_receipt(path: Path | str) -> Receipt:
    """Read the receipt of the last edit of the vocabulary that led to a folder or GGUF file.

    Raises:
        CheckpointError: There is no receipt in the folder, or the receipt is damaged.
        FileError: The receipt cannot be read.
    """
    path = Path(path)
    if path_kind(path) is PathKind.GGUF:
        return Receipt.load(receipt_beside(path))
    receipts = receipts_in(path)
    if not receipts:
        raise CheckpointError(f"{path} has no receipt ({RECEIPT.format('N')}): no edit of its vocabulary wrote it.")
    return Receipt.load(receipts[-1])


def unpacked_bytes(packed: Tensor) -> bytes:
    """Return the bytes that are compressed by zlib in a tensor."""
    stream = zlib.decompressobj()
    content = stream.decompress(packed.numpy().tobytes(), MAX_UNPACKED_BYTES)
    if not stream.eof:
        raise CheckpointError(f"A file in the receipt is cut short or larger than {MAX_UNPACKED_BYTES:,} bytes.")
    return content
