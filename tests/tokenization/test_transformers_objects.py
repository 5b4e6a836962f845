"""Tokenizer objects of transformers whose class replaced the steps of their file are recognised."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

import embedlayer as el
from embedlayer.tokenization import TokenBytes

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

TEXTS = ["hello world 1234 and 123 45", "don't stop, 1234 and 12 are numbers"] * 50


def byte_level(*before: Any) -> Tokenizer:
    """Train byte-level BPE whose merges contain pairs of digits."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet))
    steps = (*before, pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps])
    return tokenizer


def opened(tokenizer: Tokenizer, folder: Path | str, **steps: Any) -> Any:
    """Return an object of transformers with other steps than those of `tokenizer`, as some classes build it."""
    backend = Tokenizer.from_str(tokenizer.to_str())
    for name, step in steps.items():
        setattr(backend, name, step)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, name_or_path=str(folder))


@pytest.fixture
def digits(tmp_path: Path) -> Tokenizer:
    tokenizer = byte_level(pre_tokenizers.Digits(individual_digits=True))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tokenizer


@pytest.mark.parametrize(
    "steps",
    [
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False)},
        {"pre_tokenizer": pre_tokenizers.Metaspace()},
        {"normalizer": normalizers.Lowercase()},
    ],
    ids=["digits", "metaspace", "normalizer"],
)
def test_other_steps_than_those_of_the_file_are_an_error(tmp_path: Path, digits: Tokenizer, steps: Any) -> None:
    with pytest.raises(el.TokenizerError):
        TokenBytes(opened(digits, tmp_path, **steps))
    with pytest.raises(el.TokenizerError):
        el.create_dataloader("some text", opened(digits, tmp_path, **steps), max_length=2, stride=2)


def test_equal_ids_and_settings_of_the_caller_are_accepted(tmp_path: Path, digits: Tokenizer) -> None:
    for step in (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel()]),
        pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
    ):
        one = opened(digits, tmp_path, pre_tokenizer=step)
        assert TokenBytes(one).tokenizer.to_str() == one.backend_tokenizer.to_str()


def test_a_file_with_another_vocabulary_says_nothing(tmp_path: Path, digits: Tokenizer) -> None:
    other = byte_level()
    other.train_from_iterator(["quite another text"], trainers.BpeTrainer(vocab_size=300))
    assert TokenBytes(opened(other, tmp_path)).vocabulary
    digits.save(str(tmp_path / "tokenizer.json"))


@pytest.mark.parametrize("name", ["", "owner/repository", "no such folder"])
def test_without_a_file_the_pre_tokenizer_must_fit_the_vocabulary(name: str, digits: Tokenizer) -> None:
    assert TokenBytes(opened(digits, name)).vocabulary
    with pytest.raises(el.TokenizerError):
        TokenBytes(opened(digits, name, pre_tokenizer=pre_tokenizers.Metaspace()))
    marked = Tokenizer(models.BPE())
    marked.pre_tokenizer = pre_tokenizers.Metaspace()
    marked.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=200))
    assert TokenBytes(opened(marked, name)).vocabulary
    with pytest.raises(el.TokenizerError):
        TokenBytes(opened(marked, name, pre_tokenizer=pre_tokenizers.ByteLevel()))


def test_the_file_in_the_cache_of_the_hub_is_read(tmp_path: Path, digits: Tokenizer, monkeypatch: Any) -> None:
    cache = SimpleNamespace(try_to_load_from_cache=lambda name, file: str(tmp_path / file) if name == "o/r" else None)
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", cache)
    with pytest.raises(el.TokenizerError):
        TokenBytes(opened(digits, "o/r", pre_tokenizer=pre_tokenizers.ByteLevel()))


@pytest.mark.parametrize("model_type", ["granite", "olmo2", "deepseek_v3"])
def test_what_auto_tokenizer_opens_has_the_ids_of_the_file_or_is_an_error(
    tmp_path: Path, digits: Tokenizer, model_type: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizerFast"}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "12345 and two"
    if theirs(text, add_special_tokens=False).input_ids == digits.encode(text).ids:
        assert TokenBytes(theirs).vocabulary
    else:
        with pytest.raises(el.TokenizerError):
            TokenBytes(theirs)
