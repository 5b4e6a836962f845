"""Row-sparse tables: their gradients, and rows with pending updates."""

import pytest
import torch

from embedlayer import OutputHead, RowAdamW, RowSparseEmbedding, SizeError, TokenEmbedding, clip_grad_norm_
from embedlayer.row_sparse.gradient import coalesced

pytestmark = pytest.mark.usefixtures("both_paths")


def with_pending(**options) -> tuple[RowSparseEmbedding, RowAdamW]:
    """Build a table whose rows 5 to 9 have pending updates."""
    torch.manual_seed(0)
    table = RowSparseEmbedding(10, 4, **options)
    optimizer = RowAdamW(table.parameters(), lr=0.1, weight_decay=0.5)
    step(table, optimizer, torch.arange(10))
    for _ in range(3):
        step(table, optimizer, torch.tensor([[1, 2, 2]]))
    return table, optimizer


def step(table, optimizer, ids) -> None:
    optimizer.zero_grad()
    table(ids).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_gradient_is_the_dense_one_with_each_row_once(dtype) -> None:
    row = RowSparseEmbedding(11, 6, padding_idx=7, scale=0.5, dtype=dtype)
    dense = TokenEmbedding(11, 6, padding_idx=7, scale=0.5, dtype=dtype)
    ids, upstream = torch.tensor([[3, 7, 1, 0], [3, 3, 10, 7]]), torch.randn(2, 4, 6).to(dtype)
    for table in (row, dense):
        table(ids).backward(upstream)
    assert row.weight.grad._indices().tolist() == [[0, 1, 3, 10]]
    assert torch.allclose(row.weight.grad.to_dense(), dense.weight.grad, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6)


def test_equal_ids_are_summed_in_the_order_of_the_batch() -> None:
    ids, values = torch.randint(0, 5, (200,)), torch.randn(200, 3)
    grad = torch.sparse_coo_tensor(ids.unsqueeze(0), values, (5, 3), check_invariants=False)
    for row, total in zip(coalesced(grad)._indices()[0], coalesced(grad)._values(), strict=True):
        one_by_one = torch.zeros(3)
        for value in values[ids == row]:
            one_by_one += value
        assert torch.equal(total, one_by_one)
    only_padding = torch.sparse_coo_tensor(torch.tensor([[2, 2]]), values[:2], (5, 3), check_invariants=False)
    assert coalesced(only_padding, drop=2)._nnz() == 0


def test_clipping_leaves_what_backward_was_called_with_alone() -> None:
    table, upstream = RowSparseEmbedding(10, 4), torch.ones(2, 4)
    table(torch.tensor([1, 2])).backward(upstream)
    clip_grad_norm_(table.parameters(), 0.1)
    assert upstream.eq(1).all()


def test_rows_that_were_read_long_after_their_last_gradient_stay_where_they_are() -> None:
    table, optimizer = with_pending()
    pending, state = table.pending_updates, optimizer.state[table.weight]
    steps = 60_000
    pending.load_state(
        table.weight,
        (state["exp_avg"], state["exp_avg_sq"]),
        {
            "history": torch.tensor([[1e-3], [1e-8], [0.0]], dtype=torch.float64).expand(3, steps),
            "value_steps": torch.full((10,), steps - 3),
            "moment_steps": torch.full((10,), 1),
        },
        {"start": 0, "betas": [0.9, 0.95, 1e-8]},
    )
    before = table.weight.detach().clone()
    assert torch.equal(table.rows(0, 10), before)


def test_padding_and_spare_rows_stay_zero() -> None:
    table, optimizer = with_pending(padding_idx=2, pad_to_multiple_of=8)
    step(table, optimizer, torch.tensor([2, 2]))
    assert table.weight.pending_updates.step == 5
    assert table.rows(0, 16)[[2, *range(10, 16)]].eq(0).all()


def test_a_head_cannot_be_tied_to_a_row_sparse_table() -> None:
    with pytest.raises(SizeError, match="tied to a row-sparse table. Use an untied head"):
        OutputHead(RowSparseEmbedding(10, 4))


def test_a_frozen_table_is_read_and_not_watched_until_it_learns() -> None:
    table = RowSparseEmbedding(10, 4)
    table.weight.requires_grad_(False)
    assert not table(torch.tensor([1])).requires_grad
    table.weight.requires_grad_(True)
    table(torch.tensor([1, 1])).sum().backward()
    assert table.weight.grad._indices().tolist() == [[1]]
