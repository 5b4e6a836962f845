"""The factorised table."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embedlayer import FactorizedEmbedding, QuantizedEmbedding, SizeError, TokenEmbedding
from embedlayer.lessons.scratch import ScratchFactorizedEmbedding


def oracle_of(table: FactorizedEmbedding) -> ScratchFactorizedEmbedding:
    return ScratchFactorizedEmbedding(
        table.vocab_size,
        table.embed_dim,
        table.rank,
        padding_idx=table.padding_idx,
        scale=table.scale,
        E1=table.inner.weight.detach().numpy().copy(),
        E2=table.projection.weight.detach().T.numpy().copy(),
    )


@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("scale", [None, "sqrt_dim"])
def test_values_and_gradients_equal_the_one_hot_oracle(padding_idx, scale) -> None:
    table = FactorizedEmbedding(9, 6, 3, padding_idx=padding_idx, scale=scale, dtype=torch.float64)
    oracle = oracle_of(table)
    ids = torch.tensor([[3, 2, 1], [3, 8, 0]])
    upstream = torch.randn(2, 3, 6, dtype=torch.float64)
    vectors = table(ids)
    vectors.backward(upstream)
    np.testing.assert_allclose(vectors.detach().numpy(), oracle.forward(ids.numpy()), rtol=1e-13)
    grad_1, grad_2 = oracle.backward(upstream.numpy())
    np.testing.assert_allclose(table.inner.weight.grad.numpy(), grad_1, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(table.projection.weight.grad.T.numpy(), grad_2, rtol=1e-13, atol=1e-14)


def test_the_product_starts_with_the_standard_deviation_asked_for() -> None:
    for rank in (8, 64):
        rows = FactorizedEmbedding(2000, 128, rank, init_std=0.02).rows(0, 2000)
        assert rows.std().item() == pytest.approx(0.02, rel=0.15)


@settings(max_examples=30)
@given(
    vocab_size=st.integers(1, 30),
    width=st.integers(1, 12),
    data=st.data(),
    weighted=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_error_of_the_nearest_table_is_the_tail_of_the_spectrum(vocab_size, width, data, weighted, seed) -> None:
    rank = data.draw(st.integers(1, width))
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(vocab_size, width, generator=generator, dtype=torch.float64)
    counts = torch.randint(0, 9, (vocab_size,), generator=generator) if weighted else torch.ones(vocab_size)
    counts[0] = 1
    table = FactorizedEmbedding.from_table(rows, rank, counts if weighted else None)
    weights = counts.double().unsqueeze(1)
    missed = (weights * (rows - table.rows(0, vocab_size)).square()).sum()
    spectrum = torch.linalg.svdvals(weights.sqrt() * rows)
    assert torch.allclose(missed, spectrum[rank:].square().sum(), atol=1e-9)


def test_scale_padding_and_type_are_those_of_the_table_and_it_can_be_trained() -> None:
    dense = TokenEmbedding(20, 16, padding_idx=3, scale="sqrt_dim", pad_to_multiple_of=8, dtype=torch.bfloat16)
    table = FactorizedEmbedding.from_table(dense, 4)
    assert (table.vocab_size, table.num_rows, table.padding_idx, table.scale) == (20, 20, 3, 4.0)
    assert table(torch.tensor([3])).eq(0).all()
    assert table(torch.tensor([4])).dtype == torch.bfloat16
    table(torch.tensor([4, 3])).float().sum().backward()
    assert table.inner.weight.grad[4].any()
    rounded = TokenEmbedding(9, 300, scale="sqrt_dim", round_scale=True).bfloat16()
    assert FactorizedEmbedding.from_table(rounded, 2).scale == 17.375  # bfloat16 of 17.32
    whole = QuantizedEmbedding.from_table(torch.randn(9, 6))
    assert torch.allclose(FactorizedEmbedding.from_table(whole, 6).rows(0, 9), whole.rows(0, 9), atol=1e-5)


def test_what_nothing_is_nearest_to_is_refused(unchecked) -> None:
    rows = torch.ones(9, 6)
    for rank in (0, 7):
        with pytest.raises(SizeError):
            FactorizedEmbedding(9, 6, rank)
    for counts in (torch.ones(8), -torch.ones(9)):
        with pytest.raises(SizeError):
            FactorizedEmbedding.from_table(rows, 2, counts)
    for arguments in ((rows, 2, torch.zeros(9)), (rows * torch.nan, 2)):
        with pytest.raises(torch.linalg.LinAlgError):
            FactorizedEmbedding.from_table(*arguments)
