"""Tokenizers in the metadata of GGUF files, beside the tokenizers that the metadata was written from."""

import json

import numpy as np
import pytest
from gguf_models import TOKENIZERS, write_file
from tokenizer_kinds import ENGLISH, LANGUAGES
from tokenizers import AddedToken, Tokenizer, models

from embedlayer.core.errors import TokenizerError
from embedlayer.io.gguf_files import read_gguf
from embedlayer.tokenization.gguf_tokenizers import tokenizer_metadata, tokenizer_of
from embedlayer.tokenization.read import load_tokenizer
from embedlayer.vocab.new_tokens import AddedMerge
from embedlayer.vocab.tokenizer_edit import edit_tokenizer

TEXTS = [*LANGUAGES, *ENGLISH.splitlines()[:2], "  two  spaces\n\n and\tlines ", "DON'T I'LL 12345 a_b-c/d  "]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_metadata_describe_the_same_tokenizer_after_reading_and_writing(tmp_path, kind) -> None:
    original = TOKENIZERS[kind]()
    path = write_file(tmp_path / "model.gguf", tokenizer=(kind, original), dtype="F16")
    found = load_tokenizer(path)
    for text in TEXTS:
        ids = found.encode(text, add_special_tokens=False).ids
        assert ids == original.encode(text, add_special_tokens=False).ids
        if kind in ("gpt2", "llama"):
            assert found.decode(ids) == original.decode(ids)
    values = read_gguf(path).metadata
    written = tokenizer_metadata(found, values, len(values["tokenizer.ggml.tokens"]), path)
    assert written == {key: values[key] for key in written}
    assert "tokenizer.ggml.tokens" in written
    begins = {"llama": "<s>", "bert": "[CLS]"}.get(kind)
    assert found.encode("dog").tokens[0] == (begins or found.encode("dog", add_special_tokens=False).tokens[0])


def test_a_pre_tokenizer_that_is_not_known_is_refused_by_name(tmp_path) -> None:
    path = write_file(tmp_path / "model.gguf", tokenizer=("gpt2", TOKENIZERS["gpt2"](), "poro-chat"), dtype="F16")
    with pytest.raises(TokenizerError):
        load_tokenizer(path)


def test_a_tokenizer_that_the_metadata_cannot_describe_is_refused(tmp_path) -> None:
    path = write_file(tmp_path / "model.gguf", tokenizer=("gpt2", TOKENIZERS["gpt2"]()), dtype="F16")
    values = read_gguf(path).metadata
    with pytest.raises(TokenizerError):
        tokenizer_metadata(Tokenizer(models.WordLevel({"a": 0}, "a")), values, 1, path)
    other = load_tokenizer(path)
    other.add_tokens([AddedToken("dogs", single_word=True)])
    with pytest.raises(TokenizerError):
        tokenizer_metadata(other, values, other.get_vocab_size(), path)
    del values["tokenizer.ggml.tokens"]
    assert json.loads(other.to_str())["model"]["type"] == "BPE"


@pytest.mark.parametrize("lowest", [None, -1e9], ids=["as trained", "as in LLaMA-2"])
def test_scores_of_the_file_stay_and_those_of_new_merges_come_after_them_in_float32(tmp_path, lowest) -> None:
    path = write_file(tmp_path / "model.gguf", tokenizer=("llama", TOKENIZERS["llama"]()), dtype="F16")
    values = read_gguf(path).metadata
    old = values["tokenizer.ggml.scores"]
    values["tokenizer.ggml.scores"] = old = [lowest if lowest and score == min(old) else score for score in old]
    edited = edit_tokenizer(tokenizer_of(values, path), add=[AddedMerge("2", "2"), AddedMerge("22", "2")]).tokenizer
    written = tokenizer_metadata(edited, values, len(old) + 2, path)["tokenizer.ggml.scores"]
    assert written[:-2] == old
    scores = np.array(written, np.float32)
    assert min(old) > scores[-2] > scores[-1]
