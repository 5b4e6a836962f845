"""Rows as points."""

import numpy as np
import pytest
import torch
from pictures import disjoint, drawn, texts

import embedlayer as el
from embedlayer import plots


def in_order(coordinates: torch.Tensor) -> np.ndarray:
    """Points in the order of their coordinates, whatever the order in which they are drawn."""
    points = coordinates.detach().numpy()
    return points[np.lexsort(points.T)]


def places(figure) -> np.ndarray:
    return in_order(torch.from_numpy(np.asarray(figure.axes[0].collections[0].get_offsets())))


def test_the_map_shows_every_row_and_labels_that_cover_nothing():
    coordinates = torch.randn(500, 2, dtype=torch.float64)
    labels = {index: f" word{index}" for index in range(200)}
    figure = plots.table_map(
        coordinates, labels=labels, explained_variance_ratio=torch.tensor([0.25, 0.0312]), max_labels=30
    )
    axes = figure.axes[0]
    np.testing.assert_array_equal(places(figure), in_order(coordinates))
    assert axes.collections[0].get_rasterized()
    assert axes.get_xlabel() == "first component (25 % of the variance)"
    assert axes.get_ylabel() == "second component (3.12 % of the variance)"
    renderer = drawn(figure)
    boxes = [label.get_window_extent(renderer) for label in axes.texts]
    assert 20 <= len(boxes) <= 30
    assert disjoint(boxes)
    assert all(text.startswith("·word") for text in texts(figure))
    named = [int(text.removeprefix("·word")) for text in texts(figure)]
    marks = axes.collections[-1].get_offsets()
    np.testing.assert_array_equal(marks, coordinates[named].numpy())
    assert not any(box.contains(*dot) for box in boxes for dot in axes.transData.transform(marks))
    area = axes.get_window_extent(renderer)
    assert all(area.x0 <= box.x0 and box.x1 <= area.x1 and area.y0 <= box.y0 and box.y1 <= area.y1 for box in boxes)


def test_the_first_labels_are_placed_first():
    coordinates = torch.tensor([[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]])
    assert texts(plots.table_map(coordinates, labels={2: "wanted", 1: "late", 0: "apart"}, max_labels=2)) == [
        "wanted",
        "late",
    ]
    outside = torch.tensor([[0.0, 0.0], [1.0, 1.0], [torch.nan, 0.0], [torch.inf, 1.0]])
    assert texts(plots.table_map(outside, labels=dict(enumerate("abcd")))) == ["a", "b"]


def test_labels_that_no_font_can_write_are_left_out():
    figure = plots.table_map(torch.eye(2), labels={0: "\U0001f9ff\ue000x", 1: "$_\n"})
    assert texts(figure) in (
        ["$_⏎"],
        [r"\ue000x", "$_⏎"],
    )


def test_the_map_colours_rows_by_a_value_and_names_it():
    figure = plots.table_map(torch.randn(9, 2), values=torch.arange(9.0), value_label="norm")
    np.testing.assert_array_equal(np.sort(figure.axes[0].collections[0].get_array()), np.arange(9.0))
    assert figure.axes[1].get_ylabel() == "norm"


@pytest.mark.parametrize("table", [el.TokenEmbedding(60, 12), el.FactorizedEmbedding(60, 12, 3)])
def test_a_table_is_drawn_along_its_principal_components(table):
    figure = plots.table_map(table)
    found = el.analysis.principal_components(table.rows(0, 60).detach())
    np.testing.assert_allclose(places(figure), in_order(found.coordinates), atol=1e-12)
    assert f"{100 * found.explained_variance_ratio[0]:.3g} %" in figure.axes[0].get_xlabel()


def test_rows_that_are_not_finite_have_no_place_and_leave_the_others_where_they_are():
    whole = el.TokenEmbedding(50, 6)
    broken = el.TokenEmbedding(52, 6)
    with torch.no_grad():
        broken.weight[:50] = whole.weight
        broken.weight[50:] = torch.tensor([[torch.nan], [torch.inf]])
    figure = plots.table_map(broken, labels={51: "lost", 3: "there"})
    np.testing.assert_array_equal(places(figure), places(plots.table_map(whole)))
    assert texts(figure) == ["there"]


def test_a_tokenizer_names_whole_words_and_the_hub_first():
    tokenizer = el.train_tokenizer("cat dog fish bird x 12 . " * 5, kind="word")
    size = tokenizer.get_vocab_size()
    table = el.TokenEmbedding(size + 3, 8)  # with rows that have no token
    cat = tokenizer.token_to_id("cat")
    assert cat is not None
    with torch.no_grad():
        table.weight.copy_(torch.eye(size + 3, 8) + 0.01 * torch.randn(size + 3, 8))
        table.weight[cat] = 1.0  # near everyone
    figure = plots.table_map(table, tokenizer=tokenizer, max_labels=50)
    assert set(texts(figure)) <= {"cat", "dog", "fish", "bird"}
    assert texts(figure)[0] == "cat"
    assert texts(plots.table_map(table, tokenizer, labels={cat: "mine"})) == ["mine"]


def test_words_are_named_in_the_order_in_which_they_are_nearest_neighbours():
    tokenizer = el.train_tokenizer([" ".join(f"word{chr(97 + i)}" for i in range(26))], kind="word")
    table = el.TokenEmbedding(tokenizer.get_vocab_size(), 8)
    ids = [index for index in range(len(table.weight)) if tokenizer.decode([index]).startswith("word")]
    counts = dict.fromkeys(ids, 0)
    unit = torch.nn.functional.normalize(table.weight[ids].detach().double(), dim=1)
    for i in range(26):
        cosines = unit @ unit[i]
        cosines[i] = -2
        for place in cosines.topk(10).indices.tolist():
            counts[ids[place]] += 1
    named = [counts[tokenizer.token_to_id(name)] for name in texts(plots.table_map(table, tokenizer))]
    assert len(named) > 5
    assert named == sorted(named, reverse=True)


def test_pieces_of_words_are_not_named_where_words_begin_with_a_space():
    tokenizer = el.train_tokenizer("the thermal weather gathers other feathers together " * 20, vocab_size=300)
    words = {"the", "thermal", "weather", "gathers", "other", "feathers", "together"}
    table = el.TokenEmbedding(tokenizer.get_vocab_size(), 16)
    named = set(texts(plots.table_map(table, tokenizer=tokenizer)))
    pieces = {tokenizer.decode([index]) for index in range(tokenizer.get_vocab_size())}
    assert "ther" in pieces
    assert named
    assert all(any(word.startswith(name) for word in words) for name in named)


def test_a_layout_that_keeps_neighbours_is_drawn_in_place_of_components():
    tokenizer = el.train_tokenizer("cat dog fish bird x 12 . " * 5, kind="word")
    table = el.TokenEmbedding(tokenizer.get_vocab_size(), 8)
    layout = el.analysis.neighbor_layout(table, rounds=3)
    figure = plots.table_map(table, tokenizer, layout=layout)
    axes = figure.axes[0]
    np.testing.assert_allclose(places(figure), in_order(layout.places))
    assert (axes.get_xlabel(), "neighbours" in axes.get_title(loc="left")) == ("", True)
    assert texts(figure)


@pytest.mark.parametrize("function", [plots.table_map, el.analysis.TokenVectors, el.analysis.table_health])
def test_a_tokenizer_is_the_second_argument_or_named_and_ours_or_of_transformers(function):
    pytest.importorskip("transformers", reason="the hf extra is not installed")
    from transformers import PreTrainedTokenizerFast

    tokenizer = el.train_tokenizer("cat dog fish bird", kind="word")
    table = el.TokenEmbedding(tokenizer.get_vocab_size(), 8)
    for each in (tokenizer, PreTrainedTokenizerFast(tokenizer_object=tokenizer)):
        function(table, each)
        function(table, tokenizer=each)
    with pytest.raises(el.core.errors.TokenizerError, match="A dict is not a tokenizer"):
        function(table, {1: "cat"})
