"""llama2.c's tokenizer file."""

import struct
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from embedlayer import FileError, TokenCorpus, TokenEmbedding, TokenizerError, load_tokenizer
from embedlayer.opening import OpenedModel
from embedlayer.tokenization import save_tokenizer, table_size

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
HEAD = [(0.0, b"<unk>"), (0.0, b"\n<s>\n"), (0.0, b"\n</s>\n"), *((0.0, byte.encode()) for byte in BYTES)]
WORDS = [b" t", b"he", b" the", b"th", b" h", b"ab", b"bab", b" a", b"abab", b"\xc3\xa9", b"\xc3\xa9\xc3\xa9"]
LETTERS = [letter.encode() for letter in "theab \n"]


def written(path, entries=None):
    entries = entries or [*HEAD, *((-float(n), piece) for n, piece in enumerate([*WORDS, *LETTERS]))]
    body = b"".join(struct.pack("<fi", score, len(piece)) + piece for score, piece in entries)
    path.write_bytes(struct.pack("<i", max(len(piece) for _, piece in entries)) + body)
    return path


def encode_by_the_book(path, text):
    """The rule as llama2.c states it: single characters, then the best pair of neighbours, over and over."""
    raw, at = path.read_bytes(), 4
    vocabulary: dict[str, tuple[int, float]] = {}
    while at < len(raw):
        score, length = struct.unpack_from("<fi", raw, at)
        vocabulary[raw[at + 8 : at + 8 + length].decode()] = (len(vocabulary), score)
        at += 8 + length
    pieces = list(vocabulary)
    ids = [1]
    for character in (" " + text) if text else "":
        found = vocabulary.get(character)
        ids += [found[0]] if found else [byte + 3 for byte in character.encode()]
    while True:
        pairs = [(i, vocabulary.get(pieces[a] + pieces[b])) for i, (a, b) in enumerate(pairwise(ids))]
        known = [(-found[1], i, found[0]) for i, found in pairs if found]
        if not known:
            return ids
        _, i, token = min(known)
        ids[i : i + 2] = [token]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return written(tmp_path_factory.mktemp("llama2c") / "tokenizer.bin")


@settings(max_examples=150, deadline=None)
@given(text=st.text(alphabet="theab é\n日<s>", max_size=24))
def test_ids_follow_the_rule_and_decoding_gives_the_text_back(small, text) -> None:
    tokenizer = load_tokenizer(small)
    if "<s>" not in text:
        assert tokenizer.encode(text).ids == encode_by_the_book(small, text)
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_it_is_found_in_a_folder_and_saved_as_json(small, tmp_path) -> None:
    tokenizer = load_tokenizer(small.parent)
    save_tokenizer(tokenizer, tmp_path / "tokenizer.json")
    again = load_tokenizer(tmp_path)
    assert isinstance(again, Tokenizer)
    assert again.encode("the heb  é").ids == tokenizer.encode("the heb  é").ids
    texts = OpenedModel("table", TokenEmbedding(table_size(tokenizer), 1), tokenizer=tokenizer).token_texts
    assert (texts[259], texts[3 + 0xE2]) == (" t", "<0xE2>")
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("the")
    corpus = TokenCorpus.build([tmp_path / "a.txt", tmp_path / "b.txt"], tokenizer, tmp_path / "corpus")
    assert corpus.ids[corpus.documents[1] - 1] == 2


def test_the_file_of_stories260k_follows_the_rule_too(shared_data) -> None:
    file = shared_data / "models" / "tok512.bin"
    tokenizer = load_tokenizer(file)
    story = (shared_data / "models" / "stories260K.md").read_text()
    for text in (story[:600], "Once upon a time", "naïve 日本 \t  x", "", " ", "aaaaaa......!!!!", "<0x41>"):
        assert tokenizer.encode(text).ids == encode_by_the_book(file, text)
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


DAMAGED = [
    b"",
    b"\x07\x00\x00",
    b"PK\x03\x04 a pickle",
    struct.pack("<ifi", 7, 0.0, -1),
    struct.pack("<ifi", 2**31 - 1, 0.0, 2**31 - 1) + b"short",
    struct.pack("<ifi", 7, float("nan"), 1) + b"a",
    struct.pack("<ifi", 7, 0.0, 1) + b"\xff",
    struct.pack("<ifi", 7, 0.0, 5) + b"<unk>",
]


def test_other_and_damaged_files_are_refused(tmp_path) -> None:
    for content in DAMAGED:
        (tmp_path / "tokenizer.bin").write_bytes(content)
        with pytest.raises(TokenizerError):
            load_tokenizer(tmp_path / "tokenizer.bin")
    with pytest.raises(TokenizerError):
        load_tokenizer(written(tmp_path / "tok1.bin", [*HEAD, (0.0, b"a"), (0.0, b"a")]))
    with pytest.raises(FileError):
        load_tokenizer(tmp_path / "tok2.bin")
