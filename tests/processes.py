"""Several ranks on this machine, for tests: `on_ranks(2, function, ...)` runs `function(rank, ...)` in each."""

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 120

PRELOADED = ["embedlayer.distributed.sharded", "pytest", "tests.preloaded"]
"""What each rank needs, imported once. A file of tests adds what its ranks need."""
PRELOADED_IF_USED = ["transformers.modeling_utils"]

_context = get_context("forkserver")


def on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any, backend: str = "gloo") -> list[Any]:
    """What `function(*arguments)` returns on each of `ranks` processes that talk through gloo, or another backend.

    They end with the call, however it ends; after two minutes they are stopped.
    """
    _context.set_forkserver_preload([*PRELOADED, *(name for name in PRELOADED_IF_USED if name in sys.modules)])
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            _context.Process(target=_run, args=(rank, ranks, folder, backend, function, arguments), daemon=True)
            for rank in range(ranks)
        ]
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.join(SECONDS)
            failures = {path.name: path.read_text() for path in sorted(Path(folder).glob("rank-*"))}
            assert not failures, "\n".join(f"{name} of {ranks}:\n{text}" for name, text in failures.items())
            assert [process.exitcode for process in processes] == [0] * ranks
            return [torch.load(Path(folder) / f"result-{rank}", weights_only=True) for rank in range(ranks)]
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()


def _run(
    rank: int, ranks: int, folder: str, backend: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    if "nccl" in backend:
        torch.cuda.set_device(rank)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    dist.init_process_group(
        backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    try:
        torch.save(function(*arguments), Path(folder) / f"result-{rank}")
    except BaseException:  # noqa: BLE001  told to who asked
        (Path(folder) / f"rank-{rank}").write_text(traceback.format_exc())
        raise SystemExit(1) from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
