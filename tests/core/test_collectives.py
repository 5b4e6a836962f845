"""Collective operations of one process and of several, and which rank stores which rows."""

import math

import pytest
import torch
import torch.distributed as dist
from processes import on_ranks

from embedlayer import PeerError, SizeError
from embedlayer.core.collectives import SINGLE_PROCESS, Collectives, RowPartition

COUNTS = [2, 0, 3]


def rows_to_every_rank():
    """Send r + q + 1 rows, all `10 r + q`, from each rank r to each rank q."""
    group = Collectives()
    send_counts = [group.rank + other + 1 for other in range(group.size)]
    rows = torch.cat([torch.full((count, 2), 10.0 * group.rank + other) for other, count in enumerate(send_counts)])
    rows.requires_grad_()
    receive_counts = group.exchange_counts(send_counts)
    received = group.all_to_all(rows, send_counts, receive_counts)
    (received * torch.arange(1.0, len(received) + 1).unsqueeze(1)).sum().backward()
    gathered = group.all_gather(torch.full((group.rank, 1), float(group.rank), dtype=torch.float64))
    return receive_counts, received.detach(), rows.grad, gathered


@pytest.mark.parametrize("ranks", [1, 3])
def test_rows_go_where_they_are_sent_and_their_gradients_come_back(ranks) -> None:
    found = on_ranks(ranks, rows_to_every_rank)
    for rank, (receive_counts, received, _, gathered) in enumerate(found):
        assert receive_counts == [other + rank + 1 for other in range(ranks)]
        expected = [10.0 * other + rank for other in range(ranks) for _ in range(other + rank + 1)]
        assert received[:, 0].tolist() == expected
        assert gathered[:, 0].tolist() == [rank for rank in range(ranks) for _ in range(rank)]
    for rank, (_, _, grad, _) in enumerate(found):
        first = 0
        for other in range(ranks):
            count = rank + other + 1
            place = sum(earlier + other + 1 for earlier in range(rank))
            assert grad[first : first + count, 0].tolist() == [place + 1 + n for n in range(count)]
            first += count


def gradients_of_gathered_rows():
    """Return gradients by `backward` and by `torch.func.grad`; each rank weights all rows by its own number."""
    group, rank = Collectives(), dist.get_rank()
    rows = torch.ones(rank + 1, 3, dtype=torch.float64, requires_grad=True)
    (group.all_gather(rows) * 10**rank).sum().backward()
    send_counts = [2 if other == (rank + 1) % group.size else 0 for other in range(group.size)]
    receive_counts = group.exchange_counts(send_counts)
    two = torch.ones(2, 3, dtype=torch.float64)
    gathered = torch.func.grad(lambda rows: (group.all_gather(rows) * 10**rank).sum())(two)
    sent = torch.func.grad(lambda rows: (group.all_to_all(rows, send_counts, receive_counts) * 10**rank).sum())(two)
    return rows.grad, gathered, sent


def test_the_gradient_of_gathered_rows_is_summed_over_the_ranks_also_by_torch_func() -> None:
    for rank, (grad, gathered, sent) in enumerate(on_ranks(3, gradients_of_gathered_rows)):
        assert grad.eq(111).all()
        assert gathered.eq(111).all()
        assert sent.eq(10 ** ((rank + 1) % 3)).all()


def every_operation() -> list[torch.Tensor]:
    group = Collectives()
    rank = group.rank
    rows = torch.arange(10.0)[sum(COUNTS[:rank]) : sum(COUNTS[: rank + 1])].unsqueeze(1)
    gathered = group.all_gather(rows, COUNTS)
    objects = group.all_gather_object({"rank": rank})
    assert objects == [{"rank": each} for each in range(3)]
    assert group.broadcast_object("x" * (2 - rank)) == "xx"
    assert [group.any(rank == 1), group.any(False)] == [True, False]
    group.barrier()
    equal = [0.5, math.inf, float(rank), [1.0, math.nan, 1.0][rank]]
    return [
        gathered,
        group.reduce_scatter(gathered * (rank + 1), COUNTS) - 6 * rows,
        group.all_reduce(torch.tensor([1.0 * rank, -1.0 * rank]), "max"),
        group.all_reduce(torch.tensor([1.0, 1.0 * rank])),
        group.broadcast(torch.tensor([7.0 + rank])),
        torch.stack([group.all_equal(torch.tensor(each)) for each in equal]),
    ]


def test_each_operation_of_a_process_group_is_that_of_torch_distributed() -> None:
    for rank, (gathered, scattered, highest, total, first, equal) in enumerate(on_ranks(3, every_operation)):
        assert gathered.flatten().tolist() == [0, 1, 2, 3, 4]
        assert scattered.shape == (COUNTS[rank], 1)
        assert not scattered.any()
        assert highest.tolist() == [2, 0]
        assert total.tolist() == [3, 3]
        assert first.tolist() == [7]
        assert equal.tolist() == [True, False, False, False]


def test_one_process_gets_back_what_it_passes_in() -> None:
    rows = torch.randn(5, 3)
    for result in (
        SINGLE_PROCESS.all_reduce(rows, "max"),
        SINGLE_PROCESS.broadcast(rows),
        SINGLE_PROCESS.all_to_all(rows, [5], [5]),
        SINGLE_PROCESS.all_gather(rows),
        SINGLE_PROCESS.reduce_scatter(rows, [5]),
    ):
        assert result is rows
    assert SINGLE_PROCESS.exchange_counts([5]) == [5]
    assert SINGLE_PROCESS.all_gather_object({"a": 1}) == [{"a": 1}]
    assert SINGLE_PROCESS.broadcast_object("word") == "word"
    assert SINGLE_PROCESS.all_equal(torch.tensor(math.nan))
    assert [SINGLE_PROCESS.any(flag) for flag in (True, False)] == [True, False]
    SINGLE_PROCESS.barrier()
    SINGLE_PROCESS.require_equal({"a": 1})
    with SINGLE_PROCESS.all_or_none() as facts:
        facts["a"] = 1
    with pytest.raises(RuntimeError, match="ours"), SINGLE_PROCESS.peer_errors():
        raise RuntimeError("ours")


def disagreements() -> list[str]:
    group, rank = Collectives(), dist.get_rank()
    last = rank == 2
    group.require_equal({"word": "like"})
    found = []

    def fails() -> None:
        with group.all_or_none():
            if last:
                raise ValueError("no such token")

    def differs() -> None:
        with group.all_or_none() as facts:
            facts["edit"] = "other" if last else "one"

    for check in (lambda: group.require_equal({"dim": 8 * rank}), fails, differs):
        try:
            check()
        except (PeerError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_a_rank_that_differs_or_fails_stops_all_ranks_and_is_named() -> None:
    for rank, (other_facts, failed, other_edit) in enumerate(on_ranks(3, disagreements)):
        each = "".join(f"Rank {r} differs from rank 0 in dim: {8 * r} there, 0 on rank 0. " for r in (1, 2))
        assert other_facts == f"PeerError: {each}Give all the same."
        refused = "PeerError: Rank 2 refused, so nothing was changed on any: no such token"
        assert failed == ("ValueError: no such token" if rank == 2 else refused)
        assert other_edit.startswith("PeerError: Rank 2 differs from rank 0 in edit: other there, one on rank 0.")
        assert other_edit.endswith("Nothing was changed.")


WHOLE = [(1, 1), (23, 1), (23, 3), (24, 4), (7, 4)]
LEVELS = [((4, 1),), ((2, 1), (2, 2)), ((2, 2), (2, 1)), ((2, 2),), ((1, 1),)]


@pytest.mark.parametrize(
    ("num_rows", "size", "levels"),
    [*((rows, size, ((size, 1),)) for rows, size in WHOLE), *((rows, 4, each) for rows in (7, 29) for each in LEVELS)],
)
def test_each_row_is_of_one_rank_or_of_all_that_differ_in_no_split(num_rows, size, levels) -> None:
    parts = [RowPartition(num_rows, rank, size, levels) for rank in range(size)]
    rows = torch.arange(num_rows)
    copies = size // math.prod(count for count, _ in levels)
    stored = torch.stack([part.local(rows)[1] for part in parts])
    assert stored.sum(0).tolist() == [copies] * num_rows
    assert max(map(len, parts)) == parts[0].rows_per_rank
    assert all(stored[rank, row] for row, rank in enumerate(parts[0].rank_of(rows).tolist()))
    for rank, part in enumerate(parts):
        local, is_local = part.local(rows)
        assert local[is_local].tolist() == list(range(len(part)))
        assert (
            rows[part.start : part.stop].tolist() == rows[parts[0].slice_of(rank)].tolist() == rows[is_local].tolist()
        )
        assert [part.local_or_none(row) for row in range(num_rows) if is_local[row]] == list(range(len(part)))
        assert part.local_or_none(None) is None
        low, high = part.overlap(2, 9)
        assert rows[part.start : part.stop][low:high].tolist() == [row for row in range(2, 9) if row in rows[is_local]]


def test_a_partition_that_leaves_a_rank_without_a_row_is_refused() -> None:
    assert len(RowPartition(5, 3, 4, ((2, 1), (2, 2)))) == 1
    with pytest.raises(SizeError, match="5 rows in blocks of 2 leave no row for the last of 4 ranks"):
        RowPartition(5, 0, 4)
    with pytest.raises(SizeError, match="3 rows in blocks of 1 leave no row for one of 4 ranks"):
        RowPartition(3, 0, 4, ((2, 1), (2, 2)))
