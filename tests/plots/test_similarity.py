"""Cosines and scores."""

import numpy as np
import pytest
import torch
from pictures import image, texts

import embedlayer as el
from embedlayer import plots


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


def test_scores_of_another_order_are_the_same_numbers_moved():
    vectors, order = torch.randn(4, 8), [2, 0, 3, 1]
    figure = plots.attention_orders(vectors, order, ["the", " cat", "sat", "."])
    scores, moved = image(figure, 0), image(figure, 1)
    np.testing.assert_allclose(scores, (vectors.double() @ vectors.double().T).numpy())
    np.testing.assert_allclose(moved, scores[np.ix_(order, order)], rtol=1e-12)
    assert figure.axes[1].get_title(loc="left") == "sat the . cat"
