"""The input embedding of the book is the sum of two plain look-ups; its loader finds GPT-2's tokenizer."""

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

import embedlayer as el
from embedlayer.lessons import GPT_CONFIG_124M, GPTEmbedding, create_dataloader_v1


@pytest.fixture
def with_tiktoken(tmp_path, monkeypatch) -> Callable[..., None]:
    """Let tiktoken be a module with the one function that is called, in a place without GPT-2's files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)

    def install(get_encoding: Callable[[str], object]) -> None:
        module = ModuleType("tiktoken")
        module.__spec__ = ModuleSpec("tiktoken", None)
        module.get_encoding = get_encoding
        monkeypatch.setitem(sys.modules, "tiktoken", module)

    return install


def test_the_ranks_of_tiktoken_become_the_same_tokenizer(with_tiktoken) -> None:
    trained = el.train_tokenizer(
        "low lower lowest, new newer newest; the thing that they thought. " * 3, vocab_size=300
    )
    entries = el.tokenization.TokenBytes(trained)
    ids = [row for row in range(300) if trained.id_to_token(row) not in (None, "<|endoftext|>")]
    ranks = {entries.readings(row)[0]: rank for rank, row in enumerate(ids)}
    encoding = SimpleNamespace(token_byte_values=lambda: sorted(ranks), encode_single_token=ranks.__getitem__)
    with_tiktoken({"gpt2": encoding}.__getitem__)
    for text in ("the lowest thing", "new, newer:  é 🙂\n", "they thought of other things<|endoftext|>"):
        expected = [ids.index(row) if row in ids else len(ids) for row in trained.encode(text).ids]
        ((inputs, targets),) = create_dataloader_v1(text, 1, len(expected) - 1, 1, shuffle=False)
        assert [*inputs[0].tolist(), int(targets[0, -1])] == expected


def test_without_a_network_the_loader_says_how_to_get_gpt2s_tokenizer(with_tiktoken) -> None:
    def get_encoding(name: str) -> None:
        raise ConnectionError("no network")

    with_tiktoken(get_encoding)
    with pytest.raises(el.TokenizerError, match=r"\(ConnectionError\)"):
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
