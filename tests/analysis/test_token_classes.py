"""What sort of thing a row stands for."""

import pytest

import embedlayer as el
from embedlayer.analysis.token_classes import token_kinds
from embedlayer.tokenization.ids import table_size
from embedlayer.tokenization.read import load_tokenizer
from embedlayer.tokenization.train import train_tokenizer


def test_the_kinds_of_a_byte_level_vocabulary() -> None:
    tokenizer = train_tokenizer("the cats, 42 cats; the dogs\n\n " * 40, vocab_size=300)
    kinds = token_kinds(tokenizer, 302)
    named = {tokenizer.id_to_token(row): kind for row, kind in enumerate(kinds)}
    assert named["<|endoftext|>"] == "special"
    assert named["Ġcats"] == named["Ġthe"] == "word"
    assert named["the"] == "part"
    assert named["Ċ"] == "space"
    assert named["Ġ42"] == named["7"] == "number"
    assert named[";"] == "punctuation"
    assert named["æ"] == "byte"
    assert kinds[tokenizer.get_vocab_size() :] == ["no token"] * (302 - tokenizer.get_vocab_size())


@pytest.mark.parametrize("kind", ["wordpiece", "unigram", "word", "byte"])
def test_every_kind_of_tokenizer_is_told_apart(kind) -> None:
    tokenizer = train_tokenizer("the cats, 42 cats; the dogs naïve 日本 " * 40, kind, vocab_size=320)
    kinds = token_kinds(tokenizer, table_size(tokenizer))
    assert {"byte": "byte"}.get(kind, "word") in kinds
    assert ("part" in kinds) == (kind in ("wordpiece", "unigram"))
    assert "unreachable" not in kinds or kind == "unigram"


@pytest.mark.parametrize("other", ["'s", ".com", "2nd", "\u00a0dog", "-"])
def test_one_word_of_a_vector_file_does_not_change_the_kind_of_the_others(tmp_path, other) -> None:
    words = ["king", "queen", other]
    (tmp_path / "vectors.txt").write_text("".join(f"{word} 0.5 {place}\n" for place, word in enumerate(words)))
    opened = el.open_model(tmp_path / "vectors.txt")
    kinds = token_kinds(opened.require_tokenizer(), 3)
    assert kinds == ["word", "word", "punctuation" if other == "-" else "word"]


def test_words_of_byte_level_bpe_begin_with_white_space() -> None:
    tokenizer = train_tokenizer("it's the dog's 2nd .com\tthe " * 40, vocab_size=300)
    named = dict(zip((tokenizer.id_to_token(row) for row in range(300)), token_kinds(tokenizer, 300), strict=True))
    assert named["Ġthe"] == "word"
    assert named["'s"] == "part"


def test_what_bert_splits_apart_is_unreachable(tmp_path) -> None:
    pieces = "[PAD] [UNK] [CLS] [SEP] [MASK] [unused7] 三 ##三 d dog ##ing 1994 ##7 ##A".split()
    (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n")
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    tokenizer = load_tokenizer(tmp_path / "vocab.txt")
    named = dict(zip(pieces, token_kinds(tokenizer, len(pieces)), strict=True))
    assert named["[unused7]"] == named["##三"] == named["##A"] == "unreachable"
    assert named["三"] == named["dog"] == "word"
    assert named["##ing"] == "part"
    assert named["[CLS]"] == named["[UNK]"] == "special"
    assert named["1994"] == named["##7"] == "number"
