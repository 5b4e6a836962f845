"""Run numbered jobs in a pool of processes, such that no process outlives the call or the calling process."""

import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

from embedlayer.core.errors import EmbedLayerWarning, FileError

Report = Callable[[int], None]
Job = Callable[[int, Report], None]

_SECONDS_BETWEEN_REPORTS = 0.1
_SECONDS_TO_CLEAN_UP = 2.0
_NOT_STARTED = -1


def run_jobs(
    prepare: Callable[[str], Job],
    argument: str,
    numbers: Sequence[int],
    workers: int,
    *,
    on_progress: Callable[[int, int], None],
    on_interrupted: Callable[[int], None],
) -> None:
    """Run a numbered job for each number in worker processes: `prepare(argument)(number, report)`.

    Each process calls `prepare(argument)` once; `prepare` is a function at the top level of a module. The processes are
    spawned, so a script must call this inside an `if __name__ == "__main__":` block. Jobs start in the order of
    `numbers`; if there are fewer jobs than `workers`, the tokenizer of each process uses several threads. Warnings of
    the jobs are repeated in this process, and their errors are raised unchanged. If the call ends by an error or by
    Ctrl-C, the processes are killed; then `on_interrupted` is called here with the number of each job that was started
    and may not have ended.
    """
    context = _KillableContext()
    progress = context.RawArray("q", [_NOT_STARTED] * len(numbers))
    processes = min(workers, len(numbers))
    executor = ProcessPoolExecutor(processes, context, _start_worker, (progress, workers // processes))
    running: dict[Future[list[str]], int] = {}
    waiting = list(reversed(range(len(numbers))))
    try:
        while waiting or running:
            while waiting and len(running) < workers:  # the executor would start the next job after an error
                place = waiting.pop()
                running[executor.submit(_run_job, prepare, argument, place, numbers[place])] = place
            finished, _ = wait(running, _SECONDS_BETWEEN_REPORTS, FIRST_COMPLETED)
            failed = any(process.exitcode not in (None, 0) for process in context.processes)
            if failed and not finished:  # the executor may not notice it while another process works
                raise BrokenProcessPool
            for place, value in enumerate(progress):
                if value != _NOT_STARTED:
                    on_progress(numbers[place], value)
            for future in finished:
                for message in future.result():
                    warnings.warn(message, EmbedLayerWarning, stacklevel=3)
                del running[future]
    except BrokenProcessPool as error:
        for process in context.processes:
            process.terminate()
        executor.shutdown()  # waits until all exit codes are known
        terminated = (None, 0, -signal.SIGTERM)
        code = next((process.exitcode for process in context.processes if process.exitcode not in terminated), None)
        cause = f"exit code {code}"
        if code == -signal.SIGKILL:
            cause = "SIGKILL, which often means too little memory"
        elif code == 1:
            cause += "; a script needs an `if __name__ == '__main__':` block around this call"
        started = [str(numbers[place]) for place in running.values() if progress[place] != _NOT_STARTED]
        raise FileError(
            f"A worker process was killed or failed to start ({cause}) while it built shards "
            f"{', '.join(started) or 'none'}. Finished shards are kept: call again to continue."
        ) from error
    finally:
        if running:
            for process in context.processes:
                process.kill()
        executor.shutdown(cancel_futures=True)
        for place in running.values():
            if progress[place] != _NOT_STARTED:
                on_interrupted(numbers[place])


def usable_cores() -> int:
    """Return the number of cores that this process may use, as far as the system says."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _KillableContext(SpawnContext):
    """`multiprocessing` context that starts processes by spawning and keeps a list of them in `processes`."""

    # with this list the processes can be killed, which `ProcessPoolExecutor` cannot do

    def __init__(self) -> None:
        self.processes: list[SpawnProcess] = []

    def Process(self, *args: Any, **options: Any) -> SpawnProcess:  # type: ignore[override]
        """Create a process as `SpawnProcess(...)` does, and add it to the list."""
        self.processes.append(SpawnProcess(*args, **options))
        return self.processes[-1]


_progress: Any = None
"""In a worker process: progress of all jobs, in memory that all processes share."""


def _start_worker(progress: Any, threads: int) -> None:
    """Initialise a worker process; it runs once in each, before the first job.

    It ignores Ctrl-C, limits the threads of the `tokenizers` library, and exits when its parent has ended. `progress`
    is an array in shared memory: the progress of each job, or -1 before it is started.
    """
    global _progress
    _progress = progress
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the caller kills us
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Wait in a thread of a worker process until its parent has ended; two seconds later, end the process.

    In these seconds a running job notices it too, and can remove its temporary files.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    time.sleep(_SECONDS_TO_CLEAN_UP)
    os._exit(1)


def _run_job(prepare: Callable[[str], Job], argument: str, place: int, number: int) -> list[str]:
    """Do one job in a worker process, and return its embedlayer warnings; other warnings are dropped."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def report(value: int) -> None:
        """Store the progress `value` of this job in the shared array; exit if the parent process has ended."""
        if not parent.is_alive():
            sys.exit(1)
        _progress[place] = value

    report(0)
    with warnings.catch_warnings(record=True, action="always", category=EmbedLayerWarning) as caught:
        _prepared(prepare, argument)(number, report)
    return [str(warning.message) for warning in caught if issubclass(warning.category, EmbedLayerWarning)]


@cache
def _prepared(prepare: Callable[[str], Job], argument: str) -> Job:
    """Return `prepare(argument)`, which is called for the first job of a process and kept for the others."""
    return prepare(argument)
