"""What dense AdamW does to a row that gets no gradient, in one go.

Without gradient a row still moves: its momentum dies out and keeps pushing, and weight decay shrinks it. `replay` is
the definition, one missed step after the other. `History.gaps` gives the same sum in a few terms: with `s = sqrt(v)`

    p(t0+k) = p(t0) * kept(t0, t0+k) - m * sum_j w_j / (s + e_j),   j = 1..k
    w_j = lr_i * b1^j / b2^(j/2) * sqrt(bc2_i) / bc1_i * kept(i, t0+k),   e_j = eps * sqrt(bc2_i) / b2^(j/2),   i = t0+j
    kept(i, n) = prod_{i < l <= n} (1 - lr_l * wd_l),   bc1_i = 1 - b1^i,   bc2_i = 1 - b2^i

The weights `w_j` and nodes `e_j` are the same for all rows last touched at `t0`. As a function of `s` the sum is a
Stieltjes transform of a measure on `e_1 .. e_k`, so a Gauss quadrature of a few nodes gives it for every `s >= 0`.

Reference: Golub and Meurant, Matrices, Moments and Quadrature, 2010, chapters 3 and 4 (Lanczos and Gauss rules).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.errors import SizeError

NODES = (2, 4, 8, 12, 16)
"""Numbers of Gauss nodes, tried in turn; where the last one misses too, the sum is taken term by term."""

SAMPLES = (0.0, 0.5, 3.0, 20.0, 200.0)
"""Where the quadrature is compared with the sum: values of `s / e_1`. It is exact for `s` to infinity."""

TINY = 1e-300


class Betas(NamedTuple):
    """What fixes how moments die out: AdamW's `betas` and `eps`."""

    beta1: float
    beta2: float
    eps: float


class Gaps(NamedTuple):
    """`p -> p * kept - m * sum_q weights[:, q] / (sqrt(v) + nodes[:, q])`, one row of each for each gap."""

    kept: Float[Tensor, " G"]
    nodes: Float[Tensor, "G Q"]
    weights: Float[Tensor, "G Q"]


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
        self._lines = torch.zeros(3, 64, dtype=torch.float64)  # lr * sqrt(bc2) / bc1; eps * sqrt(bc2); log kept

    @property
    def step(self) -> int:
        """The last step recorded."""
        return self.start + self.size

    @property
    def lines(self) -> Float[Tensor, "3 N"]:
        """What is recorded, a column for each step: all that resuming needs besides `start` and `betas`."""
        return self._lines[:, : self.size]

    def load(self, lines: Float[Tensor, "3 N"]) -> None:
        """Put in what `lines` gave."""
        self.size = lines.shape[1]
        self._lines = torch.cat([lines.to("cpu", torch.float64), torch.zeros(3, 64, dtype=torch.float64)], dim=1)

    def record(self, lr: float, weight_decay: float) -> int:
        """Write down one step; returns its number.

        Raises:
            SizeError: `lr` is negative, or `lr * weight_decay` is not below 1.
        """
        if lr < 0 or not lr * weight_decay < 1:
            raise SizeError(f"lr {lr:g} must be at least 0, and lr * weight_decay {lr * weight_decay:g} below 1.")
        if self.size == self._lines.shape[1]:
            self._lines = torch.cat([self._lines, torch.zeros_like(self._lines)], dim=1)
        beta1, beta2, eps = self.betas
        t = self.step + 1
        root = math.sqrt(-math.expm1(t * math.log(beta2)))
        before = float(self._lines[2, self.size - 1]) if self.size else 0.0
        line = (lr * root / (1 - beta1**t), eps * root, before + math.log1p(-lr * weight_decay))
        self._lines[:, self.size] = torch.tensor(line, dtype=torch.float64)
        self.size += 1
        return t

    def kept(self, at: Int[Tensor, " G"]) -> Float[Tensor, " G"]:
        """`kept(at, step)`: what weight decay has left of a row since each of these steps."""
        logs = self._lines[2, : self.size]
        if not self.size or not logs[-1]:
            return torch.ones(at.shape, dtype=torch.float64)
        since = torch.where(at > self.start, logs[(at - self.start - 1).clamp(min=0)], 0.0)
        return (logs[-1] - since).exp_()

    def gaps(self, at: Int[Tensor, " G"], *, tolerance: float) -> Gaps:
        """The catch-up of rows that were right after steps `at`, in as few terms as `tolerance` allows.

        Args:
            at: Different steps before `step`, on the CPU.
            tolerance: Largest relative error of the sum, for every `s >= 0`.
        """
        nodes, weights = self.terms(at, tolerance=tolerance)
        lags = self.step - at
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        left = torch.arange(len(at))
        for count in NODES:
            if count >= nodes.shape[1] or not len(left):
                break
            few, their = compress(nodes, weights, count)
            short = (lags <= count).unsqueeze(1)
            few, their = torch.where(short, nodes[:, :count], few), torch.where(short, weights[:, :count], their)
            good = missed(nodes, weights, few, their) <= tolerance
            parts.append((left[good], few[good], their[good]))
            left, lags, nodes, weights = left[~good], lags[~good], nodes[~good], weights[~good]
        parts.append((left, nodes, weights))
        most = max((part.shape[1] for where, part, _ in parts if len(where)), default=1)
        all_nodes, all_weights = torch.ones(len(at), most).double(), torch.zeros(len(at), most).double()
        for where, part, their in parts:
            if len(where):
                all_nodes[where, : part.shape[1]], all_weights[where, : part.shape[1]] = part, their
        return Gaps(self.kept(at), all_nodes, all_weights)

    def terms(self, at: Int[Tensor, " G"], *, tolerance: float) -> tuple[Float[Tensor, "G J"], Float[Tensor, "G J"]]:
        """Nodes `e_j` and weights `w_j` of the sum as it stands above; what is past a gap's end has weight 0."""
        ratio = math.log(self.betas.beta1 / math.sqrt(self.betas.beta2)) if self.betas.beta1 else -math.inf
        lags = self.step - at
        most = max(1, min(int(lags.max()), math.ceil(math.log(tolerance / 1000) / ratio)))
        j = torch.arange(1, most + 1, dtype=torch.float64)
        missing = torch.arange(1, most + 1) > lags.unsqueeze(1)
        where = (at.unsqueeze(1) - self.start + torch.arange(most)).clamp_(max=self.size - 1)
        amplitudes, roots, logs = (line[where] for line in self._lines)
        weights = amplitudes.mul_((ratio * j).exp() if self.betas.beta1 else torch.zeros_like(j))
        if self._lines[2, self.size - 1]:
            weights *= (self._lines[2, self.size - 1] - logs).exp_()
        return roots.mul_((-0.5 * math.log(self.betas.beta2) * j).exp_()), weights.masked_fill_(missing, 0.0)


def compress(
    nodes: Float[Tensor, "G J"], weights: Float[Tensor, "G J"], count: int
) -> tuple[Float[Tensor, "G Q"], Float[Tensor, "G Q"]]:
    """A Gauss rule of `count` nodes with nearly the same `sum_j weights / (s + nodes)` for every `s >= 0`.

    The rule is made in `u = e_1 / (e + e_1)`, where all lies between 0 and 1 however far the nodes spread, and where
    it is most exact around `s = e_1`.
    """
    first = nodes[:, :1]
    u = first / (nodes + first)
    rule = two_nodes if count == 2 else lanczos
    places, their = rule(u, weights, count)
    inside = torch.where(weights > 0, u, math.inf).amin(1, keepdim=True).clamp(max=0.5)
    return first / places.clamp(min=inside, max=torch.full_like(inside, 0.5)) - first, their


def two_nodes(
    u: Float[Tensor, "G J"], weights: Float[Tensor, "G J"], count: int = 2
) -> tuple[Float[Tensor, "G 2"], Float[Tensor, "G 2"]]:
    """The Gauss rule of two nodes, from mean, variance and skew of the measure: what `lanczos` gives, in closed form."""
    total = weights.sum(1, keepdim=True)
    share = weights / total.clamp(min=TINY)
    mean = (share * u).sum(1, keepdim=True)
    off = u - mean
    spread = share * off * off
    variance = spread.sum(1, keepdim=True).clamp(min=TINY)
    skew = (spread * off).sum(1, keepdim=True) / (2 * variance)
    half = (variance + skew * skew).sqrt()
    part = 0.5 * (1 + skew / half)
    return torch.cat([mean + skew - half, mean + skew + half], 1), total * torch.cat([part, 1 - part], 1)


def lanczos(
    u: Float[Tensor, "G J"], weights: Float[Tensor, "G J"], count: int
) -> tuple[Float[Tensor, "G Q"], Float[Tensor, "G Q"]]:
    """The Gauss rule of `count` nodes: eigenvalues of the Jacobi matrix of the measure, and their share of its mass."""
    total = weights.sum(1)
    q = weights.clamp(min=0).sqrt() / total.clamp(min=TINY).sqrt().unsqueeze(1)
    basis = q.unsqueeze(2)
    matrix = torch.zeros(len(u), count, count, dtype=u.dtype)
    for n in range(count):
        z = u * q
        matrix[:, n, n] = (z * q).sum(1)
        for _ in range(2):
            z = z - (basis @ (basis.mT @ z.unsqueeze(2))).squeeze(2)
        if n + 1 < count:
            length = z.norm(dim=1)
            q = z / length.clamp(min=TINY).unsqueeze(1)
            matrix[:, n + 1, n] = matrix[:, n, n + 1] = length
            basis = torch.cat([basis, q.unsqueeze(2)], dim=2)
    places, vectors = torch.linalg.eigh(matrix)
    return places, total.unsqueeze(1) * vectors[:, 0] ** 2


def missed(
    nodes: Float[Tensor, "G J"], weights: Float[Tensor, "G J"], few: Float[Tensor, "G Q"], their: Float[Tensor, "G Q"]
) -> Float[Tensor, " G"]:
    """Largest relative error at `SAMPLES` when the sum over `nodes` is replaced by the one over `few`."""
    worst = torch.zeros(len(nodes), dtype=nodes.dtype)
    for sample in SAMPLES:
        s = sample * nodes[:, :1]
        exact = (weights / (nodes + s)).sum(1)
        found = (their / (few + s)).sum(1)
        worst = torch.maximum(worst, (found - exact).abs() / exact.clamp(min=TINY))
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
