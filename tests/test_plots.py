"""Figures, tested by what they hold."""

import math
import re
import sys
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from embedlayer import plots
from embedlayer.errors import MissingExtraError, ShapeError

METRICS = [
    {"step": 0, "loss": 8.3, "validation_loss": 8.31},
    {"step": 10, "loss": 6.0},
    {"step": 20, "loss": math.nan},
    {"step": 30, "loss": 5.0, "validation_loss": None},
    {"step": 40, "validation_loss": 4.9},
]


def drawn(figure: Figure):
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    return renderer


def texts(figure: Figure):
    return [text.get_text() for text in figure.axes[0].texts]


def test_optimizer_paths_hold_each_path_and_the_steps_with_a_gradient():
    paths = {"dense": [1.0, 2.0, 3.0], "rows": [1.0, 2.0, 3.0], "lazy": [1.0, 1.0, 1.5]}
    figure = plots.optimizer_paths(paths, touched=[1, 3])
    *lines, marks = figure.axes[0].lines
    assert {line.get_label(): line.get_ydata().tolist() for line in lines} == paths
    assert marks.get_xdata().tolist() == [1, 3]
    drawn(figure)


def test_the_loss_curve_holds_the_finite_losses_and_the_baseline():
    figure = plots.loss_curve(METRICS, baseline=math.log(4096))
    training, validation, baseline = figure.axes[0].lines
    assert training.get_xydata().tolist() == [[0, 8.3], [10, 6.0], [30, 5.0]]
    assert validation.get_xydata().tolist() == [[0, 8.31], [40, 4.9]]
    assert baseline.get_ydata()[0] == math.log(4096)
    assert texts(figure) == ["ln V = 8.32, knowing nothing"]
    assert figure.axes[0].get_ylabel() == "loss (nats per token)"


@pytest.mark.parametrize("metrics", [[], [{"step": 0, "loss": 8.3}], [{"step": 0}]])
def test_a_loss_curve_of_little_or_nothing_is_still_a_figure(metrics):
    drawn(plots.loss_curve(metrics))


def test_the_map_shows_every_row_and_labels_that_cover_nothing():
    coordinates = torch.randn(500, 2, dtype=torch.float64)
    labels = {index: f" word{index}" for index in range(200)}
    figure = plots.table_map(coordinates, labels, explained_variance_ratio=torch.tensor([0.25, 0.0312]), max_labels=30)
    axes = figure.axes[0]
    np.testing.assert_array_equal(axes.collections[0].get_offsets(), coordinates.numpy())
    assert axes.collections[0].get_rasterized()
    assert axes.get_xlabel() == "first component (25 % of the variance)"
    assert axes.get_ylabel() == "second component (3.12 % of the variance)"
    renderer = drawn(figure)
    boxes = [label.get_window_extent(renderer) for label in axes.texts]
    assert 20 <= len(boxes) <= 30
    assert not any(one.overlaps(other) for i, one in enumerate(boxes) for other in boxes[:i])
    area = axes.get_window_extent(renderer)
    assert all(area.x0 <= box.x0 and box.x1 <= area.x1 and area.y0 <= box.y0 and box.y1 <= area.y1 for box in boxes)


def test_the_first_labels_are_placed_first():
    coordinates = torch.tensor([[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]])
    assert texts(plots.table_map(coordinates, {2: "wanted", 1: "late", 0: "apart"}, max_labels=2)) == ["wanted", "late"]


def test_labels_that_no_font_can_write_are_left_out():
    assert texts(plots.table_map(torch.eye(2), {0: "\U0001f9ff\ue000x", 1: "$_\n"})) in (["$_⏎"], [r"\ue000x", "$_⏎"])


def test_the_map_colours_rows_by_a_value_and_names_it():
    figure = plots.table_map(torch.randn(9, 2), values=torch.arange(9.0), value_label="norm")
    np.testing.assert_array_equal(figure.axes[0].collections[0].get_array(), np.arange(9.0))
    assert figure.axes[1].get_ylabel() == "norm"


@pytest.mark.parametrize("coordinates", [torch.zeros(0, 2), torch.zeros(1, 2), torch.zeros(5, 2)])
def test_a_map_of_nothing_or_of_one_place_is_still_a_figure(coordinates):
    drawn(plots.table_map(coordinates, {0: "a"} if len(coordinates) else {}))


def test_a_label_without_a_row_is_refused():
    with pytest.raises(ShapeError, match=r"Label for row 7, but there are 2 rows \(0..1\)"):
        plots.table_map(torch.zeros(2, 2), {7: "lost"})


def test_the_heat_map_is_white_at_zero_and_reaches_equally_far_both_ways():
    values = torch.tensor([[0.0, -3.0], [1.0, 2.0], [0.5, 0.0]])
    figure = plots.position_heatmap(values, title="t", value_label="bias", column_label="head")
    image = figure.axes[0].images[0]
    np.testing.assert_array_equal(image.get_array(), values.numpy())
    assert image.get_clim() == (-3.0, 3.0)
    assert min(image.to_rgba(0.0)) > 0.95
    assert (figure.axes[0].get_xlabel(), figure.axes[1].get_ylabel()) == ("head", "bias")


@pytest.mark.parametrize("values", [torch.zeros(3, 2), torch.full((1, 1), -1.0), torch.full((2, 2), torch.inf)])
def test_heat_maps_without_contrast_are_still_figures(values):
    drawn(plots.position_heatmap(values, title="", value_label=""))


def test_the_histogram_counts_every_finite_norm():
    norms = torch.cat([torch.rand(1000), torch.tensor([torch.nan])])
    figure = plots.norm_histogram(norms, bins=20)
    assert sum(bar.get_height() for bar in figure.axes[0].patches) == 1000
    assert texts(figure) == [f"median {norms[:1000].median():.3g}"]
    drawn(plots.norm_histogram(torch.zeros(0)))


def test_figures_leave_no_trace_in_matplotlib():
    import matplotlib.pyplot

    before = dict(matplotlib.rcParams)
    plots.svg(plots.loss_curve(METRICS), prefix="a")
    assert dict(matplotlib.rcParams) == before
    assert matplotlib.pyplot.get_fignums() == []


def test_an_inline_svg_is_well_formed_takes_the_pages_colours_and_keeps_its_ids_apart():
    text = plots.svg(
        plots.table_map(torch.tensor([[0.0, 0.0], [1.0, 1.0]]), {0: "<&>", 1: 'id="a#1f2a37'}), prefix="map"
    )
    written = [element.text for element in ElementTree.fromstring(text).iter() if element.tag.endswith("text")]
    assert {"<&>", 'id="a#1f2a37'} <= set(written), "labels are texts, and stay as they are"
    assert all(name.startswith("map-") for name in re.findall(r'<[^>]*\bid="([^"]+)"', text))
    assert set(re.findall(r'href="#([^"]+)"', text)) <= set(re.findall(r'<[^>]*\bid="([^"]+)"', text))
    assert "var(--ink, " in text
    assert plots.MUTED not in text.replace(f"var(--muted, {plots.MUTED})", "")
    assert len(re.findall(r"<image\b", text)) == 1, "the points are pixels"


def test_the_same_figure_gives_the_same_svg():
    once, again = (plots.svg(plots.loss_curve(METRICS, baseline=8.0), prefix="a") for _ in range(2))
    assert once == again


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        (" a", "·a"),
        ("\n\t", "⏎⇥"),
        ("\x00\x7f", r"\x00\x7f"),
        ("\u202e", r"\u202e"),
        ("\ud800", r"\ud800"),
        ("é日", "é日"),
    ],
)
def test_unseen_characters_become_visible(token, shown):
    assert plots.visible_text(token) == shown


def test_without_matplotlib_the_install_line_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'embedlayer\[plots\]'"):
        plots.loss_curve(METRICS)
