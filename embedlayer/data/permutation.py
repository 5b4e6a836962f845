"""A random order of any number of things, computed place by place: no list of them is kept."""

import numpy as np
import numpy.typing as npt
import torch

ROUNDS = 12

Places = npt.NDArray[np.int64]


class RandomPermutation:
    """A permutation of `0..count - 1`, drawn from a generator: `order(places)` is what stands at these places.

    Places are written as a number of two digits, `left * width + right`, with `width` near the root of `count`. Each
    round adds to one digit a hash of the other, which can be taken back, so no two places ever come together. What
    lands on one of the few numbers beyond `count` goes through the rounds again until it does not.

    Args:
        count: Things there are.
        generator: Decides the order; what it draws does not depend on `count`.

    Example:
        >>> order = RandomPermutation(10**12, torch.Generator().manual_seed(0))
        >>> order(np.arange(3)).tolist()
        [23408838395, 319519362077, 886107380074]

    Reference: Black and Rogaway, Ciphers with arbitrary finite domains, 2002: a Feistel network that walks its cycles.
    We differ: the hash is SplitMix64's, which mixes well and hides nothing.
    """

    def __init__(self, count: int, generator: torch.Generator) -> None:
        self.count = count
        self.width = max(int(np.ceil(np.sqrt(count))), 1)
        self.height = -(-count // self.width)
        self.keys = torch.randint(2**62, (ROUNDS,), generator=generator).numpy().astype(np.uint64)

    def __call__(self, places: Places) -> Places:
        """What stands at each of the places."""
        found = self._mixed(places)
        while (beyond := found >= self.count).any():
            found[beyond] = self._mixed(found[beyond])
        return found

    def _mixed(self, places: Places) -> Places:
        left, right = np.divmod(places.astype(np.uint64), np.uint64(self.width))
        for number, key in enumerate(self.keys):
            if number % 2:
                left = (left + _hash(right, key) % np.uint64(self.height)) % np.uint64(self.height)
            else:
                right = (right + _hash(left, key) % np.uint64(self.width)) % np.uint64(self.width)
        return (left * np.uint64(self.width) + right).astype(np.int64)


def _hash(numbers: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    """SplitMix64 of each number, from another start for each key; products are meant to overflow."""
    mixed = numbers * np.uint64(0x9E3779B97F4A7C15) + key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: npt.NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    return result
