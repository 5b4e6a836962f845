"""Lengths, directions, gradients."""

import numpy as np
import pytest
import torch
from pictures import drawn, lines, texts

import embedlayer as el
from embedlayer import plots


def test_the_histogram_counts_every_finite_norm():
    norms = torch.cat([torch.rand(1000), torch.tensor([torch.nan])])
    figure = plots.norm_histogram(norms, bins=20)
    assert sum(bar.get_height() for bar in figure.axes[0].patches) == 1000
    assert texts(figure) == [f"median {norms[:1000].median():.3g}"]


@pytest.mark.parametrize("table", [el.TokenEmbedding(900, 4), el.FactorizedEmbedding(900, 4, 2)])
def test_the_norms_of_a_table_are_those_of_its_rows(table):
    figures = plots.norm_histogram(table), plots.norm_histogram(table.rows(0, 900).norm(dim=1))
    one, other = ([bar.get_height() for bar in figure.axes[0].patches] for figure in figures)
    assert one == other


def test_shares_of_the_variance_are_those_of_the_principal_components():
    rows = torch.randn(300, 6) @ torch.diag(torch.tensor([5.0, 3.0, 1.0, 0.5, 0.1, 0.0])) + 7
    expected = el.analysis.principal_components(rows, 6).explained_variance_ratio
    table = el.TokenEmbedding.from_pretrained(rows)
    figure = plots.spectrum({"table": table, "rows": rows, "shares": expected})
    for points in lines(figure).values():
        np.testing.assert_allclose(points[:, 1], 100 * expected.cumsum(0).numpy())
        np.testing.assert_array_equal(points[:, 0], np.arange(1, 7))


def test_the_spectrum_counts_the_directions_that_hold_a_share():
    shares = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    assert [*lines(plots.spectrum({"a": shares}))] == ["a: 50 % in 2 components"]
    assert [*lines(plots.spectrum({"a": shares}, share=0.9))] == ["a: 90 % in 3 components"]
    assert [*lines(plots.spectrum({"a": torch.zeros(4)}))] == ["a: no variance"]


@pytest.mark.parametrize("row_sparse", [False, True])
def test_only_rows_that_were_used_are_drawn_the_longest_first(row_sparse):
    table = (el.RowSparseEmbedding if row_sparse else el.TokenEmbedding)(1000, 8)
    upstream = torch.tensor([1.0, 3.0, 1.0, 2.0])[:, None]
    (table(torch.tensor([7, 4, 7, 9])) * upstream).sum().backward()
    figure = plots.gradient_rows(table)
    bars = [bar.get_width() for bar in figure.axes[0].patches]
    assert bars == pytest.approx([np.sqrt(8) * size for size in (3, 2, 2)])
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["row 4", "row 7", "row 9"]
    assert figure.axes[0].get_title(loc="left") == "3 of 1,000 rows have a gradient"


def test_a_factorised_table_is_drawn_by_its_narrow_rows():
    table = el.FactorizedEmbedding(50, 8, 3)
    table(torch.tensor([7, 4])).sum().backward()
    lengths = table.inner.weight.grad.norm(dim=1)
    found = [bar.get_width() for bar in plots.gradient_rows(table).axes[0].patches]
    np.testing.assert_allclose(sorted(found), sorted(lengths[[4, 7]].tolist()), rtol=1e-6)


def test_a_tied_table_has_a_gradient_in_every_row_of_which_a_few_are_drawn():
    tokenizer = el.train_tokenizer("a $x$ b c d e f g", kind="word")
    size = tokenizer.get_vocab_size()
    table = el.TokenEmbedding(size, 8)
    table.loss(table(torch.tensor([1, 2])), torch.tensor([2, 3])).backward()
    figure = plots.gradient_rows(table, tokenizer, most=4)
    lengths = table.weight.grad.norm(dim=1).sort(descending=True).values
    np.testing.assert_allclose([bar.get_width() for bar in figure.axes[0].patches], lengths[:4].numpy(), rtol=1e-6)
    assert figure.axes[0].get_title(loc="left") == f"{size} of {size} rows have a gradient"
    assert texts(figure) == [f"{length:.3g}" for length in lengths[:4].tolist()]
    assert figure.get_supxlabel() == f"{size - 4} rows left out: a smaller gradient."
    assert not any(label.get_parse_math() for label in figure.axes[0].get_yticklabels())
    drawn(figure)
