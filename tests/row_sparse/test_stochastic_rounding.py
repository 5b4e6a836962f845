"""Stochastic rounding: right on average, reproducible, and the same in kernels."""

import pytest
import torch

import embedlayer as el
from embedlayer.kernels.kernel import kernels_disabled
from embedlayer.row_sparse import StochasticRounding
from embedlayer.row_sparse.stochastic_rounding import round_rows

V, D = 400, 25


def test_the_mean_of_the_rounded_numbers_is_the_number_and_bfloat16_numbers_stay() -> None:
    low, share = torch.tensor([1.0, -3.0, 2.0**-130, 255.0]), torch.tensor([0.5, 0.125, 0.9, 0.3])
    high = torch.nextafter(low.bfloat16(), torch.tensor(torch.inf).bfloat16()).float()
    rows = torch.arange(50_000)
    x = (low + share * (high - low)).expand(len(rows), 4)
    rounded = round_rows(x, rows, seed=7, step=3).float()
    assert ((rounded == low) | (rounded == high)).all()
    chosen = (rounded == high).double()
    assert ((chosen.mean(0) - share).abs() < 5 * (share * (1 - share) / len(rows)).sqrt()).all()
    assert (torch.corrcoef(chosen.T) - torch.eye(4)).abs().max() < 0.025
    exact = torch.cat([torch.randn(1000), torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])]).bfloat16()
    found = round_rows(exact.float().unsqueeze(1), torch.arange(len(exact)), seed=1, step=1).squeeze(1)
    assert torch.equal(found.view(torch.int16)[:-1], exact.view(torch.int16)[:-1])
    assert found[-1].isnan()


def trained(seed: int | None, *, dtype: torch.dtype = torch.bfloat16, weight_decay: float = 0.1) -> torch.Tensor:
    torch.manual_seed(0)
    table = el.RowSparseEmbedding(V, D, dtype=dtype)
    with torch.no_grad():
        table.weight.fill_(1.0)
    rounding = None if seed is None else StochasticRounding(seed)
    optimizer = el.RowAdagrad(table.parameters(), lr=1e-3, weight_decay=weight_decay, rounding=rounding)
    for step in range(40):
        optimizer.zero_grad()
        table(torch.arange(step % 2, V, 2)).sum().backward()
        optimizer.step()
    return table.weight.detach().float()


@pytest.mark.usefixtures("both_paths")
def test_steps_below_half_a_spacing_add_up_and_a_seed_repeats_them() -> None:
    exact, nearest, ours = trained(None, dtype=torch.float32), trained(None), trained(1)
    assert torch.equal(ours, trained(1))
    assert not torch.equal(ours, trained(2))
    assert abs((ours - exact).mean()) < 0.05 * (1 - exact.mean())
    assert (nearest - exact).mean() > 0.5 * (1 - exact.mean())


@pytest.mark.usefixtures("kernels")
def test_kernels_round_with_the_same_bits() -> None:
    ours = trained(5, weight_decay=0.0)
    with kernels_disabled():  # without pending changes, which operators round after the step
        assert (ours == trained(5, weight_decay=0.0)).double().mean() > 0.99


def test_a_seed_is_drawn_from_torchs_generator_and_checked() -> None:
    torch.manual_seed(3)
    first = StochasticRounding()
    torch.manual_seed(3)
    assert StochasticRounding() == first != StochasticRounding()
    with pytest.raises(el.SizeError, match="seed must be from 0"):
        StochasticRounding(-1)
