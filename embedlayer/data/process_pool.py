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

from embedlayer.errors import EmbedLayerWarning, FileError

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
    """Call `prepare(argument)(number, report)` for each number, in at most `workers` processes.

    The processes are spawned: a script that calls this outside of an `if __name__ == "__main__":` block fails. Their
    warnings are repeated here. Where the call ends by an error or by Ctrl-C, the processes are killed.

    Args:
        prepare: A function of a module, called once in each process; it returns the function that does a job.
        argument: Argument of `prepare`.
        numbers: Numbers of the jobs, which are started in this order.
        workers: Largest number of processes at a time, at least 1.
        on_progress: Called in this process with the number of a job and what it last passed to `report`.
        on_interrupted: Called in this process with the number of each job that was started and did not end, after
            all processes have ended.

    Raises:
        EmbedLayerError: A job raised this error.
        FileError: A process was killed.
    """
    context = _KillableContext()
    progress = context.RawArray("q", [_NOT_STARTED] * len(numbers))
    executor = ProcessPoolExecutor(min(workers, len(numbers)), context, _start_worker, (progress,))
    running: dict[Future[list[str]], int] = {}
    waiting = list(reversed(range(len(numbers))))
    try:
        while waiting or running:
            while waiting and len(running) < workers:  # the executor would start the next job after an error
                place = waiting.pop()
                running[executor.submit(_run_job, prepare, argument, place, numbers[place])] = place
            finished, _ = wait(running, _SECONDS_BETWEEN_REPORTS, FIRST_COMPLETED)
            if not finished and context.has_failed():  # the executor may not notice it while another process works
                raise BrokenProcessPool
            for place, value in enumerate(progress):
                if value != _NOT_STARTED:
                    on_progress(numbers[place], value)
            for future in finished:
                for message in future.result():
                    warnings.warn(message, EmbedLayerWarning, stacklevel=3)
                del running[future]
    except BrokenProcessPool as error:
        context.terminate()
        executor.shutdown()  # waits until all exit codes are known
        started = [str(numbers[place]) for place in running.values() if progress[place] != _NOT_STARTED]
        raise FileError(
            f"A worker process was killed or failed to start ({context.cause_of_death()}) while shards "
            f"{', '.join(started) or 'none'} were being built. Finished shards are kept: call again to continue."
        ) from error
    finally:
        if running:
            for process in context.processes:
                process.kill()
        executor.shutdown(cancel_futures=True)
        for place in running.values():
            if progress[place] != _NOT_STARTED:
                on_interrupted(numbers[place])


class _KillableContext(SpawnContext):
    """A `multiprocessing` context that lists its processes, which `ProcessPoolExecutor` cannot kill."""

    def __init__(self) -> None:
        self.processes: list[SpawnProcess] = []

    def Process(self, *args: Any, **options: Any) -> SpawnProcess:  # type: ignore[override]
        """Create a process and list it."""
        self.processes.append(SpawnProcess(*args, **options))
        return self.processes[-1]

    def has_failed(self) -> bool:
        """Return whether a process ended by a signal or with an exit code other than 0."""
        return any(process.exitcode not in (None, 0) for process in self.processes)

    def terminate(self) -> None:
        """Send SIGTERM to the processes that have not ended."""
        for process in self.processes:
            process.terminate()

    def cause_of_death(self) -> str:
        """Return the signal or exit code of the process that ended first, for an error message."""
        terminated = (None, 0, -signal.SIGTERM)
        code = next((process.exitcode for process in self.processes if process.exitcode not in terminated), None)
        if code == -signal.SIGKILL:
            return "SIGKILL, which often means too little memory"
        if code == 1:
            return "exit code 1; a script needs an `if __name__ == '__main__':` block around this call"
        return f"exit code {code}"


_progress: Any = None
"""In a worker process: progress of all jobs, in memory that all processes share."""


def _start_worker(progress: Any) -> None:
    """Initialise a worker process.

    The process ignores Ctrl-C, turns the threads of the `tokenizers` library off, and exits when its parent has ended.

    Args:
        progress: Shared array with the progress of each job.
    """
    global _progress
    _progress = progress
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the caller kills us
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Wait until the calling process has ended, give the job a moment to remove its files, and end this process."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    time.sleep(_SECONDS_TO_CLEAN_UP)
    os._exit(1)


def _run_job(prepare: Callable[[str], Job], argument: str, place: int, number: int) -> list[str]:
    """Do one job in a worker process and return the texts of its warnings.

    Args:
        prepare: Function that returns the function which does a job.
        argument: Argument of `prepare`.
        place: Index of the job in the shared progress array.
        number: Number of the job.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def report(value: int) -> None:
        """Store the progress of the job in shared memory; exit if the calling process has ended."""
        if not parent.is_alive():
            sys.exit(1)
        _progress[place] = value

    report(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EmbedLayerWarning)
        _prepared(prepare, argument)(number, report)
    return [str(warning.message) for warning in caught if issubclass(warning.category, EmbedLayerWarning)]


@cache
def _prepared(prepare: Callable[[str], Job], argument: str) -> Job:
    """Return `prepare(argument)`, called once in a process."""
    return prepare(argument)
