"""What dense AdamW does to a row that gets no gradient, in one go.

Without gradient a row still moves: its momentum dies out and keeps pushing, and weight decay shrinks it. `replay` is
the definition, one missed step after the other. `History.gaps` gives the same sum in a few terms: with `s = sqrt(v)`

    p(t0+k) = p(t0) * kept(t0, t0+k) - m * sum_j w_j / (s + e_j),   j = 1..k
    w_j = lr_i * b1^j / b2^(j/2) * sqrt(bc2_i) / bc1_i * kept(i, t0+k),   e_j = eps * sqrt(bc2_i) / b2^(j/2),   i = t0+j
    kept(i, n) = prod_{i < l <= n} (1 - lr_l * wd_l),   bc1_i = 1 - b1^i,   bc2_i = 1 - b2^i

The weights `w_j` and nodes `e_j` are the same for all rows last touched at `t0`. As a function of `s` the sum is a
Stieltjes transform of a measure on `e_1 .. e_k`, so a Gauss quadrature of a few nodes gives it for every `s >= 0`.
Two nodes follow from the first four moments of that measure, and a step adds one term to the moments of each `t0`
that it still concerns: with the usual betas a gap costs no sum at all when its row is read.

All of it is worked out in NumPy: the arrays are small, and threads would only wait for each other.

Reference: Golub and Meurant, Matrices, Moments and Quadrature, 2010, chapters 3 and 4 (Lanczos and Gauss rules).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.errors import SizeError

NODES = (4, 8, 12, 16)
"""Numbers of Gauss nodes, tried in turn where two miss; where the last one misses, the sum is taken term by term."""

SAMPLES = (0.0, 0.5, 3.0, 20.0, 200.0)
"""Where the quadrature is compared with the sum: values of `s / e_1`. It is exact for `s` to infinity."""

FADED = 1e-14
"""What a missed step weighs beside the first one when it no longer counts."""

STRONG = math.log1p(-0.02)
"""What a step keeps of a row, as a logarithm: under stronger decay no missed step is left out and no sum is kept."""

TINY = 1e-300


class Betas(NamedTuple):
    """What fixes how moments die out: AdamW's `betas` and `eps`."""

    beta1: float
    beta2: float
    eps: float


class Gaps(NamedTuple):
    """`p -> p * kept - m * sum_q weights[q] / (sqrt(v) + nodes[q])`, one column of each for each gap."""

    kept: Float[np.ndarray, " G"]
    nodes: Float[np.ndarray, "Q G"]
    weights: Float[np.ndarray, "Q G"]


def replay(
    row: tuple[Tensor, Tensor, Tensor],
    at: int,
    rates: Sequence[float],
    decays: Sequence[float],
    betas: Betas,
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition: AdamW's update with a zero gradient, once for each missed step.

    Args:
        row: Values, mean and mean square `(p, m, v)` after step `at`.
        at: The step after which they were right.
        rates: Learning rate of each missed step.
        decays: Weight decay of each missed step.
        betas: `beta1`, `beta2` and `eps`.

    Returns:
        `(p, m, v)` after step `at + len(rates)`.
    """
    p, m, v = row
    for t, (lr, decay) in enumerate(zip(rates, decays, strict=True), start=at + 1):
        m, v = betas.beta1 * m, betas.beta2 * v
        mean, square = m / (1 - betas.beta1**t), v / (1 - betas.beta2**t)
        p = p * (1 - lr * decay) - lr * mean / (square.sqrt() + betas.eps)
    return p, m, v


class History:
    """The learning rates and decays of the steps since `start`, as the catch-up needs them.

    Args:
        start: The last step before the first one that is recorded.
        betas: `beta1`, `beta2` and `eps` of all steps recorded.

    Raises:
        SizeError: The moments would not die out, or nothing keeps 0 / 0 out of rows that have no moments.
    """

    def __init__(self, start: int, betas: Betas) -> None:
        check_betas(betas)
        self.start = start
        self.betas = betas
        self.size = 0
        self._lines = np.zeros((3, 64))  # lr * sqrt(bc2) / bc1; eps * sqrt(bc2); log kept since the start
        self._sums = np.zeros((SUMS, 64))  # `sums_of` the terms of each t0, kept(t0, i) in the place of kept(i, n)
        self._fades = True
        self._ratio = ratio = betas.beta1 / math.sqrt(betas.beta2)
        self._reach = max(1, math.ceil(math.log(FADED) / math.log(ratio))) if ratio else 1
        j = np.arange(self._reach, 0, -1)
        self._fading, self._spreading = ratio**j, betas.beta2 ** (-0.5 * j)

    @property
    def step(self) -> int:
        """The last step recorded."""
        return self.start + self.size

    @property
    def lines(self) -> Float[np.ndarray, "3 N"]:
        """What is recorded, a column for each step: all that resuming needs besides `start` and `betas`."""
        return self._lines[:, : self.size].copy()

    def load(self, lines: Float[np.ndarray, "3 N"]) -> None:
        """Put in what `lines` gave."""
        self.size = lines.shape[1]
        self._lines = np.concatenate([lines, np.zeros((3, 64))], axis=1)
        self._sums = np.zeros((SUMS, self.size + 64))
        logs = np.concatenate([[0.0], lines[2]])
        self._fades = bool((logs[1:] - logs[:-1] >= STRONG).all())
        for low in range(0, self.size if self._fades else 0, 1024):
            at = np.arange(low, min(low + 1024, self.size))
            nodes, weights, places = self._pushes(self.start + at, 100 * FADED)
            weights *= np.exp(logs[at][:, None] - logs[places + 1])
            self._sums[:, at] = sums_of(nodes[:, :1], nodes, weights).sum(2)

    def record(self, lr: float, weight_decay: float) -> int:
        """Write down one step; returns its number.

        Raises:
            SizeError: `lr` is negative, or `lr * weight_decay` is not below 1.
        """
        if lr < 0 or not lr * weight_decay < 1:
            raise SizeError(f"lr {lr:g} must be at least 0, and lr * weight_decay {lr * weight_decay:g} below 1.")
        if self.size + 1 == self._lines.shape[1]:  # the sums of rows that are right, all 0, need a column too
            self._lines = np.concatenate([self._lines, np.zeros_like(self._lines)], axis=1)
            self._sums = np.concatenate([self._sums, np.zeros_like(self._sums)], axis=1)
        beta1, beta2, eps = self.betas
        t = self.step + 1
        root = math.sqrt(-math.expm1(t * math.log(beta2)))
        before = self._lines[2, self.size - 1] if self.size else 0.0
        self._lines[:, self.size] = (lr * root / (1 - beta1**t), eps * root, before + math.log1p(-lr * weight_decay))
        self.size += 1
        self._fades &= math.log1p(-lr * weight_decay) >= STRONG
        if self._fades:
            self._add_term()
        return t

    def _add_term(self) -> None:
        """Add the last step's term to the sums of every row last touched before it."""
        now = self.size - 1
        low = max(0, self.size - self._reach)
        recent = slice(low - self.size, None)  # of what fades with the lag
        rate, node, log_kept = self._lines[:, now]
        nodes, weights = node * self._spreading[recent], rate * self._fading[recent]
        if self.decays:
            logs = self._lines[2, max(low - 1, 0) : now]
            weights = weights * np.exp((logs if low else np.concatenate([[0.0], logs])) - log_kept)
        first = self._lines[1, low : self.size] * self._spreading[-1]
        self._sums[:, low : self.size] += sums_of(first, nodes, weights)

    @property
    def decays(self) -> bool:
        """Whether any step decayed."""
        return bool(self.size and self._lines[2, self.size - 1])

    def kept(self, at: Int[np.ndarray, " G"]) -> Float[np.ndarray, " G"]:
        """`kept(at, step)`: what weight decay has left of a row since each of these steps."""
        if not self.decays:
            return np.ones(at.shape)
        logs = self._lines[2]
        since = np.where(at > self.start, logs[np.maximum(at - self.start - 1, 0)], 0.0)
        left: Float[np.ndarray, " G"] = np.exp(logs[self.size - 1] - since)
        return left

    def gaps(self, at: Int[np.ndarray, " G"], *, tolerance: float) -> Gaps:
        """The catch-up of rows that were right after steps `at`, in as few terms as `tolerance` allows.

        Args:
            at: Steps up to `step`; they may repeat.
            tolerance: Largest relative error of the sum, for every `s >= 0`.
        """
        if not self.size:
            return Gaps(np.ones(len(at)), np.ones((1, len(at))), np.zeros((1, len(at))))
        kept, places = self.kept(at), at - self.start
        first = self._lines[1][np.minimum(places, self.size - 1)] / math.sqrt(self.betas.beta2)
        sums = self._sums.take(places, axis=1)
        nodes, weights = two_nodes(first, sums)
        missed = missed_at_samples(first, nodes, weights, sums[4:]) > tolerance if self._fades else at < self.step
        weights *= kept
        if missed.any():
            different, inverse = np.unique(at[missed], return_inverse=True)
            more_nodes, more_weights = self._more_nodes(different, tolerance)
            wider = ((0, more_nodes.shape[1] - 2), (0, 0))
            nodes, weights = np.pad(nodes, wider, constant_values=1.0), np.pad(weights, wider)
            nodes[:, missed], weights[:, missed] = more_nodes[inverse].T, more_weights[inverse].T
        return Gaps(kept, nodes, weights)

    def _more_nodes(
        self, at: Int[np.ndarray, " G"], tolerance: float
    ) -> tuple[Float[np.ndarray, "G Q"], Float[np.ndarray, "G Q"]]:
        """A rule for each of these different steps, of more nodes than two."""
        nodes, weights = self.terms(at, tolerance=tolerance)
        lags = self.step - at
        parts = []
        left = np.arange(len(at))
        for count in NODES:
            if count >= nodes.shape[1] or not len(left):
                break
            few, their = compress(nodes, weights, count)
            short = (lags <= count)[:, None]
            few, their = np.where(short, nodes[:, :count], few), np.where(short, weights[:, :count], their)
            exact = sums_of(nodes[:, :1], nodes, weights)[4:].sum(2)
            good = missed_at_samples(nodes[:, 0], few.T, their.T, exact) <= tolerance
            parts.append((left[good], few[good], their[good]))
            left, lags, nodes, weights = left[~good], lags[~good], nodes[~good], weights[~good]
        parts.append((left, nodes, weights))
        most = max([2, *(few.shape[1] for places, few, _ in parts if len(places))])
        all_nodes, all_weights = np.ones((len(at), most)), np.zeros((len(at), most))
        for places, few, their in parts:
            if len(places):
                all_nodes[places, : few.shape[1]], all_weights[places, : few.shape[1]] = few, their
        return all_nodes, all_weights

    def terms(
        self, at: Int[np.ndarray, " G"], *, tolerance: float
    ) -> tuple[Float[np.ndarray, "G J"], Float[np.ndarray, "G J"]]:
        """Nodes `e_j` and weights `w_j` of the sum as it stands above; what is past a gap's end has weight 0."""
        nodes, weights, places = self._pushes(at, tolerance)
        if self.decays:
            weights *= np.exp(self._lines[2, self.size - 1] - self._lines[2][places])
        return nodes, weights

    def _pushes(
        self, at: Int[np.ndarray, " G"], tolerance: float
    ) -> tuple[Float[np.ndarray, "G J"], Float[np.ndarray, "G J"], Int[np.ndarray, "G J"]]:
        """Nodes, weights without weight decay, and where in the lines each step stands."""
        lags = self.step - at
        most = int(lags.max())
        if self._fades:
            most = min(most, math.ceil(self._reach * math.log(tolerance / 100) / math.log(FADED)))
        j = np.arange(1, max(1, most) + 1)
        places = np.minimum(at[:, None] - self.start + j - 1, self.size - 1)
        weights = self._lines[0][places] * self._ratio**j
        weights[j > lags[:, None]] = 0
        return self._lines[1][places] * self.betas.beta2 ** (-0.5 * j), weights, places


SUMS = 4 + len(SAMPLES)


def sums_of(
    first: Float[np.ndarray, "*#terms"], nodes: Float[np.ndarray, "*terms"], weights: Float[np.ndarray, "*#terms"]
) -> Float[np.ndarray, "S *terms"]:
    """What each term adds to the sums that a rule of two nodes is made from and judged by.

    Four moments of `u = e_1 / (e + e_1)`, taken from 1/2, its value at the first term; and the terms of
    `sum_j w_j / (s + e_j)` at the values `SAMPLES * e_1` of `s`.
    """
    off = first / (nodes + first) - 0.5
    sums = np.empty((SUMS, *nodes.shape))
    sums[0] = weights
    for power in range(1, 4):
        np.multiply(sums[power - 1], off, out=sums[power])
    for place, sample in enumerate(SAMPLES, start=4):
        np.divide(weights, nodes + sample * first, out=sums[place])
    return sums


def two_nodes(
    first: Float[np.ndarray, " G"], sums: Float[np.ndarray, "S G"]
) -> tuple[Float[np.ndarray, "2 G"], Float[np.ndarray, "2 G"]]:
    """The Gauss rule of two nodes in closed form, from mean, variance and skew of the measure."""
    total = np.maximum(sums[0], TINY)
    mean, second, third = sums[1:4] / total
    variance = np.maximum(second - mean * mean, 1e-15 * second + TINY)  # below it is rounding
    skew = (third - mean * (3 * second - 2 * mean * mean)) / (2 * variance)
    half = np.sqrt(variance + skew * skew)
    part = 0.5 * (1 + skew / half)
    places = np.stack([mean + skew - half, mean + skew + half]) + 0.5
    np.clip(places, 1e-9, 0.5, out=places)
    return first / places - first, sums[0] * np.stack([part, 1 - part])


def compress(
    nodes: Float[np.ndarray, "G J"], weights: Float[np.ndarray, "G J"], count: int
) -> tuple[Float[np.ndarray, "G Q"], Float[np.ndarray, "G Q"]]:
    """A Gauss rule of `count` nodes with nearly the same `sum_j weights / (s + nodes)` for every `s >= 0`.

    The rule is made in `u = e_1 / (e + e_1)`, where all lies between 0 and 1 however far the nodes spread, and where
    it is most exact around `s = e_1`.
    """
    first = nodes[:, :1]
    u = first / (nodes + first)
    places, their = lanczos(u, weights, count)
    places = np.clip(places, u.min(1, keepdims=True), u.max(1, keepdims=True))
    return first / places - first, their


def lanczos(
    u: Float[np.ndarray, "G J"], weights: Float[np.ndarray, "G J"], count: int
) -> tuple[Float[np.ndarray, "G Q"], Float[np.ndarray, "G Q"]]:
    """The Gauss rule of `count` nodes: eigenvalues of the Jacobi matrix of the measure, and their share of its mass."""
    total = weights.sum(1, keepdims=True)
    basis = np.zeros((len(u), count, u.shape[1]))
    basis[:, 0] = np.sqrt(weights / np.maximum(total, TINY))
    matrix = np.zeros((len(u), count, count))
    for n in range(count):
        z = u * basis[:, n]
        matrix[:, n, n] = (z * basis[:, n]).sum(1)
        if n + 1 == count:
            break
        for _ in range(2):  # once is not enough to stay orthogonal
            known = basis[:, : n + 1]
            z = z - (np.matmul(known, z[:, :, None]).transpose(0, 2, 1) @ known)[:, 0]
        length = np.sqrt((z * z).sum(1))
        basis[:, n + 1] = z / np.maximum(length, TINY)[:, None]
        matrix[:, n + 1, n] = matrix[:, n, n + 1] = length
    places, vectors = np.linalg.eigh(matrix)
    return places, total * vectors[:, 0] ** 2


def missed_at_samples(
    first: Float[np.ndarray, " G"],
    nodes: Float[np.ndarray, "Q G"],
    weights: Float[np.ndarray, "Q G"],
    exact: Float[np.ndarray, "S G"],
) -> Float[np.ndarray, " G"]:
    """Largest relative error of a rule at the values `SAMPLES * e_1` of `s`, where the sum is `exact`."""
    samples = np.array(SAMPLES)[:, None, None] * first
    found = (weights / (nodes + samples)).sum(1)
    worst: Float[np.ndarray, " G"] = (np.abs(found - exact) / np.maximum(exact, TINY)).max(0)
    return worst


def check_betas(betas: Betas) -> None:
    """Refuse decays under which a row's momentum would not die out.

    Raises:
        SizeError: `beta1 >= sqrt(beta2)`, or a value outside what AdamW takes.
    """
    beta1, beta2, eps = betas
    if not (0 <= beta1 < 1 and 0 < beta2 < 1):
        raise SizeError(f"betas must lie between 0 and 1, not {(beta1, beta2)}.")
    if beta1 >= math.sqrt(beta2):
        raise SizeError(
            f"beta1 {beta1:g} is not below sqrt(beta2) = {math.sqrt(beta2):.6g}: steps of a row without gradient would "
            f"grow instead of dying out. Lower beta1 or raise beta2."
        )
    if not eps > 0:
        raise SizeError(f"eps must be positive, not {eps:g}: a row that never had a gradient would move by 0 / 0.")
