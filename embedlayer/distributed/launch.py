"""Start the process group of the processes that `torchrun` started, also after a restart.

torchrun stops every worker before it starts new ones, and starts the new ones when all machines have joined. The new
workers get the key-value store of the old ones, and each machine counts restarts separately. So each attempt needs a
part of the store with a new name that all its ranks agree on: `attempt_store`.
"""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from embedlayer.core.collectives import SINGLE_PROCESS, Collectives, peer_errors
from embedlayer.core.errors import PeerError, SizeError


class Launch(NamedTuple):
    """Describe the processes that were started together; by default the single process."""

    collectives: Collectives = SINGLE_PROCESS
    device: torch.device = torch.device("cpu")
    store: Store | None = None
    launch_id: str = ""


@contextmanager
def launched_processes(device: str, timeout_seconds: float) -> Iterator[Launch]:
    """Initialise the default process group from torchrun's environment variables, and destroy it after the block."""
    if not 0 < timeout_seconds < 1e9:
        raise SizeError(f"The time-out must be a positive number of seconds, not {timeout_seconds:g}.")
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        yield Launch(device=torch.device(device))
        return
    place, timeout = torch.device(torch.device(device).type), timedelta(seconds=timeout_seconds)
    on_gpu = place.type == "cuda"
    if on_gpu:
        number, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if number >= count:
            raise SizeError(
                f"Process {number} of this machine, counted from 0, has no GPU of its own: there are {count}. Start "
                f"at most {count} (torchrun --nproc-per-node {count}), or use --device cpu."
            )
        place = torch.device("cuda", number)
        torch.cuda.set_device(place)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        with peer_errors(rank, size, timeout_seconds):
            store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
            store.set_timeout(timeout)
            store = attempt_store(store, rank, size, timeout)
            backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"  # counts and files are sent from the CPU
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        group = Collectives(timeout_seconds=timeout_seconds)
        yield Launch(group, place, store, " ".join(sorted(set(group.all_gather_object(launcher_id())))))
    except BaseException:
        if not on_gpu and dist.is_initialized():  # gloo's threads must not outlive it; NCCL would wait for the others
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def attempt_store(store: Store, rank: int, size: int, timeout: timedelta) -> Store:
    """Return a part of `store` that only the ranks of this attempt use, whatever earlier attempts left in `store`."""
    # Rank 0 publishes the name of a new part. The others may read that of an earlier attempt, so they read it and
    # request again until rank 0 accepts.
    own_id, deadline = uuid4().hex, time.monotonic() + timeout.total_seconds()
    if rank == 0:
        store.set("embedlayer/attempt", own_id)
        for other in range(1, size):
            request = store.get(f"{own_id}/request/{other}").decode()
            store.set(f"{own_id}/accepted/{request}", "")
        return PrefixStore(own_id, store)
    while time.monotonic() < deadline:
        attempt = store.get("embedlayer/attempt").decode()
        store.set(f"{attempt}/request/{rank}", own_id)
        if store.check([f"{attempt}/accepted/{own_id}"]):
            return PrefixStore(attempt, store)
        time.sleep(0.05)
    raise PeerError(
        f"Rank {rank} of {size} gave up: rank 0 did not come within {timeout.total_seconds():g} seconds. "
        f"See docs/errors.md, A rank that does not come."
    )


def launcher_id() -> str:
    """Return a text that identifies the torchrun process that started this one; it is the same after each restart."""
    host = socket.gethostname()
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return f"{host}:{uuid4().hex}"
    parent = os.getppid()
    try:
        start_time = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:  # not Linux
        start_time = ""
    return f"{host}:{parent}:{os.environ['TORCHELASTIC_RUN_ID']}:{start_time}"
