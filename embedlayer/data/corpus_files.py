"""Files of a corpus: one folder with the files of a shard, or a folder with several shards and their plan.

```
CORPUS/                     CORPUS/
  ids.bin                     corpus.json       the plan: sources with sizes and digests, tokenizer, number of shards
  documents.npy               tokenizer.json
  blocks.npy                  shard-00000/       ids.bin, documents.npy, blocks.npy, index.json, and
  index.json                  shard-00001/       sources.npy: numbers of the sources with documents in the shard
  tokenizer.json              ...
```

A corpus of files of token IDs has a link to such a file in place of each `ids.bin`. A corpus with chats has
`weights.bin` beside each `ids.bin`: the weight of each token in the loss, one byte, 0 or 1.

A shard is built without knowing the shards before it, so it cannot know whether a document separator belongs before
its first ID. If the tokenizer has one, it is written there in any case. `concatenate_shards` leaves it out before the
first document of the corpus, and where a shard continues the last document of the shard before.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, TypedDict

import numpy as np
import numpy.typing as npt

from embedlayer.core.errors import CheckpointError, FileError
from embedlayer.core.formatting import command_name
from embedlayer.data.memmap import ConcatenatedArray, IdArray, MemmapSlice, cannot_map
from embedlayer.io.files import JsonObject, file_errors, read_fields, recover_folder, require_file, write_json
from embedlayer.io.json_fields import Count, Range
from embedlayer.tokenization.ids import MAX_TOKEN_IDS

Offsets = npt.NDArray[np.int64]

PLAN_FILE = "corpus.json"
INDEX_FILE, TOKENIZER = "index.json", "tokenizer.json"
IDS_FILE, WEIGHTS_FILE = "ids.bin", "weights.bin"
_DIGEST_BLOCKS, _BLOCK_BYTES = 64, 1 << 14

IdType = Literal["uint8", "int8", "uint16", "int16", "uint32", "int32", "int64"]
"""Types of token IDs in files, little-endian. Those of texts are uint16 or uint32."""
FORMAT_VERSION = 1
PLAN_VERSION = 2


class MappedFile(TypedDict):
    """Type of the field `mapped` of `index.json`: the file of token IDs to which `ids.bin` is a link.

    `offset` is that of the first ID in bytes, `size` and `digest` are those of the whole file.
    """

    format: Literal["numpy", "llm.c", "megatron", "raw"]
    offset: Count
    size: Count
    digest: str


class ShardIndex(TypedDict):
    """Type of the content of `index.json`: sizes, tokenizer and plan of one shard, or of a corpus without shards.

    `separators` is 1 if the IDs of the shard start with a document separator. `tokenizer` is the tokenizer's
    fingerprint, `plan` the digest of the plan, and `bytes_read` the number of bytes of the source files in the shard.
    A corpus without shards has neither `separators` nor these two. `has_weights` says that there is a `weights.bin`.
    `starts_document` says that the first document of the shard is not the rest of one that the shard before begins.
    `mapped` says that `ids.bin` is a link to a file of token IDs.
    """

    dtype: IdType
    num_tokens: Count
    num_bytes: Count
    vocab_size: Annotated[int, Range(1, MAX_TOKEN_IDS)]
    tokenizer: str
    separators: NotRequired[Annotated[int, Range(0, 1)]]
    bytes_read: NotRequired[Count]
    plan: NotRequired[str]
    has_weights: NotRequired[bool]
    starts_document: NotRequired[bool]
    mapped: NotRequired[MappedFile]


class ShardPlan(TypedDict):
    """Type of the content of `corpus.json`, the plan of a corpus in shards.

    Each source has a name, a size in bytes and a digest. `tokenizer` is the tokenizer's fingerprint. `text_field` is
    the name of the field of rows, if the caller named one. `chat_template` is a digest of the chat template, if there
    are chats; then each shard has weights.
    """

    shards: Annotated[int, Range(1, 10**6)]
    tokenizer: str
    sources: list[tuple[str, Count, str]]
    text_field: NotRequired[str]
    chat_template: NotRequired[str]


_NPY_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '<i8', 'fortran_order': False, 'shape': \((\d{1,15}),(?: (\d{1,3}))?\), \} *\n",
    re.DOTALL,
)


class CorpusShard(NamedTuple):
    """Content of one shard of a corpus, or of a corpus without shards."""

    ids: IdArray
    documents: Offsets  # first tokens, not counting the separator with which the IDs of a shard start
    blocks: Offsets
    sources: Offsets  # numbers of the sources in the plan that have documents here
    metadata: JsonObject
    weights: IdArray | None


def is_corpus(path: Path) -> bool:
    """Return whether `path` is the folder of a corpus, or of one whose build was started.

    A folder is one also if its `ids.bin` is a link to a file of token IDs that is missing.
    """
    return (path / PLAN_FILE).exists() or all(os.path.lexists(path / name) for name in (INDEX_FILE, IDS_FILE))


def shard_folder(path: Path, number: int) -> Path:
    """Return the path of the folder of shard `number`, counted from 0, in the corpus folder `path`."""
    return path / f"shard-{number:05d}"


def plan_digest(plan: JsonObject) -> str:
    """Return a digest of a plan, 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:16]


def file_digest(source: str) -> list[Any]:
    """Return `[size, digest]` of a file: its size in bytes, and 16 hexadecimal digits of a SHA-256 of its content.

    Of a file above 1 MiB only 64 blocks of 16 KiB, evenly spread, are read.
    """
    digest = hashlib.sha256()
    require_file(source)
    with file_errors(f"read {source}"), open(source, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        count = min(-(-size // _BLOCK_BYTES), _DIGEST_BLOCKS)
        for number in range(count):
            file.seek((size - _BLOCK_BYTES) * number // max(count - 1, 1))
            digest.update(file.read(_BLOCK_BYTES))
    return [size, digest.hexdigest()[:16]]


def write_shard_tables(folder: Path, documents: Offsets, blocks: Offsets, index: JsonObject) -> None:
    """Write `documents.npy`, `blocks.npy` and `index.json` into the folder of a shard or corpus."""
    np.save(folder / "documents.npy", documents, allow_pickle=False)
    np.save(folder / "blocks.npy", blocks, allow_pickle=False)
    write_json(folder / INDEX_FILE, {"format_version": FORMAT_VERSION, **index})


def read_shards(path: Path) -> list[CorpusShard]:
    """Read and check all shards of the corpus in folder `path`, in order; their token IDs are memory-mapped."""
    if not (recover_folder(path) / PLAN_FILE).exists():
        return [_read_shard(path)]
    plan = read_plan(path)
    if missing := missing_shards(path):
        raise CheckpointError(
            f"The corpus {path} is not finished: shards {missing[:8]} of {plan['shards']} are missing. Continue with "
            f"the arguments of its start: {command_name()} corpus build, build_in_shards or build_shard."
        )
    shards = [_read_shard(shard_folder(path, number)) for number in range(plan["shards"])]
    for number, shard in enumerate(shards):
        if shard.metadata.get("plan") != plan_digest(plan):
            raise CheckpointError(f"{shard_folder(path, number)} is of another plan: remove it, and build it again.")
    if not any(len(shard.documents) for shard in shards):
        raise CheckpointError(f"The corpus {path} has no text: none of its sources has a token.")
    return shards


Ids = IdArray | ConcatenatedArray


def concatenate_shards(shards: Sequence[CorpusShard]) -> tuple[Ids, Offsets, Offsets, Ids | None]:
    """Join the shards of a corpus, without copies, into the arrays of one `TokenCorpus`.

    IDs and documents are what `TokenCorpus.build` gives for the same sources; the chunks of `blocks` end elsewhere. A
    separator at the start of a shard is kept only between two documents: it is left out before the first document of
    the corpus, and where the shard continues the last document of the shard before.
    """
    ids: list[IdArray] = []
    weights: list[IdArray] = []
    documents: list[Offsets] = []
    blocks: list[Offsets] = []
    tokens = num_bytes = 0
    last = -1
    for shard in shards:
        if len(shard.documents):
            separators = skipped = shard.metadata["separators"]  # 0 or 1
            is_rest = shard.sources[0] == last and not shard.metadata.get("starts_document")
            if ids and not is_rest:
                skipped = 0
                tokens += separators
                blocks[-1][-1, 0] = tokens
            ids.append(shard.ids[skipped:])
            weights += [] if shard.weights is None else [shard.weights[skipped:]]
            documents.append(shard.documents[int(is_rest) :] + tokens)
            blocks.append(shard.blocks + np.array([tokens, num_bytes]))
            tokens += len(shard.ids) - separators
            last = int(shard.sources[-1])
        num_bytes += int(shard.metadata["num_bytes"])
    blocks[-1][-1, 1] = num_bytes
    return _joined(ids), np.concatenate(documents), np.concatenate(blocks), _joined(weights) if weights else None


def _joined(arrays: Sequence[IdArray]) -> Ids:
    """Return the concatenation of arrays, without a copy."""
    return arrays[0] if len(arrays) == 1 else ConcatenatedArray(arrays)


def missing_shards(path: Path) -> list[int]:
    """Return the numbers of the shards of a corpus that are planned but have no folder yet."""
    shards = read_plan(path)["shards"]
    return [number for number in range(shards) if not shard_folder(path, number).exists()]


def read_plan(path: Path) -> JsonObject:
    """Read and check the plan of a corpus in shards, `corpus.json` in the folder `path`."""
    return read_fields(path / PLAN_FILE, ShardPlan, version=PLAN_VERSION)


def read_index(path: Path) -> JsonObject:
    """Read and check `index.json` in the folder `path` of a shard, or of a corpus without shards."""
    return read_fields(path / INDEX_FILE, ShardIndex, version=FORMAT_VERSION)


def _read_shard(path: Path) -> CorpusShard:
    """Read one shard in the folder `path`, or a corpus without shards, and check that its files fit each other."""
    index = read_index(path)
    is_planned = "plan" in index
    try:
        dtype: np.dtype[Any] = np.dtype(index["dtype"]).newbyteorder("<")
        mapped = index.get("mapped")
        num_tokens, num_bytes, separators = index["num_tokens"], index["num_bytes"], index.setdefault("separators", 0)
        documents, blocks = read_offsets(path / "documents.npy"), read_offsets(path / "blocks.npy")
        sources = read_offsets(path / "sources.npy") if is_planned else np.arange(len(documents))
        offset = 0 if mapped is None else mapped["offset"]
        size = (path / IDS_FILE).stat().st_size - offset
        if mapped is not None and [mapped["size"], mapped["digest"]] != file_digest(str(path / IDS_FILE)):
            raise CheckpointError(f"{(path / IDS_FILE).resolve()} was changed since {path} was built: build it again.")
        has_weights = index.setdefault("has_weights", False)
        weights_size = (path / WEIGHTS_FILE).stat().st_size if has_weights else separators + num_tokens
    except FileNotFoundError as error:
        missing = Path(error.filename).resolve()  # of a link: the file of token IDs
        raise CheckpointError(f"{path} is not a whole corpus: {missing} is missing. Build it again.") from error
    except FileError:
        raise
    except OSError as error:
        raise cannot_map(path, error) from error
    if num_tokens < (not is_planned) or size != (separators + num_tokens) * dtype.itemsize:
        raise CheckpointError(
            f"{path / IDS_FILE} has {size} bytes, not {num_tokens} tokens of {dtype}: build it again."
        )
    if weights_size != separators + num_tokens:
        raise CheckpointError(f"{path / WEIGHTS_FILE} does not have one byte for each token. Build the corpus again.")
    if num_tokens and not (
        _increases(documents)
        and documents[0] == 0
        and documents[-1] < num_tokens
        and _increases(sources)
        and len(sources) <= len(documents)
        and blocks.ndim == 2
        and blocks.shape[1:] == (2,)
        and _increases(blocks[:, 0])
        and blocks[0, 0] > 0
        and blocks[0, 1] >= 0
        and bool((np.diff(blocks[:, 1]) >= 0).all())
        and blocks[-1].tolist() == [num_tokens, num_bytes]
    ):
        raise CheckpointError(f"{path}: documents.npy or blocks.npy does not fit ids.bin. Build the corpus again.")
    ids: IdArray = np.empty(0, dtype)
    if size:
        ids = MemmapSlice(str(path / IDS_FILE), dtype, offset, size // dtype.itemsize).open()
    weights = None
    if has_weights and size:
        weights = MemmapSlice(str(path / WEIGHTS_FILE), np.dtype(np.uint8), 0, weights_size).open()
    return CorpusShard(ids, documents, blocks, sources, index, weights)


def read_offsets(path: Path) -> Offsets:
    """Read an int64 array, `(N,)` or `(N, K)`, from an `.npy` file of a corpus."""
    # the size of the file is compared with its header before memory is allocated for the array
    path.stat()  # raises FileNotFoundError
    require_file(path)
    content = bytearray(path.read_bytes())
    header = _NPY_HEADER.match(content)
    shape = tuple(int(size) for size in (header[1], header[2]) if size) if header else (-1,)
    if not header or len(content) - header.end() != 8 * math.prod(shape):
        raise CheckpointError(f"{path} is not a complete array of int64. Build the corpus again.")
    return np.frombuffer(content, "<i8", offset=header.end()).reshape(shape)


def _increases(numbers: npt.NDArray[Any]) -> bool:
    """Return whether an array is one-dimensional int64, not empty, and strictly increasing."""
    return numbers.dtype == np.int64 and numbers.ndim == 1 and len(numbers) > 0 and bool((np.diff(numbers) > 0).all())
