"""The tour of the embedding layer shows what it says."""

import math

import numpy as np
import pytest

from embedlayer.lessons.tour import demonstrate_embeddings


@pytest.fixture(autouse=True)
def _numpy_seed() -> None:
    np.random.seed(0)


@pytest.mark.parametrize("sizes", [(100, 32, 8), (5, 7, 12), (3, 1, 4), (1, 2, 1)])
def test_the_tour_shows_what_it_says(sizes):
    vocab_size, embed_dim, seq_len = sizes
    tour = demonstrate_embeddings(*sizes, verbose=False)
    assert np.array_equal(tour.looked_up, tour.product)
    assert np.flatnonzero(tour.grad_rows).tolist() == sorted(set(tour.token_ids.tolist()))
    assert len(np.unique(tour.repeated, axis=0)) == seq_len
    assert tour.similarity.shape == (seq_len, seq_len)
    assert np.allclose(tour.reordered_scores, tour.scores[np.ix_(tour.order, tour.order)])
    assert tour.uniform_loss == pytest.approx(math.log(vocab_size))
    assert tour.untied_parameters == 2 * tour.tied_parameters == 2 * vocab_size * embed_dim
    assert tour.table_bytes == vocab_size * embed_dim * 4


def test_a_tied_head_starts_near_ln_v_only_from_small_rows():
    tour = demonstrate_embeddings(1000, 256, 64, verbose=False)
    assert tour.first_loss == pytest.approx(tour.uniform_loss, abs=0.3)
    assert tour.wide_first_loss > 10 * tour.uniform_loss


def test_the_tour_prints_a_line_a_stop_within_80_columns(capsys):
    np.random.seed(0)
    tour = demonstrate_embeddings()
    lines = capsys.readouterr().out.splitlines()
    assert lines == str(tour).splitlines()
    assert [line[0] for line in lines] == list("1234567")
    assert max(map(len, lines)) <= 80
    np.random.seed(0)
    assert str(demonstrate_embeddings(verbose=False)) == str(tour)
    assert capsys.readouterr().out == ""
