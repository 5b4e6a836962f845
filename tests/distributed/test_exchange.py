"""What crosses between processes, and the gradients on the way back."""

import pytest
import torch
import torch.distributed as dist
from processes import on_ranks

from embedlayer.distributed.exchange import announce, exchange, gather_rows


def swap():
    """Rank r sends r + q + 1 rows, all `10 r + q`, to rank q."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sends = [rank + other + 1 for other in range(ranks)]
    rows = torch.cat([torch.full((count, 2), 10.0 * rank + other) for other, count in enumerate(sends)])
    rows.requires_grad_()
    receives = announce(sends, None, "cpu")
    came = exchange(rows, sends, receives, None)
    (came * torch.arange(1.0, len(came) + 1).unsqueeze(1)).sum().backward()
    everybody, counts = gather_rows(torch.full((rank, 1), float(rank), dtype=torch.float64), None)
    return receives, came.detach(), rows.grad, everybody, counts


def summed():
    """Each rank's loss weighs all gathered rows by its own number."""
    rank = dist.get_rank()
    rows = torch.ones(rank + 1, 3, dtype=torch.float64, requires_grad=True)
    (gather_rows(rows, None)[0] * 10**rank).sum().backward()
    return rows.grad


def transformed():
    """The gradients of `summed` and of rows sent in a ring, by `torch.func.grad`."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sends = [2 if other == (rank + 1) % ranks else 0 for other in range(ranks)]
    receives = announce(sends, None, "cpu")
    rows = torch.ones(2, 3, dtype=torch.float64)
    gathered = torch.func.grad(lambda rows: (gather_rows(rows, None)[0] * 10**rank).sum())(rows)
    sent = torch.func.grad(lambda rows: (exchange(rows, sends, receives, None) * 10**rank).sum())(rows)
    return gathered, sent


@pytest.mark.parametrize("ranks", [1, 3])
def test_rows_go_where_they_are_sent_and_their_gradients_come_back(ranks) -> None:
    found = on_ranks(ranks, swap)
    for rank, (receives, came, _, everybody, counts) in enumerate(found):
        assert receives == [other + rank + 1 for other in range(ranks)]
        expected = [10.0 * other + rank for other in range(ranks) for _ in range(other + rank + 1)]
        assert came[:, 0].tolist() == expected
        assert counts == list(range(ranks))
        assert everybody[:, 0].tolist() == [rank for rank in range(ranks) for _ in range(rank)]
    for rank, (_, _, grad, _, _) in enumerate(found):
        first = 0
        for other in range(ranks):
            count = rank + other + 1
            place = sum(earlier + other + 1 for earlier in range(rank))
            assert grad[first : first + count, 0].tolist() == [place + 1 + n for n in range(count)]
            first += count


def test_the_gradient_of_gathered_rows_is_summed_over_the_ranks() -> None:
    for grad in on_ranks(3, summed):
        assert grad.eq(111).all()


def test_torch_func_differentiates_what_crosses_between_processes() -> None:
    for rank, (gathered, sent) in enumerate(on_ranks(3, transformed)):
        assert gathered.eq(111).all()
        assert sent.eq(10 ** ((rank + 1) % 3)).all()
