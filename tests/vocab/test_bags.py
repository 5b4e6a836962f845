"""Live models with an `nn.EmbeddingBag`: patched, trained, edited, undone, and read back by their own library."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import embedlayer as el

D = 8
TEXT = "the otter ate fish in the river, and other otters were there when the quick brown fox met them on a road. "
SENTENCES = ["the fox met an otter", "fish", ""]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return el.train_tokenizer([TEXT * 50], vocab_size=300)


@pytest.fixture
def static(tokenizer) -> Any:
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer

    torch.manual_seed(0)
    return StaticEmbedding(Tokenizer.from_str(tokenizer.to_str()), embedding_dim=D)


def vectors(static: Any, sentences: list[str]) -> torch.Tensor:
    return static(static.preprocess(sentences))["sentence_embedding"]


def read_back(static: Any, folder: Path) -> Any:
    """Save with the library, as its `SentenceTransformer.save` does, and load again."""
    folder.mkdir()
    static.save(str(folder))
    kind = "sentence_transformers.models.StaticEmbedding"
    (folder / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": "", "type": kind}]))
    return type(static).load(str(folder))


def test_a_patched_static_embedding_is_equal_and_is_read_back(static, tmp_path) -> None:
    before, names, weight = vectors(static, SENTENCES), list(static.state_dict()), static.embedding.weight
    theirs = static.embedding
    assert el.patch(static) is static
    assert isinstance(static.embedding, el.tables.Bag)
    assert static.embedding.weight is weight
    assert list(static.state_dict()) == names
    torch.testing.assert_close(vectors(static, SENTENCES), before)
    torch.testing.assert_close(vectors(read_back(static, tmp_path / "a"), SENTENCES), before)
    assert torch.equal(el.load(tmp_path / "a").table.weight, weight)
    el.unpatch(static)
    assert static.embedding is theirs
    assert torch.equal(vectors(static, SENTENCES), before)


def trained(static: Any, optimizer: torch.optim.Optimizer, sentences: list[str]) -> None:
    optimizer.zero_grad()
    (vectors(static, sentences) - 1).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("row_sparse", [False, True])
def test_an_edit_moves_rows_moments_size_and_tokenizer_and_is_undone(static, row_sparse, tmp_path) -> None:
    el.patch(static, row_sparse=row_sparse)
    optimizer = (el.RowAdamW if row_sparse else torch.optim.AdamW)(static.parameters(), lr=0.1)
    trained(static, optimizer, SENTENCES)
    before, text = static.embedding.weight.detach().clone(), static.tokenizer.to_str()
    receipt = el.vocab.edit_vocabulary(static, add=["zebra"], remove=[280, 290], optimizer=optimizer)
    size = receipt.row_map.size
    assert static.num_embeddings == static.embedding.table.vocab_size == size < 300
    assert static.tokenizer.encode("zebra").ids == [*receipt.added] == [size - 1]
    kept = receipt.row_map.sources >= 0
    assert torch.equal(static.embedding.weight[kept], before[receipt.row_map.sources[kept]])
    again = read_back(static, tmp_path / "a")
    assert again.num_embeddings == size
    torch.testing.assert_close(vectors(again, ["a zebra"]), vectors(static, ["a zebra"]))
    receipt.undo(static, optimizer=optimizer)
    assert torch.equal(static.embedding.weight, before)
    assert static.num_embeddings == 300
    assert static.tokenizer.to_str() == text
    trained(static, optimizer, SENTENCES)
    el.unpatch(static)
    assert static.embedding.num_embeddings == 300


def test_new_rows_are_trained_alone(static, tmp_path) -> None:
    el.patch(static)
    before = static.embedding.weight.detach().clone()
    receipt = el.vocab.add_tokens(static, ["zebra"])
    el.vocab.train_only_rows(static, receipt.added)
    optimizer = torch.optim.AdamW([each for each in static.parameters() if each.requires_grad], lr=0.1)
    trained(static, optimizer, ["a zebra met an otter"])
    with pytest.raises(el.CheckpointError, match="embedding.table is a DeltaEmbedding"):
        el.unpatch(static)
    el.vocab.merge_rows(static)
    assert torch.equal(static.embedding.weight[:300], before)
    el.unpatch(static)
    torch.testing.assert_close(vectors(read_back(static, tmp_path / "a"), ["zebra"]), vectors(static, ["zebra"]))


def test_a_whole_model_of_sentence_transformers_is_patched_and_trained(static, tmp_path) -> None:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(modules=[static], device="cpu")
    before = model.encode(SENTENCES, convert_to_tensor=True)
    el.patch(model, row_sparse=True)
    torch.testing.assert_close(model.encode(SENTENCES, convert_to_tensor=True), before)
    optimizer = el.RowAdamW(model.parameters(), lr=0.1)
    model(model.preprocess(SENTENCES))["sentence_embedding"].square().sum().backward()
    assert static.embedding.weight.grad.is_sparse
    optimizer.step()
    el.vocab.add_tokens(model, ["zebra"], optimizer=optimizer)
    model.save(str(tmp_path / "a"))
    again = SentenceTransformer(str(tmp_path / "a"), device="cpu")
    for sentence in (*SENTENCES[:2], "a zebra"):
        found, expected = (each.encode([sentence], convert_to_tensor=True) for each in (again, model))
        torch.testing.assert_close(found, expected)


def test_a_bag_in_a_model_of_ones_own_is_edited_with_a_tokenizer_that_is_passed(tokenizer) -> None:
    model = nn.Sequential(nn.EmbeddingBag(300, D, padding_idx=290, mode="sum"), nn.Linear(D, 2))
    theirs = model[0]
    el.patch(model)
    ids, offsets = torch.tensor([290, 4, 5]), torch.tensor([0])
    expected = model[1](theirs(ids, offsets))
    receipt = el.vocab.remove_tokens(model, [280], tokenizer=tokenizer)
    padding_idx = int(receipt.row_map.new_ids[290])
    assert model[0].table.padding_idx == padding_idx < 290
    torch.testing.assert_close(model[1](model[0](receipt.remap(ids), offsets)), expected)
    el.unpatch(model)
    assert (model[0].num_embeddings, model[0].padding_idx) == (receipt.row_map.size, padding_idx)
    torch.testing.assert_close(model[1](model[0](receipt.remap(ids), offsets)), expected)


@pytest.mark.parametrize("edited", [lambda bag: bag, lambda bag: nn.Sequential(bag)])
def test_a_live_module_that_is_not_patched_says_what_to_do(edited) -> None:
    with pytest.raises(el.SizeError, match=r"Modules without a vocabulary"):
        el.vocab.add_tokens(edited(nn.EmbeddingBag(300, D)), 2)


def test_a_live_embedding_bag_and_its_bag_share_an_edit() -> None:
    theirs = nn.EmbeddingBag(300, D)
    bag = el.tables.Bag.from_embedding_bag(theirs)
    receipt = el.vocab.add_tokens(bag, 2)
    assert theirs.weight.shape[0] == bag.table.vocab_size == 302
    ids = torch.tensor([[*receipt.added]])
    torch.testing.assert_close(theirs(ids), bag(ids))
