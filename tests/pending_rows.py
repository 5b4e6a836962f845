"""Tables whose rows have pending updates, and what these come to one step after the other."""

import math

import torch
from torch import Tensor

from embedlayer import TokenEmbedding
from embedlayer.row_sparse.history import Betas, StepHistory, replay
from embedlayer.row_sparse.storage import raw_weight

ROOTS = torch.cat([torch.zeros(1), torch.logspace(-13, 1, 90)]).double()
"""Roots of second moments, from far below `eps` to far above."""

GAPS_AT = (0, 1, 5, 20, 50, 400, 1000, 1150, 1185, 1196, 1197, 1198, 1199)
"""Steps of a history of 1,200 at which rows were updated last."""


def rates(steps: int) -> list[float]:
    """Return the learning rates of some steps: warm-up and cosine."""
    return [1e-3 * min(1, t / 100) * (0.55 + 0.45 * math.cos(math.pi * t / steps)) for t in range(1, steps + 1)]


def recorded(betas: Betas, all_rates: list[float], decay: float, start: int = 0) -> StepHistory:
    """Return a history of steps with these learning rates and one weight decay."""
    history = StepHistory(start, betas)
    for lr in all_rates:
        history.record(lr, decay)
    return history


def with_pending(
    history: StepHistory, value_steps, moment_steps, m: Tensor, v: Tensor, *, dtype=torch.float64
) -> TokenEmbedding:
    """Return a table of zeros whose rows have the moments `m` and `v`, and include these steps."""
    table = TokenEmbedding(*m.shape, row_sparse=True, dtype=dtype)
    raw_weight(table.weight).zero_()
    tensors = {
        "value_steps": torch.as_tensor(value_steps),
        "moment_steps": torch.as_tensor(moment_steps),
        "history": torch.from_numpy(history.lines),
    }
    rest = {"start": history.start, "betas": list(history.betas)}
    moments = tuple(each.to(table.weight.device, dtype, copy=True) for each in (m, v))
    table.weight.pending_updates.load_state(table.weight, moments, tensors, rest)
    return table


def replayed(
    m: Tensor, v: Tensor, at: int, all_rates: list[float], decay: float, betas: Betas, *, moments_at: int | None = None
) -> Tensor:
    """Return the values of a row of zeros after the steps that follow step `at`, one after the other.

    `all_rates` are those of the steps after `at`. The moments are of step `moments_at`, which is `at` by default.
    """
    lag = 0 if moments_at is None else at - moments_at
    row = (torch.zeros_like(v), m * betas.beta1**lag, v * betas.beta2**lag)
    return replay(row, at, all_rates, [decay] * len(all_rates), betas)[0]
