"""What is predicted, beside what is sent."""

import pytest
import torch
import torch.distributed as dist
from processes import on_ranks
from torch.distributed.device_mesh import init_device_mesh

from embedlayer import OutputHead, RowAdamW, ShardedTable, SizeError, TokenEmbedding, clip_grad_norm_, shard_table
from embedlayer.distributed.traffic import StepTraffic

V, D, T = 4000, 32, 6000


def sent_in_a_step() -> dict[str, float]:
    """Bytes to other ranks in a step of a divided table and head, by what was under way."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    table = shard_table(TokenEmbedding(V, D, row_sparse=True), mesh)
    rows: ShardedTable = shard_table(TokenEmbedding(V, D), mesh)
    head, optimizer = OutputHead(rows), RowAdamW([*table.parameters(), *rows.parameters()])
    generator = torch.Generator().manual_seed(0)
    ids, targets = torch.randint(0, V, (2, ranks, T // ranks), generator=generator)[:, rank]
    sent, under_way = {}, []
    swap, reduce = dist.all_to_all_single, dist.all_reduce

    def counted_swap(output, sending, receives=None, sends=None, group=None):
        sends = sends or [len(sending) // ranks] * ranks
        each = sending.nbytes / max(1, len(sending))
        sent[under_way[-1]] = sent.get(under_way[-1], 0) + each * (sum(sends) - sends[rank])
        return swap(output, sending, receives, sends if receives else None, group=group)

    def counted_reduce(numbers, *arguments, **options):
        sent[under_way[-1]] = sent.get(under_way[-1], 0) + 2 * numbers.nbytes * (ranks - 1) / ranks
        return reduce(numbers, *arguments, **options)

    dist.all_to_all_single, dist.all_reduce = counted_swap, counted_reduce
    try:
        under_way += ["look-up"]
        vectors = table(ids)
        hidden = vectors.detach().requires_grad_()
        under_way += ["loss"]
        head.loss(hidden, targets).backward()
        under_way += ["look-up"]
        vectors.backward(hidden.grad)
        under_way += ["optimizer"]
        clip_grad_norm_([*table.parameters(), *rows.parameters()], 1.0)
        optimizer.step()
    finally:
        dist.all_to_all_single, dist.all_reduce = swap, reduce
    return {**sent, "distinct": float(len(ids.unique()))}


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_bytes_that_cross_the_network_are_within_5_percent_of_the_prediction(ranks) -> None:
    results = on_ranks(ranks, sent_in_a_step)
    mean = {name: sum(result[name] for result in results) / ranks for name in results[0]}
    predicted = StepTraffic(embed_dim=D, ranks=ranks, tokens=T, distinct=round(mean["distinct"]))
    assert mean["look-up"] == pytest.approx(predicted.look_up, rel=0.05)
    assert mean["loss"] == pytest.approx(predicted.loss, rel=0.05)
    assert mean["optimizer"] < 64


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(SizeError, match="ranks must be at least 1, not 0"):
        StepTraffic(embed_dim=8, ranks=0, tokens=8, distinct=8)
