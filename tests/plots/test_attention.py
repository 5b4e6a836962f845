"""Biases, rotated scores, angles."""

import math

import numpy as np
import pytest
import torch
from covering import some
from pictures import disjoint, drawn, lines, texts

import embedlayer as el
from embedlayer import plots


@pytest.mark.parametrize("heads", some([8], [8, 12]))
def test_each_head_falls_with_its_slope(heads):
    position = el.AlibiBias(heads)
    figure = plots.attention_bias(position, length=40)
    left, right = figure.axes
    for head, (line, factor) in enumerate(zip(left.lines, right.lines, strict=True)):
        expected = -position.slopes[head].double().numpy() * np.arange(40)
        np.testing.assert_allclose(line.get_ydata(), expected, rtol=1e-6)
        np.testing.assert_allclose(factor.get_ydata(), np.exp(expected), rtol=1e-5)
    renderer = drawn(figure)
    for axes in figure.axes:
        assert disjoint([text.get_window_extent(renderer) for text in axes.texts])
    named = {*texts(figure, 0), *texts(figure, 1)}
    assert "head 0" in named
    assert heads == 12 or len(named) == heads, "every head of eight is named in one panel or the other"


def test_learned_biases_are_drawn_as_the_scheme_gives_them():
    position = el.RelativePositionBias(3, bidirectional=False)
    figure = plots.attention_bias(position, length=20)
    places = torch.arange(20)[None]
    bias = position.bias(places[:, -1:], places)[0, :, 0].flip(1).detach()
    for head, line in enumerate(figure.axes[0].lines):
        np.testing.assert_allclose(line.get_ydata(), bias[head].double().numpy())


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotated_scores_depend_on_the_distance_only(interleaved):
    q, k = torch.randn(2, 16).unbind()
    position = el.RotaryEmbedding(16, interleaved=interleaved)
    curves = lines(plots.rotary_scores(position, q=q, k=k, starts=[0, 1000, 100_000], length=30))
    assert list(curves) == ["key at position 0", "key at position 1,000", "key at position 100,000"]
    first, *others = curves.values()
    for other in others:
        np.testing.assert_allclose(other, first, atol=1e-4)
    assert first[0, 1] == pytest.approx(float(q @ k), rel=1e-5)
    unturned = q[None, None, None], k[None, None, None]
    for distance in (1, 29):
        turned_q = position.rotate(*unturned, torch.tensor([distance]))[0]
        assert first[distance, 1] == pytest.approx(float(turned_q.flatten() @ k), abs=1e-5)


def test_equal_channels_score_like_sinusoids():
    curve = lines(plots.rotary_scores(el.RotaryEmbedding(64), length=40, starts=[0]))["key at position 0"]
    waves = torch.nn.functional.normalize(el.positions.sinusoids(torch.arange(40).double(), 64), dim=-1)
    np.testing.assert_allclose(curve[:, 1], (waves @ waves[0]).numpy(), atol=1e-5)


def test_angles_are_the_librarys_and_the_turns_are_counted():
    position = el.RotaryEmbedding(64)
    figure = plots.rotary_angles(position, pairs=[0, 16], length=7)
    cos, sin = position.cos_sin(torch.arange(7))
    for axes, pair in zip(figure.axes, (0, 16), strict=False):
        np.testing.assert_allclose(
            axes.collections[0].get_offsets(), torch.stack([cos[:, pair], sin[:, pair]], 1).double().numpy()
        )
    assert figure.axes[0].get_xlabel() == f"one rotation in\n{2 * math.pi:.1f} positions"
    assert figure.axes[1].get_xlabel() == "one rotation in\n628 positions"
