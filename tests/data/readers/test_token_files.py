"""Files of token IDs: mapped without a copy, checked, and written back byte for byte."""

import io
import json
import struct
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from commands import run
from corpus_inputs import (
    BYTES,
    CODES,
    END,
    FILES,
    IDS,
    STARTS,
    TEXTS,
    llm_c,
    megatron,
    nanogpt,
    numpy_file,
    olmo,
    raw,
    write_pair,
)
from covering import looped
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

import embedlayer as el
from embedlayer import RunDirectory, TokenCorpus
from embedlayer.core.errors import CheckpointError, FileError, SizeError, TextError, TokenIdError, TokenizerError
from embedlayer.data import TokenWindows, export_token_ids, map_token_files

ID_TYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "int64")
WORDS = el.train_tokenizer("a b c d e f g h i j k l m", "word", vocab_size=30)


def read_pair(path: Path) -> list[list[int]]:
    """The documents of a pair, as `IndexedDataset` of Megatron-LM reads them, in plain Python."""
    raw = path.with_suffix(".idx").read_bytes()
    assert raw[:9] == b"MMIDIDX\x00\x00"
    _, code, sequences, count = struct.unpack_from("<QBQQ", raw, 9)
    lengths = struct.unpack_from(f"<{sequences}i", raw, 34)
    pointers = struct.unpack_from(f"<{sequences}q", raw, 34 + 4 * sequences)
    documents = struct.unpack_from(f"<{count}q", raw, 34 + 12 * sequences)
    assert len(raw) == 34 + 12 * sequences + 8 * count
    dtype = np.dtype(next(name for name, number in CODES.items() if number == code))
    data = path.with_suffix(".bin").read_bytes()
    rows = [np.frombuffer(data, dtype, size, at).tolist() for size, at in zip(lengths, pointers, strict=True)]
    return [[token for row in rows[begin:end] for token in row] for begin, end in pairwise(documents)]


@looped("name", FILES)
def test_ids_are_mapped_from_the_file_with_documents_and_bytes(name, tmp_path) -> None:
    make, dtype, kind = FILES[name]
    file = make(tmp_path)
    corpus = map_token_files([file], BYTES, tmp_path / "corpus", dtype=dtype)
    assert isinstance(corpus.ids, np.memmap)
    assert Path(corpus.ids.filename).resolve() == file.resolve()
    assert corpus.ids.offset == file.stat().st_size - len(IDS) * corpus.ids.dtype.itemsize
    assert corpus.ids.dtype == kind
    assert np.array_equal(corpus.ids, IDS)
    assert corpus.documents.tolist() == STARTS
    assert corpus.num_bytes == len("".join(TEXTS).encode())
    for part in corpus.split(0.3):
        assert part.num_bytes == sum(token < END for token in np.asarray(part.ids).tolist())
    inputs, targets = TokenWindows(TokenCorpus.open(tmp_path / "corpus"), 8, 8)[3]
    assert (inputs.tolist(), targets.tolist()) == (IDS[24:32].tolist(), IDS[25:33].tolist())


def test_several_files_are_one_corpus_in_which_no_document_continues(tmp_path) -> None:
    for number, part in enumerate((IDS[:100], IDS[100:])):
        np.save(tmp_path / f"{number}.npy", part.astype(np.uint16))
    corpus = map_token_files([tmp_path / "0.npy", tmp_path / "1.npy"], BYTES, tmp_path / "corpus")
    assert np.asarray(corpus.ids).tolist() == IDS.tolist()
    assert corpus.documents.tolist() == sorted({*STARTS, 100})
    assert corpus.num_bytes == len("".join(TEXTS).encode())


@given(st.lists(st.integers(250, 256), min_size=1, max_size=60), st.sampled_from(["<u2", "<i8"]))
@settings(max_examples=30, deadline=None)
def test_documents_start_after_separators_and_leading_ones_belong_to_the_first(tmp_path_factory, ids, dtype) -> None:
    folder = tmp_path_factory.mktemp("ids")
    np.save(folder / "ids.npy", np.array(ids, dtype))
    corpus = map_token_files([folder / "ids.npy"], BYTES, folder / "corpus")
    starts = [0]
    for at in range(1, len(ids)):
        if ids[at - 1] == END != ids[at] and any(token != END for token in ids[:at]):
            starts.append(at)
    assert corpus.documents.tolist() == starts
    assert corpus.num_bytes == sum(token != END for token in ids)


# Written


@looped("name, suffixes", [("numpy", [".npy"]), ("Megatron", [".bin", ".idx"])])
def test_what_was_read_is_written_back_byte_for_byte(name, suffixes, tmp_path) -> None:
    file = FILES[name][0](tmp_path)
    map_token_files([file], BYTES, tmp_path / "corpus")
    written = export_token_ids(tmp_path / "corpus", tmp_path / f"again{suffixes[0]}")
    assert written == [tmp_path / f"again{suffix}" for suffix in suffixes]
    for path in written:
        assert path.read_bytes() == file.with_suffix(path.suffix).read_bytes()


def test_a_pair_with_several_sequences_a_document_and_an_empty_one_is_written_back(tmp_path) -> None:
    write_pair(tmp_path / "a", IDS[:10].astype(np.uint16), [2, 3, 0, 5], [0, 2, 3, 4])
    corpus = map_token_files([tmp_path / "a.idx", tmp_path / "a.bin"], BYTES, tmp_path / "corpus")
    assert corpus.documents.tolist() == [0, 5]
    export_token_ids(tmp_path / "corpus", tmp_path / "b.idx")
    assert (tmp_path / "b.idx").read_bytes() == (tmp_path / "a.idx").read_bytes()


@looped("rows", [257, 70_000])
def test_a_corpus_of_texts_is_written_for_numpy_and_for_megatron(rows, tmp_path) -> None:
    content = json.loads(BYTES.to_str())
    if rows > 257:
        content["added_tokens"].append({**content["added_tokens"][0], "id": rows - 1, "content": "<|last|>"})
    tokenizer = Tokenizer.from_str(json.dumps(content))
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number:02}.txt").write_text(text)
    files = sorted(tmp_path.glob("*.txt"))
    TokenCorpus.build(files, tokenizer, tmp_path / "whole")
    el.data.build_in_shards(files, tokenizer, tmp_path / "shards", shards=3, workers=1)
    documents = [[*text.encode(), END] for text in TEXTS]
    documents[-1].pop()
    for name in ("whole", "shards"):
        built = TokenCorpus.open(tmp_path / name)
        export_token_ids(tmp_path / name, tmp_path / f"{name}.npy")
        np.save(tmp_path / "numpy.npy", IDS.astype(built.ids.dtype))
        assert (tmp_path / f"{name}.npy").read_bytes() == (tmp_path / "numpy.npy").read_bytes()
        export_token_ids(tmp_path / name, tmp_path / f"{name}.bin")
        assert read_pair(tmp_path / name) == documents
        again = map_token_files([tmp_path / f"{name}.bin"], tokenizer, tmp_path / f"{name}-again")
        assert again.documents.tolist() == built.documents.tolist()
        assert again.num_bytes == built.num_bytes


def test_export_refuses_what_would_be_lost_and_other_names(tmp_path) -> None:
    map_token_files([numpy_file(tmp_path)], BYTES, tmp_path / "corpus")
    (tmp_path / "out.idx").touch()
    for name, error in (("out.txt", SizeError), ("out.bin", FileError)):
        with pytest.raises(error):
            export_token_ids(tmp_path / "corpus", tmp_path / name)
    assert not (tmp_path / "out.bin").exists()


# Commands


def test_commands_read_and_write_token_files(tmp_path, capsys) -> None:
    el.tokenization.save_tokenizer(BYTES, tmp_path / "tokenizer.json")
    file, pair = nanogpt(tmp_path), megatron(tmp_path)
    named = ("--tokenizer", tmp_path / "tokenizer.json")
    assert run("corpus", "build", file, "-o", tmp_path / "c", *named, "--dtype", "uint16", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "directory": str(tmp_path / "c"),
        "shards": 1,
        "missing": [],
        "tokens": len(IDS),
        "bytes": len("".join(TEXTS).encode()),
        "documents": len(TEXTS),
        "vocab_size": 257,
        "dtype": "uint16",
    }
    small = ("--dim", 8, "--heads", 2, "--layers", 1, "--length", 8, "--steps", 2)
    assert run("train", tmp_path / "c", "-o", tmp_path / "run", *small) == 0
    both = (pair, tmp_path / "text_document.idx")
    words = ("--tokenizer-from", tmp_path / "tokenizer.json", *small)
    assert run("train", *both, "-o", tmp_path / "run2", *words) == 0
    assert np.array_equal(RunDirectory(tmp_path / "run2").open_corpus().ids, IDS)
    assert run("train", "--resume", "-o", tmp_path / "run2") == 0
    texts = tmp_path / "t.txt"
    texts.write_text("".join(TEXTS))
    mixed = ("train", texts, file, "-o", tmp_path / "run3", "--weights", "1,1", "--dtype", "uint16")
    assert run(*mixed, *words) == 0
    assert run("corpus", "export", tmp_path / "c", "-o", tmp_path / "out.bin") == 0
    assert "out.bin and" in capsys.readouterr().out
    assert read_pair(tmp_path / "out.bin") == read_pair(pair)
    for line in (
        ("corpus", "build", file, "-o", tmp_path / "d", "--dtype", "uint16"),
        ("train", file, "-o", tmp_path / "d", "--dtype", "uint16"),
    ):
        assert run(*line) == 2
        assert "TokenizerError: Files of token IDs do not name their tokenizer" in capsys.readouterr().err


# Refused


@looped("name", FILES)
def test_a_file_that_is_truncated_or_has_changed_is_refused(name, tmp_path) -> None:
    make, dtype, _ = FILES[name]
    file = make(tmp_path)
    content = file.read_bytes()
    file.write_bytes(content[:-3])
    with pytest.raises(CheckpointError):
        map_token_files([file], BYTES, tmp_path / "corpus", dtype=dtype)
    file.write_bytes(content)
    map_token_files([file], BYTES, tmp_path / "corpus", dtype=dtype)
    file.write_bytes(content[:-8] + bytes([content[-8] ^ 1]) + content[-7:])
    with pytest.raises(CheckpointError):
        TokenCorpus.open(tmp_path / "corpus")


@pytest.mark.parametrize("mixed", [False, True])
def test_a_corpus_whose_file_is_missing_is_refused_and_never_read_as_text(mixed, tmp_path, capsys) -> None:
    file, corpus = numpy_file(tmp_path), tmp_path / "corpus"
    map_token_files([file], BYTES, corpus)
    file.unlink()
    sources = (corpus, corpus, "--weights", "1,1") if mixed else (corpus,)
    assert run("train", *sources, "-o", tmp_path / "out") == 2
    assert f"{file} is missing" in capsys.readouterr().err
    assert not (tmp_path / "out" / "corpus").exists()
    with pytest.raises(TextError):
        TokenCorpus.build([corpus], BYTES, tmp_path / "text")


def damaged_index(at: int, value: bytes):
    def damage(path: Path) -> Path:
        file = megatron(path)
        index = file.with_suffix(".idx")
        raw = bytearray(index.read_bytes())
        raw[at : at + len(value)] = value
        index.write_bytes(raw)
        return file

    return damage


def with_modes(path: Path) -> Path:
    file = megatron(path)
    with file.with_suffix(".idx").open("ab") as index:
        index.write(bytes(40))
    return file


def alone(suffix: str):
    """One file of a pair, without the other."""

    def write(path: Path) -> Path:
        file = megatron(path)
        (path / "alone").mkdir()
        return file.with_suffix(suffix).rename(path / "alone" / f"text_document{suffix}")

    return write


def array(*values: object, dtype: str | None = None) -> Callable[[Path], Path]:
    content = io.BytesIO()
    np.save(content, np.array(values, dtype))
    return raw("x.npy", content.getvalue)


NOT_READ: list[tuple[Callable[[Path], Path], str | None, type[Exception]]] = [
    (nanogpt, None, TextError),
    (olmo, None, TextError),
    (raw("odd.bin", b"abc".upper), "uint16", CheckpointError),
    (raw("empty.bin", bytes), "uint16", TextError),
    (raw("empty.bin", bytes), None, TextError),
    (partial(llm_c, version=7), None, CheckpointError),
    (partial(llm_c, magic=20240801, dtype="<u4"), None, CheckpointError),
    (alone(".idx"), None, FileError),
    (raw("x.idx", b"no index".upper), None, CheckpointError),
    (raw("text.bin", b"plain text".upper), None, TextError),
    (raw("text.txt", b"plain text".upper), "uint16", SizeError),
    (raw("u1.bin", b"text".upper), "uint8", SizeError),
    (nanogpt, "uint8", SizeError),
    (olmo, "uint16", SizeError),
    (numpy_file, "int32", SizeError),
    (array(0.0, 1.0), None, CheckpointError),
    (array([0, 1], [2, 3]), None, CheckpointError),
    (array(0, 1, dtype=">u2"), None, CheckpointError),
    (array(1, 2, 257), None, TokenIdError),
    (array(1, -100, 7), None, TokenIdError),
    (damaged_index(9, b"\x02"), None, CheckpointError),
    (damaged_index(17, b"\x07"), None, CheckpointError),
    (damaged_index(34, b"\x01"), None, CheckpointError),
    (damaged_index(-8, b"\x03"), None, CheckpointError),
    (with_modes, None, CheckpointError),
]


@looped("make, dtype, error", NOT_READ)
def test_what_is_no_file_of_token_ids_is_refused(make, dtype, error, tmp_path) -> None:
    file = make(tmp_path)
    with pytest.raises(error):
        map_token_files([file], BYTES, tmp_path / "corpus", dtype=dtype)
    assert not (tmp_path / "corpus").exists()


@looped("written, tokenizer", ID_TYPES, [BYTES, WORDS], pairs=["written, tokenizer"])
def test_numbers_without_a_header_are_the_ids_that_were_written_or_refused(written, tokenizer, tmp_path) -> None:
    ids = np.arange(4000) % 11
    ids.astype(written).tofile(tmp_path / "ids.bin")
    for requested in ID_TYPES:
        try:
            corpus = map_token_files([tmp_path / "ids.bin"], tokenizer, tmp_path / requested, dtype=requested)
        except (CheckpointError, SizeError, TokenIdError):
            assert requested != written or (tokenizer is BYTES and np.dtype(written).itemsize == 1)
            assert not (tmp_path / requested).exists()
        else:
            assert np.array_equal(corpus.ids, ids)


def test_token_files_and_texts_are_not_mixed(tmp_path) -> None:
    (tmp_path / "t.txt").write_text("text")
    np.save(tmp_path / "32.npy", IDS.astype(np.int32))
    file = numpy_file(tmp_path)
    with pytest.raises(TextError):
        map_token_files([file, tmp_path / "t.txt"], BYTES, tmp_path / "c")
    with pytest.raises(SizeError):
        map_token_files([file, tmp_path / "32.npy"], BYTES, tmp_path / "c")
    with pytest.raises(TokenizerError):
        map_token_files([file], None, tmp_path / "c")
