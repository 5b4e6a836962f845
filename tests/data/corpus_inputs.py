"""What teams have as training data, as writers of files: texts, rows, chats and token IDs."""

import gzip
import io
import json
import struct
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedlayer as el
from embedlayer import TokenCorpus


def arrow() -> Any:
    """pyarrow; a test that needs it is skipped by name where it is not installed."""
    return pytest.importorskip("pyarrow", reason="the parquet extra is not installed")


# Rows


def lines(texts: Sequence[str], field: str = "text") -> bytes:
    rows = [{"id": number, field: text} for number, text in enumerate(texts)]
    return b"\n".join(json.dumps(row, ensure_ascii=bool(row["id"] % 2)).encode() for row in rows) + b"\n\n"


def table(texts: Sequence[str], field: str = "text"):
    pyarrow = arrow()
    return pyarrow.table({"id": list(range(len(texts))), field: pyarrow.array(texts, pyarrow.string())})


def write_lines(path: Path, texts: Sequence[str]) -> None:
    path.write_bytes(lines(texts))


def write_crlf(path: Path, texts: Sequence[str]) -> None:
    path.write_bytes(b"\xef\xbb\xbf" + lines(texts).strip().replace(b"\n", b"\r\n\r\n"))


def write_gzip(path: Path, texts: Sequence[str]) -> None:
    path.write_bytes(gzip.compress(lines(texts)))


def zstandard(text: str) -> bytes:
    return arrow().compress(text.encode(), codec="zstd", asbytes=True)


def write_zstd(path: Path, texts: Sequence[str]) -> None:
    """Two frames, as `pzstd` and appended files have."""
    pyarrow = arrow()
    raw = lines(texts)
    frames = (pyarrow.compress(part, codec="zstd", asbytes=True) for part in (raw[:50], raw[50:]) if part)
    path.write_bytes(b"".join(frames))


def write_parquet(path: Path, texts: Sequence[str]) -> None:
    arrow()
    from pyarrow.parquet import write_table

    write_table(table(texts), path, row_group_size=7)


def write_arrow_file(path: Path, texts: Sequence[str]) -> None:
    with arrow().ipc.new_file(str(path), table(texts).schema) as writer:
        writer.write_table(table(texts), max_chunksize=4)


def write_stream(path: Path, texts: Sequence[str]) -> None:
    with arrow().ipc.new_stream(str(path), table(texts).schema) as writer:
        writer.write_table(table(texts), max_chunksize=4)


def write_dataset(path: Path, texts: Sequence[str]) -> None:
    """What `Dataset.save_to_disk(path, num_shards=2)` of the library datasets writes."""
    path.mkdir()
    names = [f"data-0000{number}-of-00002.arrow" for number in range(2)]
    for name, part in zip(names, (texts[: len(texts) // 3], texts[len(texts) // 3 :]), strict=True):
        write_stream(path / name, part)
    (path / "dataset_info.json").write_text('{"features": {"text": {"dtype": "string", "_type": "Value"}}}')
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))


def write_datasets(path: Path, texts: Sequence[str]) -> None:
    """A `DatasetDict` with one split."""
    path.mkdir()
    (path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    write_dataset(path / "train", texts)


WRITERS: dict[str, Callable[[Path, Sequence[str]], None]] = {
    "t.jsonl": write_lines,
    "t.json": write_lines,
    "crlf.ndjson": write_crlf,
    "t.jsonl.gz": write_gzip,
    "t.jsonl.zst": write_zstd,
    "t.parquet": write_parquet,
    "t.arrow": write_arrow_file,
    "data-00000-of-00001.arrow": write_stream,
    "set": write_dataset,
    "sets": write_datasets,
}
"""What writes each kind of rows, by the name of the file or folder."""


def expected(texts: Sequence[str], tokenizer) -> tuple[list[int], list[int], int]:
    """IDs, starts of documents and bytes: each text is encoded alone, by `tokenizers` itself."""
    ids: list[int] = []
    documents: list[int] = []
    separator = tokenizer.token_to_id("<|endoftext|>")
    for text in texts:
        encoded = tokenizer.encode(text, add_special_tokens=False).ids
        if encoded:
            ids += [separator] if ids and separator is not None else []
            documents.append(len(ids))
            ids += encoded
    return ids, documents, len("".join(texts).encode())


def assert_is(corpus: TokenCorpus, texts: Sequence[str], tokenizer) -> None:
    ids, documents, num_bytes = expected(texts, tokenizer)
    assert np.asarray(corpus.ids).tolist() == ids
    assert corpus.documents.tolist() == documents
    assert corpus.blocks[-1].tolist() == [len(ids), num_bytes]
    assert (np.diff(corpus.blocks, axis=0, prepend=0)[:, 0] > 0).all()


# Token IDs

BYTES = el.train_tokenizer((), "byte")
END = 256
TEXTS = [f"Dog {number} naps. é犬 " * (1 + number % 5) for number in range(40)]
IDS = np.array([token for text in TEXTS for token in [*text.encode(), END]][:-1])
STARTS = np.cumsum([0, *(len(text.encode()) + 1 for text in TEXTS[:-1])]).tolist()
CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def write_pair(path: Path, ids: np.ndarray, lengths: list[int], documents: list[int]) -> None:
    """What `IndexedDatasetBuilder` of Megatron-LM writes: `_IndexWriter.write` with `struct`, and the raw numbers."""
    path.with_suffix(".bin").write_bytes(ids.tobytes("C"))
    with path.with_suffix(".idx").open("wb") as stream:
        stream.write(b"MMIDIDX\x00\x00")
        stream.write(struct.pack("<Q", 1))
        stream.write(struct.pack("<B", CODES[ids.dtype.name]))
        stream.write(struct.pack("<Q", len(lengths)))
        stream.write(struct.pack("<Q", len(documents)))
        stream.write(np.array(lengths, dtype=np.int32).tobytes("C"))
        pointers, at = [], 0
        for length in lengths:
            pointers.append(at)
            at += length * ids.dtype.itemsize
        stream.write(np.array(pointers, dtype=np.int64).tobytes("C"))
        stream.write(np.array(documents, dtype=np.int64).tobytes("C"))


def numpy_file(path: Path) -> Path:
    np.save(path / "ids.npy", IDS.astype(np.uint16))
    return path / "ids.npy"


def nanogpt(path: Path) -> Path:
    IDS.astype("<u2").tofile(path / "train.bin")
    return path / "train.bin"


def olmo(path: Path) -> Path:
    IDS.astype("<u4").tofile(path / "part-0-00000.npy")
    return path / "part-0-00000.npy"


def llm_c(path: Path, magic: int = 20240520, version: int = 1, dtype: str = "<u2") -> Path:
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(IDS)
    (path / f"{magic}.bin").write_bytes(header.tobytes() + IDS.astype(dtype).tobytes())
    return path / f"{magic}.bin"


def megatron(path: Path) -> Path:
    write_pair(path / "text_document", IDS.astype(np.int32), [*np.diff(STARTS, append=len(IDS))], [*range(41)])
    return path / "text_document.bin"


FILES = {
    "numpy": (numpy_file, None, "uint16"),
    "nanoGPT": (nanogpt, "uint16", "uint16"),
    "OLMo": (olmo, "uint32", "uint32"),
    "llm.c": (llm_c, None, "uint16"),
    "llm.c, Llama 3": (lambda path: llm_c(path, 20240801, 7, "<u4"), None, "uint32"),
    "Megatron": (megatron, None, "int32"),
}
"""What writes each format, the dtype that the caller must name, and that of the IDs."""


# The 14 inputs

WHOLE = "\n".join(TEXTS)


def tar_file(folder: Path) -> Path:
    """A shard of WebDataset."""
    with tarfile.open(folder / "000000.tar", "w") as packed:
        for number, text in enumerate(TEXTS):
            member = tarfile.TarInfo(f"{number:06}.txt")
            member.size = len(text.encode())
            packed.addfile(member, io.BytesIO(text.encode()))
    return folder / "000000.tar"


def rows(name: str):
    def write(folder: Path) -> Path:
        WRITERS[name](folder / name, TEXTS)
        return folder / name

    return write


def raw(name: str, content: Callable[[], bytes]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content())
        return folder / name

    return write


INPUTS: dict[str, tuple[Callable[[Path], Path], str | list[str]]] = {
    "txt": (raw("t.txt", WHOLE.encode), [WHOLE]),
    "txt.gz": (raw("t.txt.gz", lambda: gzip.compress(WHOLE.encode())), [WHOLE]),
    "txt.zst": (raw("t.txt.zst", lambda: zstandard(WHOLE)), [WHOLE]),
    "jsonl": (rows("t.jsonl"), TEXTS),
    "jsonl.gz": (rows("t.jsonl.gz"), TEXTS),
    "datasets": (rows("set"), TEXTS),
    "tar": (tar_file, "is a tar archive"),
    "parquet": (rows("t.parquet"), TEXTS),
    "Arrow": (rows("t.arrow"), TEXTS),
    "npy": (numpy_file, TEXTS),
    "nanoGPT's bin": (nanogpt, "is a binary file"),
    "llm.c's bin": (llm_c, TEXTS),
    "OLMo's raw npy": (olmo, "is a binary file"),
    "Megatron's pair": (megatron, TEXTS),
}
"""The 14 inputs: what writes each, and its documents, or what the error says of it."""
