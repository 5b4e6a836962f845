"""The IDs of a tokenizer: the rows that they need, and the token that ends a text."""

import json

import pytest
from tokenizer_kinds import tokenizer_of_file

from embedlayer.core.errors import TokenizerError
from embedlayer.tokenization.bpe_files import END_OF_TEXT
from embedlayer.tokenization.ids import end_of_text_id, require_rows, table_size
from embedlayer.tokenization.read import load_tokenizer
from embedlayer.tokenization.train import train_tokenizer


@pytest.mark.parametrize(
    ("file", "token"),
    [("gpt2-encoder.json", END_OF_TEXT), ("t5-small.tokenizer.json", "</s>"), ("bert-base-cased-vocab.txt", "[SEP]")],
)
def test_the_end_of_a_text_is_found(shared_data, file, token):
    tokenizer = tokenizer_of_file(shared_data / "tokenizers" / file)
    assert end_of_text_id(tokenizer) == tokenizer.token_to_id(token)


def test_a_tokenizer_may_have_no_end_of_text():
    assert end_of_text_id(train_tokenizer((), "byte", special_tokens=())) is None


def test_the_size_of_a_table_counts_gaps(tmp_path):
    content = json.loads(train_tokenizer((), "byte").to_str())
    content["model"]["vocab"]["Zz"] = 999
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert table_size(load_tokenizer(tmp_path)) == 1000


def test_a_tokenizer_needs_as_many_rows_as_its_highest_id_says() -> None:
    tokenizer = train_tokenizer((), kind="byte")
    require_rows(tokenizer, 257, "run")
    with pytest.raises(
        TokenizerError, match="tokenizer of run gives IDs up to 256 and the table has 256 rows: 1 tokens have none"
    ):
        require_rows(tokenizer, 256, "run")
