"""No hot path launches more kernels on a GPU, waits for it more often or takes more memory than its ceiling."""

import pytest
from benchmarks.hot_paths import BY_TORCH_OPERATORS, PATHS, HotPath

from embedlayer.kernels import kernels_disabled

LOSS, WAIT = 12, 1
"""Kernels of a loss for each chunk of tokens, and waits of a loss: it counts the targets and checks them at once."""

CEILINGS = {
    "loss, plain": (22, 0),
    "loss": (LOSS, WAIT),
    "loss, chunked": (LOSS, WAIT),
}
