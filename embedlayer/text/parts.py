"""What a corpus is on the disk: one folder with the files of a part, or a folder of such parts with their plan.

```
CORPUS/                     CORPUS/
  ids.bin                     corpus.json       the plan: sources with sizes and digests, tokenizer, number of parts
  documents.npy               tokenizer.json
  blocks.npy                  part-00000/       ids.bin, documents.npy, blocks.npy, index.json, and
  index.json                  part-00001/       sources.npy: which source each document is
                              ...
```

A part is made without knowing the parts before it, so it cannot know whether the mark between two documents stands
before its first ID. It is written there in any case, and left out by who reads it: where the first document of all
begins, and where a part goes on with the document of the one before.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from embedlayer.errors import CheckpointError
from embedlayer.files import JsonObject, read_json, write_json
from embedlayer.text.mapped import IdArray, MappedFile, MappedParts, cannot_map
from embedlayer.text.tokenizer import MOST_IDS

Offsets = npt.NDArray[np.int64]

PLAN = "corpus.json"
FORMAT_VERSION = 1


class Part(NamedTuple):
    """A part of a corpus, or a whole one in one part.

    Attributes:
        ids: Mapped, the mark before the first document included.
        documents: Where each document starts behind that mark.
        blocks: Tokens and bytes up to the end of each piece of text, `(pieces, 2)`.
        sources: Which source each document is.
        facts: What `index.json` says.
    """

    ids: IdArray
    documents: Offsets
    blocks: Offsets
    sources: Offsets
    facts: JsonObject

    @property
    def marks(self) -> int:
        """How many IDs stand before the first document: 0 or 1."""
        return int(self.facts["marks"])


def part_folder(path: Path, number: int) -> Path:
    """The folder of part `number`, counted from 0."""
    return path / f"part-{number:05d}"


def plan_digest(plan: JsonObject) -> str:
    """A short name for a plan, kept in each part that was built after it."""
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:16]


def write_tables(folder: Path, documents: Offsets, blocks: Offsets, index: JsonObject) -> None:
    """Write what stands beside `ids.bin`."""
    np.save(folder / "documents.npy", documents, allow_pickle=False)
    np.save(folder / "blocks.npy", blocks, allow_pickle=False)
    write_json(folder / "index.json", {"format_version": FORMAT_VERSION, **index})


def read_parts(path: Path) -> list[Part]:
    """All parts of a corpus.

    Raises:
        FileError: There is no corpus at `path`.
        CheckpointError: A part is damaged, not built yet, or does not belong to the plan.
    """
    if not (path / PLAN).exists():
        return [_read_part(path)]
    plan = read_json(path / PLAN)
    if missing := missing_parts(path):
        raise CheckpointError(
            f"The corpus {path} is not finished: {len(missing)} parts are not built yet, among them part "
            f"{', '.join(map(str, missing[:8]))}. It goes on with the command that began it: embedlayer corpus build "
            f"FILE... -o {path} --tokenizer FILE --shards {plan['shards']} (and --only K where each host builds "
            f"its own part); in Python, with build_in_shards or build_shard and the same arguments."
        )
    parts = [_read_part(part_folder(path, number)) for number in range(plan["shards"])]
    for number, part in enumerate(parts):
        if part.facts.get("plan") != plan_digest(plan):
            raise CheckpointError(
                f"{part_folder(path, number)} was built after another plan than {path / PLAN}. Remove that part and "
                f"build it again."
            )
    if not any(len(part.documents) for part in parts):
        raise CheckpointError(f"The corpus {path} holds no text: none of its sources has a token.")
    return parts


def joined(parts: Sequence[Part]) -> tuple[IdArray | MappedParts, Offsets, Offsets]:
    """IDs, documents and blocks of parts read as one, the marks between documents where one process puts them."""
    ids: list[IdArray] = []
    documents: list[Offsets] = []
    blocks: list[Offsets] = []
    tokens = num_bytes = 0
    last = -1
    for part in parts:
        if len(part.documents):
            unmarked = part.marks
            if ids and part.sources[0] != last:
                unmarked = 0
                tokens += part.marks
                blocks[-1][-1, 0] = tokens
            ids.append(part.ids[unmarked:])
            goes_on = int(part.sources[0] == last)
            documents.append(part.documents[goes_on:] + tokens)
            blocks.append(part.blocks + np.array([tokens, num_bytes]))
            tokens += len(part.ids) - part.marks
            last = int(part.sources[-1])
        num_bytes += int(part.facts["num_bytes"])
    blocks[-1][-1, 1] = num_bytes
    return ids[0] if len(ids) == 1 else MappedParts(ids), np.concatenate(documents), np.concatenate(blocks)


def missing_parts(path: Path) -> list[int]:
    """Which parts of the plan in a folder are not built yet.

    Raises:
        FileError: There is no plan.
        CheckpointError: It is damaged.
    """
    shards = read_json(path / PLAN).get("shards")
    if not isinstance(shards, int) or shards < 1:
        raise CheckpointError(f"{path / PLAN} plans {shards!r} parts: it is damaged. Build the corpus again.")
    return [number for number in range(shards) if not part_folder(path, number).exists()]


def _read_part(path: Path) -> Part:
    index = read_json(path / "index.json")
    if index.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has corpus format {index.get('format_version')!r}; this version of embedlayer reads "
            f"{FORMAT_VERSION}. Build it again."
        )
    of_several = "plan" in index
    try:
        dtype: np.dtype[Any] = np.dtype({"uint16": "<u2", "uint32": "<u4"}[index["dtype"]])
        num_tokens, num_bytes = int(index["num_tokens"]), int(index["num_bytes"])
        index |= {"vocab_size": int(index["vocab_size"]), "tokenizer": str(index["tokenizer"])}
        marks = index.setdefault("marks", 0)
        documents = np.load(path / "documents.npy", allow_pickle=False)
        blocks = np.load(path / "blocks.npy", allow_pickle=False)
        sources = np.load(path / "sources.npy", allow_pickle=False) if of_several else np.arange(len(documents))
        size = (path / "ids.bin").stat().st_size
    except (KeyError, TypeError, ValueError, EOFError, FileNotFoundError) as error:
        raise CheckpointError(f"{path} is not a whole corpus ({error!r}). Build it again.") from error
    except OSError as error:
        raise cannot_map(path, error) from error
    if not 0 < index["vocab_size"] <= MOST_IDS:  # IDs of this size are counted in an array
        raise CheckpointError(
            f"{path / 'index.json'} names a vocabulary of {index['vocab_size']:,} IDs, and none has more than "
            f"{MOST_IDS:,}: it is damaged. Build the corpus again."
        )
    if num_tokens < (not of_several) or marks not in (0, 1) or size != (marks + num_tokens) * dtype.itemsize:
        raise CheckpointError(
            f"{path / 'ids.bin'} has {size} bytes where {num_tokens} tokens of {dtype.itemsize} bytes belong: "
            f"it was cut short or changed. Build the corpus again."
        )
    if num_tokens and not (
        _increases(documents)
        and documents[0] == 0
        and documents[-1] < num_tokens
        and _increases(sources)
        and len(sources) == len(documents)
        and blocks.ndim == 2
        and blocks.shape[1:] == (2,)
        and _increases(blocks[:, 0])
        and blocks[0, 0] > 0
        and blocks[-1].tolist() == [num_tokens, num_bytes]
    ):
        raise CheckpointError(f"{path}: documents.npy or blocks.npy does not fit ids.bin. Build the corpus again.")
    ids = MappedFile(str(path / "ids.bin"), dtype, 0, size // dtype.itemsize).open() if size else np.empty(0, dtype)
    return Part(ids, documents, blocks, sources, index)


def _increases(numbers: npt.NDArray[Any]) -> bool:
    return numbers.dtype == np.int64 and numbers.ndim == 1 and len(numbers) > 0 and bool((np.diff(numbers) > 0).all())
