"""The input embedding."""

import numpy as np
import pytest
import torch

from embedlayer import (
    AlibiBias,
    FactorizedEmbedding,
    LearnedPositionalEmbedding,
    RelativePositionBias,
    RotaryEmbedding,
    SinusoidalPositionalEmbedding,
    SizeError,
    TransformerEmbedding,
)
from embedlayer.lessons.scratch import ScratchCombinedEmbedding


@pytest.mark.usefixtures("both_paths")
@pytest.mark.parametrize("padding_idx", [None, 0])
def test_values_and_gradients_of_both_tables_equal_the_one_hot_oracle(padding_idx) -> None:
    layer = TransformerEmbedding(11, 6, 8, dropout=0.0, padding_idx=padding_idx).double()
    oracle = ScratchCombinedEmbedding(
        11,
        6,
        8,
        padding_idx=padding_idx,
        scale=6**0.5,
        token_W=layer.table.weight.detach().numpy().copy(),
        position_W=layer.position.weight.detach().numpy().copy(),
    )
    ids = torch.tensor([[3, 0, 1], [3, 3, 10]])
    upstream = torch.randn(2, 3, 6, dtype=torch.float64)
    vectors = layer(ids)
    vectors.backward(upstream)
    np.testing.assert_allclose(vectors.detach().numpy(), oracle(ids.numpy()), rtol=1e-13)
    grad_token, grad_position = oracle.backward(upstream.numpy())
    np.testing.assert_allclose(layer.table.weight.grad.numpy(), grad_token, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(layer.position.weight.grad.numpy(), grad_position, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize(
    ("position", "kind"),
    [
        ("learned", LearnedPositionalEmbedding),
        ("sinusoidal", SinusoidalPositionalEmbedding),
        ("rotary", RotaryEmbedding),
        ("scaled-sinusoidal", SinusoidalPositionalEmbedding),
        ("alibi", AlibiBias),
        ("relative", RelativePositionBias),
    ],
)
def test_a_position_comes_by_name_or_as_an_object(position, kind) -> None:
    named = TransformerEmbedding(100, 16, 12, position=position, num_heads=4)
    assert isinstance(named.position, kind)
    assert TransformerEmbedding(100, 16, 12, position=named.position).position is named.position


@pytest.mark.usefixtures("both_paths")
def test_any_table_can_stand_in_it() -> None:
    table = FactorizedEmbedding(100, 16, 4)
    layer = TransformerEmbedding(100, 16, 12, 0.0, table=table)
    assert torch.equal(layer(torch.tensor([3])), table(torch.tensor([3])) + layer.position.weight[:1])


@pytest.mark.parametrize(
    "options",
    [
        {"position": "rotary"},
        {"position": "rotary", "num_heads": 3},
        {"position": "axial"},
        {"table": FactorizedEmbedding(90, 16, 4)},
    ],
)
def test_parts_that_do_not_fit_are_refused(options, unchecked: None) -> None:
    with pytest.raises(SizeError):
        TransformerEmbedding(100, 16, 12, **options)
