"""`compare_rotary`: position schemes that were read from a configuration, compared with the model of transformers."""

import json
from dataclasses import replace
from typing import Any

import pytest
from covering import some
from releases import skip_before, skip_without_type
from rotary_comparison import (
    TOLERANCE,
    compare_model,
    compare_rotary,
    scheme_arguments,
    small_config,
    small_model,
)

from embedlayer import CheckpointError, RotaryEmbedding
from embedlayer.positions import rotary_positions

transformers = pytest.importorskip("transformers")


def as_file(model_type, **keys):
    """The default configuration of a model type, as its `config.json` says it."""
    skip_without_type(model_type)
    return json.loads(transformers.AutoConfig.for_model(model_type, **keys).to_json_string(use_diff=False))


FAMILIES = ["llama", "deepseek_v3", "nanochat", "qwen2_vl_text", "gptj"]


@pytest.mark.parametrize("family", some(["deepseek_v3", "qwen2_vl_text"], FAMILIES))
def test_the_pairing_of_a_family_has_no_difference_and_the_other_one_has(family) -> None:
    if family == "qwen2_vl_text":
        skip_before("sections of Qwen2-VL by default")
    config = as_file(family, num_hidden_layers=2)
    assert [each.reason for each in compare_rotary(config)] == ["", ""]
    wrong = compare_rotary(config, interleaved=family not in ("deepseek_v3", "gptj"))
    assert all("differs by" in each.reason and each.difference > TOLERANCE for each in wrong)


def test_a_block_that_wrongly_rotates_or_does_not_is_named() -> None:
    config = as_file("llama", num_hidden_layers=2)
    first, second = compare_rotary(config, interleaved=False, rotated=[True, False])
    assert (first.block, first.reason, second.block) == (0, "", 1)
    assert "differs by" in second.reason
    config = as_file("smollm3", num_hidden_layers=2, no_rope_layers=[1, 0])
    first, second = compare_rotary(config, rotated=True)
    assert first.reason == ""
    assert "differs by" in second.reason


TOWERS = [
    ("qwen2_vl_vision", "last_axis_first", "depth"),
    ("pixtral", "shared_frequencies", "num_hidden_layers"),
    ("gemma4_vision", "pairs_within_axis", "num_hidden_layers"),
    ("mimi_encoder", None, "num_hidden_layers"),
    ("kimi_k25_vision", "last_axis_first", "num_hidden_layers"),
    ("minimax_m3_vl_vision", "last_axis_first", "num_hidden_layers"),
    ("glmasr_encoder", None, "num_hidden_layers"),
]


@pytest.mark.parametrize(("tower", "axial", "layers"), some(TOWERS[:2], TOWERS))
def test_a_tower_rotates_by_the_positions_that_its_rotary_module_gets(tower, axial, layers) -> None:
    skip_before("rotation of vision towers")
    config = small_config(as_file(tower, **{layers: 2}))
    assert [each.reason for each in compare_rotary(config)] == ["", ""]
    schemes = rotary_positions(config, interleaved=True)
    if axial is not None:  # the other order or frequencies
        axes: Any = schemes[0].axes
        other = replace(axes, **{axial: not getattr(axes, axial)})
        schemes = [RotaryEmbedding(**{**scheme_arguments(rotary_positions(config)[0]), "axes": other})] * 2
    model = small_model(transformers.AutoConfig.for_model(**config))
    assert all("differs by" in each.reason for each in compare_model(model, schemes))


DECODERS = ["internlm3", "t5gemma2_decoder", "moonshine"]


@pytest.mark.parametrize("family", some(DECODERS[:2], DECODERS))
def test_a_decoder_beside_an_encoder_or_without_a_modeling_file_is_compared(family) -> None:
    config = as_file(family, **({"dropout_rate": 0.0} if family == "t5gemma2_decoder" else {}))
    if family == "moonshine":
        config |= {key: 4 for key in config if key.endswith("_heads")}
    config |= {key: 2 for key in ("num_hidden_layers", "decoder_num_hidden_layers") if key in config}
    config |= {"layer_types": config["layer_types"][-2:]} if "layer_types" in config else {}
    assert [each.reason for each in compare_rotary(config)] == ["", ""]


@pytest.mark.parametrize("model_type", ["novel", None])
def test_a_type_that_transformers_does_not_know_is_refused(model_type) -> None:
    config = {"model_type": model_type, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    with pytest.raises(CheckpointError, match="not known to the installed transformers"):
        compare_rotary({**config, "rope_theta": 1e4}, interleaved=False, rotated=True)


def test_a_small_configuration_keeps_the_width_of_heads_and_the_positions() -> None:
    config = as_file("llama", vocab_size=90_000, hidden_size=8192, num_attention_heads=64, num_key_value_heads=8)
    small = small_config(config)
    assert small["vocab_size"] == 64
    assert (small["hidden_size"], small["num_attention_heads"], small["num_key_value_heads"]) == (512, 4, 2)
    assert small["rope_parameters"] == config["rope_parameters"]
    assert small["num_hidden_layers"] == config["num_hidden_layers"]
