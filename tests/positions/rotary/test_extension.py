"""Rotary frequencies for longer sequences, written into a configuration."""

import pytest
import torch
from covering import looped

import embedlayer as el
from embedlayer.positions import (
    LinearScaling,
    Llama3Scaling,
    RotaryEmbedding,
    YarnScaling,
    extend_rotary,
    rotary_positions,
)

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
LLAMA = {"model_type": "llama", "rope_theta": 1e4, "max_position_embeddings": 64, **SIZES}
PARAMETERS = {"rope_type": "default", "rope_theta": 1e4}
LLAMA_5 = {**{key: value for key, value in LLAMA.items() if key != "rope_theta"}, "rope_parameters": PARAMETERS}
SCALED = {**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 16}}
SCALED["rope_scaling"] |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}}
GEMMA = {**SIZES, "model_type": "gemma3_text", "rope_theta": 1e6, "rope_local_base_freq": 1e4}
GEMMA |= {"sliding_window_pattern": 2, "max_position_embeddings": 64, "head_dim": 16}
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [float(pair + 1) for pair in range(8)]}


def scheme(config) -> RotaryEmbedding:
    position = rotary_positions(config)[0]
    assert isinstance(position, RotaryEmbedding)
    return position


def test_the_keys_of_the_file_are_the_ones_that_are_written() -> None:
    old, new = (extend_rotary(config, 256, "linear").config for config in (LLAMA, LLAMA_5))
    assert old == {**LLAMA, "max_position_embeddings": 256, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    parameters = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    assert new == {**LLAMA_5, "max_position_embeddings": 256, "rope_parameters": parameters}


@pytest.mark.parametrize("config", [LLAMA, LLAMA_5], ids=["old keys", "new keys"])
def test_the_ntk_aware_base_makes_the_slowest_pair_slower_by_the_ratio(config) -> None:
    longer = extend_rotary(config, 256, "base")
    before, after = (scheme(each).frequencies() for each in (config, longer.config))
    torch.testing.assert_close(before[-1] / after[-1], torch.tensor(4.0).double())
    assert scheme(extend_rotary(config, 256, "base", base=5e5).config).base == 5e5


def test_the_base_is_written_where_the_class_of_the_family_reads_it() -> None:
    neox = {**LLAMA, "model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 1e4}
    del neox["rope_theta"]
    assert extend_rotary(neox, 256, "base", base=5e5).config["rotary_emb_base"] == 5e5
    unstated = {key: value for key, value in neox.items() if key != "rotary_emb_base"}
    assert extend_rotary(unstated, 256, "base", base=5e5).config["rotary_emb_base"] == 5e5
    with pytest.raises(el.CheckpointError):
        extend_rotary({**unstated, "rope_theta": 1e4}, 256, "base")
    with pytest.raises(el.CheckpointError):
        extend_rotary({**LLAMA, "model_type": "moonshine_streaming", "partial_rotary_factor": 0.5}, 256, "base")


def test_the_trained_length_of_dynamic_scaling_stays_in_the_configuration() -> None:
    longer = extend_rotary(LLAMA, 256, "dynamic")
    assert longer.config["max_position_embeddings"] == 64  # transformers computes the growth from it
    assert longer.changes[0].largest(64) == 0
    assert longer.changes[0].largest(65) > 0


@pytest.mark.parametrize(
    ("model_type", "method", "beside"),
    [
        ("phi3", "longrope", {"original_max_position_embeddings": 64}),  # its class has 4096 there
        ("mixtral", "yarn", {"head_dim": 16}),  # its class has null there, and transformers fails with it
    ],
)
def test_numbers_that_a_class_would_take_of_its_own_are_written(model_type, method, beside) -> None:
    factors = FACTORS if method == "longrope" else None
    new = extend_rotary({**LLAMA, "model_type": model_type}, 256, method, factors=factors).config
    assert {key: new[key] for key in new.keys() - LLAMA.keys() - {"rope_scaling"}} == beside


def test_a_scaled_model_is_replaced_only_on_request_and_relative_to_its_original_length() -> None:
    with pytest.raises(el.CheckpointError):
        extend_rotary(SCALED, 256)
    longer = extend_rotary(SCALED, 256, replace=True)
    assert scheme(longer.config).scaling == YarnScaling(16.0, 16)
    assert (longer.original_length, longer.old_length) == (16, 64)
    assert scheme(extend_rotary(SCALED, 256, "base", replace=True).config).scaling is None
    with pytest.raises(el.CheckpointError):
        extend_rotary(LINEAR, 256, replace=True)
    longer = extend_rotary(LINEAR, 256, Llama3Scaling(8.0, 32), replace=True, original_length=32)
    assert scheme(longer.config).scaling == Llama3Scaling(8.0, 32)
    with pytest.raises(el.CheckpointError):
        extend_rotary(LINEAR, 128, LinearScaling(2.0), replace=True, original_length=64)


def test_layers_of_sliding_attention_keep_parameters_of_their_own() -> None:
    nested = {"full_attention": {**PARAMETERS, "rope_theta": 1e6}, "sliding_attention": PARAMETERS}
    new = {**{key: value for key, value in GEMMA.items() if "rope" not in key}, "rope_parameters": nested}
    new["layer_types"] = ["sliding_attention", "full_attention"]
    for config in (GEMMA, new):
        for method in ("linear", "base"):
            longer = extend_rotary(config, 256, method)
            assert [each.blocks for each in longer.changes] == [1]
            local, own = rotary_positions(longer.config)
            assert repr(local) == repr(rotary_positions(config)[0])
            assert repr(own) != repr(rotary_positions(config)[1])


def test_the_language_model_of_several_models_is_edited() -> None:
    config = {"model_type": "llava", "vision_config": {"model_type": "pixtral"}, "text_config": LLAMA}
    longer = extend_rotary(config, 256).config
    assert longer == {**config, "text_config": extend_rotary(LLAMA, 256).config}
    assert config["text_config"] == LLAMA


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (LLAMA, {"length": 64}),
        (LLAMA, {"method": "ntk"}),
        (LLAMA, {"method": "longrope"}),
        (LLAMA, {"method": "longrope", "factors": {"long_factor": [1.0] * 8}}),
        (LLAMA, {"factors": FACTORS}),
        (LLAMA, {"base": 5e5}),
        (LLAMA, {"method": YarnScaling(4.0, 32)}),
        (LLAMA, {"method": el.positions.DynamicNTKScaling(4.0, 64, length=256)}),
        ({**SIZES, "model_type": "roformer", "max_position_embeddings": 64}, {"method": "base"}),
    ],
)
def test_what_does_not_fit_is_refused(config, options) -> None:
    with pytest.raises((el.CheckpointError, el.SizeError)):
        extend_rotary(config, **{"length": 256, **options})


WRONG = [
    {**LLAMA, "model_type": "novel"},
    {**LLAMA, "model_type": "dinov3_vit"},
    {**LLAMA, "alibi": True},
    {**LLAMA, "rope_scaling": {"rope_type": "default", "type": "linear"}},
    {**LLAMA_5, "rope_theta": 5e5},
    {**SCALED, "original_max_position_embeddings": 32},
    {key: value for key, value in LLAMA.items() if key != "max_position_embeddings"},
    {**LLAMA, "model_type": "granite_swa", "layer_rope_theta": [1e4, 5e5]},
]


@looped("config", WRONG)
def test_a_configuration_that_is_not_understood_is_refused(config) -> None:
    with pytest.raises(el.CheckpointError):
        extend_rotary(config, 256, replace=True)


def test_a_stated_length_may_not_contradict_the_configuration() -> None:
    with pytest.raises(el.CheckpointError):
        extend_rotary(SCALED, 256, replace=True, original_length=32)
    assert extend_rotary(LLAMA, 256, original_length=32).original_length == 32  # longer than it was trained
