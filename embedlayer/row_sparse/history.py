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

Compiled kernels (`embedlayer.kernels.cpu.rows.apply_pending`) compute the sums of a row when it is read. They know its
second moments, so a rule needs to be right only from some s on. For a centre c, let `u = c / (e + c)`, which maps all
nodes to 0..1, and `x = (s - c) / c`. A term is `1 / (s + e) = u / (c (1 + x u))`, which is linear in u at `s = c`, so
every Gauss rule is exact there. For the rule of two nodes `u1 > u2`, with `q(u) = (u - u1) (u - u2)` and the sum over
`w_j` written as an integral, the relative error is

    |x|^3 * int q^2 / (1 + x u) / ((1 + x u1)^2 (1 + x u2)^2 * int u / (1 + x u))

For `s >= c`, `1 + x u >= x u` above and `1 + x u <= 1 + x` below bound it by

    x^2 (1 + x) / ((1 + x u1)^2 (1 + x u2)^2) * Q / U  <=  4 Q / (27 u2^2 u1 U),    Q = int q^2 / u,  U = int u

because `(1 + x) u1 <= 1 + x u1` and the maximum of `x^2 / (1 + x u2)^3` is `4 / (27 u2^2)`. For `0 <= s < c` and
`c <= e_1` all u are at most 1/2, and `-1 <= x < 0` gives the bound `Q / ((1 - u1)^2 (1 - u2)^2 U)`. The error falls
fast as c grows. A kernel tries `c = e_1`, whose rule serves all s where both bounds are within the tolerance, and then
larger centres. The few numbers of a row whose s is below the centre get the exact sum, term by term. Rows with many of
them are left to `skipped_steps`.

Reference: Golub and Meurant, Matrices, Moments and Quadrature, 2010, chapters 3 and 4 (Lanczos and Gauss rules).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.core.errors import SizeError
from embedlayer.kernels.kernel import Argument as KernelArgument

NODES = (4, 8, 12, 16)
"""Numbers of Gauss nodes, tried in turn where two are not accurate; after the last the sum is computed term by term."""

SAMPLES = (0.0, 0.5, 3.0, 20.0, 200.0)
"""Values of `s / e_1` at which the quadrature is compared with the sum. For `s` to infinity it is exact."""

NEGLIGIBLE = 1e-14  # weight of a skipped step, relative to the first one, below which the step is left out

STRONG_DECAY = math.log1p(-0.02)
"""Logarithm of the weight-decay factor of a step below which no step is left out and no sums are stored."""

STRONGEST_DECAY = -600.0
"""Logarithm of the weight decay of all steps together below which kernels apply no updates, because of overflow."""

TINY = 1e-300  # replacement for 0 in divisions


class Betas(NamedTuple):
    """The options `(beta1, beta2, eps)` of AdamW, which determine how a row without gradient moves."""

    beta1: float
    beta2: float
    eps: float


NO_FADING = (0.0, 1.0)  # `beta1` and `beta2` of Adagrad: no first moment, and a sum of squares that does not decay


class StepRates(NamedTuple):
    """The numbers of one optimizer step on rows with a gradient g."""

    add1: float
    add2: float
    factor: float
    addend: float
    rate: float


def step_rates(betas: Betas, step: int, lr: float, weight_decay: float) -> StepRates:
    """Return the numbers of step `step` of AdamW, or of Adagrad for the betas `NO_FADING`."""
    beta1, beta2, eps = betas
    factor = 1 - lr * weight_decay
    if betas[:2] == NO_FADING:
        return StepRates(1.0, 1.0, factor, eps, lr)
    root = math.sqrt(1 - beta2**step)
    return StepRates(1 - beta1, 1 - beta2, factor, eps * root, lr * root / (1 - beta1**step))


def replay(
    row: tuple[Tensor, Tensor, Tensor], at: int, rates: Sequence[float], decays: Sequence[float], betas: Betas
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply AdamW's update with a zero gradient once for each skipped step of a row."""
    p, m, v = row
    for t, (lr, decay) in enumerate(zip(rates, decays, strict=True), start=at + 1):
        m, v = betas.beta1 * m, betas.beta2 * v
        mean, square = m / (1 - betas.beta1**t), v / (1 - betas.beta2**t)
        p = p * (1 - lr * decay) - lr * mean / (square.sqrt() + betas.eps)
    return p, m, v


class StepHistory:
    """Record what each optimizer step does to rows without a gradient.

    Attributes:
        step: Number of the last recorded step; `start` if none was recorded.
    """

    def __init__(self, start: int, betas: Betas) -> None:
        if betas[:2] != NO_FADING:
            check_betas(betas)
        self.start = self.step = start
        self.betas = Betas(*map(float, betas))
        self.size = 0
        self._lines = np.zeros((3, 64))  # a column of zeros for step `start`, then the columns of `lines`
        self._masses = np.zeros(64)  # row 0 of `_lines`, divided by the weight decay of all steps up to each
        self._sums = np.zeros((SUMS, 0))  # `sums_of` the terms of each t0, with decay(t0, i) for decay(i, n)
        self._summed = 0  # steps that these sums include
        self._weak_decay = True
        self._ratio = ratio = betas.beta1 / math.sqrt(betas.beta2)
        self._reach = max(1, math.ceil(math.log(NEGLIGIBLE) / math.log(ratio))) if ratio else 1
        j = np.arange(1, self._reach + 1)
        self._fading, self._spreading = ratio**j, betas.beta2 ** (-0.5 * j)

    @property
    def lines(self) -> Float[np.ndarray, "3 N"]:
        """Return a copy of the record, with a column for each of the N recorded steps, for a checkpoint."""
        return self._lines[:, 1 : self.size + 1].copy()

    def lines_from(self, first: int) -> Float[np.ndarray, "N 3"]:
        """Return the record from step `start + first` on, a line for each step, for kernels on a GPU."""
        lines = np.array(self._lines[:, first : self.size + 1].T, order="C")
        if first == 0:
            with np.errstate(divide="ignore"):  # -inf without momentum
                lines[0] = (np.log2(self._ratio), np.log2(self.betas.beta2), 0.0)
        return lines

    def most_terms(self, tolerance: float) -> int:
        """Return after how many skipped steps of a row further ones are negligible at this tolerance."""
        return self._terms(tolerance) if self._weak_decay else self.size

    def load(self, lines: Float[np.ndarray, "3 N"]) -> None:
        """Restore a record that `lines` returned, for the same `start` and `betas`. It replaces the present record."""
        self.size = lines.shape[1]
        self.step = self.start + self.size
        self._lines = np.pad(lines, ((0, 0), (1, 64)))
        self._sums, self._summed = np.zeros((SUMS, 0)), 0
        self._weak_decay = bool((np.diff(self._lines[2, : self.size + 1]) >= STRONG_DECAY).all())
        with np.errstate(over="ignore"):  # then no kernel uses it
            self._masses = self._lines[0] * np.exp(-self._lines[2])

    def record(self, lr: float, weight_decay: float) -> int:
        """Record the next optimizer step, and return its number; the first one is `start + 1`."""
        check_rates(lr, weight_decay)
        if self.size + 1 == self._lines.shape[1]:
            self._lines = np.concatenate([self._lines, np.zeros_like(self._lines)], axis=1)
            self._masses = np.concatenate([self._masses, np.zeros_like(self._masses)])
        beta1, beta2, eps = self.betas
        t = self.step + 1
        root = math.sqrt(-math.expm1(t * math.log(beta2)))
        log_decay = math.log1p(-lr * weight_decay)
        logs = self._lines[2, self.size] + log_decay
        self.size += 1
        self._lines[:, self.size] = (lr * root / (1 - beta1**t), eps * root, logs)
        self._masses[self.size] = self._lines[0, self.size] * math.exp(min(-logs, -STRONGEST_DECAY))
        self._weak_decay = self._weak_decay and log_decay >= STRONG_DECAY
        self.step = t
        return t

    def _update_sums(self) -> None:
        """Bring the stored sums up to date with the recorded steps."""
        if self._sums.shape[1] < self._lines.shape[1]:
            self._sums = np.pad(self._sums, ((0, 0), (0, self._lines.shape[1] - self._sums.shape[1])))
        if self.size - self._summed <= 1024:
            for last in range(self._summed + 1, self.size + 1):  # add its term to the sums that it still concerns
                low = max(0, last - self._reach)
                recent = slice(last - low - 1, None, -1)  # steps whose terms are not negligible, the earliest one first
                rate, node, log_decay = self._lines[:, last]
                nodes, weights = node * self._spreading[recent], rate * self._fading[recent]
                weights *= np.exp(self._lines[2, low:last] - log_decay)
                first = self._lines[1, low + 1 : last + 1] * self._spreading[0]
                self._sums[:, low:last] += sums_of(first, nodes, weights)
        else:
            low = max(0, self._summed - self._reach)
            for at in np.split(np.arange(low, self.size), range(1024, self.size - low, 1024)):
                nodes, weights, places = self._undecayed_terms(self.start + at, 100 * NEGLIGIBLE)
                weights *= np.exp(self._lines[2][at][:, None] - self._lines[2][places])
                self._sums[:, at] = sums_of(nodes[:, :1], nodes, weights).sum(2)
        self._summed = self.size

    def kernel_arguments(self, tolerance: float) -> tuple[KernelArgument, ...]:
        """Return the arguments, from `lines` to `rates`, of the kernel `embedlayer.kernels.cpu.rows.apply_pending`."""
        arrays = (self._lines, self._masses, self._fading, self._spreading)
        weak = self._weak_decay and self._lines[2, self.size] > STRONGEST_DECAY
        sizes = (self.start, self.size, self._terms(tolerance), int(weak))
        return *arrays, sizes, (*self.betas[:2], tolerance)

    def _terms(self, tolerance: float) -> int:
        """Return how many terms the sum of `SkippedSteps` needs for this relative error, where weight decay is weak."""
        return math.ceil(self._reach * math.log(tolerance / 100) / math.log(NEGLIGIBLE))

    def decay(self, at: Int[np.ndarray, " G"]) -> Float[np.ndarray, " G"]:
        """Return for each step in `at` the product of the weight-decay factors of all later steps, `(G,)`."""
        logs = self._lines[2]
        left: Float[np.ndarray, " G"] = np.exp(logs[self.size] - logs[at - self.start])
        return left

    def skipped_steps(
        self, at: Int[np.ndarray, " G"], *, tolerance: float
    ) -> tuple[Float[np.ndarray, " G"], Float[np.ndarray, "Q G"], Float[np.ndarray, "Q G"]]:
        """Return decay, nodes and weights: the effect of all steps after `at[g]` on each of G rows without gradient."""
        if not self.size:
            return np.ones(len(at)), np.ones((1, len(at))), np.zeros((1, len(at)))
        if self._weak_decay:
            self._update_sums()
        decay, places = self.decay(at), at - self.start
        first = self._lines[1][np.minimum(places + 1, self.size)] / math.sqrt(self.betas.beta2)
        sums = self._sums.take(places, axis=1) if self._weak_decay else np.zeros((SUMS, len(at)))
        nodes, weights = two_nodes(first, sums)
        missed = error_at_samples(first, nodes, weights, sums[4:]) > tolerance if self._weak_decay else at < self.step
        weights *= decay
        if missed.any():
            different, inverse = np.unique(at[missed], return_inverse=True)
            more_nodes, more_weights = self._more_nodes(different, tolerance)
            wider = ((0, more_nodes.shape[1] - 2), (0, 0))
            nodes, weights = np.pad(nodes, wider, constant_values=1.0), np.pad(weights, wider)
            nodes[:, missed], weights[:, missed] = more_nodes[inverse].T, more_weights[inverse].T
        return decay, nodes, weights

    def _more_nodes(
        self, at: Int[np.ndarray, " G"], tolerance: float
    ) -> tuple[Float[np.ndarray, "G Q"], Float[np.ndarray, "G Q"]]:
        """Return quadratures with more than two nodes for steps at which two are not accurate enough."""
        nodes, weights, steps = self._undecayed_terms(at, tolerance)
        weights *= np.exp(self._lines[2, self.size] - self._lines[2][steps])
        lags = self.step - at
        all_nodes = np.ones((len(at), max(2, nodes.shape[1])))
        all_weights = np.zeros_like(all_nodes)
        left, most = np.arange(len(at)), 2
        for count in NODES:
            if count >= nodes.shape[1] or not len(left):
                break
            few, their = compress(nodes, weights, count)
            short = (lags <= count)[:, None]
            few, their = np.where(short, nodes[:, :count], few), np.where(short, weights[:, :count], their)
            exact = sums_of(nodes[:, :1], nodes, weights)[4:].sum(2)
            good = error_at_samples(nodes[:, 0], few.T, their.T, exact) <= tolerance
            all_nodes[left[good], :count], all_weights[left[good], :count] = few[good], their[good]
            if good.any():
                most = count
            left, lags, nodes, weights = left[~good], lags[~good], nodes[~good], weights[~good]
        if len(left):
            most = max(2, nodes.shape[1])
            all_nodes[left, : nodes.shape[1]], all_weights[left, : nodes.shape[1]] = nodes, weights
        return all_nodes[:, :most], all_weights[:, :most]

    def _undecayed_terms(
        self, at: Int[np.ndarray, " G"], tolerance: float
    ) -> tuple[Float[np.ndarray, "G J"], Float[np.ndarray, "G J"], Int[np.ndarray, "G J"]]:
        """Return the terms of the exact sum over skipped steps, one for each step, without weight decay."""
        lags = self.step - at
        most = int(lags.max())
        if self._weak_decay:
            most = min(most, self._terms(tolerance))
        j = np.arange(1, max(1, most) + 1)
        places = np.minimum(at[:, None] - self.start + j, self.size)
        weights = self._lines[0][places] * self._ratio**j
        weights[j > lags[:, None]] = 0
        return self._lines[1][places] * self.betas.beta2 ** (-0.5 * j), weights, places


SUMS = 4 + len(SAMPLES)


def sums_of(
    first: Float[np.ndarray, "*#terms"], nodes: Float[np.ndarray, "*terms"], weights: Float[np.ndarray, "*#terms"]
) -> Float[np.ndarray, "S *terms"]:
    """Return what each term of a sum adds to the S sums from which a rule of two nodes is computed and checked."""
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
    """Compute for G sums the Gauss rule of two nodes, in closed form from mean, variance and skewness of the terms."""
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
    """Replace sums of J terms by Gauss rules of `count` terms with nearly the same values for `s >= 0`, by Lanczos."""
    first = nodes[:, :1]
    u = first / (nodes + first)
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
    places = np.clip(places, u.min(1, keepdims=True), u.max(1, keepdims=True))
    return first / places - first, total * vectors[:, 0] ** 2


def error_at_samples(
    first: Float[np.ndarray, " G"],
    nodes: Float[np.ndarray, "Q G"],
    weights: Float[np.ndarray, "Q G"],
    exact: Float[np.ndarray, "S G"],
) -> Float[np.ndarray, " G"]:
    """Return for each of G quadratures its largest relative error at the values `s = SAMPLES * first`."""
    samples = np.array(SAMPLES)[:, None, None] * first
    sums = (weights / (nodes + samples)).sum(1)
    worst: Float[np.ndarray, " G"] = (np.abs(sums - exact) / np.maximum(exact, TINY)).max(0)
    return worst


def check_rates(lr: float, weight_decay: float) -> None:
    """Check that the learning rate is not negative, and that weight decay does not change the sign of a row."""
    if lr < 0 or not lr * weight_decay < 1:
        raise SizeError(f"lr {lr:g} must be at least 0, and lr * weight_decay {lr * weight_decay:g} below 1.")


def check_betas(betas: Betas) -> None:
    """Check that AdamW's steps of a row without gradient become smaller from step to step."""
    beta1, beta2, eps = betas
    if not (0 <= beta1 < 1 and 0 < beta2 < 1):
        raise SizeError(f"betas must be between 0 and 1, not {(beta1, beta2)}.")
    if beta1 >= math.sqrt(beta2):
        raise SizeError(
            f"beta1 {beta1:g} is not below sqrt(beta2) = {math.sqrt(beta2):.6g}: steps without gradient would grow."
        )
    if not eps > 0:
        raise SizeError(f"eps must be positive, not {eps:g}: a row that never had a gradient would move by 0 / 0.")
