"""Cosines and scores."""

import numpy as np
import pytest
import torch
from covering import LONG
from pictures import drawn, image, lines, texts

import embedlayer as el
from embedlayer import plots
from embedlayer.core.errors import ShapeError, SizeError, TokenizerError


def test_cosines_are_drawn_as_torch_computes_them_and_written_into_the_cells():
    rows = torch.randn(5, 16)
    figure = plots.similarity_matrix(rows, list("abcde"))
    expected = torch.nn.functional.cosine_similarity(rows[:, None].double(), rows[None].double(), dim=-1)
    np.testing.assert_allclose(image(figure), expected.numpy(), atol=1e-12)
    assert texts(figure) == [f"{value:.2f}".replace("-", "−") for value in expected.flatten().tolist()]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == list("abcde")
    assert figure.axes[0].images[0].get_clim() == (-1.0, 1.0)


def test_zero_rows_are_like_nobody_and_broken_rows_are_grey():
    figure = plots.similarity_matrix(torch.tensor([[0.0, 0.0], [1.0, 0.0], [torch.nan, 1.0]]))
    assert image(figure)[0].tolist()[:2] == [0.0, 0.0]
    assert image(figure).mask[2].all()
    assert not image(figure).mask[:2, :2].any()
    assert "grey" in figure.axes[1].get_ylabel()


@pytest.mark.parametrize("rows", [pytest.param(torch.ones(1, 3), marks=LONG), torch.zeros(0, 3)])
@pytest.mark.filterwarnings("ignore:Attempting to set identical")
def test_one_row_and_none_are_still_figures(rows):
    drawn(plots.similarity_matrix(rows))


def test_a_vocabulary_is_not_compared_with_itself():
    with pytest.raises(SizeError, match="50,257 rows have 2,525,766,049 pairs; choose at most 2,048 rows"):
        plots.similarity_matrix(torch.zeros(1, 1).expand(50257, 1))
    with pytest.raises(ShapeError, match="one for each of the 3 rows, not 2"):
        plots.similarity_matrix(torch.zeros(3, 2), ["a", "b"])


def test_only_the_rows_of_the_tokens_are_read(monkeypatch):
    tokenizer = el.train_tokenizer("cat dog fish", kind="word")
    table = el.TokenEmbedding(tokenizer.get_vocab_size(), 8)
    dog = tokenizer.token_to_id("dog")
    assert dog is not None
    read = []
    rows = table.rows

    def counted(start, stop):
        read.append(stop - start)
        return rows(start, stop)

    monkeypatch.setattr(table, "rows", counted)
    figure = plots.token_similarity(table, tokenizer, ["cat", dog])
    assert set(read) == {1}
    assert image(figure)[0, 1] == pytest.approx(
        el.analysis.TokenVectors(table, tokenizer).similarity("cat", "dog"), abs=1e-6
    )
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["cat", "dog"]
    with pytest.raises(TokenizerError, match="'bird' is not in this tokenizer's vocabulary"):
        plots.token_similarity(table, tokenizer, ["bird"])
    with pytest.raises(SizeError, match="at least one token"):
        plots.token_similarity(table, tokenizer, [])


@pytest.mark.parametrize(("width", "neighbours"), [(8, 0.884), (64, 0.966)])
def test_neighbouring_sinusoids_are_as_alike_as_the_picture_says(width, neighbours):
    figure = plots.position_similarity(el.SinusoidalPositionalEmbedding(64, width), length=50)
    matrix, curve = image(figure), figure.axes[1].lines[0].get_ydata()
    expected = sum(np.cos(10000 ** (-2 * i / width)) for i in range(width // 2)) / (width // 2)
    assert expected == pytest.approx(neighbours, abs=5e-4)
    np.testing.assert_allclose(np.diagonal(matrix, 1), expected, atol=1e-6)
    assert curve[1] == pytest.approx(expected, abs=1e-6)
    assert figure.axes[1].get_title(loc="left") == f"neighbours: {neighbours}"
    np.testing.assert_allclose(curve, [np.diagonal(matrix, d).mean() for d in range(50)], atol=1e-12)


def test_near_positions_are_more_alike_and_no_two_are_the_same():
    matrix = image(plots.position_similarity(el.SinusoidalPositionalEmbedding(128, 64), length=128))
    assert matrix[5, 6] > matrix[5, 15]
    assert (matrix[~np.eye(128, dtype=bool)] < 0.99).all()


@pytest.mark.parametrize(
    "values", [torch.ones(1, 4), pytest.param(torch.full((3, 2), torch.nan), marks=LONG), torch.zeros(0, 4)]
)
@pytest.mark.filterwarnings("ignore:Attempting to set identical")
def test_few_and_broken_positions_are_still_figures(values):
    drawn(plots.position_similarity(values))


def test_positions_that_add_no_vectors_have_no_cosine():
    with pytest.raises(SizeError, match="AlibiBias adds no vectors.*See rotary_scores and attention_bias"):
        plots.position_similarity(el.AlibiBias(4))


def test_scores_of_another_order_are_the_same_numbers_moved():
    vectors, order = torch.randn(4, 8), [2, 0, 3, 1]
    figure = plots.attention_orders(vectors, order, ["the", " cat", "sat", "."])
    scores, moved = image(figure, 0), image(figure, 1)
    np.testing.assert_allclose(scores, (vectors.double() @ vectors.double().T).numpy())
    np.testing.assert_allclose(moved, scores[np.ix_(order, order)], rtol=1e-12)
    assert figure.axes[1].get_title(loc="left") == "sat the . cat"
    with pytest.raises(SizeError, match=r"permutation of 0..3"):
        plots.attention_orders(vectors, [0, 0, 1, 2], list("abcd"))
    with pytest.raises(ShapeError, match="one for each of the 4 tokens, not 3"):
        plots.attention_orders(vectors, order, list("abc"))


def test_only_the_curve_has_a_line_of_its_own():
    assert lines(plots.position_similarity(torch.eye(3)), 1) == {}
