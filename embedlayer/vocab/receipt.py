"""What an edit of a vocabulary did: old ID to new ID, where each new row came from, and what was dropped."""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from embedlayer.errors import CheckpointError, ShapeError, TokenIdError
from embedlayer.io.files import JsonObject
from embedlayer.io.json_fields import Count, Range, check_fields, parse_json, printable
from embedlayer.io.safetensors_files import load_tensors, save_tensors
from embedlayer.short_repr import short_repr
from embedlayer.vocab.owners import ALONE, Owners
from embedlayer.vocab.rows import GONE, RowMove, Slot, fingerprints, row_fingerprint, within

if TYPE_CHECKING:
    from torch.optim import Optimizer

FORMAT_VERSION = 1
MOST_UNPACKED = 1 << 30
SIZES = ("vocab_size", "num_rows")
"""Settings that are computed with."""

IdArray = TypeVar("IdArray", Tensor, npt.NDArray[np.integer[Any]])


class Words(TypedDict):
    """What is not a tensor of a receipt; IDs are strings in JSON."""

    format_version: int
    old_size: Annotated[int, Range(1, 1 << 26)]
    num_tokens: tuple[Count, Count]
    settings: dict[str, int | float | str | bool | list[int] | None]
    created: list[str]
    added: dict[str, str]
    dropped: dict[str, str]
    merged: dict[str, Count]
    origins: dict[str, str]
    before: dict[str, str]
    after: dict[str, str]


@dataclass(frozen=True, eq=False)
class Receipt:
    """What one edit of a vocabulary did; it can be saved, applied to stored IDs, and undone.

    Attributes:
        move: New row to old row.
        num_tokens: Tokens before and after; rows beyond them have no token.
        added: New tokens by their ID.
        dropped: Tokens that are gone, by their old ID.
        merged: Tokens that another one stands for now, old ID to new ID.
        origins: In words, what each row that is no old row starts as, by its ID.
        rows: The rows that are gone, by tensor: what undoing needs.
        before: Fingerprints of all tensors that were moved, as they were.
        after: As they are.
        settings: Sizes and IDs that changed, as they were.
        tokenizer: The tokenizer after the edit, if there is one.
        old_tokenizer: The tokenizer before it.
        files: Files of a folder that changed, as they were.
        created: Files of a folder that were not there.
    """

    __repr__ = short_repr

    move: RowMove
    num_tokens: tuple[int, int]
    added: dict[int, str] = field(default_factory=dict)
    dropped: dict[int, str] = field(default_factory=dict)
    merged: dict[int, int] = field(default_factory=dict)
    origins: dict[int, str] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)
    before: dict[str, str] = field(default_factory=dict)
    after: dict[str, str] = field(default_factory=dict)
    settings: JsonObject = field(default_factory=dict)
    tokenizer: Tokenizer | None = None
    old_tokenizer: Tokenizer | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    created: tuple[str, ...] = ()

    @property
    def kept(self) -> int:
        """Tokens that have their old row."""
        return int((self.move.sources[: self.num_tokens[1]] >= 0).sum())

    @property
    def new_ids(self) -> Tensor:
        """The new ID of each old one, or -1 where it is gone; a merged token has the ID of what stands for it."""
        ids = self.move.new_ids.clone()
        for old, into in self.merged.items():
            ids[old] = into
        return ids

    def remap(self, ids: IdArray, *, replacement: int | None = None) -> IdArray:
        """Stored IDs of the old vocabulary as those of the new one: a tensor or an array, of any shape.

        Args:
            ids: Old IDs; -100 and other negative ones, by which losses know what to leave out, stay.
            replacement: New ID for tokens that are gone.

        Returns:
            The same kind of array, of the same shape and type.

        Raises:
            TokenIdError: A token is gone and there is no replacement, or an ID is not one of the old vocabulary.
            ShapeError: They are no integers, or the new IDs do not fit into their type.
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
        found = np.where(inside, new_ids[np.where(inside, ids, 0)], ids)
        gone = inside & (found == GONE)
        if gone.any():
            if replacement is None:
                raise self._gone(int(ids[gone][0]), int(gone.sum()))
            if not 0 <= replacement < self.move.size:
                raise TokenIdError(f"The replacement {replacement} is none of the {self.move.size} new IDs.")
            found = np.where(gone, replacement, found)
        if found.size and found.max() > np.iinfo(ids.dtype).max:
            raise ShapeError(f"The new ID {int(found.max())} does not fit into {ids.dtype}: widen the IDs first.")
        return found.astype(ids.dtype)

    def _gone(self, old: int, times: int) -> TokenIdError:
        name = f" ({self.dropped[old]!r})" if old in self.dropped else ""
        return TokenIdError(
            f"token id {old}{name} is no token any more, and these IDs hold dropped tokens {times:,} times.\n"
            f"Encode the text again with the new tokenizer (receipt.tokenizer), or give remap(replacement=...)."
        )

    def undo(
        self, target: nn.Module | Path | str, *, optimizer: "Optimizer | None" = None, out: Path | str | None = None
    ) -> None:
        """Put everything back as it was, to the bit; divided tables by as many processes as edited them, all at once.

        Args:
            target: What the edit gave: the same live module, or a folder.
            optimizer: The optimizer whose state was moved along.
            out: For a folder: where to write; it must not exist.

        Raises:
            CheckpointError: `target` is not what this edit gave, or has been changed since. Nothing was changed.
        """
        if isinstance(target, nn.Module):
            from embedlayer.vocab.live import undo_live

            undo_live(self, target, optimizer)
        else:
            from embedlayer.vocab.folders import undo_folder

            undo_folder(self, target, out)

    def save(self, path: Path | str) -> None:
        """Write everything as one file in the safetensors format, wholly or not at all.

        Raises:
            FileError: It cannot be written.
        """
        tensors = {"sources": self.move.sources, **{f"rows/{name}": rows for name, rows in self.rows.items()}}
        tensors |= {f"files/{name}": _packed(content) for name, content in self.files.items()}
        for name in ("tokenizer", "old_tokenizer"):
            tokenizer = getattr(self, name)
            if tokenizer is not None:
                tensors[name] = _packed(tokenizer.to_str().encode())
        words = {
            "format_version": FORMAT_VERSION,
            "old_size": self.move.old_size,
            "num_tokens": self.num_tokens,
            "settings": self.settings,
            "created": self.created,
            **{name: getattr(self, name) for name in ("added", "dropped", "merged", "origins", "before", "after")},
        }
        save_tensors(path, tensors, {"receipt": json.dumps(words)})

    @classmethod
    def load(cls, path: Path | str) -> "Receipt":
        """Read what `save` wrote.

        Raises:
            FileError: There is no such file.
            CheckpointError: It is damaged, or no receipt.
        """
        tensors, metadata = load_tensors(path)
        if "receipt" not in metadata:
            raise CheckpointError(f"{path} is not a receipt: it has no field of that name.")
        words = parse_json(metadata["receipt"], f"The receipt in {path}")
        check_fields(words, Words, f"The receipt in {path}")
        if words["format_version"] != FORMAT_VERSION:
            raise CheckpointError(
                f"{path} has format version {words['format_version']}; this embedlayer reads {FORMAT_VERSION}."
            )
        for name, value in words["settings"].items():
            if name.rpartition(".")[2] in SIZES and type(value) is not int:
                raise CheckpointError(f"The receipt in {path} states {printable(value)} as {name}: it is damaged.")
        try:
            return cls(
                move=RowMove(_sources(tensors["sources"]), words["old_size"]),
                num_tokens=(words["num_tokens"][0], words["num_tokens"][1]),
                rows=_below("rows/", tensors),
                created=tuple(words["created"]),
                files={name: _unpacked(packed) for name, packed in _below("files/", tensors).items()},
                tokenizer=_tokenizer(tensors.get("tokenizer")),
                old_tokenizer=_tokenizer(tensors.get("old_tokenizer")),
                before=words["before"],
                after=words["after"],
                settings=words["settings"],
                added=_by_id(words["added"]),
                dropped=_by_id(words["dropped"]),
                merged=_by_id(words["merged"]),
                origins=_by_id(words["origins"]),
            )
        except (KeyError, TypeError, ValueError, IndexError, RuntimeError, zlib.error) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{path} is not a receipt, or is damaged ({printable(str(error))}).") from error

    def __str__(self) -> str:
        old, new = self.num_tokens
        lines = [f"{old:,} tokens -> {new:,} tokens, {self.move.old_size:,} rows -> {self.move.size:,} rows"]
        lines += [f"  kept     {self.kept:,}"]
        lines += [f"  new      {len(self.added):,}{_some(self.added)}"] * bool(self.added)
        lines += [f"  dropped  {len(self.dropped):,}{_some(self.dropped)}"] * bool(self.dropped)
        lines += [f"  merged   {len(self.merged):,}"] * bool(self.merged)
        return "\n".join(lines)


def moved_back(receipt: Receipt, slots: Sequence[Slot], everyone: Owners = ALONE) -> dict[str, Tensor]:
    """The tensors that a receipt's edit was made from, by name.

    Raises:
        CheckpointError: The slots do not hold what the edit gave.
    """
    with everyone.agreed():
        missing = sorted(receipt.after.keys() - {slot.name for slot in slots})
        if any(name.startswith("optimizer.") for name in missing):
            raise CheckpointError(
                f"The edit moved an optimizer's state too ({missing[0]}): give undo(..., optimizer=...) that "
                f"optimizer, with the state it had. Nothing was changed."
            )
        _check_same(receipt.after, fingerprints(slots))
    move = receipt.move.inverse()
    with everyone.agreed():
        for slot in slots:
            wanted = (len(within(move.started, *slot.owners.span(move.size))), *slot.tensor.shape[1:])
            found = tuple(receipt.rows[slot.name].shape) if slot.name in receipt.rows else "no rows"
            if found != wanted:
                raise CheckpointError(
                    f"The receipt holds {found} of {slot.name} where the rows that the edit dropped are {wanted}: it "
                    f"is damaged. Nothing was changed."
                )
    tensors: dict[str, Tensor] = {}
    for slot in slots:
        start, stop = slot.owners.span(move.old_size)
        part = slot.tensor.detach()[: stop - start]
        tensors[slot.name] = move.apply(part, receipt.rows[slot.name], spare=slot.spare, owners=slot.owners)
    with everyone.agreed():
        _check_same(receipt.before, {name: row_fingerprint(tensor) for name, tensor in tensors.items()})
    return tensors


def _check_same(expected: Mapping[str, str], found: Mapping[str, str]) -> None:
    different = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if different:
        raise CheckpointError(
            f"The receipt belongs to another result: {', '.join(different[:4])} hold other numbers here. Undo what the "
            f"edit gave, before any training or further edit. Nothing was changed."
        )


def _some(tokens: dict[int, str], most: int = 6) -> str:
    shown = ", ".join(repr(token) for token in list(tokens.values())[:most])
    return f": {shown}{', ...' if len(tokens) > most else ''}"


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _by_id(entries: dict[str, Any]) -> dict[int, Any]:
    return {int(token): value for token, value in entries.items()}


def _packed(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(zlib.compress(content)), dtype=torch.uint8)


def _unpacked(packed: Tensor) -> bytes:
    stream = zlib.decompressobj()
    content = stream.decompress(packed.numpy().tobytes(), MOST_UNPACKED)
    if not stream.eof:
        raise CheckpointError(f"A packed file in the receipt is cut short or larger than {MOST_UNPACKED:,} bytes.")
    return content


def _tokenizer(packed: Tensor | None) -> Tokenizer | None:
    if packed is None:
        return None
    try:
        return Tokenizer.from_str(_unpacked(packed).decode())
    except (CheckpointError, ValueError, zlib.error):
        raise
    except Exception as error:  # the library raises nothing more special
        raise CheckpointError(f"The tokenizer in the receipt is damaged: {error}") from error


def _sources(tensor: Tensor) -> Tensor:
    """The old row of each new one, as an edit stores them."""
    if tensor.dtype != torch.int64 or tensor.dim() != 1:
        raise CheckpointError(f"The receipt's rows are {tensor.dtype} of shape {list(tensor.shape)}: it is damaged.")
    return tensor
