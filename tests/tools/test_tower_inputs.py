"""Inputs on which vision and audio towers run, and positions in place of those that they count."""

from typing import Any

import pytest
import torch
from releases import skip_before
from tiny_models import quiet, small_config
from tower_inputs import is_tower, rotary_modules, stated_positions, tower_inputs

TOWERS = {"qwen2_vl_vision": 2, "pixtral": 1, "lasr_encoder": 1}
"""Model type of a tower -> number of axes of the positions that its rotary modules get; `pixtral` joins the axes."""


def built(model_type: str) -> torch.nn.Module:
    import transformers
    from transformers import CONFIG_MAPPING

    with quiet():
        if model_type == "qwen2_vl_vision":
            kind: Any = type(transformers.Qwen2VLConfig().vision_config)
            config = kind(depth=1, embed_dim=64, num_heads=2)
            from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel as Tower

            return Tower._from_config(config).eval()
        config = small_config(CONFIG_MAPPING[model_type], {})
        return transformers.AutoModel.from_config(config).eval()


def first_that_runs(model):
    for inputs in tower_inputs(model):
        try:
            with torch.no_grad():
                return inputs, model(**inputs)
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
            continue
    raise AssertionError("none runs")


@pytest.mark.filterwarnings("ignore:Using padding")
@pytest.mark.parametrize("model_type", TOWERS)
def test_a_tower_runs_on_one_of_the_inputs_and_its_positions_are_replaced(model_type) -> None:
    if model_type == "qwen2_vl_vision":
        skip_before("rotation of vision towers")
    model = built(model_type)
    assert is_tower(model)
    assert rotary_modules(model)
    inputs, plain = first_that_runs(model)
    outputs = []
    for positions in ((0, 0), (3, 5)):
        with stated_positions(model, positions[: TOWERS[model_type]]) as seen, torch.no_grad():
            outputs.append(model(**inputs).last_hidden_state)
        assert set(seen) == {TOWERS[model_type]}
    with torch.no_grad():
        again = model(**inputs).last_hidden_state
    assert torch.equal(again, plain.last_hidden_state)
    assert not torch.equal(outputs[0], again)


def test_a_language_model_is_no_tower() -> None:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    assert not is_tower(transformers.LlamaModel(config))
