"""Tokenizers in the metadata of GGUF files, beside the tokenizers that the metadata was written from."""

import json

import pytest
from gguf_models import write_file
from tokenizer_kinds import ENGLISH, LANGUAGES, sentencepiece_bpe
from tokenizers import AddedToken, Tokenizer, models, normalizers

from embedlayer.data.gguf_tokenizers import tokenizer_metadata
from embedlayer.data.tokenizer import load_tokenizer, train_tokenizer
from embedlayer.errors import TokenizerError
from embedlayer.io.gguf_files import read_gguf

TEXTS = [*LANGUAGES, *ENGLISH.splitlines()[:2], "  two  spaces\n\n and\tlines ", "DON'T I'LL 12345 a_b-c/d  "]


def unigram() -> Tokenizer:
    """Return a Unigram tokenizer with the rules that GGUF files can state."""
    tokenizer = train_tokenizer(ENGLISH, "unigram", vocab_size=60)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = None
    return tokenizer


def wordpiece() -> Tokenizer:
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    return train_tokenizer(ENGLISH, "wordpiece", vocab_size=120, special_tokens=special)


KINDS = {
    "gpt2": lambda: train_tokenizer(ENGLISH, "bpe", vocab_size=300),
    "llama": sentencepiece_bpe,
    "t5": unigram,
    "bert": wordpiece,
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_metadata_describe_the_same_tokenizer_after_reading_and_writing(tmp_path, kind) -> None:
    original = KINDS[kind]()
    path = write_file(tmp_path / "model.gguf", tokenizer=(kind, original), dtype="F16")
    found = load_tokenizer(path)
    for text in TEXTS:
        ids = found.encode(text, add_special_tokens=False).ids
        assert ids == original.encode(text, add_special_tokens=False).ids
        if kind in ("gpt2", "llama"):
            assert found.decode(ids) == original.decode(ids)
    values = {key: value.value for key, value in read_gguf(path).metadata.items()}
    written = tokenizer_metadata(found, values, len(values["tokenizer.ggml.tokens"]), path)
    assert written == {key: values[key] for key in written}
    assert "tokenizer.ggml.tokens" in written
    begins = {"llama": "<s>", "bert": "[CLS]"}.get(kind)
    assert found.encode("dog").tokens[0] == (begins or found.encode("dog", add_special_tokens=False).tokens[0])


def test_a_pre_tokenizer_that_is_not_known_is_refused_by_name(tmp_path) -> None:
    path = write_file(tmp_path / "model.gguf", tokenizer=("gpt2", KINDS["gpt2"](), "poro-chat"), dtype="F16")
    with pytest.raises(TokenizerError, match="has the pre-tokenizer 'poro-chat', which is not known here"):
        load_tokenizer(path)


def test_a_tokenizer_that_the_metadata_cannot_describe_is_refused(tmp_path) -> None:
    path = write_file(tmp_path / "model.gguf", tokenizer=("gpt2", KINDS["gpt2"]()), dtype="F16")
    values = {key: value.value for key, value in read_gguf(path).metadata.items()}
    with pytest.raises(TokenizerError, match="cannot describe a WordLevel model"):
        tokenizer_metadata(Tokenizer(models.WordLevel({"a": 0}, "a")), values, 1, path)
    other = load_tokenizer(path)
    other.add_tokens([AddedToken("dogs", single_word=True)])
    with pytest.raises(TokenizerError, match="cannot describe this tokenizer: 'adogs bdogs' becomes"):
        tokenizer_metadata(other, values, other.get_vocab_size(), path)
    del values["tokenizer.ggml.tokens"]
    assert json.loads(other.to_str())["model"]["type"] == "BPE"
