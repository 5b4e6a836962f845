"""Check that all columns of a table belong to the same rows: which rows are similar does not depend on the columns.

The columns are cut into blocks. Let `G` be the cosines of a sample of rows in one block, without the diagonal and less
their mean. In a trained table the correlation of `G` of two blocks is far above 0, because related tokens are similar
in both. If the rows of one block were shifted by `k`, the correlation is near 0, and that with the rows `ID + k` is
high. No tokenizer is needed.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from embedlayer.analysis.row_reader import RowReader, drawn_ids

BLOCKS, FEWEST_BLOCKS, NARROWEST = 8, 4, 16  # number of blocks, and least number of columns of one
SHIFTS = 3  # largest number of rows by which a block may be shifted to be found
SAMPLED, FEWEST = 1024, 128

CHANCE = 8.0
"""A correlation is above chance from this multiple of 1 / (number of sampled rows) on: 8 standard deviations."""

LEAST = 0.3
"""Two blocks belong to different rows if their correlation is below this share of the usual one."""

TWICE = 2.0  # or if it is more than so many times larger at another ID
MOST_PAIRS = 0.2  # largest share of the pairs of blocks that may seem to belong to different rows


@dataclass(frozen=True)
class ColumnBlocks:
    """Whether the columns of a table belong to the same rows.

    Attributes:
        correlation: Median correlation of the cosines of rows in two blocks of columns; 0 by chance.
        apart: Share of the pairs of blocks that seem to belong to different rows.
        start: First column that belongs to other rows than most columns; these columns reach to `stop - 1`, in steps of
            a block.
        stop: See `start`; both are 0 if there are none.
        shift: The columns hold the numbers of the row `ID + shift`; 0 if no shift up to `SHIFTS` fits.
        shifted_correlation: Median correlation of these columns with the others at that shift.
    """

    correlation: float
    apart: float
    start: int = 0
    stop: int = 0
    shift: int = 0
    shifted_correlation: float = 0.0

    @property
    def is_fault(self) -> bool:
        """Return whether some columns belong to other rows."""
        return self.apart > MOST_PAIRS

    def sentence(self) -> str:
        """Return what is wrong, with its evidence."""
        columns = f"About columns {self.start:,} to {self.stop - 1:,} belong to other rows than the other columns"
        measured = f"the same rows are similar in both with a correlation of {self.correlation:.2f}"
        if not self.shift:
            return f"{columns}: {measured} (by chance 0.00)."
        there = f"ID {'+' if self.shift > 0 else '-'} {abs(self.shift)}"
        return (
            f"{columns}: they hold the numbers of {there}. Which rows are similar agrees with a correlation of "
            f"{self.correlation:.2f} at the same ID, and of {self.shifted_correlation:.2f} at {there}."
        )


@torch.no_grad()
def column_blocks(rows: RowReader, usable: Bool[Tensor, " V"]) -> ColumnBlocks | None:
    """Compare which rows are similar in different blocks of columns.

    `usable` are the rows that were trained. The result is `None` for a table with too few rows or columns, or whose
    blocks agree no more than by chance.
    """
    count = min(BLOCKS, rows.embed_dim // NARROWEST)
    whole = usable.clone()
    for shift in range(1, SHIFTS + 1):  # the neighbours of a row are compared, too
        whole[shift:] &= usable[:-shift]
        whole[:-shift] &= usable[shift:]
    whole[:SHIFTS] = whole[len(whole) - SHIFTS :] = False
    ids = drawn_ids(whole, SAMPLED)
    if count < FEWEST_BLOCKS or len(ids) < FEWEST:
        return None
    shifts = list(range(-SHIFTS, SHIFTS + 1))
    own = _similarities(rows, ids, count)
    by_shift = torch.stack([own @ _similarities(rows, ids + shift, count).T for shift in shifts])
    same = by_shift[SHIFTS]
    other = torch.cat([by_shift[:SHIFTS], by_shift[SHIFTS + 1 :]]).amax(0)
    pairs = ~torch.eye(count, dtype=torch.bool)
    chance = CHANCE / len(ids)
    usual = float(torch.maximum(same, other)[pairs].quantile(0.75))
    if usual < chance:
        return None
    are_apart = ((same < LEAST * usual) | (other > TWICE * same + chance / 2)) & pairs
    apart = float(are_apart[pairs].double().mean())
    if apart <= MOST_PAIRS:
        return ColumnBlocks(float(same[pairs].median()), apart)
    odd = torch.nonzero(are_apart.sum(1) > (count - 1) / 2)[:, 0]  # blocks apart from most others
    is_usual = torch.ones(count, dtype=torch.bool).index_fill_(0, odd, False)
    if not len(odd) or 2 * len(odd) > count:  # two halves: block 0 is taken for usual
        is_usual = ~are_apart[int(are_apart.any(1).int().argmax())]
        odd = torch.nonzero(~is_usual)[:, 0]
    reference = int((same * pairs)[:, is_usual].sum(1).where(is_usual, -torch.inf).argmax())
    best = by_shift[:, reference, odd].argmax(0).mode().values
    found = float(by_shift[best, reference, odd].median())
    starts = [*(int(each[0]) for each in torch.arange(rows.embed_dim).tensor_split(count)), rows.embed_dim]
    return ColumnBlocks(
        correlation=float(same[reference, odd].median()),
        apart=apart,
        start=starts[int(odd.min())],
        stop=starts[int(odd.max()) + 1],
        shift=-shifts[int(best)] if found > max(chance, LEAST * usual) else 0,
        shifted_correlation=found,
    )


def _similarities(rows: RowReader, ids: Int[Tensor, " N"], count: int) -> Float[Tensor, "B P"]:
    """Return the cosines of all pairs of rows in each of `count` blocks of columns, centred and of length 1."""
    values = rows.take(ids).float()
    values = values - values.mean(0)
    pairs = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)
    lines = []
    for block in values.tensor_split(count, dim=1):
        units = F.normalize(block, dim=1)
        cosines = (units @ units.T)[pairs]
        lines.append(F.normalize(cosines - cosines.mean(), dim=0))
    return torch.stack(lines)
