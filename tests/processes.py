"""Processes for tests, forked from one that has imported what they need, which takes a fresh interpreter two seconds.

`on_ranks(2, function, ...)` runs `function(...)` on two ranks; `Program("-m", "embedlayer", ...)` is what `python -m
embedlayer ...` would run. A law about a fresh interpreter, such as what an import loads, starts `sys.executable`.
"""

import contextlib
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

SECONDS = 120

PRELOADED = ["embedlayer.distributed.sharded", "pytest"]
"""What each rank needs, imported once. A file of tests adds what its ranks need."""
PRELOADED_IF_USED = ["transformers.modeling_utils"]

_context = get_context("spawn" if torch.cuda.is_available() else "forkserver")
"""How processes start: CUDA, which a backward pass initialises, cannot be used in forks of a process that has it."""


def on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any, backend: str = "gloo") -> list[Any]:
    """What `function(*arguments)` returns on each of `ranks` processes that talk through gloo, or another backend.

    They end with the call, however it ends; after two minutes they are stopped.
    """
    _preload()
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


class Program:
    """A Python program with the arguments of `python`, and the interface of a `subprocess.Popen` with pipes for text.

    It is gone when the block that it is opened for is left. What it starts is not.

    Args:
        *arguments: `"-c", code, ...`, `"-m", module, ...`, or the path of a script and its arguments.
        cwd: Its working directory.
        **environment: What is added to this process's environment.
    """

    def __init__(self, *arguments: object, cwd: Path | None = None, **environment: str) -> None:
        _preload()
        pipes = [_context.Pipe(duplex=False) for _ in range(3)]
        ends = [reader if number == 0 else writer for number, (reader, writer) in enumerate(pipes)]
        words, folder, variables = [str(word) for word in arguments], cwd or Path.cwd(), {**os.environ, **environment}
        self._process = _context.Process(target=_run_program, args=(words, folder, variables, ends))
        self._process.start()
        for end in ends:
            end.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.stdin = os.fdopen(os.dup(pipes[0][1].fileno()), "w")
        self.stdout, self.stderr = (os.fdopen(os.dup(reader.fileno())) for reader, _ in pipes[1:])
        for reader, writer in pipes:
            reader.close()
            writer.close()

    @property
    def returncode(self) -> int | None:
        """The exit code; negative for a signal, `None` while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The exit code, if it has ended."""
        return self._process.exitcode

    def wait(self, timeout: float = SECONDS) -> int:
        """Its exit code, when it has ended."""
        self._process.join(timeout)
        assert self._process.exitcode is not None, f"still running after {timeout} s"
        return self._process.exitcode

    def communicate(self, timeout: float = SECONDS) -> tuple[str, str]:
        """What it writes to stdout and stderr until it ends, or is killed for having taken too long."""
        timer = threading.Timer(timeout, self.kill)
        timer.start()
        self.stdin.close()
        with ThreadPoolExecutor(2) as pool:
            out, err = pool.map(lambda stream: stream.read(), (self.stdout, self.stderr))
        self.wait(timeout)
        timer.cancel()
        return out, err

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.join()
        for stream in (self.stdin, self.stdout, self.stderr):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def run_program(*arguments: object, cwd: Path | None = None, **environment: str) -> tuple[int, str, str]:
    """The exit code of a Python program, and what it wrote to stdout and stderr."""
    with Program(*arguments, cwd=cwd, **environment) as program:
        out, err = program.communicate()
        return program.wait(), out, err


def in_a_fork(function: Callable[[], object], forked: threading.Event | None = None) -> None:
    """Call a function in a fork of this process, which is killed after two minutes, and assert that it ends well.

    `forked` is set in this process when there is a fork. The function must compute little enough for one thread: GNU
    OpenMP, which torch's operators use, does not survive a fork.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # since Python 3.12 of every process with threads
        child = os.fork()
    if not child:
        code = 1
        try:
            function()
            code = 0
        except BaseException:  # noqa: BLE001  shown
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    if forked is not None:
        forked.set()
    until = time.monotonic() + SECONDS
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError(f"the forked process hangs in {function}")
        time.sleep(0.002)
    assert os.waitstatus_to_exitcode(ended[1]) == 0


def _preload() -> None:
    """Say what the process imports from which others are forked; what is said after it has begun has no effect."""
    used = [name for name in PRELOADED_IF_USED if name in sys.modules]
    # The first one switches garbage collections off, the last one on again, without what was imported.
    _context.set_forkserver_preload(["tests.uncollected", *PRELOADED, *used, "tests.preloaded"])


def _run_program(words: list[str], folder: Path, environment: dict[str, str], ends: list[Connection]) -> None:
    os.setsid()
    for number, end in enumerate(ends):
        os.dup2(end.fileno(), number)
        end.close()
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    torch.set_num_threads(1)
    try:
        first, *sys.argv = words
        if first == "-c":
            code, sys.argv[0] = sys.argv[0], "-c"
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        elif first == "-m":
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            runpy.run_path(first, run_name="__main__")
    except KeyboardInterrupt:  # how an interpreter ends
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


def _run(
    rank: int, ranks: int, folder: str, backend: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    if "nccl" in backend:
        torch.cuda.set_device(rank)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # which torchrun sets, and nothing uses here
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
