"""A random permutation of any length in constant memory: each element is computed when it is needed."""

import numpy as np
import numpy.typing as npt
import torch

from embedlayer.core.numbers import GOLDEN, mix_

ROUNDS = 12

Indices = npt.NDArray[np.int64]


class RandomPermutation:
    """Random permutation of `0..count - 1` that is never stored: `permutation(indices)` computes its elements there.

    A Feistel network over `left * width + right` with cycle walking (Black and Rogaway, 2002), and a plain hash.
    """

    def __init__(self, count: int, generator: torch.Generator) -> None:
        self.count = count
        self.width = max(int(np.ceil(np.sqrt(count))), 1)
        self.height = -(-count // self.width)
        self.keys = torch.randint(2**62, (ROUNDS,), generator=generator).numpy().astype(np.uint64)

    def __call__(self, indices: Indices) -> Indices:
        """Return the elements of the permutation at `indices`, as an int64 array of the shape of `indices`."""
        elements = self._permute_once(indices)
        while (beyond := elements >= self.count).any():
            elements[beyond] = self._permute_once(elements[beyond])
        return elements

    def _permute_once(self, indices: Indices) -> Indices:
        """Apply all rounds of the Feistel network once to each index."""
        left, right = np.divmod(indices.astype(np.uint64), np.uint64(self.width))
        for number, key in enumerate(self.keys):
            if number % 2:
                left = (left + _hash(right, key) % np.uint64(self.height)) % np.uint64(self.height)
            else:
                right = (right + _hash(left, key) % np.uint64(self.width)) % np.uint64(self.width)
        return (left * np.uint64(self.width) + right).astype(np.int64)


def _hash(numbers: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    """Hash each number to 64 bits with SplitMix64, starting at `key`, which is below `2**63`."""
    return mix_(numbers.view(np.int64) * GOLDEN + int(key)).view(np.uint64)
