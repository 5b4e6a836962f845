"""What the entries of tokenizers stand for."""

import pytest
from tokenizer_kinds import bytes_of, tokenizer_of_file
from tokenizers import Tokenizer

from embedlayer import TokenEmbedding
from embedlayer.core.errors import VocabularyError
from embedlayer.opening import OpenedModel
from embedlayer.tokenization import table_size
from embedlayer.tokenization.bytes import TokenBytes
from embedlayer.tokenization.train import train_tokenizer

TEXT = "I love small dogs, I love cats. Dogs love naps; naïve cats don't. " * 10


MEANINGS = [
    ("bpe", "Ġlove", b" love"),
    ("bpe", "Ã", b"\xc3"),
    ("byte", "Ċ", b"\n"),
    ("wordpiece", "love", b" love"),
    ("wordpiece", "##s", b"s"),
    ("wordpiece", ",", b","),
    ("unigram", "▁love", b" love"),
    ("word", "love", b" love"),
    ("word", ".", b"."),
    ("word", "<|endoftext|>", b"<|endoftext|>"),
]


def test_entries_of_every_convention_stand_for_bytes() -> None:
    for kind, entry, meaning in MEANINGS:
        pieces = TokenBytes(train_tokenizer(TEXT, kind, vocab_size=320))
        token_id = pieces.vocabulary[entry]
        assert pieces.readings(token_id)[0] == meaning
        assert pieces.find(entry) == pieces.find(token_id) == token_id
    letters = TokenBytes(train_tokenizer((), "byte"))
    assert [letters.readings(byte)[0] for byte in range(256)] == [bytes([byte]) for byte in range(256)]


def test_sentencepiece_bytes_stand_for_themselves_and_go_behind_ordinary_entries(shared_data) -> None:
    pieces = bytes_of(tokenizer_of_file(shared_data / "tokenizers/phi-3-mini.tokenizer.json"))
    line_feed, letter = pieces.vocabulary["<0x0A>"], pieces.vocabulary["A"]
    assert pieces.readings(line_feed) == (b"\n",)
    assert pieces.readings(pieces.vocabulary["<0x41>"]) == (b"A",)
    assert pieces.by_bytes[b"\n"] == line_feed
    assert pieces.by_bytes[b"A"] == letter
    assert pieces.find("<|user|>") == 32010


def test_a_token_is_found_by_its_text_or_the_error_says_how_it_is_read() -> None:
    pieces = TokenBytes(train_tokenizer(TEXT, vocab_size=320))
    assert pieces.find(" love") == pieces.vocabulary["Ġlove"]
    with pytest.raises(VocabularyError):
        pieces.find("love")
    with pytest.raises(VocabularyError):
        pieces.find(4000)
    with pytest.raises(VocabularyError):
        pieces.find(-1)


@pytest.mark.parametrize(
    "name",
    [
        "tokenizers/gpt2-encoder.json",
        "tokenizers/phi-3-mini.tokenizer.json",
        "tokenizers/t5-small.tokenizer.json",
        "tokenizers/bert-base-cased-vocab.txt",
        "models/tok512.bin",
    ],
)
def test_a_text_is_written_as_a_real_tokenizer_writes_it_inside_a_sentence(shared_data, name) -> None:
    tokenizer = tokenizer_of_file(shared_data / name)
    tokens = bytes_of(tokenizer)
    before = tokenizer.encode("See", add_special_tokens=False).ids
    for token in (" photosynthesis", " Timothy", " naïveté"):
        inside = tokenizer.encode("See" + token, add_special_tokens=False).ids
        assert [*before, *tokens.encode(token.encode())] == [i for i in inside if i not in tokens.special]
    ids = tokens.encode(b"tions")
    assert "".join(tokenizer.id_to_token(i) or "" for i in ids) in ("tions", "t##ions")


def test_bytes_that_are_no_text_are_written_one_by_one() -> None:
    pieces = TokenBytes(train_tokenizer((), kind="byte"))
    assert pieces.encode(b"\xe2\x80") == (0xE2, 0x80)
    assert TokenBytes(train_tokenizer(TEXT, "word")).encode(b"\xe2\x80") == ()


SHOWN = [
    ("gpt2-encoder.json", "Ġthe", " the"),
    ("gpt2-encoder.json", "Ċ", "\n"),
    ("gpt2-encoder.json", "æĹ", "<0xE6><0x97>"),
    ("gpt2-encoder.json", "Ã©", "é"),
    ("gpt2-encoder.json", "<|endoftext|>", "<|endoftext|>"),
    ("phi-3-mini.tokenizer.json", "▁the", " the"),
    ("phi-3-mini.tokenizer.json", "<0x0A>", "\n"),
    ("phi-3-mini.tokenizer.json", "<0xE2>", "<0xE2>"),
    ("phi-3-mini.tokenizer.json", "<|assistant|>", "<|assistant|>"),
    ("t5-small.tokenizer.json", "▁the", " the"),
    ("bert-base-cased-vocab.txt", "##ing", "##ing"),
]


def texts_of(tokenizer: Tokenizer) -> list[str]:
    """The text of each token, as it is shown."""
    return OpenedModel("table", TokenEmbedding(table_size(tokenizer), 1), tokenizer=tokenizer).token_texts


def test_pieces_are_readable(shared_data) -> None:
    for name in {file for file, _, _ in SHOWN}:
        tokenizer = tokenizer_of_file(shared_data / "tokenizers" / name)
        texts, vocabulary = texts_of(tokenizer), tokenizer.get_vocab()
        for file, token, shown in SHOWN:
            assert file != name or texts[vocabulary[token]] == shown


@pytest.mark.parametrize("kind", ["byte", "bpe", "unigram"])
def test_an_added_token_is_its_own_text(kind) -> None:
    tokenizer = train_tokenizer(["I love dogs, I love cats"] * 9, kind, vocab_size=270)
    tokenizer.add_tokens(added := ["é!", "Ġx", "<0x41>"])
    assert texts_of(tokenizer)[-3:] == added
