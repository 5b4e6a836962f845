"""Stochastic rounding of float32 numbers to bfloat16, whose error is zero on average."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.core.errors import SizeError
from embedlayer.core.numbers import GOLDEN, mix_, signed

LOW_32 = (1 << 32) - 1
ROW_FACTOR = signed(0xD1B54A32D192ED03)
COLUMN_FACTOR, FIRST_32, SECOND_32 = 0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35


@dataclass(frozen=True)
class StochasticRounding:
    r"""Round each value of a bfloat16 row up or down at random, so that the mean of the result is the value.

    A float32 number x between two neighbouring bfloat16 numbers $a < b$ becomes

    $$ b \text{ with probability } (x - a) / (b - a), \qquad a \text{ otherwise.} $$

    Rounding to the nearest number discards every update below half of $b - a$, which is up to 1/256 of the value. With
    stochastic rounding such updates add up. bfloat16 numbers themselves are unchanged.

    The random bits of a row are a hash of the seed, the number of the optimizer step, the row and the column. They do
    not depend on the order in which rows are written. A resumed run continues with the same bits: a seed that is stored
    with a loaded optimizer state, or with a resumed mapped table, replaces the seed of this object.

    Args:
        seed: Seed of the hash of a new run, from 0 to 2^62 - 1. By default it is drawn from torch's random generator.

    Raises:
        SizeError: The seed is outside its range.

    Example:
        >>> table = RowSparseEmbedding(100, 8, dtype=torch.bfloat16)
        >>> optimizer = RowAdamW(table.parameters(), rounding=StochasticRounding(seed=1))

    Reference: Zamirai et al., Revisiting BFloat16 Training, 2020, https://arxiv.org/abs/2010.06192. The hash consists
    of the finalisers of SplitMix64 (Steele et al., 2014) for the row and of MurmurHash3 for the column.
    """

    seed: int = field(default_factory=lambda: int(torch.randint(1 << 62, ())))

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 1 << 62:
            raise SizeError(f"seed must be from 0 to 2^62 - 1, not {self.seed}.")


def round_rows(values: Float[Tensor, "U D"], rows: Int[Tensor, " U"], *, seed: int, step: int) -> Float[Tensor, "U D"]:
    """Return rows rounded to bfloat16 by `StochasticRounding`. NaN stays NaN."""
    keys = mix_(rows.long() * ROW_FACTOR + signed(seed + step * GOLDEN)) & LOW_32 | 1  # odd numbers below 2^32
    columns = torch.arange(values.shape[1], device=values.device)
    h = keys.unsqueeze(1) + columns * COLUMN_FACTOR & LOW_32
    h = (h ^ h >> 16) * FIRST_32 & LOW_32
    h = (h ^ h >> 13) * SECOND_32 & LOW_32
    bits = values.contiguous().view(torch.int32) + (h >> 16).int()
    rounded = (bits & -0x10000).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)
