"""A table in memory that other processes read has no pending updates there; one that they cannot read is refused.

Who reads it in a forked process finds the rows of the dense run and writes nothing, and who trains it loses nothing.
"""

from itertools import product
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from covering import cases, covering, some
from kinds import in_a_file
from processes import in_a_fork
from torch import Tensor, nn

import embedlayer as el
from embedlayer.core.errors import FileError, SizeError, StaleRowsError
from embedlayer.optim import RowwiseSecondMoment
from embedlayer.row_sparse.storage import raw_weight
from embedlayer.tables.stored.mapped import MappedEmbedding

V, D = 40, 4
ROWS = torch.randn(V, D, generator=torch.Generator().manual_seed(0))
BATCHES = [[1, 2, 3], [4, 5], [1, 6], [7], [2, 8]]

pytestmark = pytest.mark.usefixtures("both_paths")

PATHS = ("kernels", "torch operators")


def on_one_path(path: str) -> pytest.MarkDecorator:
    """Run a test on one path always: what is shared, and what a fork finds, is the same code on both."""
    return pytest.mark.parametrize("both_paths", some([path], PATHS), indirect=True)


def build(row_sparse: bool) -> tuple[nn.Embedding, torch.optim.Optimizer]:
    table = (el.RowSparseEmbedding if row_sparse else el.TokenEmbedding)(V, D)
    with torch.no_grad():
        table.weight.copy_(ROWS)
    return table, optimizer_of(table)


def optimizer_of(table: nn.Embedding) -> torch.optim.Optimizer:
    kind = el.RowAdamW if hasattr(table.weight, "pending_updates") else torch.optim.AdamW
    return kind(table.parameters(), lr=0.05, weight_decay=0.1)


def train(table: nn.Embedding, optimizer: torch.optim.Optimizer, batches: list[list[int]]) -> None:
    for ids in batches:
        grad = torch.zeros(V, D)
        grad[ids] = ROWS[ids].sign()
        table.weight.grad = grad if not hasattr(table.weight, "pending_updates") else grad.to_sparse(1)
        optimizer.step()
        optimizer.zero_grad()


def trained(batches: list[list[int]] = BATCHES) -> Tensor:
    """The rows of the dense run."""
    table, optimizer = build(row_sparse=False)
    train(table, optimizer, batches)
    return table.weight.detach()


def share_the_table(table: el.TokenEmbedding) -> None:
    assert table.share_memory() is table


def share_the_weight(table: el.TokenEmbedding) -> None:
    table.weight.share_memory_()


def send_the_table(table: el.TokenEmbedding) -> None:
    """As through a queue, or to a process that is spawned."""
    ForkingPickler.dumps(table)


SHARED = [*product([share_the_table, share_the_weight, send_the_table], PATHS)]


@pytest.mark.parametrize(("share", "both_paths"), some(covering(SHARED), SHARED), indirect=["both_paths"])
def test_forked_readers_find_the_dense_rows_and_write_nothing(share) -> None:
    table, optimizer = build(row_sparse=True)
    train(table, optimizer, BATCHES[:3])
    share(table)
    torch.testing.assert_close(raw_weight(table.weight), trained(BATCHES[:3]))
    train(table, optimizer, BATCHES[3:])
    before, wanted = raw_weight(table.weight).clone(), trained()
    torch.testing.assert_close(before, wanted)

    def read() -> None:
        with torch.no_grad():
            torch.testing.assert_close(table(torch.arange(V)), wanted)
        torch.testing.assert_close(table.state_dict()["weight"], wanted)

    in_a_fork(read)
    assert torch.equal(raw_weight(table.weight), before)


def test_a_table_with_a_sparse_gradient_is_not_half_shared() -> None:
    table, optimizer = build(row_sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(SizeError, match=r"call optimizer.zero_grad\(\) before share_memory"):
        table.share_memory()
    assert not raw_weight(table.weight).is_shared()
    optimizer.zero_grad()
    assert table.share_memory().weight.is_shared()


@cases("shares_state, both_paths", [False, True], PATHS).with_args(indirect=["both_paths"])
def test_a_forked_trainer_loses_no_update(shares_state, both_paths) -> None:
    """Hogwild: what it leaves are the steps of both, and nothing that only its own record knew."""
    table, optimizer = build(row_sparse=True)
    table.share_memory()
    train(table, optimizer, BATCHES[:2])
    if shares_state:
        for each in optimizer.state[table.weight].values():
            each.share_memory_()
    in_a_fork(lambda: train(table, optimizer if shares_state else optimizer_of(table), BATCHES[2:]))
    dense, dense_optimizer = build(row_sparse=False)
    train(dense, dense_optimizer, BATCHES[:2])
    train(dense, dense_optimizer if shares_state else optimizer_of(dense), BATCHES[2:])
    torch.testing.assert_close(raw_weight(table.weight), dense.weight.detach())
    if shares_state:
        state = dense_optimizer.state[dense.weight]
        torch.testing.assert_close(optimizer.state[table.weight]["exp_avg"], state["exp_avg"])


def test_a_restored_state_leaves_nothing_pending_in_shared_memory() -> None:
    table, optimizer = build(row_sparse=True)
    train(table, optimizer, BATCHES)
    stored, moments = raw_weight(table.weight).clone(), dict(optimizer.state[table.weight])
    tensors, rest = table.pending_updates.state()
    tensors = {name: each.clone() for name, each in tensors.items()}
    other, other_optimizer = build(row_sparse=True)
    other.share_memory()
    raw_weight(other.weight).copy_(stored)
    other_optimizer.load_moments(other.weight, moments)
    other_optimizer.load_pending_updates(other.weight, tensors, rest)
    torch.testing.assert_close(raw_weight(other.weight), trained())


@on_one_path("torch operators")
def test_memory_that_was_shared_behind_the_table_is_refused_in_a_fork_and_as_the_error_says_readable_later() -> None:
    table, optimizer = build(row_sparse=True)
    older = table.weight.detach()
    train(table, optimizer, BATCHES[:3])
    older.share_memory_()  # no function of the weight itself
    assert table.pending_updates.has_pending

    def refuse() -> None:
        for read in (lambda: table([1]), lambda: table.weight.clone(), lambda: table.rows(0, 3)):
            with pytest.raises(StaleRowsError, match=r"call table.share_memory\(\) before the fork"):
                read()

    in_a_fork(refuse)
    table.share_memory()
    in_a_fork(lambda: torch.testing.assert_close(table(torch.arange(V)), trained(BATCHES[:3])))


def test_a_rule_with_one_second_moment_a_row_shares_it_too() -> None:
    table = el.RowSparseEmbedding(V, D)
    optimizer = el.RowAdamW(table.parameters(), lr=0.05, state=RowwiseSecondMoment())
    table.share_memory()
    train(table, optimizer, BATCHES)
    assert not table.pending_updates.has_pending


@on_one_path("kernels")
def test_private_memory_of_a_fork_is_its_own() -> None:
    table, optimizer = build(row_sparse=True)
    train(table, optimizer, BATCHES)
    before = raw_weight(table.weight).clone()

    def read_and_train() -> None:
        torch.testing.assert_close(table(torch.arange(V)), trained())
        train(table, optimizer, [[30]])

    in_a_fork(read_and_train)
    assert torch.equal(raw_weight(table.weight), before)
    assert table.pending_updates.has_pending


@on_one_path("kernels")
def test_a_mapped_table_that_is_trained_is_not_read_in_a_fork() -> None:
    table = in_a_file(trained=True)
    optimizer = el.RowAdamW(table.parameters(), lr=0.1)
    table([1, 2]).sum().backward()

    def refuse() -> None:
        reads = (lambda: table([1]), lambda: table.weight.clone(), lambda: table.rows(0, 3), table.state_dict)
        for read in (*reads, optimizer.step):
            with pytest.raises(FileError, match="from which this one was forked"):
                read()

    in_a_fork(refuse)
    optimizer.step()
    in_a_fork(refuse)


@on_one_path("torch operators")
@pytest.mark.parametrize(
    "share",
    {
        "weight": lambda table, optimizer: share_the_weight(table),
        "sent weight": lambda table, optimizer: ForkingPickler.dumps(table.weight),
        "moments": lambda table, optimizer: optimizer.state[table.weight]["exp_avg"].share_memory_(),
    }.items(),
    ids=lambda share: share[0],
)
def test_a_mapped_table_that_was_moved_to_shared_memory_is_not_trained_there(share) -> None:
    table = in_a_file(trained=True)
    folder, optimizer = table.source.folder("test").path, el.RowAdamW(table.parameters(), lr=0.1)
    table([1, 2]).sum().backward()
    optimizer.step()
    rows = table.rows(0, 50).clone()
    with table.checkpoint():
        pass
    optimizer.zero_grad()
    share[1](table, optimizer)
    table([1, 2]).sum().backward()
    with pytest.raises(FileError, match="in shared memory"):
        optimizer.step()
    table.close()
    with MappedEmbedding.resume(folder) as resumed:
        assert torch.equal(resumed.rows(0, 50), rows)
        resumed([1, 2]).sum().backward()
        el.RowAdamW(resumed.parameters(), lr=0.1).step()
        assert not torch.equal(resumed.rows(0, 50), rows)
