"""The corpus: files of every sort, and a folder that is whole or not there."""

import gzip
import json
import os
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from covering import looped
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from embedlayer.core.errors import CheckpointError, FileError, SizeError, TextError
from embedlayer.data.corpus import TokenCorpus
from embedlayer.data.readers.sources import find_text_files
from embedlayer.data.sharded_build import build_in_shards
from embedlayer.tokenization.train import train_tokenizer

BYTES = train_tokenizer((), "byte")
SENTENCES = "Dogs love dogs, as they say.  But do cats?\n\n\tNaïve question: «yes»!\r\n" * 60


# Finding


@pytest.fixture
def folder(tmp_path):
    for name in ("b.txt", "a.md", ".hidden.txt", "deep/c.txt", ".git/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"The text in {name}.")
    (tmp_path / "e.txt.gz").write_bytes(gzip.compress(b"The text in e."))
    (tmp_path / "f.png").write_bytes(b"\x00\x01")
    (tmp_path / "g.gz").write_bytes(gzip.compress(b"\x00\x01"))
    return tmp_path


def test_a_folder_stands_for_its_visible_texts_in_order(folder):
    assert find_text_files([folder, "-"]) == [*(folder / n for n in ("a.md", "b.txt", "deep/c.txt", "e.txt.gz")), "-"]


def test_folders_behind_links_are_read_once(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "h.txt").write_text("The text in h.")
    (folder / "linked").symlink_to(elsewhere)
    (folder / "again").symlink_to(folder / "deep")
    (folder / "deep" / "up").symlink_to(folder)
    names = ("a.md", "b.txt", "deep/c.txt", "e.txt.gz", "linked/h.txt")
    assert find_text_files([folder]) == [folder / name for name in names]


def test_a_folder_that_cannot_be_listed_is_an_error(folder, monkeypatch):
    def scandir(path):
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    listed = os.scandir
    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(FileError, match="Cannot read the folder .*deep: Permission denied"):
        find_text_files([folder])


def test_what_cannot_be_found_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    for paths, error in (([tmp_path / "none.txt"], FileError), ([], TextError), ([tmp_path / "empty"], TextError)):
        with pytest.raises(error):
            find_text_files(paths)


# Building


def test_a_built_corpus_holds_documents_apart_and_opens_the_same(folder, tmp_path):
    seen: list[tuple[int, int]] = []
    corpus = TokenCorpus.build(
        [folder], BYTES, tmp_path / "new" / "corpus", on_progress=lambda a, b: seen.append((a, b))
    )
    texts = [f"The text in {name}.".encode() for name in ("a.md", "b.txt", "deep/c.txt", "e")]
    assert corpus.ids.tolist() == [token for text in texts for token in [256, *text]][1:]
    assert [int(corpus.ids[start - 1]) for start in corpus.documents[1:]] == [256, 256, 256]
    assert corpus.num_bytes == sum(map(len, texts))
    assert len(corpus) == corpus.num_tokens == corpus.num_bytes + 3
    assert isinstance(corpus.ids, np.memmap)
    assert corpus.tokenizer_fingerprint == TokenCorpus.from_text("a", BYTES).tokenizer_fingerprint
    assert seen[-1] == (seen[-1][1],) * 2
    again = TokenCorpus.open(tmp_path / "new" / "corpus")
    assert np.array_equal(again.ids, corpus.ids)
    assert np.array_equal(again.documents, corpus.documents)


def test_from_text_gives_what_build_gives(tmp_path):
    (tmp_path / "t.txt").write_bytes(SENTENCES.encode())
    built = TokenCorpus.build([tmp_path / "t.txt"], BYTES, tmp_path / "corpus")
    text = TokenCorpus.from_text(SENTENCES, BYTES)
    assert np.array_equal(built.ids, text.ids)
    assert np.array_equal(built.blocks, text.blocks)
    assert (built.vocab_size, built.num_bytes) == (text.vocab_size, text.num_bytes) == (257, len(SENTENCES.encode()))


@looped("highest, dtype", [(65_535, np.uint16), (65_536, np.uint32)])
def test_ids_take_two_bytes_where_they_fit(highest, dtype, tmp_path):
    content = json.loads(BYTES.to_str())
    content["model"]["vocab"]["Zz"] = highest
    (tmp_path / "t.txt").write_text("Hello")
    corpus = TokenCorpus.build([tmp_path / "t.txt"], Tokenizer.from_str(json.dumps(content)), tmp_path / "corpus")
    assert corpus.ids.dtype == dtype
    assert corpus.ids.tolist() == list(b"Hello")


@pytest.mark.filterwarnings("ignore:.*left out")
def test_no_text_at_all_is_an_error_and_leaves_nothing(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "t.gz").write_bytes(gzip.compress(SENTENCES.encode())[:-20])
    for source, error in (("empty.txt", TextError), ("t.gz", FileError)):
        with pytest.raises(error, match=source):
            TokenCorpus.build([tmp_path / source], BYTES, tmp_path / "corpus")
    for text in ("", "a\ud800b"):
        with pytest.raises(TextError):
            TokenCorpus.from_text(text, BYTES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.txt", "t.gz"]


@looped("interruption, older", [(KeyboardInterrupt, False), (MemoryError, True)])
def test_an_interrupted_build_leaves_what_was_there_before(interruption, older, tmp_path):
    (tmp_path / "t.txt").write_bytes(SENTENCES.encode())
    if older:
        TokenCorpus.build([tmp_path / "t.txt"], BYTES, tmp_path / "corpus")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def interrupt(done: int, total: int) -> None:
        raise interruption

    with pytest.raises(interruption):
        TokenCorpus.build([tmp_path / "t.txt"], BYTES, tmp_path / "corpus", on_progress=interrupt)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert (tmp_path / "corpus").exists() is older


def test_a_folder_with_something_else_is_never_replaced(tmp_path):
    (tmp_path / "t.txt").write_text("Hello")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "dog.png").touch()
    build_in_shards([tmp_path / "t.txt"], BYTES, tmp_path / "shards", shards=2, workers=1)
    before = set(tmp_path.rglob("*"))
    for name in ("photos", "shards", "t.txt"):
        with pytest.raises(FileError):
            TokenCorpus.build([tmp_path / "t.txt"], BYTES, tmp_path / name)
    assert set(tmp_path.rglob("*")) == before


# Opening


def restate(**facts: object):
    def change(path: Path) -> None:
        path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))

    return change


PARTS = ("One dog. ", "Two cats. ", "Three mice. ")


@pytest.fixture
def sharded(tmp_path):
    for number, text in enumerate(PARTS):
        (tmp_path / f"{number}.txt").write_text(text * 30)
    sources = [tmp_path / f"{number}.txt" for number in range(3)]
    build_in_shards(sources, BYTES, tmp_path / "sharded", shards=4, workers=1)
    return tmp_path / "sharded"


DAMAGES: list[tuple[str, Callable[[Path], object]]] = [
    ("documents.npy", lambda path: np.save(path, np.array([0, 10**9]))),
    ("documents.npy", lambda path: np.save(path, np.array([0, {}], dtype=object), allow_pickle=True)),
    ("blocks.npy", lambda path: np.save(path, np.array([[5, 5]]))),
    ("blocks.npy", lambda path: np.save(path, np.array([5]))),
    ("index.json", restate(dtype="uint32")),
    ("index.json", restate(num_tokens=3)),
    ("index.json", restate(num_bytes=3)),
]


DAMAGED_SHARDS: list[tuple[str, Callable[[Path], object]]] = [
    ("corpus.json", restate(tokenizer="other")),
    ("shard-00002/index.json", restate(separators=2)),
    ("shard-00002/index.json", restate(separators=0)),
    ("shard-00002/sources.npy", lambda path: np.save(path, np.array([2, 1]))),
]


def test_a_damaged_corpus_is_refused(sharded, tmp_path) -> None:
    """Damage that fails in any other way than by these numbers: tests/laws/test_damage.py."""
    (tmp_path / "t.txt").write_bytes(SENTENCES.encode())
    TokenCorpus.build([tmp_path / "t.txt"], BYTES, tmp_path / "whole")
    damages = [(tmp_path / "whole", *each) for each in DAMAGES] + [(sharded, *each) for each in DAMAGED_SHARDS]
    for number, (whole, file, damage) in enumerate(damages):
        corpus = shutil.copytree(whole, tmp_path / str(number))
        damage(corpus / file)
        with pytest.raises(CheckpointError):
            TokenCorpus.open(corpus)
    with pytest.raises(FileError, match="No such file"):
        TokenCorpus.open(tmp_path / "none")


def test_each_part_begins_with_a_mark_that_its_reader_keeps_or_leaves_out(sharded):
    assert [int(np.fromfile(ids, "<u2")[0]) for ids in sorted(sharded.glob("*/ids.bin"))] == [256] * 4
    read = TokenCorpus.open(sharded)
    assert bytes(token % 256 for token in read.ids.tolist()) == b"\0".join(text.encode() * 30 for text in PARTS)
    assert [int(read.ids[start - 1]) for start in read.documents[1:]] == [256, 256]


def test_missing_parts_are_numbered(sharded):
    for number in (1, 3):
        shutil.rmtree(sharded / f"shard-0000{number}")
    with pytest.raises(CheckpointError, match=r"shards \[1, 3\] of 4 are missing"):
        TokenCorpus.open(sharded)


def test_more_parts_than_files_may_be_open_are_told_as_such(sharded, monkeypatch):
    def exhausted(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(np, "memmap", exhausted)
    with pytest.raises(FileError, match="Too many open files.*ulimit -n"):
        TokenCorpus.open(sharded)


# Splitting


@given(fraction=st.floats(0.01, 0.99))
@settings(max_examples=25, deadline=None)
def test_the_parts_of_a_split_are_the_whole_and_know_their_bytes(fraction):
    corpus = TokenCorpus.from_text(SENTENCES, BYTES)
    train, validation = corpus.split(fraction)
    assert np.array_equal(np.concatenate([train.ids, validation.ids]), corpus.ids)
    assert np.shares_memory(train.ids, corpus.ids)
    for part in (train, validation):
        assert part.num_bytes == len(part.ids) > 0
        assert part.documents[0] == 0


def test_a_short_text_is_split_close_to_the_wanted_place():
    corpus = TokenCorpus.from_text(SENTENCES * 5, BYTES)
    for fraction in (0.05, 0.1, 0.2):
        assert abs(len(corpus.split(fraction)[1]) / len(corpus) - fraction) < 0.04


def test_the_documents_of_a_split_stay_where_they_were(tmp_path):
    for n in range(6):
        (tmp_path / f"{n}.txt").write_text(f"Document number {n}. " * (30 + 70 * n))
    corpus = TokenCorpus.build([tmp_path], BYTES, tmp_path / "corpus")
    starts = set(corpus.documents.tolist())
    for fraction in np.linspace(0.05, 0.95, 19):
        train, validation = corpus.split(float(fraction))
        shifted = [start + len(train) for start in validation.documents.tolist()]
        assert set(train.documents.tolist()) | set(shifted) - {len(train)} | (starts & {len(train)}) == starts
        assert all(a < b for a, b in pairwise(shifted))
        assert train.num_bytes + validation.num_bytes == corpus.num_bytes


def test_a_split_with_an_empty_part_is_refused():
    for text, fraction, error in (("Hello", 0.1, TextError), (SENTENCES, 0.0, SizeError), (SENTENCES, 1.0, SizeError)):
        with pytest.raises(error):
            TokenCorpus.from_text(text, BYTES).split(fraction)


def test_an_end_of_text_mark_in_the_text_is_read_as_one():
    assert 256 in np.asarray(TokenCorpus.from_text("one<|endoftext|>two", BYTES).ids)
