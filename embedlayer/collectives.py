"""Collective operations over one process or many, by the names of `torch.distributed`, and the rows that a rank stores.

Code that runs on one process and on many takes a `Collectives`: `SINGLE_PROCESS` by default, or a `ProcessGroup`. With
one process each operation returns its input, so the same code serves both.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from embedlayer.errors import PeerError, SizeError

ReduceOp = Literal["sum", "max", "min"]


@dataclass(frozen=True)
class RowPartition:
    """Contiguous rows of a tensor per rank: rank `r` stores rows `r * ceil(V / N)` to `(r + 1) * ceil(V / N) - 1`.

    The last rank stores what is left, which is one row at least.

    Args:
        num_rows: Rows of all ranks together, V.
        rank: This process, from 0.
        size: Number of ranks, N.

    Raises:
        SizeError: A rank would store no row.

    Example:
        >>> part = RowPartition(10, rank=2, size=3)
        >>> (part.start, part.stop, part.rank_of(torch.tensor([0, 4, 9])).tolist())
        (8, 10, [0, 1, 2])
    """

    num_rows: int
    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if self.size > 1 and (self.size - 1) * self.rows_per_rank >= self.num_rows:
            raise SizeError(
                f"{self.num_rows} rows in blocks of {self.rows_per_rank} leave no row for the last of {self.size} "
                f"ranks: use fewer ranks."
            )

    @property
    def rows_per_rank(self) -> int:
        """Return the number of rows on every rank but the last, `ceil(V / N)`."""
        return math.ceil(self.num_rows / self.size)

    @property
    def start(self) -> int:
        """Return the first row of this rank."""
        return self.rank * self.rows_per_rank

    @property
    def stop(self) -> int:
        """Return the row after the last one of this rank."""
        return min(self.start + self.rows_per_rank, self.num_rows)

    def __len__(self) -> int:
        """Return the number of rows of this rank."""
        return self.stop - self.start

    def slice_of(self, rank: int) -> slice:
        """Return the rows of a rank as a slice of all rows."""
        return slice(rank * self.rows_per_rank, min((rank + 1) * self.rows_per_rank, self.num_rows))

    def rank_of(self, rows: Int[Tensor, "*batch"]) -> Int[Tensor, "*batch"]:
        """Return the rank that stores each row."""
        return rows // self.rows_per_rank

    def local(self, rows: Int[Tensor, "*batch"]) -> tuple[Int[Tensor, "*batch"], Bool[Tensor, "*batch"]]:
        """Convert global row numbers to row numbers on this rank.

        Returns:
            The local row numbers, 0 for the rows of other ranks, and a mask of the rows that this rank stores.
        """
        is_local = (rows >= self.start) & (rows < self.stop)
        return torch.where(is_local, rows - self.start, 0), is_local

    def local_or_none(self, row: int | None) -> int | None:
        """Return the local number of one row, or `None` if another rank stores it or `row` is `None`."""
        return None if row is None or not self.start <= row < self.stop else row - self.start

    def overlap(self, start: int, stop: int) -> tuple[int, int]:
        """Return the local range of the rows `start` to `stop - 1` that this rank stores, which may be empty."""
        low = min(max(start, self.start), self.stop)
        return low - self.start, max(low, min(stop, self.stop)) - self.start


class Collectives(ABC):
    """Abstract: collective operations of the ranks that compute together; every rank must call each one.

    Attributes:
        rank: This process, from 0.
        size: Number of ranks.
        device: Device of counts and JSON objects. The other tensors must be on a device that the group accepts.
    """

    rank: int
    size: int
    device: torch.device

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Reduce `tensor` over all ranks in place, and return it."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Return the contiguous `tensor` of rank `src`, written in place on the other ranks."""

    @abstractmethod
    def all_to_all(
        self, rows: Shaped[Tensor, "N *each"], send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Shaped[Tensor, "M *each"]:
        """Send consecutive rows to the ranks, and return the rows received from them, in the order of the ranks.

        Differentiable: the gradients of the rows are sent back. All ranks must call `backward` in the same order.

        Args:
            rows: The rows for rank 0, then for rank 1, and so on.
            send_counts: Number of rows for each rank.
            receive_counts: Number of rows from each rank, as `exchange_counts` returns them.
        """

    @abstractmethod
    def all_gather(
        self, rows: Shaped[Tensor, "N *each"], counts: Sequence[int] | None = None
    ) -> Shaped[Tensor, "M *each"]:
        """Concatenate the rows of all ranks, in the order of the ranks.

        Differentiable: the gradient of a row is the sum over all ranks.

        Args:
            rows: The rows of this rank.
            counts: Number of rows of each rank; `None` gathers these numbers first.
        """

    @abstractmethod
    def reduce_scatter(self, rows: Shaped[Tensor, "M *each"], counts: Sequence[int]) -> Shaped[Tensor, "N *each"]:
        """Sum a per-rank partial result over all ranks, in their order, and keep the slice of this rank.

        Args:
            rows: Partial results for the rows of all ranks.
            counts: Number of rows of each rank.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank has called this."""

    @abstractmethod
    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the `value` of every rank. Values are sent as JSON, never as a pickle."""

    @abstractmethod
    def peer_errors(self) -> AbstractContextManager[None]:
        """Return a context manager that raises an error of torch.distributed in its block as a `PeerError`."""

    @property
    def is_first(self) -> bool:
        """Return whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    @property
    def global_ranks(self) -> list[int]:
        """Return the rank of each process in the default group, for messages."""
        return list(range(self.size))

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """Return the `value` of rank `src`, sent as JSON."""
        return self.all_gather_object(value if self.rank == src else None)[src]

    def exchange_counts(self, send_counts: Sequence[int]) -> list[int]:
        """All-to-all of one integer per rank: return how many rows each rank is about to send to this one."""
        counts = torch.tensor(list(send_counts), dtype=torch.int64, device=self.device)
        numbers: list[int] = self.all_to_all(counts, [1] * self.size, [1] * self.size).tolist()
        return numbers

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is true on any rank."""
        return bool(self.all_reduce(torch.tensor(int(flag), device=self.device), "max"))

    def all_equal(self, number: Tensor) -> bool:
        """Return whether a scalar is the same on all ranks; NaN equals nothing. One process answers `True`."""
        if self.size == 1:
            return True
        ends = torch.stack([number, -number]).detach().nan_to_num(math.inf, math.inf, -math.inf)
        self.all_reduce(ends, "max")
        return bool(ends[0] == -ends[1])

    def partition(self, num_rows: int) -> RowPartition:
        """Return the `RowPartition` of `num_rows` over these ranks.

        Raises:
            SizeError: A rank would store no row.
        """
        return RowPartition(num_rows, self.rank, self.size)

    def require_equal(self, facts: Mapping[str, Any]) -> None:
        """Check that all ranks pass the same facts.

        Args:
            facts: JSON values by name.

        Raises:
            PeerError: On every rank, naming each rank that differs from the first, with both values.
        """
        found = differences(dict(zip(self.global_ranks, self.all_gather_object(dict(facts)), strict=True)))
        if found:
            raise PeerError(found)

    @contextmanager
    def all_or_none(self) -> Iterator[dict[str, Any]]:
        """Run the block on all ranks, then raise on all of them if it failed or differs on one.

        The block must call no collective operation. It may add facts, JSON by name, to the yielded dictionary; they
        must be the same on all ranks.

        Raises:
            PeerError: The block raised an error on another rank, or the facts differ.
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


class SingleProcess(Collectives):
    """Single-process version: each operation returns its input, and nothing is sent."""

    rank, size, device = 0, 1, torch.device("cpu")

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Single-process version: return `tensor` unchanged."""
        return tensor

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Single-process version: return `tensor` unchanged."""
        return tensor

    def all_to_all(
        self, rows: Shaped[Tensor, "N *each"], send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Shaped[Tensor, "M *each"]:
        """Single-process version: return `rows` unchanged."""
        return rows

    def all_gather(
        self, rows: Shaped[Tensor, "N *each"], counts: Sequence[int] | None = None
    ) -> Shaped[Tensor, "M *each"]:
        """Single-process version: return `rows` unchanged."""
        return rows

    def reduce_scatter(self, rows: Shaped[Tensor, "M *each"], counts: Sequence[int]) -> Shaped[Tensor, "N *each"]:
        """Single-process version: return `rows` unchanged."""
        return rows

    def barrier(self) -> None:
        """Single-process version: return at once."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """Single-process version: return `[value]`."""
        return [value]

    @contextmanager
    def peer_errors(self) -> Iterator[None]:
        """Single-process version: run the block."""
        yield


SINGLE_PROCESS = SingleProcess()


class ProcessGroup(Collectives):
    """The ranks of a `torch.distributed` process group. Sums are taken in the order of the ranks where rows are sent.

    Args:
        group: The group; `None` is the default group, which must be initialised.
        device: Device of counts and JSON objects, one that the group's backend accepts.
        timeout_seconds: Time-out of the group, for messages; `None` if it is not known.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        *,
        timeout_seconds: float | None = None,
    ) -> None:
        self.group, self.device, self.timeout_seconds = group, torch.device(device), timeout_seconds
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    @property
    def global_ranks(self) -> list[int]:
        """Return the rank of each process of the group in the default group."""
        return dist.get_process_group_ranks(self.group)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Reduce `tensor` over all ranks in place, and return it."""
        with self.peer_errors():
            dist.all_reduce(tensor, getattr(dist.ReduceOp, op.upper()), group=self.group)
        return tensor

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Return the contiguous `tensor` of rank `src`, written in place on the other ranks."""
        with self.peer_errors():
            dist.broadcast(tensor, group_src=src, group=self.group)
        return tensor

    def all_to_all(
        self, rows: Shaped[Tensor, "N *each"], send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Shaped[Tensor, "M *each"]:
        """Send consecutive rows to the ranks, and return the rows received from them, in the order of the ranks."""
        received: Tensor = _AllToAll.apply(rows, list(send_counts), list(receive_counts), self)  # type: ignore[no-untyped-call]
        return received

    def all_gather(
        self, rows: Shaped[Tensor, "N *each"], counts: Sequence[int] | None = None
    ) -> Shaped[Tensor, "M *each"]:
        """Concatenate the rows of all ranks, in the order of the ranks."""
        known = self.exchange_counts([len(rows)] * self.size) if counts is None else list(counts)
        gathered: Tensor = _AllGather.apply(rows, known, self)  # type: ignore[no-untyped-call]
        return gathered

    def reduce_scatter(self, rows: Shaped[Tensor, "M *each"], counts: Sequence[int]) -> Shaped[Tensor, "N *each"]:
        """Sum a per-rank partial result over all ranks, in their order, and keep the slice of this rank."""
        own = counts[self.rank]
        parts = self._sent(rows, counts, [own] * self.size)
        return parts.view(self.size, own, *rows.shape[1:]).sum(0)

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.all_reduce(torch.zeros(1, device=self.device))

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the `value` of every rank, sent as JSON."""
        content = torch.frombuffer(bytearray(json.dumps(value, default=str).encode()), dtype=torch.uint8)
        counts = self.exchange_counts([len(content)] * self.size)
        contents = self.all_gather(content.to(self.device), counts).cpu().split(counts)
        return [json.loads(bytes(each.tolist())) for each in contents]

    @contextmanager
    def peer_errors(self) -> Iterator[None]:
        """Raise an error of torch.distributed in the block as a `PeerError`.

        gloo raises plain `RuntimeError`s, so the block must contain nothing else that raises one.
        """
        try:
            yield
        except RuntimeError as error:
            if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
                raise
            waited = "" if self.timeout_seconds is None else f" for more than {self.timeout_seconds:g} seconds"
            raise PeerError(
                f"Rank {self.rank} of {self.size} gave up: another process has ended, or hangs{waited}. The first "
                f"error of another rank says why. A run continues from its last checkpoint with --resume, or by itself "
                f"where torchrun has --max-restarts left. (torch.distributed: {error})"
            ) from error

    def _sent(self, rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        """All-to-all without gradients."""
        received = rows.new_empty((sum(receive_counts), *rows.shape[1:]))
        with self.peer_errors():
            dist.all_to_all_single(
                received, rows.contiguous(), list(receive_counts), list(send_counts), group=self.group
            )
        return received


class _AllToAll(torch.autograd.Function):
    """`ProcessGroup.all_to_all`; the gradients are sent back."""

    @staticmethod
    def forward(rows: Tensor, send_counts: list[int], receive_counts: list[int], group: ProcessGroup) -> Tensor:
        return group._sent(rows, send_counts, receive_counts)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.send_counts, ctx.receive_counts, ctx.group = inputs

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.group._sent(grad_output, ctx.receive_counts, ctx.send_counts), None, None, None


class _AllGather(torch.autograd.Function):
    """`ProcessGroup.all_gather`; its gradient is `reduce_scatter`."""

    @staticmethod
    def forward(rows: Tensor, counts: list[int], group: ProcessGroup) -> Tensor:
        repeated = rows.expand(group.size, *rows.shape).flatten(0, 1)
        return group._sent(repeated, [len(rows)] * group.size, counts)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.counts, ctx.group = inputs

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.group.reduce_scatter(grad_output, ctx.counts), None, None


def differences(facts_by_rank: Mapping[int, Mapping[str, Any]]) -> str:
    """Describe how the facts of the ranks differ from those of the first rank; return "" if they are all equal.

    Example:
        >>> differences({0: {"--dim": 64}, 1: {"--dim": 64}, 2: {"--dim": 32}})
        'Rank 2 differs from rank 0 in --dim: 32 there, 64 on rank 0. Give all the same.'
    """
    first, *others = facts_by_rank
    expected = facts_by_rank[first]
    found = []
    for rank in others:
        facts = facts_by_rank[rank]
        names = [name for name in {**expected, **facts} if expected.get(name) != facts.get(name)]
        parts = [
            f"{name}: {_shortened(facts.get(name))} there, {_shortened(expected.get(name))} on rank {first}"
            for name in names
        ]
        found += [f"Rank {rank} differs from rank {first} in {'; '.join(parts)}."] if parts else []
    return " ".join([*found, "Give all the same."]) if found else ""


def _shortened(value: Any) -> str:
    """Return the text of a value, cut to 60 characters."""
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
