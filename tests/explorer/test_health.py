"""The room's numbers are those of the analysis."""

import numpy as np
import pytest
import torch

from embedlayer import TokenEmbedding, pca
from embedlayer.analysis.health import health as examine
from embedlayer.explorer import health
from embedlayer.explorer.source import Source


def test_findings_are_the_analysis_own_with_the_texts_of_the_page(of_run):
    expected = examine(of_run.table, of_run.tokenizer, before=of_run.before().table)
    found = health.found(of_run, {})
    assert found["under_trained"]["rows"] == int(expected.under_trained.flagged.sum())
    assert found["never_touched"]["rows"] == len(expected.never_touched)
    scores = np.frombuffer(health.scores(of_run, {}), np.float32)
    assert torch.equal(torch.from_numpy(scores.copy()), expected.under_trained.scores.float())
    for finding in found["under_trained"]["tokens"]:
        assert finding["text"] == of_run.tokens[finding["id"]]


def test_shares_of_the_variance_are_those_of_the_principal_components(of_run):
    found = health.shares(of_run, {})
    assert found["explained"] == pytest.approx(pca(of_run.rows, 16).explained_variance_ratio.tolist(), abs=1e-5)


def test_an_even_table_uses_every_dimension_and_rows_of_one_direction_use_one():
    even = Source("even", TokenEmbedding.from_pretrained(torch.cat([torch.eye(8), -torch.eye(8)])))
    assert health.shares(even, {})["effective_rank"] == pytest.approx(8, abs=1e-6)
    assert health.shares(even, {})["mean_cosine"] == pytest.approx(-1 / 15)
    line = Source("line", TokenEmbedding.from_pretrained(torch.arange(1.0, 5)[:, None] * torch.ones(4, 3)))
    assert health.shares(line, {})["effective_rank"] == pytest.approx(1, abs=1e-6)
    assert health.shares(line, {})["mean_cosine"] == pytest.approx(1)
