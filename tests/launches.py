"""What `torchrun` starts on this machine, for tests: `with started(*torchrun(2), *TRAIN, ...) as process`."""

import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import Program
from safetensors.torch import load_file

from embedlayer import RunDirectory, open_model
from embedlayer.training import ParallelContext, parallel_context

HERE = Path(__file__).parent
SECONDS = 240
# Seed 1: with these weights no gradient is of the size of rounding, which AdamW would divide by itself.
SIZES = "--dim 16 --heads 2 --layers 1 --length 16 --batch-size 3 --vocab-size 301 --log-every 2 --seed 1".split()
TRAIN = ["-m", "embedlayer", "train"]


@contextlib.contextmanager
def started(*arguments: object, **environment: str) -> Iterator[Program]:
    """A Python program with all that it starts, gone when the block is left."""
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent), **environment}
    with Program(*arguments, **environment) as process:
        try:
            yield process
        finally:
            for pid in children(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def torchrun(ranks: int, restarts: int = 0, *, meeting: list[str] | None = None) -> list[str]:
    run = ["-m", "torch.distributed.run", *(meeting or ["--standalone"]), "--nproc-per-node", str(ranks)]
    return [*run, "--max-restarts", str(restarts), "--monitor-interval", "0.1"]


def machines(nodes: str, *, conf: str = "") -> list[list[str]]:
    """How two torchruns on this machine meet as if they were on two; the first hosts the meeting and is rank 0's."""
    place = ["--nnodes", nodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    return [
        [*place, "--rdzv-conf", f"is_host={host}{conf}", "--local-addr", f"127.0.0.{number}"]
        for number, host in ((1, 1), (2, 0))
    ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def meet() -> None:
    """Destroy the process group of `on_ranks`, and set the environment variables of torchrun."""
    ports = [free_port()]
    dist.broadcast_object_list(ports)
    dist.barrier()  # before one leaves, all must have come
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports[0]))


@contextlib.contextmanager
def launched(vocab_parallel_size: int | None = None) -> Iterator[ParallelContext]:
    """The processes of `on_ranks` as those that torchrun started. Their process group is gone afterwards."""
    meet()
    with parallel_context("cpu", 60.0, vocab_parallel_size) as ranks:
        yield ranks


def unlucky(arguments, folder: Path, accidents: list[list]) -> tuple[list, dict[str, str]]:
    """A run that has these accidents: what torchrun is to run, and its environment."""
    folder.with_suffix(".json").write_text(json.dumps(accidents))
    command = [HERE / "distributed" / "unlucky.py", "train", *arguments, "-o", folder, "--save-seconds", 0]
    return command, {"ACCIDENTS": str(folder.with_suffix(".json"))}


def assert_same_run(folder: Path, expected: Path) -> None:
    assert not list(folder.glob(".*"))
    ours, theirs = (load_file(path / "model.safetensors") for path in (folder, expected))
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-5, rtol=1e-5, msg=name)
    lines = [RunDirectory(path).read_metrics() for path in (expected, folder)]
    for its, line in zip(*lines, strict=True):
        assert line["step"] == its["step"]
        assert line["loss"] == pytest.approx(its["loss"], abs=1e-5)
    open_model(folder)
    assert (folder / "report.html").exists()
