"""The factorised table."""

import numpy as np
import pytest
import torch

from embedlayer import FactorizedEmbedding, SizeError, TokenEmbedding
from embedlayer.scratch import ScratchFactorizedEmbedding


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


def test_both_directions_read_the_same_product() -> None:
    table = FactorizedEmbedding(50, 16, 4, scale="sqrt_dim", dtype=torch.float64)
    rows = table.inner.weight @ table.projection.weight.T
    hidden = torch.randn(2, 5, 16, dtype=torch.float64)
    targets = torch.randint(0, 50, (2, 5))
    assert torch.allclose(table.rows(10, 20), rows[10:20])
    assert torch.allclose(table(torch.arange(50)), 4.0 * rows)
    assert torch.allclose(table.logits(hidden), hidden @ rows.T)
    dense = TokenEmbedding.from_pretrained(rows)
    assert torch.allclose(table.loss(hidden, targets), dense.loss(hidden, targets))


def test_the_product_starts_with_the_standard_deviation_asked_for() -> None:
    for rank in (8, 64):
        rows = FactorizedEmbedding(2000, 128, rank, init_std=0.02).rows(0, 2000)
        assert rows.std().item() == pytest.approx(0.02, rel=0.15)


def test_it_has_v_r_plus_r_d_numbers() -> None:
    table = FactorizedEmbedding(30000, 768, 128)
    assert sum(parameter.numel() for parameter in table.parameters()) == 30000 * 128 + 128 * 768


def test_the_padding_row_is_zero_and_its_logit_too() -> None:
    table = FactorizedEmbedding(9, 6, 3, padding_idx=2)
    assert table(torch.tensor([2])).eq(0).all()
    assert table.logits(torch.randn(4, 6))[:, 2].eq(0).all()
    table.loss(torch.randn(4, 6), torch.tensor([0, 1, 3, 4])).backward()
    assert table.inner.weight.grad[2].eq(0).all()


def test_what_was_saved_is_read_back_bit_for_bit(tmp_path) -> None:
    table = FactorizedEmbedding(9, 6, 3, padding_idx=2, pad_to_multiple_of=4)
    table.save_pretrained(tmp_path)
    again = FactorizedEmbedding.read_pretrained(tmp_path)
    assert again.config == table.config
    assert torch.equal(again.rows(0, 9), table.rows(0, 9))


def test_it_compiles_to_one_graph(unchecked: None) -> None:
    table = FactorizedEmbedding(9, 6, 3)
    ids = torch.randint(0, 9, (2, 3))
    compiled = torch.compile(lambda ids: table.logits(table(ids)), fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(ids), table.logits(table(ids)))


def test_a_rank_that_saves_nothing_is_refused() -> None:
    with pytest.raises(SizeError, match="rank 7 exceeds embed_dim 6"):
        FactorizedEmbedding(9, 6, 7)
    with pytest.raises(SizeError, match="rank must be at least 1"):
        FactorizedEmbedding(9, 6, 0)
