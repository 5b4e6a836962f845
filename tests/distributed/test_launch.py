"""The rendezvous of processes that torchrun started, and the errors if one is missing."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launches import free_port, meet
from processes import on_ranks

from embedlayer import PeerError, SizeError
from embedlayer.training import parallel_context


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.01)


def attempts(port: int, folder: Path) -> tuple[list[str], int]:
    """Start three times with the store of the launcher; between them, rank 1 comes alone."""
    rank = dist.get_rank()
    meet()
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RUN_ID="ab"[rank % 2])
    names = []
    for number in range(3):
        if rank == number:
            time.sleep(0.12)
        with parallel_context("cpu", 60.0) as ranks:
            assert ranks.sum(torch.tensor(number)) == 3 * number
            names.append(ranks.launch_id)
        if rank == 1:
            with pytest.raises(PeerError, match="Rank 1 of 3 gave up: rank 0"), parallel_context("cpu", 0.3):
                pass
            (folder / str(number)).touch()
        wait_for(folder / str(number))
    with pytest.raises(SizeError), parallel_context("cpu", 60.0, 2):  # three ranks hold no replicas of two shards
        pass
    return names, os.getppid()


def test_processes_that_are_started_again_use_a_store_of_their_own_and_know_all_launchers(tmp_path) -> None:
    store = dist.TCPStore("127.0.0.1", port := free_port(), is_master=True, wait_for_workers=False)
    first, *others = on_ranks(3, attempts, port, tmp_path)
    assert others == [first] * 2
    names, parent = first
    assert len(set(names)) == 1
    assert [name.split(":")[1:3] for name in names[0].split()] == [[str(parent), "a"], [str(parent), "b"]]
    del store


def test_a_process_without_a_gpu_of_its_own_is_told_so(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(SizeError, match="Process 2"), parallel_context("cuda", 1.0):
        pass


def one_sleeps(folder: Path) -> str:
    """Wait for rank 0 longer than the time-out; then rank 1 does not answer for as long."""
    meet()
    with pytest.raises(PeerError) as error, parallel_context("cpu", 2.0) as ranks:
        if ranks.is_first:
            time.sleep(2.2)
            (folder / "prepared").touch()
        ranks.wait_for_first()
        assert (folder / "prepared").exists()
        ranks.sum(torch.ones(1))
        if ranks.rank == 1:
            wait_for(folder / "awake")
        ranks.sum(torch.ones(1))
    (folder / "awake").touch()
    return str(error.value)


def test_ranks_wait_for_the_first_longer_than_for_one_that_hangs(tmp_path) -> None:
    first, second = on_ranks(2, one_sleeps, tmp_path)
    assert first.startswith("Rank 0 of 2 gave up: another process has ended, or hangs for more than 2 seconds.")
    assert second.startswith("Rank 1 of 2 gave up")
