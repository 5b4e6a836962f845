"""The rows that a rank holds of a vocabulary: what `linear_cross_entropy` asks the others for, a chunk at a time."""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from embedlayer.distributed.exchange import announce, summed_home, to_all
from embedlayer.losses.held_rows import HeldRows


class DividedRows(HeldRows):
    """Rows `start` to `stop - 1` of a vocabulary, on `device`, the others being with the other ranks of `group`.

    Of a chunk of tokens each rank gets the hidden states of all, a few hundred at a time, and makes the logits of its
    own rows. What is summed over the ranks is three numbers for each token: maximum, sum of exponentials, and the
    target's logit (with `label_smoothing` a fourth). Gradients of the hidden states are summed by their owner, in the
    order of the ranks.
    """

    def __init__(self, start: int, stop: int, group: dist.ProcessGroup, device: torch.device | str) -> None:
        self.start, self.stop, self.group, self.device = start, stop, group, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def counts(self, tokens: int, wanted: bool) -> tuple[list[int], bool]:
        """As each rank announces."""
        announced = announce([2 * tokens + wanted] * self.size, self.group, self.device)
        return [number // 2 for number in announced], any(number % 2 for number in announced)

    def gather(self, part: Tensor, sizes: list[int]) -> Tensor:
        """The parts of all ranks."""
        return to_all(part, sizes, self.group)

    def own(self, chunk: Tensor, sizes: list[int]) -> Tensor:
        """The part that this rank gave."""
        part: Tensor = chunk.split(sizes)[self.rank]
        return part

    def home(self, chunk: Tensor, sizes: list[int]) -> Tensor:
        """The sum of what all ranks have made for this one's part."""
        return summed_home(chunk, sizes, sizes[self.rank], self.group)

    def highest(self, numbers: Tensor) -> Tensor:
        """By one all-reduce."""
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.group)
        return numbers

    def total(self, *numbers: Tensor) -> tuple[Tensor, ...]:
        """By one all-reduce."""
        sums = torch.stack(numbers)
        dist.all_reduce(sums, group=self.group)
        return sums.unbind()

    def places(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Counted from the first row here; 0 for tokens that are elsewhere."""
        here = (tokens >= self.start) & (tokens < self.stop)
        return torch.where(here, tokens - self.start, 0), here

    def same(self, number: Tensor) -> bool:
        """By one all-reduce of the number and its opposite; NaN is like no other number, on no rank."""
        ends = torch.stack([number, -number]).detach().nan_to_num(math.inf, math.inf, -math.inf)
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=self.group)
        return bool(ends[0] == -ends[1])
