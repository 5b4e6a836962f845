"""The row-sparse table as a class: what takes it for what. Its training is in `optim` and `laws`."""

import json
from typing import Any

import pytest
import torch
from tiny_models import VOCAB, build
from torch import nn

import embedlayer as el
from embedlayer.tables import Bag, DenseTable, StreamTable


@pytest.fixture
def table() -> el.RowSparseEmbedding:
    torch.manual_seed(0)
    return el.RowSparseEmbedding(12, 4, padding_idx=0, scale=2.0, round_scale=True)


def test_it_is_an_embedding_of_torch_and_no_token_embedding(table) -> None:
    assert isinstance(table, DenseTable)
    assert isinstance(table, nn.Embedding)
    assert not isinstance(table, el.TokenEmbedding)
    assert table.sparse is table.row_sparse is True


@pytest.mark.parametrize("name", ["row_sparse", "sparse"])
def test_the_option_of_torch_must_say_what_the_class_is(name) -> None:
    for kind, is_sparse in ((el.TokenEmbedding, False), (el.RowSparseEmbedding, True)):
        assert type(kind(12, 4, **{name: is_sparse})) is kind
        with pytest.raises(el.SizeError, match="is a RowSparseEmbedding, with dense ones a TokenEmbedding"):
            kind(12, 4, **{name: not is_sparse})


def test_sparse_embeddings_of_torch_become_row_sparse_and_dense_ones_may() -> None:
    sparse, dense = nn.Embedding(12, 4, sparse=True), nn.Embedding(12, 4)
    with pytest.raises(el.SizeError, match="RowSparseEmbedding"):
        el.TokenEmbedding.from_embedding(sparse)
    for embedding in (sparse, dense):
        table = el.RowSparseEmbedding.from_embedding(embedding)
        assert table.weight is embedding.weight
        assert type(el.TransformerEmbedding(12, 4, 9, table=embedding).table) is el.RowSparseEmbedding
    with pytest.raises(el.SizeError, match=r"is a table already; TokenEmbedding.from_pretrained\(table.weight"):
        el.TokenEmbedding.from_embedding(table)
    for ours in (el.TransformerEmbedding(12, 4, 9, table=sparse), Bag(nn.Embedding(12, 4, sparse=True))):
        assert type(ours.table) is el.RowSparseEmbedding
    assert type(Bag.from_embedding_bag(nn.EmbeddingBag(12, 4), row_sparse=True).table) is el.RowSparseEmbedding
    assert type(StreamTable.from_tables([nn.Embedding(6, 4, sparse=True)] * 2).rows) is el.RowSparseEmbedding


def test_a_saved_table_is_read_as_what_it_was_also_under_its_former_kind(table, tmp_path) -> None:
    table.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    assert config["kind"] == "row_sparse_embedding"
    for kind in (config, {**config, "kind": "token_embedding", "row_sparse": True}):
        file.write_text(json.dumps(kind))
        for cls in (el.RowSparseEmbedding, DenseTable):
            loaded = cls.from_pretrained(tmp_path)
            assert type(loaded) is el.RowSparseEmbedding
            assert torch.equal(loaded.weight, table.weight)
            assert loaded.config == table.config
        with pytest.raises(el.CheckpointError, match="RowSparseEmbedding, not a TokenEmbedding"):
            el.TokenEmbedding.from_pretrained(tmp_path)
    arguments = {name: value for name, value in config.items() if name not in ("kind", "format_version")}
    assert type(el.TokenEmbedding.from_config({**arguments, "row_sparse": True})) is el.RowSparseEmbedding
    file.write_text(json.dumps({**config, "kind": "token_embedding", "row_sparse": False}))
    assert type(el.TokenEmbedding.from_pretrained(tmp_path)) is el.TokenEmbedding
    file.write_text(json.dumps(config))
    assert type(el.open_model(tmp_path).table) is el.RowSparseEmbedding


def test_a_patched_model_that_is_resized_keeps_its_row_sparse_tables() -> None:
    pytest.importorskip("transformers")
    model: Any = el.patch(build("llama", "causal", {"tie_word_embeddings": False})[1], row_sparse=True)
    assert type(model.get_input_embeddings()) is el.RowSparseEmbedding
    model.resize_token_embeddings(VOCAB + 4)
    assert type(model.get_input_embeddings()) is el.RowSparseEmbedding
    assert type(el.unpatch(model).get_input_embeddings()) is nn.Embedding
