"""A table as another kind, by name; and the same model around it."""

import pytest
import torch
from covering import looped

from embedlayer import (
    DecoderLM,
    EmbeddingLayer,
    FactorizedEmbedding,
    OutputHead,
    QuantizedEmbedding,
    RotaryEmbedding,
    SizeError,
    TokenEmbedding,
)
from embedlayer.compress import compress_table, replace_table
from embedlayer.formats import CovarianceRounding, GGUFBlocks
from embedlayer.heads import PredictionHead


def decoder(head: OutputHead | None = None) -> DecoderLM:
    table = TokenEmbedding(40, 16, scale="sqrt_dim", padding_idx=2)
    return DecoderLM(table, RotaryEmbedding(8), head, num_layers=1, num_heads=2, num_kv_heads=1, mlp_dim=24).eval()


def test_a_name_says_which_kind() -> None:
    table = TokenEmbedding(40, 16, padding_idx=2, scale=3.0)
    kinds = {
        "int8": QuantizedEmbedding.from_table(table, 8),
        "int4": QuantizedEmbedding.from_table(table, 4, rounding=CovarianceRounding()),
        "int4-g8": QuantizedEmbedding.from_table(table, 4, group_size=8, rounding=CovarianceRounding()),
        "q8_0": QuantizedEmbedding.from_table(table, 8, layout=GGUFBlocks()),
        "q4_0": QuantizedEmbedding.from_table(table, 4, layout=GGUFBlocks(), rounding=CovarianceRounding()),
        "rank=4": FactorizedEmbedding.from_table(table, 4),
    }
    for name, expected in kinds.items():
        found = compress_table(table, name)
        assert found.config == expected.config
        assert torch.equal(found.rows(0, 40), expected.rows(0, 40))
    counts = torch.arange(40)
    weighted = compress_table(table, "rank=4", counts=counts)
    assert torch.equal(weighted.rows(0, 40), FactorizedEmbedding.from_table(table, 4, counts).rows(0, 40))


@looped("name", ["int5", "int4-g", "int4-g7x", "rank=", "rank=-1", "", "INT8", "q4_1"])
def test_an_unknown_name_is_refused(name) -> None:
    with pytest.raises(SizeError, match=repr(name)):
        compress_table(TokenEmbedding(9, 4), name)


def test_a_model_around_another_table_shares_all_else_and_is_tied_to_it() -> None:
    model = decoder()
    ids = torch.tensor([[1, 5, 2]])
    whole = compress_table(model.table, "int8")
    other = replace_table(model, whole)
    assert other.head.own_table is other.table is whole
    assert other.blocks is model.blocks
    assert not other.training
    dense = TokenEmbedding.from_pretrained(whole.rows(0, 40), padding_idx=2, scale=4.0)
    assert torch.allclose(other(ids), replace_table(model, dense)(ids), atol=1e-6)
    assert torch.equal(replace_table(model, model.table)(ids), model(ids))
    assert {name for name in other.state_dict() if name.startswith(("table", "head"))} == {"table.packed"}


def test_a_bias_and_a_free_head_are_kept() -> None:
    free = decoder(OutputHead(vocab_size=40, embed_dim=16))
    assert replace_table(free, compress_table(free.table, "int4")).head is free.head
    table = TokenEmbedding(40, 16)
    biased = DecoderLM(table, RotaryEmbedding(8), OutputHead(table, bias=True, softcap=5.0), num_layers=1, num_heads=2)
    other = replace_table(biased, compress_table(table, "int8"))
    assert other.head.bias is biased.head.bias
    assert other.head.softcap == 5.0


def test_an_embedding_layer_keeps_its_recipe_and_its_head_before_the_product() -> None:
    table = TokenEmbedding(40, 16)
    head = PredictionHead(OutputHead(table, bias=True), dense=torch.nn.Linear(16, 16), activation="gelu")
    layer = EmbeddingLayer(
        table,
        None,
        head,
        family="bert",
        recipe=("types", "norm"),
        types=TokenEmbedding(2, 16),
        norm=torch.nn.LayerNorm(16),
        tensor_names={"table.weight": ["a"], "norm.weight": ["b"]},
    )
    other = replace_table(layer, compress_table(table, "int8"))
    ids = torch.tensor([[1, 5, 2]])
    assert (other.input(ids) - layer.input(ids)).norm() < 0.02 * layer.input(ids).norm()
    assert torch.allclose(other.head(layer.input(ids)), layer.head(layer.input(ids)), atol=0.02)
    assert other.tensor_names == {"norm.weight": ("b",)}
    assert other.report().dtype == "int8"


def test_a_table_of_another_width_is_refused() -> None:
    with pytest.raises(SizeError, match="width 8, the model needs 16"):
        replace_table(decoder(), TokenEmbedding(40, 8))
