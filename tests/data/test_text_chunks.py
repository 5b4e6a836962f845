"""Cutting that no tokenizer notices, and text read block by block."""

import io
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from covering import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from embedlayer.core.errors import EmbedLayerWarning
from embedlayer.data.text_chunks import encode_chunks, read_text_chunks
from embedlayer.tokenization.read import load_tokenizer
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


@cases(
    "name, text",
    ["gpt2-encoder.json", "phi-3-mini.tokenizer.json", "t5-small.tokenizer.json", "bert-base-cased-vocab.txt"],
    ["the-verdict.txt", "tinyshakespeare.txt", "enwiki-plain.txt"],
)
def test_pieces_give_the_ids_of_the_whole_text_for_published_tokenizers(shared_data, tmp_path, name, text):
    real = (shared_data / "text" / text).read_bytes()[:40_000].decode(errors="ignore")
    (tmp_path / "text").write_bytes(real.encode())
    tokenizer = load_tokenizer(shared_data / "tokenizers" / name)
    assert in_pieces(tokenizer, tmp_path / "text") == whole(tokenizer, real)


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram", "word", "byte", "gpt4"])
def test_pieces_give_the_ids_of_the_whole_text_for_tokenizers_trained_here(tmp_path, kind):
    for text in (
        SENTENCES,
        "def f(x):\n    if x:\n\n        return [x**2,\n                x]\n" * 100,
        "犬は犬が好きだと言われている。猫はどうだろうか？\n" * 200,
        "one\ntwo\nthree\n\n\n" * 400,
    ):
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


def test_an_endless_word_is_cut_with_a_warning():
    with pytest.warns(EmbedLayerWarning, match="No safe position for a cut"):
        pieces = read_pieces_of(b"a" * 1_200_000)
    assert "".join(pieces) == "a" * 1_200_000
    assert len(pieces) > 1
