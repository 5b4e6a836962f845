"""The rendezvous of processes that torchrun started, and the errors if one is missing."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launches import free_port
from processes import on_ranks

from embedlayer import PeerError, SizeError
from embedlayer.distributed.launch import attempt_store, launched_processes


def meet(port: int) -> None:
    """Destroy the process group of the test, and set the environment variables of torchrun."""
    dist.barrier()  # before one leaves, all must have come
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def test_processes_that_are_started_again_use_a_store_of_their_own() -> None:
    """Join through the store of an earlier attempt with an unanswered request; rank 0 comes last."""
    store = dist.HashStore()

    def attempt(number: int, late: int) -> list[str]:
        def enter(rank: int) -> str:
            time.sleep(0.12 if rank == late else 0.0)
            own = attempt_store(store, rank, 3, timedelta(seconds=60))
            if rank == 0:
                own.set("address", f"of attempt {number}")
            return own.get("address").decode()

        with ThreadPoolExecutor(3) as ranks:
            return list(ranks.map(enter, range(3)))

    for number in range(3):
        assert attempt(number, late=number) == [f"of attempt {number}"] * 3
        with pytest.raises(PeerError, match=r"Rank 1 of 3 gave up: rank 0 did not come within 0.1 seconds\."):
            attempt_store(store, 1, 3, timedelta(seconds=0.1))


def test_a_process_without_a_gpu_of_its_own_is_told_so(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    words = "Process 2 of this machine, counted from 0, has no GPU of its own: there are 2"
    with pytest.raises(SizeError, match=words), launched_processes("cuda", 1.0):
        pass


def all_launchers(port: int) -> tuple[str, int]:
    meet(port)
    os.environ["TORCHELASTIC_RUN_ID"] = "ab"[dist.is_initialized() or int(os.environ["RANK"]) % 2]
    with launched_processes("cpu", 15.0) as launch:
        return launch.launch_id, os.getppid()


def test_each_rank_knows_the_launchers_of_all() -> None:
    first, second, third = on_ranks(3, all_launchers, free_port())
    assert first == second == third  # one process has started all
    names, parent = first
    assert [name.split(":")[1:3] for name in names.split()] == [[str(parent), "a"], [str(parent), "b"]]


def one_sleeps(port: int, folder: Path) -> str:
    meet(port)
    with pytest.raises(PeerError) as error, launched_processes("cpu", 3.0) as launch:
        launch.collectives.any(False)
        while launch.collectives.rank == 1 and not (folder / "awake").exists():
            time.sleep(0.02)
        launch.collectives.any(False)
    (folder / "awake").touch()
    return str(error.value)


def test_a_process_that_hangs_ends_the_wait_of_the_others_with_a_clear_error(tmp_path) -> None:
    first, second = on_ranks(2, one_sleeps, free_port(), tmp_path)
    assert first.startswith("Rank 0 of 2 gave up: another process has ended, or hangs for more than 3 seconds.")
    assert second.startswith("Rank 1 of 2 gave up")
