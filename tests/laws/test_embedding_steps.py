"""Of every layer: the vectors of the last traced step are those that `forward` computes."""

import pytest
import torch
from covering import looped
from kinds import LAYERS, VOCAB_SIZE

import embedlayer as el
from embedlayer.positions.position import positions_of

IDS = torch.tensor([[1, 7, 0, 49], [3, 7, 48, 2]])
MASK = torch.tensor([[0, 1, 1, 1], [1, 1, 2, 2]])


def entered(layer: torch.nn.Module, ids: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
    """What enters the first block."""
    if not isinstance(layer, el.DecoderLM):
        return layer(ids, **options)
    seen = []
    hook = layer.blocks[0].register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    layer(ids, **options)
    hook.remove()
    return seen[0]


@looped("name, context", LAYERS, [torch.enable_grad, torch.no_grad])
def test_the_last_traced_vectors_are_those_of_forward(name, context) -> None:
    layer = LAYERS[name]().eval()
    for options in ({}, {"attention_mask": MASK}, {"positions": torch.arange(3, 7)}):
        with context():
            *_, last = layer.trace(IDS, **options)
            expected = entered(layer, IDS, **options)
        # the fused pass rounds `scale * row + position` once where the steps round twice
        torch.testing.assert_close(last.vectors, expected, rtol=1e-6, atol=1e-6)


@looped("name", LAYERS)
def test_where_nothing_is_fused_they_are_equal_bit_for_bit(name) -> None:
    layer = LAYERS[name]().eval()
    table = layer.tok_emb if isinstance(layer, el.lessons.GPTEmbedding) else layer.table
    table.register_forward_hook(lambda _, given, found: None)
    *_, last = layer.trace(IDS)
    assert torch.equal(last.vectors, entered(layer, IDS))


RECIPES = [(), ("position",), ("types", "position", "norm"), ("project", "types", "position"), ("position", "norm")]


@pytest.mark.parametrize("recipe", RECIPES)
@looped("own_types", [True, False])
def test_of_a_checkpoints_layer_they_are_equal_bit_for_bit(recipe, own_types) -> None:
    width = 12 if "project" in recipe else 8
    layer = el.EmbeddingLayer(
        el.TokenEmbedding(VOCAB_SIZE, 8, scale=3.0),
        el.LearnedPositionalEmbedding(16, width),
        recipe=recipe,
        types=el.TokenEmbedding(2, width) if own_types or width != 8 else "table",
        norm=torch.nn.LayerNorm(width),
        projection=torch.nn.Linear(8, 12) if width == 12 else None,
    )
    for segments in (None, torch.ones_like(IDS)) if "types" in recipe else (None,):
        traced = list(layer.trace(IDS, token_type_ids=segments))
        x = layer.table(IDS)
        for step in recipe:
            if step == "types":
                types = layer.table if layer.types is None else layer.types
                given = torch.zeros_like(IDS) if segments is None else segments
                x = x if segments is None and layer.types is None else x + types(given)
            elif step == "position":
                x = layer.position.add(x, positions_of(IDS))
            else:
                x = (layer.norm if step == "norm" else layer.projection)(x)
        assert torch.equal(traced[-1].vectors, layer.input(IDS, token_type_ids=segments))
        assert torch.equal(traced[-1].vectors, x)
        assert [step.name for step in traced] == ["look_up", "scale", *recipe]
