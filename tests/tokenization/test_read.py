"""Tokenizers are read from the files of models, or refused with a reason."""

import json

import pytest

from embedlayer.core.errors import EmbedLayerError, FileError, TokenizerError
from embedlayer.tokenization.read import load_tokenizer, save_tokenizer
from embedlayer.tokenization.train import train_tokenizer

TEXT = "I love dogs, I love cats, and cats love naps; don't ask. " * 5


@pytest.mark.long
def test_gpt2_is_read_from_its_two_files_however_they_are_named(shared_data, tmp_path):
    original = shared_data / "tokenizers"
    tokenizer = load_tokenizer(original / "gpt2-encoder.json")
    assert tokenizer.encode("Hello world<|endoftext|>").ids == [15496, 995, 50256]
    assert tokenizer.decode(tokenizer.encode(" ünï\n\n x").ids) == " ünï\n\n x"
    for vocabulary, merges in (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")):
        folder = tmp_path / vocabulary
        folder.mkdir()
        (folder / vocabulary).symlink_to(original / "gpt2-encoder.json")
        (folder / merges).symlink_to(original / "gpt2-vocab.bpe")
        for path in (folder, folder / merges):
            assert load_tokenizer(path).to_str() == tokenizer.to_str()


def test_a_bert_vocabulary_is_cased_if_it_holds_capitals(tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nhello\ndog\n##s\n")
    assert load_tokenizer(tmp_path).encode("Hello dogs").tokens[1:-1] == ["hello", "dog", "##s"]
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nhello\ndog\n##s\nHi\n")
    assert load_tokenizer(tmp_path).encode("Hello dogs").tokens[1:-1] == ["[UNK]", "dog", "##s"]


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram", "word", "byte"])
def test_a_saved_tokenizer_is_read_back_the_same(tmp_path, kind):
    tokenizer = train_tokenizer(TEXT, kind, vocab_size=300)
    save_tokenizer(tokenizer, tmp_path / "tokenizer.json")
    again = load_tokenizer(tmp_path)
    assert again.to_str() == tokenizer.to_str()


BROKEN: dict[str, tuple[dict[str, bytes], type[EmbedLayerError]]] = {
    "not JSON": ({"tokenizer.json": b"{"}, TokenizerError),
    "a JSON list": ({"tokenizer.json": b"[]"}, TokenizerError),
    "wrong content": ({"tokenizer.json": b'{"model": {"type": "BPE"}, "added_tokens": 3}'}, TokenizerError),
    "no merges": ({"vocab.json": b'{"a": 0}'}, FileError),
    "other merges": ({"vocab.json": b'{"a": 0, "b": 1}', "merges.txt": b"#version: 0.2\na b\n"}, TokenizerError),
    "no [UNK]": ({"vocab.txt": b"hello\nworld\n"}, TokenizerError),
    "no model": ({"m.model": b"not a model"}, TokenizerError),
    "not UTF-8": ({"vocab.txt": b"\xff\xfe"}, TokenizerError),
    "no tokenizer": ({"readme.md": b"", "tokenizer.dat": b""}, TokenizerError),
    "several": ({"a-vocab.txt": b"[UNK]", "b-vocab.txt": b"[UNK]"}, TokenizerError),
}


def test_broken_and_missing_files_are_refused(tmp_path):
    for name, (files, error) in BROKEN.items():
        (folder := tmp_path / name).mkdir()
        for file, content in files.items():
            (folder / file).write_bytes(content)
        with pytest.raises(error):
            load_tokenizer(folder)
    (tmp_path / "words.json").write_text('{"a": 0}')
    for path, error in (
        ("words.json", TokenizerError),
        ("no tokenizer/tokenizer.dat", TokenizerError),
        ("x", FileError),
    ):
        with pytest.raises(error):
            load_tokenizer(tmp_path / path)


def test_added_tokens_beside_a_vocabulary_are_read(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "dog", "##s"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    (tmp_path / "added_tokens.json").write_text('{"<call>": 8, "<end>": 7}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("dogs<call> dog<end>", add_special_tokens=False).ids == [5, 6, 8, 5, 7]
    (tmp_path / "added_tokens.json").write_text('{"<call>": 9}')
    with pytest.raises(TokenizerError):
        load_tokenizer(tmp_path)
    (tmp_path / "added_tokens.json").write_text('{"<call>": "9"}')
    with pytest.raises(TokenizerError):
        load_tokenizer(tmp_path)


def test_added_tokens_of_the_configuration_replace_the_older_files(tmp_path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "dog"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    (tmp_path / "added_tokens.json").write_text('{"<old>": 6}')
    assert load_tokenizer(tmp_path).token_to_id("<old>") == 6
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text('{"added_tokens_decoder": {"6": {"content": "<new>", "special": true}}}')
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.token_to_id("<old>"), tokenizer.token_to_id("<new>")) == (None, 6)
    assert tokenizer.get_added_tokens_decoder()[6].special
    for damaged in ('{"added_tokens_decoder": {"x": {"content": "<new>"}}}', '{"eos_token": 3}'):
        settings.write_text(damaged)
        with pytest.raises(TokenizerError):
            load_tokenizer(tmp_path)


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
