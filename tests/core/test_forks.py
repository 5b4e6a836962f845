"""What has a lock or a thread works in a forked process, also if the lock was locked or the thread busy at the fork."""

import ast
import contextlib
import fcntl
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from processes import in_a_fork
from safetensors.torch import save_file
from test_dependencies import PACKAGE
from thread_order import wait_for_any, watch_locks

import embedlayer as el
from embedlayer.cli import interrupts
from embedlayer.core.errors import FileError
from embedlayer.core.forks import BackgroundThread, held_locks, lock_held_at_forks
from embedlayer.data import encode_chunks
from embedlayer.explorer import table_map
from embedlayer.kernels import kernel
from embedlayer.opening import OpenedModel
from embedlayer.tables import MappedEmbedding

IDS = torch.tensor([3, 1, 4])


@contextmanager
def other_thread(locked: Callable[[Callable[[], object]], object]) -> Iterator[None]:
    """Another thread, which is inside of `locked(wait)` during the block."""
    inside, leave = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        leave.wait()

    thread = threading.Thread(target=locked, args=(wait,))
    thread.start()
    inside.wait()
    try:
        yield
    finally:
        leave.set()
        thread.join()


def a_read_only_table(folder: Path, patch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(10, 4)
    save_file({"rows": rows}, folder / "rows.safetensors")
    with MappedEmbedding.open(folder / "rows.safetensors") as table:
        table.prefetch(IDS)

        def use() -> None:
            assert torch.equal(table(IDS), rows[IDS])  # what was requested before the fork
            table.prefetch(IDS + 1)
            assert torch.equal(table(IDS + 1), rows[IDS + 1])
            table.close()

        in_a_fork(use)
        assert torch.equal(table(IDS), rows[IDS])


def a_trained_table(folder: Path, patch: pytest.MonkeyPatch) -> None:
    with MappedEmbedding.create(folder / "rows", 10, 4, init_std=1.0) as table:
        table.prefetch(IDS)

        def use() -> None:
            table.prefetch(IDS)
            with pytest.raises(FileError, match="from which this one was forked"):
                table(IDS)
            table.close()

        in_a_fork(use)


def a_row_sparse_table(folder: Path, patch: pytest.MonkeyPatch) -> None:
    table = el.RowSparseEmbedding(10, 4)
    in_a_fork(lambda: table(IDS))


def a_text_that_is_encoded(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("TOKENIZERS_PARALLELISM", "false")
    chunks = [f"chunk {number} of a text\n" for number in range(200 * (os.cpu_count() or 1))]
    tokenizer = el.train_tokenizer("\n".join(chunks[:9]), vocab_size=300)
    wanted = [tokenizer.encode(chunk).ids for chunk in chunks]
    encoded = encode_chunks(chunks, tokenizer)
    first = next(encoded)[1].tolist()

    def use() -> None:
        assert [first, *(ids.tolist() for _, ids in encoded)] == wanted

    in_a_fork(use)
    use()


def an_opened_model(folder: Path, patch: pytest.MonkeyPatch) -> None:
    opened = OpenedModel("table", el.TokenEmbedding(10, 4))
    assert opened.once("answer", lambda: 1) == 1
    with other_thread(lambda wait: opened.once("slow", wait)), other_thread(lambda wait: _inside(opened._lock, wait)):
        in_a_fork(lambda: (opened.once("slow", lambda: 2), opened.once("answer", lambda: 3)) == (2, 1) or 1 / 0)


def a_map_that_is_computed(folder: Path, patch: pytest.MonkeyPatch) -> None:
    here, begun = os.getpid(), threading.Event()

    def compute(source, report) -> str:
        begun.set()
        while os.getpid() == here:
            time.sleep(0.001)
            report(table_map.MOVING, 0.5)
        return "map"

    patch.setattr(table_map, "compute_map", compute)
    job = table_map.MapJob(OpenedModel("table", el.TokenEmbedding(10, 4)))
    job.start()
    begun.wait()

    def use() -> None:
        assert job.progress()["state"] == "absent"
        job.cancel()
        assert job.wait() == "map"
        in_a_fork(lambda: job.wait() == "map" or 1 / 0)  # it is not computed again

    in_a_fork(use)
    job.cancel()
    assert job.progress()["state"] == "cancelled"


def a_lock_file(folder: Path, patch: pytest.MonkeyPatch) -> None:
    here, flock, waits = os.getpid(), fcntl.flock, list[Callable[[], object]]()

    def slow(descriptor: int, how: int) -> None:
        if os.getpid() == here and waits:
            waits.pop()()
        flock(descriptor, how)

    def create(name: str) -> None:
        MappedEmbedding.create(folder / name, 10, 4).close()

    patch.setattr(fcntl, "flock", slow)

    def wait_inside(wait: Callable[[], object]) -> None:
        waits.append(wait)
        create("one")

    with other_thread(wait_inside):
        in_a_fork(lambda: create("other"))


def a_command(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(interrupts, "SECONDS", 0.01)

    def use() -> None:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    def command() -> None:
        with interrupts.ending_on_interrupt():
            in_a_fork(use)
            time.sleep(0.1)  # the signal of a forked process does not end the process from which it was forked

    in_a_fork(command)


def kernels_that_are_compiled(folder: Path, patch: pytest.MonkeyPatch) -> None:
    inside, forked = threading.Event(), threading.Event()

    def compile_kernels() -> None:
        with kernel._compiling:
            inside.set()
            forked.wait(0.2)

    compiles = threading.Thread(target=compile_kernels)
    compiles.start()
    inside.wait()
    in_a_fork(lambda: _inside(kernel._compiling, lambda: None), forked)
    compiles.join()


def _inside(lock, wait: Callable[[], object]) -> None:
    with lock:
        wait()


HOLDERS = {
    "tables/stored/rows_in_files.py": a_read_only_table,
    "tables/stored/row_folder.py": a_trained_table,
    "row_sparse/pending_updates.py": a_row_sparse_table,
    "data/text_chunks.py": a_text_that_is_encoded,
    "opening/opened_model.py": an_opened_model,
    "explorer/table_map.py": a_map_that_is_computed,
    "io/locks.py": a_lock_file,
    "kernels/kernel.py": kernels_that_are_compiled,
    "cli/interrupts.py": a_command,
}
NAMES = {
    *("Lock", "RLock", "Condition", "Event", "Semaphore", "BoundedSemaphore", "Barrier", "Thread", "Timer", "Queue"),
    *("SimpleQueue", "ThreadPoolExecutor", "BackgroundThread", "lock_held_at_forks", "register_at_fork"),
}


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=lambda holder: holder.__name__)
def test_it_works_in_a_forked_process(tmp_path, monkeypatch, holder) -> None:
    holder(tmp_path, monkeypatch)


def test_everything_with_a_lock_or_a_thread_is_among_them() -> None:
    found, registering = set(), set()
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text()
        for node in ast.walk(ast.parse(text)) if any(f"{name}(" in text for name in NAMES) else ():
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                found |= {str(file.relative_to(PACKAGE))} if name in NAMES else set()
                registering |= {str(file.relative_to(PACKAGE))} if name == "register_at_fork" else set()
    in_workers = "data/process_pool.py"  # a thread of a process that is spawned, which ends it with its parent
    assert found == {*HOLDERS, "core/forks.py", in_workers}
    assert registering == {"core/forks.py"}


def test_a_fork_waits_for_what_a_lock_protects(monkeypatch) -> None:
    waiting, inside, forked = watch_locks(monkeypatch), threading.Event(), threading.Event()
    lock, parts = lock_held_at_forks(), []

    def write() -> None:
        with lock:
            parts.append(1)
            inside.set()
            wait_for_any(waiting, forked)
            parts.append(2)

    def use() -> None:
        assert parts == [1, 2]
        other = threading.Thread(target=lambda: _inside(lock, lambda: parts.append(3)))
        other.start()
        other.join()
        assert parts == [1, 2, 3]

    thread = threading.Thread(target=write)
    thread.start()
    inside.wait()
    in_a_fork(use, forked)
    thread.join()
    assert parts == [1, 2]


def test_threads_that_acquire_several_locks_do_not_block_each_other() -> None:
    several = [lock_held_at_forks() for _ in range(3)]
    meeting = threading.Barrier(2)
    total = []

    def work(order: int) -> None:
        for _ in range(50):
            meeting.wait()
            with held_locks(several[::order]):
                total.append(1)

    threads = [threading.Thread(target=work, args=(order,)) for order in (1, -1)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert len(total) == 100


def test_what_waits_for_forks_ends_with_its_owner(tmp_path) -> None:
    table = MappedEmbedding.create(tmp_path / "rows", 10, 4)
    table.close()
    opened = OpenedModel("table", el.RowSparseEmbedding(10, 4))
    owners = [weakref.ref(each) for each in (table, opened, opened._lock)]
    del table, opened
    gc.collect()
    assert [owner() for owner in owners] == [None] * 3


def test_an_error_of_a_job_is_that_of_its_result_and_later_jobs_are_done() -> None:
    with contextlib.closing(BackgroundThread("test")) as thread:
        failed, done = thread.submit(lambda: 1 // 0), thread.submit(lambda: threading.current_thread().name)
        with pytest.raises(ZeroDivisionError):
            failed()
        assert done().startswith("test")
    assert thread.submit(lambda: 1)() == 1  # after it was closed
    thread.close()
