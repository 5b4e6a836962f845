"""The input embedding of the book is the sum of two plain look-ups; its loader finds GPT-2's tokenizer."""

import sys
from hashlib import sha1
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

import embedlayer as el
from embedlayer.lessons import GPT_CONFIG_124M, GPTEmbedding, create_dataloader_v1
from embedlayer.lessons.book import _tokenizer_of_tiktoken
from embedlayer.tokenization.bpe_files import END_OF_TEXT, byte_level_alphabet

FILES = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main"
"""Where tiktoken downloads GPT-2's files; it caches each under the hash of its address."""


def tiktoken_with(get_encoding) -> ModuleType:
    """A module with the one function of tiktoken that is called."""
    module = ModuleType("tiktoken")
    module.__spec__ = ModuleSpec("tiktoken", None)
    module.get_encoding = get_encoding
    return module


def test_the_ranks_of_tiktoken_become_the_same_tokenizer(monkeypatch) -> None:
    trained = el.train_tokenizer(
        "low lower lowest, new newer newest; the thing that they thought. " * 3, vocab_size=300
    )
    letters = byte_level_alphabet()
    vocabulary = {token: rank for token, rank in trained.get_vocab().items() if token != END_OF_TEXT}
    order = sorted(vocabulary, key=vocabulary.__getitem__)
    ranks = {bytes(letters[letter] for letter in token): rank for rank, token in enumerate(order)}
    encoding = SimpleNamespace(token_byte_values=lambda: sorted(ranks), encode_single_token=ranks.__getitem__)
    monkeypatch.setitem(sys.modules, "tiktoken", tiktoken_with({"gpt2": encoding}.__getitem__))
    tokenizer = _tokenizer_of_tiktoken()
    for text in ("the lowest thing", "new, newer:  é 🙂\n", "they thought of other things"):
        assert tokenizer.encode(text).tokens == trained.encode(text).tokens
    assert tokenizer.encode(END_OF_TEXT).ids == [len(ranks)]


def test_gpt2s_tokenizer_of_tiktoken_is_that_of_its_files(shared_data, tmp_path, monkeypatch) -> None:
    pytest.importorskip("tiktoken", reason="tiktoken is not installed")
    for name in ("encoder.json", "vocab.bpe"):
        content = (shared_data / "tokenizers" / f"gpt2-{name}").read_bytes()
        (tmp_path / sha1(f"{FILES}/{name}".encode()).hexdigest()).write_bytes(content)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    from_files = el.load_tokenizer(shared_data / "tokenizers" / "gpt2-encoder.json")
    assert _tokenizer_of_tiktoken().to_str() == from_files.to_str()


@pytest.mark.parametrize("is_installed", [False, True], ids=["without tiktoken", "without a network"])
def test_the_loader_says_how_to_get_gpt2s_tokenizer(tmp_path, monkeypatch, is_installed) -> None:
    def get_encoding(name: str) -> None:
        raise ConnectionError("no network")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("embedlayer.lessons.book._cached_gpt2", lambda: None)
    monkeypatch.setitem(sys.modules, "tiktoken", tiktoken_with(get_encoding) if is_installed else None)
    advice = r"could not download it \(ConnectionError\).*get_encoding" if is_installed else "pip install tiktoken"
    with pytest.raises(
        el.TokenizerError, match=f"(?s)tokenizer was not found.*{advice}.*tokenizer='path/to/encoder.json'"
    ):
        create_dataloader_v1("I love dogs")


@pytest.mark.usefixtures("both_paths")
def test_the_gpt_layer_of_the_notebook() -> None:
    """Seed notebook: real vocabulary, width 256, context 4; sum of two plain look-ups."""
    layer = GPTEmbedding(GPT_CONFIG_124M["vocab_size"], 256, 4)
    inputs = torch.randint(0, 50257, (8, 4))
    manual = nn.functional.embedding(inputs, layer.tok_emb.weight) + layer.pos_emb(torch.arange(4))
    assert torch.equal(layer(inputs), manual)
    assert list(layer.state_dict()) == ["tok_emb.weight", "pos_emb.weight"]
    assert sum(parameter.numel() for parameter in layer.parameters()) == 50257 * 256 + 4 * 256
    positions_of_first, positions_of_last = (layer(inputs) - layer.tok_emb(inputs))[[0, 7]]
    assert torch.allclose(positions_of_first, positions_of_last, atol=1e-7)


@pytest.mark.usefixtures("both_paths")
def test_the_gpt_layer_is_read_back(tmp_path) -> None:
    layer = GPTEmbedding(20, 8, 4)
    layer.save_pretrained(tmp_path)
    again = GPTEmbedding.from_pretrained(tmp_path)
    assert torch.equal(again(torch.tensor([1, 2])), layer(torch.tensor([1, 2])))
