"""The corpus: cutting that no tokenizer notices, files of every sort, and a folder that is whole or not there."""

import gzip
import io
import json
import sys
import warnings
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from embedlayer.data.corpus import TokenCorpus
from embedlayer.data.text_chunks import _CUTS, encode_chunks, read_text_chunks, split_text
from embedlayer.data.text_files import find_text_files
from embedlayer.errors import CheckpointError, EmbedLayerWarning, FileError, SizeError, TextError
from embedlayer.tokenization.bpe_files import END_OF_TEXT
from embedlayer.tokenization.read import load_tokenizer
from embedlayer.tokenization.tokenizer_calls import fingerprint
from embedlayer.tokenization.train import train_tokenizer

BYTES = train_tokenizer((), "byte")
SENTENCES = "Dogs love dogs, as they say.  But do cats?\n\n\tNaïve question: «yes»!\r\n" * 60
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def gpt4_style(text: str) -> Tokenizer:
    """Byte-level BPE behind the pattern of cl100k, which glues line breaks to the marks before them."""
    from tokenizers import trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(CL100K), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def in_pieces(tokenizer: Tokenizer, path: Path) -> list[int]:
    pieces = list(read_text_chunks(path, tokenizer=tokenizer))
    assert len(pieces) > 5
    return [token for _, ids in encode_chunks(pieces, tokenizer) for token in ids.tolist()]


@pytest.mark.parametrize("text", ["the-verdict.txt", "tinyshakespeare.txt", "enwiki-plain.txt"])
@pytest.mark.parametrize(
    "name",
    [
        "gpt2-encoder.json",
        "phi-3-mini.tokenizer.json",
        "t5-small.tokenizer.json",
        "bert-base-cased-vocab.txt",
    ],
)
def test_pieces_give_the_ids_of_the_whole_text_for_published_tokenizers(shared_data, tmp_path, name, text):
    real = (shared_data / "text" / text).read_bytes()[:100_000].decode(errors="ignore")
    (tmp_path / "text").write_bytes(real.encode())
    tokenizer = load_tokenizer(shared_data / "tokenizers" / name)
    assert in_pieces(tokenizer, tmp_path / "text") == whole(tokenizer, real)


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram", "word", "byte", "gpt4"])
@pytest.mark.parametrize(
    "text",
    [
        SENTENCES,
        "def f(x):\n    if x:\n\n        return [x**2,\n                x]\n" * 100,
        "犬は犬が好きだと言われている。猫はどうだろうか？\n" * 200,
        "one\ntwo\nthree\n\n\n" * 400,
    ],
    ids=["prose", "code", "no spaces", "lines"],
)
def test_pieces_give_the_ids_of_the_whole_text_for_tokenizers_trained_here(tmp_path, kind, text):
    (tmp_path / "text").write_bytes(text.encode())
    tokenizer = gpt4_style(text) if kind == "gpt4" else train_tokenizer(text, kind, vocab_size=500)
    assert in_pieces(tokenizer, tmp_path / "text") == whole(tokenizer, text)


@given(text=st.text(st.sampled_from("ab é犬\n\t.,'\r 🙂"), max_size=4000))
@settings(max_examples=25, deadline=None)
def test_pieces_put_together_are_the_text_and_its_ids(text):
    corpus = text.encode()
    pieces = list(read_pieces_of(corpus, BYTES))
    assert "".join(pieces) == text
    assert [token for _, ids in encode_chunks(pieces, BYTES) for token in ids.tolist()] == list(corpus)


def read_pieces_of(content: bytes, tokenizer: object = None) -> list[str]:
    """`read_text_chunks` of standard input."""
    kept, sys.stdin = sys.stdin, SimpleNamespace(buffer=io.BytesIO(content))
    try:
        return list(read_text_chunks("-", tokenizer=tokenizer))
    finally:
        sys.stdin = kept


def test_line_ends_are_kept_and_a_byte_order_mark_is_not():
    text = "a\r\nb\rc\n"
    assert "".join(read_pieces_of(b"\xef\xbb\xbf" + text.encode())) == text
    assert read_pieces_of(b"\xef\xbb\xbf") == []


def test_a_character_across_two_reads_stays_whole(tmp_path):
    text = "x" + "é犬🙂" * 40_000
    (tmp_path / "text").write_bytes(text.encode())
    assert "".join(read_text_chunks(tmp_path / "text")) == text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"caf\xe9 au lait", r"byte 0xE9 at offset 3\..*iconv -f ISO-8859-1"),
        (b"\xef\xbb\xbfab\xff", "byte 0xFF at offset 5"),
        (b"a" * 70_000 + b"\xc3", "byte 0xC3 at offset 70000"),
        ("dogs".encode("utf-16"), "offset 0.*iconv -f UTF-16"),
    ],
)
def test_text_that_is_not_utf8_names_file_offset_and_remedy(tmp_path, content, words):
    (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(TextError, match=f"(?s)bad.txt is not UTF-8 text: .*{words}"):
        list(read_text_chunks(tmp_path / "bad.txt"))


@given(st.text(st.sampled_from("ab é犬\n.,_"), min_size=700, max_size=4000))
@settings(max_examples=25, deadline=None)
def test_a_chunk_ends_at_the_last_place_of_the_best_kind_in_its_second_half(text):
    rest, done = text, 0
    for chunk in split_text([text], None):
        wanted = min(max(done // 64, 512), 16384)
        if len(rest) >= wanted + 128:
            kinds = [[match.start() for match in kind.finditer(rest, wanted // 2, wanted + 1)] for kind in _CUTS]
            best = [places[-1] for places in kinds if places]
            assert best[:1] in ([], [len(chunk)])  # without one, a longer chunk is tried
        rest, done = rest[len(chunk) :], done + len(chunk)


def test_an_endless_word_is_cut_with_a_warning(monkeypatch):
    monkeypatch.setattr("embedlayer.data.text_chunks._ENDLESS_CHARS", 2048)
    with pytest.warns(EmbedLayerWarning, match="No safe position for a cut"):
        pieces = read_pieces_of(b"a" * 9000)
    assert "".join(pieces) == "a" * 9000


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


@pytest.mark.parametrize(
    ("paths", "error", "words"),
    [
        (["none.txt"], FileError, "no file or folder"),
        ([], TextError, "No text was passed"),
        (["empty"], TextError, "has no text files"),
    ],
)
def test_what_cannot_be_found_is_named(tmp_path, paths, error, words):
    (tmp_path / "empty").mkdir()
    with pytest.raises(error, match=words):
        find_text_files([tmp_path / path for path in paths])


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
    assert corpus.tokenizer_fingerprint == fingerprint(BYTES)
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


@pytest.mark.parametrize(("highest", "dtype"), [(65_535, np.uint16), (65_536, np.uint32)])
def test_ids_take_two_bytes_where_they_fit(tmp_path, highest, dtype):
    content = json.loads(BYTES.to_str())
    content["model"]["vocab"]["Zz"] = highest
    (tmp_path / "t.txt").write_text("Hello")
    corpus = TokenCorpus.build([tmp_path / "t.txt"], Tokenizer.from_str(json.dumps(content)), tmp_path / "corpus")
    assert corpus.ids.dtype == dtype
    assert corpus.ids.tolist() == list(b"Hello")


def test_a_tokenizer_set_to_truncate_and_pad_does_neither():
    limited = Tokenizer.from_str(BYTES.to_str())
    limited.enable_truncation(2)
    limited.enable_padding(length=100)
    assert TokenCorpus.from_text("Hello", limited).ids.tolist() == list(b"Hello")


def test_an_empty_file_among_others_is_left_out_with_a_warning(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "t.txt").write_text("Hello")
    with pytest.warns(EmbedLayerWarning, match="empty.txt is left out"):
        corpus = TokenCorpus.build([tmp_path / "empty.txt", tmp_path / "t.txt"], BYTES, tmp_path / "corpus")
    assert corpus.documents.tolist() == [0]


def test_no_text_at_all_is_an_error_and_leaves_nothing(tmp_path):
    (tmp_path / "empty.txt").touch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EmbedLayerWarning)
        with pytest.raises(TextError, match=r"There is no text in .*empty\.txt"):
            TokenCorpus.build([tmp_path / "empty.txt"], BYTES, tmp_path / "corpus")
        with pytest.raises(TextError, match="There is no text in the text"):
            TokenCorpus.from_text("", BYTES)
    assert [path.name for path in tmp_path.iterdir()] == ["empty.txt"]


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(TextError, match="half of a surrogate pair"):
        TokenCorpus.from_text("a\ud800b", BYTES)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("older", [False, True])
def test_an_interrupted_build_leaves_what_was_there_before(tmp_path, interruption, older):
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


def test_a_full_disk_is_told_as_such_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "t.txt").write_text("Hello")
    monkeypatch.setattr(np, "save", full)
    with pytest.raises(FileError, match=r"Cannot write the folder .*No space left"):
        TokenCorpus.build([tmp_path / "t.txt"], BYTES, tmp_path / "corpus")
    assert [path.name for path in tmp_path.iterdir()] == ["t.txt"]


def test_a_folder_with_something_else_is_never_replaced(tmp_path):
    (tmp_path / "t.txt").write_text("Hello")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "dog.png").touch()
    for path, words in ((tmp_path / "photos", "other files than a corpus"), (tmp_path / "t.txt", "is a file")):
        with pytest.raises(FileError, match=words):
            TokenCorpus.build([tmp_path / "t.txt"], BYTES, path)
    assert (tmp_path / "photos" / "dog.png").exists()


def test_a_damaged_gzip_file_is_told_as_an_unreadable_source(tmp_path):
    (tmp_path / "t.gz").write_bytes(gzip.compress(SENTENCES.encode())[:-20])
    with pytest.raises(FileError, match=r"Cannot read .*t\.gz"):
        TokenCorpus.build([tmp_path / "t.gz"], BYTES, tmp_path / "corpus")


# Opening


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def restate(**facts: object):
    def change(path: Path) -> None:
        path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))

    return change


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("ids.bin", truncate),
        ("ids.bin", Path.unlink),
        ("documents.npy", truncate),
        ("documents.npy", lambda path: np.save(path, np.array([0, 10**9]))),
        ("documents.npy", lambda path: np.save(path, np.array([0, {}], dtype=object), allow_pickle=True)),
        ("blocks.npy", Path.unlink),
        ("blocks.npy", lambda path: np.save(path, np.array([[5, 5]]))),
        ("blocks.npy", lambda path: np.save(path, np.array([5]))),
        ("index.json", truncate),
        ("index.json", restate(dtype="float32")),
        ("index.json", restate(dtype="uint32")),
        ("index.json", restate(num_tokens=3)),
        ("index.json", restate(num_bytes=3)),
        ("index.json", restate(num_tokens=None)),
        ("index.json", restate(format_version=2)),
    ],
)
def test_a_damaged_corpus_is_refused(tmp_path, file, damage):
    (tmp_path / "t.txt").write_bytes(SENTENCES.encode())
    TokenCorpus.build([tmp_path / "t.txt"], BYTES, tmp_path / "corpus")
    damage(tmp_path / "corpus" / file)
    with pytest.raises(CheckpointError, match="corpus"):
        TokenCorpus.open(tmp_path / "corpus")


def test_a_corpus_that_is_not_there_is_a_file_error(tmp_path):
    with pytest.raises(FileError, match="No such file"):
        TokenCorpus.open(tmp_path / "none")


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


@pytest.mark.parametrize("fraction", [0.05, 0.1, 0.2])
def test_a_short_text_is_split_close_to_the_wanted_place(fraction):
    text = SENTENCES[:20_000] if len(SENTENCES) >= 20_000 else SENTENCES * 5
    corpus = TokenCorpus.from_text(text, BYTES)
    _, validation = corpus.split(fraction)
    assert abs(len(validation) / len(corpus) - fraction) < 0.04


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


@pytest.mark.parametrize(
    ("text", "fraction", "error", "words"),
    [
        ("Hello", 0.1, TextError, "too small for a validation"),
        (SENTENCES, 0.0, SizeError, "between 0 and 1"),
        (SENTENCES, 1.0, SizeError, "between 0 and 1"),
    ],
)
def test_a_split_with_an_empty_part_is_refused(text, fraction, error, words):
    with pytest.raises(error, match=words):
        TokenCorpus.from_text(text, BYTES).split(fraction)


def test_an_end_of_text_mark_in_the_text_is_read_as_one():
    assert 256 in np.asarray(TokenCorpus.from_text(f"one{END_OF_TEXT}two", BYTES).ids)
