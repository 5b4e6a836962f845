"""What weights begin with: numbers from N(0, std^2)."""

from torch import Tensor, nn

NUMBERS_AT_ONCE = 1 << 19


def draw_(weight: Tensor, *, std: float) -> None:
    """Fill a weight; on the meta device, where there is nothing to fill, do nothing.

    torch would import its compiler to draw nothing there, which takes longer than to read most tables.
    """
    if not weight.is_meta:
        nn.init.normal_(weight, std=std)


def draw_rows_(part: Tensor, *, start: int, num_rows: int, std: float) -> None:
    """Fill `part` with rows `start...` of what `normal_(std=std)` makes of `num_rows` rows, given the same generator.

    The numbers of the other rows are drawn too, a block at a time, and dropped: the generator ends at the same place.
    On the CPU, in float32 and float64, they are the same to the bit.
    """
    width = part.shape[1]
    each = max(NUMBERS_AT_ONCE // width // 16, 1) * 16  # torch makes 16 normal numbers at a time
    scratch = part.new_empty(min(2 * each, num_rows), width)
    for first in range(0, max(num_rows - each, 0) + 1, each):
        last = num_rows if first + 2 * each > num_rows else first + each  # no small rest: torch draws that otherwise
        block = scratch[: last - first].normal_(std=std)
        low, high = max(first, start), min(last, start + len(part))
        if low < high:
            part[low - start : high - start] = block[low - first : high - first]
