"""The map's numbers, beside the library's."""

import numpy as np
import pytest
import torch

from embedlayer import TokenEmbedding
from embedlayer.analysis import TokenVectors, principal_components
from embedlayer.core.errors import SizeError, TokenIdError
from embedlayer.explorer import tokens
from embedlayer.opening import OpenedModel


def floats(content: bytes, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(content, np.float32).copy()).view(*shape)


def test_neighbours_are_those_of_token_vectors(of_run):
    vectors = TokenVectors(of_run.table, of_run.tokenizer)
    for plus, minus in (([40], []), ([270, 271], [272]), ([], [30])):
        params = {"plus": ",".join(map(str, plus)), "minus": ",".join(map(str, minus)), "topn": "7"}
        found = tokens.neighbors(of_run, params)
        expected = vectors.most_similar(plus, minus, topn=7)
        assert [of_run.token_texts[token] for token, _ in found] == [text for text, _ in expected]
        assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=2e-5)


def test_places_are_the_exact_principal_components(of_run):
    found = principal_components(of_run.rows, 6)
    size = of_run.table.vocab_size
    assert torch.equal(floats(tokens.coordinates(of_run, {}), 6, size), found.coordinates.T.float())
    assert torch.equal(floats(tokens.coordinates(of_run, {"count": "2"}), 2, size), found.coordinates[:, :2].T.float())
    assert tokens.axes(of_run, {})["explained"] == found.explained_variance_ratio.tolist()


def test_a_direction_is_the_cosine_of_every_row(of_run):
    units = torch.nn.functional.normalize(of_run.rows)
    query = units[40] - units[50]
    expected = units @ query / query.norm()
    found = floats(tokens.along(of_run, {"plus": "40", "minus": "50"}), -1)
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.allclose(floats(tokens.norms(of_run, {}), -1), of_run.rows.norm(dim=1))


def test_the_nearest_of_all_are_those_of_each(of_run):
    size = of_run.table.vocab_size
    content = tokens.nearest(of_run, {})
    ids = np.frombuffer(content, np.uint32, size * 10).reshape(size, 10)
    scores = floats(content[4 * size * 10 :], size, 10)
    for token in (0, 41, 280):
        expected = tokens.neighbors(of_run, {"plus": str(token), "topn": "10"})
        assert scores[token].tolist() == pytest.approx([score for _, score in expected], abs=2e-5)
        assert set(ids[token].tolist()) == {other for other, _ in expected}


def test_exported_vectors_are_the_rows_to_a_127th_of_their_largest_number(of_run):
    size, width = of_run.rows.shape
    content = tokens.vectors(of_run, {})
    largest = floats(content[: 4 * size], size)
    rows = torch.from_numpy(np.frombuffer(content[4 * size :], np.int8).reshape(size, width).copy()).float()
    assert torch.equal(largest, of_run.rows.abs().amax(1))
    assert ((rows * largest[:, None] / 127 - of_run.rows).abs() <= largest[:, None] / 250).all()


def test_frequencies_are_counted_over_the_whole_text(run, of_run):
    counts = floats(tokens.frequencies(of_run, {}), -1)
    text = (run.path / "text.txt").read_text()
    ids = of_run.tokenizer.encode(text, add_special_tokens=False).ids
    for token in set(ids):
        assert counts[token] == ids.count(token)


def test_broken_zero_and_nameless_rows_do_no_harm():
    rows = torch.randn(8, 3)
    rows[1], rows[2, 0] = 0.0, torch.inf
    source = OpenedModel("eight", TokenEmbedding.from_pretrained(rows), tokens=["a", "b", "c", "d", "e", "f", "g", ""])
    places = floats(tokens.coordinates(source, {"count": "3"}), 3, 8)
    assert places[:, 2].isnan().all()
    assert places[:, [0, 1, 3, 4, 5, 6, 7]].isfinite().all()
    found = tokens.neighbors(source, {"plus": "0"})
    assert sorted(token for token, _ in found) == [1, 3, 4, 5, 6]
    tokens.nearest(source, {})


def test_what_cannot_be_asked_is_refused(of_run):
    for params, error in (
        ({"plus": "9999"}, TokenIdError),
        ({"plus": "x"}, SizeError),
        ({"plus": ",".join(["1"] * 101)}, SizeError),
        ({}, SizeError),
        ({"plus": "1", "topn": "0"}, SizeError),
        ({"plus": "1", "topn": "100000"}, SizeError),
    ):
        with pytest.raises(error):
            tokens.neighbors(of_run, params)


def test_how_much_of_a_table_is_exported_follows_from_its_size(of_run, monkeypatch):
    assert tokens.exported_vectors(of_run) == [{}]
    assert tokens.exported_nearest(of_run) == []
    monkeypatch.setattr(tokens, "EXPORTED_NUMBERS", 100)
    assert tokens.exported_vectors(of_run) == []
    assert tokens.exported_nearest(of_run) == [{}]
    assert "Sums of tokens are not" in tokens.left_out(of_run)[0]
    monkeypatch.setattr(tokens, "EXPORTED_ROWS", 100)
    assert tokens.exported_nearest(of_run) == []
    assert "too large" in tokens.left_out(of_run)[0]
