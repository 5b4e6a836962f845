"""BPE tokenizers from their two files. tests/laws/test_stated_tokenizers.py compares them with the original classes."""

import json

import pytest

from embedlayer.core.errors import TokenizerError
from embedlayer.tokenization.read import load_tokenizer
from embedlayer.tokenization.train import train_tokenizer


def test_a_whisper_tokenizer_puts_its_tokens_around_a_text(tmp_path) -> None:
    model = json.loads(train_tokenizer("the cat " * 9, "bpe", vocab_size=270).to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    (tmp_path / "config.json").write_text('{"model_type": "whisper"}')
    with pytest.raises(TokenizerError):
        load_tokenizer(tmp_path)
    size = len(model["vocab"])
    (tmp_path / "added_tokens.json").write_text(
        json.dumps({"<|startoftranscript|>": size, "<|notimestamps|>": size + 1})
    )
    ids = load_tokenizer(tmp_path).encode("the").ids
    assert ids[:2] == [size, size + 1]
    assert ids[-1] == model["vocab"]["<|endoftext|>"]
    (tmp_path / "tokenizer_config.json").write_text('{"language": "german"}')
    with pytest.raises(TokenizerError):
        load_tokenizer(tmp_path)
