"""What the files beside a vocabulary state."""

import json

import pytest

from embedlayer.core.errors import TokenizerError
from embedlayer.tokenization.tokenizer_config import read_tokenizer_config


def test_a_folder_without_files_states_nothing(tmp_path) -> None:
    stated = read_tokenizer_config(tmp_path)
    assert (stated.kind, stated.model_type, stated.added) == (None, None, {})
    assert stated.role("eos_token", {"eos_token": "</s>"}) == "</s>"


def test_the_class_is_named_or_follows_from_the_model_type(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert read_tokenizer_config(tmp_path).kind == "Qwen2"
    assert not read_tokenizer_config(tmp_path).names_class
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    assert read_tokenizer_config(tmp_path).kind == "Qwen2"
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "CLIPTokenizerFast"}')
    assert read_tokenizer_config(tmp_path).kind == "CLIP"
    assert read_tokenizer_config(tmp_path).names_class


def test_added_tokens_of_the_configuration_replace_the_older_files(tmp_path) -> None:
    (tmp_path / "added_tokens.json").write_text('{"<old>": 7, "<pad>": 8}')
    (tmp_path / "special_tokens_map.json").write_text('{"pad_token": "<pad>", "eos_token": {"content": "<e>"}}')
    stated = read_tokenizer_config(tmp_path)
    assert {number: token.content for number, token in stated.added.items()} == {7: "<old>", 8: "<pad>"}
    assert [token.special for token in stated.added.values()] == [False, True]
    assert stated.role("eos_token", {}) == "<e>"
    added = {"9": {"content": "<new>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added, "eos_token": None}))
    stated = read_tokenizer_config(tmp_path)
    assert [(number, token.content) for number, token in stated.added.items()] == [(9, "<new>")]
    assert stated.role("eos_token", {"eos_token": "</s>"}) is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"added_tokens_decoder": {"x": {"content": "<new>"}}}, "has an added token 'x'"),
        ({"eos_token": 3}, "has a special token 3, which is neither a text nor has content"),
    ],
)
def test_damaged_tokens_are_refused(tmp_path, settings, words) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(TokenizerError, match=words):
        read_tokenizer_config(tmp_path)
