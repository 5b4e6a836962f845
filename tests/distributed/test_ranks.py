"""What a training loop asks of the processes it runs with."""

import pytest
import torch

from embedlayer import SizeError
from embedlayer.distributed.ranks import Alone, started_ranks


class Some(Alone):
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@pytest.mark.parametrize("count", [0, 1, 5, 8, 9])
def test_shares_are_consecutive_and_differ_by_one_at_most(count) -> None:
    for size in (1, 2, 3, 4):
        shares = [Some(rank, size).share(count) for rank in range(size)]
        assert [number for share in shares for number in share] == list(range(count))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_without_torchrun_there_is_one_process_and_no_group(monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    with started_ranks("cpu", 1.0) as ranks:
        assert isinstance(ranks, Alone)
        assert (ranks.first, ranks.size, ranks.launch) == (True, 1, "")
        assert not torch.distributed.is_initialized()
    with pytest.raises(SizeError, match="must be a positive number of seconds, not 0"), started_ranks("cpu", 0.0):
        pass
    with pytest.raises(SizeError, match="One process cannot divide a table among 2"), started_ranks("cpu", 1.0, 2):
        pass
