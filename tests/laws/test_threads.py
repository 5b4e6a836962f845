"""Threads and processes that read a table find the rows of one thread, and each step is applied once to each row.

A reader or a step is stopped in its middle, and another thread begins: it waits, or what it does is done whole.
"""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import cases, looped
from kinds import EMBED_DIM, LOOKUP_TABLES, VOCAB_SIZE
from processes import in_a_fork
from thread_order import Middle, Watched, wait_for_any
from torch import Tensor, nn

import embedlayer as el
from embedlayer.row_sparse.hooks import without_applying_updates
from embedlayer.row_sparse.storage import raw_weight
from embedlayer.tables.stored.mapped import MappedEmbedding

IDS = torch.arange(VOCAB_SIZE)
STEPS = ([1, 2, 3, 4, 5, 6, 7], [1, 2, 48], [0, 7])
TRAINED = ("row-sparse", "mapped, trained")


class Run:
    """A table after some steps, which left updates of rows pending if it is row-sparse."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.table = LOOKUP_TABLES[kind]()
        weights = list(self.table.parameters()) if kind in TRAINED else []
        self.optimizer = el.RowAdamW(weights, lr=0.1) if weights else None
        for ids in STEPS:
            self.step(ids)

    def step(self, ids: list[int]) -> None:
        if self.optimizer is not None:
            self.accumulate(ids)
            self.optimizer.step()

    def accumulate(self, ids: list[int] = [1, 9, 48]) -> None:  # noqa: B006
        """Compute the gradient of a step."""
        self.optimizer.zero_grad()
        self.table(torch.tensor(ids)).square().sum().backward()

    def stored(self) -> dict[str, Tensor]:
        """All that the table and its optimizer store, without another update."""
        tensors = {name: raw_weight(each).clone() for name, each in self.table.named_parameters()}
        for each in self.table.parameters():
            if pending := getattr(each, "pending_updates", None):
                tensors |= pending.state()[0] | dict(zip("ab", pending.moments, strict=False))
        return {name: each.clone() for name, each in tensors.items()}


@torch.no_grad()
def look_up(run: Run) -> Tensor:
    return run.table(IDS[: VOCAB_SIZE // 2])


@torch.no_grad()
def fused(run: Run) -> Tensor:
    """The input embedding gathers, adds positions and scales in one pass."""
    layer = el.TransformerEmbedding(VOCAB_SIZE, EMBED_DIM, VOCAB_SIZE, dropout=0.0, table=run.table)
    nn.init.zeros_(layer.position.weight)
    return layer.eval()(IDS[: VOCAB_SIZE // 2])


def deep_copy(run: Run) -> Tensor:
    if isinstance(run.table, MappedEmbedding) and run.optimizer is not None:
        return run.table.weight.detach().clone()  # it refuses a copy
    return copy.deepcopy(run.table).rows(0, VOCAB_SIZE).detach()


READERS: dict[str, Callable[[Run], Any]] = {
    "look-up": look_up,
    "input embedding": fused,
    "rows": lambda run: run.table.rows(3, VOCAB_SIZE).detach().clone(),
    "state_dict": lambda run: [each.clone() for each in run.table.state_dict().values()],
    "deepcopy": deep_copy,
    "state of the optimizer": lambda run: run.optimizer and copy.deepcopy(run.optimizer.state_dict()["state"][0]),
    "apply_pending_updates": lambda run: getattr(run.table, "apply_pending_updates", lambda: None)(),
}


@pytest.fixture
def middle(monkeypatch: pytest.MonkeyPatch) -> Middle:
    return Middle(monkeypatch)


def assert_same(found: Any, wanted: Any) -> None:
    """Bit for bit."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


BOTH = ("kernels", "torch operators")
each_reader = cases(
    "kind, reader, both_paths", TRAINED, READERS, BOTH, pairs=["kind, reader", "kind, both_paths"]
).with_args(indirect=["both_paths"])
OTHERS = [kind for kind in LOOKUP_TABLES if kind not in TRAINED]


def assert_two_threads_are_as_one(middle, kind, first, second) -> None:
    alone, together = Run(kind), Run(kind)
    wanted = [READERS[each](alone) for each in (first, second)]
    assert_same(middle.run(lambda: READERS[first](together), lambda: READERS[second](together)), wanted)
    assert_same(together.stored(), alone.stored())


@cases(
    "kind, first, second, both_paths",
    TRAINED,
    READERS,
    list(READERS)[::-1],
    BOTH,
    pairs=["kind, first", "kind, second", "kind, both_paths"],
).with_args(indirect=["both_paths"])
def test_two_threads_that_read_a_trained_table_are_as_one(both_paths, middle, kind, first, second) -> None:
    assert_two_threads_are_as_one(middle, kind, first, second)
    assert middle.stopped.is_set()


@looped("kind, first, second", OTHERS, READERS, list(READERS)[::-1])
def test_two_threads_that_read_another_table_are_as_one(middle, kind, first, second) -> None:
    assert_two_threads_are_as_one(middle, kind, first, second)


@each_reader
def test_a_reader_beside_a_step_finds_the_rows_before_or_after_it(both_paths, middle, kind, reader) -> None:
    alone, together = Run(kind), Run(kind)
    for run in (alone, together):
        run.accumulate()
    alone.optimizer.step()
    wanted = READERS[reader](alone)
    _, found = middle.run(together.optimizer.step, lambda: READERS[reader](together))
    assert middle.stopped.is_set()
    assert_same(found, wanted)
    assert_same(together.stored(), alone.stored())


@each_reader
def test_a_step_beside_a_reader_is_applied_once_to_each_row(both_paths, middle, kind, reader) -> None:
    alone, together = Run(kind), Run(kind)
    for run in (alone, together):
        run.accumulate()
    READERS[reader](alone)
    alone.optimizer.step()
    _, error = middle.run(lambda: READERS[reader](together), together.optimizer.step)
    assert middle.stopped.is_set()
    assert error is None
    assert_same(together.stored(), alone.stored())


def test_a_fork_in_the_middle_of_a_step_has_the_rows_after_it(both_paths, middle) -> None:
    alone, together = Run("row-sparse"), Run("row-sparse")
    for run in (alone, together):
        run.accumulate()
    alone.optimizer.step()
    forked, wanted = threading.Event(), look_up(alone)

    def use() -> None:
        assert_same(look_up(together), wanted)
        together.optimizer.step()

    def go_on() -> None:
        wait_for_any(Watched.waiting, forked)
        middle.go_on.set()

    others = [threading.Thread(target=middle.first(together.optimizer.step)), threading.Thread(target=go_on)]
    for each in others:
        each.start()
    wait_for_any(middle.stopped)
    in_a_fork(use, forked)
    for each in others:
        each.join()
    assert_same(look_up(together), wanted)


def test_a_checkpoint_beside_a_step_is_of_the_rows_before_or_after_it(both_paths, middle) -> None:
    alone, together = Run("mapped, trained"), Run("mapped, trained")
    for run in (alone, together):
        run.accumulate()
    alone.optimizer.step()

    def checkpoint() -> None:
        with together.table.checkpoint():
            pass

    assert middle.run(together.optimizer.step, checkpoint) == [None, None]
    together.step([5, 6])  # what a resumed table does not have
    folder = together.table.source.folder("test").path
    together.table.close()
    with MappedEmbedding.resume(folder) as resumed:
        assert_same(resumed.rows(0, VOCAB_SIZE).detach(), alone.table.rows(0, VOCAB_SIZE).detach())


def test_a_thread_reads_raw_rows_for_itself_alone() -> None:
    run = Run("row-sparse")
    raw = raw_weight(run.table.weight).clone()
    found: list[Tensor] = []
    with without_applying_updates(run.table):
        reader = threading.Thread(target=lambda: found.append(run.table.weight.detach().clone()))
        assert torch.equal(run.table.weight.detach(), raw)
        reader.start()
        reader.join()
    assert not torch.equal(found[0], raw)
    assert torch.equal(found[0], run.table.weight.detach())


def test_no_hook_of_a_user_runs_inside_of_the_lock(both_paths) -> None:
    run = Run("row-sparse")
    lock, free = run.table.pending_updates.lock, []

    def hook(*arguments: Any, **options: Any) -> None:
        other = threading.Thread(target=lambda: free.append(lock.acquire(blocking=False) and lock.release() is None))
        other.start()
        other.join()

    def kept(tensor: Tensor) -> Tensor:
        hook()
        return tensor

    table, optimizer = run.table, run.optimizer
    table.register_forward_pre_hook(hook)
    table.register_forward_hook(hook)
    table.register_state_dict_pre_hook(hook)
    table.register_load_state_dict_post_hook(hook)
    table.weight.register_hook(hook)
    table.weight.register_post_accumulate_grad_hook(hook)
    for register in ("step_pre", "step_post", "state_dict_pre", "load_state_dict_pre", "load_state_dict_post"):
        getattr(optimizer, f"register_{register}_hook")(hook)
    with torch.autograd.graph.saved_tensors_hooks(kept, kept):
        run.step([3, 4])
        F.embedding(IDS, table.weight, sparse=True).sum().backward()
        optimizer.step(lambda: hook())
    table.load_state_dict(copy.deepcopy(table.state_dict()))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert len(free) > 15
    assert all(free)
