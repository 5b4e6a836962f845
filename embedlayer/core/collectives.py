"""Collective operations over one process or many, by the names of `torch.distributed`, and the rows that a rank stores.

Code that runs on one process and on many takes a `Collectives`, by default `SINGLE_PROCESS`, whose operations return
their input, so the same code serves both.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from embedlayer.core.errors import PeerError, SizeError
from embedlayer.core.formatting import shortened
from embedlayer.core.torch_state import is_transformed, transforms_active

ReduceOp = Literal["sum", "max", "min"]
Rows = Shaped[Tensor, "_ *each"]


Levels = tuple[tuple[int, int], ...]
"""How rows are split over ranks: for each split, outermost first, the number of blocks and the step between ranks."""


@dataclass(frozen=True)
class RowPartition:
    """Contiguous rows of a tensor per rank: rank `r` stores rows `r * ceil(V / N)` to `(r + 1) * ceil(V / N) - 1`.

    The last rank stores what is left; with several ranks that is one row at least. With two `levels` the rows are split
    first into blocks, and then each block over some ranks, as tensor parallelism and FSDP2 do together. Ranks that
    differ in no level store the same rows.

    `num_rows` counts over all ranks, V; `levels` are the splits, if they are not one over all ranks.

    Example:
        >>> part = RowPartition(10, rank=2, size=3)
        >>> (part.start, part.stop, part.rank_of(torch.tensor([0, 4, 9])).tolist())
        (8, 10, [0, 1, 2])
        >>> [RowPartition(10, rank, 4, ((2, 1), (2, 2))).start for rank in range(4)]
        [0, 5, 3, 8]
    """

    num_rows: int
    rank: int = 0
    size: int = 1
    levels: Levels = ()

    def __post_init__(self) -> None:
        last = range(self.size) if self.levels else [self.size - 1]  # of several splits any block may be the smallest
        if self.size > 1 and any(block.start == block.stop for block in map(self.slice_of, last)):
            which = "one" if self.levels else "the last"
            raise SizeError(
                f"{self.num_rows} rows in blocks of {self.rows_per_rank} leave no row for {which} of {self.size} ranks."
            )

    @property
    def rows_per_rank(self) -> int:
        """Return the largest number of rows of a rank, those of the first block: `ceil(V / number of blocks)`."""
        blocks = math.prod(count for count, _ in self.levels) if self.levels else self.size
        return math.ceil(self.num_rows / blocks)

    @property
    def start(self) -> int:
        """Return the index of this rank's first row among the rows of all ranks."""
        start: int = self.slice_of(self.rank).start
        return start

    @property
    def stop(self) -> int:
        """Return the index after this rank's last row among the rows of all ranks."""
        stop: int = self.slice_of(self.rank).stop
        return stop

    def __len__(self) -> int:
        return self.stop - self.start

    def slice_of(self, rank: int) -> slice:
        """Return the slice that selects the rows of `rank` from a tensor with the rows of all ranks."""
        start, stop = 0, self.num_rows
        for count, step in self.levels or ((self.size, 1),):
            each = math.ceil((stop - start) / count)
            start = min(start + rank // step % count * each, stop)
            stop = min(start + each, stop)
        return slice(start, stop)

    def rank_of(self, rows: Int[Tensor, "*batch"]) -> Int[Tensor, "*batch"]:
        """Return, for each row index among the rows of all ranks, the rank that stores that row."""
        if not self.levels:
            return rows // self.rows_per_rank
        by_start = sorted(range(self.size), key=lambda rank: self.slice_of(rank).start)
        starts = torch.tensor([self.slice_of(rank).start for rank in by_start], device=rows.device)
        return torch.tensor(by_start, device=rows.device)[torch.searchsorted(starts, rows, right=True) - 1]

    def local(self, rows: Int[Tensor, "*batch"]) -> tuple[Int[Tensor, "*batch"], Bool[Tensor, "*batch"]]:
        """Convert row indices that count over all ranks to indices into the rows of this rank.

        The result is the indices, 0 for rows of other ranks, and a boolean mask of the rows that this rank stores.
        """
        is_local = (rows >= self.start) & (rows < self.stop)
        return torch.where(is_local, rows - self.start, 0), is_local

    def local_or_none(self, row: int | None) -> int | None:
        """Convert one row index to an index into the rows of this rank.

        Return `None` if another rank stores the row, or if `row` is `None`.
        """
        return None if row is None or not self.start <= row < self.stop else row - self.start

    def overlap(self, start: int, stop: int) -> tuple[int, int]:
        """Return which of the rows `start` to `stop - 1` this rank stores, as (first, last + 1) of its own rows.

        Both indices count from this rank's first row. They are equal if it stores none of the rows.
        """
        low = min(max(start, self.start), self.stop)
        return low - self.start, max(low, min(stop, self.stop)) - self.start


class Collectives:
    """Collective operations (all-reduce, all-gather, ...) over a group of ranks, or over one process.

    Every rank of the group must call each operation, in the same order. An error of torch.distributed in an operation
    is raised as a `PeerError`. `reduce_scatter` and the gradients of `all_gather` are summed in the order of the ranks,
    so each run gives the same sums. `SINGLE_PROCESS` sends nothing: each of its operations returns its input.

    Args:
        group: The group of `torch.distributed`; `None` is the default group, which must be initialised.
        device: Device of counts and JSON objects, one that the group's backend accepts.
        timeout_seconds: Time-out of the group, which error messages name; `None` if it is not known.
        levels: How `partition` splits rows over the ranks, if in several splits.
        is_single: Whether there is one process without a group, as in `SINGLE_PROCESS`.

    Attributes:
        rank: Number of this process in the group, from 0.
        size: Number of ranks in the group.
        is_first: Whether this is rank 0, which writes files and prints.
        global_ranks: Rank of each process of the group in the default process group; used in messages.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        *,
        timeout_seconds: float | None = None,
        levels: Levels = (),
        is_single: bool = False,
    ) -> None:
        self.group, self.device, self.timeout_seconds = group, torch.device(device), timeout_seconds
        self.levels, self.is_single = levels, is_single
        self.rank, self.size, self.global_ranks = 0, 1, [0]
        if not is_single:
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
            self.global_ranks = dist.get_process_group_ranks(group)
        self.is_first = self.rank == 0

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Reduce `tensor` elementwise over all ranks, in place on every rank, and return it. It has no gradient."""
        if not self.is_single:
            with self.peer_errors():
                dist.all_reduce(tensor, getattr(dist.ReduceOp, op.upper()), group=self.group)
        return tensor

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Overwrite `tensor` on every rank with that of rank 0, and return it. The tensor must be contiguous."""
        if not self.is_single:
            with self.peer_errors():
                dist.broadcast(tensor, group_src=0, group=self.group)
        return tensor

    def all_to_all(self, rows: Rows, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Rows:
        """Send consecutive rows to each rank, and return the rows received from all ranks, in the order of the ranks.

        Differentiable: the backward pass sends the gradient of a row to the rank that it came from. All ranks must call
        `backward` in the same order.
        """
        if self.is_single:
            return rows
        counts = list(send_counts), list(receive_counts)
        if is_transformed(rows) or (torch.is_grad_enabled() and rows.requires_grad):
            received: Tensor = _AllToAll.apply(rows, *counts, self)  # type: ignore[no-untyped-call]
            return received
        return self.exchange_rows(rows, *counts)

    def exchange_rows(self, rows: Rows, send_counts: list[int], receive_counts: list[int]) -> Rows:
        """Do what `all_to_all` does, without a gradient; autograd's function takes as long as to send a few rows."""
        received = rows.new_empty((sum(receive_counts), *rows.shape[1:]))
        with self.peer_errors():
            dist.all_to_all_single(received, rows.contiguous(), receive_counts, send_counts, group=self.group)
        return received

    def all_gather(self, rows: Rows, counts: Sequence[int] | None = None) -> Rows:
        """Concatenate the rows of all ranks, in the order of the ranks.

        Differentiable: the gradient of a row is the sum of its gradients on all ranks.
        """
        if self.is_single:
            return rows
        known = self.exchange_counts([len(rows)] * self.size) if counts is None else counts
        repeated = rows.expand(self.size, *rows.shape).flatten(0, 1)
        return self.all_to_all(repeated, [len(rows)] * self.size, known)

    def reduce_scatter(self, rows: Rows, counts: Sequence[int]) -> Rows:
        """Sum `rows` over all ranks, in the order of the ranks, and return this rank's consecutive part of the sum.

        Differentiable, as `all_to_all` is.
        """
        if self.is_single:
            return rows
        own = counts[self.rank]
        parts = self.all_to_all(rows, counts, [own] * self.size)
        return parts.view(self.size, own, *rows.shape[1:]).sum(0)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return a list with the `value` of every rank, in the order of the ranks.

        Values are sent as JSON, never as a pickle. What JSON has no type for arrives as text. A single process gets the
        object itself.
        """
        if self.is_single:
            return [value]
        content = torch.frombuffer(bytearray(json.dumps(value, default=str).encode()), dtype=torch.uint8)
        counts = self.exchange_counts([len(content)] * self.size)
        contents = self.all_gather(content.to(self.device), counts).cpu().split(counts)
        return [json.loads(bytes(each.tolist())) for each in contents]

    def peer_errors(self) -> AbstractContextManager[None]:
        """Return a context manager that converts an error of torch.distributed in its block to a `PeerError`."""
        return nullcontext() if self.is_single else peer_errors(self.rank, self.size, self.timeout_seconds)

    def broadcast_object(self, value: Any) -> Any:
        """Return the `value` of rank 0 on every rank. It is sent as JSON."""
        return self.all_gather_object(value if self.is_first else None)[0]

    def exchange_counts(self, send_counts: Sequence[int]) -> list[int]:
        """Tell each rank how many rows this rank will send to it, and return how many each will send to this one."""
        counts = torch.tensor(list(send_counts), dtype=torch.int64).to(self.device, non_blocking=True)
        received = self.exchanged(counts)
        if transforms_active():  # where torch 2.9 has no `tolist`
            return [int(number) for number in received.cpu()]
        numbers: list[int] = received.tolist()
        return numbers

    def exchanged(self, counts: Int[Tensor, " N"]) -> Int[Tensor, " N"]:
        """Send `counts[r]` to rank r, and return the numbers received from all ranks; does not wait for the device."""
        return self.all_to_all(counts, [1] * self.size, [1] * self.size)

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.all_reduce(torch.zeros(1, device=self.device))

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is true on any rank."""
        return bool(self.all_reduce(torch.full((), int(flag), device=self.device), "max"))

    def all_equal(self, number: Tensor) -> Bool[Tensor, ""]:
        """Return whether all ranks pass the same scalar, on its device and without waiting for it.

        With several ranks NaN and infinity equal nothing. A single process always gets `True`, on the CPU.
        """
        if self.size == 1:
            return torch.ones((), dtype=torch.bool, device="cpu")
        ends = torch.stack([number, -number]).detach().nan_to_num(math.inf, math.inf, math.inf)
        self.all_reduce(ends, "max")
        return ends[0] == -ends[1]

    def partition(self, num_rows: int) -> RowPartition:
        """Return the `RowPartition` of `num_rows` over these ranks; raise a `SizeError` if a rank gets no row."""
        return RowPartition(num_rows, self.rank, self.size, self.levels)

    def require_equal(self, facts: Mapping[str, Any]) -> None:
        """Check that all ranks pass equal values, which are named for the message and sent as JSON."""
        message = differences(dict(zip(self.global_ranks, self.all_gather_object(dict(facts)), strict=True)))
        if message:
            raise PeerError(message)

    @contextmanager
    def all_or_none(self) -> Iterator[dict[str, Any]]:
        """Run the block on all ranks; if it fails on one of them, raise an error on all.

        The block must call no collective operation. It may write values to the dictionary that it gets, JSON by name;
        these must be equal on all ranks.
        """
        facts: dict[str, Any] = {}
        try:
            yield facts
        except BaseException as error:
            self.all_gather_object({"error": f"{error}" or type(error).__name__})
            raise
        reports = dict(zip(self.global_ranks, self.all_gather_object({"facts": facts}), strict=True))
        for rank, report in reports.items():
            if "error" in report:
                raise PeerError(f"Rank {rank} refused, so nothing was changed on any: {report['error']}")
        if found := differences({rank: report["facts"] for rank, report in reports.items()}):
            raise PeerError(f"{found} Nothing was changed.")


SINGLE_PROCESS = Collectives(is_single=True)


class _AllToAll(torch.autograd.Function):
    """Autograd function of `Collectives.all_to_all`; `backward` sends the gradient of each row back to its sender."""

    @staticmethod
    def forward(rows: Tensor, send_counts: list[int], receive_counts: list[int], group: Collectives) -> Tensor:
        return group.exchange_rows(rows, send_counts, receive_counts)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.send_counts, ctx.receive_counts, ctx.group = inputs

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.group.all_to_all(grad_output, ctx.receive_counts, ctx.send_counts), None, None, None


@contextmanager
def peer_errors(rank: int, size: int, timeout_seconds: float | None = None) -> Iterator[None]:
    """Convert an error of torch.distributed that the block raises to a `PeerError`, whose message says what to do."""
    try:
        yield
    except RuntimeError as error:  # gloo raises plain ones, so the block must contain nothing else that does
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
            raise
        waited = "" if timeout_seconds is None else f" for more than {timeout_seconds:g} seconds"
        raise PeerError(
            f"Rank {rank} of {size} gave up: another process has ended, or hangs{waited}. The first error of another "
            f"rank says why; --resume continues a run from its last checkpoint. (torch.distributed: {error})"
        ) from error


def differences(facts_by_rank: Mapping[int, Mapping[str, Any]]) -> str:
    """Describe how the values of the ranks differ from the first rank; return "" if all are equal."""
    first, *others = facts_by_rank
    expected = facts_by_rank[first]
    sentences = []
    for rank in others:
        facts = facts_by_rank[rank]
        names = [name for name in {**expected, **facts} if expected.get(name) != facts.get(name)]
        parts = [
            f"{name}: {shortened(facts.get(name))} there, {shortened(expected.get(name))} on rank {first}"
            for name in names
        ]
        sentences += [f"Rank {rank} differs from rank {first} in {'; '.join(parts)}."] if parts else []
    return " ".join([*sentences, "Give all the same."]) if sentences else ""
