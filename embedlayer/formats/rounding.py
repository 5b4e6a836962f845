"""Choose the levels of quantised groups, and the codes of their numbers, so that the error is small."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from embedlayer.core.errors import SizeError

SHRINKS = tuple(1 - 0.05 * step for step in range(9))
"""Shares of a group's range that are tried as the range of its levels."""

REFITS = 5
"""Rounds of rounding and least squares, for each range and again for the best one: the start decides what is found."""

COLUMNS = 32
"""Columns whose codes `CovarianceRounding` chooses before it updates the error of all others."""


class Levels(NamedTuple):
    """The levels of N groups, which are the numbers `step * code + offset` that the codes of a group stand for."""

    step: Tensor
    offset: Tensor
    bits: int
    header: torch.dtype
    symmetric: bool
    lowest: int

    @property
    def centre(self) -> int:
        """Return the code in the middle, that of zero if the levels are symmetric."""
        return 1 << (self.bits - 1)

    def codes(self, x: Tensor) -> Tensor:
        """Return for each number the code of the nearest level of its group, as floats, `(N, group_size)`."""
        divisor = self.step.where(self.step != 0, torch.inf)  # code 0 where all levels are equal
        codes = (x - self.offset).div_(divisor).round_().clamp_(self.lowest, 2**self.bits - 1)
        return codes.masked_fill_(self.step == 0, self.centre) if self.symmetric else codes

    def error(self, x: Tensor) -> Tensor:
        """Return for each group the sum of squared differences of its numbers and their nearest levels, `(N, 1)`."""
        return torch.addcmul(self.offset, self.codes(x), self.step).sub_(x).square_().sum(dim=1, keepdim=True)

    def where(self, chosen: Tensor, other: "Levels") -> "Levels":
        """Return the levels of these groups where `chosen`, `(N, 1)`, is true, and those of `other` elsewhere."""
        step, offset = self.step.where(chosen, other.step), self.offset.where(chosen, other.offset)
        return self._replace(step=step, offset=offset)

    def rounded(self) -> "Levels":
        """Return the levels with steps and offsets rounded to the dtype in which they are stored, as float32."""
        step, offset = (part.to(self.header).to(torch.float32) for part in (self.step, self.offset))
        return self._replace(step=step, offset=-self.centre * step if self.symmetric else offset)

    def refitted(self, x: Tensor, mean: Tensor | float, centred: Tensor) -> "Levels":
        """Return the levels with the steps and offsets of least squared error for the present codes."""
        codes = self.codes(x)
        middle = self.centre if self.symmetric else codes.mean(1, keepdim=True)
        codes -= middle
        step = (codes * centred).sum(1, keepdim=True) / codes.square_().sum(1, keepdim=True)
        return self._replace(step=step, offset=mean - step * middle).where((step != 0) & step.isfinite(), self)


def fit_levels(
    x: Float[Tensor, "N group_size"], bits: int, header: torch.dtype, *, symmetric: bool, signed: bool, clip: bool
) -> Levels:
    """Return levels for each group of numbers that keep the squared error of quantisation small."""
    # `signed` levels use code 0 too, so one side of zero has a level more: the sign of the step chooses the side.
    if symmetric:
        whole = x.abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)
        centre = torch.zeros_like(whole)
        if signed:  # the level that one side has more is on the side of the largest number
            whole = whole.where(x.amin(dim=1, keepdim=True).abs() >= x.amax(dim=1, keepdim=True), -whole)
    else:
        low, high = x.amin(dim=1, keepdim=True), x.amax(dim=1, keepdim=True)
        whole = high / (2**bits - 1) - low / (2**bits - 1)  # high - low may overflow
        centre = low / 2 + high / 2
    below_centre = 2 ** (bits - 1) if symmetric else (2**bits - 1) / 2
    lowest = 1 if symmetric and not signed else 0

    def shrunk(factor: float) -> Levels:
        """Return levels that cover `factor` times the range of each group, around the same centre."""
        return Levels(factor * whole, centre - factor * whole * below_centre, bits, header, symmetric, lowest)

    unclipped = shrunk(1.0).rounded()
    if not clip:
        return unclipped
    mean = 0.0 if symmetric else x.mean(1, keepdim=True)
    centred = x - mean
    best, widest = unclipped, unclipped.error(x)
    least = widest
    for factor in SHRINKS:
        levels = shrunk(factor)
        for _ in range(REFITS):
            levels = levels.refitted(x, mean, centred)
        error = levels.error(x)
        best, least = levels.where(error < least, best), error.minimum(least)
    for _ in range(REFITS):
        best = best.refitted(x, mean, centred)
    best = best.rounded()
    return best.where(best.error(x) < widest, unclipped)


@dataclass(frozen=True)
class CovarianceRounding:
    r"""Rounding that keeps the nearest neighbours of a table better than rounding to the nearest level does.

    An error e of a row changes its dot products with the rows u of the table by `e . u`. Their variance is `e^T C e`,
    with the covariance C of the rows, each divided by its norm. The same mean of all dot products changes no ranking.
    Codes minimise

    $$ e^\top \left( \frac{C}{c} + \lambda I \right) e, \qquad c = \operatorname{tr} C / D $$

    by coordinate descent: column after column, each code is rounded so that it corrects the error of the codes before
    it. The term of `strength` $\lambda$ limits the squared error itself. Steps and offsets stay as they are.

    Args:
        strength: Weight of the squared error, $\lambda$, above 0. Infinite weight would be rounding to nearest.
        rounds: Passes over the columns.

    Example:
        >>> small = QuantizedEmbedding.from_table(TokenEmbedding(100, 64), bits=4, rounding=CovarianceRounding())

    Reference: Frantar et al., GPTQ (2023), https://arxiv.org/abs/2210.17323, which weights errors by the second moment
    of the inputs of a layer. We take the covariance of the table's own rows, and coordinate descent.
    """

    strength: float = 4.0
    rounds: int = 2

    def __post_init__(self) -> None:
        if not self.strength > 0 or self.rounds < 1:
            raise SizeError(f"strength must be above 0 and rounds at least 1: {self}.")

    def weights(self, moment: Float[Tensor, "D D"], mean: Float[Tensor, " D"]) -> Float[Tensor, "D D"]:
        """Return `C / c + strength * I`, from the second moment and the mean of the normalised rows, in float32."""
        covariance = moment - mean.outer(mean)
        variance = covariance.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny)
        identity = torch.eye(len(mean), dtype=covariance.dtype, device=mean.device)
        return (covariance / variance + self.strength * identity).to(torch.float32)

    def codes(
        self, rows: Float[Tensor, "N D"], codes: Tensor, step: Tensor, offset: Tensor, weights: Tensor, highest: int
    ) -> Float[Tensor, "N D"]:
        """Return better codes for rows whose levels are fixed.

        Args:
            rows: Rows, `(N, D)`.
            codes: Their codes by rounding to nearest, as floats, `(N, D)`.
            step: Step of each number, `(N, D)`. Codes of step 0 stay unchanged.
            offset: Offset of each number, `(N, D)`.
            weights: Result of `weights`, `(D, D)`.
            highest: Largest code.
        """
        # columns first: a column of codes is then contiguous
        codes, step = codes.T.contiguous(), step.T.contiguous()
        error = torch.addcmul(offset.T, codes, step) - rows.T
        divisor = step.where(step != 0, torch.inf) * weights.diagonal().unsqueeze(1)
        slope = weights @ error
        for _ in range(self.rounds):
            for start in range(0, len(codes), COLUMNS):
                block = slice(start, start + COLUMNS)
                before, own = error[block].clone(), slope[block].clone()
                for k in range(len(own)):
                    column = start + k
                    better = (codes[column] - own[k] / divisor[column]).round_().clamp_(0, highest)
                    change = (better - codes[column]) * step[column]
                    own.addcmul_(weights[block, column : column + 1], change)
                    codes[column] = better
                    error[column] += change
                slope.addmm_(weights[:, block], error[block] - before)
        return codes.T


def unit_rows(rows: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
    """Return rows divided by their norms. Zero rows stay zero."""
    largest = rows.abs().amax(dim=1, keepdim=True)  # squares of very small or large numbers would not be finite
    return F.normalize(rows / largest.where(largest > 0, 1.0), dim=1)
