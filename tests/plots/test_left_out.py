"""Every row that is passed is drawn, or the figure says that it is not; outliers do not squash the others."""

import math
import re
from collections.abc import Callable
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from covering import some
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text
from pictures import drawn, lines
from torch import Tensor

import embedlayer as el
from embedlayer import plots

N = 24
BROKEN = (3, 21)


def said(figure: Figure, what: str = r"\w+") -> int:
    """How many things the texts of a figure say are left out."""
    written = " ".join(text.get_text() for text in figure.findobj(Text))
    found = [*re.findall(rf"([\d,]+) {what} left out: ", written), *re.findall(r"\(([\d,]+) not finite\)", written)]
    return sum(int(number.replace(",", "")) for number in found)


def points(figure: Figure) -> int:
    return sum(int(np.isfinite(np.ma.filled(dots.get_offsets(), np.nan)).all(1).sum()) for dots in collections(figure))


def collections(figure: Figure) -> list[Any]:
    return list(figure.axes[0].collections)


def bars(figure: Figure) -> int:
    return int(sum(bar.get_height() for bar in figure.axes[0].patches))


def cells(figure: Figure) -> int:
    """Rows of each heat map; grey ones count if the figure says what grey is."""
    pictures = [axes.images[0].get_array() for axes in figure.axes if axes.images]
    is_said = any("grey: not finite" in axes.get_ylabel() for axes in figure.axes)
    assert is_said == any(np.ma.getmaskarray(picture).any() for picture in pictures)
    assert len({len(picture) for picture in pictures}) == 1
    return len(pictures[0])


def on_lines(figure: Figure) -> int:
    return sum(int(np.isfinite(xy).all(1).sum()) for xy in lines(figure).values())


def metrics(values: Tensor) -> list[dict[str, float]]:
    return [{"step": step, "loss": value} for step, value in enumerate(values.tolist())]


def rows_of_a_spectrum(figure: Figure) -> int:
    (curve,) = lines(figure).values()
    (whole,) = lines(plots.spectrum({"rows": sound(with_rows(BROKEN))})).values()
    return N if not said(figure) else N - len(BROKEN) if np.allclose(curve, whole) else 0


def tokens_of(rows: Tensor) -> Figure:
    tokenizer = el.train_tokenizer(" ".join(f"w{number}" for number in range(N)), kind="word")
    table = torch.zeros(tokenizer.get_vocab_size(), rows.shape[1])
    names = [f"w{number}" for number in range(N)]
    table[[tokenizer.token_to_id(name) for name in names]] = rows
    return plots.token_similarity(table, tokenizer, names)


class Case(NamedTuple):
    draw: Callable[[Tensor], Figure]
    count: Callable[[Figure], int]


CASES = {
    "table_map": Case(lambda rows: plots.table_map(rows[:, :2]), points),
    "norm_histogram": Case(lambda rows: plots.norm_histogram(rows.norm(dim=1)), bars),
    "spectrum": Case(lambda rows: plots.spectrum({"rows": rows}), rows_of_a_spectrum),
    "gradient_rows": Case(lambda rows: plots.gradient_rows(rows, title="Mine"), lambda figure: len(patches(figure))),
    "similarity_matrix": Case(lambda rows: plots.similarity_matrix(rows, names(rows)), cells),
    "token_similarity": Case(tokens_of, cells),
    "position_similarity": Case(plots.position_similarity, cells),
    "position_heatmap": Case(plots.position_heatmap, cells),
    "compare_positions": Case(lambda rows: plots.compare_positions({"a": rows, "b": rows}), cells),
    "token_path": Case(lambda rows: plots.token_path({"row": rows}, names(rows)), cells),
    "attention_orders": Case(lambda rows: plots.attention_orders(rows, range(N)[::-1], names(rows)), cells),
    "dimension_curves": Case(lambda rows: plots.dimension_curves(rows, [[0]]), on_lines),
    "loss_curve": Case(lambda rows: plots.loss_curve(metrics(rows[:, 0])), on_lines),
    "loss_curves": Case(lambda rows: plots.loss_curves({"a": metrics(rows[:, 0])}, key="loss"), on_lines),
    "optimizer_paths": Case(lambda rows: plots.optimizer_paths({"a": rows[:, 0].tolist()}), on_lines),
}

SCHEMES = {
    "attention_bias": (lambda: plots.attention_bias(el.AlibiBias(32)), lambda figure: len(figure.axes[0].lines), 32),
    "rotary_scores": (lambda: plots.rotary_scores(el.RotaryEmbedding(8), starts=range(6)), lambda f: len(lines(f)), 6),
    "rotary_angles": (lambda: plots.rotary_angles(el.RotaryEmbedding(8), length=40), points, 40),
}
"""Functions that draw a scheme, which has no broken rows: heads, starts and positions."""


def patches(figure: Figure) -> list[Any]:
    return list(figure.axes[0].patches)


def names(rows: Tensor) -> list[str]:
    return [f"token{number}" for number in range(len(rows))]


def with_rows(broken: tuple[int, ...]) -> Tensor:
    rows = torch.rand(N, 4, generator=torch.Generator().manual_seed(0)) + 0.5
    rows[list(broken)] = torch.tensor([math.nan, math.inf])[: len(broken), None]
    return rows


def sound(rows: Tensor) -> Tensor:
    return rows[rows.isfinite().all(1)]


def test_every_function_that_draws_is_held_to_the_law():
    no_pictures = {"THEME", "svg", "visible_characters", "visible_text", "path_steps"}
    assert set(plots.__all__) - no_pictures == CASES.keys() | SCHEMES.keys()


@pytest.mark.parametrize(
    ("name", "broken"), some([("table_map", ()), *product(CASES, [BROKEN])], product(CASES, [(), BROKEN]))
)
@pytest.mark.filterwarnings("ignore:Attempting to set identical")
def test_every_row_is_drawn_or_its_number_is_written_in_the_figure(name, broken):
    figure = CASES[name].draw(with_rows(broken))
    assert CASES[name].count(figure) + said(figure, "rows?") == N
    assert said(figure, "rows?") in (0, len(broken)) or name == "gradient_rows"


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:Attempting to set identical")
def test_axes_of_names_have_no_grid_and_all_others_say_what_they_measure_or_count(name):
    for axes in CASES[name].draw(with_rows(())).axes:
        for axis in (axes.xaxis, axes.yaxis):
            has_names = any(label.get_text().strip("0123456789.−-+ ") for label in axis.get_ticklabels())
            if has_names:
                assert not any(line.get_visible() for line in axis.get_gridlines())
            elif axis.get_gridlines() and name != "dimension_curves":  # whose values have no unit
                assert axis.get_label_text()
            if axis.get_label_text() in ("position", "dimension", "step"):
                assert all(float(tick).is_integer() for tick in axis.get_ticklocs())


@pytest.mark.parametrize("name", ["table_map", "norm_histogram"])
def test_one_outlier_does_not_squash_the_others_and_is_named(name):
    rows = with_rows(())
    usual = CASES[name].draw(rows).axes[0]
    rows[7] = 1e4
    figure = CASES[name].draw(rows)
    assert CASES[name].count(figure) == N
    assert figure.axes[0].get_xlim()[1] < 3 * usual.get_xlim()[1]
    assert figure.get_supxlabel() in (
        "1 row far outside drawn at the edge (diamonds).",
        "1 row with a norm of 2e+04 counted in the last bar.",
    )


def test_a_part_of_the_rows_is_no_outlier():
    for values in (torch.cat([torch.linspace(0, 1, 90), torch.full((10,), 100.0)]), torch.tensor([1.0, 1, 1, 1, 5])):
        figure = plots.table_map(torch.rand(len(values), 2), values=values)
        assert figure.axes[0].collections[0].get_clim() == (values.min(), values.max())


def test_no_half_of_the_ids_covers_the_other():
    places = torch.rand(4000, 2, generator=torch.Generator().manual_seed(0))
    later = (torch.arange(4000) >= 2000).float()
    figure = plots.table_map(places, values=later)
    order = figure.axes[0].collections[0].get_array()
    assert 0.45 < float(order[:2000].mean()) < 0.55
    again = plots.table_map(places, values=later).axes[0].collections[0].get_array()
    np.testing.assert_array_equal(order, again)


def test_one_value_apart_does_not_take_the_colours_of_the_others():
    values = torch.linspace(0, 1, N)
    values[5] = 1000
    figure = plots.table_map(with_rows(())[:, :2], values=values)
    assert figure.axes[0].collections[0].get_clim() == (0.0, 1.0)
    assert figure.axes[0].collections[0].cmap.colorbar_extend == "max"


def orders(rows: Tensor, labels: list[str]) -> Figure:
    return plots.attention_orders(rows, range(len(rows)), labels)


@pytest.mark.parametrize(
    ("draw", "count"),
    some([(plots.similarity_matrix, 129), (orders, 30)], product([plots.similarity_matrix, orders], [30, 60, 129])),
)
def test_labels_are_readable_or_said_to_be_left_out(draw, count):
    rows = torch.eye(count)
    figure = draw(rows, names(rows))
    shown = [label for label in figure.axes[0].get_yticklabels() if label.get_text().startswith("token")]
    assert len(shown) == (count if count <= 128 else 0)
    assert said(figure, "labels?") == count - len(shown)
    if shown:
        renderer = drawn(figure)
        boxes = [label.get_window_extent(renderer) for label in shown]
        assert all(one.y0 >= other.y1 - 2 for one, other in pairwise(boxes))


def test_marks_of_equal_tables_are_all_visible():
    shares = torch.tensor([0.4, 0.3, 0.2, 0.1])
    figure = plots.spectrum(dict.fromkeys("abcd", shares))
    marks = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
    sizes = [line.get_markersize() for line in marks]
    assert len({to_hex(line.get_color()) for line in marks}) == 4
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 4


def test_a_cell_of_a_large_matrix_is_not_lost_between_two_pixels():
    values = torch.zeros(1501, 8)
    values[range(750, 758), range(8)] = 1.0
    figure = plots.position_heatmap(values)
    pixels = np.asarray(figure.axes[0].images[0].make_image(drawn(figure))[0])
    assert (pixels != pixels[0, 0]).any((0, 2)).all(), "a cell of each column"
