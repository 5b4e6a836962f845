"""Initialization of weights: numbers drawn from N(0, std^2)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from embedlayer.core.partitioned import is_sharded, zero_sharded_rows_

NUMBERS_AT_ONCE = 1 << 19


def init_normal_(weight: Tensor, *, std: float) -> None:
    """Fill a weight in place with numbers from N(0, std^2); without effect on the meta device."""
    if not weight.is_meta:  # there torch would import its compiler
        nn.init.normal_(weight, std=std)


@torch.no_grad()
def zero_rows_(weight: Tensor, rows: Sequence[int]) -> None:
    """Set rows of a weight `(V, D)` to zero in place; without effect on the meta device."""
    if not rows or weight.is_meta:
        return
    if is_sharded(weight):  # there `index_fill_` would change a gathered copy only
        zero_sharded_rows_(weight, rows)
    else:
        weight.index_fill_(0, torch.tensor(rows, device=weight.device), 0)


class NormalLinear(nn.Linear):
    """An `nn.Linear` that initializes its weight from N(0, init_std^2) and its bias with 0."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        init_std: float,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.init_std = init_std
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Fill the weight with numbers from N(0, init_std^2), and the bias, if any, with 0."""
        init_normal_(self.weight, std=self.init_std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


def init_normal_rows_(part: Tensor, *, start: int, num_rows: int, std: float) -> None:
    """Fill `part` `(N, D)` in place with rows `start` to `start + N - 1` of a table from N(0, std^2)."""
    width = part.shape[1]
    each = max(NUMBERS_AT_ONCE // width // 16, 1) * 16  # torch makes 16 normal numbers at a time
    scratch = part.new_empty(min(2 * each, num_rows), width)
    for first in range(0, max(num_rows - each, 0) + 1, each):
        last = num_rows if first + 2 * each > num_rows else first + each  # no small rest: torch draws that otherwise
        block = scratch[: last - first].normal_(std=std)
        low, high = max(first, start), min(last, start + len(part))
        if low < high:
            part[low - start : high - start] = block[low - first : high - first]
