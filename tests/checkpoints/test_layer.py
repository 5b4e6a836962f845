"""The embedding layer of a checkpoint: arguments of its input embedding, head, report, saving."""

import copy
import json
import pickle

import pytest
import torch
from tiny_models import VARIANTS, VOCAB, quiet
from transformers_probe import ends

import embedlayer as el

LENGTH, PAD = 12, 1


@pytest.fixture
def load_model(tmp_path):
    def load_model(name: str) -> tuple:
        _, model = VARIANTS[name].build()
        with quiet():
            model.save_pretrained(tmp_path)
        return model, el.load(tmp_path)

    return load_model


@pytest.mark.parametrize("name", ["GPT-2", "BERT", "LLaMA 2"])
def test_the_options_of_the_products_of_a_head_are_saved_with_the_layer(load_model, tmp_path, name) -> None:
    layer = load_model(name)[1]
    output = getattr(layer.head, "output", layer.head)
    output.head_dtype, output.batch_invariant = torch.float32, True
    hidden = torch.randn(2, 5, output.in_features if output is layer.head else layer.head.dense.in_features).bfloat16()
    layer = layer.bfloat16()
    logits = layer.head(hidden)
    assert logits.dtype == torch.float32
    layer.save_pretrained(tmp_path / "layer")
    again = el.EmbeddingLayer.from_pretrained(tmp_path / "layer")
    assert torch.equal(again.head(hidden), logits)
    assert torch.equal(again.head(hidden[:1, 2]), logits[:1, 2])


@pytest.mark.parametrize("name", ["GPT-2", "RoBERTa"])
def test_positions_from_zero_are_position_ids_less_the_first_one(load_model, name) -> None:
    """`tests/test_all_families.py` compares position IDs, token types and left padding with transformers."""
    _, layer = load_model(name)
    ids, positions = torch.randint(4, VOCAB, (2, LENGTH)), torch.randint(2, 40, (2, LENGTH))
    from_zero = positions - (PAD + 1 if name == "RoBERTa" else 0)
    assert torch.equal(layer.input(ids, positions=from_zero), layer.input(ids, position_ids=positions))


@pytest.mark.parametrize("name", ["RoBERTa", "OPT", "M2M100"])
def test_left_padding_leaves_the_text_as_it_is_where_the_family_counts_text(load_model, name) -> None:
    _, layer = load_model(name)
    ids = torch.randint(4, VOCAB, (1, 7))
    padded = torch.cat([torch.full((1, 3), PAD), ids], dim=1)
    mask = torch.tensor([[0] * 3 + [1] * 7])
    assert torch.equal(layer.input(padded, mask)[:, 3:], layer.input(ids))


def test_left_padded_text_takes_positions_where_the_family_counts_every_place(load_model) -> None:
    _, layer = load_model("GPT-2")
    ids = torch.randint(4, VOCAB, (1, 7))
    padded = torch.cat([torch.full((1, 3), PAD), ids], dim=1)
    mask = torch.tensor([[0] * 3 + [1] * 7])
    assert torch.equal(layer.input(padded, mask), layer.input(padded))
    there = layer.input(padded, positions=el.positions_of(padded, mask))
    assert torch.equal(there[:, 3:], layer.input(ids))


def test_arguments_that_contradict_are_refused(load_model) -> None:
    ids = torch.tensor([[1, 2]])
    bert, llama = load_model("BERT")[1], load_model("LLaMA 2")[1]
    for error, refused in (
        (el.ShapeError, lambda: bert.input(ids, token_type_ids=ids[0])),
        (el.SizeError, lambda: llama.input(ids, position_ids=ids, positions=ids)),
        (el.SizeError, lambda: llama.input(ids, token_type_ids=ids)),
        (el.TokenIdError, lambda: llama.input(torch.tensor([[1, VOCAB]]))),
        (el.SizeError, lambda: llama.position_of("global")),
    ):
        with pytest.raises(error):
            refused()


def test_positions_past_the_table_are_an_error(load_model) -> None:
    _, layer = load_model("OPT")
    layer.input(torch.full((1, 2048), 5))
    with pytest.raises(el.PositionError, match="exceeds the 2048 positions"):
        layer.input(torch.full((1, 2049), 5))


def test_a_zero_padding_row_is_kept_zero_and_another_is_an_ordinary_row(tmp_path) -> None:
    _, model = VARIANTS["OPT"].build()
    ids = torch.randint(0, VOCAB, (2, LENGTH))
    for name, padding_idx in (("other", None), ("zero", PAD)):
        with quiet(), torch.no_grad():
            if name == "zero":
                model.model.decoder.embed_tokens.weight[PAD] = 0
            model.save_pretrained(tmp_path / name)
        whole = ends(model, ids)
        layer = el.load(tmp_path / name)
        assert layer.table.padding_idx == padding_idx
        assert torch.equal(layer.input(ids), whole[0])
        assert torch.equal(layer.head(whole[1]), whole[2])


def test_a_zero_padding_row_keeps_the_bias_on_its_logit(tmp_path) -> None:
    config, model = VARIANTS["BERT"].build()
    with quiet():
        with torch.no_grad():
            model.bert.embeddings.word_embeddings.weight[config.pad_token_id] = 0
        model.save_pretrained(tmp_path)
    layer = el.load(tmp_path)
    assert layer.table.padding_idx == config.pad_token_id
    whole = ends(model, torch.randint(2, VOCAB, (2, LENGTH)))
    assert torch.equal(layer.head(whole[1]), whole[2])


def test_copies_casts_and_compiled_layers_give_the_same(load_model, unchecked: None) -> None:
    _, layer = load_model("ALBERT")
    ids = torch.randint(4, VOCAB, (2, LENGTH))
    expected = layer.input(ids)
    assert torch.equal(copy.deepcopy(layer).input(ids), expected)
    assert torch.equal(pickle.loads(pickle.dumps(layer)).input(ids), expected)  # for worker processes
    assert torch.allclose(torch.compile(layer, fullgraph=True, backend="eager")(ids), expected)
    assert copy.deepcopy(layer).bfloat16().input(ids).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "change",
    [
        {"recipe": ["position", "position"]},
        {"recipe": ["norm"]},
        {"recipe": ["cook"]},
        {"table": {"kind": "token_embedding"}},
        {"table": 3},
        {"numbering": "ids", "padding_id": None},
        {"head": {"tied": True, "unknown": 1}},
        {"head": {"tied": False}},
        {"norm": {"width": 3}},
        {"surprise": 1},
        {"other_positions": None},
    ],
)
def test_a_saved_configuration_that_does_not_fit_is_our_error(load_model, tmp_path, unchecked, change) -> None:
    load_model("LLaMA 2")[1].save_pretrained(tmp_path / "layer")
    config = tmp_path / "layer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(el.EmbedLayerError):
        el.load(tmp_path / "layer")
