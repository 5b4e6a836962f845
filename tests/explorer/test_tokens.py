"""The map's numbers, beside the library's."""

import pytest
import torch
from explorer_requests import numbers

from embedlayer import TokenEmbedding
from embedlayer.analysis import TokenVectors, principal_components
from embedlayer.opening import OpenedModel


def test_neighbours_and_directions_are_those_of_token_vectors(ask, of_run):
    vectors, size = TokenVectors(of_run.table, of_run.tokenizer), of_run.table.vocab_size
    for plus, minus in (([40], []), ([270, 271], [272]), ([], [30])):
        terms = {"plus": ",".join(map(str, plus)), "minus": ",".join(map(str, minus))}
        found, expected = ask(of_run, "neighbors", topn=7, **terms), vectors.most_similar(plus, minus, topn=7)
        assert [of_run.token_texts[token] for token, _ in found] == [text for text, _ in expected]
        assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=2e-5)
        cosines = numbers(ask(of_run, "along", **terms))
        units = torch.nn.functional.normalize(of_run.rows)
        query = units[plus].sum(0) - units[minus].sum(0)
        assert torch.allclose(cosines, units @ query / query.norm(), atol=1e-5)
    content = ask(of_run, "nearest")
    ids = numbers(content[: 40 * size], size, 10, dtype=torch.int32)
    scores = numbers(content[40 * size :], size, 10)
    for token in (0, 41, 280):
        expected = ask(of_run, "neighbors", plus=token, topn=10)
        assert scores[token].tolist() == pytest.approx([score for _, score in expected], abs=2e-5)
        assert {*ids[token].tolist()} == {other for other, _ in expected}


def test_places_are_the_exact_principal_components_and_norms_those_of_the_rows(ask, of_run):
    found, size = principal_components(of_run.rows, 6), of_run.table.vocab_size
    for count in (6, 2):
        places = numbers(ask(of_run, "coordinates", count=count), count, size)
        assert torch.equal(places, found.coordinates[:, :count].T.float())
    assert ask(of_run, "coordinates") == ask(of_run, "coordinates", count=6)
    assert ask(of_run, "axes")["explained"] == found.explained_variance_ratio.tolist()
    assert torch.allclose(numbers(ask(of_run, "norms")), of_run.rows.norm(dim=1))


def test_exported_vectors_are_the_rows_to_a_127th_of_their_largest_number(ask, of_run):
    size, width = of_run.rows.shape
    content = ask(of_run, "vectors")
    largest, rows = numbers(content[: 4 * size], size, 1), numbers(content[4 * size :], size, width, dtype=torch.int8)
    assert torch.equal(largest, of_run.rows.abs().amax(1, keepdim=True))
    assert ((rows * largest / 127 - of_run.rows).abs() <= largest / 250).all()


def test_frequencies_are_counted_over_the_whole_text(ask, run, of_run):
    counts = numbers(ask(of_run, "frequencies")).tolist()
    ids = of_run.tokenizer.encode((run.path / "text.txt").read_text(), add_special_tokens=False).ids
    assert counts == [ids.count(token) for token in range(of_run.table.vocab_size)]


def test_broken_zero_and_nameless_rows_do_no_harm(ask):
    rows = torch.randn(8, 3)
    rows[1], rows[2, 0] = 0.0, torch.inf
    source = OpenedModel("eight", TokenEmbedding.from_pretrained(rows), tokens=["a", "b", "c", "d", "e", "f", "g", ""])
    places = numbers(ask(source, "coordinates", count=3), 3, 8)
    assert places.isnan().all(0).nonzero()[:, 0].tolist() == places.isnan().any(0).nonzero()[:, 0].tolist() == [2]
    assert sorted(token for token, _ in ask(source, "neighbors", plus=0)) == [1, 3, 4, 5, 6]
    ask(source, "nearest")
