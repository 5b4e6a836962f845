"""Parts on a disk, read as one corpus, and what is said of those that do not belong together."""

import json
import shutil

import numpy as np
import pytest
from covering import looped

from embedlayer.core.errors import CheckpointError, FileError
from embedlayer.data.corpus import TokenCorpus
from embedlayer.data.sharded_build import build_in_shards
from embedlayer.tokenization.train import train_tokenizer

BYTES = train_tokenizer((), "byte")


@pytest.fixture
def texts(tmp_path):
    for name, text in {"a": "One dog. ", "b": "Two cats. ", "c": "Three mice. "}.items():
        (tmp_path / f"{name}.txt").write_text(text * 30)
    return [tmp_path / f"{name}.txt" for name in "abc"]


@pytest.fixture
def corpus(texts, tmp_path):
    build_in_shards(texts, BYTES, tmp_path / "corpus", shards=4, workers=1)
    return tmp_path / "corpus"


def test_each_part_begins_with_a_mark_that_its_reader_keeps_or_leaves_out(corpus, texts):
    assert [int(np.fromfile(ids, "<u2")[0]) for ids in sorted(corpus.glob("*/ids.bin"))] == [256] * 4
    read = TokenCorpus.open(corpus)
    expected = b"\0".join(text.read_bytes() for text in texts)
    assert bytes(token % 256 for token in read.ids.tolist()) == expected
    assert [int(read.ids[start - 1]) for start in read.documents[1:]] == [256, 256]


def test_missing_parts_are_numbered(corpus):
    for number in (1, 3):
        shutil.rmtree(corpus / f"shard-0000{number}")
    with pytest.raises(CheckpointError, match=r"shards \[1, 3\] of 4 are missing"):
        TokenCorpus.open(corpus)


def change(file, **facts):
    file.write_text(json.dumps({**json.loads(file.read_text()), **facts}))


DAMAGES = [
    lambda corpus: change(corpus / "corpus.json", tokenizer="other"),
    lambda corpus: change(corpus / "shard-00002" / "index.json", separators=2),
    lambda corpus: change(corpus / "shard-00002" / "index.json", separators=0),
    lambda corpus: np.save(corpus / "shard-00002" / "sources.npy", np.array([2, 1])),
]


@looped("damage", DAMAGES)
def test_a_damaged_part_is_refused(damage, corpus, tmp_path):
    damaged = shutil.copytree(corpus, tmp_path / "damaged")
    damage(damaged)
    with pytest.raises(CheckpointError):
        TokenCorpus.open(damaged)


def test_more_parts_than_files_may_be_open_are_told_as_such(corpus, monkeypatch):
    def exhausted(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(np, "memmap", exhausted)
    with pytest.raises(FileError, match="Too many open files.*ulimit -n"):
        TokenCorpus.open(corpus)
    monkeypatch.setattr(np, "load", exhausted)
    with pytest.raises(FileError, match="Too many open files.*ulimit -n"):
        TokenCorpus.open(corpus)
