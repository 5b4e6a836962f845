"""Tokenizers with other vocabularies."""

from typing import get_args

import pytest

from embedlayer.text.tokenizer import TokenizerKind, table_size, train_tokenizer
from embedlayer.vocab.tokenizer_edit import edit_tokenizer

TEXT = (
    "In the beginning there was a small dog. The small dog loved other small dogs, and they loved it back!\n"
    "Don't ask why (nobody knows): dogs love, lovingly, and naïve beginners begin again; 12 dogs in 2024.\n"
) * 5
KINDS = get_args(TokenizerKind)
TRAINED = {kind: train_tokenizer(TEXT, kind, vocab_size=400) for kind in KINDS}
REAL = {
    "gpt2": "tokenizers/gpt2-encoder.json",
    "phi-3": "tokenizers/phi-3-mini.tokenizer.json",
    "t5": "tokenizers/t5-small.tokenizer.json",
    "bert": "tokenizers/bert-base-cased-vocab.txt",
    "llama2c": "models/tok512.bin",
}


@pytest.mark.parametrize("kind", KINDS)
def test_adding_then_removing_gives_the_same_file_byte_for_byte(kind) -> None:
    added = edit_tokenizer(TRAINED[kind], add=["zebra", " zebras", "<tool>"], special=["<|call|>"])
    assert added.sources == (*range(table_size(TRAINED[kind])), None, None, None, None)
    back = edit_tokenizer(added.tokenizer, remove=["zebra", " zebras", "<tool>", "<|call|>"])
    assert back.tokenizer.to_str() == TRAINED[kind].to_str()
