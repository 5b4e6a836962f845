"""What a row stands for, and which tokens are spelling variants of each other."""

import pytest
import torch
from tokenizer_kinds import tokenizer_of_file

import embedlayer as el
from embedlayer.analysis import TokenVectors, token_kinds
from embedlayer.analysis.tokenizer_fit import spelling_variants
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


WORDS = "class Class CLASS the class of the Class, klasse; CLASS class-room 7 77 " * 40


def variants_by_entry(tokenizer) -> dict[str, set[str]]:
    texts = TokenVectors(torch.zeros(table_size(tokenizer), 1), tokenizer).index_to_key
    rows = [text or "" for text in texts]
    special = [row for row, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    found = spelling_variants(rows, tokenizer, special=special)
    entry = tokenizer.id_to_token
    return {entry(row): {entry(other) for other in others} for row, others in found.items()}


def test_byte_level_bpe_varies_in_space_and_case() -> None:
    found = variants_by_entry(train_tokenizer(WORDS, vocab_size=420))
    assert {"Class", "ĠClass", "CLASS", "ĠCLASS"} & found["Ġclass"] >= {"ĠClass", "ĠCLASS"}
    assert "a" in found["A"]
    assert "Ġ;" not in found
    assert "<|endoftext|>" not in found
    assert not {"Ġ", "Ċ"} & found.keys()


def test_sentencepiece_varies_in_its_mark_and_has_byte_tokens(shared_data) -> None:
    found = variants_by_entry(tokenizer_of_file(shared_data / "tokenizers" / "llama2-tokenizer.model"))
    assert found["▁class"] == {"class", "Class", "▁Class"}
    assert {"A", "<0x61>", "<0x41>"} <= found["a"]
    assert not {"<s>", "</s>", "<unk>", "▁"} & found.keys()


def test_wordpiece_varies_in_its_prefix(tmp_path) -> None:
    pieces = "[PAD] [UNK] [CLS] [SEP] [MASK] ## class ##class Class # ##s S ＣＬＡＳＳ straße STRASSE".split()
    (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n")
    found = variants_by_entry(load_tokenizer(tmp_path / "vocab.txt"))
    assert found["class"] == {"##class", "Class", "ＣＬＡＳＳ"}
    assert found["##s"] == {"S"}
    assert found["straße"] == {"STRASSE"}
    assert not {"##", "#", "[PAD]", "[CLS]"} & found.keys()


def test_being_a_variant_is_mutual_and_only_one_marker_is_removed() -> None:
    texts = ["dog", " dog", "  dog", " Dog", "", "", " ", "  ", "\n", " \n", "dogs", "(", " ("]
    found = spelling_variants(texts, special=[3])
    assert found == {0: [1], 1: [0], 11: [12], 12: [11]}
    for token, others in found.items():
        assert all(token in found[other] for other in others)
    for marked in (" dog", "▁dog", "##dog"):  # a file of vectors may write any marker
        assert spelling_variants(["dog", "cat", marked]) == {0: [2], 2: [0]}
