"""Figures in notebooks."""

import io

import torch
from PIL import Image

from embedlayer import plots


def test_a_notebook_displays_a_figure_at_its_size_in_twice_the_pixels() -> None:
    figure = plots.spectrum({"random": torch.randn(20, 8)})
    png, shown = figure._repr_png_()
    with Image.open(io.BytesIO(png)) as picture:
        assert picture.size == (2 * shown["width"], 2 * shown["height"])
    assert shown == {"width": 720, "height": 390}
