"""What a rank asks of those that hold the other rows."""

import math

import torch
import torch.distributed as dist
from processes import on_ranks

from embedlayer.distributed.divided_rows import DividedRows

SIZES = [2, 0, 3]


def asked() -> list[torch.Tensor]:
    rank = dist.get_rank()
    held = DividedRows(4 * rank, 4 * rank + 4, dist.group.WORLD, "cpu")
    part = torch.arange(10.0)[sum(SIZES[:rank]) : sum(SIZES[: rank + 1])].unsqueeze(1)
    chunk = held.gather(part, SIZES)
    places, here = held.places(torch.tensor([1, 6, 11]))
    return [
        torch.tensor(held.counts(len(part), wanted=rank == 1)[0]),
        torch.tensor([held.counts(1, wanted=rank == 1)[1], held.counts(1, wanted=False)[1]]),
        chunk,
        held.own(chunk, SIZES) - part,
        held.home(chunk * (rank + 1), SIZES) - 6 * part,
        held.highest(torch.tensor([1.0 * rank, -1.0 * rank])),
        *held.total(torch.tensor([1.0]), torch.tensor([1.0 * rank])),
        places * here,
        here.int(),
        torch.tensor(
            [held.same(torch.tensor(each)) for each in (0.5, math.inf, float(rank), [1.0, math.nan, 1.0][rank])]
        ),
    ]


def test_parts_go_out_to_all_and_what_all_made_of_them_comes_home() -> None:
    for rank, (counts, wanted, chunk, own, home, highest, ones, ranks, places, here, same) in enumerate(
        on_ranks(3, asked)
    ):
        assert counts.tolist() == SIZES
        assert wanted.tolist() == [True, False]
        assert chunk.flatten().tolist() == [0, 1, 2, 3, 4]
        assert own.shape == home.shape == (SIZES[rank], 1)
        assert not own.any()
        assert not home.any()
        assert highest.tolist() == [2, 0]
        assert (ones.tolist(), ranks.tolist()) == ([3], [3])
        assert here.tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]][rank]
        assert places.tolist() == [[1, 0, 0], [0, 2, 0], [0, 0, 3]][rank]
        assert same.tolist() == [True, True, False, False]
