"""Sinusoidal positions, against the formula written out."""

import math

import numpy as np
import pytest
import torch
from comparison import assert_no_worse
from hypothesis import given
from hypothesis import strategies as st

from embedlayer import SinusoidalPositionalEmbedding, TransformerEmbedding, positions_of
from embedlayer.lessons.scratch import scratch_sinusoidal
from embedlayer.positions import sinusoids


@pytest.mark.parametrize("width", [1, 2, 7, 64])
def test_rows_equal_the_formula_also_at_odd_widths(width) -> None:
    position = SinusoidalPositionalEmbedding(50, width)
    np.testing.assert_allclose(position.waves.numpy(), scratch_sinusoidal(50, width), atol=6e-8)
    for place in (0, 1, 49):
        for channel in range(width):
            angle = place / 10000 ** ((channel - channel % 2) / width)
            expected = math.sin(angle) if channel % 2 == 0 else math.cos(angle)
            assert position.waves[place, channel].item() == pytest.approx(expected, abs=1e-7)


@given(offset=st.integers(-40, 40), base=st.floats(10.0, 1e6))
def test_a_shift_is_one_fixed_linear_map(offset, base) -> None:
    """PE(p + k) = PE(p) M_k, with a turn by k / base^(2i/D) for each pair."""
    places = torch.arange(50, 60, dtype=torch.float64)
    angles = offset * base ** -(torch.arange(0, 6, 2, dtype=torch.float64) / 6)
    turns = [torch.tensor([[a.cos(), -a.sin()], [a.sin(), a.cos()]], dtype=torch.float64) for a in angles]
    shifted = sinusoids(places, 6, base) @ torch.block_diag(*turns)
    assert torch.allclose(shifted, sinusoids(places + offset, 6, base), atol=1e-9)


def test_a_learned_factor_is_on_every_row_and_learns() -> None:
    """x-transformers' ScaledSinusoidalEmbedding, written out."""
    position = SinusoidalPositionalEmbedding(10, 6, layout="concatenated", init_scale=6**-0.5)
    inverse = 10000 ** -(torch.arange(3).float() / 3)
    angles = torch.arange(10).float()[:, None] * inverse
    rows = torch.cat([angles.sin(), angles.cos()], dim=-1) * position.scale
    torch.testing.assert_close(position.vectors(torch.arange(10)), rows)
    assert {name: tuple(part.shape) for name, part in position.named_parameters()} == {"scale": (1,)}
    made, expected = (part.sum() for part in (position.add(torch.zeros(10, 6), torch.arange(10)), rows))
    torch.testing.assert_close(torch.autograd.grad(made, position.scale), torch.autograd.grad(expected, position.scale))
    layer = TransformerEmbedding(20, 6, 10, dropout=0.0, position=position)
    ids = torch.randint(0, 20, (2, 7))
    torch.testing.assert_close(layer(ids), layer.table(ids) + rows[:7])
    layer(ids).sum().backward()
    assert position.scale.grad is not None


MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])


@pytest.mark.parametrize("width", [4, 9, 16])
def test_rows_equal_those_of_m2m100_and_xglm_also_at_padding(width) -> None:
    pytest.importorskip("transformers")
    from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding
    from transformers.models.xglm.modeling_xglm import XGLMSinusoidalPositionalEmbedding

    ours = SinusoidalPositionalEmbedding(60, width, layout="concatenated", endpoint=True, offset=2, padding_idx=1)
    theirs = M2M100SinusoidalPositionalEmbedding(60, width, padding_idx=1)
    assert ours.waves.shape == theirs.weights.shape
    exact = sinusoids(torch.arange(62).double(), width, layout="concatenated", endpoint=True)
    exact[1] = 0
    assert_no_worse(ours.waves, theirs.weights, exact, slack=1e-8)
    torch.testing.assert_close(ours.waves, theirs.weights, atol=8e-6, rtol=0)  # theirs: angles in float32
    places = positions_of(MASK, MASK, padding_position=-1)
    ids = torch.where(MASK == 1, 7, 1)
    torch.testing.assert_close(ours.vectors(places), theirs(ids), atol=1e-6, rtol=0)
    xglm = XGLMSinusoidalPositionalEmbedding(60, width, padding_idx=1)
    torch.testing.assert_close(ours.vectors(places), xglm(places), atol=1e-6, rtol=0)


@pytest.mark.parametrize("width", [1, 7, 16])
def test_rows_equal_those_of_marian_and_pegasus(width) -> None:
    pytest.importorskip("transformers")
    from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

    theirs = MarianSinusoidalPositionalEmbedding(60, width).create_weight()
    ours = SinusoidalPositionalEmbedding(60, width, layout="concatenated")
    torch.testing.assert_close(ours.waves, theirs, atol=1e-7, rtol=0)
    assert torch.equal(
        ours.waves[:, : (width + 1) // 2], SinusoidalPositionalEmbedding(60, width).waves[:, ::2]
    )  # the same sines, in another place
