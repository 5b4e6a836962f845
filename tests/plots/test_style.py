"""The look that all pictures share, and pictures in pages."""

import io
import re
import sys
import xml.etree.ElementTree as ElementTree
from itertools import combinations

import pytest
import torch
from PIL import Image

import embedlayer as el
from embedlayer import plots
from embedlayer.plots import THEME

COLOURS = {variable: colour for colour, variable in THEME.items()}
MUTED, PAPER = COLOURS["--muted"], COLOURS["--paper"]
LINES = [COLOURS[f"--{name}"] for name in ("blue", "orange", "green", "purple")]

METRICS = [{"step": 0, "loss": 8.3, "validation_loss": 8.31}, {"step": 10, "loss": 6.0}]

EYES = {  # what is seen of linear RGB: Machado, Oliveira and Fernandes 2009, severity 1
    "all colours": [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "no blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
CONES = [[0.4122215, 0.5363325, 0.0514460], [0.2119035, 0.6806995, 0.1073970], [0.0883025, 0.2817188, 0.6299787]]
LAB = [[0.2104543, 0.7936178, -0.0040720], [1.9779985, -2.4285922, 0.4505937], [0.0259040, 0.7827718, -0.8086758]]


def linear(colour: str) -> torch.Tensor:
    channels = torch.tensor([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return torch.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def seen(colour: str, eye: list[list[float]]) -> torch.Tensor:
    """The colour in OKLab, where equal distances look equally different (Ottosson 2020)."""
    cones = torch.tensor(CONES) @ (torch.tensor(eye) @ linear(colour)).clamp(0, 1)
    return torch.tensor(LAB) @ cones.pow(1 / 3)


def contrast(one: str, other: str) -> float:
    light, dark = sorted(
        (float(linear(c) @ torch.tensor([0.2126, 0.7152, 0.0722])) for c in (one, other)), reverse=True
    )
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("eye", EYES)
def test_colours_of_lines_are_told_apart_with_any_kind_of_colour_vision(eye):
    for one, other in combinations(LINES, 2):
        assert torch.dist(seen(one, EYES[eye]), seen(other, EYES[eye])) > 0.12, (one, other)


def test_lines_and_texts_stand_out_from_the_paper():
    assert contrast(MUTED, PAPER) > 4.5
    assert all(contrast(colour, PAPER) > 2.9 for colour in LINES)


def test_grey_for_no_number_is_none_of_the_colours_for_numbers():
    import matplotlib

    values = torch.tensor([[0.0, torch.nan], [1.0, -1.0]], dtype=torch.float64)
    picture = plots.position_heatmap(values).axes[0].images[0]
    colours = torch.tensor(matplotlib.colormaps["RdBu_r"](range(256)))[:, :3]
    assert (colours - torch.tensor(picture.cmap.get_bad()[:3])).abs().amax(1).min() > 0.1
    picture.get_array()[:] = 1  # which is never the tensor's own memory
    assert values[0, 0] == 0


def test_figures_leave_no_trace_in_matplotlib():
    import matplotlib.pyplot

    before = dict(matplotlib.rcParams)
    plots.svg(plots.loss_curve(METRICS), prefix="a")
    assert dict(matplotlib.rcParams) == before
    assert matplotlib.pyplot.get_fignums() == []


def test_ticks_that_are_made_while_drawing_have_the_style_too():
    figure = plots.norm_histogram(torch.rand(50))
    figure.set_size_inches(14, 9)  # more room, more ticks
    figure.draw_without_rendering()
    labels = figure.axes[0].get_xticklabels()
    assert {(label.get_fontsize(), label.get_color()) for label in labels} == {(9.0, MUTED)}


def test_an_inline_svg_is_well_formed_takes_the_pages_colours_and_keeps_its_ids_apart():
    text = plots.svg(
        plots.table_map(torch.tensor([[0.0, 0.0], [1.0, 1.0]]), labels={0: "<&>", 1: 'id="a#1f2a37'}), prefix="map"
    )
    written = [element.text for element in ElementTree.fromstring(text).iter() if element.tag.endswith("text")]
    assert {"<&>", 'id="a#1f2a37'} <= set(written), "labels are texts, and stay as they are"
    assert all(name.startswith("map-") for name in re.findall(r'<[^>]*\bid="([^"]+)"', text))
    assert set(re.findall(r'href="#([^"]+)"', text)) <= set(re.findall(r'<[^>]*\bid="([^"]+)"', text))
    assert "var(--ink, " in text
    assert MUTED not in text.replace(f"var(--muted, {MUTED})", "")
    assert len(re.findall(r"<image\b", text)) == 1, "the points are pixels"


def test_a_notebook_displays_a_figure_at_its_size_in_twice_the_pixels() -> None:
    png, shown = plots.loss_curve(METRICS)._repr_png_()
    with Image.open(io.BytesIO(png)) as picture:
        assert picture.size == (2 * shown["width"], 2 * shown["height"])


def test_without_matplotlib_the_install_line_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(el.MissingExtraError, match=r"pip install 'embedlayer\[plots\]'"):
        plots.loss_curve(METRICS)
