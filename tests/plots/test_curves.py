"""Single dimensions."""

import numpy as np
import torch
from pictures import lines

import embedlayer as el
from embedlayer import plots


def test_each_strip_holds_its_columns():
    waves = el.SinusoidalPositionalEmbedding(80, 64)
    figure = plots.dimension_curves(waves, [(0, 1), (30,)], length=50)
    values = waves.vectors(torch.arange(50)).double().numpy()
    first, second = lines(figure, 0), lines(figure, 1)
    assert list(first) == ["dimension 0", "dimension 1"]
    np.testing.assert_array_equal(first["dimension 1"][:, 1], values[:, 1])
    np.testing.assert_array_equal(second["dimension 30"], np.stack([np.arange(50), values[:, 30]], 1))
    assert figure.axes[1].get_xlabel() == "position"
    assert figure.get_supylabel() == "added to the token"
