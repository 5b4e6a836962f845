"""Jobs in fresh Python processes: errors come back as ours, nothing hangs, no process stays behind.

A worker is a plain `python -c`, so that the caller's script is not imported again and needs no `__main__` guard. It
is handed one job after the other on its standard input and answers in lines of JSON on its standard output; where
either pipe closes, because the caller is gone, it ends. A worker whose work is no longer wanted is killed, at once and
wherever it is: it cannot be asked to clean up, because an exception raised out of a signal in the middle of an import
comes out as another one, or not at all. What it leaves is cleared away by the caller, who does the same after a crash.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from embedlayer import errors
from embedlayer.errors import EmbedLayerError, EmbedLayerWarning, FileError

Report = Callable[[int], None]
Message = dict[str, Any]

_SERVE = "from embedlayer.data.process_pool import serve; serve()"
_SECONDS_BETWEEN_REPORTS = 0.1


def run_jobs(
    prepare: str,
    argument: str,
    jobs: Sequence[int],
    workers: int,
    *,
    on_progress: Callable[[int, int], None],
    on_cut_short: Callable[[int], None],
) -> None:
    """Do `do(job, report)` for each job, `do` being what `prepare(argument)` gives, in at most `workers` processes.

    Args:
        prepare: The function as `module:name`; each process calls it once.
        argument: Its one argument.
        jobs: Numbers, handed out in this order.
        workers: Processes at a time, 1 or more.
        on_progress: Called here with a job and what it last reported.
        on_cut_short: Called here with each job that was begun and not done, when no process works on it any more.

    Raises:
        EmbedLayerError: What a job raised, as it was raised there. The others are stopped.
        FileError: A process was killed.
    """
    waiting = list(reversed(jobs))
    answers: queue.SimpleQueue[tuple[_Worker, Message]] = queue.SimpleQueue()
    started: list[_Worker] = []
    try:
        for _ in range(min(workers, len(jobs))):
            started.append(_Worker(prepare, argument, answers))
            started[-1].give(waiting.pop())
        busy = len(started)
        while busy:
            worker, answer = answers.get()
            if "progress" in answer:
                on_progress(answer["job"], answer["progress"])
            elif "warning" in answer:
                warnings.warn(answer["warning"], EmbedLayerWarning, stacklevel=3)
            elif "error" in answer:
                raise getattr(errors, answer["error"])(answer["message"])
            elif "done" in answer:
                worker.give(waiting.pop() if waiting else None)
                busy -= worker.job is None
            elif worker.job is not None:
                raise FileError(
                    f"The process that worked on part {worker.job} ended before it was done ({_how(answer['ended'])}). "
                    f"The parts that are done stay: call again to go on."
                )
    finally:
        for worker in started:
            worker.process.kill()
        for worker in started:
            worker.end()
            if worker.job is not None:
                on_cut_short(worker.job)


class _Worker:
    """One process, and the thread that hears it."""

    def __init__(self, prepare: str, argument: str, answers: "queue.SimpleQueue[tuple[_Worker, Message]]") -> None:
        paths = [entry or os.getcwd() for entry in sys.path]
        self.job: int | None = None
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _SERVE, prepare, argument],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C reaches the caller alone, who ends the workers
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "false"},
        )
        self.thread = threading.Thread(target=self._hear, args=(answers,), daemon=True)
        self.thread.start()

    def give(self, job: int | None) -> None:
        """Hand the process a job, or none. If it is dead, its end is heard and told like any other."""
        self.job = job
        assert self.process.stdin is not None
        if job is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.write(f"{job}\n")
                self.process.stdin.flush()

    def end(self) -> None:
        """Wait for the process, which was killed, and for all that it said."""
        self.process.wait()
        self.thread.join()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def _hear(self, answers: "queue.SimpleQueue[tuple[_Worker, Message]]") -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with suppress(ValueError):  # cut short by its end, which is told next
                answers.put((self, json.loads(line)))
        answers.put((self, {"ended": self.process.wait()}))


def serve() -> None:
    """The life of a worker process."""
    caller = _Caller()
    warnings.showwarning = caller.warn
    warnings.simplefilter("always", EmbedLayerWarning)
    module, _, name = sys.argv[1].partition(":")
    try:
        do = getattr(import_module(module), name)(sys.argv[2])
        for line in sys.stdin:
            caller.job = int(line)
            do(caller.job, caller.report)
            caller.tell(job=caller.job, progress=caller.progress)
            caller.tell(done=True)
    except EmbedLayerError as error:
        caller.tell(error=type(error).__name__, message=str(error))


class _Caller:
    """Who handed out the work, as a worker sees it. Whatever else is printed goes to standard error from here on."""

    def __init__(self) -> None:
        self.job = self.progress = 0
        self.told_at = 0.0
        self.pipe = os.dup(sys.stdout.fileno())
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(self, **message: Any) -> None:
        try:
            os.write(self.pipe, json.dumps(message).encode() + b"\n")
        except BrokenPipeError:  # the caller is gone
            sys.exit(1)

    def warn(self, message: Warning | str, category: type[Warning], *place: Any, **_: Any) -> None:
        if issubclass(category, EmbedLayerWarning):
            self.tell(warning=str(message))

    def report(self, progress: int) -> None:
        """Pass the progress of the job on, now and then."""
        self.progress = progress
        if time.monotonic() - self.told_at >= _SECONDS_BETWEEN_REPORTS:
            self.tell(job=self.job, progress=progress)
            self.told_at = time.monotonic()


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"{name}, which often means too little memory" if name == "SIGKILL" else name
