"""Which tokens are spelling variants of each other."""

import torch
from tokenizer_kinds import tokenizer_of_file

from embedlayer.analysis.tokenizer_fit import spelling_variants
from embedlayer.analysis.vectors import TokenVectors
from embedlayer.tokenization.ids import table_size
from embedlayer.tokenization.read import load_tokenizer
from embedlayer.tokenization.train import train_tokenizer

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
