"""Single dimensions."""

import numpy as np
import pytest
import torch
from pictures import drawn, lines

import embedlayer as el
from embedlayer import plots
from embedlayer.core.errors import SizeError


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


@pytest.mark.parametrize("values", [torch.zeros(1, 2), torch.full((4, 2), torch.nan), torch.zeros(0, 2)])
def test_curves_of_little_or_nothing_are_still_figures(values):
    drawn(plots.dimension_curves(values, [(0, 1)]))


def test_columns_that_are_not_there_are_refused():
    with pytest.raises(SizeError, match=r"dimension 8 is outside the 8 columns \(0..7\)"):
        plots.dimension_curves(el.SinusoidalPositionalEmbedding(16, 8), [(0, 8)])
    for groups in ([], [()], [(0, 1, 2, 3, 4)]):
        with pytest.raises(SizeError, match="1 to 4 dimensions"):
            plots.dimension_curves(torch.zeros(3, 8), groups)
