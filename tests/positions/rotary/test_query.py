"""The scale of queries by position, beside the models that have it; its laws are in `test_axes`."""

from importlib import import_module

import pytest
import torch
from releases import skip_without

from embedlayer.positions import LogQueryScaling, PowerQueryScaling, QueryScaledPosition


@pytest.mark.parametrize("model", ["ministral3", "mistral4"])
def test_query_scaling_is_that_of_ministral(model) -> None:
    module = import_module(f"transformers.models.{model}.modeling_{model}")
    positions = torch.randint(0, 10**6, (3, 50))
    ours = LogQueryScaling(0.1, 16384).factors(positions)
    torch.testing.assert_close(ours, module.get_llama_4_attn_scale(positions, 0.1, 16384)[:, 0, :, 0])


@pytest.mark.parametrize("length", [10, 300])
def test_query_scaling_is_that_of_llama_4_in_layers_without_rotation(length) -> None:
    """The whole attention layer with temperatures, beside the same layer without them on scaled queries."""
    from transformers import Llama4TextConfig
    from transformers.models.llama4.modeling_llama4 import Llama4TextAttention

    config = Llama4TextConfig(
        hidden_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_hidden_layers=1,
        no_rope_layers=[0], floor_scale=16, attn_scale=0.3, attn_temperature_tuning=True, use_qk_norm=False,
    )  # fmt: skip
    config._attn_implementation = "eager"
    layer, x = Llama4TextAttention(config, 0).eval(), torch.randn(1, length, 32)
    with torch.no_grad():
        _, tempered = layer(x, None, None)
        layer.attn_temperature_tuning = False
        q, k = (project(x).unflatten(-1, (-1, 16)).transpose(1, 2) for project in (layer.q_proj, layer.k_proj))
        position = QueryScaledPosition(LogQueryScaling(0.3, 16, offset=1))
        q, k = position.rotate(q, k, torch.arange(length))
        ours = (q @ k.mT / 4).softmax(-1)
    torch.testing.assert_close(ours, tempered, atol=1e-6, rtol=1e-4)


def test_query_scaling_is_that_of_beam() -> None:
    skip_without("transformers.models.beam.modeling_beam")
    module = import_module("transformers.models.beam.modeling_beam")
    positions = torch.randint(0, 10**6, (3, 50))
    ours = PowerQueryScaling(0.1, 2048).factors(positions)
    torch.testing.assert_close(ours, module.compute_attention_scaling(positions)[:, 0, :, 0])


def test_positions_of_the_first_step_have_the_factor_one() -> None:
    factors = LogQueryScaling(0.1, 8192, offset=1).factors(torch.tensor([0, 8190, 8191, 16383]))
    torch.testing.assert_close(factors, 1 + 0.1 * torch.tensor([1.0, 1.0, 2.0, 3.0]).log())
