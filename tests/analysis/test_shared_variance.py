"""What all rows of a table share, and rows without it."""

import pytest
import torch

from embedlayer.analysis.row_reader import RowReader
from embedlayer.analysis.shared_variance import shared_variance, without_shared_part

TRAINED = torch.randn(300, 24, generator=torch.Generator().manual_seed(0))


def measured(rows: torch.Tensor):
    reader = RowReader(rows)
    return shared_variance(reader, reader.norms() > 0)


def test_the_shares_are_those_of_the_definition() -> None:
    rows = torch.randn(200, 6, dtype=torch.float64) * torch.arange(1, 7) + torch.randn(6)
    rows[:, 2], rows[7] = 0.25, 0.0
    rows[8, 1] = torch.nan
    found, kept = measured(rows), rows[[row for row in range(200) if row not in (7, 8)]]
    variance = kept.var(0, correction=0)
    assert found.rows == 198
    assert found.scale == pytest.approx(float(kept.square().mean().sqrt()))
    assert found.offset_share == pytest.approx(float(198 * kept.mean(0).square().sum() / kept.square().sum()))
    assert (found.dimension, found.dimension_share) == (5, pytest.approx(float(variance[5] / variance.sum())))
    values = torch.linalg.svdvals(kept - kept.mean(0)).square()
    assert found.component_share == pytest.approx(float(values[0] / values.sum()))
    assert (found.constant, found.rank, found.most_rank) == ((2,), 5, 5)


@pytest.mark.parametrize(
    ("spoil", "faults"),
    [
        (lambda rows: rows, []),
        (lambda rows: rows + 5, ["One offset that all rows share holds 96 %"]),
        (lambda rows: rows * torch.tensor([1.0] * 23 + [50.0]), ["Dimension 23 alone holds 99 %"]),
        (lambda rows: rows + 9 * torch.randn(300, 1) * torch.ones(24), ["One direction holds 9"]),
        (lambda rows: rows * 1e18, ["The scale is out of range: "]),
        (lambda rows: rows * 1e-18, ["The scale is out of range: "]),
        (lambda rows: rows.index_fill(1, torch.tensor([3, 4]), 0.0), ["2 columns are constant"]),
        (lambda rows: rows.bfloat16(), []),
    ],
)
def test_each_fault_is_a_sentence_with_its_evidence_and_rows_are_judged_without_it(spoil, faults) -> None:
    rows = spoil(TRAINED)
    found = measured(rows)
    sentences = list(found.faults())
    assert len(sentences) == len(faults)
    assert all(sentence.startswith(start) for sentence, start in zip(sentences, faults, strict=True))
    judged = without_shared_part(rows, found)
    if not faults:
        assert judged is rows
    elif "direction" not in faults[0]:  # which may be where the meaning is
        assert list(measured(judged).faults()) in ([], sentences[:1] if found.constant else [])


def test_low_rank_rows_and_tables_without_rows_are_told() -> None:
    few = TRAINED[:, :4] @ torch.randn(4, 24)
    assert measured(few).has_few_directions
    assert not measured(TRAINED).has_few_directions
    assert list(measured(torch.zeros(50, 4)).faults()) == []
    zero = torch.cat([torch.zeros(3, 24), TRAINED + 9])
    assert (without_shared_part(zero, measured(zero))[:3] == 0).all()
