"""Compressed token IDs beside a restatement of the normal form with Python's `unicodedata`."""

import re
import unicodedata

import pytest
import torch
from tokenizers import Tokenizer, decoders, models

from embedlayer.tokenization import compressed_tokens
from embedlayer.tokenization.ids import table_size
from embedlayer.tokenization.train import train_tokenizer

TEXT = """The THE the  café Café cafe CAFÉ naïve ﬁsh fish ½ １２ Ⅷ straße STRASSE İstanbul
\tAn otter, an Otter;\r\n\r\n the river's 17 otters 多 Ⓐ a A å Å 中文"""


def normal_form(text: str) -> str:
    folded = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    folded = "".join(letter for letter in folded if unicodedata.category(letter) != "Mn")
    folded = re.sub("[ \t\r\n]+", " ", "".join(letter.lower() for letter in folded))
    return " " if folded == " " else folded.strip()


def in_plain_python(tokenizer: Tokenizer) -> list[int]:
    keys = []
    for token_id in range(table_size(tokenizer)):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        keys.append(tokenizer.id_to_token(token_id) if "\ufffd" in text else normal_form(text) or text)
    first = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return [first[key] for key in keys]


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram", "word", "byte"])
def test_tokens_of_one_normal_form_have_one_id(kind) -> None:
    tokenizer = train_tokenizer(TEXT * 3, kind, vocab_size=400 if kind == "bpe" else 90)
    found = compressed_tokens(tokenizer)
    assert found.dtype == torch.int64
    assert found.tolist() == in_plain_python(tokenizer)
    assert found.max() + 1 == len(found.unique()) < len(found)


def test_white_space_and_bytes_that_are_no_text_stay_apart() -> None:
    entries = [" ", "\t", "\n\n", "", "\u3000", "A ", " a", "\ufffd", "x\ufffd", "\u0301"]
    tokenizer = Tokenizer(models.WordLevel({entry: number for number, entry in enumerate(entries)}, unk_token=""))
    tokenizer.decoder = decoders.Fuse()
    assert compressed_tokens(tokenizer).tolist() == [0, 0, 0, 1, 0, 2, 2, 3, 4, 5]


def test_a_tokenizer_of_transformers_is_read() -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = train_tokenizer(TEXT, "word")
    assert torch.equal(
        compressed_tokens(PreTrainedTokenizerFast(tokenizer_object=tokenizer)), compressed_tokens(tokenizer)
    )
