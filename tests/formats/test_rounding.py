"""Rounding by the covariance of a table, against its objective in plain PyTorch. Levels: `test_quantized.py`."""

import pytest
import torch

from embedlayer import QuantizedEmbedding, SizeError
from embedlayer.formats import CovarianceRounding, GGUFBlocks


@pytest.mark.parametrize("options", [{}, {"group_size": 8}, {"layout": GGUFBlocks()}, {"symmetric": True}])
def test_covariance_rounding_lowers_its_objective_and_stays_on_the_levels(options) -> None:
    rows = torch.randn(200, 40) @ torch.randn(40, 40) + 3 * torch.randn(40)
    rows[7] = 0
    tables = [QuantizedEmbedding.from_table(rows, 4, rounding=r, **options) for r in (None, CovarianceRounding())]
    covariance = torch.cov(torch.nn.functional.normalize(rows.double()).T, correction=0)
    weights = covariance / covariance.diagonal().mean() + 4.0 * torch.eye(40, dtype=torch.float64)
    before, after = (((e := table.rows(0, 200).double() - rows) @ weights * e).sum(1) for table in tables)
    assert (after <= before * (1 + 1e-5)).all()
    assert after.sum() < before.sum()
    one, other = (table.row_format.decode(table.packed) for table in tables)
    assert torch.equal(one[1], other[1])
    assert torch.equal(one[2], other[2])
    assert tables[1].rows(7, 8).eq(0).all()


def test_a_weight_of_zero_is_refused() -> None:
    with pytest.raises(SizeError, match="strength must be above 0"):
        CovarianceRounding(strength=0.0)
