"""Files of token IDs: NumPy arrays, those of llm.c and nanoGPT, raw numbers, and Megatron's pairs; mapped, not copied.

| format | evidence | documents |
|---|---|---|
| NumPy `.npy` | its first bytes; the dtype is in its header | end at each end-of-text token |
| llm.c's `.bin` | its first number; the dtype is that of its header | end at each end-of-text token |
| Megatron's pair, `.bin` and `.idx` | `MMIDIDX` at the start of the `.idx` | those of the `.idx` |
| raw numbers: nanoGPT's `.bin`, OLMo's `.npy` | the caller names the dtype | end at each end-of-text token |
"""

import shutil
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from embedlayer.core.errors import CheckpointError, FileError, SizeError, TextError, TokenIdError
from embedlayer.data.corpus import TokenCorpus
from embedlayer.data.corpus_files import (
    IDS_FILE,
    PLAN_FILE,
    PLAN_VERSION,
    TOKENIZER,
    CorpusShard,
    IdType,
    file_digest,
    plan_digest,
    read_shards,
    shard_folder,
    write_shard_tables,
)
from embedlayer.data.memmap import MemmapSlice
from embedlayer.data.text_formats import TOKEN_SUFFIXES, is_plain
from embedlayer.io.files import (
    check_new_folder,
    file_errors,
    named_path,
    new_file,
    new_files,
    new_folder,
    require_file,
    write_json,
)
from embedlayer.tokenization.bytes import TokenBytes
from embedlayer.tokenization.ids import end_of_text_id, table_size
from embedlayer.tokenization.read import save_tokenizer
from embedlayer.tokenization.tokenizer_calls import as_tokenizer, fingerprint

Format = Literal["numpy", "llm.c", "megatron", "raw"]

_NUMPY_MAGIC, _MEGATRON_MAGIC = b"\x93NUMPY", b"MMIDIDX\x00\x00"
_LLM_C: dict[int, tuple[int, np.dtype[Any]]] = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}
"""Version and type of the numbers of llm.c's files for GPT-2 and for Llama 3, by their first number."""
_LLM_C_HEADER = 256 * 4
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
_MEGATRON_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_FIRST_BYTES = 1 << 12
_IDS_AT_ONCE = 1 << 18
_MOST_BLOCK_TOKENS = 1 << 14
_FEWEST_NUMBERS = 4  # of a file whose every second number is 0: fewer say little about their type


@dataclass(frozen=True)
class TokenFile:
    """Where the token IDs of a file are."""

    path: Path  # of Megatron's pair the `.bin`
    format: Format
    dtype: np.dtype[Any]
    offset: int  # of the first number, in bytes
    length: int
    documents: npt.NDArray[np.int64] | None = None  # first token of each; `None`: separators in the IDs say it


def find_token_files(sources: Sequence[str | Path], dtype: str | None = None) -> list[TokenFile]:
    """Return where the token IDs of sources are, or an empty list if the sources are texts.

    A source is a file of token IDs if it is named `.npy`, `.bin` or `.idx`, or starts as a NumPy array; with a `dtype`
    also if it is no text. Of Megatron's pair, pass the `.bin`, the `.idx` or both.
    """
    paths = [Path(source) for source in sources]
    are_files = [
        path.is_file()
        and (
            path.suffix in TOKEN_SUFFIXES
            or _start(path).startswith(_NUMPY_MAGIC)
            or (dtype is not None and not is_text(path))
        )
        for path in paths
    ]
    if not any(are_files):
        if dtype is not None:
            raise SizeError(f"The dtype {dtype} is that of files of token IDs, and {sources[0]} is none.")
        return []
    if not all(are_files):
        other, first = paths[are_files.index(False)], paths[are_files.index(True)]
        raise TextError(f"{first} is a file of token IDs, and {other} is none: build a corpus of each.")
    pairs = {path.with_suffix(".bin") for path in paths if path.suffix == ".idx"}
    chosen = [path for path in paths if path.suffix == ".idx" or path not in pairs]
    return [_read_token_file(path, dtype) for path in chosen]


def map_token_files(
    sources: Sequence[str | Path], tokenizer: object, path: str | Path, *, dtype: str | None = None
) -> TokenCorpus:
    """Write a corpus of files of token IDs into the folder `path`, and open it: the IDs are mapped, not copied.

    The folder has links to the files, the starts of the documents, and the number of bytes of each block: the sum of
    the bytes that its tokens encode, 0 for special tokens. It is exact for a lossless tokenizer, such as byte-level
    BPE. The files are read once, to check each ID.

    Args:
        sources: Files of token IDs, in order; see `find_token_files`. A document does not continue in the next file.
        tokenizer: The tokenizer that encoded them: a `tokenizers.Tokenizer`, or a fast tokenizer of transformers.
        path: A new or empty folder.
        dtype: Type of the numbers of files without a header, such as `"uint16"` for nanoGPT's.

    Raises:
        SizeError: A header states another type than `dtype`, the numbers of a file without a header are of another
            type, or the files have different types.
        FileError: A file cannot be read, or `path` is not new or cannot be written.
        TextError: A source is no file of token IDs, or has none.
        TokenIdError: A number is no ID of the tokenizer.
        TokenizerError: `tokenizer` is no tokenizer.
        CheckpointError: A file is damaged.

    Example:
        >>> from embedlayer.tokenization.train import train_tokenizer
        >>> np.save("ids.npy", np.array([72, 105, 256, 72, 105], dtype=np.uint16))
        >>> map_token_files(["ids.npy"], train_tokenizer((), kind="byte"), "mapped")
        TokenCorpus(5 tokens, 4 bytes, 2 documents)
    """
    check_new_folder(path)
    backend = as_tokenizer(tokenizer)
    files = find_token_files(sources, dtype)
    empty = next((file for file in files if not file.length), None)
    if not files or empty:
        raise TextError(f"There are no token IDs in {empty.path if empty else ', '.join(map(str, sources))}.")
    types = {file.dtype for file in files}
    if len(types) > 1:
        raise SizeError(f"The files have IDs of several types ({', '.join(sorted(map(str, types)))}): map each alone.")
    tables = [_checked_tables(file, backend) for file in files]
    plan: dict[str, Any] = {
        "format_version": PLAN_VERSION,
        "shards": len(files),
        "tokenizer": fingerprint(backend),
        "sources": [[str(file.path), *file_digest(str(file.path))] for file in files],
    }
    with new_folder(path) as folder:
        for number, (file, (documents, blocks), (_, *facts)) in enumerate(
            zip(files, tables, plan["sources"], strict=True)
        ):
            shard = folder if len(files) == 1 else shard_folder(folder, number)
            shard.mkdir(exist_ok=True)
            (shard / IDS_FILE).symlink_to(file.path.resolve())
            index = {
                "dtype": file.dtype.name,
                "num_tokens": file.length,
                "num_bytes": int(blocks[-1, 1]),
                "vocab_size": table_size(backend),
                "tokenizer": fingerprint(backend),
                "mapped": {"format": file.format, "offset": file.offset, "size": facts[0], "digest": facts[1]},
            }
            if len(files) > 1:
                np.save(shard / "sources.npy", np.array([number]), allow_pickle=False)
                index |= {"plan": plan_digest(plan), "starts_document": True}
            write_shard_tables(shard, documents, blocks, index)
        if len(files) > 1:
            write_json(folder / PLAN_FILE, plan)
        save_tokenizer(backend, folder / TOKENIZER)
    return TokenCorpus.open(path)


def export_token_ids(path: str | Path, out: str | Path) -> list[Path]:
    """Write the token IDs of a corpus as a NumPy array, or as Megatron's pair of `.bin` and `.idx`.

    A corpus that was mapped from one file of the same format gives the bytes of that file again. A document is a
    sequence of the pair, its separator included. Token weights, which these formats do not have, are refused.

    Args:
        path: Folder of the corpus.
        out: New file: `.npy`, or the `.bin` or `.idx` of a pair.

    Returns:
        The files that were written.

    Raises:
        SizeError: The corpus has token weights, which no such file holds.
        FileError: A file exists or cannot be written, or there is no corpus.
        CheckpointError: The corpus is damaged.
    """
    out = named_path(out)
    if out.suffix not in TOKEN_SUFFIXES:
        raise SizeError(f"{out} is no name of a format: it ends in .npy, or in .bin or .idx for Megatron's pair.")
    shards, corpus = read_shards(Path(path)), TokenCorpus.open(path)
    if corpus.token_weights is not None:
        raise SizeError(f"The corpus {path} has token weights, which {out.suffix} files do not have.")
    if out.suffix == ".npy":
        source = _mapped_from(path, shards, "numpy")
        with new_file(out) as partial:
            if source is not None:
                shutil.copyfile(source, partial)
            else:
                with partial.open("wb") as file:  # as `np.save` does, block by block
                    descr = np.lib.format.dtype_to_descr(corpus.ids.dtype)
                    header = {"descr": descr, "fortran_order": False, "shape": (len(corpus),)}
                    np.lib.format.write_array_header_1_0(file, header)
                    _write_ids(file, corpus, corpus.ids.dtype)
        return [out]
    source = _mapped_from(path, shards, "megatron")
    if source is not None and not np.array_equal(np.asarray(_read_pair(source).documents), corpus.documents):
        raise CheckpointError(f"{source.with_suffix('.idx')} was changed since the corpus {path} was built.")
    paths = [out.with_suffix(suffix) for suffix in (".bin", ".idx")]
    with new_files(*paths) as partials:
        if source is not None:
            for suffix, partial in zip((".bin", ".idx"), partials, strict=True):
                shutil.copyfile(source.with_suffix(suffix), partial)
        else:
            _write_pair(partials[0], partials[1], corpus)
    return paths


# Reading


def is_text(path: Path) -> bool:
    """Return whether a file is text by its name, which is none of a file of token IDs, and its first bytes."""
    return path.suffix not in TOKEN_SUFFIXES and is_plain(_start(path))


def _start(path: Path) -> bytes:
    """Return the first bytes of a file."""
    with file_errors(f"read {path}"), path.open("rb") as file:
        return file.read(_FIRST_BYTES)


def _read_token_file(path: Path, dtype: str | None) -> TokenFile:
    """Return where the token IDs of a file are, by its first bytes and those of an `.idx` beside it."""
    require_file(path)
    requested = None if dtype is None else _id_type(path, np.dtype(dtype))
    start = _start(path)
    index = path.with_suffix(".idx")
    is_pair = path.suffix in (".bin", ".idx") and index.is_file() and _start(index).startswith(_MEGATRON_MAGIC)
    if is_pair:
        found = _read_pair(path.with_suffix(".bin"))
    elif path.suffix == ".idx":
        raise CheckpointError(f"{path} does not start with MMIDIDX: it is no index of Megatron, or is damaged.")
    elif start.startswith(_NUMPY_MAGIC):
        found = _read_numpy(path)
    elif len(start) >= 12 and int.from_bytes(start[:4], "little") in _LLM_C:
        magic, version, length = struct.unpack_from("<iii", start)
        known, id_type = _LLM_C[magic]
        if version != known:
            raise CheckpointError(f"{path} has version {version} of llm.c's number {magic}: version {known} is read.")
        found = _whole(TokenFile(path, "llm.c", id_type, _LLM_C_HEADER, length))
    elif not start:
        raise TextError(f"There are no token IDs in {path}: the file is empty.")
    elif requested is None:
        raise TextError(f"{path} is a binary file. Are its numbers token IDs? See docs/errors.md, Files of token IDs.")
    else:
        count, rest = divmod(path.stat().st_size, requested.itemsize)
        if rest:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes, no multiple of {requested.itemsize}.")
        found = TokenFile(path, "raw", requested, 0, count)
    if requested is not None and requested != found.dtype:
        raise SizeError(f"{path} states that its IDs are {found.dtype}, and the requested dtype is {requested}.")
    return found


def _id_type(path: Path, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return a little-endian type of integers; raise a `CheckpointError` for any other type."""
    if dtype.name not in get_args(IdType) or dtype.newbyteorder("<") != dtype:
        raise CheckpointError(f"{path} holds {dtype.str}; token IDs are little-endian {', '.join(get_args(IdType))}.")
    return dtype


def _read_numpy(path: Path) -> TokenFile:
    """Read the header of a NumPy file."""
    with path.open("rb") as file:
        try:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
        except (ValueError, EOFError) as error:
            raise CheckpointError(f"{path} has no whole header of a NumPy array: {error}.") from error
        offset = file.tell()
    if len(shape) != 1:
        raise CheckpointError(f"{path} has an array of shape {shape}: a corpus is one row. Save ids.reshape(-1).")
    return _whole(TokenFile(path, "numpy", _id_type(path, dtype), offset, shape[0]))


def _whole(file: TokenFile) -> TokenFile:
    """Return a token file; raise a `CheckpointError` unless it ends after its last token ID."""
    expected, size = file.offset + file.length * file.dtype.itemsize, file.path.stat().st_size
    if expected != size:
        raise CheckpointError(f"{file.path} has {size} bytes, and its header states {expected}: it was cut or changed.")
    return file


def _read_pair(path: Path) -> TokenFile:
    """Read the index beside a `.bin` of Megatron."""
    index = path.with_suffix(".idx")
    if not path.exists():
        raise FileError(f"{path} is missing: it has the token IDs, and {index} their documents.")
    require_file(path)
    content = index.read_bytes()
    size = _MEGATRON_HEADER.size
    _, version, code, sequences, documents = _MEGATRON_HEADER.unpack(content[:size].ljust(size, b"\0"))
    if version != 1 or code not in _MEGATRON_TYPES:
        raise CheckpointError(f"{index} has version {version} and type {code}: version 1 with integers is read.")
    dtype: np.dtype[Any] = np.dtype(_MEGATRON_TYPES[code]).newbyteorder("<")
    expected = size + sequences * 12 + documents * 8
    if len(content) != expected:
        has_modes = len(content) == expected + sequences
        reason = "it has modes of sequences, which token IDs do not have" if has_modes else "it is damaged"
        raise CheckpointError(f"{index} has {len(content)} bytes, and its header states {expected}: {reason}.")
    lengths = np.frombuffer(content, "<i4", sequences, size).astype(np.int64)
    pointers = np.frombuffer(content, "<i8", sequences, size + 4 * sequences)
    numbers = np.frombuffer(content, "<i8", documents, size + 12 * sequences)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    if (lengths < 0).any() or not np.array_equal(pointers, ends[:-1] * dtype.itemsize):
        raise CheckpointError(f"{index}: its sequences are not one after another in {path.name}.")
    is_ordered = documents > 0 and numbers[0] == 0 and numbers[-1] == sequences and bool((np.diff(numbers) >= 0).all())
    if not is_ordered:
        raise CheckpointError(f"{index}: its documents do not begin at sequence 0 and end after the last.")
    starts = np.unique(ends[numbers])
    return _whole(TokenFile(path, "megatron", dtype, 0, int(ends[-1]), starts[starts < ends[-1]]))


def _checked_tables(file: TokenFile, tokenizer: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Read all IDs of a file once: return the arrays `documents` and `blocks` of its `TokenCorpus`.

    Each ID is checked, the bytes of each block are counted, and the starts of documents are found: a document starts at
    the first token, and at each token that is no separator and follows one.
    """
    by_id = TokenBytes(tokenizer).by_id
    lengths = np.where(by_id.special, 0, by_id.lengths)
    separator, size = end_of_text_id(tokenizer), table_size(tokenizer)
    if file.format == "raw" and size - 1 > np.iinfo(file.dtype).max:
        raise SizeError(f"{file.path} has {file.dtype} for {size} IDs. See docs/errors.md, Files of token IDs.")
    ends: list[int] = []
    counts: list[int] = []
    starts = [np.empty(0, np.int64)]
    block = max(1, min(_MOST_BLOCK_TOKENS, file.length // 64))
    previous_is_separator = False
    is_wider = file.format == "raw" and file.length >= _FEWEST_NUMBERS
    all_ids = MemmapSlice(str(file.path), file.dtype, file.offset, file.length).open()
    at_once = block * max(1, _IDS_AT_ONCE // block)
    for start in range(0, file.length, at_once):
        ids = np.asarray(all_ids[start : start + at_once])
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= size:
            wrong = low if low < 0 else high
            place = start + int((ids == wrong).argmax())
            raise TokenIdError(
                f"token id {wrong} at token {place} of {file.path} is outside 0..{size - 1} of the tokenizer."
            )
        is_wider = is_wider and not ids[(start + 1) % 2 :: 2].any()
        places = np.arange(0, len(ids), block)
        counts += np.add.reduceat(lengths[ids], places).tolist()
        ends += np.minimum(start + places + block, file.length).tolist()
        if file.documents is None and separator is not None:
            is_separator = ids == separator
            before = np.concatenate([[previous_is_separator], is_separator[:-1]])
            starts.append(np.flatnonzero(before & ~is_separator) + start)
            previous_is_separator = bool(is_separator[-1])
    if is_wider:
        raise SizeError(f"Every second {file.dtype} of {file.path} is 0: its IDs have a wider type. Pass that --dtype.")
    found = np.concatenate(starts)
    if all_ids[0] == separator:
        found = found[1:]  # separators at the start belong to the first document
    documents = np.concatenate([[0], found]) if file.documents is None else file.documents
    return documents, np.stack([np.array(ends), np.cumsum(counts)], axis=1)


# Writing


def _mapped_from(path: str | Path, shards: Sequence[CorpusShard], kind: Format) -> Path | None:
    """Return the file of the format `kind` that a corpus maps, or `None`."""
    if len(shards) != 1 or shards[0].metadata.get("mapped", {}).get("format") != kind:
        return None
    return (Path(path) / IDS_FILE).resolve()


def _write_pair(path: Path, index: Path, corpus: TokenCorpus) -> None:
    """Write Megatron's pair: a document is a sequence. Numbers of uint32 are written as int32, which holds all IDs."""
    dtype = np.dtype("<i4") if corpus.ids.dtype.name == "uint32" else corpus.ids.dtype
    code = next(code for code, name in _MEGATRON_TYPES.items() if name == dtype.name)
    lengths = np.diff(corpus.documents, append=len(corpus))
    with path.open("wb") as file:
        _write_ids(file, corpus, dtype)
    with index.open("wb") as file:
        count = len(lengths)
        file.write(_MEGATRON_HEADER.pack(_MEGATRON_MAGIC, 1, code, count, count + 1))
        file.write(lengths.astype("<i4").tobytes())
        file.write((corpus.documents * dtype.itemsize).astype("<i8").tobytes())
        file.write(np.arange(count + 1).astype("<i8").tobytes())


def _write_ids(file: Any, corpus: TokenCorpus, dtype: np.dtype[Any]) -> None:
    """Write the IDs of a corpus into an open file, block by block."""
    for start in range(0, len(corpus), _IDS_AT_ONCE):
        file.write(np.asarray(corpus.ids[start : start + _IDS_AT_ONCE]).astype(dtype, copy=False).tobytes())
