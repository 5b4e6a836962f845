"""Random numbers that are a function of a seed and a place, so that neither blocks nor threads change them: SplitMix64.

The kernels of `embedlayer.kernels` compute the same bits.

Reference: Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014.
"""

from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int64
from torch import Tensor

Words = TypeVar("Words", Tensor, npt.NDArray[np.int64])


def signed(number: int) -> int:
    """Return the int64 whose 64 bits are the lowest of `number`."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


GOLDEN, FIRST, SECOND = map(signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""Increment of the generator, 2^64 divided by the golden ratio, and factors of its finaliser, as signed numbers."""


def mix_(words: Words) -> Words:
    """Hash int64 numbers by the finaliser of SplitMix64, in place. Products overflow on purpose."""
    for shift, factor in ((30, FIRST), (27, SECOND), (31, 1)):
        high = words >> shift
        high &= (1 << (64 - shift)) - 1  # a shift keeps the sign
        words ^= high
        del high  # its memory serves the next one
        if factor != 1:
            words *= factor
    return words


def random_words(seed: int, start: int, count: int) -> Int64[Tensor, " N"]:
    """Return the 64-bit random numbers `start` to `start + count - 1` of SplitMix64 as int64."""
    return mix_(torch.arange(start, start + count, device="cpu").mul_(GOLDEN).add_(seed))
