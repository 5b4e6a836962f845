"""AdamW steps without gradient, many at once: the closed form behind pending updates.

A row without gradient still moves: its momentum decays and keeps pushing it, and weight decay shrinks it. `replay` is
the definition, one skipped step after the other. `StepHistory.skipped_steps` gives the same sum in a few terms. For a
row last updated at step `t0`, with moments `m` and `v` and `s = sqrt(v)`, k steps give

    p(t0+k) = p(t0) * decay(t0, t0+k) - m * sum_j w_j / (s + e_j),   j = 1..k
    w_j = lr_i * b1^j / b2^(j/2) * sqrt(bc2_i) / bc1_i * decay(i, t0+k),   i = t0+j
    e_j = eps * sqrt(bc2_i) / b2^(j/2)
    decay(i, n) = prod_{i < l <= n} (1 - lr_l * wd_l),   bc1_i = 1 - b1^i,   bc2_i = 1 - b2^i

The weights `w_j` and nodes `e_j` are the same for all rows last updated at `t0`. As a function of `s` the sum is a
Stieltjes transform of a measure on `e_1 .. e_k`, so a Gauss quadrature with a few nodes approximates it for every
`s >= 0`. Two nodes follow from the first four moments of that measure. Each step adds one term to these moments, for
every `t0` that it still concerns, so with the usual betas no sum is computed when a row is read.

All of this is NumPy: the arrays are small, and threads would only wait for each other.

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
"""Numbers of Gauss nodes, tried in turn where two are not accurate; after the last the sum is computed term by term."""

SAMPLES = (0.0, 0.5, 3.0, 20.0, 200.0)
"""Values of `s / e_1` at which the quadrature is compared with the sum. For `s` to infinity it is exact."""

NEGLIGIBLE = 1e-14
"""Weight of a skipped step, relative to the first one, below which the step is left out."""

STRONG_DECAY = math.log1p(-0.02)
"""Logarithm of the weight-decay factor of a step below which no step is left out and no sums are stored."""

TINY = 1e-300
"""Replacement for 0 in divisions."""


class Betas(NamedTuple):
    """The options of AdamW that determine how moments decay."""

    beta1: float
    beta2: float
    eps: float


class SkippedSteps(NamedTuple):
    """Skipped steps of G rows: `p -> p * decay - m * sum_q weights[q] / (sqrt(v) + nodes[q])`.

    Attributes:
        decay: Factor of the weight decay, `(G,)`.
        nodes: Nodes of the quadrature, `(Q, G)`.
        weights: Weights of the quadrature, `(Q, G)`.
    """

    decay: Float[np.ndarray, " G"]
    nodes: Float[np.ndarray, "Q G"]
    weights: Float[np.ndarray, "Q G"]


def replay(
    row: tuple[Tensor, Tensor, Tensor],
    at: int,
    rates: Sequence[float],
    decays: Sequence[float],
    betas: Betas,
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply AdamW's update with a zero gradient once for each skipped step: the definition.

    Args:
        row: Values, first and second moments `(p, m, v)` after step `at`.
        at: Last step that `row` includes.
        rates: Learning rate of each skipped step.
        decays: Weight decay of each skipped step.
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


class StepHistory:
    """Learning rates and weight decays of the optimizer steps since `start`.

    Args:
        start: Step before the first one that is recorded.
        betas: `beta1`, `beta2` and `eps` of all recorded steps.

    Raises:
        SizeError: As in `check_betas`.
    """

    def __init__(self, start: int, betas: Betas) -> None:
        check_betas(betas)
        self.start = start
        self.betas = betas
        self.size = 0
        self._lines = np.zeros((3, 64))  # lr * sqrt(bc2) / bc1; eps * sqrt(bc2); log decay since the start
        self._sums = np.zeros((SUMS, 64))  # `sums_of` the terms of each t0, with decay(t0, i) for decay(i, n)
        self._weak_decay = True
        self._ratio = ratio = betas.beta1 / math.sqrt(betas.beta2)
        self._reach = max(1, math.ceil(math.log(NEGLIGIBLE) / math.log(ratio))) if ratio else 1
        j = np.arange(self._reach, 0, -1)
        self._fading, self._spreading = ratio**j, betas.beta2 ** (-0.5 * j)

    @property
    def step(self) -> int:
        """Return the last recorded step."""
        return self.start + self.size

    @property
    def lines(self) -> Float[np.ndarray, "3 N"]:
        """Return what is recorded, a column for each step: with `start` and `betas` enough to resume."""
        return self._lines[:, : self.size].copy()

    def load(self, lines: Float[np.ndarray, "3 N"]) -> None:
        """Restore what `lines` returned."""
        self.size = lines.shape[1]
        self._lines = np.concatenate([lines, np.zeros((3, 64))], axis=1)
        self._sums = np.zeros((SUMS, self.size + 64))
        logs = np.concatenate([[0.0], lines[2]])
        self._weak_decay = bool((logs[1:] - logs[:-1] >= STRONG_DECAY).all())
        for low in range(0, self.size if self._weak_decay else 0, 1024):
            at = np.arange(low, min(low + 1024, self.size))
            nodes, weights, places = self._undecayed_terms(self.start + at, 100 * NEGLIGIBLE)
            weights *= np.exp(logs[at][:, None] - logs[places + 1])
            self._sums[:, at] = sums_of(nodes[:, :1], nodes, weights).sum(2)

    def record(self, lr: float, weight_decay: float) -> int:
        """Record one step, and return its number.

        Raises:
            SizeError: `lr` is negative, or `lr * weight_decay` is not below 1.
        """
        if lr < 0 or not lr * weight_decay < 1:
            raise SizeError(f"lr {lr:g} must be at least 0, and lr * weight_decay {lr * weight_decay:g} below 1.")
        if self.size + 1 == self._lines.shape[1]:  # rows without skipped steps need a column of zeros
            self._lines = np.concatenate([self._lines, np.zeros_like(self._lines)], axis=1)
            self._sums = np.concatenate([self._sums, np.zeros_like(self._sums)], axis=1)
        beta1, beta2, eps = self.betas
        t = self.step + 1
        root = math.sqrt(-math.expm1(t * math.log(beta2)))
        before = self._lines[2, self.size - 1] if self.size else 0.0
        self._lines[:, self.size] = (lr * root / (1 - beta1**t), eps * root, before + math.log1p(-lr * weight_decay))
        self.size += 1
        self._weak_decay &= math.log1p(-lr * weight_decay) >= STRONG_DECAY
        if self._weak_decay:
            self._add_term()
        return t

    def _add_term(self) -> None:
        """Add the term of the last step to the sums of every earlier step."""
        now = self.size - 1
        low = max(0, self.size - self._reach)
        recent = slice(low - self.size, None)  # steps whose terms are not negligible
        rate, node, log_decay = self._lines[:, now]
        nodes, weights = node * self._spreading[recent], rate * self._fading[recent]
        logs = self._lines[2, max(low - 1, 0) : now]
        weights *= np.exp((logs if low else np.concatenate([[0.0], logs])) - log_decay)
        first = self._lines[1, low : self.size] * self._spreading[-1]
        self._sums[:, low : self.size] += sums_of(first, nodes, weights)

    def decay(self, at: Int[np.ndarray, " G"]) -> Float[np.ndarray, " G"]:
        """Return the factor of all weight decay since each of these steps."""
        logs = self._lines[2]
        since = np.where(at > self.start, logs[np.maximum(at - self.start - 1, 0)], 0.0)
        left: Float[np.ndarray, " G"] = np.exp(logs[self.size - 1] - since)
        return left

    def skipped_steps(self, at: Int[np.ndarray, " G"], *, tolerance: float) -> SkippedSteps:
        """Return the skipped steps of rows that were last updated at steps `at`.

        Args:
            at: Steps up to `step`, which may repeat, `(G,)`.
            tolerance: Largest relative error of the sum, for every `s >= 0`. It determines the number of nodes.
        """
        if not self.size:
            return SkippedSteps(np.ones(len(at)), np.ones((1, len(at))), np.zeros((1, len(at))))
        decay, places = self.decay(at), at - self.start
        first = self._lines[1][np.minimum(places, self.size - 1)] / math.sqrt(self.betas.beta2)
        sums = self._sums.take(places, axis=1)
        nodes, weights = two_nodes(first, sums)
        missed = error_at_samples(first, nodes, weights, sums[4:]) > tolerance if self._weak_decay else at < self.step
        weights *= decay
        if missed.any():
            different, inverse = np.unique(at[missed], return_inverse=True)
            more_nodes, more_weights = self._more_nodes(different, tolerance)
            wider = ((0, more_nodes.shape[1] - 2), (0, 0))
            nodes, weights = np.pad(nodes, wider, constant_values=1.0), np.pad(weights, wider)
            nodes[:, missed], weights[:, missed] = more_nodes[inverse].T, more_weights[inverse].T
        return SkippedSteps(decay, nodes, weights)

    def _more_nodes(
        self, at: Int[np.ndarray, " G"], tolerance: float
    ) -> tuple[Float[np.ndarray, "G Q"], Float[np.ndarray, "G Q"]]:
        """Return nodes and weights for distinct steps, `(G, Q)` each, with more than two nodes."""
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
            good = error_at_samples(nodes[:, 0], few.T, their.T, exact) <= tolerance
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
        """Return nodes `e_j` and weights `w_j` of the sum above, `(G, J)`; terms past the end have weight 0."""
        nodes, weights, places = self._undecayed_terms(at, tolerance)
        weights *= np.exp(self._lines[2, self.size - 1] - self._lines[2][places])
        return nodes, weights

    def _undecayed_terms(
        self, at: Int[np.ndarray, " G"], tolerance: float
    ) -> tuple[Float[np.ndarray, "G J"], Float[np.ndarray, "G J"], Int[np.ndarray, "G J"]]:
        """Return nodes, weights without weight decay, and the index of each step in the lines, `(G, J)` each."""
        lags = self.step - at
        most = int(lags.max())
        if self._weak_decay:
            most = min(most, math.ceil(self._reach * math.log(tolerance / 100) / math.log(NEGLIGIBLE)))
        j = np.arange(1, max(1, most) + 1)
        places = np.minimum(at[:, None] - self.start + j - 1, self.size - 1)
        weights = self._lines[0][places] * self._ratio**j
        weights[j > lags[:, None]] = 0
        return self._lines[1][places] * self.betas.beta2 ** (-0.5 * j), weights, places


SUMS = 4 + len(SAMPLES)


def sums_of(
    first: Float[np.ndarray, "*#terms"], nodes: Float[np.ndarray, "*terms"], weights: Float[np.ndarray, "*#terms"]
) -> Float[np.ndarray, "S *terms"]:
    """Return what each term adds to the sums from which a rule of two nodes is computed and checked.

    These are four moments of `u = e_1 / (e + e_1)`, taken from 1/2, its value at the first term; and the terms of
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
    """Compute the Gauss rule of two nodes in closed form, from mean, variance and skewness of the measure."""
    total = np.maximum(sums[0], TINY)
    mean, second, third = sums[1:4] / total
    variance = np.maximum(second - mean * mean, 1e-15 * second + TINY)  # smaller values are rounding errors
    skew = (third - mean * (3 * second - 2 * mean * mean)) / (2 * variance)
    half = np.sqrt(variance + skew * skew)
    part = 0.5 * (1 + skew / half)
    places = np.stack([mean + skew - half, mean + skew + half]) + 0.5
    np.clip(places, 1e-9, 0.5, out=places)
    return first / places - first, sums[0] * np.stack([part, 1 - part])


def compress(
    nodes: Float[np.ndarray, "G J"], weights: Float[np.ndarray, "G J"], count: int
) -> tuple[Float[np.ndarray, "G Q"], Float[np.ndarray, "G Q"]]:
    """Compute a Gauss rule of `count` nodes with nearly the same `sum_j weights / (s + nodes)` for every `s >= 0`.

    The rule is computed in `u = e_1 / (e + e_1)`. This variable is between 0 and 1 however far the nodes spread, and
    the rule is most accurate around `s = e_1`.
    """
    first = nodes[:, :1]
    u = first / (nodes + first)
    places, their = lanczos(u, weights, count)
    places = np.clip(places, u.min(1, keepdims=True), u.max(1, keepdims=True))
    return first / places - first, their


def lanczos(
    u: Float[np.ndarray, "G J"], weights: Float[np.ndarray, "G J"], count: int
) -> tuple[Float[np.ndarray, "G Q"], Float[np.ndarray, "G Q"]]:
    """Compute a Gauss rule of `count` nodes: the eigenvalues of the Jacobi matrix, and their share of the mass."""
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


def error_at_samples(
    first: Float[np.ndarray, " G"],
    nodes: Float[np.ndarray, "Q G"],
    weights: Float[np.ndarray, "Q G"],
    exact: Float[np.ndarray, "S G"],
) -> Float[np.ndarray, " G"]:
    """Return the largest relative error of a rule at the values `SAMPLES * e_1` of `s`, where the sum is `exact`."""
    samples = np.array(SAMPLES)[:, None, None] * first
    found = (weights / (nodes + samples)).sum(1)
    worst: Float[np.ndarray, " G"] = (np.abs(found - exact) / np.maximum(exact, TINY)).max(0)
    return worst


def check_betas(betas: Betas) -> None:
    """Check that the steps of a row without gradient become smaller.

    Raises:
        SizeError: `beta1 >= sqrt(beta2)`, or a value is outside AdamW's range.
    """
    beta1, beta2, eps = betas
    if not (0 <= beta1 < 1 and 0 < beta2 < 1):
        raise SizeError(f"betas must be between 0 and 1, not {(beta1, beta2)}.")
    if beta1 >= math.sqrt(beta2):
        raise SizeError(
            f"beta1 {beta1:g} is not below sqrt(beta2) = {math.sqrt(beta2):.6g}: steps of a row without gradient would "
            f"grow instead of vanishing. Lower beta1 or raise beta2."
        )
    if not eps > 0:
        raise SizeError(f"eps must be positive, not {eps:g}: a row that never had a gradient would move by 0 / 0.")
