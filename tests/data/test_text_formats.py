"""Files that are not plain text: each entry that reads texts refuses them, with a command that converts."""

import bz2
import gzip
import io
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import run
from corpus_inputs import WRITERS, lines, zstandard
from covering import cases, looped, some

import embedlayer as el
from embedlayer import TextError, TokenCorpus
from embedlayer.analysis import evaluate_text
from embedlayer.core.errors import EmbedLayerWarning
from embedlayer.data import build_in_shards, build_shard, find_text_files, read_text_chunks
from embedlayer.vocab import suggest_tokens, used_tokens

TEXTS = ['A dog said "naïve".', "Two cats\tnap."]
PLAIN = "".join(f"{text}\n" for text in TEXTS)
BYTES = el.train_tokenizer((), "byte")
IDS = list(PLAIN.encode())
LINES = lines(TEXTS).replace(b"\n\n", b"\n")


def archive(make: str) -> bytes:
    """Return a tar or zip archive with one text file."""
    file = io.BytesIO()
    if make == "zip":
        with zipfile.ZipFile(file, "w") as packed:
            packed.writestr("texts/t.txt", PLAIN)
    else:
        with tarfile.open(fileobj=file, mode="w:") as packed:
            member = tarfile.TarInfo("texts/t.txt")
            member.size = len(PLAIN.encode())
            packed.addfile(member, io.BytesIO(PLAIN.encode()))
    return file.getvalue()


def array() -> bytes:
    file = io.BytesIO()
    np.save(file, np.array(IDS))
    return file.getvalue()


KINDS: dict[str, tuple[str, Callable[[], bytes] | None]] = {
    "t.jsonl": ("JSON lines", None),
    "json": ("JSON lines", lambda: LINES * 2000),
    "one.ndjson": ("JSON lines", lambda: LINES.splitlines()[0]),
    "t.jsonl.gz": ("JSON lines", None),
    "t.parquet": ("a Parquet file", None),
    "t.arrow": ("an Arrow file", None),
    "data-00000-of-00001.arrow": ("an Arrow stream", None),
    "zstandard": ("compressed by Zstandard", lambda: zstandard(PLAIN)),
    "gzipped": ("compressed by gzip", lambda: gzip.compress(PLAIN.encode())),
    "t.bz2": ("compressed by bzip2", lambda: bz2.compress(PLAIN.encode())),
    "t.jsonl.xz": ("compressed by xz", lambda: lzma.compress(LINES)),
    "it's a.zip": ("a zip archive", lambda: archive("zip")),
    "t.tar": ("a tar archive", lambda: archive("tar")),
    "t.tar.gz": ("a tar archive", lambda: gzip.compress(archive("tar"))),
    "ids.npy": ("a NumPy array", array),
    "ids.npy.gz": ("a NumPy array", lambda: gzip.compress(array())),
    "train.bin": ("a binary file", lambda: np.array(IDS, "<u2").tobytes()),
    "utf16": ("If it is text in another encoding", lambda: PLAIN.encode("utf-16-le")),
    "bom.txt": ("is not UTF-8 text: byte 0xFF at offset 0", lambda: PLAIN.encode("utf-16")),
    "utf32.txt": ("is not UTF-8 text: byte 0xFF at offset 0", lambda: PLAIN.encode("utf-32")),
    "latin.txt": ("is not UTF-8 text: byte 0xEF at offset", lambda: PLAIN.encode("latin-1")),
    "zeros.txt": ("a zero byte at offset 70000", lambda: b"a" * 70_000 + b"\0" + PLAIN.encode()),
    "photo": ("is not UTF-8 text: byte 0x89 at offset 0. It is a binary file", lambda: b"\x89PNG\r\n\x1a\n"),
    "set": ("a data set that the library datasets saved", None),
    "sets": ("a data set that the library datasets saved", None),
}
"""What the error calls each kind, by file name, and its content unless it is one of `WRITERS`."""

EXPECTED = {"json": PLAIN * 2000, "one.ndjson": f"{TEXTS[0]}\n", "zeros.txt": "a" * 70_000 + PLAIN}
SEEN = {"sets", "ids.npy.gz", "t.jsonl.gz", "one.ndjson", "t.jsonl.xz"}
"""Kinds whose commands are those of others, with more of them or another input."""
DECODED = {"ids.npy", "ids.npy.gz", "train.bin"}
"""`print` ends the decoded text with one more line break."""


def make(name: str, folder: Path) -> Path:
    content = KINDS[name][1]
    if content is None:
        WRITERS[name](folder / name, TEXTS)
    else:
        (folder / name).write_bytes(content())
    return folder / name


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    el.tokenization.save_tokenizer(BYTES, tmp_path / "tokenizer.json")
    model = el.DecoderLM(el.TokenEmbedding(257, 8), "rotary", num_layers=1, num_heads=2)
    model.save_pretrained(tmp_path / "model", tokenizer=BYTES)
    return tmp_path


def command(*words):
    def refused(file: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
        paths = {"FILE": file, "MODEL": folder / "model", "OUT": folder / "out", "BYTES": folder / "tokenizer.json"}
        assert run(*(paths.get(word, word) for word in words)) == 2
        _, name, said = capsys.readouterr().err.partition("TextError: ")  # a library may print where it is imported
        return name + said

    return refused


def call(function):
    def refused(file: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
        with pytest.raises(TextError) as caught:
            function(file, folder)
        return f"TextError: {caught.value}"

    return refused


ENTRIES = {
    "find_text_files": call(lambda file, folder: find_text_files([file])),
    "read_text_chunks": call(lambda file, folder: list(read_text_chunks(file))),
    "TokenCorpus.build": call(lambda file, folder: TokenCorpus.build([file], BYTES, folder / "out")),
    "build_in_shards": call(lambda file, folder: build_in_shards([file], BYTES, folder / "out", shards=2, workers=1)),
    "build_shard": call(lambda file, folder: build_shard([file], BYTES, folder / "out", shards=2, only=1)),
    "create_dataloader": call(lambda file, folder: el.create_dataloader(file, BYTES, max_length=4)),
    "used_tokens": call(lambda file, folder: used_tokens(BYTES, file)),
    "suggest_tokens": call(lambda file, folder: suggest_tokens(BYTES, file)),
    "evaluate_text": call(lambda file, folder: evaluate_text(el.open_model(folder / "model"), file, window=4)),
    "train": command("train", "FILE", "-o", "OUT"),
    "corpus build": command("corpus", "build", "FILE", "-o", "OUT", "--tokenizer", "BYTES"),
    "corpus build, trained tokenizer": command("corpus", "build", "FILE", "-o", "OUT", "--vocab-size", "300"),
    "evaluate": command("evaluate", "MODEL", "--text", "FILE"),
    "compress": command("compress", "MODEL", "--compare", "--text", "FILE"),
    "plan": command("plan", "--checkpoint", "MODEL", "--text", "FILE"),
    "vocab trim": command("vocab", "trim", "MODEL", "FILE", "-o", "OUT"),
    "vocab suggest": command("vocab", "suggest", "MODEL", "FILE"),
    "vocab add --train-on": command("vocab", "add", "MODEL", "dogs", "-o", "OUT", "--train-on", "FILE"),
    "vocab add --terms": command("vocab", "add", "MODEL", "-o", "OUT", "--terms", "FILE"),
}
"""What reads texts, as a function that returns the error."""
OF_ROWS = {"json", "one.ndjson", *WRITERS}
"""Kinds of which a corpus reads the rows: tests/data/readers/test_rows.py."""
OF_IDS = {"ids.npy"}
"""Kinds that commands which build a corpus map: tests/data/readers/test_token_files.py."""
CORPORA = {"TokenCorpus.build", "build_in_shards", "build_shard", "train", "corpus build"}
"""Entries that build a corpus."""
ONE_FILE = {"read_text_chunks", "create_dataloader", "evaluate_text", "evaluate", "compress", "vocab add --terms"}
"""Entries that take no folder."""


@cases("entry, name", ENTRIES, KINDS)
def test_each_entry_refuses_each_kind_by_its_name_and_writes_nothing(entry, name, folder, capsys) -> None:
    of_corpora = entry.partition(",")[0] in CORPORA
    if (name in ("set", "sets") and entry in ONE_FILE) or (of_corpora and name in OF_ROWS | OF_IDS):
        return
    file = make(name, folder)
    said = ENTRIES[entry](file, folder, capsys)
    assert said.startswith(f"TextError: {file} ")
    assert KINDS[name][0] in said
    out = folder / "out"
    assert not out.exists() or entry in ("train", "build_in_shards") or not any(out.iterdir())


@pytest.mark.parametrize("name", some(set(KINDS) - SEEN - {"photo"}, [name for name in KINDS if name != "photo"]))
def test_the_command_of_the_error_makes_plain_text(name, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    el.tokenization.save_tokenizer(BYTES, tmp_path / "tokenizer.json")
    source = make(name, tmp_path)
    for number in range(3):
        try:
            (file,) = find_text_files([source])
            text = "".join(read_text_chunks(file))
            break
        except TextError as error:
            line = str(error).rpartition("\n")[2]
        tool = line.split()[0]
        if shutil.which(tool) is None and tool != "python":
            pytest.skip(f"{tool} is not installed")
        line = line.replace("NEW_", f"NEW{number}_")
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        subprocess.run(line, shell=True, check=True, env={**os.environ, "PATH": path})
        source = next(tmp_path.glob(f"NEW{number}_*"))
    assert text == EXPECTED.get(name, PLAIN) + "\n" * (name in DECODED)


FROM_STDIN = [
    ("read_text_chunks", LINES, "JSON lines"),
    ("read_text_chunks", gzip.compress(LINES), "compressed by gzip"),
    *((entry, np.array(IDS, "<u2").tobytes(), "") for entry in ("read_text_chunks", "train", "corpus build")),
    *((entry, array(), "embedlayer corpus build FILE -o DIR --tokenizer") for entry in ("TokenCorpus.build", "train")),
]


@looped("entry, content, words", FROM_STDIN)
def test_standard_input_is_refused_by_its_name(entry, content, words, folder, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))
    said = ENTRIES[entry](Path("-"), folder, capsys)
    assert said.startswith("TextError: Standard input ")
    assert words in said


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("notebook.json", json.dumps({"cells": [{"source": ["print()"]}]}, indent=1)),
        ("minified.json", json.dumps({"a": {"b": "c" * 70_000}})),
        ("minified", json.dumps([{"a": 1}, {"b": 2}])),
        ("README.md", '```\n{"a": 1}\n{"b": 2}\n```\n'),
        ("code.py", '{"a": 1}\n{"b": 2}\nprint("both")\n'),
        ("set.js", "{ a }\n{ b }\n"),
        ("numbers", "1\n2\n3\n"),
        ("BZh9.md", "BZh and PAR1 and PK are magic.\n"),
        ("PAR1", "PAR1\nARROW1\n"),
    ],
)
def test_text_that_looks_like_another_kind_is_read(name, text, tmp_path) -> None:
    (tmp_path / name).write_text(text)
    assert "".join(read_text_chunks(*find_text_files([tmp_path / name]))) == text
    assert find_text_files([tmp_path]) == [tmp_path / name]


def test_json_lines_in_a_file_named_txt_are_read_with_a_warning(tmp_path) -> None:
    (tmp_path / "t.txt").write_bytes(LINES)
    with pytest.warns(EmbedLayerWarning, match=r"t\.txt has JSON lines"):
        assert "".join(read_text_chunks(tmp_path / "t.txt")) == LINES.decode()


DAMAGED_LINES = [
    (LINES * 40 + b'{"text": "cut\n' + LINES, "line 81"),
    (b"\n\n" + LINES.replace(b"}", b""), "line 3"),
    (b"\xef\xbb\xbf" + LINES + b"[1]\n", "line 3"),
    (LINES + b'{"\\u00e9": "cut', "JSON lines"),
    (b'{"messages": [], "id": 1}\n', r"\(messages, id\)"),
]


@looped("raw, words, name", [(*case, name) for case in DAMAGED_LINES for name in ("t.jsonl", "t.ndjson.gz")])
def test_a_damaged_line_of_json_lines_is_named_and_never_read_as_text(raw, words, name, tmp_path) -> None:
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    with pytest.raises(TextError, match=f"{name}.*{words}"):
        find_text_files([tmp_path / name])
    with pytest.raises(TextError):
        find_text_files([tmp_path])


def test_a_folder_is_refused_if_most_of_it_is_of_other_formats_and_else_read_with_a_warning(tmp_path) -> None:
    (tmp_path / "README.md").write_text("A data set.")
    (tmp_path / "train.jsonl").write_bytes(LINES)
    (tmp_path / "photo.png").write_bytes(bytes(range(256)))
    with pytest.raises(TextError):
        find_text_files([tmp_path])
    (tmp_path / "book.txt").write_text(PLAIN * 9)
    with pytest.warns(EmbedLayerWarning, match=r"1 files in .* are left out.*train\.jsonl is a file of JSON lines"):
        assert find_text_files([tmp_path]) == [tmp_path / "README.md", tmp_path / "book.txt"]


def test_a_corpus_is_no_text(tmp_path) -> None:
    (tmp_path / "t.txt").write_text(PLAIN)
    TokenCorpus.build([tmp_path / "t.txt"], BYTES, tmp_path / "built")
    build_in_shards([tmp_path / "t.txt"], BYTES, tmp_path / "shards", shards=1, workers=1)
    for name in ("built", "shards"):
        with pytest.raises(TextError, match=f"embedlayer train {tmp_path / name} -o RUN"):
            find_text_files([tmp_path / name])
