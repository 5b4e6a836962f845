"""What a corpus is on the disk: one folder with the files of a part, or a folder of such parts with their plan.

```
CORPUS/                     CORPUS/
  ids.bin                     corpus.json       the plan: sources with sizes and digests, tokenizer, number of parts
  documents.npy               tokenizer.json
  blocks.npy                  shard-00000/       ids.bin, documents.npy, blocks.npy, index.json, and
  index.json                  shard-00001/       sources.npy: which source each document is
                              ...
```

A part is made without knowing the parts before it, so it cannot know whether the mark between two documents stands
before its first ID. It is written there in any case, and left out by who reads it: where the first document of all
begins, and where a part goes on with the document of the one before.
"""

import hashlib
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, TypedDict

import numpy as np
import numpy.typing as npt

from embedlayer.data.memmap import ConcatenatedArray, IdArray, MemmapSlice, cannot_map
from embedlayer.data.tokenizer import MAX_TOKEN_IDS
from embedlayer.errors import CheckpointError
from embedlayer.io.files import JsonObject, read_fields, read_json, recover_folder, write_json
from embedlayer.io.json_fields import Count, Range, printable

Offsets = npt.NDArray[np.int64]

PLAN_FILE = "corpus.json"
FORMAT_VERSION = 1
PLAN_VERSION = 2


class Index(TypedDict):
    """`index.json`: what a part of a corpus holds."""

    dtype: Literal["uint16", "uint32"]
    num_tokens: Count
    num_bytes: Count
    vocab_size: Annotated[int, Range(1, MAX_TOKEN_IDS)]
    tokenizer: str
    marks: NotRequired[Annotated[int, Range(0, 1)]]
    bytes_read: NotRequired[Count]
    plan: NotRequired[str]


class Plan(TypedDict):
    """`corpus.json`: what a corpus in parts is built from. A source is its name, size in bytes, and digest."""

    shards: Annotated[int, Range(1, 10**6)]
    tokenizer: str
    sources: list[tuple[str, Count, str]]


_NPY_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '<i8', 'fortran_order': False, 'shape': \((\d{1,15}),(?: (\d{1,3}))?\), \} *\n",
    re.DOTALL,
)


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


def shard_folder(path: Path, number: int) -> Path:
    """The folder of part `number`, counted from 0."""
    return path / f"shard-{number:05d}"


def plan_digest(plan: JsonObject) -> str:
    """A short name for a plan, kept in each part that was built after it."""
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:16]


def write_shard_tables(folder: Path, documents: Offsets, blocks: Offsets, index: JsonObject) -> None:
    """Write what stands beside `ids.bin`."""
    np.save(folder / "documents.npy", documents, allow_pickle=False)
    np.save(folder / "blocks.npy", blocks, allow_pickle=False)
    write_json(folder / "index.json", {"format_version": FORMAT_VERSION, **index})


def read_shards(path: Path) -> list[Part]:
    """All parts of a corpus.

    Raises:
        FileError: There is no corpus at `path`.
        CheckpointError: A part is damaged, not built yet, or does not belong to the plan.
    """
    if not (recover_folder(path) / PLAN_FILE).exists():
        return [_read_part(path)]
    plan = read_plan(path)
    if missing := missing_shards(path):
        raise CheckpointError(
            f"The corpus {path} is not finished: {len(missing)} shards are not built yet, among them shard "
            f"{', '.join(map(str, missing[:8]))}. It goes on with the command that began it: embedlayer corpus build "
            f"FILE... -o {path} --tokenizer FILE --shards {plan['shards']} (and --only K where each host builds "
            f"its own part); in Python, with build_in_shards or build_shard and the same arguments."
        )
    parts = [_read_part(shard_folder(path, number)) for number in range(plan["shards"])]
    for number, part in enumerate(parts):
        if part.facts.get("plan") != plan_digest(plan):
            raise CheckpointError(
                f"{shard_folder(path, number)} was built after another plan than {path / PLAN_FILE}. Remove this shard "
                f"and build it again."
            )
    if not any(len(part.documents) for part in parts):
        raise CheckpointError(f"The corpus {path} holds no text: none of its sources has a token.")
    return parts


def concatenate_shards(parts: Sequence[Part]) -> tuple[IdArray | ConcatenatedArray, Offsets, Offsets]:
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
    return ids[0] if len(ids) == 1 else ConcatenatedArray(ids), np.concatenate(documents), np.concatenate(blocks)


def missing_shards(path: Path) -> list[int]:
    """Which parts of the plan in a folder are not built yet.

    Raises:
        FileError: There is no plan.
        CheckpointError: It is damaged.
    """
    shards = read_plan(path)["shards"]
    return [number for number in range(shards) if not shard_folder(path, number).exists()]


def read_plan(path: Path) -> JsonObject:
    """The plan of a corpus in parts.

    Raises:
        FileError: There is no plan.
        CheckpointError: It is damaged, or of another version.
    """
    check_version(path / PLAN_FILE, PLAN_VERSION)
    return read_fields(path / PLAN_FILE, Plan)


def read_index(path: Path) -> JsonObject:
    """What `index.json` of a part says.

    Raises:
        FileError: There is none.
        CheckpointError: It is damaged, or of another version.
    """
    check_version(path / "index.json", FORMAT_VERSION)
    return read_fields(path / "index.json", Index)


def check_version(file: Path, version: int) -> None:
    """Refuse a file of a format version that this library does not read.

    Raises:
        FileError: It cannot be read.
        CheckpointError: It is of another version, or not a JSON object.
    """
    found = read_json(file).get("format_version")
    if found != version:
        raise CheckpointError(
            f"{file} has corpus format {printable(found)}; this version of embedlayer reads {version}. Build it again."
        )


def _read_part(path: Path) -> Part:
    index = read_index(path)
    of_several = "plan" in index
    try:
        dtype: np.dtype[Any] = np.dtype({"uint16": "<u2", "uint32": "<u4"}[index["dtype"]])
        num_tokens, num_bytes, marks = index["num_tokens"], index["num_bytes"], index.setdefault("marks", 0)
        documents, blocks = read_offsets(path / "documents.npy"), read_offsets(path / "blocks.npy")
        sources = read_offsets(path / "sources.npy") if of_several else np.arange(len(documents))
        size = (path / "ids.bin").stat().st_size
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is not a whole corpus: {error.filename} is missing. Build it again.") from error
    except OSError as error:
        raise cannot_map(path, error) from error
    if num_tokens < (not of_several) or size != (marks + num_tokens) * dtype.itemsize:
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
        and blocks[0, 1] >= 0
        and bool((np.diff(blocks[:, 1]) >= 0).all())
        and blocks[-1].tolist() == [num_tokens, num_bytes]
    ):
        raise CheckpointError(f"{path}: documents.npy or blocks.npy does not fit ids.bin. Build the corpus again.")
    ids = MemmapSlice(str(path / "ids.bin"), dtype, 0, size // dtype.itemsize).open() if size else np.empty(0, dtype)
    return Part(ids, documents, blocks, sources, index)


def read_offsets(path: Path) -> Offsets:
    """Read whole numbers, `(N,)` or `(N, K)` int64, from a file that `write_shard_tables` wrote.

    The file's size is compared with its header before anything is allocated.

    Raises:
        FileNotFoundError: There is no such file.
        CheckpointError: It is damaged, or holds something else.
    """
    content = bytearray(path.read_bytes())
    found = _NPY_HEADER.match(content)
    shape = tuple(int(size) for size in (found[1], found[2]) if size) if found else (-1,)
    if not found or len(content) - found.end() != 8 * math.prod(shape):
        raise CheckpointError(f"{path} is not a whole array of whole numbers. Build the corpus again.")
    return np.frombuffer(content, "<i8", offset=found.end()).reshape(shape)


def _increases(numbers: npt.NDArray[Any]) -> bool:
    return numbers.dtype == np.int64 and numbers.ndim == 1 and len(numbers) > 0 and bool((np.diff(numbers) > 0).all())
