"""Sharded logits under torch's `loss_parallel`, beside a table's own loss and one process."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from embedlayer import TokenEmbedding
from embedlayer.distributed import shard_table

D, T = 6, 5
OPTIONS = {"plain": {}, "softcap": {"softcap": 3.0, "logit_scale": 0.7, "mask_padding": True}}
CASES = [(rows, name) for rows in (24, 23) for name in OPTIONS]  # 23: the last rank of 2 or 3 has a row less


def whole(rows: int) -> TokenEmbedding:
    torch.manual_seed(0)
    return TokenEmbedding(rows, D, padding_idx=2, init_std=0.5, dtype=torch.float64)


def batch(ranks: int, rows: int):
    """Return hidden states, targets with one ignored target per rank, and a bias."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(ranks, T, D, generator=generator, dtype=torch.float64)
    targets = torch.randint(3, rows, (ranks, T), generator=generator)
    targets[:, 1] = -100
    return hidden, targets, torch.randn(rows, generator=generator, dtype=torch.float64).requires_grad_()


def both(rows: int, options: dict) -> list[torch.Tensor]:
    """Return loss and gradients of rows, hidden states and bias: first by `loss_parallel`, then by the table."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh, found = init_device_mesh("cpu", (ranks,)), []
    for by_torch in (True, False):
        table = shard_table(whole(rows), mesh)
        hidden, targets, bias = batch(ranks, rows)
        own = hidden[rank].clone().requires_grad_()
        if by_torch:
            logits = table.sharded_logits(own, bias=bias, **options)
            assert logits.to_local().shape == (ranks * T, table.partition.stop - table.partition.start)
            with loss_parallel():
                loss = F.cross_entropy(logits, targets.flatten())
                loss.backward()
            assert isinstance(loss, DTensor)
            loss = loss.full_tensor().detach()
        else:
            loss = table.loss(own, targets[rank], bias=bias, **options)
            loss.backward()
            loss = loss.detach()
            dist.all_reduce(loss)
            loss /= ranks
        found += [loss, table.weight.grad, own.grad, bias.grad]
    return found


def test_loss_and_gradients_are_those_of_the_table_and_of_one_process() -> None:
    ranks = 3
    results = on_ranks(ranks, every_case)
    for number, (rows, name) in enumerate(CASES):
        table, (hidden, targets, bias) = whole(rows), batch(ranks, rows)
        hidden.requires_grad_()
        loss = F.cross_entropy(table.logits(hidden.flatten(0, 1), bias=bias, **OPTIONS[name]), targets.flatten())
        loss.backward()
        found = [result[number] for result in results]
        for ours, theirs in ((each[place], each[place + 4]) for each in found for place in range(4)):
            torch.testing.assert_close(ours, theirs)
        for rank, each in enumerate(found):
            torch.testing.assert_close(each[0], loss.detach())
            torch.testing.assert_close(each[2], ranks * hidden.grad[rank])
        torch.testing.assert_close(torch.cat([each[1] for each in found]), table.weight.grad)
        torch.testing.assert_close(sum(each[3] for each in found) / ranks, bias.grad)


def every_case() -> list[list[torch.Tensor]]:
    return [both(rows, OPTIONS[name]) for rows, name in CASES]
