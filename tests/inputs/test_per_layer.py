"""Per-layer inputs, beside transformers' Gemma 3n and 4 bit for bit."""

from copy import deepcopy

import pytest
import torch
from releases import per_layer_rows, skip_before
from tiny_models import build
from torch import nn

import embedlayer as el
from embedlayer.inputs import PerLayerInputs, PerLayerResidual

LAYERS, ROWS = 3, 60
SIZES = {"hidden_size": 48, "num_hidden_layers": LAYERS, "layer_types": ["full_attention"] * LAYERS}
SIZES |= {"hidden_size_per_layer_input": 8, "vocab_size": 70}


def small(**options: object) -> PerLayerInputs:
    return PerLayerInputs(el.TokenEmbedding(ROWS, 24, scale=8**0.5, round_scale=True), 48, LAYERS, **options)


@pytest.fixture(scope="module")
def gemma3n():
    return build("gemma3n_text", "causal", {**SIZES, "vocab_size_per_layer_input": ROWS})[1].model


@pytest.fixture(scope="module")
def gemma4():
    return build("gemma4_text", "causal", {**SIZES, "vocab_size_per_layer_input": 70})[1].model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["gemma3n", "gemma4"])
def test_the_inputs_of_all_blocks_equal_those_of_transformers(family, dtype, request) -> None:
    model = deepcopy(request.getfixturevalue(family)).to(dtype)
    if family == "gemma3n":
        skip_before("token without a row in a per-layer table of Gemma 3n")
    is_3n, eps = family == "gemma3n", model.config.rms_norm_eps
    ours = small(eps=eps, missing_row=0 if is_3n else None, round_scales=is_3n).to(dtype)
    ours.table.weight = model.embed_tokens_per_layer.weight
    ours.projection.weight = model.per_layer_model_projection.weight
    ours.norm.weight = model.per_layer_projection_norm.weight
    ids = torch.arange(70).view(2, 35)  # in Gemma 3n, 10 of them have no row
    x = model.embed_tokens(ids)
    theirs = per_layer_rows(model, ids)
    assert torch.equal(ours.look_up(ids), theirs)
    assert torch.equal(ours.project(x), model.project_per_layer_inputs(x))
    assert torch.equal(ours(ids, x), model.project_per_layer_inputs(x, theirs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_block_adds_equals_the_block_of_gemma_4(gemma4, dtype) -> None:
    theirs = deepcopy(gemma4.layers[0]).to(dtype)
    ours = PerLayerResidual(48, 8, eps=gemma4.config.rms_norm_eps).to(dtype)
    ours.gate.weight, ours.projection.weight = theirs.per_layer_input_gate.weight, theirs.per_layer_projection.weight
    ours.norm.weight = theirs.post_per_layer_input_norm.weight
    x, inputs = torch.randn(2, 5, 48, dtype=dtype), torch.randn(2, 5, 8, dtype=dtype)
    before = []  # the residual stream, which their block normalises after attention and MLP and passes to the gate
    theirs.per_layer_input_gate.register_forward_pre_hook(lambda _, given: before.append(given[0].clone()))
    positions = gemma4.rotary_emb(x, torch.arange(5).unsqueeze(0), "full_attention")
    result = theirs(x, inputs, position_embeddings=positions, attention_mask=None, shared_kv_states={})
    assert torch.equal((before[0] + ours(before[0], inputs)) * theirs.layer_scalar, result)


def test_a_plain_embedding_is_a_table_and_bad_ids_and_activations_are_refused() -> None:
    inputs = PerLayerInputs(nn.Embedding(10, 6), 4, 2)
    assert inputs(torch.tensor([1, 2]), torch.randn(2, 4)).shape == (2, 2, 3)
    with pytest.raises(el.TokenIdError):
        inputs.look_up([10])
    with pytest.raises(el.CheckpointError):
        PerLayerResidual(4, 2, activation="relu6")
