"""The IDs of a tokenizer: the rows that they need, and the token that ends a text."""

import json

import pytest
from tokenizer_kinds import tokenizer_of_file

from embedlayer import TokenCorpus, load_tokenizer, train_tokenizer
from embedlayer.tokenization import table_size


@pytest.mark.parametrize(
    ("file", "token"),
    [
        ("gpt2-encoder.json", "<|endoftext|>"),
        ("t5-small.tokenizer.json", "</s>"),
        ("bert-base-cased-vocab.txt", "[SEP]"),
    ],
)
def test_the_end_of_a_text_is_between_two_texts(shared_data, tmp_path, file, token) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("dogs")
    tokenizer = tokenizer_of_file(shared_data / "tokenizers" / file)
    corpus = TokenCorpus.build([tmp_path / "a.txt", tmp_path / "b.txt"], tokenizer, tmp_path / "corpus")
    assert corpus.ids[corpus.documents[1] - 1] == tokenizer.token_to_id(token)


def test_a_table_needs_a_row_up_to_the_highest_id(tmp_path) -> None:
    content = json.loads(train_tokenizer((), "byte").to_str())
    content["model"]["vocab"]["Zz"] = 999
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert table_size(load_tokenizer(tmp_path)) == 1000
