"""Labels that do not overlap."""

import pytest
import torch
from covering import some
from hypothesis import given
from hypothesis import strategies as st
from pictures import disjoint, drawn

from embedlayer.plots.labels import SIDES, Box, Side, hubs, place_labels, write_labels
from embedlayer.plots.style import new_figure

AREA = Box(0.0, 0.0, 100.0, 60.0)
coordinate = st.floats(-20, 120)


@given(
    st.lists(st.tuples(st.tuples(coordinate, coordinate), st.tuples(st.floats(1, 60), st.floats(1, 20))), max_size=30)
)
def test_placed_labels_lie_inside_on_no_label_and_on_no_named_point(wanted):
    placed = list(place_labels(wanted, AREA, gap=2.0))
    boxes = [side.box(wanted[number][0], wanted[number][1], 2.0) for number, side in placed]
    dots = [Side(0, 0).box(wanted[number][0], (2.0, 2.0), 0.0) for number, _ in placed]
    assert disjoint(boxes)
    assert all(AREA.contains(box) for box in boxes)
    assert not any(box.overlaps(dot) for box in boxes for dot in dots)
    assert [number for number, _ in placed] == sorted({number for number, _ in placed})


def test_the_most_wanted_label_has_the_best_side_and_the_next_takes_what_is_left():
    here = [((50.0, 30.0), (20.0, 8.0))] * 9
    sides = [side for _, side in place_labels(here, AREA)]
    assert sides[:2] == [SIDES[0], SIDES[1]]
    assert 4 <= len(sides) < 9


@pytest.mark.parametrize("point", [(-5.0, 30.0), (float("nan"), 30.0), (50.0, float("inf"))])
def test_a_point_outside_the_area_has_no_label(point):
    assert list(place_labels([(point, (5.0, 5.0))], AREA)) == []


def test_boxes_that_touch_do_not_overlap():
    assert not Box(0, 0, 1, 1).overlaps(Box(1, 0, 2, 1))
    assert Box(0, 0, 1, 1).overlaps(Box(0.9, 0.9, 2, 2))


@pytest.mark.parametrize("dpi", some([200], [60, 200]))
def test_written_labels_do_not_overlap_in_any_resolution(dpi):
    points = torch.rand(200, 2).double().numpy()
    with new_figure(7.2, 5.0) as (figure, axes):
        axes.scatter(*points.T)
        written = write_labels(figure, axes, points, {i: f"point {i}" for i in range(200)}, most=30, mark=True)
    figure.set_dpi(dpi)
    renderer = drawn(figure)
    boxes = [text.get_window_extent(renderer) for text in axes.texts]
    assert len(written) == len(boxes) == 30
    assert disjoint(boxes)
    assert [text.get_text() for text in axes.texts] == [f"point {i}" for i in written]
    assert torch.equal(torch.tensor(axes.collections[-1].get_offsets().data), torch.tensor(points[written]))


def test_hubs_are_counted_as_one_counts_by_hand():
    rows = torch.randn(40, 8)
    unit = torch.nn.functional.normalize(rows.double(), dim=1)
    counts = torch.zeros(40, dtype=torch.long)
    for i in range(40):
        cosines = unit @ unit[i]
        cosines[i] = -2
        counts[cosines.topk(5).indices] += 1
    order = hubs(rows, neighbors=5)
    assert counts[order].tolist() == sorted(counts.tolist(), reverse=True)
    assert sorted(order.tolist()) == list(range(40))


@pytest.mark.parametrize("rows", [torch.zeros(0, 4), torch.ones(1, 4), torch.full((3, 2), torch.nan)])
def test_few_rows_and_rows_without_a_direction_have_an_order_too(rows):
    assert sorted(hubs(rows).tolist()) == list(range(len(rows)))
