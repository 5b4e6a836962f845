"""Rows whose norms are apart from all others."""

import pytest
import torch

from embedlayer.analysis.norm_outliers import norm_outliers


def tail(count: int, scale: float) -> torch.Tensor:
    """Norms with a Pareto tail: the logarithm falls exponentially."""
    return (scale * torch.empty(count).exponential_()).exp()


@pytest.mark.parametrize("factor", [8.0, 1 / 8])
@pytest.mark.parametrize("count", [1, 30, 200])
def test_rows_multiplied_by_a_factor_are_found(factor, count) -> None:
    norms = 1 + 0.1 * torch.randn(3000).clamp(-3, 3)
    chosen = torch.randperm(3000)[:count].sort().values
    norms[chosen] *= factor
    (found,) = norm_outliers(norms)
    assert found.ids == tuple(chosen.tolist())
    assert found.are_long == (factor > 1)
    assert found.low <= found.high
    assert found.median == pytest.approx(1.0, abs=0.05)
    assert found.log10_chance < -6


@pytest.mark.parametrize("scale", [0.05, 0.3, 1.0])
def test_norms_with_a_heavy_tail_have_no_outliers(scale) -> None:
    for _ in range(20):
        assert norm_outliers(tail(2000, scale)) == ()
        assert norm_outliers(1 / tail(2000, scale)) == ()


def test_half_of_the_rows_are_no_outliers_and_few_rows_have_none() -> None:
    norms = torch.rand(1000) + 1
    norms[:500] *= 10
    assert norm_outliers(norms) == ()
    assert norm_outliers(torch.tensor([1.0] * 20 + [50.0])) == ()
    assert norm_outliers(torch.tensor([])) == ()
    broken = torch.ones(500)
    broken[:9], broken[9:20] = torch.nan, 0.0
    assert norm_outliers(broken) == ()
    usable = torch.ones(500, dtype=torch.bool)
    broken[40], usable[40] = 90.0, False
    assert norm_outliers(broken, usable) == ()
