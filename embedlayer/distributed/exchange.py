"""Rows from each process to each other one, with their gradients on the way back.

Everything a sharded table sends goes through `exchange`: IDs to the owners of their rows, rows back, scores of foreign
tokens home. Sums over processes are taken in the order of their ranks, so a run gives the same result every time.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor


def exchange(
    rows: Shaped[Tensor, "N *each"], sends: Sequence[int], receives: Sequence[int], group: dist.ProcessGroup | None
) -> Shaped[Tensor, "M *each"]:
    """Send the first `sends[0]` rows to rank 0, the next `sends[1]` to rank 1, ...; returns what came, by rank.

    Differentiable in `rows`. Every process of the group must call it, and call backward through it, in the same order.

    Args:
        rows: What is sent.
        sends: Rows for each rank.
        receives: Rows from each rank, as `announce` gives them.
        group: The processes, `None` for all.
    """
    received: Tensor = _Exchange.apply(rows, list(sends), list(receives), group)  # type: ignore[no-untyped-call]
    return received


def announce(sends: Sequence[int], group: dist.ProcessGroup | None, device: torch.device | str) -> list[int]:
    """How many rows each rank is about to send here; `device` is that of the rows, so that they go the same way."""
    counts = torch.tensor(sends, dtype=torch.int64, device=device)
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    numbers: list[int] = received.tolist()
    return numbers


def gather_rows(
    rows: Shaped[Tensor, "N *each"], group: dist.ProcessGroup | None
) -> tuple[Shaped[Tensor, "M *each"], list[int]]:
    """The rows of all ranks, in order, and how many each has; the gradient of a row is the sum over the ranks."""
    size = dist.get_world_size(group)
    counts = announce([len(rows)] * size, group, rows.device)
    gathered: Tensor = _Gather.apply(rows, counts, group)  # type: ignore[no-untyped-call]
    return gathered, counts


def swapped(rows: Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """`exchange`, without gradients."""
    received = rows.new_empty((sum(receives), *rows.shape[1:]))
    dist.all_to_all_single(received, rows.contiguous(), receives, sends, group=group)
    return received


def to_all(rows: Tensor, counts: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """The rows of all ranks, of which rank r has `counts[r]`, without gradients."""
    size = len(counts)
    return swapped(rows.expand(size, *rows.shape).flatten(0, 1), [len(rows)] * size, counts, group)


def summed_home(chunk: Tensor, counts: list[int], own: int, group: dist.ProcessGroup | None) -> Tensor:
    """The way back: of what each rank has made for the rows of all, the sum for this one's, which are `own`."""
    parts = swapped(chunk, counts, [own] * len(counts), group)
    return parts.view(len(counts), own, *chunk.shape[1:]).sum(0)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(rows: Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup | None) -> Tensor:
        return swapped(rows, sends, receives, group)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.sends, ctx.receives, ctx.group = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return swapped(grad, ctx.receives, ctx.sends, ctx.group), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(rows: Tensor, counts: list[int], group: dist.ProcessGroup | None) -> Tensor:
        return to_all(rows, counts, group)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        rows, ctx.counts, ctx.group = inputs
        ctx.own = len(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return summed_home(grad, ctx.counts, ctx.own, ctx.group), None, None
